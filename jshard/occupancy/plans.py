"""The distinct ways to leave room for a collective beside a kernel, the best by the model first."""

from __future__ import annotations

import dataclasses

from jshard.facts.gpus import GpuFacts, OccupancyError
from jshard.occupancy.blocks import Block, check, drain, paddings, resident, room_beside, split_bytes
from jshard.occupancy.footprints import CommFootprint


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
