"""The report: tables and the conclusion, all from the figures, measured now or before."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.overlap import plots
from benchmarks.overlap.conclusion import baseline_of, dot_of, expected, long_block, sentences
from benchmarks.overlap.predictions import KILL_RULE, bounds, longer_alone, outcomes
from benchmarks.overlap.records import Record, Row, path_of
from benchmarks.overlap.target import Gpu
from benchmarks.tables import markdown_table
from jshard.facts.amd_gpus import is_amd_gpu
from jshard.occupancy import AmdGpuFacts, GpuFacts

TITLE = "Kernels beside a collective"
_COLUMNS = (
    "size", "setting", "blocks/SM", "drain", "load", "mode", "product ms", "load ms", "both ms",
    "of rounds", "ratio", "perfect", "of its baseline", "of XLA's dot", "waited ms", "start span ms", "SMs", "error",
)  # fmt: skip


def write(record: Record, gpu: Gpu, folder: Path, left: Sequence[str] = ()) -> list[Path]:
    """Writes table, report and pictures beside the figures; `left` has the names of the tasks that are not done."""
    path = path_of(record, folder)
    drawn = plots.write(record, folder, path.stem) if importlib.util.find_spec("matplotlib") else []
    table, text = path.with_suffix(".csv"), path.with_suffix(".md")
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([_columns(record), *(_cells(row, record.all_rows) for row in record.all_rows)])
    text.write_text(markdown(record, gpu, left, [each.name for each in drawn]))
    return [table, text, *drawn]


def markdown(record: Record, gpu: Gpu, left: Sequence[str] = (), pictures: Sequence[str] = ()) -> str:
    """The report."""
    lines = [f"# {TITLE}", "", *_conditions(record), ""]
    if record.conditions.get("quick"):
        lines += ["**Quick run: shows that the benchmark works, its figures mean nothing.**", ""]
    if left:
        lines += [f"**Not complete. Not measured yet: {', '.join(left)}.**", ""]
    lines += ["## Conclusion", "", "Made from the figures by the rules of `benchmarks/overlap/conclusion.py`.", ""]
    lines += [*(f"- {sentence}" for sentence in sentences(record, gpu)), ""]
    if not isinstance(gpu, AmdGpuFacts):  # both are about NVIDIA's GPUs
        lines += ["## Predictions", "", *_predictions(record, gpu), "", KILL_RULE, ""]
        lines += ["## Placement", "", *_placement(record, gpu), ""]
    lines += [
        "## Grid",
        "",
        *_legend(record),
        "",
        *grid_table(record),
    ]
    lines += ["", "## Kernels alone", "", *_kernels(record), ""]
    if record.failed:
        lines += ["## What could not run", "", *(f"- {name}: {why}" for name, why in record.failed.items()), ""]
    if pictures:
        lines += ["## Pictures", "", *(f"![{name}]({name})" for name in pictures), ""]
    return "\n".join(lines).rstrip() + "\n"


def grid_table(record: Record) -> list[str]:
    """The rows of all groups."""
    return _table(_columns(record), [_cells(row, record.all_rows) for row in record.all_rows])


def _columns(record: Record) -> tuple[str, ...]:
    """Returns the names of the columns, in the words of the GPU's vendor."""
    if not is_amd_gpu(record.conditions["device"]):
        return _COLUMNS
    words = {"blocks/SM": "workgroups/CU", "SMs": "CUs"}
    return tuple(words.get(column, column) for column in _COLUMNS)


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
    cells = []
    for claim, row in found:
        wanted = bounds(row)
        wanted_text = "open" if wanted is None else f">= {wanted[0]}" if wanted[0] else f"<= {wanted[1]}"
        holds = "-" if wanted is None else "yes" if wanted[0] <= row.ratio <= wanted[1] else "no"
        of = claim.name, row.size, row.described, row.mode
        cells.append((*of, f"drain {row.drain}: {wanted_text}", f"{row.ratio:.3f}", holds))
    claims = [longer_alone(row, record.all_rows, gpu.num_sms) for claim, row in found if claim.name == "P2"]
    held = [line[-1] for line in cells]
    text = "Of a load of half the time of XLA's dot, by the occupancy model."
    lines = [text, "", *_table(("", "size", "setting", "mode", "expected", "ratio", "holds"), cells), ""]
    lines += [*(f"- {claim}" for claim in dict.fromkeys(claims) if claim), ""]
    return [*lines, f"Of those that claim something {held.count('yes')} of {len(held) - held.count('-')} hold."]


def _placement(record: Record, gpu: GpuFacts) -> list[str]:
    if record.placement is None:
        return ["Not measured."]
    wanted, long = expected(gpu), long_block(gpu)
    word = lambda began: "began" if began else "waited"
    cells = [(str(n), word(wanted[n]), word(began)) for n, began in sorted(record.placement.began.items())]
    text = (
        f"On each of {record.placement.long_sms} SMs a block of {long.threads} threads x {long.registers} registers and"
        f" {long.smem_bytes:,} bytes of shared memory stayed for {record.placement.long_ms:.1f} ms; 128 threads of so"
        " many registers were launched on another stream."
    )
    return [text, "", *_table(("registers", "assumed", "measured"), cells)]


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
        row.drain,
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
