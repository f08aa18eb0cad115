"""The distinct ways to leave room for a collective beside a kernel, the best first; and how they are shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard.facts.gpus import GpuFacts, OccupancyError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.occupancy.blocks import (
    PAD_UNIT_BYTES,
    Block,
    check,
    drain,
    limits,
    paddings,
    refusals,
    resident,
    room_beside,
    split_bytes,
)
from jshard.occupancy.footprints import CommFootprint, ShippedKernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a kernel beside a collective.

    Attributes:
        how: "as it is"; "co-resident", beside the collective's blocks; "drain", these wait for blocks to end; or
            "reserve", multiprocessors are left to them.
        blocks_per_sm: of the kernel.
        smem_pad_bytes: shared memory that a block asks for and does not touch.
        reserved_sms: multiprocessors that a persistent kernel leaves alone.
        drain: blocks that must end on a multiprocessor before one of the collective begins there; None: it begins only
            when the kernel has ended.
        why: what speaks for it or against it.
    """

    how: str
    blocks_per_sm: int
    smem_pad_bytes: int = 0
    reserved_sms: int = 0
    drain: int | None = 0
    why: str = ""


def plans(gpu: GpuFacts, block: Block, comm: CommFootprint, *, persistent: bool = False) -> tuple[Plan, ...]:
    """Every distinct way that is worth a measurement; the first is the favourite of the model.

    Of a kernel whose blocks come and go that is the most blocks on a multiprocessor with a drain of at most 1: with a
    higher priority a collective has the place of the next block that ends. If no padding does that, the least drain. A
    persistent kernel leaves whole multiprocessors.

    Args:
        gpu: the GPU.
        block: of the kernel, without padding.
        comm: what runs beside it.
        persistent: whether the blocks stay until the kernel ends.

    Raises:
        OccupancyError: the kernel or the collective cannot run, or the collective would take every multiprocessor.

    Example:
        >>> plans(gpu("h200"), Block(128, 58, 41_024), COPY_ENGINE)[0].how
        'as it is'
    """
    check(gpu, block)
    beside = comm.block
    if beside is None:
        return (
            Plan(how="as it is", blocks_per_sm=resident(gpu, block), why="the collective takes no multiprocessor."),
        )
    check(gpu, beside)
    return _of_persistent(gpu, block, comm, beside) if persistent else _of_passing(gpu, block, beside)


def reserved_for(gpu: GpuFacts, comm: CommFootprint) -> int:
    """Multiprocessors that a collective fills if nothing else runs on them.

    Raises:
        OccupancyError: it fills all of them.
    """
    beside = comm.block
    if beside is None:
        return 0
    found = -(-comm.ctas // resident(gpu, beside))
    if found >= gpu.num_sms:
        raise OccupancyError(
            "No multiprocessor would be left for the kernel.",
            where=f"{comm}: ctas={comm.ctas}",
            why=f"they fill {found} multiprocessors, and {gpu.title} has {gpu.num_sms}.",
            do=f"ctas={resident(gpu, beside) * (gpu.num_sms - 1)} at most.",
        )
    return found


def _of_passing(gpu: GpuFacts, block: Block, beside: Block) -> tuple[Plan, ...]:
    found = []
    for n, pad in paddings(gpu, block):
        left = drain(gpu, block.padded(pad), beside)
        found.append(
            Plan(
                how="drain" if left else "co-resident",
                blocks_per_sm=n,
                smem_pad_bytes=pad,
                drain=left,
                why=_why(left, "with padding" if pad else "without padding")
                if left
                else _fitting(gpu, block, n, pad, beside),
            )
        )
    best = min(found, key=lambda plan: (max(plan.drain, 1), -plan.blocks_per_sm))
    return (best, *(plan for plan in found if plan is not best))


def _why(left: int, how: str) -> str:
    if left == 1:
        return f"{how} the next block that ends makes room, with a higher priority for the collective."
    return f"{how} {left} blocks must end on one multiprocessor, while others may take their places."


def _fitting(gpu: GpuFacts, block: Block, n: int, pad: int, beside: Block) -> str:
    split = split_bytes(gpu, (block.padded(pad), n), (beside, 1))
    return f"beside {n} of them fits a block of the collective, if the L1 cache leaves {split // 1024} KiB."


def _of_persistent(gpu: GpuFacts, block: Block, comm: CommFootprint, beside: Block) -> tuple[Plan, ...]:
    top, room = resident(gpu, block), room_beside(gpu, block, beside)
    reserved = reserved_for(gpu, comm)
    reserve = Plan(
        how="reserve",
        blocks_per_sm=top,
        reserved_sms=reserved,
        why=f"its blocks end only with the kernel, so {reserved} of {gpu.num_sms} multiprocessors are left to"
        f" {comm.ctas} blocks of the collective.",
    )
    if room == top:
        why = _fitting(gpu, block, top, 0, beside)
        return Plan(how="co-resident", blocks_per_sm=top, why=why), reserve
    found = [reserve]
    if room:
        why = _fitting(gpu, block, room, 0, beside)
        found.append(Plan(how="co-resident", blocks_per_sm=room, why=why))
    why = "the collective begins when the kernel has ended."
    return *found, Plan(how="as it is", blocks_per_sm=top, drain=None, why=why)


# `jshard occupancy`, table and picture: blocks on a multiprocessor and drain, for each kernel and collective.

_LEGEND = (
    "a block: threads x registers, shared memory. per SM: blocks at once. drain: blocks that must end on one SM before"
    " one of the collective begins there; of a persistent kernel all must (kernel). Only a measurement says what is"
    " quickest."
)
_SHORT = {"shared memory": "SMEM"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRow:
    """What there is to say of one kernel on a GPU."""

    kernel: ShippedKernel  # as it was compiled
    refusals: tuple[str, ...] = ()  # why it cannot run there; then nothing else is said
    blocks_per_sm: int = 0  # without padding
    bound_by: str = ""  # what runs out first
    plans: tuple[tuple[Plan, ...], ...] = ()  # the ways to leave room for each collective, the favourite first

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
        tables = [self._table(i, f"beside {self._taken(comm)}") for i, comm in enumerate(self.footprints)]
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

    def _table(self, place: int, title: str) -> FittedTable:
        table = made_table(title, "kernel", "a block>??", "per SM>", "bound by", "drain>", "best by the model")
        for row in self.rows:
            kernel = row.kernel
            cells = [kernel.label, f"{kernel.threads} x {kernel.registers}, {kernel.smem_bytes:,} B"]
            if row.refusals:
                cells += ["-", "cannot run", "-", "-"]
            else:
                cells += [f"{row.blocks_per_sm}", _SHORT.get(row.bound_by, row.bound_by)]
                cells += [_drain(row.drain(place)), _said(row.plans[place][0])]
            add_row(table, *cells)
        return table

    def _taken(self, comm: CommFootprint) -> str:
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
    gpu: GpuFacts, kernels: Sequence[ShippedKernel], footprints: Sequence[CommFootprint]
) -> OccupancyReport:
    """Blocks on a multiprocessor, drain and plans of kernels beside collectives.

    Args:
        gpu: the GPU.
        kernels: as compiled.
        footprints: what may run beside them.

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
