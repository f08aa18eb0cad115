"""The collectives of a compiled program, alike ones together: the rows of a table."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jshard.inspect.module import item_bytes
from jshard.inspect.steps import Window
from jshard.inspect.tables import folded_names, name_pattern


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
class Row(OfWindows):
    """Collectives of a program that are alike.

    Args:
        kind: `all-gather`, `reduce-scatter`, ...
        dtype: on the wire, in HLO's words.
        over: the mesh axes; None if no mesh is known.
        group_size: devices of a group.
        unit: the unit, equal ones of a list folded as `blocks/0..11`; None if the program does not say.
        phase: `forward` or `backward`; None if the program does not say.
        in_loop: they stand inside a loop.
        windows: the collectives.
    """

    kind: str
    dtype: str
    over: tuple[str, ...] | None
    group_size: int
    unit: str | None
    phase: str | None
    in_loop: bool
    windows: tuple[Window, ...]

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
    """All collectives of one kind.

    Args:
        kind: of them.
        total_bytes: bytes of the whole arrays, over all executions, in the dtypes on the wire.
        elements: likewise, numbers of elements, whatever their dtype.
    """

    kind: str
    total_bytes: int
    elements: int


def rows_of(windows: Iterable[Window]) -> tuple[Row, ...]:
    """The collectives, alike ones together, the largest first."""
    alike: dict[Any, list[Window]] = {}
    for w in windows:
        key = w.kind, w.dtype, w.axes, len(w.group), w.phase, bool(w.loop), _patterns(w.units)
        alike.setdefault(key, []).append(w)
    rows = [
        Row(kind, dtype, axes, group_size, _folded(found), phase, in_loop, tuple(found))
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
