"""What the pictures of all cases share. They need no display; what was drawn once looks the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_axes(*, width: float, height: float) -> Any:
    """Axes of their own, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return axes


def save(axes: Any, path: Path) -> Path:
    """Writes the figure of these axes as SVG, which is text."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        axes.figure.savefig(path, metadata={"Date": None})
    return path
