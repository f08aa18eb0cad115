"""Which collectives of a program the plan is about: the others are the model's own.

The model's own are those of units that are never gathered, and those of lines that mix the examples of the batch. A
compiler joins small collectives, so that one may be partly the plan's and partly the model's own: it is then split by
its arrays.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jshard.inspect.communication.of_parameter import copied_over
from jshard.inspect.hlo import Window
from jshard.inspect.hlo.module import HloArray
from jshard.plans.model_axes import degree_of
from jshard.plans.placement import Placement
from jshard.plans.plan import ShardPlan

Dims = tuple[int, ...]


class CollectivePart(NamedTuple):
    """Some of the arrays of a collective."""

    window: Window
    arrays: list[HloArray]

    @property
    def elements(self) -> int:
        """Elements of the arrays, over all executions."""
        return sum(array.num_elements * self.window.executions for array in self.arrays)


# ---- units that are never gathered


def split_by_plan(windows: Iterable[Window], plan: ShardPlan) -> tuple[list[Window], list[Window]]:
    """Returns the collectives that the plan is about, and those of units that are never gathered.

    If a program does not name a collective's unit, the units that read it decide, if the data sent was computed. A
    compiler also joins collectives: then arrays are distinguished by their shapes. For gathered units all arrays count
    except those with the shape of a parameter that is never gathered; for joined ones, and those without a unit, arrays
    with the shape of a gathered parameter count. All-reduces count as the former: small arrays are reduced as one, so
    no shape is left.
    """
    ungathered = _modules_never_gathered(plan)
    if not ungathered:
        return list(windows), []
    shapes = _PlannedShapes(ungathered, _shapes_of(plan, gathered=True), _shapes_of(plan, gathered=False))
    of_plan: list[Window] = []
    of_model: list[Window] = []
    for window in windows:
        units = window.units or window.read_by
        if units and ungathered.issuperset(units):
            of_model.append(window)
            continue
        planned: list[HloArray] = []
        unplanned: list[HloArray] = []
        for array in window.arrays:
            if shapes.include(array, window):
                planned.append(array)
            else:
                unplanned.append(array)
        if not unplanned:
            of_plan.append(window)
            continue
        if planned:
            of_plan.append(with_arrays(window, planned))
        of_model.append(with_arrays(window, unplanned))
    return of_plan, of_model


@dataclasses.dataclass(frozen=True)
class _PlannedShapes:
    """Distinguishes the arrays of gathered units from those of units that are never gathered, by their shapes."""

    ungathered_units: set[str]
    gathered_shapes: set[Dims]
    ungathered_shapes: set[Dims]

    def include(self, array: HloArray, window: Window) -> bool:
        """Returns whether the plan is about an array of a collective."""
        shape = comparable(array.dims)
        if shape in self.gathered_shapes:
            return True
        if shape in self.ungathered_shapes:
            return False
        # An unknown shape: a part of a parameter, or several that the compiler has put together.
        names_only_gathered_units = bool(window.units) and self.ungathered_units.isdisjoint(window.units)
        return names_only_gathered_units or window.kind == "all-reduce"


def _modules_never_gathered(plan: ShardPlan) -> set[str]:
    """Returns the paths of the modules that are never gathered; a unit has several if they were given in a list."""
    paths: set[str] = set()
    for unit in plan.units:
        if not unit.gathered:
            paths.update(unit.name.split("+"))
    return paths


def gathered_anyway(windows: Iterable[Window], plan: ShardPlan) -> list[CollectivePart]:
    """Returns the collectives that hold a whole parameter, or gradient, of a unit that is never gathered."""
    whole_shapes: set[Dims] = set()
    shard_shapes: set[Dims] = set()
    for leaf in plan.leaves:
        placement = leaf.placement
        if not placement.gathered and placement.dim is not None:  # replicated ones are whole anyway
            shapes = shapes_on_device(placement, dict(plan.mesh))
            # As it is stored, perhaps padded, and as the model has it.
            whole_shapes |= {comparable(shapes.gathered), comparable(placement.shape)}
            shard_shapes.add(comparable(shapes.shard))

    parts = []
    for window in windows:
        # The result of a reduce-scatter of a whole gradient is a shard.
        forbidden = shard_shapes if window.kind == "reduce-scatter" else whole_shapes
        arrays = [array for array in window.arrays if comparable(array.dims) in forbidden]
        if arrays:
            parts.append(CollectivePart(window, arrays))
    return parts


def summed_over_copies(plan: ShardPlan) -> dict[tuple[str, ...], int]:
    """Returns how many elements of gradients a compiler may all-reduce, by the axes over which it sums.

    Those are the shards of parameters that are never gathered, and replicated along these axes.
    """
    elements: dict[tuple[str, ...], int] = collections.defaultdict(int)
    for leaf in plan.leaves:
        placement = leaf.placement
        if leaf.trained and not placement.gathered:
            axes = copied_over(placement, dict(plan.mesh))
            if axes:
                elements[axes] += placement.stored_size // placement.shards
    return elements


# ---- lines that mix examples


def without_mixing(windows: Iterable[Window]) -> tuple[list[Window], list[Window]]:
    """Returns the collectives of parameters and everything else, and those of the model's own mixing.

    A compiler joins small ones of both. In these, arrays are the model's own if they have the bytes that it requested.
    """
    without: list[Window] = []
    of_mixing: list[Window] = []
    for window in windows:
        if not window.mixing:
            without.append(window)
            continue
        if window.is_mixing:
            of_mixing.append(window)
            continue
        # A line has no shapes on record, only the bytes of each of its collectives.
        requested_bytes = {mixing.bytes for mixing in window.mixing}
        requested: list[HloArray] = []
        of_parameters: list[HloArray] = []
        for array in window.arrays:
            if array.bytes in requested_bytes:
                requested.append(array)
            else:
                of_parameters.append(array)
        if requested:
            of_mixing.append(dataclasses.replace(with_arrays(window, requested), is_mixing=True))
        if of_parameters:
            without.append(dataclasses.replace(with_arrays(window, of_parameters), mixing=()))
    return without, of_mixing


# ---- arrays and shapes


def with_arrays(window: Window, arrays: Sequence[HloArray]) -> Window:
    """Returns a collective with only some of its arrays."""
    # Of a reduce-scatter, the result is one of several parts.
    parts_of_result = window.full_bytes // window.result_bytes
    sizes: dict[str, int] = collections.defaultdict(int)
    for array in arrays:
        sizes[array.dtype] += array.bytes * parts_of_result
    return dataclasses.replace(window, arrays=tuple(arrays), sizes=tuple(sizes.items()))


def _shapes_of(plan: ShardPlan, *, gathered: bool) -> set[Dims]:
    """Returns the shapes of parameters that are, or are never, gathered: whole, shards, and layers of a stack."""
    comparables: set[Dims] = set()
    for leaf in plan.leaves:
        placement = leaf.placement
        if placement.gathered != gathered:
            continue
        for shape in (placement.shape, *shapes_on_device(placement, dict(plan.mesh))):
            for num_leading_dims in range(len(shape)):
                # Without leading dims it is the shape of one layer of a stack, which a loop gathers alone.
                comparables.add(comparable(shape[num_leading_dims:]))
    return comparables


def comparable(dims: Dims) -> Dims:
    """Returns a shape in a form for comparison.

    A compiler transposes the arrays that it gathers, and adds dims of size 1.
    """
    return tuple(sorted(n for n in dims if n != 1))


class ShapesOnDevice(NamedTuple):
    """The shapes of a parameter on one device."""

    gathered: Dims
    shard: Dims


def shapes_on_device(placement: Placement, degrees: Mapping[str, int]) -> ShapesOnDevice:
    """Returns the shapes on one device of a parameter: over axes other than those of its unit it stays split."""
    gathered: list[int] = []
    shard: list[int] = []
    for dim, (size, entry) in enumerate(zip(placement.stored_shape, placement.spec, strict=True)):
        size_on_device = size // degree_of(entry, degrees)
        shard.append(size_on_device)
        gathered.append(size if dim == placement.dim else size_on_device)
    return ShapesOnDevice(tuple(gathered), tuple(shard))
