"""Matrix products on Pallas Mosaic GPU, for Hopper, with an epilogue on each tile before it is stored."""

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
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jshard import _compat
from jshard._text import PRODUCT
from jshard.kernels.backend import (
    LEAST_TILE,
    WARPGROUP_ROWS,
    KernelRun,
    Occupancy,
    TracedDevice,
    fitted,
    product_ns,
    refuse_knobs,
    stated,
    vary,
    varying_over,
)

Epilogue = Callable[..., tuple[jax.Array, ...]]
_MOST_SUMS = 128 * 128  # float32 of a warpgroup's tile: half of its registers
_MOST_BARRIERS_BYTES = 1024  # of the pipeline
WARPGROUPS = 3  # two that multiply, each half of a tile's rows, and one that loads
_LOADER_REGISTERS = 40  # of the warpgroup that loads; the others share what it leaves
_GROUP = 8  # tiles along m that blocks visit before they advance along n, so that L2 holds what neighbours share


@dataclasses.dataclass(frozen=True)
class Product:
    """`epilogue(A @ B_0, A @ B_1, ..., vectors)`; all products share the tiles of A."""

    name: str  # of the kernel, in profiles and in the compiled program
    a_transposed: bool  # whether A is stored as (k, m)
    b_transposed: bool  # whether each B is stored as (n, k)
    num_b: int  # how many products share A
    # Takes a float32 tile of each product, then a row of each vector broadcast to the tile's rows; returns a tile of
    # each output.
    epilogue: Epilogue
    num_out: int = 1  # how many outputs there are, of the operands' dtype

    def sizes(self, a: Any, b: Any) -> tuple[int, int, int]:
        """m, n and k of two operands as they are stored."""
        m, k = a.shape[::-1] if self.a_transposed else a.shape
        return m, b.shape[0] if self.b_transposed else b.shape[1], k


def padded(x: jax.Array, multiples: Sequence[int]) -> jax.Array:
    """An array with zeros at the end of its dims, up to multiples."""
    short = [-size % unit for size, unit in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, [(0, each) for each in short]) if any(short) else x


def smem_bytes(product: Product, knobs: Occupancy, dtype: Any) -> int:
    """Shared memory that a block requests besides its barriers."""
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
    """How a persistent warpgroup stores its half of a tile: rows and columns of a piece, and pieces in flight."""
    rows = knobs.tile_m // 2
    piece_m, piece_n = min(WARPGROUP_ROWS, rows), min(LEAST_TILE, knobs.tile_n)
    return piece_m, piece_n, min(2, rows * knobs.tile_n // (piece_m * piece_n))


def check_fits(product: Product, knobs: Occupancy, dtype: Any, here: TracedDevice) -> None:
    """Raises for knobs that need more than the GPU has."""
    wrong = []
    need = smem_bytes(product, knobs, dtype) + _MOST_BARRIERS_BYTES
    if need > here.smem_limit_bytes:
        wrong.append(f"{need:,} bytes of shared memory: a block has at most {here.smem_limit_bytes:,}.")
    sums = product.num_b * knobs.tile_m * knobs.tile_n // (2 if knobs.persistent else 1)
    if sums > _MOST_SUMS:
        wrong.append(f"{sums:,} sums in the registers of a warpgroup: {_MOST_SUMS:,} fit without spilling.")
    if knobs.reserved_sms >= here.sms:
        wrong.append(f"reserved_sms={knobs.reserved_sms} leaves none of {here.sms} multiprocessors.")
    refuse_knobs(product.name, knobs, here, wrong)


class Refs(NamedTuple):
    """The arguments of a kernel's body: arrays in device memory, and shared memory."""

    a: Any
    bs: Sequence[Any]
    vectors: Sequence[Any]
    outs: Sequence[Any]
    stage: Any  # shared memory through which outputs leave

    @classmethod
    def of(cls, product: Product, refs: Sequence[Any], num_vectors: int) -> Refs:
        """Sorts the arguments by their order."""
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
        """The tile with this number: blocks that run at the same time share rows and columns."""
        m, n = plgpu.planar_snake(number, tiles, 0, _GROUP)
        first_row, first_col = m * knobs.tile_m, n * knobs.tile_n
        return cls(pl.ds(first_row, knobs.tile_m), pl.ds(first_col, knobs.tile_n), first_col)


@dataclasses.dataclass(frozen=True)
class Operands:
    """How the tiles of a product's operands are loaded into shared memory: the same for both forms of the kernel."""

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
        """Steps whose products may still be running when the next step begins: their tiles are kept that much longer.

        Zero if one pipeline follows another, as when blocks walk over tiles: the next pipeline would not wait for
        tiles kept at the end of one, and would overwrite them.
        """
        return 0 if self.knobs.persistent else 1

    def windows(self, refs: Refs, tile: Tile) -> list[Any]:
        """The parts of the operands that a block reads for a tile."""
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
    return [lax.broadcast_in_dim(part, shape, (1,)) for part in parts]


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
    # The memory through which outputs leave; and the padding, which is never touched.
    scratch = [plgpu.SMEM(shape, a.dtype, transforms=layout(shape[-1], a.dtype))]
    scratch += [plgpu.SMEM((knobs.padded_bytes,), jnp.int8)] if knobs.padded_bytes else []
    out_type = [jax.ShapeDtypeStruct((m, n), a.dtype)] * product.num_out
    kernel = _compat.mosaic_kernel(body, name=f"{product.name}_{form}", out_type=out_type, scratch=scratch, **how)
    return kernel(a, *bs, *vectors)


def persistent(
    product: Product,
    a: jax.Array,
    bs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    knobs: Occupancy,
    *,
    blocks: int,
    interpret: bool = False,
) -> list[jax.Array]:
    """Computes the outputs, (m, n) each, of whole tiles: one block on each multiprocessor in use walks over them."""
    m, n, k = product.sizes(a, bs[0])
    tiles = m // knobs.tile_m, n // knobs.tile_n
    operands = Operands(product, knobs, a.dtype)

    def pipeline(step: Callable[..., Any], compute: Callable[..., Any]) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // knobs.tile_k,),
            memory_registers=_LOADER_REGISTERS,
            in_specs=operands.specs(),
            wg_axis="warpgroup",
            num_compute_wgs=WARPGROUPS - 1,
            max_concurrent_steps=knobs.stages,
            compute_context=compute,
        )

    def step(_: Any, a: Any, *rest: Any) -> Any:
        bs, totals = rest[: product.num_b], rest[product.num_b]
        rows = _half(knobs)
        operands.multiply(a.at[:, rows] if product.a_transposed else a.at[rows], bs, totals)
        return totals

    def body(*given: Any) -> None:
        refs = Refs.of(product, given, len(vectors))
        nothing = lambda *_, **__: None

        def walk(allocations: Any) -> None:
            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
            def _(loop: Any) -> None:
                tile = Tile.at(loop.index[0], tiles, knobs)
                compute = lambda run: _compute(operands, refs, tile, run, interpret=interpret)
                pipeline(step, compute)(*operands.windows(refs, tile), allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

        # The memory that the pipeline needs does not depend on what it computes.
        allocations = pipeline(nothing, nothing).get_allocations(refs.a, *refs.bs)
        pl.run_scoped(walk, allocations=allocations, collective_axes="warpgroup")

    how = {"grid": (min(blocks, tiles[0] * tiles[1]),), "grid_names": ("block",), "interpret": interpret}
    threads = {"num_threads": WARPGROUPS, "thread_name": "warpgroup"}
    return launched(product, body, a, bs, vectors, knobs, form="persistent", **how, **threads)


def _half(knobs: Occupancy) -> Any:
    """The rows of a tile that a computing warpgroup computes."""
    rows = knobs.tile_m // 2
    return pl.ds(lax.axis_index("warpgroup") * rows, rows)


def _compute(operands: Operands, refs: Refs, tile: Tile, run: Callable[[Any], Any], *, interpret: bool) -> None:
    """A computing warpgroup's part of a tile; `run` is the pipeline."""

    def sums(*totals: Any) -> None:
        run(totals)
        plgpu.wgmma_wait(0)
        _store(operands, refs, tile, [total[...] for total in totals], interpret=interpret)

    pl.run_scoped(sums, *operands.accumulators(operands.knobs.tile_m // 2))


def _store(operands: Operands, refs: Refs, tile: Tile, products: Sequence[jax.Array], *, interpret: bool) -> None:
    """Finishes a warpgroup's half of the tiles piece by piece, and writes one piece while the next is computed.

    In pieces, because the epilogue's result for a whole tile would not fit into the registers beside the tile.
    """
    knobs, stage = operands.knobs, refs.stage
    outs = [out.at[tile.rows, tile.cols].at[_half(knobs)] for out in refs.outs]
    piece_m, piece_n, slots = pieces(knobs)
    warpgroup = lax.axis_index("warpgroup")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    count = 0
    for col in range(0, knobs.tile_n, piece_n):
        vectors = spread(refs, tile.first_col + col, (piece_m, piece_n), interpret=interpret)
        for row in range(0, knobs.tile_m // 2, piece_m):
            part = slice(row, row + piece_m), slice(col, col + piece_n)
            results = operands.product.epilogue(*(each[part] for each in products), *vectors)
            for result, out in zip(results, outs, strict=True):
                slot = count % slots
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                stage[warpgroup, slot] = result.astype(stage.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stage.at[warpgroup, slot], out.at[part])
                count += 1


def tiled(
    product: Product,
    a: jax.Array,
    bs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    knobs: Occupancy,
    *,
    interpret: bool = False,
) -> list[jax.Array]:
    """Computes the outputs with one block of one warpgroup per tile: several blocks share a multiprocessor."""
    m, n, k = product.sizes(a, bs[0])
    shape = knobs.tile_m, knobs.tile_n
    tiles = m // shape[0], n // shape[1]
    operands = Operands(product, knobs, a.dtype)

    def body(*given: Any) -> None:
        refs, tile = Refs.of(product, given, len(vectors)), Tile.at(lax.axis_index("tile"), tiles, knobs)
        products = _products(operands, refs, tile, steps=k // knobs.tile_k)
        results = product.epilogue(*products, *spread(refs, tile.first_col, shape, interpret=interpret))
        for result, out in zip(results, refs.outs, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refs.stage[...] = result.astype(refs.stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.stage, out.at[tile.rows, tile.cols])
        plgpu.wait_smem_to_gmem(0)

    how = {"grid": (tiles[0] * tiles[1],), "grid_names": ("tile",), "interpret": interpret}
    return launched(product, body, a, bs, vectors, knobs, form="tiled", **how)


def _products(operands: Operands, refs: Refs, tile: Tile, *, steps: int) -> tuple[jax.Array, ...]:
    """A tile of each product, in registers."""

    def sums(*totals: Any) -> tuple[jax.Array, ...]:
        plgpu.emit_pipeline(
            lambda _, a, *bs: operands.multiply(a, bs, totals),
            grid=(steps,),
            max_concurrent_steps=operands.knobs.stages,
            in_specs=operands.specs(),
        )(*operands.windows(refs, tile))
        plgpu.wgmma_wait(0)
        return tuple(total[...] for total in totals)

    return pl.run_scoped(sums, *operands.accumulators(operands.knobs.tile_m))


def run(
    call: KernelRun, product: Product, a: jax.Array, bs: Sequence[jax.Array], vectors: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Computes the outputs, (m, n) each, of operands of any size, which are padded to whole tiles."""
    here, interpret = call.here, call.interpret
    m, n, k = product.sizes(a, bs[0])
    knobs = fitted(call.knobs, m, n, k)
    check_fits(product, knobs, a.dtype, here)
    if interpret and not _compat.interpreter_transposes():
        a = a.T if product.a_transposed else a
        bs = [b.T if product.b_transposed else b for b in bs]
        product = dataclasses.replace(product, a_transposed=False, b_transposed=False)
    a_tiles, b_tiles = (knobs.tile_m, knobs.tile_k), (knobs.tile_k, knobs.tile_n)
    a = padded(a, a_tiles[::-1] if product.a_transposed else a_tiles)
    bs = [padded(b, b_tiles[::-1] if product.b_transposed else b_tiles) for b in bs]
    vectors = [padded(vector, (knobs.tile_n,)) for vector in vectors]
    latency_ns = knobs.latency_ns or product_ns(m, n, k, kind=here.kind, products=len(bs))

    @jax.custom_batching.sequential_vmap  # else all kernels of a batch would run at once, even those that must not run
    def launch(a: jax.Array, bs: Sequence[jax.Array], vectors: Sequence[jax.Array]) -> list[jax.Array]:
        if knobs.persistent:
            blocks = here.sms - knobs.reserved_sms
            return persistent(product, a, bs, vectors, knobs, blocks=blocks, interpret=interpret)
        return tiled(product, a, bs, vectors, knobs, interpret=interpret)

    with stated(latency_ns):
        outs = launch(a, bs, vectors)
    # The kernel's own type does not state over which mesh axes its results vary.
    axes = varying_over(a, *bs, *vectors)
    return [checkpoint_name(vary(out[:m, :n], axes), PRODUCT) for out in outs]
