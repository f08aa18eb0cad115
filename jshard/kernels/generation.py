"""The generations of GPUs that the kernels are written for, and what each asks of a product."""

from __future__ import annotations

import dataclasses

WARPGROUP_ROWS = 64  # rows of the smallest product that a warpgroup's tensor cores take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of a product, and how many steps of them are in shared memory at once."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What the tensor cores of GPUs with one major compute capability ask of the kernel of a product."""

    title: str
    capability: int  # the major number
    tiles: Tiles  # by default; every GPU of the generation has shared memory for them
    computing_warpgroups: int  # of a persistent block; each computes as many of a tile's rows
    most_sums: int  # float32 of a warpgroup's tiles that fit in its registers without spilling, beside all else

    def row_unit(self, *, persistent: bool) -> int:
        """Returns the number of which `tile_m` must be a multiple."""
        return WARPGROUP_ROWS * self.warpgroups(persistent=persistent)

    def warpgroups(self, *, persistent: bool) -> int:
        """Returns how many warpgroups of a block compute."""
        return self.computing_warpgroups if persistent else 1


HOPPER = Generation(
    title="Hopper",
    capability=9,
    tiles=Tiles(tile_m=256, tile_n=128, tile_k=64, stages=4),
    computing_warpgroups=2,
    most_sums=128 * 128,  # half of the registers: the operands stay in shared memory
)
AMPERE = Generation(
    title="Ampere",
    capability=8,
    tiles=Tiles(tile_m=128, tile_n=64, tile_k=64, stages=3),
    computing_warpgroups=1,
    most_sums=128 * 64,  # a quarter: the operands take more than another one
)
_GENERATIONS = {generation.capability: generation for generation in (HOPPER, AMPERE)}


def generation_of(capability: int) -> Generation | None:
    """Returns the generation with a major compute capability; None if no kernel is written for it."""
    return _GENERATIONS.get(capability)
