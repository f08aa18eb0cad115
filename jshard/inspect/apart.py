"""What units that are never gathered send: the model's own, told apart from what the plan has asked for."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jshard._mesh import FSDP
from jshard._placement import Placement, axes_of
from jshard._plan import ShardPlan
from jshard.inspect.module import item_bytes
from jshard.inspect.steps import Window

Array = tuple[str, tuple[int, ...]]


def told_apart(windows: Iterable[Window], plan: ShardPlan) -> tuple[list[Window], list[Window]]:
    """The collectives that the plan is about, and those of units that are never gathered.

    Of one that the compiler joined of both, the arrays are told apart by their shapes.
    """
    names = {part for unit in plan.units if not unit.gathered for part in unit.name.split("+")}
    known = {
        _sorted(dims) for leaf in plan.leaves if leaf.placement.gathered for dims in _of_layers(leaf.placement, plan)
    }
    planned, own = [], []
    for window in windows:
        if names.isdisjoint(window.units):
            planned.append(window)
        elif names.issuperset(window.units):
            own.append(window)
        else:
            planned.append(_with(window, [a for a in window.arrays if _sorted(a[1]) in known]))
            own.append(_with(window, [a for a in window.arrays if _sorted(a[1]) not in known]))
    return planned, own


def gathered_anyway(windows: Iterable[Window], plan: ShardPlan) -> list[tuple[Window, list[Array]]]:
    """The collectives of units that are never gathered that hold a whole parameter or gradient, with these arrays."""
    wholes, shards = set(), set()
    for placement in (leaf.placement for leaf in plan.leaves):
        if not placement.gathered and placement.dim is not None:
            whole, shard = _shapes(placement, plan)
            wholes |= {_sorted(whole), _sorted(placement.shape)}
            shards.add(_sorted(shard))
    of_kind = lambda kind: shards if kind == "reduce-scatter" else wholes
    found = [(w, [a for a in w.arrays if _sorted(a[1]) in of_kind(w.kind)]) for w in windows]
    return [(window, arrays) for window, arrays in found if arrays]


def _sorted(dims: tuple[int, ...]) -> tuple[int, ...]:
    """A shape in the form in which it is compared: a compiler transposes what it gathers."""
    return tuple(sorted(n for n in dims if n != 1))


def _shapes(placement: Placement, plan: ShardPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """On one device: of the parameter gathered over `fsdp`, and of its shard."""
    degrees = dict(plan.mesh)
    cut = lambda axes: math.prod(degrees[axis] for axis in axes)
    dims = [(n, axes_of(entry)) for n, entry in zip(placement.stored_shape, placement.spec, strict=True)]
    whole = tuple(n // cut(a for a in axes if a != FSDP) for n, axes in dims)
    return whole, tuple(n // cut(axes) for n, axes in dims)


def _of_layers(placement: Placement, plan: ShardPlan) -> set[tuple[int, ...]]:
    """The same, and of the layers in a stack."""
    return {shape[i:] for shape in _shapes(placement, plan) for i in range(len(shape))}


def _with(window: Window, arrays: Sequence[Array]) -> Window:
    """A collective with some of its arrays."""
    scattered = len(window.group) if window.kind == "reduce-scatter" else 1
    sizes: dict[str, int] = {}
    for dtype, dims in arrays:
        sizes[dtype] = sizes.get(dtype, 0) + math.ceil(math.prod(dims) * item_bytes(dtype)) * scattered
    return dataclasses.replace(window, arrays=tuple(arrays), sizes=tuple(sizes.items()))
