"""Matrix products on Pallas Mosaic GPU, for Hopper, with an epilogue on each tile before it is stored.

A product has two forms, of which the knobs choose one:

    persistent   one block on each multiprocessor in use walks over the tiles. One of its warpgroups loads, and two
                 multiply, each half of a tile's rows.
    tiled        one block of one warpgroup for each tile; several blocks share a multiprocessor.

In both, tiles of the operands pass through shared memory in a pipeline along k, sums stay in registers, and the results
of the epilogue leave through shared memory.
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
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jshard import _compat
from jshard._text import PRODUCT
from jshard.kernels.backend import (
    LEAST_TILE,
    WARPGROUP_ROWS,
    KernelRun,
    Occupancy,
    fitted,
    product_ns,
    refuse_knobs,
    stated,
    vary,
    varying_over,
)
from jshard.kernels.device import TracedDevice

Epilogue = Callable[..., tuple[jax.Array, ...]]
"""Takes a float32 tile of each product, then a row of each vector broadcast to the tile's rows; returns a tile of each
output."""

Ref: TypeAlias = Any
"""An array in device memory, in shared memory or in registers, as Pallas passes it to a kernel's body."""

Slice = slice | pl.Slice

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


# ---- memory and registers of a block


def smem_bytes(product: Product, knobs: Occupancy, dtype: DTypeLike) -> int:
    """Returns the shared memory that a block requests besides its barriers."""
    itemsize = np.dtype(dtype).itemsize
    # Each stage of the pipeline has a tile of A and one of each B.
    tile_elements = knobs.tile_m * knobs.tile_k + product.num_b * knobs.tile_k * knobs.tile_n
    operand_bytes = knobs.stages * tile_elements * itemsize
    out_bytes = math.prod(out_shape(knobs)) * itemsize
    return operand_bytes + out_bytes + knobs.padded_bytes


def out_shape(knobs: Occupancy) -> tuple[int, ...]:
    """Returns the shape of the shared memory through which outputs leave a block, one after another."""
    if not knobs.persistent:
        return knobs.tile_m, knobs.tile_n
    pieces = TilePieces.of(knobs)
    return 2, pieces.slots, pieces.rows, pieces.cols  # for each of the warpgroups that compute


class TilePieces(NamedTuple):
    """How a persistent warpgroup stores its half of a tile: the size of a piece, and how many are in flight."""

    rows: int
    cols: int
    slots: int

    @classmethod
    def of(cls, knobs: Occupancy) -> TilePieces:
        """Returns the pieces for some knobs."""
        half_rows = knobs.tile_m // 2
        rows = min(WARPGROUP_ROWS, half_rows)
        cols = min(LEAST_TILE, knobs.tile_n)
        num_pieces = half_rows * knobs.tile_n // (rows * cols)
        return cls(rows, cols, min(2, num_pieces))


def check_fits(product: Product, knobs: Occupancy, dtype: DTypeLike, device: TracedDevice) -> None:
    """Raises for knobs that need more than the GPU has."""
    faults = []
    requested_bytes = smem_bytes(product, knobs, dtype) + _MOST_BARRIERS_BYTES
    if requested_bytes > device.smem_limit_bytes:
        faults.append(f"{requested_bytes:,} bytes of shared memory: a block has at most {device.smem_limit_bytes:,}.")
    num_warpgroups = 2 if knobs.persistent else 1
    num_sums = product.num_b * knobs.tile_m * knobs.tile_n // num_warpgroups
    if num_sums > _MOST_SUMS:
        faults.append(f"{num_sums:,} sums in the registers of a warpgroup: {_MOST_SUMS:,} fit without spilling.")
    if knobs.reserved_sms >= device.sms:
        faults.append(f"reserved_sms={knobs.reserved_sms} leaves none of {device.sms} multiprocessors.")
    refuse_knobs(product.name, knobs, device, faults)


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


@dataclasses.dataclass(frozen=True)
class Operands:
    """How the tiles of a product's operands are loaded into shared memory: the same for both forms of the kernel."""

    product: Product
    knobs: Occupancy
    dtype: np.dtype

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
        return plgpu.BlockSpec(shape, index, transforms=layout(shape[1], self.dtype), delay_release=self._open_steps)

    @property
    def _open_steps(self) -> int:
        """Steps whose products may still be running when the next step begins: their tiles are kept that much longer.

        Zero if one pipeline follows another, as when blocks walk over tiles: the next pipeline would not wait for
        tiles kept at the end of one, and would overwrite them.
        """
        return 0 if self.knobs.persistent else 1

    def windows(self, refs: Refs, tile: Tile) -> list[Ref]:
        """Returns the parts of the operands that a block reads for a tile."""
        of_a = refs.a.at[:, tile.rows] if self.product.a_transposed else refs.a.at[tile.rows]
        windows = [of_a]
        for b in refs.bs:
            of_b = b.at[tile.cols] if self.product.b_transposed else b.at[:, tile.cols]
            windows.append(of_b)
        return windows

    def accumulators(self, rows: int) -> list[plgpu.WGMMAAccumulatorRef]:
        """Returns registers of a warpgroup for its rows of a tile, of each product."""
        return [plgpu.WGMMAAccumulatorRef((rows, self.knobs.tile_n), jnp.float32)] * self.product.num_b

    def multiply(self, a: Ref, bs: Sequence[Ref], sums: Sequence[Ref]) -> None:
        """Adds the products of the tiles in shared memory to the sums in registers: one step along k."""
        if self.product.a_transposed:
            a = _compat.pallas_transposed(a)
        for b, total in zip(bs, sums, strict=True):
            if self.product.b_transposed:
                b = _compat.pallas_transposed(b)
            # Asynchronous: the tensor cores read the tiles until the wait below.
            plgpu.wgmma(total, a, b)
        # Each product is an operation of its own: those of the open steps may still be running after this.
        plgpu.wgmma_wait(self._open_steps * len(sums))


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


def _launch(
    product: Product, body: Callable[..., None], inputs: ProductInputs, knobs: Occupancy, *, form: str, **settings: Any
) -> list[jax.Array]:
    """Runs a body, which takes what `Refs.of` sorts; `settings` are of the grid and its threads."""
    dtype = inputs.a.dtype
    m, n, _ = product.sizes(inputs.a, inputs.bs[0])
    shape = out_shape(knobs)
    # The memory through which outputs leave; and the padding, which is never touched.
    scratch = [plgpu.SMEM(shape, dtype, transforms=layout(shape[-1], dtype))]
    if knobs.padded_bytes:
        scratch.append(plgpu.SMEM((knobs.padded_bytes,), jnp.int8))
    out_type = [jax.ShapeDtypeStruct((m, n), dtype)] * product.num_out
    kernel = _compat.mosaic_kernel(body, name=f"{product.name}_{form}", out_type=out_type, scratch=scratch, **settings)
    return kernel(inputs.a, *inputs.bs, *inputs.vectors)


# ---- the persistent form


def persistent(
    product: Product, inputs: ProductInputs, knobs: Occupancy, *, blocks: int, interpret: bool = False
) -> list[jax.Array]:
    """Computes the outputs, (m, n) each, of whole tiles: one block on each multiprocessor in use walks over them."""
    m, n, k = product.sizes(inputs.a, inputs.bs[0])
    grid = (m // knobs.tile_m, n // knobs.tile_n)
    num_tiles = grid[0] * grid[1]
    operands = Operands(product, knobs, inputs.a.dtype)

    def pipeline(step: Callable[..., Any], compute: Callable[..., None]) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // knobs.tile_k,),
            memory_registers=_LOADER_REGISTERS,
            in_specs=operands.specs(),
            wg_axis="warpgroup",
            num_compute_wgs=WARPGROUPS - 1,  # the other one loads
            max_concurrent_steps=knobs.stages,
            compute_context=compute,
        )

    def step(_: jax.Array, a: Ref, *bs_and_sums: Ref) -> Sequence[Ref]:
        bs = bs_and_sums[: product.num_b]
        sums = bs_and_sums[product.num_b]  # the carry of the pipeline
        rows = _half(knobs)
        half_of_a = a.at[:, rows] if product.a_transposed else a.at[rows]
        operands.multiply(half_of_a, bs, sums)
        return sums

    def compute_nothing(*_: object, **__: object) -> None:
        pass

    def body(*args: Ref) -> None:
        refs = Refs.of(product, args, len(inputs.vectors))

        def walk(allocations: object) -> None:
            @plgpu.nd_loop((num_tiles,), collective_axes="block")
            def _(loop: plgpu.NDLoopInfo) -> None:
                tile = Tile.at(loop.index[0], grid, knobs)

                def compute(run: Callable[[Sequence[Ref]], object]) -> None:
                    _compute_half(operands, refs, tile, run, interpret=interpret)

                pipeline(step, compute)(*operands.windows(refs, tile), allocations=allocations)

            # A block that ended earlier would give up the shared memory from which its last pieces are copied.
            plgpu.wait_smem_to_gmem(0)

        # Once for all tiles: the memory that the pipeline needs does not depend on what it computes.
        allocations = pipeline(compute_nothing, compute_nothing).get_allocations(refs.a, *refs.bs)
        pl.run_scoped(walk, allocations=allocations, collective_axes="warpgroup")

    return _launch(
        product,
        body,
        inputs,
        knobs,
        form="persistent",
        grid=(min(blocks, num_tiles),),  # a block without a tile would only occupy a multiprocessor
        grid_names=("block",),
        interpret=interpret,
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
    )


def _half(knobs: Occupancy) -> Slice:
    """Returns the rows of a tile that a computing warpgroup computes."""
    rows = knobs.tile_m // 2
    return pl.ds(lax.axis_index("warpgroup") * rows, rows)


def _compute_half(
    operands: Operands, refs: Refs, tile: Tile, run: Callable[[Sequence[Ref]], object], *, interpret: bool
) -> None:
    """Computes and stores a warpgroup's half of a tile; `run` is the pipeline."""

    def with_sums(*sums: Ref) -> None:
        run(sums)
        plgpu.wgmma_wait(0)
        _store_half(operands, refs, tile, [total[...] for total in sums], interpret=interpret)

    pl.run_scoped(with_sums, *operands.accumulators(operands.knobs.tile_m // 2))


def _store_half(operands: Operands, refs: Refs, tile: Tile, products: Sequence[jax.Array], *, interpret: bool) -> None:
    """Finishes a warpgroup's half of the tiles piece by piece, and writes one piece while the next is computed.

    In pieces, because the epilogue's result for a whole tile would not fit into the registers beside the tile.
    """
    knobs = operands.knobs
    outs = [out.at[tile.rows, tile.cols].at[_half(knobs)] for out in refs.outs]
    pieces = TilePieces.of(knobs)
    warpgroup = lax.axis_index("warpgroup")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the pieces of the tile before
    num_stored = 0
    for col in range(0, knobs.tile_n, pieces.cols):
        vectors = spread(refs, tile.first_col + col, (pieces.rows, pieces.cols), interpret=interpret)
        for row in range(0, knobs.tile_m // 2, pieces.rows):
            piece = (slice(row, row + pieces.rows), slice(col, col + pieces.cols))
            results = operands.product.epilogue(*(sums[piece] for sums in products), *vectors)
            for result, out in zip(results, outs, strict=True):
                slot = num_stored % pieces.slots
                # Until the piece that was in this slot has been read, and may be overwritten.
                plgpu.wait_smem_to_gmem(pieces.slots - 1, wait_read_only=True)
                refs.stage[warpgroup, slot] = result.astype(refs.stage.dtype)
                # Makes the piece visible to the copy engine, which reads memory on another path than the threads write
                # it.
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(refs.stage.at[warpgroup, slot], out.at[piece])
                num_stored += 1


# ---- the tiled form


def tiled(product: Product, inputs: ProductInputs, knobs: Occupancy, *, interpret: bool = False) -> list[jax.Array]:
    """Computes the outputs with one block of one warpgroup per tile: several blocks share a multiprocessor."""
    m, n, k = product.sizes(inputs.a, inputs.bs[0])
    shape = (knobs.tile_m, knobs.tile_n)
    grid = (m // knobs.tile_m, n // knobs.tile_n)
    operands = Operands(product, knobs, inputs.a.dtype)

    def body(*args: Ref) -> None:
        refs = Refs.of(product, args, len(inputs.vectors))
        tile = Tile.at(lax.axis_index("tile"), grid, knobs)
        products = _products(operands, refs, tile, steps=k // knobs.tile_k)
        vectors = spread(refs, tile.first_col, shape, interpret=interpret)
        results = product.epilogue(*products, *vectors)
        for result, out in zip(results, refs.outs, strict=True):
            # All outputs leave through the same memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refs.stage[...] = result.astype(refs.stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.stage, out.at[tile.rows, tile.cols])
        # As in `persistent`: the block must not end before its last copy.
        plgpu.wait_smem_to_gmem(0)

    return _launch(
        product,
        body,
        inputs,
        knobs,
        form="tiled",
        grid=(grid[0] * grid[1],),
        grid_names=("tile",),
        interpret=interpret,
    )


def _products(operands: Operands, refs: Refs, tile: Tile, *, steps: int) -> tuple[jax.Array, ...]:
    """Computes a tile of each product, in registers."""

    def with_sums(*sums: Ref) -> tuple[jax.Array, ...]:
        def step(_: jax.Array, a: Ref, *bs: Ref) -> None:
            operands.multiply(a, bs, sums)

        run = plgpu.emit_pipeline(
            step,
            grid=(steps,),
            max_concurrent_steps=operands.knobs.stages,
            in_specs=operands.specs(),
        )
        run(*operands.windows(refs, tile))
        # The pipeline has ended, and the products of its last step may still be running.
        plgpu.wgmma_wait(0)
        return tuple(total[...] for total in sums)

    return pl.run_scoped(with_sums, *operands.accumulators(operands.knobs.tile_m))


# ---- operands of any size


def run(
    call: KernelRun, product: Product, a: jax.Array, bs: Sequence[jax.Array], vectors: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Computes the outputs, (m, n) each, of operands of any size, which are padded to whole tiles."""
    # Sizes before the padding: the latency and the cut of the outputs use them, too.
    m, n, k = product.sizes(a, bs[0])
    knobs = fitted(call.knobs, m, n, k)
    check_fits(product, knobs, a.dtype, call.device)
    inputs = ProductInputs(a, bs, vectors)
    if call.interpret and not _compat.interpreter_transposes():
        inputs = _transposed_in_memory(product, inputs)
        # From here on the operands are stored as the plain product takes them.
        product = dataclasses.replace(product, a_transposed=False, b_transposed=False)
    inputs = _padded_to_tiles(product, inputs, knobs)

    @jax.custom_batching.sequential_vmap  # else all kernels of a batch would run at once, even those that must not run
    def launch(inputs: ProductInputs) -> list[jax.Array]:
        if knobs.persistent:
            blocks = call.device.sms - knobs.reserved_sms
            return persistent(product, inputs, knobs, blocks=blocks, interpret=call.interpret)
        return tiled(product, inputs, knobs, interpret=call.interpret)

    # Without it XLA's scheduler assumes that a kernel takes no time.
    with stated(knobs.latency_ns or product_ns(m, n, k, kind=call.device.kind, products=len(bs))):
        outs = launch(inputs)
    # The kernel's own type does not state over which mesh axes its results vary.
    axes = varying_over(inputs.a, *inputs.bs, *inputs.vectors)
    return [checkpoint_name(vary(out[:m, :n], axes), PRODUCT) for out in outs]


def _transposed_in_memory(product: Product, inputs: ProductInputs) -> ProductInputs:
    """Returns the operands as a kernel takes them that transposes none itself."""
    a, bs, vectors = inputs
    if product.a_transposed:
        a = a.T
    if product.b_transposed:
        bs = [b.T for b in bs]
    return ProductInputs(a, bs, vectors)


def _padded_to_tiles(product: Product, inputs: ProductInputs, knobs: Occupancy) -> ProductInputs:
    """Adds zeros, which change no sum, up to whole tiles; the outputs are cut to size again."""
    a_tile = (knobs.tile_k, knobs.tile_m) if product.a_transposed else (knobs.tile_m, knobs.tile_k)
    b_tile = (knobs.tile_n, knobs.tile_k) if product.b_transposed else (knobs.tile_k, knobs.tile_n)
    return ProductInputs(
        a=_padded(inputs.a, a_tile),
        bs=[_padded(b, b_tile) for b in inputs.bs],
        vectors=[_padded(vector, (knobs.tile_n,)) for vector in inputs.vectors],
    )


def _padded(x: jax.Array, multiples: Sequence[int]) -> jax.Array:
    """Returns an array with zeros at the end of its dims, up to multiples."""
    missing = [-size % multiple for size, multiple in zip(x.shape, multiples, strict=True)]
    if not any(missing):
        return x
    return jnp.pad(x, [(0, count) for count in missing])
