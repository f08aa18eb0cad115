"""`rms_norm` and `layer_norm`, with the residual stream added on the way."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from jshard._text import PREFIX
from jshard.engine.per_example import per_example
from jshard.kernels.backend import Backend, KernelRun, check_sizes, decide
from jshard.kernels.knobs import KernelError, Occupancy, as_matrix, as_row, vary_alike

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
    """Each row over its root mean square, times `scale` (arXiv 1910.07467), computed in float32.

    Runs where `matmul` does, in small blocks that end soon: they take `smem_pad_bytes` of an `Occupancy` that is not
    persistent, and no other knob.

    Args:
        x: (..., D).
        scale: (D,), of the same dtype.
        residual: as `x`; it is added first.
        eps: added to the mean square.
        occupancy: how much of the GPU it may hold.
        backend: as of `matmul`.

    Returns:
        As `x`; with a residual a pair: that, and `x + residual`.

    Raises:
        KernelError: the sizes do not go together, or the device has not what is asked for.

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
    """Each row less its mean, over its standard deviation, times `scale`, plus `bias` (arXiv 1607.06450).

    Computed in float32; as `rms_norm` in all else.

    Args:
        x: (..., D).
        scale: (D,), of the same dtype.
        bias: (D,), of the same dtype.
        residual: as `x`; it is added first.
        eps: added to the variance.
        occupancy: how much of the GPU it may hold.
        backend: as of `matmul`.

    Returns:
        As `x`; with a residual a pair: that, and `x + residual`.

    Raises:
        KernelError: the sizes do not go together, or the device has not what is asked for.

    Example:
        >>> js.kernels.layer_norm(jnp.ones((8, 64)), jnp.ones(64), jnp.zeros(64)).shape
        (8, 64)
    """
    return _norm(_Kind("layer_norm", eps, centred=True), x, scale, bias, residual, occupancy, backend)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Which norm: of rows as they are, or of rows less their mean."""

    name: str
    eps: float
    centred: bool

    def normal(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows of float32 with square 1, and the inverse of what they were divided by."""
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
    if not call.is_plain:
        _check_padding(call)
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
    from jshard.kernels.mosaic_run import run_rows  # slow to import, and only where a kernel runs

    def row(*held: jax.Array) -> tuple[Arrays, Arrays]:
        h, (scale, *bias) = sum(held[1 : len(xs)], start=held[0]), held[len(xs) :]
        y = kind.normal(h)[0] * scale
        return (sum(bias, start=y), *([h] if len(xs) > 1 else [])), ()

    y, *h = run_rows(call, f"{PREFIX}{kind.name}", row, xs, vectors, num_out=len(xs))
    return y, h[0] if h else xs[0]


def _forward(call: KernelRun, kind: _Kind, xs: Arrays, vectors: Arrays) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    y, h = cast(Arrays, _rows(call, kind, xs, vectors))
    return (y, h), (h, vectors, len(xs))


def _backward(
    call: KernelRun, kind: _Kind, kept: tuple, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Arrays, Arrays]:
    from jshard.kernels.mosaic_run import run_rows

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
        dx, *sums = run_rows(
            call, f"{PREFIX}{kind.name}_backward", row, rows, vectors[:1], num_out=1, num_sums=len(vectors)
        )
        return (dx,) * num_x, tuple(each.astype(like.dtype) for each, like in zip(sums, vectors, strict=True))


_rows.defvjp(_forward, _backward)


def _check_padding(call: KernelRun) -> None:
    """Refuses padding beyond what a block can have."""
    most = call.here.smem_limit_bytes - _OWN_BYTES
    if call.knobs.padded_bytes > most:
        raise KernelError(
            f"The GPU cannot run {call.name} like this.",
            where=f"{call.here.kind}: smem_pad_bytes={call.knobs.smem_pad_bytes:_}",
            why=f"a block has {call.here.smem_limit_bytes:,} bytes of shared memory, and needs {_OWN_BYTES:,} itself.",
            do=f"dataclasses.replace(occupancy, smem_pad_bytes={most // 1024 * 1024})",
        )


def _row_reasons(width: int) -> list[str]:
    """Why rows of a width are left to XLA."""
    if width % LANES == 0 and width <= MOST_WIDTH:
        return []
    return [f"a warpgroup holds rows of a multiple of {LANES}, up to {MOST_WIDTH:,}, and these have {width:,}"]


def _check(kind: _Kind, given: dict[str, jax.Array], occupancy: Occupancy | None) -> None:
    """Refuses sizes that do not go together, and knobs that a norm has not."""
    shape = given["x"].shape
    wanted = {"scale": shape[-1:], "bias": shape[-1:], "residual": shape}
    wrong = [
        f"{name} is {wanted[name]} for an x of {shape}."
        for name, array in given.items()
        if name != "x" and array.shape != wanted[name]
    ]
    wrong += [] if shape else ["x has rows: it is (..., D)."]
    check_sizes(kind.name, given, wrong, f"js.kernels.{kind.name}(x, ..., residual=x_before)")
    if occupancy is not None and occupancy.persistent:
        raise KernelError(
            f"{kind.name} has no persistent form.",
            where=str(occupancy),
            why="its blocks are small and end soon; which multiprocessors they run on is the GPU's to say.",
            do="Occupancy(persistent=False, smem_pad_bytes=56_320)",
        )
