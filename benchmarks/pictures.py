"""Code shared by the pictures of all cases. They need no display, and are reproducible."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def new_axes(*, width: float, height: float) -> Any:
    """New axes, sized in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return axes


def over_depths(series: Mapping[str, Mapping[str, float]], label: str, path: Path) -> Path:
    """Draws figures over the number of layers of a model, a line for each of the series."""
    axes = new_axes(width=7, height=4)
    for name, by_depth in series.items():
        axes.plot([int(depth) for depth in by_depth], list(by_depth.values()), marker="o", label=name)
    axes.set_xlabel("layers")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return save(axes, path)


def save(axes: Any, path: Path) -> Path:
    """Writes the figure of these axes as SVG, which is text."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        axes.figure.savefig(path, metadata={"Date": None})
    return path
