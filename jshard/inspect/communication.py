"""What a plan and a traced program send: the collectives of one step, leaf by leaf, before anything is compiled."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jshard import _compat
from jshard.inspect.hlo.collectives import KINDS, asked_group, axes_of_groups, ring_bytes
from jshard.inspect.hlo.module import item_bytes
from jshard.plans.mesh import DATA_AXES, FSDP
from jshard.plans.placement import Placement, axes_of
from jshard.plans.plan import LeafPlan, ShardPlan

_AXES_IN = "reduction_axes", "gathering_axes", "reduce_scatter_axes", "params", "reduction", "out_sharding"
_TYPE = re.compile(r"tensor<((?:\d+x)*)([^>]+)>")
_DIMS = re.compile(r"<@[\w.]+, \[(.*?)\]")


@dataclasses.dataclass(frozen=True)
class Sent:
    """Collectives of one kind."""

    kind: str  # one of `jshard.inspect.hlo.collectives.KINDS`
    axes: tuple[str, ...]  # the mesh axes that it runs over, in the order of the mesh


Amounts = Mapping[Sent, tuple[int, float]]
"""How often each runs in one run of the program, and the sum of the whole arrays' bytes (`Collective.full_bytes`)."""


def partitioned_collectives(lowered: Any, mesh: Mesh | AbstractMesh) -> Amounts | None:
    """The collectives of a lowered program after its shardings are followed; None where that cannot be known."""
    module = _compat.partitioned(lowered)
    if module is None:
        return None
    with module.context:
        return _TrafficReader(module, mesh).of_function("main")


class _TrafficReader:
    """Walks the functions of a module from its first, through loops, branches and calls."""

    def __init__(self, module: Any, mesh: Mesh | AbstractMesh) -> None:
        self._functions = {op.attributes["sym_name"].value: op for op in module.body.operations if _name(op) == _FUNC}
        self._mesh, self._degrees = mesh, dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        self._known: dict[str, Amounts] = {}

    def of_function(self, name: str) -> Amounts:
        """What one call of a function sends."""
        if name not in self._known:
            self._known[name] = self._of_regions(self._functions[name])
        return self._known[name]

    def _of_regions(self, op: Any) -> Amounts:
        return _added(self._of(inner) for region in op.regions for block in region.blocks for inner in block.operations)

    def _of(self, op: Any) -> Amounts:
        dialect, _, what = _name(op).partition(".")
        kind = what.replace("_", "-")
        if kind in KINDS and dialect in ("sdy", "stablehlo"):
            axes = self._named(op) if dialect == "sdy" else self._grouped(op, kind)
            return {Sent(kind, axes): (1, self._full_bytes(op, kind, axes))} if axes else {}
        if what == "add" and (twice := self._summed(op)) is not None:
            return {twice[0]: (-1, -twice[1])}
        if _name(op).endswith("func.call"):
            return self.of_function(op.attributes["callee"].value)
        if what == "case":  # the branch that sends most: which one runs is not known
            branches = [_added(map(self._of, block.operations)) for r in op.regions for block in r.blocks]
            return max(branches, key=lambda found: sum(size for _, size in found.values()), default={})
        inner = self._of_regions(op)
        return _times(inner, _rounds(op)) if what == "while" and inner else inner

    def _summed(self, op: Any) -> tuple[Sent, float] | None:
        """The all-reduce that a value is, or a sum of such: XLA adds first, and reduces what is added once."""
        if op is None or _name(op) not in ("sdy.all_reduce", "stablehlo.add"):
            return None
        if _name(op) == "sdy.all_reduce":
            axes = self._named(op)
            return Sent("all-reduce", axes), self._full_bytes(op, "all-reduce", axes)
        parts = [self._summed(_maker(value)) for value in op.operands]
        return parts[0] if parts[0] == parts[1] else None

    def _named(self, op: Any) -> tuple[str, ...]:
        """Axes of a collective that the partitioner made."""
        text = next((str(op.attributes[name]) for name in _AXES_IN if name in op.attributes), "")
        return tuple(axis for axis, n in self._degrees.items() if n > 1 and f'"{axis}"' in text)

    def _grouped(self, op: Any, kind: str) -> tuple[str, ...]:
        """Axes of a collective that the program had."""
        named = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
        meshes = {"@mesh": ", ".join(f'"{axis}"={n}' for axis, n in self._degrees.items())}
        group = asked_group(_name(op), kind, f"{named} = {op.attributes[named]}", meshes)
        return axes_of_groups(group, self._mesh)

    def _full_bytes(self, op: Any, kind: str, axes: tuple[str, ...]) -> float:
        """Bytes of the whole arrays, as of `Collective.full_bytes`: of those, what one device has part in."""
        value = op.operands[0] if kind == "reduce-scatter" else op.results[0]
        sizes, dtype = _TYPE.match(str(value.type)).groups()  # type: ignore[union-attr]
        size = math.prod(int(n) for n in sizes.split("x") if n) * item_bytes(dtype)
        split = [axis for axis in self._degrees if f'"{axis}"' in _sharding(op)]
        whole = kind not in ("all-to-all", "collective-permute")  # of those one device's array counts
        return size / math.prod(self._degrees[a] for a in split if not (whole and a in axes))


_FUNC = "func.func"


def _name(op: Any) -> str:
    return op.operation.name


def _sharding(op: Any) -> str:
    """How the dims of an operation's result are split, as text."""
    text = next((str(op.attributes[name]) for name in ("out_sharding", "sdy.sharding") if name in op.attributes), "")
    found = _DIMS.search(text)
    return found.group(1) if found else ""


def _rounds(loop: Any) -> int:
    """How often a loop runs that counts up to a constant from 0, as those of `lax.scan`; 1 for others."""
    compared = _maker(list(loop.regions[0].blocks[0].operations)[-1].operands[0])
    limit = _maker(compared.operands[1]) if compared is not None and len(compared.operands) == 2 else None
    if limit is None or not _name(limit).endswith(".constant"):
        return 1
    found = re.match(r"dense<(\d+)>", str(limit.attributes["value"]))
    return int(found.group(1)) if found else 1


def _maker(value: Any) -> Any:
    """The operation that made a value; None for an argument of a block."""
    return value.owner if hasattr(value.owner, "attributes") else None


def _times(found: Amounts, rounds: int) -> Amounts:
    return {one: (count * rounds, size * rounds) for one, (count, size) in found.items()}


def _added(parts: Iterator[Amounts]) -> Amounts:
    counts: collections.Counter[Sent] = collections.Counter()
    sizes: dict[Sent, float] = collections.defaultdict(float)
    for part in parts:
        for one, (count, size) in part.items():
            counts[one] += count
            sizes[one] += size
    return {one: (count, sizes[one]) for one, count in counts.items()}


# What a plan sends: the collectives of one step of training, leaf by leaf, before anything is compiled.


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step."""

    kind: str  # `all-gather`, `reduce-scatter` or `all-reduce`
    axes: tuple[str, ...]  # the mesh axes that it runs over
    group_size: int  # devices of a group
    dtype: str  # dtype on the wire
    full_bytes: int  # bytes of the whole arrays, before they are split over the group
    purpose: str  # what it is for

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, by the ring algorithm."""
        return ring_bytes(self.kind, self.full_bytes, self.group_size)


def traffic_of(plan: ShardPlan) -> tuple[Traffic, ...]:
    """The collectives of one forward and backward pass as the plan asks for them.

    A compiler leaves out the second gather of a parameter that backward does not need, such as most biases. For units
    that are never gathered nothing is asked.
    """
    sums: dict[Traffic, int] = collections.defaultdict(int)
    reshard = {unit.name: unit.reshard_after_forward for unit in plan.units}
    for leaf in plan.leaves:
        for one in _of_leaf(leaf, leaf.by_layer or reshard[leaf.unit], dict(plan.mesh)):
            sums[dataclasses.replace(one, full_bytes=0)] += one.full_bytes
    found = [dataclasses.replace(one, full_bytes=total) for one, total in sums.items()]
    return tuple(sorted(found, key=lambda one: (KINDS.index(one.kind), len(one.axes))))


def _of_leaf(leaf: LeafPlan, reshard: bool | int, degrees: dict[str, int]) -> Iterator[Traffic]:
    placement = leaf.placement
    if not placement.gathered:
        return  # what it sends is the model's own
    fsdp, same = degrees[FSDP], copied_over(placement, degrees)
    num_same = math.prod(degrees[a] for a in same)
    reduce, gather = placement.reduce_dtype, placement.gathered_dtype
    full = placement.gathered_bytes
    reduced = full // jnp.dtype(gather).itemsize * jnp.dtype(reduce).itemsize
    if placement.dim is None:
        if same and leaf.trained:
            yield Traffic("all-reduce", same, num_same, reduce, reduced, "gradients of the replicated")
        return
    yield Traffic("all-gather", (FSDP,), fsdp, gather, full, "parameters for forward")
    if reshard is not False:
        size = fsdp if reshard is True else int(reshard)
        yield Traffic("all-gather", (FSDP,), size, gather, full, "parameters for backward")
    if not leaf.trained:
        return
    yield Traffic("reduce-scatter", (FSDP,), fsdp, reduce, reduced, "gradients")
    if same:
        yield Traffic("all-reduce", same, num_same, reduce, reduced // fsdp, "gradients, over replicas")


def copied_over(placement: Placement, degrees: Mapping[str, int]) -> tuple[str, ...]:
    """The data axes along which the stored shard is the same."""
    on = {name for entry in placement.spec for name in axes_of(entry)}
    return tuple(axis for axis in DATA_AXES if degrees.get(axis, 1) > 1 and axis not in on)
