"""A product of matrices with something done to each tile of it before it is stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jshard import _compat
from jshard.kernels.knobs import LEAST_TILE, WARPGROUP_ROWS, KernelError, Occupancy

Epilogue = Callable[..., tuple[jax.Array, ...]]
_MOST_SUMS = 128 * 128  # float32 of a warpgroup's tile: half of its registers
_MOST_BARRIERS_BYTES = 1024  # of the pipeline
_GROUP = 8  # tiles along m that blocks visit before they go on along n, so that L2 holds what neighbours share


@dataclasses.dataclass(frozen=True)
class Product:
    """`epilogue(A @ B_0, A @ B_1, ..., vectors)`, of which every B shares the tiles of A."""

    name: str  # of the kernel, in profiles and in the compiled program
    a_transposed: bool  # whether A is stored as (k, m)
    b_transposed: bool  # whether each B is stored as (n, k)
    num_b: int  # how many products share A
    # Takes a float32 tile of each product, then a row of each vector spread over the tile's rows, and gives a tile of
    # each output.
    epilogue: Epilogue
    num_out: int = 1  # how many outputs there are, of the operands' dtype

    def sizes(self, a: Any, b: Any) -> tuple[int, int, int]:
        """m, n and k of two operands as they are stored."""
        m, k = a.shape[::-1] if self.a_transposed else a.shape
        return m, b.shape[0] if self.b_transposed else b.shape[1], k

    def plain(self) -> Product:
        """The same for operands that are stored untransposed."""
        return dataclasses.replace(self, a_transposed=False, b_transposed=False)


def padded(x: jax.Array, multiples: Sequence[int]) -> jax.Array:
    """An array with zeros at the end of its dims, up to multiples."""
    short = [-size % unit for size, unit in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, [(0, each) for each in short]) if any(short) else x


def smem_bytes(product: Product, knobs: Occupancy, dtype: Any) -> int:
    """Shared memory that a block asks for beside its barriers."""
    tile = knobs.tile_m * knobs.tile_k + product.num_b * knobs.tile_k * knobs.tile_n
    staged = knobs.stages * tile * np.dtype(dtype).itemsize
    return staged + math.prod(out_shape(knobs)) * np.dtype(dtype).itemsize + knobs.padded_bytes


def out_shape(knobs: Occupancy) -> tuple[int, ...]:
    """Shape of the shared memory through which outputs leave a block, one after another."""
    if not knobs.persistent:
        return knobs.tile_m, knobs.tile_n
    piece_m, piece_n, slots = pieces(knobs)
    return 2, slots, piece_m, piece_n  # for each of the warpgroups that compute


def pieces(knobs: Occupancy) -> tuple[int, int, int]:
    """How a persistent warpgroup stores its half of a tile: rows and columns of a piece, and pieces on the way."""
    rows = knobs.tile_m // 2
    piece_m, piece_n = min(WARPGROUP_ROWS, rows), min(LEAST_TILE, knobs.tile_n)
    return piece_m, piece_n, min(2, rows * knobs.tile_n // (piece_m * piece_n))


def check_fits(product: Product, knobs: Occupancy, dtype: Any, *, smem_limit_bytes: int, sms: int, title: str) -> None:
    """Refuses knobs that a GPU cannot give."""
    wrong = []
    need = smem_bytes(product, knobs, dtype) + _MOST_BARRIERS_BYTES
    if need > smem_limit_bytes:
        wrong.append(f"{need:,} bytes of shared memory, where a block has {smem_limit_bytes:,} at most.")
    if _sums(product, knobs) > _MOST_SUMS:
        sums = f"{_sums(product, knobs):,} sums in the registers of a warpgroup"
        wrong.append(f"{sums}, which takes {_MOST_SUMS:,} without spilling.")
    if knobs.reserved_sms >= sms:
        wrong.append(f"reserved_sms={knobs.reserved_sms} leaves none of {sms} multiprocessors.")
    if wrong:
        raise KernelError(
            f"The GPU cannot run {product.name} like this.",
            where=f"{title}: {knobs}",
            why="\n".join(wrong),
            do=_advice(product, knobs, dtype, smem_limit_bytes, sms),
        )


def _sums(product: Product, knobs: Occupancy) -> int:
    """Float32 numbers that a computing warpgroup holds of its tile."""
    return product.num_b * knobs.tile_m * knobs.tile_n // (2 if knobs.persistent else 1)


def _advice(product: Product, knobs: Occupancy, dtype: Any, smem_limit_bytes: int, sms: int) -> str:
    """Knobs near these that the GPU can give: the largest tiles of their kind, then fewer stages, then less padding."""
    changed: dict[str, int] = {}
    if knobs.reserved_sms >= sms:
        changed["reserved_sms"] = 16
    if _sums(product, knobs) > _MOST_SUMS:
        changed |= {"tile_m": (2 if knobs.persistent else 1) * 128 // product.num_b, "tile_n": 128}
    bare = dataclasses.replace(knobs, **changed, smem_pad_bytes=0)
    most = smem_limit_bytes - _MOST_BARRIERS_BYTES
    for short in (bare, dataclasses.replace(bare, tile_k=LEAST_TILE)):
        for stages in range(short.stages, 1, -1):
            room = most - smem_bytes(product, dataclasses.replace(short, stages=stages), dtype)
            if room < 0:
                continue
            changed |= {"stages": stages, "tile_k": short.tile_k}
            changed["smem_pad_bytes"] = min(knobs.padded_bytes, room // 1024 * 1024)
            shown = {name: each for name, each in changed.items() if each != getattr(knobs, name)}
            return f"dataclasses.replace(occupancy, {', '.join(f'{name}={each}' for name, each in shown.items())})"
    return "Occupancy(), whose tiles fit."


class Refs(NamedTuple):
    """What the body of a kernel is given: arrays in device memory, and shared memory."""

    a: Any
    bs: Sequence[Any]
    vectors: Sequence[Any]
    outs: Sequence[Any]
    stage: Any  # shared memory through which outputs leave

    @classmethod
    def of(cls, product: Product, refs: Sequence[Any], num_vectors: int) -> Refs:
        """Sorts them as they come."""
        bs = 1 + product.num_b
        vectors = bs + num_vectors
        outs = vectors + product.num_out
        return cls(refs[0], refs[1:bs], refs[bs:vectors], refs[vectors:outs], refs[outs])


class Tile(NamedTuple):
    """Where a tile of the outputs is."""

    rows: Any
    cols: Any
    first_col: jax.Array

    @classmethod
    def at(cls, number: jax.Array, tiles: tuple[int, int], knobs: Occupancy) -> Tile:
        """The tile of a number: blocks that run at the same time share rows and columns."""
        m, n = plgpu.planar_snake(number, tiles, 0, _GROUP)
        first_row, first_col = m * knobs.tile_m, n * knobs.tile_n
        return cls(pl.ds(first_row, knobs.tile_m), pl.ds(first_col, knobs.tile_n), first_col)


@dataclasses.dataclass(frozen=True)
class Operands:
    """How the tiles of a product's operands come into shared memory: the same for both forms of the kernel."""

    product: Product
    knobs: Occupancy
    dtype: Any

    def specs(self) -> list[plgpu.BlockSpec]:
        """One for A, and one for each B; the step along k is the index."""
        knobs = self.knobs
        a = self._spec(knobs.tile_m, across=self.product.a_transposed)
        b = self._spec(knobs.tile_n, across=not self.product.b_transposed)
        return [a] + [b] * self.product.num_b

    def _spec(self, tile: int, *, across: bool) -> plgpu.BlockSpec:
        k = self.knobs.tile_k
        shape, index = ((k, tile), lambda i: (i, 0)) if across else ((tile, k), lambda i: (0, i))
        return plgpu.BlockSpec(shape, index, transforms=layout(shape[1], self.dtype), delay_release=self._open_steps)

    @property
    def _open_steps(self) -> int:
        """Steps whose products may be under way when the next one begins: their tiles are kept so much longer.

        None where one pipeline follows another, as blocks walk over tiles: what is kept when a pipeline ends is not
        waited for by the next, which would load over it.
        """
        return 0 if self.knobs.persistent else 1

    def windows(self, refs: Refs, tile: Tile) -> list[Any]:
        """What a block reads of the operands for a tile."""
        of_a = refs.a.at[:, tile.rows] if self.product.a_transposed else refs.a.at[tile.rows]
        return [of_a, *(b.at[tile.cols] if self.product.b_transposed else b.at[:, tile.cols] for b in refs.bs)]

    def accumulators(self, rows: int) -> list[Any]:
        """Registers of a warpgroup for its rows of a tile, of each product."""
        return [plgpu.WGMMAAccumulatorRef((rows, self.knobs.tile_n), jnp.float32)] * self.product.num_b

    def multiply(self, a: Any, bs: Sequence[Any], sums: Sequence[Any]) -> None:
        """One step along k: adds the products of the tiles in shared memory to the sums in registers."""
        a = _compat.pallas_transposed(a) if self.product.a_transposed else a
        for b, total in zip(bs, sums, strict=True):
            plgpu.wgmma(total, a, _compat.pallas_transposed(b) if self.product.b_transposed else b)
        plgpu.wgmma_wait(self._open_steps * len(sums))


def layout(minor: int, dtype: Any) -> tuple[Any, ...]:
    """The layout of a tile in shared memory so that the tensor cores and the copy engine read it without conflicts."""
    itemsize = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(minor * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def spread(refs: Refs, first: jax.Array, shape: tuple[int, int], *, interpret: bool) -> list[jax.Array]:
    """A part of each vector in device memory, from the element `first` on, as every row of a tile."""
    cols = pl.ds(first, shape[1])
    parts = [_compat.pallas_load(vector, cols, interpret=interpret).astype(jnp.float32) for vector in refs.vectors]
    return [jax.lax.broadcast_in_dim(part, shape, (1,)) for part in parts]


def launched(
    product: Product,
    body: Callable[..., None],
    a: jax.Array,
    bs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    knobs: Occupancy,
    *,
    form: str,
    **how: Any,
) -> list[jax.Array]:
    """Runs a body, which takes what `Refs.of` sorts."""
    m, n, _ = product.sizes(a, bs[0])
    shape = out_shape(knobs)
    # What outputs leave through; and what is taken and never touched.
    scratch = [plgpu.SMEM(shape, a.dtype, transforms=layout(shape[-1], a.dtype))]
    scratch += [plgpu.SMEM((knobs.padded_bytes,), jnp.int8)] if knobs.padded_bytes else []
    out_type = [jax.ShapeDtypeStruct((m, n), a.dtype)] * product.num_out
    kernel = _compat.mosaic_kernel(body, name=f"{product.name}_{form}", out_type=out_type, scratch=scratch, **how)
    return kernel(a, *bs, *vectors)
