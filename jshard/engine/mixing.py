"""Findings about a traced call beyond its plan: communication of mixing, unsplit work, layers in loops.

A model that uses its whole batch (statistics, in-batch negatives, sorts) needs the other shards' examples. The result
is correct, but needs collectives that are neither a parameter's gather nor a gradient's reduction: they are
recorded per line of the user's code, with a warning if they are large.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jshard import _compat
from jshard.engine.context import in_shapes_only
from jshard.engine.rules.products import flops
from jshard.errors import CallError
from jshard.plans.mesh import CONTEXT
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan
from jshard.plans.units import Unit

_HOW = {
    "whole": "gathered from all data shards",
    "made whole": "a constant that every device computes whole",
    "sum": "summed over the data shards",
    "max": "reduced over the data shards",
    "move": "exchanged between data shards",
}


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A collective other than parameter gathers and gradient reductions, or all that a line sends in a step."""

    kind: str  # a key of `_HOW`; "made whole": of a constant no shard can be made, so that it is cut from the whole
    operation: str  # the primitive that needs it; "output" for the program's results
    where: str  # "file:line (function)" of the user's code; empty for the model's results
    times: int  # how many collectives
    bytes: int  # of their results on one device, in all trips of the loops around

    def repeated(self, trips: float) -> "Mixing":
        """The record multiplied by a loop's trips."""
        return dataclasses.replace(self, bytes=round(self.bytes * trips))

    @property
    def how(self) -> str:
        """A description of the data sent."""
        return _HOW[self.kind]

    @property
    def line(self) -> str:
        """The line, or a description if there is none."""
        return self.where or "results and state of the model"

    def __str__(self) -> str:
        return f"{self.line}: {self.operation}, {self.how}, {self.bytes:,} bytes per step"


@dataclasses.dataclass(frozen=True)
class LocalProduct:
    """One product of arrays, or all of a loop: operations of one device; where all compute the same, its place."""

    flops: float
    is_whole: bool
    where: str  # the user's line, if it is whole
    shapes: tuple[tuple[int, ...], ...] = ()  # of operands and result: a line may have several products

    @property
    def place(self) -> "ProductPlace":
        """Its line and shapes."""
        return self.where or "the model", self.shapes

    def repeated(self, trips: float) -> "LocalProduct":
        """The record multiplied by a loop's trips."""
        return dataclasses.replace(self, flops=self.flops * trips)


ProductPlace = tuple[str, tuple[tuple[int, ...], ...]]
"""The user's line of a product, and its shapes."""


def shapes_of(eqn: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the operands and results of an equation."""
    return tuple(tuple(atom.aval.shape) for atom in (*eqn.invars, *eqn.outvars))


WARNED_BYTES = 2**20
WARNED_SHARE = 0.01
"""A share of the bytes that the parameters' own collectives send: two gathers and a reduce-scatter of each."""

COMPUTED_WHOLE = ("whole", "made whole")
"""Kinds of operations that have no rule for their operands: each device computes them for the whole batch."""

_OPAQUE = ("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call")
_SCOPE = re.compile(r"mixing\[([^\]|]*)\|([^\]|]*)\|([^\]|]*)\|(\d+)\|([^\]|]*)\|(\d+)\]")


def scope_of(one: Mixing, size: int) -> str:
    """The name of a collective in the compiled program: `mixing[sum|reduce_sum|vae.py|35|encode|64]`.

    The last number is the bytes of its result in one execution.
    """
    place = re.fullmatch(r"(.*):(\d+) \((.*)\)", one.where)
    file, line, function = place.groups() if place else ("", "0", "")
    return f"mixing[{one.kind}|{one.operation}|{file}|{line}|{function}|{size}]"


def named_in(name: str) -> tuple[Mixing, ...]:
    """The collectives of a name in a compiled program: the innermost one of each name that was joined."""
    return tuple(
        Mixing(kind, operation, f"{file}:{line} ({function})" if file else "", 1, int(size))
        for kind, operation, file, line, function, size in _SCOPE.findall(name)[-1:]
    )


Key = tuple[str, tuple[tuple[str, int], ...], frozenset[tuple[Any, int]]]
_seen: dict[Key, dict[Hashable, list[Mixing]]] = {}
_warned: set[tuple[Key, str]] = set()


def _key_of(kind: str, mesh: Iterable[tuple[str, int]], placements: Iterable[Placement]) -> Key:
    """A key of a model whose record has other paths in its plan than in a call: its class and placements.

    Without dtypes, which differ between the two after a cast of the model.
    """
    places = collections.Counter((p.shape, p.spec, p.layers, p.gathered) for p in placements)
    return kind, tuple(mesh), frozenset(places.items())


def _key_of_root(unit: Unit) -> Key:
    return _key_of(unit.kind, unit.mesh.shape.items(), (m.placement for m in unit.members))


def mixing_of(plan: ShardPlan) -> tuple[Mixing, ...]:
    """The mixing communication of a model's last traced calls; empty if none was traced."""
    keys = {}
    for i, unit in enumerate(plan.units):
        is_inside = lambda path, u=unit: any(f"{path}/".startswith(f"{name}/") for name in u.name.split("+"))
        inside = [leaf.placement for leaf in plan.leaves if i == 0 or is_inside(leaf.path)]
        keys[_key_of(unit.kind, plan.mesh, inside)] = None
    return tuple(_together(one for key in keys for found in _seen.get(key, {}).values() for one in found))


def note(unit: Unit, call: str, part: str, moved: Sequence[Mixing], over: str = "") -> None:
    """Records what a program sends, and warns of large amounts, once for each line of a model.

    `call` is the model and its method, such as `GPT.__call__`, `over` the inner axis that it is sent over. An earlier
    record of the same part is replaced.
    Raises for an operation that is computed whole if the annotation has fallback="error".
    """
    found = _together(moved)
    if unit.policy.fallback == "error" and (bad := [one for one in found if one.kind in COMPUTED_WHOLE]):
        raise CallError(
            "The model has operations that every device computes for the whole batch.",
            where=_listed(bad),
            why='each needs more of the batch than a data shard has, and the annotation has fallback="error".',
            do="f = js.per_example(f)  # if f treats each example independently; else\n"
            'js.fully_shard(model, mesh=mesh, fallback="warn")',
        )
    key = _key_of_root(unit)
    if len(_seen) >= 64 and key not in _seen:
        _seen.pop(next(iter(_seen)))
    _seen.setdefault(key, {})[call, part, over] = found
    sent = 3 * sum(m.placement.gathered_bytes for m in unit.members if m.placement.dim is not None)
    limit = max(WARNED_BYTES, WARNED_SHARE * sent)
    large = [one for one in found if one.bytes >= limit and (key, one.where) not in _warned]
    if large:
        _warned.update((key, one.where) for one in large)
        how = "mixes the examples of its batch, which sends data between the data shards:"
        how = "looks beyond its part of a sequence, which sends data over the context axis:" if over == CONTEXT else how
        text = [f"{call.split('.')[0]} {how}"]
        text += _listed(large)
        if opaque := [one.operation for one in large if one.kind in COMPUTED_WHOLE and one.operation in _OPAQUE]:
            one = f"js.per_example(f) around a function f with a {opaque[0]}"
            text.append(f"{one} declares that it treats each example independently.")
        _compat.warn_user("\n  ".join(text))


def _listed(found: Sequence[Mixing]) -> list[str]:
    return _shortened(list(map(str, found)), 8)


def _shortened(texts: list[str], most: int, kind: str = "") -> list[str]:
    more = len(texts) - most
    return [*texts[:most], f"and {more} more{kind}"] if more > 0 else texts


def _together(found: Iterable[Mixing]) -> list[Mixing]:
    """One record for each line, operation and kind, the largest first."""
    alike: dict[tuple[str, str, str], Mixing] = {}
    for one in found:
        key = one.kind, one.operation, one.where
        before = alike.get(key, Mixing(*key, 0, 0))
        alike[key] = Mixing(*key, before.times + one.times, before.bytes + one.bytes)
    return sorted(alike.values(), key=lambda one: -one.bytes)


# ---- the batch of a call: which arguments are split over the data shards, and a warning for work that is not split

# The results equal those of one device either way: arrays without a batch are whole on every device.

WARNED_FLOPS = 1e8
WARNED_PART = 0.1
"""A share of the products of one device, in forward: of those that each device would not compute if all were split."""

_SHOWN = 4
_warned_whole: set[tuple[str, bool, tuple[str, ...]]] = set()


def batch_size(arrays: Sequence[Any], degree: int) -> int:
    """The size of the batch: the leading size that most of the arguments have, by count, then by elements.

    A size that is another dim of a second array comes last, except that of the first argument: a mask (tokens, tokens)
    or positions (tokens, ...) beside ids (examples, tokens). This only affects speed: the results are the same if an
    array without a batch is split, or one with a batch is whole.
    """
    votes: dict[int, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for x in arrays:
        if x.ndim and x.shape[0] and x.shape[0] % degree == 0:
            count, size = votes[x.shape[0]]
            votes[x.shape[0]] = count + 1, size + x.size
    first = next(iter(votes), 0)
    is_inner = lambda n: n != first and any(n in x.shape[1:] and x.shape[0] != n for x in arrays if x.ndim)
    return max(votes, key=lambda n: (not is_inner(n), *votes[n]), default=0)


def warn_of_whole(
    call: str,
    arguments: list[Any],
    batch: int,
    degree: int,
    noted: list[Any],
    products_of_examples: Callable[[], set[ProductPlace]],
) -> None:
    """Warns of large products of forward that every device computes whole; once for a call and their lines.

    A single example is computed this way on any number of devices. `products_of_examples` returns the products that
    depend on the examples; the others depend on parameters and constants alone.
    """
    products = [one for one in noted if isinstance(one, LocalProduct)]
    lines: dict[str, float] = collections.defaultdict(float)
    for one in products:
        if one.is_whole:
            lines[one.where or "the model"] += one.flops
    total, whole = sum(one.flops for one in products), sum(lines.values())
    is_old_key = lambda x: x.dtype == jnp.uint32 and x.ndim == 1 and x.size in (2, 4)
    is_key = lambda x: is_old_key(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    rows = [x for x in arguments if x.ndim and x.shape[0] > 1 and not is_key(x)]
    others = [x for x in rows if x.shape[0] != batch]
    more_than_its_share = whole * (1 - 1 / degree)
    if not rows or more_than_its_share < max(WARNED_FLOPS, WARNED_PART * total) or in_shapes_only():
        return
    listed = sorted(lines, key=lambda line: -lines[line])
    if (key := (call, bool(batch), tuple(listed))) in _warned_whole:
        return
    _warned_whole.add(key)
    where = _shortened([f"{line}: {lines[line] / 1e9:,.1f} GFLOP" for line in listed], _SHOWN, " lines")
    share = f"{whole / total:.0%} of its multiplications"
    what = f"{call}: every device computes products for all examples, {share}:"
    if others:
        _compat.warn_user("\n  ".join([what, *where, *_why_whole(rows, others, batch, degree)]))
        return
    if products_of_examples().isdisjoint(one.place for one in products if one.is_whole):
        what = f"{call}: every device computes products of parameters and constants whole, {share}:"
        why = f"They do not depend on the batch, so its {degree} parts do not divide them: {_amounts(whole, total)}."
        do = "Apply the factors to the examples one by one, (x @ a) @ b; or compute the product once, outside the step."
    else:
        why = f"The {degree} data shards do not divide them, although the batch is split: {_amounts(whole, total)}."
        do = "f = js.per_example(f)  # around these lines, if they treat each example independently"
    _compat.warn_user("\n  ".join([what, *where, why, do]))


def _amounts(whole: float, total: float) -> str:
    return f"{whole / 1e9:,.1f} of {total / 1e9:,.1f} GFLOP on each device"


def _why_whole(rows: Sequence[Any], others: Sequence[Any], batch: int, degree: int) -> tuple[str, str]:
    """Why arguments are not split, and how to change that."""
    shapes = lambda rows: ", ".join(_shortened([f"{x.dtype}{list(x.shape)}" for x in rows], _SHOWN))
    if not batch:
        size = max(rows, key=lambda x: x.size).shape[0]
        fewer = size // degree * degree
        line = f" To drop the last of {size}: x = x[:{fewer}]" if fewer else ""
        why = f"No argument has a leading dim that divides by {degree}, the number of data shards: {shapes(rows)}."
        return why, f"A batch size that is a multiple of {degree} is split.{line}"
    largest = max(others, key=lambda x: x.size)
    why = f"Arguments with a leading dim of {batch} are split; these are whole: {shapes(others)}."
    if batch not in largest.shape[1:-1]:
        return (
            why,
            f"If their rows are also examples: the same number in all arguments, a multiple of {degree}.",
        )
    dim = largest.shape.index(batch, 1)
    return why, (
        f"If dim {dim} is the examples, move it first: x = jnp.moveaxis(x, {dim}, 0)"
        f"; in the model: x = jnp.moveaxis(x, 0, {dim})"
    )


def products_that_depend(jaxpr: Any, depends: Sequence[bool]) -> set[ProductPlace]:
    """The products of a program that depend on some of its operands, such as the examples of a batch."""
    return _followed(jaxpr, depends, ())[1]


def _followed(jaxpr: Any, depends: Sequence[bool], around: tuple[Any, ...]) -> tuple[list[bool], set[ProductPlace]]:
    """Which results of a program depend on these operands, and such products."""
    known = {id(v) for v, is_one in zip(jaxpr.invars, depends, strict=True) if is_one}
    products: set[ProductPlace] = set()
    for eqn in jaxpr.eqns:
        operands = [id(atom) in known for atom in eqn.invars]
        if not any(operands):
            continue
        results = [True] * len(eqn.outvars)
        if flops(eqn):
            products.add((_first_place((eqn, *reversed(around))), shapes_of(eqn)))
        if inner := list(jex.jaxprs_in_params(eqn.params)):
            followed = [_followed_inside(program, eqn, operands, (*around, eqn)) for program in inner]
            products.update(*(more for _, more in followed))
            outs = [found for found, _ in followed if len(found) == len(results)]
            results = [any(each) for each in zip(*outs, strict=True)] or results
        known |= {id(v) for v, is_one in zip(eqn.outvars, results, strict=True) if is_one}
    return [id(atom) in known for atom in jaxpr.outvars], products


def _followed_inside(
    program: Any, eqn: Any, operands: list[bool], around: tuple[Any, ...]
) -> tuple[list[bool], set[ProductPlace]]:
    """The same of a program in an equation; in a loop, until what it carries depends on no more."""
    jaxpr = getattr(program, "jaxpr", program)
    name, num = eqn.primitive.name, len(jaxpr.invars)
    if name == "while" or num > len(operands):  # its programs take some of the operands, each others
        return _followed(jaxpr, [True] * num, around)
    inside = operands[len(operands) - num :]  # a branch takes all but the index
    if name != "scan":
        return _followed(jaxpr, inside, around)
    first, num_carried = eqn.params["num_consts"], eqn.params["num_carry"]
    while True:
        found, products = _followed(jaxpr, inside, around)
        carried = slice(first, first + num_carried)
        joined = [a or b for a, b in zip(inside[carried], found[:num_carried], strict=True)]
        if joined == inside[carried]:
            return found, products
        inside[carried] = joined


def _first_place(equations: Iterable[Any]) -> str:
    return next(filter(None, map(_compat.user_place, equations)), "") or "the model"


# ---- layers of a loop that form no unit: the root gathers each when it is needed; a plan learns this from a trace

_LARGE_BYTES = 64 * 2**20  # of the gathered copy of all layers; below that the time is negligible

_seen_layers: dict[Key, set[str]] = {}


def note_layers(unit: Unit, rows: dict[str, Placement]) -> None:
    """Records the parameters, by path, of which a region gathered one layer in a loop; warns of large ones once."""
    if not rows:
        return
    key = _key_of_root(unit)
    _seen_layers.setdefault(key, set()).update(rows)
    unknown = {path: p for path, p in rows.items() if p.layers == 1 or unit.placement.stacked}  # else its plan has them
    sizes = collections.Counter[str]()
    for path, stack in _stacks(unknown).items():
        sizes[stack] += unknown[path].gathered_bytes
    large = {stack: size for stack, size in sizes.items() if size >= _LARGE_BYTES and (key, stack) not in _warned}
    if not large:
        return
    _warned.update((key, stack) for stack in large)
    listed = "".join(f"\n  {stack}  {n} bytes, by (root), each layer when it is needed" for stack, n in large.items())
    setting = "mesh=mesh, placement=js.ShardPlacement(stacked=1)"
    lines = "".join(f"\n  js.fully_shard({_written(stack)}, {setting})" for stack in large)
    _compat.warn_user(
        f"{len(large)} stack(s) of layers of {unit.kind} form no unit, and are not gathered ahead of their use:{listed}"
        f"\n  Before the line of the model:{lines}"
    )


def as_traced(plan: ShardPlan) -> ShardPlan:
    """A plan with the layers that the last traced calls of its model gathered one at a time."""
    key = _key_of(plan.units[0].kind, plan.mesh, (leaf.placement for leaf in plan.leaves))
    stacks = _stacks(_seen_layers.get(key, ()))

    def by_layer(leaf: LeafPlan) -> LeafPlan:
        placement, stack = leaf.placement, stacks.get(leaf.path, "")
        if not stack or leaf.stack or leaf.owner != ():
            return leaf
        layers = placement.shape[0] if placement.layers == 1 else placement.layers
        return dataclasses.replace(leaf, stack=stack, placement=dataclasses.replace(placement, layers=layers))

    return dataclasses.replace(plan, leaves=tuple(map(by_layer, plan.leaves)))


def _stacks(paths: Iterable[str]) -> dict[str, str]:
    """The module of layers of each parameter: the common path of those below one child of the root."""
    below: dict[str, list[str]] = {}
    for path in paths:
        below.setdefault(path.split("/")[0], []).append(path)
    found = {}
    for together in below.values():
        modules = [path.split("/")[:-1] for path in together]
        alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*modules, strict=False))
        found |= dict.fromkeys(together, "/".join(names[0] for names in alike) or "(root)")
    return found


def _written(path: str) -> str:
    """A path of modules in Python syntax: `model.encoder.layers`, `model.towers[0]`."""
    return re.sub(r"\.(\d+)\b", r"[\1]", "model" if path == "(root)" else f"model.{path.replace('/', '.')}")
