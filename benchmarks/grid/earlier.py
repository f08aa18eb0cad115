"""Rows from the tables of an earlier report, for programs of which no stored row is at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid.cells import GSPMD, JSHARD, Cell
from benchmarks.grid.report import EARLIER, HEAD, UNTIL, XLAS_OWN
from benchmarks.grid.rows import Row

# The columns of a system: time, hidden, peak, collectives, options. Older reports compile jshard's with one profile.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    JSHARD: ("jshard, ms est.", "hidden, est.", "peak, GiB", "collectives", "options"),
    GSPMD: ("GSPMD, ms est.", "GSPMD hidden", "GSPMD peak", "GSPMD collectives", "GSPMD options"),
}
_OWN_PROFILE = "fastest"


@dataclasses.dataclass(frozen=True)
class EarlierReport:
    """Figures that reports state, rounded as they round them; of plain Flax those of the better profile."""

    rows: Mapping[str, Row]  # by the label of the cell

    @classmethod
    def read(cls, paths: Iterable[Path]) -> EarlierReport:
        """Reads reports; of several with the same program the last one counts."""
        rows: dict[str, Row] = {}
        for path in paths:
            for row in _rows_of(path.read_text().splitlines()):
                names = [row[key] for key in ("model", "cluster", "system", "reduce_dtype")]
                rows[" ".join([*names, row["profile"] or "none"])] = row
        return cls(rows)

    def row(self, cell: Cell) -> Row | None:
        """Returns the row of a cell; None if no report states it."""
        return self.rows.get(cell.label)


def _rows_of(lines: Sequence[str]) -> Iterator[Row]:
    dates = {system: _last_date(f"Programs of {system} ", " to ", lines) for system in _COLUMNS}
    date_of_earlier = _last_date(f"{EARLIER} ", UNTIL, lines)
    cluster = ""
    head: list[str] = []
    for line in lines:
        if line.startswith("## "):
            cluster = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if set(cells) <= set(HEAD):
            head = cells
        if len(cells) != len(head):
            continue
        stated = dict(zip(head, cells, strict=True))
        for system, columns in _COLUMNS.items():
            figures = [stated[column] for column in columns if column in stated]
            collectives = figures[3]
            if not collectives.isdigit():  # the head, or a program without figures
                continue
            is_earlier = figures[0].endswith(EARLIER)
            yield _figures(*figures) | {
                "model": stated["model"],
                "cluster": cluster,
                "system": system,
                "reduce_dtype": stated["reduced in"],
                "date": date_of_earlier if is_earlier else dates[system],
            }


def _figures(time: str, hidden: str, peak: str, collectives: str, options: str = _OWN_PROFILE) -> dict[str, Any]:
    return {
        "profile": None if options == XLAS_OWN else options,
        "step_s": float(time.rstrip(EARLIER)) / 1e3,
        "hidden": float(hidden.rstrip("%")) / 100,
        "peak_bytes": float(peak) * 2**30,
        "collectives": int(collectives),
        "fits": True,
        "is_earlier": True,
    }


def _last_date(start: str, before: str, lines: Iterable[str]) -> str:
    """Returns the date at the end of a line that starts so; empty if there is none."""
    for line in lines:
        if line.startswith(start):
            return line.rpartition(before)[2].removesuffix(" UTC.")
    return ""
