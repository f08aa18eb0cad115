"""How blocks of kernels and of collectives fit on the SMs of a GPU, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.occupancy import CommFootprint, GpuFacts, ShippedKernel
from jshard.occupancy.blocks import limits, refusals, resident
from jshard.occupancy.room_plans import Plan, plans
from jshard.occupancy.shipped_kernels import SHIPPED, shipped_for

_LEGEND = (
    "a block: threads x registers, shared memory. per SM: blocks at once. drain: blocks that must end on one SM before"
    " one of the collective starts there; with a persistent kernel all must (kernel). Only a measurement shows which is"
    " fastest. {} Assumed: the warps of a block are spread evenly over the quarters of an SM, which have the registers."
)
_SHORT = {"shared memory": "SMEM"}


@dataclasses.dataclass(frozen=True, repr=False)
class OccupancyReport(Printed):
    """Kernels on one GPU beside some collectives, printed as a table.

    Attributes:
        gpu: the GPU.
        kernels: as compiled.
        footprints: what the collectives take.

    Examples:
        >>> print(OccupancyReport(gpu("h200"), shipped_for(gpu("h200")).kernels, [COPY_ENGINE]))
    """

    gpu: GpuFacts
    kernels: tuple[ShippedKernel, ...]
    footprints: tuple[CommFootprint, ...]

    def __rich__(self) -> Group:
        smem_kib = self.gpu.smem_per_sm_bytes // 1024
        parts: list[Text | FittedTable] = []
        parts.append(Text(f"{self.gpu.title}: {self.gpu.num_sms} SMs of {smem_kib} KiB shared memory"))
        for comm in self.footprints:
            parts += [Text(), self._table(comm)]
        # A kernel that cannot run has a row without figures; the reasons are below the tables.
        refused: list[str] = []
        for kernel in self.kernels:
            for why in refusals(self.gpu, kernel.block):
                refused.append(f"{kernel.label}: {why}")
        if refused:
            parts += [Text("\n".join(refused)), Text()]
        parts.append(Text(_LEGEND.format(_source_text(self.gpu))))
        return Group(*parts)

    def to_dict(self) -> dict[str, object]:
        """Returns the whole report with its sources, as JSON values."""
        # `asdict` copies deeply, which the mapping of sources does not allow.
        facts = dataclasses.asdict(dataclasses.replace(self.gpu, sources={})) | {"sources": dict(self.gpu.sources)}
        return {
            "gpu": facts,
            "footprints": [dataclasses.asdict(footprint) for footprint in self.footprints],
            "kernels": [self._kernel_dict(kernel) for kernel in self.kernels],
        }

    def _kernel_dict(self, kernel: ShippedKernel) -> dict[str, object]:
        values: dict[str, object] = {"kernel": kernel.label, **dataclasses.asdict(kernel)}
        reasons = refusals(self.gpu, kernel.block)
        if reasons:
            return values | {"refusals": reasons}
        by_collective: dict[str, object] = {}
        for comm in self.footprints:
            ways = self._plans(kernel, comm)
            drained = _unchanged(ways).drain
            by_collective[str(comm)] = {"drain": drained, "plans": [dataclasses.asdict(plan) for plan in ways]}
        values["blocks_per_sm"] = resident(self.gpu, kernel.block)
        values["limits"] = limits(self.gpu, kernel.block)
        values["beside"] = by_collective
        return values

    def _table(self, comm: CommFootprint) -> FittedTable:
        # The marks `>` and `?` align numbers, and choose what a narrow terminal leaves out: see `FittedTable`.
        columns = ("kernel", "a block>??", "per SM>", "bound by", "drain>", "best by the model")
        table = made_table(f"beside {self._footprint_text(comm)}", *columns)
        for kernel in self.kernels:
            block = f"{kernel.threads} x {kernel.registers}, {kernel.smem_bytes:,} B"
            add_row(table, kernel.label, block, *self._fit_cells(kernel, comm))
        return table

    def _fit_cells(self, kernel: ShippedKernel, comm: CommFootprint) -> list[str]:
        """Returns the last four cells of a row: how the kernel fits on an SM, and beside a collective."""
        if refusals(self.gpu, kernel.block):
            return ["-", "cannot run", "-", "-"]
        blocks_by_limit = limits(self.gpu, kernel.block)
        # Of registers, shared memory, threads and so on, the scarcest decides.
        bound_by = min(blocks_by_limit, key=lambda name: blocks_by_limit[name])
        ways = self._plans(kernel, comm)
        return [
            str(blocks_by_limit[bound_by]),
            _SHORT.get(bound_by, bound_by),
            _drain_text(_unchanged(ways)),
            _plan_text(ways[0]),  # the best comes first
        ]

    def _plans(self, kernel: ShippedKernel, comm: CommFootprint) -> tuple[Plan, ...]:
        return plans(self.gpu, kernel.block, comm, persistent=kernel.persistent)

    def _footprint_text(self, comm: CommFootprint) -> str:
        if comm.block is None:
            return f"{comm}: no SM"
        block = f"{comm.threads} x {comm.registers}, {comm.smem_bytes:,} B"
        return f"{comm}: {comm.ctas} blocks of {block}, {resident(self.gpu, comm.block)} on an empty SM"


def _source_text(gpu: GpuFacts) -> str:
    """Returns what the kernels of a table were compiled for, and whether they run on its GPU."""
    source = shipped_for(gpu).source
    if gpu.major in SHIPPED:
        return f"jshard's kernels: {source}."
    # Those of Hopper stand there for comparison.
    return f"jshard's kernels: {source}; they do not run on this GPU."


def _unchanged(ways: Sequence[Plan]) -> Plan:
    """Returns the plan of the kernel as it is, without padding and without reserved SMs."""
    return next(plan for plan in ways if not plan.smem_pad_bytes and not plan.reserved_sms)


def _drain_text(plan: Plan) -> str:
    return "kernel" if plan.drain is None else str(plan.drain)


def _plan_text(plan: Plan) -> str:
    if plan.reserved_sms:
        return f"reserve {plan.reserved_sms} SMs"
    if plan.smem_pad_bytes:
        return f"pad {plan.smem_pad_bytes:,}: {plan.blocks_per_sm} per SM, drain {_drain_text(plan)}"
    return "as it is"
