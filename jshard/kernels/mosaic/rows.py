"""A kernel that makes rows of its outputs from rows of its inputs: one warpgroup holds a row in its registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard.kernels.backend import TracedDevice
from jshard.kernels.knobs import Occupancy, stated, traffic_ns, vary, varying_over

_ROWS_FORWARD, _BLOCKS_BACKWARD = 8, 4  # rows of a block; blocks by multiprocessor where each keeps a sum

RowFunction = Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]


def run_rows(
    name: str,
    row: RowFunction,
    xs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    *,
    num_out: int,
    num_sums: int = 0,
    knobs: Occupancy,
    here: TracedDevice,
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs a function of rows.

    Returns:
        The outputs, then the sums.
    """
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
