"""The collectives of a compiled program as table rows, and those that are the model's own."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jshard._text import folded_names, human_bytes, name_pattern
from jshard.engine.moved import Mixing
from jshard.inspect.communication import copied_over
from jshard.inspect.hlo.module import item_bytes
from jshard.inspect.hlo.schedule import Window
from jshard.inspect.tables import FittedTable, add_row, made_table
from jshard.plans.mesh import FSDP
from jshard.plans.placement import Placement, axes_of
from jshard.plans.plan import ShardPlan


class OfWindows:
    """A row of a table that stands for several collectives: its `windows`."""

    windows: tuple[Window, ...]

    @property
    def executions(self) -> int:
        """How often they run in one run of the program, together."""
        return sum(w.executions for w in self.windows)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arrays, over all executions."""
        return sum(w.full_bytes * w.executions for w in self.windows)


@dataclasses.dataclass(frozen=True)
class TrafficRow(OfWindows):
    """Collectives of a program that are alike."""

    kind: str  # `all-gather`, `reduce-scatter`, ..
    dtype: str  # on the wire, in HLO's words
    over: tuple[str, ...] | None  # the mesh axes; None if no mesh is known
    group_size: int  # devices of a group
    unit: str | None  # the unit, equal ones of a list folded as `blocks/0..11`; None if the program does not say
    phase: str | None  # `forward` or `backward`; None if the program does not say
    in_loop: bool  # they stand inside a loop
    windows: tuple[Window, ...]  # the collectives

    @property
    def num_async(self) -> int:
        """Those during which the computation goes on."""
        return sum(w.is_async for w in self.windows)

    @property
    def num_overlapped(self) -> int:
        """Those with matrix products between start and end."""
        return sum(w.is_overlapped for w in self.windows)

    @property
    def matmuls(self) -> tuple[int, int]:
        """Fewest and most matrix products between start and end."""
        counts = [w.matmuls for w in self.windows]
        return min(counts), max(counts)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = "kind", "dtype", "over", "group_size", "unit", "phase", "in_loop"
        counted = "executions", "total_bytes", "num_async", "num_overlapped", "matmuls"
        fields = {name: getattr(self, name) for name in (*names, *counted)}
        return {**fields, "instructions": len(self.windows)}


@dataclasses.dataclass(frozen=True)
class Total:
    """All collectives of one kind."""

    kind: str  # of them
    total_bytes: int  # bytes of the whole arrays, over all executions, in the dtypes on the wire
    elements: int  # numbers of elements over all executions, whatever their dtype


def rows_of(windows: Iterable[Window]) -> tuple[TrafficRow, ...]:
    """The collectives, alike ones together, the largest first."""
    alike: dict[Any, list[Window]] = {}
    for w in windows:
        key = w.kind, w.dtype, w.axes, len(w.group), w.phase, bool(w.loop), _patterns(w.units)
        alike.setdefault(key, []).append(w)
    rows = [
        TrafficRow(kind, dtype, axes, group_size, _folded(found), phase, in_loop, tuple(found))
        for (kind, dtype, axes, group_size, phase, in_loop, _), found in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.total_bytes))


def _patterns(units: Iterable[str]) -> frozenset[str]:
    return frozenset(name_pattern(unit)[0] for unit in units)


def _folded(windows: Iterable[Window]) -> str | None:
    return ", ".join(folded_names(sorted({unit for w in windows for unit in w.units}))) or None


def total_of(kind: str, windows: Iterable[Window]) -> Total:
    """The sum of one kind."""
    chosen = [w for w in windows if w.kind == kind]
    sizes = [(size * w.executions, item_bytes(dtype)) for w in chosen for dtype, size in w.sizes]
    return Total(kind, sum(size for size, _ in sizes), round(sum(size / item for size, item in sizes)))


# What units that are never gathered send: the model's own, apart from what the plan has asked for.

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


# The collectives of a model's own mixing of examples, kept apart from those of parameters by the user's lines.


@dataclasses.dataclass(frozen=True)
class MixingRow(OfWindows):
    """Collectives of the same lines."""

    mixing: tuple[Mixing, ...]  # the lines, with the bytes that were asked for in one execution
    windows: tuple[Window, ...]  # the collectives

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        first = self.windows[0]
        return {
            "lines": [{"where": m.where, "operation": m.operation, "kind": m.kind} for m in self.mixing],
            "collective": first.kind,
            "dtype": first.dtype,
            "over": first.axes,
            "group_size": len(first.group),
            "phase": first.phase,
            "executions": self.executions,
            "total_bytes": self.total_bytes,
        }


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


def mixing_rows(windows: Iterable[Window]) -> tuple[MixingRow, ...]:
    """The model's own, by line, the largest first."""
    alike: dict[Any, list[Window]] = {}
    for w in windows:
        key = w.mixing, w.kind, w.axes, len(w.group), w.dtype, w.phase
        alike.setdefault(key, []).append(w)
    rows = [MixingRow(found[0].mixing, tuple(found)) for found in alike.values()]
    return tuple(sorted(rows, key=lambda row: -row.total_bytes))


def resized(windows: Iterable[Window]) -> list[tuple[Window, int, int]]:
    """The model's own collectives that are larger than asked for, with the bytes compiled and asked for."""
    found = []
    for w in windows:
        asked = [m.bytes for m in w.mixing]
        whole = sum(map(array_bytes, w.arrays))
        if whole > sum(asked) and any(array_bytes(array) not in asked for array in w.arrays):
            found.append((w, whole, sum(asked)))
    return found


def mixing_table(rows: Sequence[MixingRow]) -> FittedTable:
    """The rows as a table."""
    columns = "line", "operation", "collective", "over?", "phase??", "runs>?", "arrays>"
    caption = "The model looks at the other examples of its batch there. A compiler may join several lines."
    table = made_table("Collectives of the model's own mixing of examples (compiled)", *columns, caption=caption)
    for row in rows:
        first, unique = row.windows[0], lambda texts: list(dict.fromkeys(texts))
        over = f"{', '.join(first.axes)} ({len(first.group)})" if first.axes else f"({len(first.group)})"
        add_row(
            table,
            unique(m.line for m in row.mixing),
            unique(m.operation for m in row.mixing),
            first.kind,
            over,
            first.phase or "-",
            str(row.executions),
            human_bytes(row.total_bytes),
        )
    return table


def traced_table(found: Sequence[Mixing]) -> FittedTable:
    """What the last traced calls of a model send of their own, as a table."""
    caption = "Of the calls traced last, in forward and backward. bytes: of the results on one device, loops counted."
    columns = "line", "operation", "how", "times>?", "bytes>"
    table = made_table("Communication of the model's own mixing of examples", *columns, caption=caption)
    for one in found:
        add_row(table, one.line, one.operation, one.how, str(one.times), human_bytes(one.bytes))
    total = sum(one.bytes for one in found)
    add_row(table, "total", "", "", str(sum(one.times for one in found)), human_bytes(total), style="bold")
    return table
