"""`rms_norm` and `layer_norm`, with an optional fused addition of the residual stream."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard._text import PREFIX
from jshard.engine.per_example import per_example
from jshard.kernels.backend import (
    Backend,
    KernelError,
    KernelRun,
    Occupancy,
    as_matrix,
    as_row,
    check_shapes,
    decide,
    refuse_knobs,
    stated,
    traffic_ns,
    vary,
    vary_alike,
    varying_over,
)

Arrays = tuple[jax.Array, ...]

LANES = 128  # threads of a warpgroup, each of which holds as many elements of a row
MOST_WIDTH = 4096  # of a row in their registers, without spilling
_OWN_BYTES = 4096  # of shared memory, in which the threads of a row meet, at most
_SMALL = Occupancy(persistent=False)


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    occupancy: Occupancy | None = None,
    backend: Backend = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Each row divided by its root mean square, times `scale` (arXiv 1910.07467), computed in float32.

    Runs where `matmul` does, in small, short blocks. `smem_pad_bytes` of a non-persistent `Occupancy` is the only knob
    that applies.

    Args:
        x: (..., D).
        scale: (D,), of the same dtype.
        residual: like `x`; added to `x` first.
        eps: added to the mean square.
        occupancy: how much of the GPU it may occupy.
        backend: as for `matmul`.

    Returns:
        An array like `x`; with a residual, the pair of it and `x + residual`.

    Raises:
        KernelError: the sizes do not match, or the device cannot provide the requested resources.

    Example:
        >>> x = jnp.ones((8, 64))
        >>> y, x = js.kernels.rms_norm(x, jnp.ones(64), residual=x)
    """
    return _norm(_Kind("rms_norm", eps, centred=False), x, scale, None, residual, occupancy, backend)


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    occupancy: Occupancy | None = None,
    backend: Backend = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Each row minus its mean, divided by its standard deviation, times `scale`, plus `bias` (arXiv 1607.06450).

    Computed in float32; otherwise like `rms_norm`.

    Args:
        x: (..., D).
        scale: (D,), of the same dtype.
        bias: (D,), of the same dtype.
        residual: like `x`; added to `x` first.
        eps: added to the variance.
        occupancy: how much of the GPU it may occupy.
        backend: as for `matmul`.

    Returns:
        An array like `x`; with a residual, the pair of it and `x + residual`.

    Raises:
        KernelError: the sizes do not match, or the device cannot provide the requested resources.

    Example:
        >>> js.kernels.layer_norm(jnp.ones((8, 64)), jnp.ones(64), jnp.zeros(64)).shape
        (8, 64)
    """
    return _norm(_Kind("layer_norm", eps, centred=True), x, scale, bias, residual, occupancy, backend)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Which norm: of the rows themselves, or of the rows minus their mean."""

    name: str
    eps: float
    centred: bool

    def normal(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows of float32 with mean square 1, and the inverse of their divisors."""
        mean = lambda x: jnp.sum(x, -1, keepdims=x.ndim > 1) / x.shape[-1]
        h = h - mean(h) if self.centred else h
        inverse = lax.rsqrt(mean(h * h) + self.eps)
        return h * inverse, inverse


def _norm(
    kind: _Kind,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    occupancy: Occupancy | None,
    backend: Backend,
) -> Any:
    named = {"x": x, "scale": scale, "bias": bias, "residual": residual}
    given = {name: array for name, array in named.items() if array is not None}
    _check(kind, given, occupancy)
    call = decide(kind.name, backend, occupancy, given.values(), default=_SMALL, reasons=_row_reasons(x.shape[-1]))
    if not call.is_plain and call.knobs.padded_bytes + _OWN_BYTES > call.here.smem_limit_bytes:
        why = f"smem_pad_bytes={call.knobs.smem_pad_bytes:_} and {_OWN_BYTES:,} bytes of its own exceed what a block"
        refuse_knobs(call.name, call.knobs, call.here, [f"{why} can have: {call.here.smem_limit_bytes:,}."])
    with call.named():
        if call.is_plain:
            return plain_norm(kind, x, scale, bias, residual)
        rows = [as_matrix(x)] + ([] if residual is None else [as_matrix(residual)])
        vectors = [scale] + ([] if bias is None else [bias])
        arrays = vary_alike(*rows, *vectors)
        normed = per_example(functools.partial(_rows, call, kind), in_axes=(0, None))
        y, h = cast(Arrays, normed(arrays[: len(rows)], arrays[len(rows) :]))
        return y.reshape(x.shape) if residual is None else (y.reshape(x.shape), h.reshape(x.shape))


def plain_norm(kind: _Kind, x: jax.Array, scale: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> Any:
    """The twin, as XLA compiles it."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    h = x.astype(wide) + (0 if residual is None else residual.astype(wide))
    y = kind.normal(h)[0] * as_row(scale, h)
    y = y if bias is None else y + as_row(bias, h)
    y = y.astype(x.dtype)
    return y if residual is None else (y, h.astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(call: KernelRun, kind: _Kind, xs: Arrays, vectors: Arrays) -> tuple[jax.Array, jax.Array]:
    """The norm of the sum of some rows, and that sum."""

    def row(*held: jax.Array) -> tuple[Arrays, Arrays]:
        h, (scale, *bias) = sum(held[1 : len(xs)], start=held[0]), held[len(xs) :]
        y = kind.normal(h)[0] * scale
        return (sum(bias, start=y), *([h] if len(xs) > 1 else [])), ()

    y, *h = _run_rows(call, f"{PREFIX}{kind.name}", row, xs, vectors, num_out=len(xs))
    return y, h[0] if h else xs[0]


def _forward(call: KernelRun, kind: _Kind, xs: Arrays, vectors: Arrays) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    y, h = cast(Arrays, _rows(call, kind, xs, vectors))
    return (y, h), (h, vectors, len(xs))


def _backward(
    call: KernelRun, kind: _Kind, kept: tuple, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Arrays, Arrays]:
    h_RD, vectors, num_x = kept
    dy_RD, dh_RD = cotangents
    rows = [h_RD, dy_RD] + ([dh_RD] if num_x > 1 else [])

    def row(*held: jax.Array) -> tuple[Arrays, Arrays]:
        (h, dy, *dh), scale = held[: len(rows)], held[len(rows)]
        normal, inverse = kind.normal(h)
        mean = lambda x: jnp.sum(x) / x.shape[-1]
        scaled = dy * scale
        dx = scaled - normal * mean(scaled * normal)
        dx = dx - mean(scaled) if kind.centred else dx
        return (sum(dh, start=dx * inverse),), (dy * normal, dy)[: len(vectors)]

    with call.named():
        dx, *sums = _run_rows(
            call, f"{PREFIX}{kind.name}_backward", row, rows, vectors[:1], num_out=1, num_sums=len(vectors)
        )
        return (dx,) * num_x, tuple(each.astype(like.dtype) for each, like in zip(sums, vectors, strict=True))


_rows.defvjp(_forward, _backward)


def _row_reasons(width: int) -> list[str]:
    """Why rows of this width are left to XLA."""
    if width % LANES == 0 and width <= MOST_WIDTH:
        return []
    return [f"the row width must be a multiple of {LANES}, at most {MOST_WIDTH:,}, and is {width:,}"]


def _check(kind: _Kind, given: dict[str, jax.Array], occupancy: Occupancy | None) -> None:
    """Raises for sizes that do not match, and for knobs that a norm does not have."""
    shape = given["x"].shape
    wanted = {"scale": shape[-1:], "bias": shape[-1:], "residual": shape}
    check_shapes(kind.name, given, wanted, [] if shape else ["x must be (..., D)."])
    if occupancy is not None and occupancy.persistent:
        raise KernelError(
            f"{kind.name} has no persistent form.",
            where=str(occupancy),
            why="its blocks are small and short; the GPU decides which multiprocessors they run on.",
            do="Occupancy(persistent=False, smem_pad_bytes=56_320)",
        )


# Rows of outputs from rows of inputs, on Pallas Mosaic GPU: one warpgroup holds a row in its registers.

_ROWS_FORWARD, _BLOCKS_BACKWARD = 8, 4  # rows of a block; blocks per multiprocessor where each keeps a sum

RowFunction = Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]


def _run_rows(
    call: KernelRun,
    name: str,
    row: RowFunction,
    xs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    *,
    num_out: int,
    num_sums: int = 0,
) -> list[jax.Array]:
    """Runs a function of rows; returns the outputs (R, D) in the dtype of `xs`, then the sums (D,) in float32.

    `row` takes a row of each of `xs`, (R, D) with D a multiple of 128, then the vectors (D,), in float32; it returns
    rows of the outputs, and the terms of the sums over all rows.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu  # slow to import, and only where a kernel runs

    here, knobs, interpret = call.here, call.knobs, call.interpret
    rows, width = xs[0].shape
    blocks = min(rows, _BLOCKS_BACKWARD * here.sms) if num_sums else -(-rows // _ROWS_FORWARD)
    load = lambda ref, index: _compat.pallas_load(ref, index, interpret=interpret).astype(jnp.float32)
    like = jax.ShapeDtypeStruct((rows, width), xs[0].dtype)

    def body(*refs: Any) -> None:
        """Each row of a block, one after another; its part of the sums stays in registers until the end."""
        x_refs, v_refs, rest = refs[: len(xs)], refs[len(xs) :][: len(vectors)], refs[len(xs) + len(vectors) :]
        out_refs, sum_refs = rest[:num_out], rest[num_out:][:num_sums]
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
