"""The report: a table for people, one for programs, and the pictures; all from the figures, measured now or before."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.overlap import plots
from benchmarks.overlap.conclusion import baseline_of, dot_of, expected, long_block, sentences
from benchmarks.overlap.predictions import KILL_RULE, holds, longer_alone, outcomes, said
from benchmarks.overlap.records import Record, Row, path_of
from benchmarks.tables import markdown_table
from jshard.occupancy import GpuFacts

TITLE = "Kernels beside a collective"
_COLUMNS = (
    "size", "setting", "blocks/SM", "drain (even, pooled)", "load", "mode", "product ms", "load ms", "both ms",
    "of rounds", "ratio", "perfect", "of its baseline", "of XLA's dot", "waited ms", "start span ms", "SMs", "error",
)  # fmt: skip


def write(record: Record, gpu: GpuFacts, folder: Path, left: Sequence[str] = ()) -> list[Path]:
    """Writes table, report and pictures beside the figures.

    Args:
        record: what was measured.
        gpu: it was measured on.
        folder: for them.
        left: names of the tasks that are not done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = path_of(record, folder).stem
    drawn = plots.write(record, folder, stem) if importlib.util.find_spec("matplotlib") else []
    table, text = folder / f"{stem}.csv", folder / f"{stem}.md"
    _write_csv(record, table)
    text.write_text(markdown(record, gpu, left, [path.name for path in drawn]))
    return [table, text, *drawn]


def markdown(record: Record, gpu: GpuFacts, left: Sequence[str] = (), pictures: Sequence[str] = ()) -> str:
    """The report."""
    lines = [f"# {TITLE}", "", *_conditions(record), ""]
    if record.conditions.get("quick"):
        lines += ["**Quick run: shows that the benchmark works, its figures mean nothing.**", ""]
    if left:
        lines += [f"**Not complete. Not measured yet: {', '.join(left)}.**", ""]
    lines += ["## Conclusion", "", "Made from the figures by the rules of `benchmarks/overlap/conclusion.py`.", ""]
    lines += [*(f"- {sentence}" for sentence in sentences(record, gpu)), ""]
    lines += ["## Predictions", "", *_predictions(record, gpu), "", KILL_RULE, ""]
    lines += ["## Placement", "", *_placement(record, gpu), ""]
    lines += [
        "## Grid",
        "",
        *_legend(record),
        "",
        *_table(_COLUMNS, [_cells(r, record.all_rows) for r in record.all_rows]),
    ]
    lines += ["", "## Kernels alone", "", *_kernels(record), ""]
    if record.failed:
        lines += ["## What could not run", "", *(f"- {name}: {why}" for name, why in record.failed.items()), ""]
    if pictures:
        lines += ["## Pictures", "", *(f"![{name}]({name})" for name in pictures), ""]
    return "\n".join(lines).rstrip() + "\n"


def _conditions(record: Record) -> list[str]:
    described = {name: value for name, value in record.conditions.items() if name != "versions"}
    versions = ", ".join(f"{name} {version}" for name, version in record.conditions.get("versions", {}).items())
    return [
        f"Measured {record.date}.",
        "",
        *(f"- {name}: {value}" for name, value in described.items()),
        f"- {versions}",
    ]


def _predictions(record: Record, gpu: GpuFacts) -> list[str]:
    found = outcomes(record.all_rows)
    if not found:
        return ["Nothing that they are about was measured."]
    head = ("", "size", "setting", "mode", "even", "pooled", "ratio", "even holds", "pooled holds")
    cells = [
        (
            one.name,
            one.row.size,
            one.row.described,
            one.row.mode,
            f"drain {one.row.drain_even}: {said(one.even)}",
            f"drain {one.row.drain_pooled}: {said(one.pooled)}",
            f"{one.row.ratio:.3f}",
            holds(one.row.ratio, one.even),
            holds(one.row.ratio, one.pooled),
        )
        for one in found
    ]
    text = "Of a load of half the time of XLA's dot, by the occupancy model with either rule of placement."
    counts = [
        f"{rule} {[line[place] for line in cells].count('yes')} of {sum(line[place] != '-' for line in cells)}"
        for rule, place in (("even", -2), ("pooled", -1))
    ]
    claims = [longer_alone(one.row, record.all_rows, gpu.num_sms) for one in found if one.name == "P2"]
    lines = [text, "", *_table(head, cells), "", *(f"- {claim}" for claim in dict.fromkeys(claims) if claim), ""]
    return [*lines, f"Of those that claim something there hold: {', '.join(counts)}."]


def _placement(record: Record, gpu: GpuFacts) -> list[str]:
    if record.placement is None:
        return ["Not measured."]
    by_rule = expected(gpu)
    long = long_block(gpu)
    word = lambda began: "began" if began else "waited"
    cells = [
        (str(n), word(by_rule["even"][n]), word(by_rule["pooled"][n]), word(began))
        for n, began in sorted(record.placement.began.items())
    ]
    text = (
        f"On each of {record.placement.long_sms} SMs a block of {long.threads} threads x {long.registers} registers and"
        f" {long.smem_bytes:,} bytes of shared memory stayed for {record.placement.long_ms:.1f} ms; 128 threads of so"
        " many registers were launched on another stream."
    )
    return [text, "", *_table(("registers", "even", "pooled", "measured"), cells)]


def _legend(record: Record) -> list[str]:
    recorded = any(row.span_ms is not None for row in record.all_rows)
    return [
        "`ratio`: time of both over the sum of both alone; `perfect`: the longer of them over that sum. `of its"
        " baseline`: time of both over that of the same kernel unshaped, at the default priority; `of XLA's dot` the"
        " same of XLA's dot, measured side by side. Medians of the host's clock, the launch included; `of rounds` is"
        " the quickest and the slowest.",
        "`waited`: from the load's launch until its first block began; `start span`: until its last one began."
        if recorded
        else "The blocks of this load are not recorded.",
    ]


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    base, dot = baseline_of(row, rows), dot_of(row, rows)
    part = lambda other: f"{row.both_ms / other.both_ms:.3f}" if other else ""
    time = lambda value: "" if value is None else f"{value:.3f}"
    return (
        row.size,
        row.described,
        str(row.blocks_per_sm or ""),
        f"{row.drain_even}, {row.drain_pooled}",
        f"{row.load}, {row.load_bytes / 1e6:.0f} MB",
        row.mode,
        time(row.comp_ms),
        time(row.comm_ms),
        time(row.both_ms),
        f"{row.least_ms:.3f} to {row.most_ms:.3f}",
        time(row.ratio),
        time(row.perfect),
        part(base),
        part(dot),
        time(row.waited_ms),
        time(row.span_ms),
        str(row.comm_sms or ""),
        f"{row.relative_error:.1e}",
    )


def _kernels(record: Record) -> list[str]:
    if not record.all_kernels:
        return ["Not measured."]
    cells = [
        (
            one.kernel,
            one.shape,
            one.direction,
            f"{one.ours_ms:.4f}",
            f"{one.plain_ms:.4f}",
            f"{one.ratio:.3f}",
            f"{one.relative_error:.1e}",
        )
        for one in record.all_kernels
    ]
    return _table(("kernel", "shape", "direction", "ms", "XLA's ms", "ratio", "error"), cells)


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return markdown_table(head, cells, num_words=len(head))


def _write_csv(record: Record, path: Path) -> None:
    rows = record.all_rows
    names = [field.name for field in dataclasses.fields(Row)]
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*names, "ratio", "perfect", "of_baseline", "of_dot"])
        for row in rows:
            parts = [
                row.both_ms / other.both_ms if other else "" for other in (baseline_of(row, rows), dot_of(row, rows))
            ]
            out.writerow([*(getattr(row, name) for name in names), row.ratio, row.perfect, *parts])
