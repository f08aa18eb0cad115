"""A product with one block of one warpgroup for each tile: several blocks share a multiprocessor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jshard.kernels.knobs import Occupancy
from jshard.kernels.mosaic.product import Operands, Product, Refs, Tile, launched, spread


def tiled(
    product: Product,
    a: jax.Array,
    bs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    knobs: Occupancy,
    *,
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs a product whose sizes are whole tiles.

    Args:
        product: what is computed.
        a: one operand.
        bs: the others, `product.num_b` of them.
        vectors: rows of n, for the epilogue.
        knobs: tiles, stages and padding; it is not persistent.
        interpret: whether to run it step by step on a CPU.

    Returns:
        The outputs, (m, n) each.
    """
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
