"""`jshard occupancy`: blocks on a multiprocessor and drain, for each kernel and collective."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard.facts.gpus import GpuFacts
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.occupancy.blocks import PAD_UNIT_BYTES, Plan, drain, limits, plans, refusals, resident
from jshard.occupancy.footprints import SHIPPED_SOURCE, CommFootprint, ShippedKernel

_LEGEND = (
    "a block: threads x registers, shared memory. per SM: blocks at once. drain: blocks that must end on one SM before"
    " one of the collective begins there; of a persistent kernel all must (kernel). Only a measurement says what is"
    f" quickest. Kernels: {SHIPPED_SOURCE}, so for no other GPU. That the warps of a block are spread evenly over the"
    " quarters of an SM, which have the registers, is an assumption."
)
_SHORT = {"shared memory": "SMEM"}


@dataclasses.dataclass(frozen=True, repr=False)
class OccupancyReport(Printed):
    """Kernels on one GPU beside some collectives; printed it is a table.

    Attributes:
        gpu: the GPU.
        kernels: as compiled.
        footprints: what the collectives take.

    Example:
        >>> print(OccupancyReport(gpu("h200"), SHIPPED, [COPY_ENGINE]))
    """

    gpu: GpuFacts
    kernels: tuple[ShippedKernel, ...]
    footprints: tuple[CommFootprint, ...]

    def __rich__(self) -> Group:
        head = f"{self.gpu.title}: {self.gpu.num_sms} SMs of {self.gpu.smem_per_sm_bytes // 1024} KiB shared memory"
        spaced = [part for comm in self.footprints for part in (Text(), self._table(comm))]
        refused = [f"{kernel.label}: {why}" for kernel in self.kernels for why in refusals(self.gpu, kernel.block)]
        last = [Text("\n".join(refused)), Text()] if refused else []
        return Group(Text(head), *spaced, *last, Text(_LEGEND))

    def to_dict(self) -> dict[str, Any]:
        """All that is in the report, with its sources, as JSON has it."""
        facts = dataclasses.asdict(dataclasses.replace(self.gpu, sources={})) | {"sources": dict(self.gpu.sources)}
        return {
            "gpu": facts,
            "footprints": [dataclasses.asdict(footprint) for footprint in self.footprints],
            "kernels": [self._kernel_dict(kernel) for kernel in self.kernels],
        }

    def _kernel_dict(self, kernel: ShippedKernel) -> dict[str, Any]:
        found = {"kernel": kernel.label, **dataclasses.asdict(kernel)}
        if why := refusals(self.gpu, kernel.block):
            return found | {"refusals": why}
        beside = {}
        for comm in self.footprints:
            ways = self._plans(kernel, comm)
            beside[str(comm)] = {"drain": _as_it_is(ways).drain, "plans": [dataclasses.asdict(plan) for plan in ways]}
        at_once = {"blocks_per_sm": resident(self.gpu, kernel.block), "limits": limits(self.gpu, kernel.block)}
        return found | at_once | {"beside": beside}

    def _table(self, comm: CommFootprint) -> FittedTable:
        columns = "kernel", "a block>??", "per SM>", "bound by", "drain>", "best by the model"
        table = made_table(f"beside {self._taken(comm)}", *columns)
        for kernel in self.kernels:
            cells = [kernel.label, f"{kernel.threads} x {kernel.registers}, {kernel.smem_bytes:,} B"]
            if refusals(self.gpu, kernel.block):
                cells += ["-", "cannot run", "-", "-"]
            else:
                each, ways = limits(self.gpu, kernel.block), self._plans(kernel, comm)
                bound_by = min(each, key=lambda name: each[name])
                cells += [f"{each[bound_by]}", _SHORT.get(bound_by, bound_by)]
                cells += [_drain(_as_it_is(ways)), _in_words(ways[0])]
            add_row(table, *cells)
        return table

    def _plans(self, kernel: ShippedKernel, comm: CommFootprint) -> tuple[Plan, ...]:
        return plans(self.gpu, kernel.block, comm, persistent=kernel.persistent)

    def _taken(self, comm: CommFootprint) -> str:
        if comm.block is None:
            return f"{comm}: no SM"
        block = f"{comm.threads} x {comm.registers}, {comm.smem_bytes:,} B"
        return f"{comm}: {comm.ctas} blocks of {block}, {resident(self.gpu, comm.block)} on an empty SM"


def write_png(report: OccupancyReport, path: Path) -> None:
    """Draws blocks on a multiprocessor and drain against padding: a plot for each kernel that the GPU can run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gpu, kernels = report.gpu, [one for one in report.kernels if not refusals(report.gpu, one.block)]
    figure = Figure(figsize=(9, 1 + 2.4 * len(kernels)), layout="constrained")
    for kernel, axes in zip(kernels, figure.subplots(len(kernels) or 1, squeeze=False)[:, 0], strict=False):
        pads = range(0, gpu.smem_per_block_bytes - kernel.smem_bytes + 1, PAD_UNIT_BYTES)
        blocks, kib = [kernel.block.padded(pad) for pad in pads], [pad / 1024 for pad in pads]
        axes.step(kib, [resident(gpu, block) for block in blocks], where="post", label="blocks per SM")
        for comm in report.footprints:
            if comm.block is not None and not kernel.persistent:
                drains = [drain(gpu, block, comm.block) for block in blocks]
                axes.step(kib, drains, where="post", linestyle="--", label=f"drain, {comm}")
        axes.set_title(f"{gpu.title}: {kernel.label}", loc="left", fontsize=9)
        axes.set_xlabel("padding, KiB of shared memory for each block")
        axes.legend(loc="upper right", fontsize=7)
    FigureCanvasAgg(figure).print_png(str(path))


def to_json(reports: list[OccupancyReport]) -> str:
    """Reports of several GPUs as text."""
    return json.dumps({"gpus": [report.to_dict() for report in reports]}, indent=2)


def _as_it_is(ways: tuple[Plan, ...]) -> Plan:
    return next(plan for plan in ways if not plan.smem_pad_bytes and not plan.reserved_sms)


def _drain(plan: Plan) -> str:
    return "kernel" if plan.drain is None else f"{plan.drain}"


def _in_words(plan: Plan) -> str:
    if plan.reserved_sms:
        return f"reserve {plan.reserved_sms} SMs"
    if plan.smem_pad_bytes:
        return f"pad {plan.smem_pad_bytes:,}: {plan.blocks_per_sm} per SM, drain {_drain(plan)}"
    return "as it is"
