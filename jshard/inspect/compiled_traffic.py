"""The collectives of a compiled program as rows of a report: equal ones together, and totals by kind."""

import dataclasses
from collections.abc import Hashable, Iterable

from jshard._text import folded_names, name_pattern
from jshard.engine.mixing import Mixing
from jshard.inspect.hlo import Window
from jshard.inspect.hlo.module import item_bytes


@dataclasses.dataclass(frozen=True)
class TrafficRow:
    """Equal collectives of a program."""

    kind: str  # `all-gather`, `reduce-scatter`, ..
    dtype: str  # on the wire, by HLO's names
    over: tuple[str, ...] | None  # the mesh axes; None if no mesh is known
    group_size: int  # devices of a group
    unit: str | None  # the unit, equal ones of a list folded as `blocks/0..11`; None if unknown
    phase: str | None  # `forward` or `backward`; None if unknown
    in_loop: bool  # they are inside a loop
    windows: tuple[Window, ...]  # the collectives
    mixing: tuple[Mixing, ...] = ()  # the lines that mix examples by them, with the bytes requested in one execution

    @property
    def executions(self) -> int:
        """How often they run in total in one run of the program."""
        return sum(window.executions for window in self.windows)

    @property
    def per_iteration(self) -> bool:
        """Whether some are in a loop of unknown length: those are counted for one iteration."""
        return any(window.per_iteration for window in self.windows)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arrays, over all executions."""
        return sum(window.total_bytes for window in self.windows)

    @property
    def num_async(self) -> int:
        """The number of those during which computation continues."""
        return sum(window.is_async for window in self.windows)

    @property
    def num_overlapped(self) -> int:
        """The number of those with matrix products between start and end."""
        return sum(window.is_overlapped for window in self.windows)

    @property
    def matmuls(self) -> tuple[int, int]:
        """Fewest and most matrix products between start and end."""
        counts = [window.matmuls for window in self.windows]
        return min(counts), max(counts)

    def to_dict(self) -> dict[str, object]:
        """Returns the row for JSON; one of lines that mix examples names these rather than a unit."""
        counts: dict[str, object] = {"executions": self.executions, "total_bytes": self.total_bytes}
        if self.per_iteration:  # else the counts are those of a run
            counts["per_iteration"] = True
        if self.mixing:
            return {
                "lines": [{"where": m.where, "operation": m.operation, "kind": m.kind} for m in self.mixing],
                "collective": self.kind,
                "dtype": self.dtype,
                "over": self.over,
                "group_size": self.group_size,
                "phase": self.phase,
                **counts,
            }
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "over": self.over,
            "group_size": self.group_size,
            "unit": self.unit,
            "phase": self.phase,
            "in_loop": self.in_loop,
            **counts,
            "num_async": self.num_async,
            "num_overlapped": self.num_overlapped,
            "matmuls": self.matmuls,
            "instructions": len(self.windows),
        }


def rows_of(windows: Iterable[Window]) -> tuple[TrafficRow, ...]:
    """Returns the collectives, equal ones grouped, the largest first: by unit, or by the lines of the model."""
    groups: dict[Hashable, list[Window]] = {}
    for window in windows:
        groups.setdefault(_row_key(window), []).append(window)
    rows = []
    for group in groups.values():
        first = group[0]
        units: set[str] = set()
        for window in group:
            units.update(window.units)
        row = TrafficRow(
            kind=first.kind,
            dtype=first.dtype,
            over=first.axes,
            group_size=len(first.group),
            unit=", ".join(folded_names(sorted(units))) or None,
            phase=first.phase,
            in_loop=bool(first.loop),
            windows=tuple(group),
            mixing=first.mixing,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.total_bytes))


def _row_key(window: Window) -> Hashable:
    """Returns what the collectives of one row have in common."""
    owner: Hashable = window.mixing
    if not window.mixing:
        patterns = {name_pattern(unit)[0] for unit in window.units}  # `blocks/*`: equal units of a list are one row
        owner = (bool(window.loop), frozenset(patterns))
    return owner, window.kind, window.dtype, window.axes, len(window.group), window.phase


@dataclasses.dataclass(frozen=True)
class Total:
    """All collectives of one kind."""

    kind: str
    total_bytes: int  # bytes of the whole arrays, over all executions, in the dtypes on the wire
    elements: int  # numbers of elements over all executions, whatever their dtype


def total_of(kind: str, windows: Iterable[Window]) -> Total:
    """Returns the total of the collectives of one kind."""
    total_bytes = 0
    elements = 0.0
    for window in windows:
        if window.kind == kind:
            for dtype, size in window.sizes:
                total_bytes += size * window.executions
                elements += size * window.executions / item_bytes(dtype)
    return Total(kind, total_bytes, round(elements))
