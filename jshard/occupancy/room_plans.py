"""The distinct ways to leave room for a collective beside a kernel."""

from __future__ import annotations

import dataclasses

from jshard.facts.gpus import GpuFacts, OccupancyError
from jshard.occupancy.blocks import Block, check, drain, paddings, resident, room_beside
from jshard.occupancy.footprints import CommFootprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a kernel beside a collective.

    Attributes:
        how: "as it is"; "co-resident": beside the collective's blocks; "drain": these wait for blocks to end; or
            "reserve": multiprocessors are left to them.
        blocks_per_sm: resident blocks of the kernel.
        smem_pad_bytes: shared memory that a block requests without using it.
        reserved_sms: multiprocessors that a persistent kernel leaves free.
        drain: blocks that must end on a multiprocessor before one of the collective starts there; None: it starts only
            when the kernel has ended.
        why: the reason for or against it.
    """

    how: str
    blocks_per_sm: int
    smem_pad_bytes: int = 0
    reserved_sms: int = 0
    drain: int | None = 0
    why: str = ""


def plans(gpu: GpuFacts, block: Block, comm: CommFootprint, *, persistent: bool = False) -> tuple[Plan, ...]:
    """Returns every distinct way that is worth measuring; the first is preferred by the model.

    For a kernel that is not persistent, this is the most blocks per multiprocessor with a drain of at most 1: with a
    higher priority a collective takes the place of the next block that ends. If no padding achieves that, the least
    drain. A persistent kernel leaves whole multiprocessors free.

    Args:
        gpu: the GPU.
        block: block of the kernel, without padding.
        comm: the collective that runs beside it.
        persistent: whether one block is on each multiprocessor until the kernel ends.

    Raises:
        OccupancyError: the kernel or the collective cannot run, or the collective would take every multiprocessor.

    Examples:
        >>> plans(gpu("h200"), Block(128, 58, 41_024), COPY_ENGINE)[0].how
        'as it is'
    """
    check(gpu, block)
    comm_block = comm.block
    if comm_block is None:
        blocks_per_sm = 1 if persistent else resident(gpu, block)
        why = "the collective takes no multiprocessor."
        return (Plan(how="as it is", blocks_per_sm=blocks_per_sm, why=why),)
    # `reserved_for` divides by its resident blocks: a block that cannot run has none.
    check(gpu, comm_block)
    if persistent:
        return _persistent_plans(gpu, block, comm, comm_block)
    return _padded_plans(gpu, block, comm_block)


def _padded_plans(gpu: GpuFacts, block: Block, comm_block: Block) -> tuple[Plan, ...]:
    """Returns the plans for a kernel that is not persistent: one for each number of blocks that padding achieves."""

    def preference(plan: Plan) -> tuple[int, int]:
        assert plan.drain is not None
        # A drain of 1 counts like none: with a higher priority the collective has the next place. So padding that only
        # saves that wait is not worth a block.
        return max(plan.drain, 1), -plan.blocks_per_sm

    candidates = [_padded_plan(gpu, block, count, pad, comm_block) for count, pad in paddings(gpu, block)]
    best = min(candidates, key=preference)
    return (best, *(plan for plan in candidates if plan is not best))


def _padded_plan(gpu: GpuFacts, block: Block, count: int, pad_bytes: int, comm_block: Block) -> Plan:
    """Returns the plan for a kernel that is not persistent, with a number of blocks per multiprocessor."""
    to_drain = drain(gpu, block.padded(pad_bytes), comm_block)
    padding = "with padding" if pad_bytes else "without padding"
    if to_drain == 0:
        why = _why_co_resident(count)
    elif to_drain == 1:
        why = f"{padding} the next block that ends makes room, with a higher priority for the collective."
    else:
        why = f"{padding} {to_drain} blocks must end on one multiprocessor, while others may take their places."
    return Plan(
        how="drain" if to_drain else "co-resident",
        blocks_per_sm=count,
        smem_pad_bytes=pad_bytes,
        drain=to_drain,
        why=why,
    )


def _persistent_plans(gpu: GpuFacts, block: Block, comm: CommFootprint, comm_block: Block) -> tuple[Plan, ...]:
    """Returns the plans for a kernel with one block on each multiprocessor until it ends."""
    reserved = reserved_for(gpu, comm)
    reserve = Plan(
        how="reserve",
        blocks_per_sm=1,
        reserved_sms=reserved,
        why=f"its blocks end only with the kernel, so {reserved} of {gpu.num_sms} multiprocessors are left to"
        f" {comm.ctas} blocks of the collective.",
    )
    if room_beside(gpu, block, comm_block):
        # First, as it costs the kernel no multiprocessor.
        return Plan(how="co-resident", blocks_per_sm=1, why=_why_co_resident(1)), reserve
    why = "the collective starts when the kernel has ended."
    return reserve, Plan(how="as it is", blocks_per_sm=1, drain=None, why=why)


def _why_co_resident(count: int) -> str:
    return f"a block of the collective fits beside {count} of them, if the L1 cache leaves enough shared memory."


def reserved_for(gpu: GpuFacts, comm: CommFootprint) -> int:
    """Returns the number of multiprocessors that a collective fills if nothing else runs on them.

    Raises:
        OccupancyError: it fills all of them.
    """
    if comm.block is None:
        return 0
    blocks_per_sm = resident(gpu, comm.block)
    # As many of its blocks as fit share a multiprocessor: nothing else is there.
    filled = -(-comm.ctas // blocks_per_sm)
    if filled >= gpu.num_sms:
        raise OccupancyError(
            "No multiprocessor would be left for the kernel.",
            where=f"{comm}: ctas={comm.ctas}",
            why=f"they fill {filled} multiprocessors, and {gpu.title} has {gpu.num_sms}.",
            do=f"ctas={blocks_per_sm * (gpu.num_sms - 1)}  # at most",
        )
    return filled
