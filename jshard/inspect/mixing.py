"""The collectives of a model's own mixing of examples, kept apart from those of parameters by the user's lines.

The engine writes the line, and the bytes that it asked for, in the name of each: see `jshard.engine.moved`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jshard.engine.moved import Mixing
from jshard.inspect.apart import array_bytes, with_arrays
from jshard.inspect.audit_rows import OfWindows
from jshard.inspect.steps import Window
from jshard.inspect.tables import FittedTable, add_row, human_bytes, made_table


@dataclasses.dataclass(frozen=True)
class MixingRow(OfWindows):
    """Collectives of the same lines.

    Args:
        mixing: the lines, with the bytes that were asked for in one execution.
        windows: the collectives.
    """

    mixing: tuple[Mixing, ...]
    windows: tuple[Window, ...]

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
