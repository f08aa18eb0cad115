"""loss.png: the losses of a metrics.jsonl over the steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from jshard.train.metrics.jsonl import iterate_metrics

_CURVES = (("loss", "training", "-"), ("val_loss", "validation", "o-"))


def plot_loss(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draws training and validation loss over the steps of a metrics.jsonl. Needs no display.

    Where the loss was no number, the curve has a gap.

    Args:
        metrics_path: the metrics.jsonl.
        png_path: the picture to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = {key: [] for key, *_ in _CURVES}
    for line in iterate_metrics(metrics_path):
        for key in points.keys() & line.keys():
            points[key].append((line["step"], math.nan if line[key] is None else line[key]))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in _CURVES:
        if points[key]:
            axes.plot(*np.array(points[key]).T, style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    FigureCanvasAgg(figure).print_png(str(png_path))
