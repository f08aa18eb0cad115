"""What a plan sends in a step, and which collectives of a compiled program that plan is about."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from jshard.inspect.hlo import Window
from jshard.inspect.hlo.collectives import KINDS, ring_bytes
from jshard.inspect.hlo.module import item_bytes
from jshard.plans.mesh import DATA_AXES, FSDP
from jshard.plans.placement import Placement, axes_of
from jshard.plans.plan import LeafPlan, ShardPlan


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


# What units that are never gathered send is the model's own, and so is what its lines that mix examples send.

Array = tuple[str, tuple[int, ...]]


def split_by_plan(windows: Iterable[Window], plan: ShardPlan) -> tuple[list[Window], list[Window]]:
    """The collectives that the plan is about, and those of units that are never gathered.

    Where a program does not say of which unit one is, those that read it do, if what is sent was computed. A compiler
    joins collectives, too: there the arrays are distinguished by their shapes. Of units that are gathered all count but
    what has the shape of a parameter that never is; of both together, and of what has no unit, those that have the
    shape of a parameter that is. All-reduces count as the former: small arrays are reduced as one, so that no shape is
    left.
    """
    names = {part for unit in plan.units if not unit.gathered for part in unit.name.split("+")}
    if not names:
        return list(windows), []
    known, theirs = _shapes_of(plan, gathered=True), _shapes_of(plan, gathered=False)
    planned, own = [], []
    for window in windows:
        whose = window.units or window.read_by
        if whose and names.issuperset(whose):
            own.append(window)
            continue
        is_known = window.kind == "all-reduce" or (bool(window.units) and names.isdisjoint(window.units))
        is_ours = lambda dims, is_known=is_known: dims in known or (is_known and dims not in theirs)
        ours = [array for array in window.arrays if is_ours(comparable(array[1]))]
        rest = [array for array in window.arrays if array not in ours]
        planned += [with_arrays(window, ours) if rest else window] if ours or not rest else []
        own += [with_arrays(window, rest)] if rest else []
    return planned, own


def gathered_anyway(windows: Iterable[Window], plan: ShardPlan) -> list[tuple[Window, list[Array]]]:
    """The collectives of units that are never gathered that hold a whole parameter or gradient, with these arrays."""
    wholes, shards = set(), set()
    for placement in (leaf.placement for leaf in plan.leaves):
        if not placement.gathered and placement.dim is not None:
            whole, shard = shapes_on_device(placement, plan)
            wholes |= {comparable(whole), comparable(placement.shape)}
            shards.add(comparable(shard))
    of_kind = lambda kind: shards if kind == "reduce-scatter" else wholes
    found = [(w, [a for a in w.arrays if comparable(a[1]) in of_kind(w.kind)]) for w in windows]
    return [(window, arrays) for window, arrays in found if arrays]


def summed_over_copies(plan: ShardPlan) -> dict[tuple[str, ...], int]:
    """Elements that a compiler may all-reduce over the axes along which parameters that are never gathered are copies.

    Those are the gradients of their shards.
    """
    sums: dict[tuple[str, ...], int] = collections.defaultdict(int)
    for leaf in plan.leaves:
        placement = leaf.placement
        if leaf.trained and not placement.gathered and (axes := copied_over(placement, dict(plan.mesh))):
            sums[axes] += placement.stored_size // placement.shards
    return sums


def _shapes_of(plan: ShardPlan, *, gathered: bool) -> set[tuple[int, ...]]:
    """Shapes of the parameters that are gathered, or of those that never are: whole, shards, and layers of a stack."""
    placements = [leaf.placement for leaf in plan.leaves if leaf.placement.gathered == gathered]
    shapes = {shape for p in placements for shape in (p.shape, *shapes_on_device(p, plan))}
    return {comparable(shape[i:]) for shape in shapes for i in range(len(shape))}


def comparable(dims: tuple[int, ...]) -> tuple[int, ...]:
    """A shape in the form in which it is compared: a compiler transposes what it gathers."""
    return tuple(sorted(n for n in dims if n != 1))


def shapes_on_device(placement: Placement, plan: ShardPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """On one device: of the parameter gathered over `fsdp`, and of its shard."""
    degrees = dict(plan.mesh)
    cut = lambda axes: math.prod(degrees[axis] for axis in axes)
    dims = [(n, axes_of(entry)) for n, entry in zip(placement.stored_shape, placement.spec, strict=True)]
    whole = tuple(n // cut(a for a in axes if a != FSDP) for n, axes in dims)
    return whole, tuple(n // cut(axes) for n, axes in dims)


def with_arrays(window: Window, arrays: Sequence[Array]) -> Window:
    """A collective with some of its arrays; one that scatters has parts of them in its result."""
    parts = window.full_bytes // sum(map(array_bytes, window.arrays))
    sizes: dict[str, int] = collections.defaultdict(int)
    for array in arrays:
        sizes[array[0]] += array_bytes(array) * parts
    return dataclasses.replace(window, arrays=tuple(arrays), sizes=tuple(sizes.items()))


def array_bytes(array: Array) -> int:
    """Bytes of an array of a collective's result."""
    dtype, dims = array
    return math.prod(dims) * math.ceil(item_bytes(dtype))


def without_mixing(windows: Iterable[Window]) -> tuple[list[Window], list[Window]]:
    """The collectives of parameters and whatever else, and those of the model's own mixing.

    A compiler joins small ones of both. There, arrays are the model's own if they have the bytes that it asked for.
    """
    others, own = [], []
    for window in windows:
        if not window.mixing or window.is_mixing:
            (own if window.mixing else others).append(window)
            continue
        sizes = {m.bytes for m in window.mixing}
        mine = [array for array in window.arrays if array_bytes(array) in sizes]
        rest = [array for array in window.arrays if array_bytes(array) not in sizes]
        own += [dataclasses.replace(with_arrays(window, mine), is_mixing=True)] if mine else []
        others += [dataclasses.replace(with_arrays(window, rest), mixing=())] if rest else []
    return others, own
