"""The pictures of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap.conclusion import KERNEL_GOAL
from benchmarks.overlap.records import KernelTime, Record, Row
from benchmarks.pictures import new_axes, save

_COLORS = {
    "sequential": "#999999",
    "baseline": "#d1495b",
    "baseline + priority": "#e09f3e",
    "shaped": "#8e6bbf",
    "shaped + priority": "#2f9e6e",
}


def write(record: Record, folder: Path, stem: str) -> list[Path]:
    """Draws a picture of each size beside each load, and one of the kernels alone."""
    made = []
    for size, load in dict.fromkeys((row.size, row.load) for row in record.all_rows):
        rows = [row for row in record.all_rows if (row.size, row.load) == (size, load)]
        axes = _drawn_rows(rows)
        axes.set_title(f"{record.conditions.get('device', '')}: {size}, {load} load", loc="left", fontsize=10)
        made.append(save(axes, folder / f"{stem}_{size}_{load.replace(' ', '-')}.svg"))
    if record.all_kernels:
        made.append(save(_drawn_kernels(record.all_kernels), folder / f"{stem}_kernels.svg"))
    return made


def _drawn_rows(rows: Sequence[Row]) -> Any:
    axes = _axes(list(dict.fromkeys(row.described for row in rows)), "time of both / (product alone + load alone)")
    for mode, color in _COLORS.items():
        of_mode = [row for row in rows if row.mode == mode]
        axes.scatter([row.ratio for row in of_mode], [row.described for row in of_mode], c=color, label=mode)
    axes.scatter([row.perfect for row in rows], [row.described for row in rows], marker="|", c="black", label="perfect")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return axes


def _drawn_kernels(times: Sequence[KernelTime]) -> Any:
    names = [f"{one.kernel} {one.shape}, {one.direction}" for one in times]
    axes = _axes(names, "time / XLA's")
    axes.barh(names, [one.ratio for one in times], color="#3b6ea5")
    axes.axvline(KERNEL_GOAL, color="#d1495b", linestyle="--", linewidth=1, label=f"goal {KERNEL_GOAL}")
    axes.legend(fontsize=7)
    return axes


def _axes(names: Sequence[str], label: str) -> Any:
    axes = new_axes(width=9, height=1.5 + 0.4 * len(names))
    axes.scatter([1] * len(names), names, alpha=0)  # the order of the names
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return axes
