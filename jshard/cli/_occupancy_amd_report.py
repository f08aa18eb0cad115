"""How workgroups of kernels and of RCCL fit on the compute units of an AMD GPU, as a table and as JSON."""

from __future__ import annotations

import dataclasses

from rich.console import Group
from rich.text import Text

from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.occupancy import AmdGpuFacts, RcclFootprint, Workgroup
from jshard.occupancy.workgroups import drain, limits, paddings, resident, room_beside

_KERNEL_LEGEND = (
    "a workgroup: work items x vector registers, local memory (LDS). per CU: workgroups at once. drain: workgroups that"
    " must end on one compute unit before one of the collective starts there. with padding: the most workgroups with a"
    " drain of at most 1, or the least drain. Only a measurement shows which is fastest."
)
_BUDGET_LEGEND = (
    "per CU: so many workgroups of a kernel, of 256 work items each, leave room on a compute unit for one of the"
    " collective, if each takes no more than these registers and this memory. jshard has no kernels for AMD GPUs; of"
    " any other, --block shows its row."
)
_ASSUMED = (
    "Assumed: the waves of a workgroup are spread evenly over the SIMDs of a compute unit, which have the registers."
)
_WORK_ITEMS = 256  # of a workgroup with a wave on each SIMD


@dataclasses.dataclass(frozen=True)
class AmdKernel:
    """A kernel as compiled for an AMD GPU."""

    label: str  # its name in the table
    workgroup: Workgroup


@dataclasses.dataclass(frozen=True)
class _Padded:
    """A kernel whose workgroups ask for more local memory than they need."""

    per_cu: int  # workgroups at once on a compute unit
    pad_bytes: int
    drain: int

    @property
    def preference(self) -> tuple[int, int]:
        # As in `jshard.occupancy.room_plans`: a drain of 1 counts like none.
        return max(self.drain, 1), -self.per_cu


@dataclasses.dataclass(frozen=True)
class Budget:
    """What workgroups of a kernel may take, so that some of them leave room for one of a collective."""

    per_cu: int  # such workgroups on a compute unit
    vgprs: int  # the most vector registers of a wave
    lds_bytes: int  # the most local memory of a workgroup


def budgets(gpu: AmdGpuFacts, comm: Workgroup) -> list[Budget]:
    """Returns what a kernel may take, for every number of its workgroups that can be beside one of a collective."""
    results = []
    for per_cu in range(1, gpu.workgroups_per_cu):
        vgprs = 0
        for count in range(gpu.vgpr_unit, gpu.vgprs_per_simd + 1, gpu.vgpr_unit):
            if room_beside(gpu, Workgroup(work_items=_WORK_ITEMS, vgprs=count), comm) >= per_cu:
                vgprs = count
        lds_bytes = 0
        for num_bytes in range(gpu.lds_unit_bytes, gpu.lds_per_cu_bytes + 1, gpu.lds_unit_bytes):
            small = Workgroup(work_items=_WORK_ITEMS, vgprs=gpu.vgpr_unit, lds_bytes=num_bytes)
            if room_beside(gpu, small, comm) >= per_cu:
                lds_bytes = num_bytes
        if vgprs:
            results.append(Budget(per_cu, vgprs, lds_bytes))
    return results


@dataclasses.dataclass(frozen=True, repr=False)
class AmdOccupancyReport(Printed):
    """Kernels on one AMD GPU beside some collectives, printed as a table.

    Attributes:
        gpu: the GPU.
        kernels: as compiled; each can run on the GPU. Without any, the table has what a kernel may take.
        footprints: what the collectives take.

    Examples:
        >>> print(AmdOccupancyReport(amd_gpu("mi250x"), (), [rccl_footprint(gpu=amd_gpu("mi250x"))]))
    """

    gpu: AmdGpuFacts
    kernels: tuple[AmdKernel, ...]
    footprints: tuple[RcclFootprint, ...]

    def __rich__(self) -> Group:
        lds_kib = self.gpu.lds_per_cu_bytes // 1024
        parts: list[Text | FittedTable] = []
        parts.append(Text(f"{self.gpu.title}: {self.gpu.num_cus} compute units of {lds_kib} KiB LDS, {self.gpu.gfx}"))
        for comm in self.footprints:
            table = self._kernel_table(comm) if self.kernels else self._budget_table(comm)
            parts += [Text(), Text(f"beside {self._footprint_text(comm)}"), table]
        parts.append(Text(f"{_KERNEL_LEGEND if self.kernels else _BUDGET_LEGEND} {_ASSUMED}"))
        for source in dict.fromkeys(comm.source for comm in self.footprints):
            parts.append(Text(f"RCCL: {source}."))
        return Group(*parts)

    def to_dict(self) -> dict[str, object]:
        """Returns the whole report with its sources, as JSON values."""
        # `asdict` copies deeply, which the mapping of sources does not allow.
        facts = dataclasses.asdict(dataclasses.replace(self.gpu, sources={})) | {"sources": dict(self.gpu.sources)}
        return {
            "gpu": facts,
            "footprints": [self._footprint_dict(footprint) for footprint in self.footprints],
            "kernels": [self._kernel_dict(kernel) for kernel in self.kernels],
        }

    def _footprint_dict(self, comm: RcclFootprint) -> dict[str, object]:
        values: dict[str, object] = dataclasses.asdict(comm)
        values["room_beside"] = [dataclasses.asdict(budget) for budget in budgets(self.gpu, comm.workgroup)]
        return values

    def _kernel_dict(self, kernel: AmdKernel) -> dict[str, object]:
        values: dict[str, object] = {"kernel": kernel.label, **dataclasses.asdict(kernel.workgroup)}
        by_collective: dict[str, object] = {}
        for comm in self.footprints:
            ways = self._ways(kernel, comm)
            by_collective[str(comm)] = {"drain": ways[0].drain, "paddings": [dataclasses.asdict(way) for way in ways]}
        values["workgroups_per_cu"] = resident(self.gpu, kernel.workgroup)
        values["limits"] = limits(self.gpu, kernel.workgroup)
        values["beside"] = by_collective
        return values

    def _budget_table(self, comm: RcclFootprint) -> FittedTable:
        columns = ("per CU>", "vector registers>", "local memory>")
        table = made_table("", *columns)
        for budget in budgets(self.gpu, comm.workgroup):
            add_row(table, str(budget.per_cu), f"{budget.vgprs} of a wave", f"{budget.lds_bytes:,} B")
        return table

    def _kernel_table(self, comm: RcclFootprint) -> FittedTable:
        # The marks `>` and `?` align numbers, and choose what a narrow terminal leaves out: see `FittedTable`.
        columns = ("kernel", "a workgroup>??", "per CU>", "bound by", "drain>", "with padding")
        table = made_table("", *columns)
        for kernel in self.kernels:
            add_row(table, kernel.label, _workgroup_text(kernel.workgroup), *self._fit_cells(kernel, comm))
        return table

    def _fit_cells(self, kernel: AmdKernel, comm: RcclFootprint) -> list[str]:
        """Returns the last four cells of a row: how the kernel fits on a compute unit, and beside a collective."""
        counts_by_limit = limits(self.gpu, kernel.workgroup)
        # Of registers, local memory, waves and so on, the scarcest decides.
        bound_by = min(counts_by_limit, key=lambda name: counts_by_limit[name])
        ways = self._ways(kernel, comm)
        best = min(ways, key=lambda way: way.preference)
        return [str(counts_by_limit[bound_by]), bound_by, str(ways[0].drain), _padded_text(best)]

    def _ways(self, kernel: AmdKernel, comm: RcclFootprint) -> list[_Padded]:
        """Returns every distinct padding, the kernel as it is first."""
        ways = []
        for per_cu, pad_bytes in paddings(self.gpu, kernel.workgroup):
            to_drain = drain(self.gpu, kernel.workgroup.padded(pad_bytes), comm.workgroup)
            ways.append(_Padded(per_cu, pad_bytes, to_drain))
        return ways

    def _footprint_text(self, comm: RcclFootprint) -> str:
        alone = resident(self.gpu, comm.workgroup)
        workgroup = _workgroup_text(comm.workgroup)
        return f"{comm}: {comm.workgroups} workgroups of {workgroup}, {alone} on an empty compute unit"


def _workgroup_text(workgroup: Workgroup) -> str:
    return f"{workgroup.work_items} x {workgroup.vgprs}, {workgroup.lds_bytes:,} B"


def _padded_text(way: _Padded) -> str:
    if not way.pad_bytes:
        return "as it is"
    return f"pad {way.pad_bytes:,}: {way.per_cu} per CU, drain {way.drain}"
