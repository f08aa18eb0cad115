"""The forms of a product on Hopper, whose tensor cores multiply tiles in shared memory, asynchronously (wgmma).

persistent   one of a block's warpgroups loads, and two multiply, each half of a tile's rows
tiled        a block of one warpgroup, which loads and multiplies
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jshard.kernels.backend import LEAST_TILE, WARPGROUP_ROWS, Occupancy
from jshard.kernels.product import (
    Operands,
    Product,
    ProductInputs,
    Ref,
    Refs,
    Slice,
    StageShape,
    Tile,
    grid_of,
    launch,
    spread,
    steps_of,
)

_WARPGROUPS = 3  # of a persistent block: two that multiply, each half of a tile's rows, and one that loads
_LOADER_REGISTERS = 40  # of the warpgroup that loads; the others share what it leaves


def stage_shape(knobs: Occupancy) -> StageShape:
    """Returns the shape of the shared memory through which outputs leave a block."""
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


# ---- products of tiles


def _operands(product: Product, inputs: ProductInputs, knobs: Occupancy) -> Operands:
    # No step may stay open if one pipeline follows another, as when blocks walk over tiles: the next pipeline would not
    # wait for tiles kept at the end of one, and would overwrite them.
    open_steps = 0 if knobs.persistent else 1
    return Operands(product, knobs, inputs.a.dtype, open_steps)


def _accumulators(operands: Operands, rows: int) -> list[plgpu.WGMMAAccumulatorRef]:
    """Returns registers of a warpgroup for its rows of a tile, of each product."""
    shape = (rows, operands.knobs.tile_n)
    return [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * operands.product.num_b


def _multiply(operands: Operands, a: Ref, bs: Sequence[Ref], sums: Sequence[Ref]) -> None:
    """Adds the products of the tiles in shared memory to the sums in registers: one step along k."""
    a, bs = operands.as_multiplied(a, bs)
    for b, total in zip(bs, sums, strict=True):
        # Asynchronous: the tensor cores read the tiles until the wait below.
        plgpu.wgmma(total, a, b)
    # Each product is an operation of its own: those of the open steps may still be running after this.
    plgpu.wgmma_wait(operands.open_steps * len(sums))


# ---- the persistent form


def persistent(
    product: Product, inputs: ProductInputs, knobs: Occupancy, *, blocks: int, interpret: bool = False
) -> list[jax.Array]:
    """Computes the outputs, (m, n) each, of whole tiles: one block on each multiprocessor in use walks over them."""
    grid = grid_of(product, inputs, knobs)
    num_tiles = grid[0] * grid[1]
    operands = _operands(product, inputs, knobs)

    def pipeline(step: Callable[..., Any], compute: Callable[..., None]) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps_of(product, inputs, knobs),),
            memory_registers=_LOADER_REGISTERS,
            in_specs=operands.specs(),
            wg_axis="warpgroup",
            num_compute_wgs=_WARPGROUPS - 1,  # the other one loads
            max_concurrent_steps=knobs.stages,
            compute_context=compute,
        )

    def step(_: jax.Array, a: Ref, *bs_and_sums: Ref) -> Sequence[Ref]:
        bs = bs_and_sums[: product.num_b]
        sums = bs_and_sums[product.num_b]  # the carry of the pipeline
        rows = _half(knobs)
        half_of_a = a.at[:, rows] if product.a_transposed else a.at[rows]
        _multiply(operands, half_of_a, bs, sums)
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

    return launch(
        product,
        body,
        inputs,
        knobs,
        form="persistent",
        stage=stage_shape(knobs),
        grid=(min(blocks, num_tiles),),  # a block without a tile would only occupy a multiprocessor
        grid_names=("block",),
        interpret=interpret,
        num_threads=_WARPGROUPS,
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

    pl.run_scoped(with_sums, *_accumulators(operands, operands.knobs.tile_m // 2))


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
    shape = (knobs.tile_m, knobs.tile_n)
    grid = grid_of(product, inputs, knobs)
    operands = _operands(product, inputs, knobs)

    def body(*args: Ref) -> None:
        refs = Refs.of(product, args, len(inputs.vectors))
        tile = Tile.at(lax.axis_index("tile"), grid, knobs)
        products = _products(operands, refs, tile, steps=steps_of(product, inputs, knobs))
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

    return launch(
        product,
        body,
        inputs,
        knobs,
        form="tiled",
        stage=stage_shape(knobs),
        grid=(grid[0] * grid[1],),
        grid_names=("tile",),
        interpret=interpret,
    )


def _products(operands: Operands, refs: Refs, tile: Tile, *, steps: int) -> tuple[jax.Array, ...]:
    """Computes a tile of each product, in registers."""

    def with_sums(*sums: Ref) -> tuple[jax.Array, ...]:
        def step(_: jax.Array, a: Ref, *bs: Ref) -> None:
            _multiply(operands, a, bs, sums)

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

    return pl.run_scoped(with_sums, *_accumulators(operands, operands.knobs.tile_m))
