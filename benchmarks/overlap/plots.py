"""The pictures of the report. They need no display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap.conclusion import KERNEL_GOAL
from benchmarks.overlap.records import KernelTime, Record, Row

_COLORS = {
    "sequential": "#999999",
    "baseline": "#d1495b",
    "baseline + priority": "#e09f3e",
    "shaped": "#8e6bbf",
    "shaped + priority": "#2f9e6e",
}
_OURS = "#3b6ea5"


def write(record: Record, folder: Path, stem: str) -> list[Path]:
    """Draws a picture of each size beside each load, and one of the kernels alone.

    Args:
        record: what was measured.
        folder: of the pictures.
        stem: how their names begin.
    """
    made = []
    loads = dict.fromkeys((row.size, row.load) for row in record.all_rows)
    for size, load in loads:
        rows = [row for row in record.all_rows if (row.size, row.load) == (size, load)]
        path = folder / f"{stem}_{size}_{load.replace(' ', '-')}.png"
        _save(_drawn_rows(rows, f"{record.conditions.get('device', '')}: {size}, {load} load"), path)
        made.append(path)
    if record.all_kernels:
        path = folder / f"{stem}_kernels.png"
        _save(_drawn_kernels(record.all_kernels), path)
        made.append(path)
    return made


def _drawn_rows(rows: Sequence[Row], title: str) -> Any:
    settings = list(dict.fromkeys(row.described for row in rows))
    figure, axes = _figure(len(settings) * 0.55)
    for mode, color in _COLORS.items():
        of_mode = [row for row in rows if row.mode == mode]
        axes.scatter(
            [row.ratio for row in of_mode], [settings.index(row.described) for row in of_mode], c=color, label=mode
        )
    least: dict[str, float] = {row.described: row.perfect for row in rows}
    axes.scatter([least[name] for name in settings], range(len(settings)), marker="|", c="black", label="perfect")
    axes.axvline(1, color="#999999", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(settings)), settings, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time of both / (product alone + load alone)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _drawn_kernels(times: Sequence[KernelTime]) -> Any:
    names = [f"{one.kernel} {one.shape}, {one.direction}" for one in times]
    figure, axes = _figure(len(names) * 0.3)
    axes.barh(range(len(names)), [one.ratio for one in times], color=_OURS)
    axes.axvline(KERNEL_GOAL, color="#d1495b", linestyle="--", linewidth=1, label=f"goal {KERNEL_GOAL}")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time / XLA's")
    axes.legend(fontsize=7)
    return figure


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(str(path))
