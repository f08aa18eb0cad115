"""Which workgroups fit on one compute unit of an AMD GPU, alone and beside a workgroup of communication.

The rules of LLVM for AMD GPUs, by which it computes how many waves will run at once, extended to workgroups of two
kernels. Local memory is one pool. A wave is on one SIMD, and takes vector and scalar registers of that SIMD. The
waves of a workgroup are assumed to be spread evenly over the SIMDs. For two kernels that is not documented: it is an
assumption, like that of `jshard.occupancy.blocks`, whose placement of two kinds of blocks is used here: a SIMD is a
partition, and a wave a warp.

Examples:
    >>> from jshard import occupancy
    >>> mi250x = occupancy.amd_gpu("mi250x")
    >>> product = Workgroup(work_items=256, vgprs=64, lds_bytes=16_384)
    >>> rccl = occupancy.rccl_footprint(gpu=mi250x).workgroup
    >>> resident(mi250x, product), drain(mi250x, product, rccl)
    (4, 1)
"""

from __future__ import annotations

import dataclasses
import functools

from jshard.facts.amd_gpus import AmdGpuFacts
from jshard.facts.gpus import GpuFacts, OccupancyError
from jshard.occupancy import blocks
from jshard.occupancy.blocks import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workgroup:
    """The resources of one workgroup, as in the notes of a code object.

    Attributes:
        work_items: work items of the workgroup, ".max_flat_workgroup_size".
        vgprs: vector registers of a wave, accumulation registers among them, ".vgpr_count".
        sgprs: scalar registers of a wave, ".sgpr_count"; 0 if they are not known, and then they limit nothing.
        lds_bytes: local memory, ".group_segment_fixed_size" and what is requested at the launch.
    """

    work_items: int
    vgprs: int
    sgprs: int = 0
    lds_bytes: int = 0

    def __post_init__(self) -> None:
        minimums = {"work_items": 1, "vgprs": 1, "sgprs": 0, "lds_bytes": 0}
        problems = []
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value < minimum:
                problems.append(f"{name} is {value}, the minimum is {minimum}.")
        if problems:
            raise OccupancyError(
                "The workgroup is not valid.",
                where="Workgroup",
                why="\n".join(problems),
                do="Workgroup(work_items=256, vgprs=64, lds_bytes=16_384)",
            )

    def padded(self, pad_bytes: int) -> Workgroup:
        """Returns the workgroup with more local memory."""
        return dataclasses.replace(self, lds_bytes=self.lds_bytes + pad_bytes)


# ---- one kernel


def refusals(gpu: AmdGpuFacts, workgroup: Workgroup) -> tuple[str, ...]:
    """Returns why a GPU cannot run the workgroup at all, each reason with its limit; empty if it can."""
    above = functools.partial(blocks.above_limit, gpu.title)
    reasons = []
    if workgroup.work_items > gpu.work_items_per_workgroup:
        reasons.append(above(workgroup.work_items, "work items", gpu.work_items_per_workgroup, "in a workgroup"))
    if workgroup.vgprs > gpu.vgprs_per_simd:
        reasons.append(above(workgroup.vgprs, "vector registers", gpu.vgprs_per_simd, "for a wave"))
    if workgroup.sgprs > gpu.sgprs_per_simd:
        reasons.append(above(workgroup.sgprs, "scalar registers", gpu.sgprs_per_simd, "in a SIMD"))
    if workgroup.lds_bytes > gpu.lds_per_cu_bytes:
        reasons.append(above(workgroup.lds_bytes, "bytes of LDS", gpu.lds_per_cu_bytes, "in a workgroup"))
    if reasons:
        return tuple(reasons)
    for resource, count in limits(gpu, workgroup).items():
        if count == 0:
            waves = _waves(gpu, workgroup)
            reasons.append(f"its {waves} waves do not fit on a compute unit at once by their {resource}.")
    return tuple(reasons)


def check(gpu: AmdGpuFacts, workgroup: Workgroup) -> None:
    """Raises for a workgroup that a GPU cannot run.

    Raises:
        OccupancyError: with every limit that the workgroup exceeds.
    """
    reasons = refusals(gpu, workgroup)
    if reasons:
        raise OccupancyError(
            f"The workgroup cannot run on {gpu.title}.",
            where=f"Workgroup(work_items={workgroup.work_items}, vgprs={workgroup.vgprs}, sgprs={workgroup.sgprs},"
            f" lds_bytes={workgroup.lds_bytes:_})",
            why="\n".join(reasons),
            do="use smaller tiles, fewer pipeline stages or less padding.",
        )


def limits(gpu: AmdGpuFacts, workgroup: Workgroup) -> dict[str, int]:
    """Returns how many workgroups each resource of a compute unit would hold, were it the only limit.

    Scalar registers count only if they are known.
    """
    waves = _waves(gpu, workgroup)
    # A wave's registers are in one SIMD. So each SIMD is rounded down by itself.
    waves_by_vgprs = gpu.vgprs_per_simd // blocks.rounded_up(workgroup.vgprs, gpu.vgpr_unit) * gpu.simds
    counts = {
        "waves": gpu.waves_per_cu // waves,
        "VGPRs": waves_by_vgprs // waves,
        "LDS": gpu.lds_per_cu_bytes // max(blocks.rounded_up(workgroup.lds_bytes, gpu.lds_unit_bytes), 1),
        "workgroups": _slots(gpu, workgroup),
    }
    if workgroup.sgprs:
        counts["SGPRs"] = gpu.sgprs_per_simd // workgroup.sgprs * gpu.simds // waves
    return counts


def resident(gpu: AmdGpuFacts, workgroup: Workgroup) -> int:
    """Returns the number of workgroups of one kernel that a compute unit holds at once; 0 if it cannot run."""
    if refusals(gpu, workgroup):
        return 0
    return min(limits(gpu, workgroup).values())


def paddings(gpu: AmdGpuFacts, workgroup: Workgroup) -> tuple[tuple[int, int], ...]:
    """Returns every number of resident workgroups that padding can achieve, in descending order.

    Returns:
        Pairs of that number and the least padding of local memory for it, in bytes.
    """
    most = resident(gpu, workgroup)
    achievable = []
    for count in range(most, 0, -1):
        pad_bytes = 0
        if count < most:
            # The least local memory of which `count` + 1 workgroups have more than there is, in whole units.
            least_bytes = blocks.rounded_up(gpu.lds_per_cu_bytes // (count + 1) + 1, gpu.lds_unit_bytes)
            pad_bytes = max(0, least_bytes - workgroup.lds_bytes)
        # Where the unit of local memory is coarse, it skips some numbers.
        if resident(gpu, workgroup.padded(pad_bytes)) == count:
            achievable.append((count, pad_bytes))
    return tuple(achievable)


def _waves(gpu: AmdGpuFacts, workgroup: Workgroup) -> int:
    return -(-workgroup.work_items // gpu.wave_size)


def _slots(gpu: AmdGpuFacts, workgroup: Workgroup) -> int:
    """Returns how many workgroups a compute unit has room for, whatever they take of it."""
    if _waves(gpu, workgroup) == 1:  # which needs no barrier
        return gpu.waves_per_cu
    return gpu.workgroups_per_cu


# ---- a kernel beside a workgroup of communication


def room_beside(gpu: AmdGpuFacts, workgroup: Workgroup, comm: Workgroup) -> int:
    """Returns the most workgroups of a kernel that leave room on a compute unit for one of communication.

    0: even one leaves no room.
    """
    if refusals(gpu, comm):
        return 0
    most = resident(gpu, workgroup)
    return blocks.most_that_fit(most, lambda count: _fit(gpu, workgroup, count, comm))


def drain(gpu: AmdGpuFacts, workgroup: Workgroup, comm: Workgroup) -> int:
    """Returns how many workgroups must end on a compute unit before one of communication can start there.

    Its values have the meaning of those of `jshard.occupancy.drain`.
    """
    return resident(gpu, workgroup) - room_beside(gpu, workgroup, comm)


def _fit(gpu: AmdGpuFacts, workgroup: Workgroup, count: int, comm: Workgroup) -> bool:
    """Returns whether `count` workgroups of a kernel, and one of communication, fit on a compute unit at once."""
    by_vgprs = _as_multiprocessor(gpu, workgroup, gpu.vgprs_per_simd, gpu.vgpr_unit)
    if not blocks.fit(by_vgprs, _vector_block(workgroup), count, _vector_block(comm)):
        return False
    by_sgprs = _as_multiprocessor(gpu, workgroup, gpu.sgprs_per_simd, 1)
    return blocks.fit(by_sgprs, _scalar_block(workgroup), count, _scalar_block(comm))


def _as_multiprocessor(gpu: AmdGpuFacts, workgroup: Workgroup, registers_per_simd: int, unit: int) -> GpuFacts:
    """Returns a compute unit in the words of `blocks`, with one kind of its registers."""
    return GpuFacts(
        name=gpu.name,
        title=gpu.title,
        arch=gpu.gfx,
        num_sms=gpu.num_cus,
        smem_per_sm_bytes=gpu.lds_per_cu_bytes,
        smem_per_block_bytes=gpu.lds_per_cu_bytes,
        threads_per_sm=gpu.waves_per_cu * gpu.wave_size,
        blocks_per_sm=_slots(gpu, workgroup),
        smem_reserved_bytes=0,
        smem_unit_bytes=gpu.lds_unit_bytes,
        threads_per_block=gpu.work_items_per_workgroup,
        warp_size=gpu.wave_size,
        partitions=gpu.simds,
        # `blocks` counts a register once for each lane.
        registers_per_sm=registers_per_simd * gpu.simds * gpu.wave_size,
        registers_per_thread=registers_per_simd,
        register_unit=unit * gpu.wave_size,
        sources=gpu.sources,
    )


def _vector_block(workgroup: Workgroup) -> Block:
    return Block(workgroup.work_items, workgroup.vgprs, workgroup.lds_bytes)


def _scalar_block(workgroup: Workgroup) -> Block:
    # At least one, which `Block` requires: it is less than a wave can have, so it limits nothing.
    return Block(workgroup.work_items, max(workgroup.sgprs, 1), workgroup.lds_bytes)
