"""Blocks on an SM and drain against the padding of a kernel's blocks, as a picture."""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jshard.cli._occupancy_report import OccupancyReport
from jshard.occupancy import ShippedKernel
from jshard.occupancy.blocks import PAD_UNIT_BYTES, drain, refusals, resident


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A figure of a kernel against the padding of its blocks."""

    name: str
    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Panel:
    """The curves of a kernel. Hashable: kernels with equal ones share a panel of the plot."""

    paddings_kib: tuple[float, ...]
    curves: tuple[_Curve, ...]

    @property
    def is_flat(self) -> bool:
        """Whether padding changes nothing."""
        return all(len(set(curve.values)) <= 1 for curve in self.curves)


def write_png(report: OccupancyReport, path: Path) -> None:
    """Draws blocks on an SM and drain against padding: a panel for each kernel where padding changes either.

    Kernels with the same curves share a panel. Those where nothing changes are named below.
    """
    # Not pyplot, which would choose a backend for the screen, and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[_Panel, list[str]] = {}
    flat_labels: list[str] = []
    for kernel in report.kernels:
        if refusals(report.gpu, kernel.block):
            continue
        panel = _panel(report, kernel)
        if panel.is_flat:
            flat_labels.append(kernel.label)
        else:
            panels.setdefault(panel, []).append(kernel.label)
    # A figure needs a subplot; without panels it stays empty, above the names of the kernels.
    num_columns = min(3, len(panels)) or 1
    num_rows = math.ceil(len(panels) / num_columns) or 1
    figure = Figure(figsize=(4.5 * num_columns, 0.8 + 2.6 * num_rows), layout="constrained")
    subplots = figure.subplots(num_rows, num_columns, sharex=True, squeeze=False).ravel()
    for axes in subplots[len(panels) :]:
        axes.set_axis_off()
    # Not strict: the last row may have more subplots than there are panels.
    for axes, (panel, labels) in zip(subplots, panels.items(), strict=False):
        _draw(axes, panel, labels)
    figure.suptitle(report.gpu.title, x=0.01, ha="left", fontsize=10)
    if flat_labels:
        caption = f"Padding changes nothing for {', '.join(flat_labels)}."
        figure.supxlabel("\n".join(textwrap.wrap(caption, 70 * num_columns)), x=0.01, ha="left", fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))


def _draw(axes: Any, panel: _Panel, labels: Sequence[str]) -> None:
    """Draws a panel into axes of matplotlib, with the names of its kernels above."""
    styles = itertools.cycle(("-", "--", ":", "-."))
    # Not strict: the styles have no end.
    for curve, style in zip(panel.curves, styles, strict=False):
        axes.step(panel.paddings_kib, curve.values, style, where="post", label=curve.name)
    axes.set_title("\n".join(textwrap.wrap(", ".join(labels), 60)), loc="left", fontsize=8)
    axes.set_xlabel("padding of a block, KiB of shared memory", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", fontsize=7)


def _panel(report: OccupancyReport, kernel: ShippedKernel) -> _Panel:
    """Returns the blocks on an SM, and the drain beside each collective, for all paddings of a kernel's blocks."""
    gpu = report.gpu
    paddings = range(0, gpu.smem_per_block_bytes - kernel.smem_bytes + 1, PAD_UNIT_BYTES)
    blocks = [kernel.block.padded(padding) for padding in paddings]
    curves = [_Curve("blocks per SM", tuple(resident(gpu, block) for block in blocks))]
    for comm in report.footprints:
        # A collective without blocks waits for none, and beside a persistent kernel it waits for all, at any padding.
        if comm.block is not None and not kernel.persistent:
            drains = tuple(drain(gpu, block, comm.block) for block in blocks)
            curves.append(_Curve(f"drain, {comm}", drains))
    return _Panel(tuple(padding / 1024 for padding in paddings), tuple(curves))
