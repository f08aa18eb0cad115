"""What is worth measuring for a product beside a collective: every distinct setting, and what the model says of it."""

from __future__ import annotations

import dataclasses
import math
import re

from jshard.kernels.knobs import LEAST_TILE, WARPGROUP_ROWS, Occupancy
from jshard.kernels.latency import product_ns
from jshard.kernels.occupancy import (
    CommFootprint,
    GpuFacts,
    Plan,
    ShippedKernel,
    plans,
    refusals,
    reserved_for,
    shipped_kernels,
)

_TILES = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)")
_SHIPPED = "matmul"  # the other products are the same kernel with an epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A setting and what the model expects of it.

    Attributes:
        setting: of the kernel; None for XLA's own product.
        plan: how it leaves room; None for XLA's own.
        alone_ns: an estimate of one call alone.
        both_ns: an estimate of the call and the collective together.
    """

    setting: Occupancy | None
    plan: Plan | None
    alone_ns: int
    both_ns: int

    @property
    def how(self) -> str:
        """How it leaves room, in few words."""
        if self.plan is None:
            return "not known: taken to make the collective wait"
        waits = {None: "the collective waits for the kernel", 0: "", 1: "the collective has the next block's place"}
        found = waits.get(self.plan.drain, f"{self.plan.drain} blocks must end on one SM: taken to wait")
        return found or self.plan.how


def candidates(gpu: GpuFacts, comm: CommFootprint, *, m: int, n: int, k: int, load_ns: float) -> tuple[Candidate, ...]:
    """The settings, the best by the model first; XLA's own product is one of them.

    The model takes all tiles to reach the same part of the peak, which they do not: it ranks how settings leave room.

    Args:
        gpu: it runs on.
        comm: what runs beside it.
        m: rows of the output.
        n: columns of it.
        k: what is summed.
        load_ns: what the collective takes if all its blocks run.

    Raises:
        OccupancyError: the collective would take every multiprocessor.
    """
    found: dict[Occupancy, Candidate] = {}
    for form, kernel in _forms(gpu).items():
        knobs = _fitted(form, m, n, k)
        for plan in plans(gpu, kernel.block, comm, persistent=kernel.persistent):
            setting = dataclasses.replace(
                knobs, smem_pad_bytes=plan.smem_pad_bytes, reserved_sms=plan.reserved_sms if knobs.persistent else 0
            )
            found.setdefault(setting, _estimated(gpu, comm, setting, plan, (m, n, k), load_ns))
    alone_ns = product_ns(m, n, k, kind=gpu.name)
    waits_ns = 0 if not comm.ctas else alone_ns
    plain = Candidate(setting=None, plan=None, alone_ns=alone_ns, both_ns=int(max(alone_ns, waits_ns + load_ns)))
    return tuple(sorted([*found.values(), plain], key=lambda one: (one.both_ns, one.alone_ns)))


def _forms(gpu: GpuFacts) -> dict[Occupancy, ShippedKernel]:
    """The forms of the kernel that a GPU can run; of one and its transposed ones that with the most registers."""
    found: dict[Occupancy, ShippedKernel] = {}
    for kernel in shipped_kernels(gpu):
        tiles = _TILES.search(kernel.tiles)
        if tiles is None or not kernel.is_called(_SHIPPED) or refusals(gpu, kernel.block):
            continue
        tile_m, tile_n, tile_k, stages = map(int, tiles.groups())
        how = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "stages": stages}
        knobs = Occupancy(**how, persistent=kernel.persistent)
        if knobs not in found or kernel.registers > found[knobs].registers:
            found[knobs] = kernel
    return found


def _fitted(knobs: Occupancy, m: int, n: int, k: int) -> Occupancy:
    """Tiles no larger than the arrays: two settings that differ only beyond them are one."""
    rows = 2 * WARPGROUP_ROWS if knobs.persistent else WARPGROUP_ROWS
    return dataclasses.replace(
        knobs,
        tile_m=_shrunk(knobs.tile_m, m, rows),
        tile_n=_shrunk(knobs.tile_n, n, LEAST_TILE),
        tile_k=_shrunk(knobs.tile_k, k, LEAST_TILE),
    )


def _shrunk(tile: int, size: int, least: int) -> int:
    """The tile, halved as long as a half of it holds the whole dim."""
    while tile % 2 == 0 and (tile // 2) % least == 0 and tile // 2 >= size:
        tile //= 2
    return tile


def _estimated(
    gpu: GpuFacts, comm: CommFootprint, setting: Occupancy, plan: Plan, sizes: tuple[int, int, int], load_ns: float
) -> Candidate:
    m, n, k = sizes
    each = 1 if setting.persistent else plan.blocks_per_sm  # tiles that a multiprocessor makes at once
    tiles = math.ceil(m / setting.tile_m) * math.ceil(n / setting.tile_n)
    rounds = math.ceil(tiles / ((gpu.num_sms - setting.reserved_sms) * each))
    round_ns = product_ns(m, n, k, kind=gpu.name) * gpu.num_sms * each / tiles
    alone_ns = rounds * round_ns
    both_ns = _together(gpu, comm, plan, alone_ns, alone_ns / rounds, load_ns)
    free = gpu.num_sms - math.ceil(tiles / each)
    if free >= reserved_for(gpu, comm):  # so few tiles that the collective finds empty multiprocessors
        both_ns = max(alone_ns, load_ns)
    return Candidate(setting=setting, plan=plan, alone_ns=int(alone_ns), both_ns=int(both_ns))


def _together(
    gpu: GpuFacts, comm: CommFootprint, plan: Plan, alone_ns: float, round_ns: float, load_ns: float
) -> float:
    """Until a kernel that fills the GPU, and a collective beside it, have ended."""
    if plan.reserved_sms or not comm.ctas:
        return max(alone_ns, load_ns)
    if plan.drain is None or plan.drain > 1:  # at worst the collective waits for the whole kernel
        return alone_ns + load_ns
    lost = plan.drain * min(comm.ctas, gpu.num_sms) / (gpu.num_sms * plan.blocks_per_sm)
    return max(alone_ns / (1 - min(lost, 0.99)), load_ns + plan.drain * round_ns)
