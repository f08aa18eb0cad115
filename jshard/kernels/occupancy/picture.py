"""The picture of `jshard occupancy`: blocks on a multiprocessor and drain against padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jshard.kernels.occupancy.blocks import PAD_UNIT_BYTES, drain, paddings, resident
from jshard.kernels.occupancy.report import OccupancyReport, Row

_BLOCKS, _DRAINS = "#3b6ea5", ("#d1495b", "#e09f3e", "#2f9e6e", "#8e6bbf")


def write_png(report: OccupancyReport, path: Path) -> None:
    """Draws one plot for each kernel that the GPU can run. Needs no display.

    A line is dotted where the number of resident blocks changes, with the least padding for it.

    Args:
        report: what to draw.
        path: of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if not row.refusals]
    figure = Figure(figsize=(9, 1 + 2.4 * max(1, len(rows))), layout="constrained")
    plots = figure.subplots(max(1, len(rows)), 1, squeeze=False)[:, 0]
    for row, axes in zip(rows, plots, strict=False):
        _draw(report, row, axes)
    plots[-1].set_xlabel("padding, KiB of shared memory for each block")
    figure.suptitle(report.gpu.title, x=0.01, ha="left", fontsize=11)
    FigureCanvasAgg(figure).print_png(str(path))


def _draw(report: OccupancyReport, row: Row, axes: Any) -> None:
    gpu, block = report.gpu, row.kernel.block
    pads = range(0, gpu.smem_per_block_bytes - block.smem_bytes + 1, PAD_UNIT_BYTES)
    kib = [pad / 1024 for pad in pads]
    axes.step(kib, [resident(gpu, block.padded(pad)) for pad in pads], where="post", color=_BLOCKS, label="blocks/SM")
    for i, footprint in enumerate(report.footprints):
        beside = footprint.block
        if beside is not None and not row.kernel.persistent:
            drains = [drain(gpu, block.padded(pad), beside) for pad in pads]
            color = _DRAINS[i % len(_DRAINS)]
            axes.step(kib, drains, where="post", color=color, linestyle="--", label=f"drain, {footprint}")
    for n, pad in paddings(gpu, block):
        axes.axvline(pad / 1024, color="#999999", linestyle=":", linewidth=1)
        axes.text(pad / 1024, n, f" {pad:,} B", fontsize=7, va="bottom")
    axes.set_title(row.kernel.label, loc="left", fontsize=9)
    axes.set_ylim(0, row.blocks_per_sm + 1)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", fontsize=7)
