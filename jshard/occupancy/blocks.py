"""Which thread blocks one multiprocessor holds at once, alone and beside a block of communication.

The rules of NVIDIA's `cuda_occupancy.h`, and the same taken on to blocks of two kernels. Shared memory is one pool.
Registers are not: they are given to whole warps, and a warp is in one partition of the multiprocessor. The warps of a
block are taken to be spread evenly over the partitions, as those of a warpgroup must be. So what a block leaves is not
one sum: where 17 warps are spread 5, 4, 4 and 4, four more warps have only what the first partition has left. For one
kernel this is what `cuda_occupancy.h` computes; for two it is an assumption, `GpuFacts.placement`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jshard.facts.gpus import GpuFacts, OccupancyError

PAD_UNIT_BYTES = 1024
"""Padding is a whole number of these: Mosaic aligns every buffer in shared memory to it."""


@dataclasses.dataclass(frozen=True)
class Block:
    """What one thread block takes.

    Attributes:
        threads: of the block.
        registers: 32-bit registers of a thread, as the compiler reports them.
        smem_bytes: shared memory, static and dynamic together.

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
                "The thread block cannot be.",
                where="Block",
                why="\n".join(f"{name} is {value}, the least is {least[name]}." for name, value in wrong.items()),
                do="Block(threads=128, registers=90, smem_bytes=90_176)",
            )

    def padded(self, pad_bytes: int) -> Block:
        """The block with more shared memory."""
        return dataclasses.replace(self, smem_bytes=self.smem_bytes + pad_bytes)


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """What a block is given: rounded up to the units of a GPU."""

    warps: int  # of the block
    warp_registers: int  # of one warp
    smem_bytes: int  # with what the driver takes


def cost(gpu: GpuFacts, block: Block) -> BlockCost:
    """What a block is given on a GPU."""
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
            (block.registers, gpu.registers_per_thread, "registers by thread", "by thread"),
            (block.smem_bytes, gpu.smem_per_block_bytes, "bytes of shared memory", "in a block"),
        )
        if value > limit
    ]
    slots = _register_slots(gpu, taken.warp_registers)
    if not found and taken.warps > slots:
        found.append(
            f"{taken.warps} warps of {taken.warp_registers:,} registers, and of such {gpu.title} holds {slots} at once."
        )
    return tuple(found)


def check(gpu: GpuFacts, block: Block) -> None:
    """Refuses a block that a GPU cannot run.

    Raises:
        OccupancyError: with every limit that the block is over.
    """
    found = refusals(gpu, block)
    if found:
        raise OccupancyError(
            f"The thread block cannot run on {gpu.title}.",
            where=_pasted(block),
            why="\n".join(found),
            do=f"{_nearest(gpu, block)}: smaller tiles, fewer pipeline stages or less padding.",
        )


def limits(gpu: GpuFacts, block: Block) -> dict[str, int]:
    """How many blocks of one kernel a multiprocessor could hold if only this ran out, for each thing it has."""
    taken = cost(gpu, block)
    return {
        "warps": gpu.warps_per_sm // taken.warps,
        "registers": _register_slots(gpu, taken.warp_registers) // taken.warps,
        "shared memory": gpu.smem_per_sm_bytes // max(taken.smem_bytes, 1),
        "blocks": gpu.blocks_per_sm,
    }


def resident(gpu: GpuFacts, block: Block) -> int:
    """Blocks of one kernel that a multiprocessor holds at once; 0 if it cannot run."""
    return 0 if refusals(gpu, block) else min(limits(gpu, block).values())


def fits(gpu: GpuFacts, *parts: tuple[Block, int]) -> bool:
    """Whether one multiprocessor holds so many blocks of each of several kernels at the same time.

    Args:
        gpu: the GPU.
        *parts: a block and how many of it, for each kernel.
    """
    if any(count > resident(gpu, block) for block, count in parts):
        return False
    kinds = [(cost(gpu, block), count) for block, count in parts if count]
    if sum(count for _, count in kinds) > gpu.blocks_per_sm:
        return False
    if sum(taken.smem_bytes * count for taken, count in kinds) > gpu.smem_per_sm_bytes:
        return False
    return _pooled(gpu, kinds) if gpu.placement == "pooled" else _spread(gpu, kinds)


def room_beside(gpu: GpuFacts, block: Block, comm: Block) -> int:
    """The most blocks of a kernel beside which a multiprocessor still takes one block of communication; 0: none."""
    return max((n for n in range(1, resident(gpu, block) + 1) if fits(gpu, (block, n), (comm, 1))), default=0)


def drain(gpu: GpuFacts, block: Block, comm: Block) -> int:
    """Blocks of a kernel that must end on one multiprocessor before a block of communication can begin there.

    0: it need not wait. 1: with a higher priority it has the place of the next block that ends. More: several must end
    on the same multiprocessor, while others may take their places.
    """
    return resident(gpu, block) - room_beside(gpu, block, comm)


def pad_for(gpu: GpuFacts, block: Block, blocks_per_sm: int) -> int:
    """The least padding, in bytes and a multiple of 1,024, with which exactly so many blocks are resident.

    Args:
        gpu: the GPU.
        block: as it is without padding.
        blocks_per_sm: at least 1.

    Raises:
        OccupancyError: no padding does that; the error names the numbers that there are.

    Example:
        >>> pad_for(gpu("h200"), Block(threads=128, registers=58, smem_bytes=41_024), 2)
        35840
    """
    check(gpu, block)
    found = dict(paddings(gpu, block))
    if blocks_per_sm not in found:
        raise OccupancyError(
            f"No padding leaves {blocks_per_sm} blocks on a multiprocessor.",
            where=f"blocks_per_sm={blocks_per_sm}",
            why=f"{resident(gpu, block)} are resident without padding; with at most {gpu.smem_per_block_bytes:,} bytes"
            f" of shared memory in a block there can be {', '.join(map(str, found))}.",
            do=f"blocks_per_sm={min(found, key=lambda n: (abs(n - blocks_per_sm), n))}",
        )
    return found[blocks_per_sm]


def paddings(gpu: GpuFacts, block: Block) -> tuple[tuple[int, int], ...]:
    """Every number of resident blocks that padding can reach, from the most down, and the least padding for it."""
    found = []
    for wanted in range(resident(gpu, block), 0, -1):
        # wanted + 1 blocks must not fit by their shared memory.
        enough = _rounded(gpu.smem_per_sm_bytes // (wanted + 1) + 1, gpu.smem_unit_bytes) - gpu.smem_unit_bytes + 1
        missing = max(0, enough - gpu.smem_reserved_bytes - block.smem_bytes)
        pad = 0 if wanted == resident(gpu, block) else _rounded(missing, PAD_UNIT_BYTES)
        if resident(gpu, block.padded(pad)) == wanted:
            found.append((wanted, pad))
    return tuple(found)


def split_bytes(gpu: GpuFacts, *parts: tuple[Block, int]) -> int:
    """The least split of the cache that has the shared memory of these blocks; the largest if none has.

    The driver chooses it by the kernel that begins first, and changes it only on an idle multiprocessor: a block of
    communication that fits by the numbers waits all the same if the split is too small for both.
    """
    needed = sum(cost(gpu, block).smem_bytes * count for block, count in parts)
    return next((split for split in gpu.splits_bytes if split >= needed), gpu.splits_bytes[-1])


def _nearest(gpu: GpuFacts, block: Block) -> str:
    """The block cut down to the limits."""
    registers = min(block.registers, gpu.registers_per_thread)
    slots = _register_slots(gpu, cost(gpu, Block(1, registers)).warp_registers)
    threads = min(block.threads, gpu.threads_per_block, slots * gpu.warp_size)
    return _pasted(Block(threads, registers, min(block.smem_bytes, gpu.smem_per_block_bytes)))


def _pasted(block: Block) -> str:
    return f"Block(threads={block.threads}, registers={block.registers}, smem_bytes={block.smem_bytes:_})"


def _register_slots(gpu: GpuFacts, warp_registers: int) -> int:
    """Warps of one kernel whose registers a multiprocessor has."""
    return gpu.registers_per_sm // gpu.partitions // warp_registers * gpu.partitions


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _pooled(gpu: GpuFacts, kinds: Sequence[tuple[BlockCost, int]]) -> bool:
    warps = sum(taken.warps * count for taken, count in kinds)
    registers = sum(taken.warps * taken.warp_registers * count for taken, count in kinds)
    return warps <= gpu.warps_per_sm and registers <= gpu.registers_per_sm


def _spread(gpu: GpuFacts, kinds: Sequence[tuple[BlockCost, int]]) -> bool:
    """Whether the partitions have room for blocks whose warps are spread evenly.

    Every partition has the same number of whole rounds of warps. What is left of each block, fewer warps than there are
    partitions, goes into that many different ones.
    """
    rounds = [(taken.warps // gpu.partitions * count, taken.warp_registers) for taken, count in kinds]
    slots = gpu.warps_per_sm // gpu.partitions - sum(warps for warps, _ in rounds)
    registers = gpu.registers_per_sm // gpu.partitions - sum(warps * size for warps, size in rounds)
    rest = tuple(
        (taken.warp_registers, taken.warps % gpu.partitions * count, count)
        for taken, count in kinds
        if taken.warps % gpu.partitions
    )
    return slots >= 0 and registers >= 0 and _placed(rest, gpu.partitions, slots, registers)


_Rest = tuple[tuple[int, int, int], ...]  # of each kernel: registers of a warp, warps, and the most in one partition


@functools.lru_cache(maxsize=1 << 16)
def _placed(rest: _Rest, partitions: int, slots: int, registers: int) -> bool:
    """Whether warps of several kernels find places in so many equal partitions."""
    if any(warps > most * partitions for _, warps, most in rest):
        return False
    if not any(warps for _, warps, _ in rest):
        return True
    return any(
        _placed(
            tuple((size, warps - n, most) for (size, warps, most), n in zip(rest, here, strict=True)),
            partitions - 1,
            slots,
            registers,
        )
        for here in _fillings(rest, slots, registers)
    )


def _fillings(rest: _Rest, slots: int, registers: int) -> list[tuple[int, ...]]:
    """What one partition can take; of the last kernel always as much as there is room for."""
    if not rest:
        return [()]
    (size, warps, most), *others = rest
    most = min(warps, most, slots, registers // size)
    fewest = 0 if others else most
    return [
        (here, *more)
        for here in range(most, fewest - 1, -1)
        for more in _fillings(tuple(others), slots - here, registers - here * size)
    ]
