"""Which thread blocks fit on one multiprocessor, alone and beside a communication block, and how to leave room.

The rules of NVIDIA's `cuda_occupancy.h`, extended to blocks of two kernels. Shared memory is one pool. Registers are
not: they are allocated to whole warps, and a warp is in one partition of the multiprocessor. The warps of a block are
assumed to be spread evenly over the partitions, as those of a warpgroup must be. So the registers left by a block are
not one sum: if 17 warps are spread 5, 4, 4 and 4, four more warps have only what is left in the first partition. For
one kernel `cuda_occupancy.h` computes the same; for two it is an assumption, which `benchmarks.overlap` will measure.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jshard.facts.gpus import GpuFacts, OccupancyError

if TYPE_CHECKING:
    from jshard.occupancy.footprints import CommFootprint

PAD_UNIT_BYTES = 1024
"""Padding is a multiple of this: Mosaic aligns every buffer in shared memory to it."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The resources of one thread block.

    Attributes:
        threads: threads of the block.
        registers: 32-bit registers per thread, as reported by the compiler.
        smem_bytes: shared memory, static plus dynamic.

    Example:
        >>> resident(gpu("h200"), Block(threads=128, registers=58, smem_bytes=41_024))
        5
    """

    threads: int
    registers: int
    smem_bytes: int = 0

    def __post_init__(self) -> None:
        least = {"threads": 1, "registers": 1, "smem_bytes": 0}
        wrong = {name: getattr(self, name) for name, floor in least.items() if getattr(self, name) < floor}
        if wrong:
            raise OccupancyError(
                "The thread block is not valid.",
                where="Block",
                why="\n".join(f"{name} is {value}, the minimum is {least[name]}." for name, value in wrong.items()),
                do="Block(threads=128, registers=90, smem_bytes=90_176)",
            )

    def padded(self, pad_bytes: int) -> Block:
        """The block with more shared memory."""
        return dataclasses.replace(self, smem_bytes=self.smem_bytes + pad_bytes)


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """The resources allocated to a block: rounded up to the units of a GPU."""

    warps: int  # of the block
    warp_registers: int  # of one warp
    smem_bytes: int  # including the driver's share


def cost(gpu: GpuFacts, block: Block) -> BlockCost:
    """The resources allocated to a block on a GPU."""
    return BlockCost(
        warps=-(-block.threads // gpu.warp_size),
        warp_registers=_rounded(block.registers * gpu.warp_size, gpu.register_unit),
        smem_bytes=_rounded(block.smem_bytes + gpu.smem_reserved_bytes, gpu.smem_unit_bytes),
    )


def refusals(gpu: GpuFacts, block: Block) -> tuple[str, ...]:
    """Why a GPU cannot run the block at all, with the limit; empty if it can."""
    taken = cost(gpu, block)
    found = [
        f"{value:,} {what}, and {gpu.title} has at most {limit:,} {of}."
        for value, limit, what, of in (
            (block.threads, gpu.threads_per_block, "threads", "in a block"),
            (block.registers, gpu.registers_per_thread, "registers per thread", "per thread"),
            (block.smem_bytes, gpu.smem_per_block_bytes, "bytes of shared memory", "in a block"),
        )
        if value > limit
    ]
    slots = _register_slots(gpu, taken.warp_registers)
    if not found and taken.warps > slots:
        found.append(
            f"{taken.warps} warps of {taken.warp_registers:,} registers, and {gpu.title} holds {slots} of them at once."
        )
    return tuple(found)


def check(gpu: GpuFacts, block: Block) -> None:
    """Raises for a block that a GPU cannot run.

    Raises:
        OccupancyError: with every limit that the block exceeds.
    """
    found = refusals(gpu, block)
    if found:
        raise OccupancyError(
            f"The thread block cannot run on {gpu.title}.",
            where=f"Block(threads={block.threads}, registers={block.registers}, smem_bytes={block.smem_bytes:_})",
            why="\n".join(found),
            do="use smaller tiles, fewer pipeline stages or less padding.",
        )


def limits(gpu: GpuFacts, block: Block) -> dict[str, int]:
    """For each resource of a multiprocessor, how many blocks of one kernel it could hold if only that were limited."""
    taken = cost(gpu, block)
    return {
        "warps": gpu.warps_per_sm // taken.warps,
        "registers": _register_slots(gpu, taken.warp_registers) // taken.warps,
        "shared memory": gpu.smem_per_sm_bytes // max(taken.smem_bytes, 1),
        "blocks": gpu.blocks_per_sm,
    }


def resident(gpu: GpuFacts, block: Block) -> int:
    """The number of blocks of one kernel that a multiprocessor holds at once; 0 if it cannot run."""
    return 0 if refusals(gpu, block) else min(limits(gpu, block).values())


def room_beside(gpu: GpuFacts, block: Block, comm: Block) -> int:
    """The most blocks of a kernel that leave room on a multiprocessor for a block of communication; 0: none do."""
    if refusals(gpu, comm):
        return 0
    return next((n for n in range(resident(gpu, block), 0, -1) if _fit(gpu, block, n, comm)), 0)


def drain(gpu: GpuFacts, block: Block, comm: Block) -> int:
    """The number of blocks of a kernel that must end on a multiprocessor before a communication block can start there.

    0: it need not wait. 1: with a higher priority it takes the place of the next block that ends. More: several must
    end on the same multiprocessor, while others may take their places.
    """
    return resident(gpu, block) - room_beside(gpu, block, comm)


def paddings(gpu: GpuFacts, block: Block) -> tuple[tuple[int, int], ...]:
    """Every number of resident blocks that padding can achieve, in descending order, with the least padding for it."""
    found = []
    for wanted in range(resident(gpu, block), 0, -1):
        # wanted + 1 blocks must not fit by their shared memory.
        enough = _rounded(gpu.smem_per_sm_bytes // (wanted + 1) + 1, gpu.smem_unit_bytes) - gpu.smem_unit_bytes + 1
        missing = max(0, enough - gpu.smem_reserved_bytes - block.smem_bytes)
        pad = 0 if wanted == resident(gpu, block) else _rounded(missing, PAD_UNIT_BYTES)
        if resident(gpu, block.padded(pad)) == wanted:
            found.append((wanted, pad))
    return tuple(found)


def _register_slots(gpu: GpuFacts, warp_registers: int) -> int:
    """The number of warps of one kernel that fit the registers of a multiprocessor."""
    return gpu.registers_per_sm // gpu.partitions // warp_registers * gpu.partitions


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _fit(gpu: GpuFacts, block: Block, count: int, comm: Block) -> bool:
    """Whether a number of blocks of a kernel, and one of communication, fit on a multiprocessor at once."""
    kernel, other = cost(gpu, block), cost(gpu, comm)
    if count + 1 > gpu.blocks_per_sm or kernel.smem_bytes * count + other.smem_bytes > gpu.smem_per_sm_bytes:
        return False
    # Every partition has the same number of whole rounds of warps.
    mine, its = kernel.warps // gpu.partitions * count, other.warps // gpu.partitions
    slots = gpu.warps_per_sm // gpu.partitions - mine - its
    registers = gpu.registers_per_sm // gpu.partitions - mine * kernel.warp_registers - its * other.warp_registers
    # The rest of a block, fewer warps than there are partitions, goes into that many different partitions.
    left, its_left = kernel.warps % gpu.partitions, other.warps % gpu.partitions
    shared = slots - 1, registers - other.warp_registers
    if min(slots, registers) < 0 or (its_left and min(shared) < 0):
        return False
    room = lambda slots, registers: min(count, slots, registers // kernel.warp_registers)
    return left * count <= its_left * room(*shared) + (gpu.partitions - its_left) * room(slots, registers)


# The distinct ways to leave room for a collective beside a kernel.


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
    """Every distinct way that is worth measuring; the first is preferred by the model.

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

    Example:
        >>> plans(gpu("h200"), Block(128, 58, 41_024), COPY_ENGINE)[0].how
        'as it is'
    """
    check(gpu, block)
    beside, top = comm.block, 1 if persistent else resident(gpu, block)
    if beside is None:
        return (Plan(how="as it is", blocks_per_sm=top, why="the collective takes no multiprocessor."),)
    check(gpu, beside)
    if not persistent:
        found = [_padded(gpu, block, n, pad, beside) for n, pad in paddings(gpu, block)]
        best = min(found, key=lambda plan: (max(plan.drain or 0, 1), -plan.blocks_per_sm))
        return (best, *(plan for plan in found if plan is not best))
    reserved = reserved_for(gpu, comm)
    why = f"its blocks end only with the kernel, so {reserved} of {gpu.num_sms} multiprocessors are left to"
    why += f" {comm.ctas} blocks of the collective."
    reserve = Plan(how="reserve", blocks_per_sm=top, reserved_sms=reserved, why=why)
    if room_beside(gpu, block, beside):
        return Plan(how="co-resident", blocks_per_sm=top, why=_fitting(top)), reserve
    why = "the collective starts when the kernel has ended."
    return reserve, Plan(how="as it is", blocks_per_sm=top, drain=None, why=why)


def reserved_for(gpu: GpuFacts, comm: CommFootprint) -> int:
    """The number of multiprocessors that a collective fills if nothing else runs on them.

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
            do=f"ctas={resident(gpu, beside) * (gpu.num_sms - 1)}  # at most",
        )
    return found


def _padded(gpu: GpuFacts, block: Block, blocks: int, pad: int, beside: Block) -> Plan:
    """The plan for a kernel that is not persistent, with a number of blocks per multiprocessor."""
    left = drain(gpu, block.padded(pad), beside)
    how = "with padding" if pad else "without padding"
    why = f"{how} {left} blocks must end on one multiprocessor, while others may take their places."
    if left == 1:
        why = f"{how} the next block that ends makes room, with a higher priority for the collective."
    return Plan(
        how="drain" if left else "co-resident",
        blocks_per_sm=blocks,
        smem_pad_bytes=pad,
        drain=left,
        why=why if left else _fitting(blocks),
    )


def _fitting(blocks: int) -> str:
    return f"a block of the collective fits beside {blocks} of them, if the L1 cache leaves enough shared memory."
