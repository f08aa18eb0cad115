"""The kernels on Pallas Mosaic GPU, for Hopper: products of any size, padded to whole tiles, and functions of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jshard import _compat
from jshard._text import PRODUCT
from jshard.kernels.backend import KernelRun
from jshard.kernels.knobs import Occupancy, fitted, product_ns, stated, traffic_ns, vary, varying_over
from jshard.kernels.mosaic_product import (
    Operands,
    Product,
    Refs,
    Tile,
    check_fits,
    launched,
    padded,
    pieces,
    spread,
)

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
    """Makes the outputs, (m, n) each, of whole tiles: one block on each of so many multiprocessors walks over them."""
    m, n, k = product.sizes(a, bs[0])
    tiles = m // knobs.tile_m, n // knobs.tile_n
    operands = Operands(product, knobs, a.dtype)

    def body(*given: Any) -> None:
        refs, pipeline = Refs.of(product, given, len(vectors)), _pipeline(operands, k)
        nothing = lambda *_, **__: None

        def walk(allocations: Any) -> None:
            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
            def _(loop: Any) -> None:
                tile = Tile.at(loop.index[0], tiles, knobs)
                compute = lambda run: _compute(operands, refs, tile, run, interpret=interpret)
                pipeline(_step(operands), compute)(*operands.windows(refs, tile), allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

        # What the pipeline needs does not depend on what it does.
        allocations = pipeline(nothing, nothing).get_allocations(refs.a, *refs.bs)
        pl.run_scoped(walk, allocations=allocations, collective_axes="warpgroup")

    how = {"grid": (min(blocks, tiles[0] * tiles[1]),), "grid_names": ("block",), "interpret": interpret}
    threads = {"num_threads": WARPGROUPS, "thread_name": "warpgroup"}
    return launched(product, body, a, bs, vectors, knobs, form="persistent", **how, **threads)


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


def _compute(operands: Operands, refs: Refs, tile: Tile, run: Callable[[Any], Any], *, interpret: bool) -> None:
    """What a computing warpgroup does of a tile; `run` is the pipeline."""

    def sums(*totals: Any) -> None:
        run(totals)
        plgpu.wgmma_wait(0)
        _store(operands, refs, tile, [total[...] for total in totals], interpret=interpret)

    pl.run_scoped(sums, *operands.accumulators(operands.knobs.tile_m // 2))


def _store(operands: Operands, refs: Refs, tile: Tile, products: Sequence[jax.Array], *, interpret: bool) -> None:
    """Finishes a warpgroup's half of the tiles piece by piece, and writes one piece while the next is made.

    In pieces, as what the epilogue makes of a whole tile would not fit into the registers beside it.
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
    """Makes the outputs of whole tiles by one block of one warpgroup for each: several share a multiprocessor."""
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
    """Makes the outputs, (m, n) each, of operands of any size, which are padded to whole tiles."""
    here, interpret = call.here, call.interpret
    m, n, k = product.sizes(a, bs[0])
    knobs = fitted(call.knobs, m, n, k)
    check_fits(product, knobs, a.dtype, smem_limit_bytes=here.smem_limit_bytes, sms=here.sms, title=here.kind)
    if interpret and not _compat.interpreter_transposes():
        a = a.T if product.a_transposed else a
        bs = [b.T if product.b_transposed else b for b in bs]
        product = product.plain()
    a_tiles, b_tiles = (knobs.tile_m, knobs.tile_k), (knobs.tile_k, knobs.tile_n)
    a = padded(a, a_tiles[::-1] if product.a_transposed else a_tiles)
    bs = [padded(b, b_tiles[::-1] if product.b_transposed else b_tiles) for b in bs]
    vectors = [padded(vector, (knobs.tile_n,)) for vector in vectors]
    latency_ns = knobs.latency_ns or product_ns(m, n, k, kind=here.kind, products=len(bs))

    @jax.custom_batching.sequential_vmap  # else all kernels of a batch would run at once, also where none is to run
    def launch(a: jax.Array, bs: Sequence[jax.Array], vectors: Sequence[jax.Array]) -> list[jax.Array]:
        if knobs.persistent:
            blocks = here.sms - knobs.reserved_sms
            return persistent(product, a, bs, vectors, knobs, blocks=blocks, interpret=interpret)
        return tiled(product, a, bs, vectors, knobs, interpret=interpret)

    with stated(latency_ns):
        outs = launch(a, bs, vectors)
    # The kernel's own type does not say over which axes of a mesh its results differ.
    axes = varying_over(a, *bs, *vectors)
    return [checkpoint_name(vary(out[:m, :n], axes), PRODUCT) for out in outs]


# Rows of outputs from rows of inputs: one warpgroup holds a row in its registers.

_ROWS_FORWARD, _BLOCKS_BACKWARD = 8, 4  # rows of a block; blocks by multiprocessor where each keeps a sum

RowFunction = Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]


def run_rows(
    call: KernelRun,
    name: str,
    row: RowFunction,
    xs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    *,
    num_out: int,
    num_sums: int = 0,
) -> list[jax.Array]:
    """Runs a function of rows; gives the outputs (R, D) in the dtype of `xs`, then the sums (D,) in float32.

    `row` takes a row of each of `xs`, (R, D) with D a multiple of 128, then the vectors (D,), in float32; it gives
    rows of the outputs, and what is added to each of the sums over all rows.
    """
    here, knobs, interpret = call.here, call.knobs, call.interpret
    rows, width = xs[0].shape
    blocks = min(rows, _BLOCKS_BACKWARD * here.sms) if num_sums else -(-rows // _ROWS_FORWARD)
    load = lambda ref, index: _compat.pallas_load(ref, index, interpret=interpret).astype(jnp.float32)
    like = jax.ShapeDtypeStruct((rows, width), xs[0].dtype)

    def body(*refs: Any) -> None:
        x_refs, v_refs, out_refs = refs[: len(xs)], refs[len(xs) :][: len(vectors)], refs[len(xs) + len(vectors) :]
        _walk(row, load, x_refs, v_refs, out_refs[:num_out], out_refs[num_out:][:num_sums])

    kernel = _compat.mosaic_kernel(
        body,
        name=name,
        out_type=[like] * num_out + [jax.ShapeDtypeStruct((blocks, width), jnp.float32)] * num_sums,
        scratch=[plgpu.SMEM((knobs.padded_bytes,), jnp.int8)] if knobs.padded_bytes else [],
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    moved_bytes = (len(xs) + num_out) * rows * width * xs[0].dtype.itemsize
    with stated(knobs.latency_ns or traffic_ns(moved_bytes, kind=here.kind)):
        results = jax.custom_batching.sequential_vmap(lambda *arrays: kernel(*arrays))(*xs, *vectors)
    axes = varying_over(*xs, *vectors)
    results = [vary(result, axes) for result in results]
    return [*results[:num_out], *(each.sum(0) for each in results[num_out:])]


def _walk(
    row: RowFunction,
    load: Callable[[Any, Any], jax.Array],
    x_refs: Sequence[Any],
    v_refs: Sequence[Any],
    out_refs: Sequence[Any],
    sum_refs: Sequence[Any],
) -> None:
    """What a block does: each of its rows, one after another; its part of the sums stays in registers until the end."""
    rows, width = x_refs[0].shape
    held = [load(ref, slice(None)) for ref in v_refs]

    def step(loop: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = loop.index[0]
        outs, terms = row(*(load(ref, at) for ref in x_refs), *held)
        for ref, out in zip(out_refs, outs, strict=True):
            ref[at] = out.astype(ref.dtype)
        return tuple(total + term for total, term in zip(carry, terms, strict=True))

    start = tuple(jnp.zeros((width,), jnp.float32) for _ in sum_refs)
    totals = plgpu.nd_loop((rows,), collective_axes="block", init_carry=start)(step)
    for ref, total in zip(sum_refs, totals, strict=True):
        ref[lax.axis_index("block")] = total
