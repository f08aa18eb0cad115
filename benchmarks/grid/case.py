"""Models on clusters, compiled by jshard and as plain Flax under GSPMD, side by side. Nothing is run.

    python -m benchmarks.run grid --lines rows.jsonl                     # all, hours on two cores
    python -m benchmarks.run grid --only '* gspmd *' --lines rows.jsonl  # what jshard does not change
    python -m benchmarks.run grid --reuse rows.jsonl                     # only jshard's programs are compiled again
    python -m benchmarks.run grid --reuse rows.jsonl --stored-only --earlier REPORT.md   # a report, compiling nothing

GSPMD has each model twice, with XLA's own options and with jshard's profile, and the faster one counts. What is
compared has gradients reduced in the same dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.grid.cells import GPUS, GSPMD, TPUS, Cell, cells_of
from benchmarks.grid.earlier import EarlierReport
from benchmarks.grid.report import in_words, report_lines
from benchmarks.grid.rows import Row, Stored, append, compiled_row, read
from benchmarks.planned import require
from jshard.cluster.topology import parse_topology

Rows = list[Row]

TITLE = "jshard beside GSPMD"
MEASURES_TIME = False


def arguments(parser: argparse._ArgumentGroup) -> None:
    """Adds the options of this case."""
    add = parser.add_argument
    add("--only", default="", metavar="PATTERN,...", help="of labels, as '*124M h100:1x8 gspmd*'; * is anything")
    add("--clusters", default="", metavar="NAME,...", help=f"{', '.join(GPUS)} by default; or {', '.join(TPUS)}")
    add("--lines", type=Path, metavar="FILE", help="adds each row to it, as soon as it is compiled")
    add("--reuse", type=Path, action="append", default=[], metavar="FILE", help="takes rows of plain Flax from it")
    add("--reuse-all", action="store_true", help="jshard's rows, too")
    add("--stored-only", action="store_true", help="compiles nothing: the report of the stored rows, of any versions")
    add("--earlier", type=Path, action="append", default=[], metavar="FILE", help="takes other rows from a report")
    add("--programs", type=Path, metavar="DIR", help="stores the compiled programs there")
    add("--show", action="store_true", help="prints the labels, and compiles nothing")


def run(
    *,
    quick: bool,
    only: str = "",
    clusters: str = "",
    lines: Path | None = None,
    reuse: list[Path] | None = None,
    reuse_all: bool = False,
    stored_only: bool = False,
    earlier: list[Path] | None = None,
    programs: Path | None = None,
    show: bool = False,
) -> Iterator[dict[str, Any]]:
    """Compiles the cells, or takes them from stored rows; yields the rows so far after each."""
    cells = cells_of(quick=quick, clusters=_names(clusters) or GPUS, only=_names(only))
    if show:
        raise SystemExit("\n".join(cell.label for cell in cells))
    # One report has both: rows for GPUs, and rows for TPUs, whose compiler comes with another jax.
    stored = Stored(read(reuse or ()), any_versions=stored_only)
    reported = EarlierReport.read(earlier or ())
    rows: Rows = []
    missing: list[str] = []
    for cell in cells:
        # What jshard makes of a model changes with its engine, which is no part of a row's key.
        may_reuse = reuse_all or stored_only or cell.system == GSPMD
        row = stored.row(cell) or reported.row(cell) if may_reuse else None
        if row is None and stored_only:
            missing.append(cell.label)
            continue
        rows.append(row or _compiled(cell, lines, programs))
        yield {"rows": rows, "missing": missing}


def _names(text: str) -> list[str]:
    """Returns the names in a text, which commas separate."""
    return [name for name in text.split(",") if name]


def _compiled(cell: Cell, lines: Path | None, programs: Path | None) -> Row:
    """Compiles a cell, and writes its row at once: what there is survives the end of this process."""
    require(parse_topology(cell.cluster).device.compiler)
    print("compiling", cell.label, flush=True)
    row = compiled_row(cell, programs)
    print("   ", in_words(row), flush=True)
    if lines is not None:
        append(lines, row)
    return row


def table(result: Mapping[str, Any]) -> list[str]:
    """Returns the report."""
    return report_lines(result["rows"], result["missing"])
