"""Which thread blocks fit on one multiprocessor, alone and beside a communication block.

The rules of NVIDIA's `cuda_occupancy.h`, extended to blocks of two kernels. Shared memory is one pool. Registers are
not: they are allocated to whole warps, and a warp is in one partition of the multiprocessor. The warps of a block are
assumed to be spread evenly over the partitions, as those of a warpgroup must be. So the registers left by a block are
not one sum: if 17 warps are spread 5, 4, 4 and 4, four more warps have only what is left in the first partition. For
one kernel `cuda_occupancy.h` computes the same; for two it is an assumption, which `benchmarks.overlap` will measure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jshard.facts.gpus import GpuFacts, OccupancyError

PAD_UNIT_BYTES = 1024
"""Padding is a multiple of this: Mosaic aligns every buffer in shared memory to it."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The resources of one thread block.

    Attributes:
        threads: threads of the block.
        registers: 32-bit registers per thread, as reported by the compiler.
        smem_bytes: shared memory, static plus dynamic.

    Examples:
        >>> resident(gpu("h200"), Block(threads=128, registers=58, smem_bytes=41_024))
        5
    """

    threads: int
    registers: int
    smem_bytes: int = 0

    def __post_init__(self) -> None:
        minimums = {"threads": 1, "registers": 1, "smem_bytes": 0}
        problems = []
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value < minimum:
                problems.append(f"{name} is {value}, the minimum is {minimum}.")
        if problems:
            raise OccupancyError(
                "The thread block is not valid.",
                where="Block",
                why="\n".join(problems),
                do="Block(threads=128, registers=90, smem_bytes=90_176)",
            )

    def padded(self, pad_bytes: int) -> Block:
        """Returns the block with more shared memory."""
        return dataclasses.replace(self, smem_bytes=self.smem_bytes + pad_bytes)


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """The resources allocated to a block: rounded up to the units of a GPU."""

    warps: int  # of the block
    warp_registers: int  # of one warp
    smem_bytes: int  # including the driver's share


def cost(gpu: GpuFacts, block: Block) -> BlockCost:
    """Returns the resources allocated to a block on a GPU."""
    return BlockCost(
        warps=-(-block.threads // gpu.warp_size),
        warp_registers=rounded_up(block.registers * gpu.warp_size, gpu.register_unit),
        smem_bytes=rounded_up(block.smem_bytes + gpu.smem_reserved_bytes, gpu.smem_unit_bytes),
    )


# ---- one kernel


def refusals(gpu: GpuFacts, block: Block) -> tuple[str, ...]:
    """Returns why a GPU cannot run the block at all, each reason with its limit; empty if it can."""
    reasons = []
    if block.threads > gpu.threads_per_block:
        reasons.append(above_limit(gpu.title, block.threads, "threads", gpu.threads_per_block, "in a block"))
    if block.registers > gpu.registers_per_thread:
        reasons.append(
            above_limit(gpu.title, block.registers, "registers per thread", gpu.registers_per_thread, "per thread")
        )
    if block.smem_bytes > gpu.smem_per_block_bytes:
        reasons.append(
            above_limit(gpu.title, block.smem_bytes, "bytes of shared memory", gpu.smem_per_block_bytes, "in a block")
        )
    if reasons:
        return tuple(reasons)
    allocated = cost(gpu, block)
    slots = _register_slots(gpu, allocated.warp_registers)
    if allocated.warps > slots:
        warps = f"{allocated.warps} warps of {allocated.warp_registers:,} registers"
        reasons.append(f"{warps}, and {gpu.title} holds {slots} of them at once.")
    return tuple(reasons)


def above_limit(gpu_title: str, value: int, resource: str, limit: int, unit: str) -> str:
    """Returns the sentence that a kernel takes more of a resource than a GPU has."""
    return f"{value:,} {resource}, and {gpu_title} has at most {limit:,} {unit}."


def check(gpu: GpuFacts, block: Block) -> None:
    """Raises for a block that a GPU cannot run.

    Raises:
        OccupancyError: with every limit that the block exceeds.
    """
    reasons = refusals(gpu, block)
    if reasons:
        raise OccupancyError(
            f"The thread block cannot run on {gpu.title}.",
            where=f"Block(threads={block.threads}, registers={block.registers}, smem_bytes={block.smem_bytes:_})",
            why="\n".join(reasons),
            do="use smaller tiles, fewer pipeline stages or less padding.",
        )


def limits(gpu: GpuFacts, block: Block) -> dict[str, int]:
    """Returns how many blocks of a kernel each resource of a multiprocessor would hold, were it the only limit."""
    allocated = cost(gpu, block)
    return {
        "warps": gpu.warps_per_sm // allocated.warps,
        "registers": _register_slots(gpu, allocated.warp_registers) // allocated.warps,
        "shared memory": gpu.smem_per_sm_bytes // max(allocated.smem_bytes, 1),
        "blocks": gpu.blocks_per_sm,
    }


def resident(gpu: GpuFacts, block: Block) -> int:
    """Returns the number of blocks of one kernel that a multiprocessor holds at once; 0 if it cannot run."""
    if refusals(gpu, block):
        return 0
    return min(limits(gpu, block).values())


def paddings(gpu: GpuFacts, block: Block) -> tuple[tuple[int, int], ...]:
    """Returns every number of resident blocks that padding can achieve, in descending order.

    Returns:
        Pairs of that number and the least padding for it, in bytes.
    """
    most = resident(gpu, block)
    achievable = []
    for count in range(most, 0, -1):
        pad_bytes = 0 if count == most else _least_padding(gpu, block, count)
        # Where the unit of padding is coarse, it skips some numbers.
        if resident(gpu, block.padded(pad_bytes)) == count:
            achievable.append((count, pad_bytes))
    return tuple(achievable)


def _least_padding(gpu: GpuFacts, block: Block, count: int) -> int:
    """Returns the least padding with which `count` + 1 blocks do not fit by their shared memory."""
    too_many = count + 1
    # The least allocation of which so many exceed the multiprocessor. Requests are rounded up to units, so the least
    # request for it is one byte more than the unit before.
    allocated = rounded_up(gpu.smem_per_sm_bytes // too_many + 1, gpu.smem_unit_bytes)
    requested = allocated - gpu.smem_unit_bytes + 1
    missing = max(0, requested - gpu.smem_reserved_bytes - block.smem_bytes)
    return rounded_up(missing, PAD_UNIT_BYTES)


def _register_slots(gpu: GpuFacts, warp_registers: int) -> int:
    """Returns the number of warps of one kernel that fit the registers of a multiprocessor."""
    # A warp's registers are in one partition. So each partition is rounded down by itself.
    return gpu.registers_per_sm // gpu.partitions // warp_registers * gpu.partitions


def rounded_up(value: int, unit: int) -> int:
    """Returns the least multiple of a unit that is at least as large."""
    return -(-value // unit) * unit


# ---- a kernel beside a block of communication


def room_beside(gpu: GpuFacts, block: Block, comm: Block) -> int:
    """Returns the most blocks of a kernel that leave room on a multiprocessor for a block of communication.

    0: even one leaves no room.
    """
    if refusals(gpu, comm):
        return 0
    return most_that_fit(resident(gpu, block), lambda count: fit(gpu, block, count, comm))


def most_that_fit(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to `most` that fits; 0 if none does."""
    for count in range(most, 0, -1):
        if fits(count):
            return count
    return 0


def drain(gpu: GpuFacts, block: Block, comm: Block) -> int:
    """Returns how many blocks of a kernel must end on a multiprocessor before a communication block can start there.

    0: it need not wait. 1: with a higher priority it takes the place of the next block that ends. More: several must
    end on the same multiprocessor, while others may take their places.
    """
    return resident(gpu, block) - room_beside(gpu, block, comm)


@dataclasses.dataclass(frozen=True)
class _PartitionRoom:
    """What is left in a partition of a multiprocessor; negative if the warps there need more than it has."""

    warps: int
    registers: int

    def beside(self, warps: int, warp_registers: int) -> _PartitionRoom:
        """Returns what is left beside some warps more."""
        return _PartitionRoom(self.warps - warps, self.registers - warps * warp_registers)

    @property
    def is_overfull(self) -> bool:
        return self.warps < 0 or self.registers < 0

    def fitting(self, warp_registers: int) -> int:
        """Returns how many warps fit in what is left."""
        return min(self.warps, self.registers // warp_registers)


def fit(gpu: GpuFacts, block: Block, count: int, comm: Block) -> bool:
    """Returns whether `count` blocks of a kernel, and one of communication, fit on a multiprocessor at once.

    Neither of them alone is too large for it.
    """
    kernel = cost(gpu, block)
    other = cost(gpu, comm)
    if count + 1 > gpu.blocks_per_sm:
        return False
    if kernel.smem_bytes * count + other.smem_bytes > gpu.smem_per_sm_bytes:
        return False

    # Every partition has the same number of whole rounds of warps.
    partition = _PartitionRoom(gpu.warps_per_sm // gpu.partitions, gpu.registers_per_sm // gpu.partitions)
    room = partition.beside(kernel.warps // gpu.partitions * count, kernel.warp_registers)
    room = room.beside(other.warps // gpu.partitions, other.warp_registers)
    if room.is_overfull:
        return False

    # The rest of a block, fewer warps than there are partitions, goes into that many different partitions. So some
    # partitions have one warp of communication more than the others.
    kernel_rest = kernel.warps % gpu.partitions
    comm_rest = other.warps % gpu.partitions
    smaller_room = room.beside(1, other.warp_registers)
    if comm_rest > 0 and smaller_room.is_overfull:
        return False

    # A block puts at most one warp of its rest into a partition: with `count` blocks, at most `count` of them.
    in_smaller = min(count, smaller_room.fitting(kernel.warp_registers))
    in_larger = min(count, room.fitting(kernel.warp_registers))
    places = comm_rest * in_smaller + (gpu.partitions - comm_rest) * in_larger
    return kernel_rest * count <= places
