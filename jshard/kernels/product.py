"""The product that a kernel computes, and what its forms on every generation of GPUs share.

A product has two forms, of which the knobs choose one:

    persistent   one block on each multiprocessor in use walks over the tiles
    tiled        one block of one warpgroup for each tile; several blocks share a multiprocessor

In both, tiles of the operands pass through shared memory in a pipeline along k, sums stay in registers, and the results
of the epilogue leave through shared memory. How a warpgroup loads, multiplies and stores depends on the generation:
`hopper_product` and `ampere_product`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jshard import _compat
from jshard.kernels.backend import Occupancy

Epilogue = Callable[..., tuple[jax.Array, ...]]
"""Takes a float32 tile of each product, then a row of each vector broadcast to the tile's rows; returns a tile of each
output."""

Ref: TypeAlias = Any
"""An array in device memory, in shared memory or in registers, as Pallas passes it to a kernel's body."""

Slice = slice | pl.Slice

StageShape = tuple[int, ...]
"""The shape of the shared memory through which outputs leave a block, one after another."""

_GROUP = 8  # tiles along m that blocks visit before they advance along n, so that L2 holds what neighbours share


@dataclasses.dataclass(frozen=True)
class Product:
    """`epilogue(A @ B_0, A @ B_1, ..., vectors)`; all products share the tiles of A."""

    name: str  # of the kernel, in profiles and in the compiled program
    a_transposed: bool  # whether A is stored as (k, m)
    b_transposed: bool  # whether each B is stored as (n, k)
    num_b: int  # how many products share A
    epilogue: Epilogue
    num_out: int = 1  # how many outputs there are, of the operands' dtype

    def sizes(self, a: jax.Array, b: jax.Array) -> tuple[int, int, int]:
        """Returns m, n and k of two operands as they are stored."""
        m, k = a.shape[::-1] if self.a_transposed else a.shape
        n = b.shape[0] if self.b_transposed else b.shape[1]
        return m, n, k


class ProductInputs(NamedTuple):
    """What a product takes."""

    a: jax.Array
    bs: Sequence[jax.Array]
    vectors: Sequence[jax.Array]


def smem_bytes(product: Product, knobs: Occupancy, dtype: DTypeLike, stage: StageShape) -> int:
    """Returns the shared memory that a block requests besides its barriers."""
    itemsize = np.dtype(dtype).itemsize
    # Each stage of the pipeline has a tile of A and one of each B.
    tile_elements = knobs.tile_m * knobs.tile_k + product.num_b * knobs.tile_k * knobs.tile_n
    operand_bytes = knobs.stages * tile_elements * itemsize
    out_bytes = math.prod(stage) * itemsize
    return operand_bytes + out_bytes + knobs.padded_bytes


# ---- tiles of operands and outputs


class Refs(NamedTuple):
    """The arguments of a kernel's body: arrays in device memory, and shared memory."""

    a: Ref
    bs: Sequence[Ref]
    vectors: Sequence[Ref]
    outs: Sequence[Ref]
    stage: Ref  # shared memory through which outputs leave

    @classmethod
    def of(cls, product: Product, refs: Sequence[Ref], num_vectors: int) -> Refs:
        """Sorts the arguments by their order; the padding, if there is any, comes last and is left out."""
        bs_end = 1 + product.num_b
        vectors_end = bs_end + num_vectors
        outs_end = vectors_end + product.num_out
        return cls(
            a=refs[0],
            bs=refs[1:bs_end],
            vectors=refs[bs_end:vectors_end],
            outs=refs[vectors_end:outs_end],
            stage=refs[outs_end],
        )


class Tile(NamedTuple):
    """Where a tile of the outputs is."""

    rows: Slice
    cols: Slice
    first_col: jax.Array

    @classmethod
    def at(cls, number: jax.Array, grid: tuple[int, int], knobs: Occupancy) -> Tile:
        """Returns the tile with this number: blocks that run at the same time share rows and columns."""
        m, n = plgpu.planar_snake(number, grid, 0, _GROUP)
        first_row = m * knobs.tile_m
        first_col = n * knobs.tile_n
        return cls(pl.ds(first_row, knobs.tile_m), pl.ds(first_col, knobs.tile_n), first_col)


def grid_of(product: Product, inputs: ProductInputs, knobs: Occupancy) -> tuple[int, int]:
    """Returns the numbers of whole tiles along m and n."""
    m, n, _ = product.sizes(inputs.a, inputs.bs[0])
    return m // knobs.tile_m, n // knobs.tile_n


def steps_of(product: Product, inputs: ProductInputs, knobs: Occupancy) -> int:
    """Returns the number of whole tiles along k."""
    _, _, k = product.sizes(inputs.a, inputs.bs[0])
    return k // knobs.tile_k


@dataclasses.dataclass(frozen=True)
class Operands:
    """How the tiles of a product's operands are loaded into shared memory: the same for all forms of the kernel."""

    product: Product
    knobs: Occupancy
    dtype: np.dtype
    # Steps whose products may still be running when the next step begins: their tiles are kept that much longer.
    open_steps: int

    def specs(self) -> list[plgpu.BlockSpec]:
        """Returns one for A, and one for each B; the step along k is the index."""
        a = self._spec(self.knobs.tile_m, k_first=self.product.a_transposed)
        b = self._spec(self.knobs.tile_n, k_first=not self.product.b_transposed)
        return [a] + [b] * self.product.num_b

    def _spec(self, tile: int, *, k_first: bool) -> plgpu.BlockSpec:
        tile_k = self.knobs.tile_k

        def index(step: jax.Array) -> tuple[jax.Array | int, jax.Array | int]:
            return (step, 0) if k_first else (0, step)

        shape = (tile_k, tile) if k_first else (tile, tile_k)
        return plgpu.BlockSpec(shape, index, transforms=layout(shape[1], self.dtype), delay_release=self.open_steps)

    def windows(self, refs: Refs, tile: Tile) -> list[Ref]:
        """Returns the parts of the operands that a block reads for a tile."""
        of_a = refs.a.at[:, tile.rows] if self.product.a_transposed else refs.a.at[tile.rows]
        windows = [of_a]
        for b in refs.bs:
            of_b = b.at[tile.cols] if self.product.b_transposed else b.at[:, tile.cols]
            windows.append(of_b)
        return windows

    def as_multiplied(self, a: Ref, bs: Sequence[Ref]) -> tuple[Ref, list[Ref]]:
        """Returns tiles in shared memory as (m, k) and (k, n), however they are stored."""
        if self.product.a_transposed:
            a = _compat.pallas_transposed(a)
        if self.product.b_transposed:
            bs = [_compat.pallas_transposed(b) for b in bs]
        return a, list(bs)


def layout(minor: int, dtype: DTypeLike) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Returns the layout of a tile in shared memory that the tensor cores and the copy engine read without conflicts.

    Args:
        minor: size of the last dim.
        dtype: of the tile.
    """
    itemsize = np.dtype(dtype).itemsize
    # `find_swizzle` takes bits. A row of the layout is as wide as the swizzle, and the swizzle repeats after 8 rows.
    swizzle_bytes = plgpu.find_swizzle(minor * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle_bytes // itemsize)), plgpu.SwizzleTransform(swizzle_bytes)


def spread(refs: Refs, first: jax.Array, shape: tuple[int, int], *, interpret: bool) -> list[jax.Array]:
    """Reads a part of each vector in device memory, from the element `first` on, as every row of a tile."""
    cols = pl.ds(first, shape[1])
    parts = [_compat.pallas_load(vector, cols, interpret=interpret).astype(jnp.float32) for vector in refs.vectors]
    return [lax.broadcast_in_dim(part, shape, (1,)) for part in parts]


def launch(
    product: Product,
    body: Callable[..., None],
    inputs: ProductInputs,
    knobs: Occupancy,
    *,
    form: str,
    stage: StageShape,
    **settings: Any,
) -> list[jax.Array]:
    """Runs a body on all tiles.

    Args:
        product: what it computes.
        body: of the kernel; it takes what `Refs.of` sorts.
        inputs: the operands, of whole tiles.
        knobs: tiles, and padding.
        form: its name.
        stage: shape of the shared memory through which outputs leave.
        settings: of the grid and its threads.
    """
    dtype = inputs.a.dtype
    m, n, _ = product.sizes(inputs.a, inputs.bs[0])
    # The memory through which outputs leave; and the padding, which is never touched.
    scratch = [plgpu.SMEM(stage, dtype, transforms=layout(stage[-1], dtype))]
    if knobs.padded_bytes:
        scratch.append(plgpu.SMEM((knobs.padded_bytes,), jnp.int8))
    out_type = [jax.ShapeDtypeStruct((m, n), dtype)] * product.num_out
    kernel = _compat.mosaic_kernel(body, name=f"{product.name}_{form}", out_type=out_type, scratch=scratch, **settings)
    return kernel(inputs.a, *inputs.bs, *inputs.vectors)
