"""A product with one block for each multiprocessor, which walks over the tiles: one warpgroup loads, two multiply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard.kernels.knobs import Occupancy
from jshard.kernels.mosaic.product import Operands, Product, pieces, place, scratch, spread

WARPGROUPS = 3  # two that multiply, each half of a tile's rows, and one that loads
_LOADER_REGISTERS = 40  # of the warpgroup that loads; the others share what it leaves


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
    """Runs a product whose sizes are whole tiles.

    Args:
        product: what is computed.
        a: one operand.
        bs: the others, `product.num_b` of them.
        vectors: rows of n, for the epilogue.
        knobs: tiles, stages and padding.
        blocks: how many multiprocessors it may have.
        interpret: whether to run it step by step on a CPU.

    Returns:
        The outputs, (m, n) each.
    """
    m, n, k = product.sizes(a, bs[0])
    tiles = m // knobs.tile_m, n // knobs.tile_n
    operands = Operands(product, knobs, a.dtype)
    num_b, num_v, outs = len(bs), len(vectors), product.num_out

    def body(a_ref: Any, *refs: Any) -> None:
        b_refs, v_refs = refs[:num_b], refs[num_b : num_b + num_v]
        out_refs, stage = refs[num_b + num_v :][:outs], refs[num_b + num_v + outs]
        pipeline = _pipeline(operands, k)
        nothing = lambda *_, **__: None

        def walk(allocations: Any) -> None:
            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
            def _(loop: Any) -> None:
                tile_m, tile_n = place(loop.index[0], tiles)
                rows, cols = pl.ds(tile_m * knobs.tile_m, knobs.tile_m), pl.ds(tile_n * knobs.tile_n, knobs.tile_n)
                out_tiles = [out.at[rows, cols] for out in out_refs]
                vectors_of = lambda col, shape: spread(v_refs, tile_n * knobs.tile_n + col, shape, interpret=interpret)

                def compute(run: Callable[[Any], Any]) -> None:
                    def sums(*totals: Any) -> None:
                        run(totals)
                        plgpu.wgmma_wait(0)
                        _store(product, knobs, [total[...] for total in totals], vectors_of, stage, out_tiles)

                    pl.run_scoped(
                        sums, *[plgpu.WGMMAAccumulatorRef((knobs.tile_m // 2, knobs.tile_n), jnp.float32)] * num_b
                    )

                windows = operands.windows(a_ref, b_refs, rows, cols)
                pipeline(_step(operands), compute)(*windows, allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            walk,
            # What the pipeline needs does not depend on what it does.
            allocations=pipeline(nothing, nothing).get_allocations(a_ref, *b_refs),
            collective_axes="warpgroup",
        )

    return _compat.mosaic_kernel(
        body,
        name=f"{product.name}_persistent",
        out_type=[jax.ShapeDtypeStruct((m, n), a.dtype)] * outs,
        scratch=scratch(knobs, a.dtype),
        grid=(min(blocks, tiles[0] * tiles[1]),),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        interpret=interpret,
    )(a, *bs, *vectors)


def _pipeline(operands: Operands, k: int) -> Callable[..., Any]:
    return lambda step, compute: plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(k // operands.knobs.tile_k,),
        memory_registers=_LOADER_REGISTERS,
        in_specs=operands.specs(),
        wg_axis="warpgroup",
        num_compute_wgs=WARPGROUPS - 1,
        max_concurrent_steps=operands.knobs.stages,
        compute_context=compute,
    )


def _step(operands: Operands) -> Callable[..., Any]:
    num_b = operands.product.num_b

    def step(_: Any, a: Any, *rest: Any) -> Any:
        bs, totals = rest[:num_b], rest[num_b]
        rows = _half(operands.knobs)
        operands.multiply(a.at[:, rows] if operands.product.a_transposed else a.at[rows], bs, totals)
        return totals

    return step


def _half(knobs: Occupancy) -> Any:
    """The rows of a tile that a computing warpgroup makes."""
    rows = knobs.tile_m // 2
    return pl.ds(lax.axis_index("warpgroup") * rows, rows)


def _store(
    product: Product,
    knobs: Occupancy,
    products: Sequence[jax.Array],
    vectors: Callable[[int, tuple[int, int]], list[jax.Array]],
    stage: Any,
    out_refs: Sequence[Any],
) -> None:
    """Finishes a warpgroup's half of the tiles piece by piece, and writes one piece while the next is made.

    In pieces, as what the epilogue makes of a whole tile would not fit into the registers beside it.
    """
    piece_m, piece_n, slots = pieces(knobs)
    warpgroup, half = lax.axis_index("warpgroup"), _half(knobs)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    count = 0
    for col in range(0, knobs.tile_n, piece_n):
        held = vectors(col, (piece_m, piece_n))
        for row in range(0, knobs.tile_m // 2, piece_m):
            part = slice(row, row + piece_m), slice(col, col + piece_n)
            for result, out in zip(product.epilogue(*(each[part] for each in products), *held), out_refs, strict=True):
                slot = count % slots
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                stage[warpgroup, slot] = result.astype(stage.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stage.at[warpgroup, slot], out.at[half].at[part])
                count += 1
