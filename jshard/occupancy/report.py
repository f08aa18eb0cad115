"""`jshard occupancy`, table and picture: blocks on a multiprocessor and drain, for each kernel and collective."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard.facts.gpus import GpuFacts
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.occupancy.blocks import PAD_UNIT_BYTES, Block, drain, limits, paddings, refusals, resident
from jshard.occupancy.footprints import CommFootprint, ShippedKernel
from jshard.occupancy.plans import Plan, plans

_LEGEND = (
    "a block: threads x registers, shared memory. per SM: blocks at once. drain: blocks that must end on one SM before"
    " one of the collective begins there; of a persistent kernel all must (kernel). Only a measurement says what is"
    " quickest."
)
_SHORT = {"shared memory": "SMEM"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRow:
    """What there is to say of one kernel on a GPU.

    Attributes:
        kernel: as it was compiled.
        refusals: why it cannot run there; then nothing else is said.
        blocks_per_sm: without padding.
        bound_by: what runs out first.
        plans: the ways to leave room for each collective, the favourite first.
    """

    kernel: ShippedKernel
    refusals: tuple[str, ...] = ()
    blocks_per_sm: int = 0
    bound_by: str = ""
    plans: tuple[tuple[Plan, ...], ...] = ()

    def drain(self, place: int) -> int | None:
        """Drain of the kernel as it is, beside the collective in that place; None: it waits for the whole kernel."""
        as_it_is = [p for p in self.plans[place] if not p.smem_pad_bytes and p.blocks_per_sm == self.blocks_per_sm]
        return next(plan.drain for plan in as_it_is if not plan.reserved_sms)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OccupancyReport(Printed):
    """Kernels on one GPU beside some collectives; printed it is a table.

    Attributes:
        gpu: the GPU.
        footprints: what the collectives take.
        rows: one for each kernel.
    """

    gpu: GpuFacts
    footprints: tuple[CommFootprint, ...]
    rows: tuple[KernelRow, ...]

    def __rich__(self) -> Group:
        facts = self.gpu
        head = f"{facts.title}: {facts.num_sms} SMs of {facts.smem_per_sm_bytes // 1024} KiB shared memory"
        tables = [self._table(i, f"beside {self._told(comm)}") for i, comm in enumerate(self.footprints)]
        if not tables:
            tables = [self._table(None, f"what a collective takes on {facts.title} is not known")]
        refused = [f"{row.kernel.label}: {why}" for row in self.rows for why in row.refusals]
        spaced = [part for table in tables for part in (Text(), table)]
        last = [Text("\n".join(refused)), Text()] if refused else []
        return Group(Text(head), *spaced, *last, Text(_LEGEND))

    def to_dict(self) -> dict[str, Any]:
        """All that is in the report, with its sources, as JSON has it."""
        facts = dataclasses.asdict(dataclasses.replace(self.gpu, sources={})) | {"sources": dict(self.gpu.sources)}
        return {
            "gpu": facts,
            "footprints": [dataclasses.asdict(footprint) for footprint in self.footprints],
            "kernels": [self._row_dict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2)

    def _table(self, place: int | None, title: str) -> FittedTable:
        more = [] if place is None else ["drain>", "best by the model"]
        table = made_table(title, "kernel", "a block>??", "per SM>", "bound by", *more)
        for row in self.rows:
            kernel = row.kernel
            cells = [kernel.label, f"{kernel.threads} x {kernel.registers}, {kernel.smem_bytes:,} B"]
            if row.refusals:
                cells += ["-", "cannot run", *("-" for _ in more)]
            else:
                cells += [f"{row.blocks_per_sm}", _SHORT.get(row.bound_by, row.bound_by)]
                cells += [] if place is None else [_drain(row.drain(place)), _said(row.plans[place][0])]
            add_row(table, *cells)
        return table

    def _told(self, comm: CommFootprint) -> str:
        if not comm.ctas:
            return f"{comm}: no SM"
        block = f"{comm.threads} x {comm.registers}, {comm.smem_bytes:,} B"
        at_once = resident(self.gpu, Block(comm.threads, comm.registers, comm.smem_bytes))
        return f"{comm}: {comm.ctas} blocks of {block}, {at_once} on an empty SM"

    def _row_dict(self, row: KernelRow) -> dict[str, Any]:
        said: dict[str, Any] = {"kernel": row.kernel.label, **dataclasses.asdict(row.kernel)}
        if row.refusals:
            return said | {"refusals": list(row.refusals)}
        said |= {"blocks_per_sm": row.blocks_per_sm, "limits": limits(self.gpu, row.kernel.block)}
        beside: Mapping[str, Any] = {
            str(footprint): {"drain": row.drain(i), "plans": [dataclasses.asdict(plan) for plan in row.plans[i]]}
            for i, footprint in enumerate(self.footprints)
        }
        return said | {"beside": beside}


def occupancy_report(
    gpu: GpuFacts, kernels: Sequence[ShippedKernel], footprints: Sequence[CommFootprint] = ()
) -> OccupancyReport:
    """Blocks on a multiprocessor, drain and plans of kernels beside collectives.

    Args:
        gpu: the GPU.
        kernels: as compiled.
        footprints: what may run beside them; none where nothing is known.

    Example:
        >>> report = occupancy_report(gpu("h200"), shipped_kernels(gpu("h200")), [COPY_ENGINE])
    """
    return OccupancyReport(
        gpu=gpu, footprints=tuple(footprints), rows=tuple(_row(gpu, kernel, footprints) for kernel in kernels)
    )


def _row(gpu: GpuFacts, kernel: ShippedKernel, footprints: Sequence[CommFootprint]) -> KernelRow:
    found = refusals(gpu, kernel.block)
    if found:
        return KernelRow(kernel=kernel, refusals=found)
    each = limits(gpu, kernel.block)
    return KernelRow(
        kernel=kernel,
        blocks_per_sm=resident(gpu, kernel.block),
        bound_by=min(each, key=lambda name: each[name]),
        plans=tuple(plans(gpu, kernel.block, comm, persistent=kernel.persistent) for comm in footprints),
    )


def _drain(blocks: int | None) -> str:
    return "kernel" if blocks is None else f"{blocks}"


def _said(plan: Plan) -> str:
    if plan.reserved_sms:
        return f"reserve {plan.reserved_sms} SMs"
    if plan.smem_pad_bytes:
        return f"pad {plan.smem_pad_bytes:,}: {plan.blocks_per_sm} per SM, drain {_drain(plan.drain)}"
    return "as it is"


# The picture of `jshard occupancy`: blocks on a multiprocessor and drain against padding.

_BLOCKS, _DRAINS = "#3b6ea5", ("#d1495b", "#e09f3e", "#2f9e6e", "#8e6bbf")


def write_png(report: OccupancyReport, path: Path) -> None:
    """Draws one plot for each kernel that the GPU can run. Needs no display.

    A line is dotted where the number of resident blocks changes, with the least padding for it.
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


def _draw(report: OccupancyReport, row: KernelRow, axes: Any) -> None:
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
