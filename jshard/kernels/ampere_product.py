"""The forms of a product on Ampere, whose tensor cores multiply operands in registers, synchronously (mma.sync).

In both forms a block is one warpgroup. It copies tiles from device memory to shared memory while it multiplies earlier
ones (cp.async), and loads from there the parts that each warp multiplies (ldmatrix, which transposes where it must).

    persistent   a block computes one tile after another
    tiled        a block computes one tile
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jshard import _compat
from jshard.kernels.backend import Occupancy
from jshard.kernels.product import (
    Operands,
    Product,
    ProductInputs,
    Ref,
    Refs,
    StageShape,
    Tile,
    grid_of,
    launch,
    spread,
    steps_of,
)

Sums = tuple[jax.Array, ...]
"""A float32 tile of each product, in registers."""


def stage_shape(knobs: Occupancy) -> StageShape:
    """Returns the shape of the shared memory through which outputs leave a block."""
    return knobs.tile_m, knobs.tile_n


def persistent(
    product: Product, inputs: ProductInputs, knobs: Occupancy, *, blocks: int, interpret: bool = False
) -> list[jax.Array]:
    """Computes the outputs, (m, n) each, of whole tiles: one block on each multiprocessor in use walks over them."""
    grid = grid_of(product, inputs, knobs)
    num_tiles = grid[0] * grid[1]
    operands = _operands(product, inputs, knobs)
    steps = steps_of(product, inputs, knobs)

    def body(*args: Ref) -> None:
        refs = Refs.of(product, args, len(inputs.vectors))

        @plgpu.nd_loop((num_tiles,), collective_axes="block")
        def _(loop: plgpu.NDLoopInfo) -> None:
            tile = Tile.at(loop.index[0], grid, knobs)
            _compute(operands, refs, tile, steps=steps, interpret=interpret)

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
    )


def tiled(product: Product, inputs: ProductInputs, knobs: Occupancy, *, interpret: bool = False) -> list[jax.Array]:
    """Computes the outputs with one block per tile: several blocks share a multiprocessor."""
    grid = grid_of(product, inputs, knobs)
    operands = _operands(product, inputs, knobs)
    steps = steps_of(product, inputs, knobs)

    def body(*args: Ref) -> None:
        refs = Refs.of(product, args, len(inputs.vectors))
        tile = Tile.at(lax.axis_index("tile"), grid, knobs)
        _compute(operands, refs, tile, steps=steps, interpret=interpret)

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


def _operands(product: Product, inputs: ProductInputs, knobs: Occupancy) -> Operands:
    # A product has ended when its step does, so no step stays open.
    return Operands(product, knobs, inputs.a.dtype, open_steps=0)


def _compute(operands: Operands, refs: Refs, tile: Tile, *, steps: int, interpret: bool) -> None:
    """Computes and stores a tile of each output."""
    knobs = operands.knobs
    products = _products(operands, refs, tile, steps=steps, interpret=interpret)
    vectors = spread(refs, tile.first_col, (knobs.tile_m, knobs.tile_n), interpret=interpret)
    results = operands.product.epilogue(*products, *vectors)
    for result, out in zip(results, refs.outs, strict=True):
        # All outputs leave through the same memory. A thread has pairs of neighbours in the sums' layout: stored from
        # there, each would be a transaction of 4 bytes.
        refs.stage[...] = result.astype(refs.stage.dtype)
        out[tile.rows, tile.cols] = _compat.load_for_copy(refs.stage)


def _products(operands: Operands, refs: Refs, tile: Tile, *, steps: int, interpret: bool) -> Sums:
    """Computes a tile of each product."""
    knobs = operands.knobs
    num_b = operands.product.num_b

    def step(_: jax.Array, a: Ref, *bs_and_sums: Ref) -> Sums:
        sums = bs_and_sums[num_b]  # the carry of the pipeline
        a, bs = operands.as_multiplied(a, bs_and_sums[:num_b])
        return _multiplied(a, bs, sums, interpret=interpret)

    zeros = (_compat.mma_zeros((knobs.tile_m, knobs.tile_n), operands.dtype),) * num_b
    run = plgpu.emit_pipeline(
        step,
        grid=(steps,),
        max_concurrent_steps=knobs.stages,
        in_specs=operands.specs(),
        init_carry=zeros,
    )
    return run(*operands.windows(refs, tile))


def _multiplied(a: Ref, bs: Sequence[Ref], sums: Sums, *, interpret: bool) -> Sums:
    """Returns the sums with the products of tiles in shared memory: one step along k."""
    added = []
    for b, total in zip(bs, sums, strict=True):
        added.append(_compat.mma(total, a, b, interpret=interpret))
    return tuple(added)
