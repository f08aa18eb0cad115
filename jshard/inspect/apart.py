"""What units that are never gathered send: the model's own, told apart from what the plan has asked for."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from jshard._mesh import FSDP
from jshard._placement import Placement, axes_of
from jshard._shard_plan import ShardPlan
from jshard.inspect.communication import copied_over
from jshard.inspect.module import item_bytes
from jshard.inspect.steps import Window

Array = tuple[str, tuple[int, ...]]


def told_apart(windows: Iterable[Window], plan: ShardPlan) -> tuple[list[Window], list[Window]]:
    """The collectives that the plan is about, and those of units that are never gathered.

    Where a program does not say of which unit one is, those that read it do, if what is sent was computed. A compiler
    joins collectives, too: there the arrays are told apart by their shapes. Of units that are gathered all count but
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
        is_told = window.kind == "all-reduce" or (bool(window.units) and names.isdisjoint(window.units))
        is_ours = lambda dims, is_told=is_told: dims in known or (is_told and dims not in theirs)
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
