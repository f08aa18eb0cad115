"""A product with one block of one warpgroup for each tile: several blocks share a multiprocessor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard.kernels.knobs import Occupancy
from jshard.kernels.mosaic.product import Operands, Product, place, scratch, spread


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
    num_b, num_v, outs = len(bs), len(vectors), product.num_out

    def body(a_ref: Any, *refs: Any) -> None:
        b_refs, v_refs = refs[:num_b], refs[num_b : num_b + num_v]
        out_refs, stage = refs[num_b + num_v :][:outs], refs[num_b + num_v + outs]
        tile_m, tile_n = place(lax.axis_index("tile"), tiles)
        rows, cols = pl.ds(tile_m * shape[0], shape[0]), pl.ds(tile_n * shape[1], shape[1])

        def sums(*totals: Any) -> tuple[jax.Array, ...]:
            plgpu.emit_pipeline(
                lambda _, a, *bs: operands.multiply(a, bs, totals),
                grid=(k // knobs.tile_k,),
                max_concurrent_steps=knobs.stages,
                in_specs=operands.specs(),
            )(*operands.windows(a_ref, b_refs, rows, cols))
            plgpu.wgmma_wait(0)
            return tuple(total[...] for total in totals)

        products = pl.run_scoped(sums, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * num_b)
        results = product.epilogue(*products, *spread(v_refs, tile_n * shape[1], shape, interpret=interpret))
        for result, out in zip(results, out_refs, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            stage[...] = result.astype(stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, out.at[rows, cols])
        plgpu.wait_smem_to_gmem(0)

    return _compat.mosaic_kernel(
        body,
        name=f"{product.name}_tiled",
        out_type=[jax.ShapeDtypeStruct((m, n), a.dtype)] * outs,
        scratch=scratch(knobs, a.dtype),
        grid=(tiles[0] * tiles[1],),
        grid_names=("tile",),
        interpret=interpret,
    )(a, *bs, *vectors)
