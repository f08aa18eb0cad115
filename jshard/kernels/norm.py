"""`rms_norm` and `layer_norm`, with an optional fused addition of the residual stream.

Shapes, as suffixes: R rows, D elements of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

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

if TYPE_CHECKING:
    from jshard.kernels.product import Ref

T = TypeVar("T")

Arrays = tuple[jax.Array, ...]

LANES = 128  # threads of a warpgroup; all hold the same number of a row's elements
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
    """Divides each row by its root mean square, and multiplies by `scale` (arXiv 1910.07467), in float32.

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

    Examples:
        >>> x = jnp.ones((8, 64))
        >>> y, x = js.kernels.rms_norm(x, jnp.ones(64), residual=x)
    """
    kind = _Kind("rms_norm", eps, centred=False)
    return _norm(kind, x, scale, None, residual, occupancy, backend)


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
    """Subtracts each row's mean, divides by its standard deviation, times `scale`, plus `bias` (arXiv 1607.06450).

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

    Examples:
        >>> js.kernels.layer_norm(jnp.ones((8, 64)), jnp.ones(64), jnp.zeros(64)).shape
        (8, 64)
    """
    kind = _Kind("layer_norm", eps, centred=True)
    return _norm(kind, x, scale, bias, residual, occupancy, backend)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Which norm: of the rows themselves, or of the rows minus their mean."""

    name: str
    eps: float
    centred: bool

    def normal(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns rows with mean square 1, and the inverse of their divisors; takes float32, one row or many."""
        if self.centred:
            h = h - _mean(h)
        inverse = lax.rsqrt(_mean(h * h) + self.eps)
        return h * inverse, inverse


def _mean(x: jax.Array) -> jax.Array:
    """Returns the mean of each row: a scalar if there is only one, as in a kernel."""
    return jnp.sum(x, -1, keepdims=x.ndim > 1) / x.shape[-1]


def _norm(
    kind: _Kind,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    occupancy: Occupancy | None,
    backend: Backend,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    arrays = {"x": x, "scale": scale}
    if bias is not None:
        arrays["bias"] = bias
    if residual is not None:
        arrays["residual"] = residual
    # Before the form is chosen: wrong sizes are refused in every form, also where the kernel would not run.
    _check(kind, arrays, occupancy)
    reasons = _row_reasons(x.shape[-1])
    call = decide(kind.name, backend, occupancy, arrays.values(), default=_SMALL, reasons=reasons)
    # The plain form takes no shared memory.
    if not call.is_plain:
        _check_padding(call)
    with call.named():
        if call.is_plain:
            return plain_norm(kind, x, scale, bias, residual)
        return _kernel_norm(call, kind, x, scale, bias, residual)


def _kernel_norm(
    call: KernelRun,
    kind: _Kind,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the norm by the kernel; with a residual, also the sum."""
    rows = [as_matrix(x)]
    if residual is not None:
        rows.append(as_matrix(residual))
    vectors = [scale]
    if bias is not None:
        vectors.append(bias)
    # Outside of `_rows`, which has its own gradient: see `vary_alike`.
    varying = vary_alike(*rows, *vectors)
    normed = per_example(functools.partial(_rows, call, kind), in_axes=(0, None))
    y_RD, h_RD = cast(Arrays, normed(varying[: len(rows)], varying[len(rows) :]))
    y = y_RD.reshape(x.shape)
    if residual is None:
        return y
    return y, h_RD.reshape(x.shape)


def plain_norm(
    kind: _Kind, x: jax.Array, scale: jax.Array, bias: jax.Array | None, residual: jax.Array | None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the same as XLA compiles it."""
    # float64 stays float64.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    h = x.astype(wide) + (0 if residual is None else residual.astype(wide))
    normal, _ = kind.normal(h)
    y = normal * as_row(scale, h)
    if bias is not None:
        y = y + as_row(bias, h)
    y = y.astype(x.dtype)
    if residual is None:
        return y
    return y, h.astype(x.dtype)


# ---- the derivative, on rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(call: KernelRun, kind: _Kind, xs: Arrays, vectors: Arrays) -> tuple[jax.Array, jax.Array]:
    """Returns the norm of the sum of `xs`, and that sum.

    Args:
        call: how the kernel runs.
        kind: which norm.
        xs: x, or x and the residual, (R, D).
        vectors: the scale, or the scale and the bias, (D,).
    """
    has_residual = bool(xs[1:])

    def row(*arrays: jax.Array) -> RowResults:
        summands = arrays[: len(xs)]
        scale, *bias = arrays[len(xs) :]
        h = sum(summands[1:], start=summands[0])
        normal, _ = kind.normal(h)
        y = sum(bias, start=normal * scale)
        if has_residual:
            return RowResults([y, h])
        return RowResults([y])

    outs, _ = _run_rows(call, f"{PREFIX}{kind.name}", row, xs, vectors, num_out=len(xs))
    if not has_residual:
        (y_RD,) = outs
        (h_RD,) = xs  # the sum is x, and need not be written
        return y_RD, h_RD
    y_RD, h_RD = outs
    return y_RD, h_RD


def _forward(call: KernelRun, kind: _Kind, xs: Arrays, vectors: Arrays) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    y_RD, h_RD = cast(Arrays, _rows(call, kind, xs, vectors))
    # Only the sum is kept, not the normal rows: backward computes them again in registers.
    residuals = (h_RD, vectors, len(xs))
    return (y_RD, h_RD), residuals


def _backward(
    call: KernelRun, kind: _Kind, residuals: tuple, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Arrays, Arrays]:
    h_RD, vectors, num_xs = residuals
    dy_RD, dh_RD = cotangents
    rows = [h_RD, dy_RD]
    if num_xs > 1:
        rows.append(dh_RD)  # otherwise the sum is x itself, which the caller does not get

    def row(*arrays: jax.Array) -> RowResults:
        h, dy, *dh = arrays[: len(rows)]
        scale = arrays[len(rows)]
        normal, inverse = kind.normal(h)
        scaled = dy * scale
        # The mean square, and the mean below, depend on every element of the row.
        dx = scaled - normal * _mean(scaled * normal)
        if kind.centred:
            dx = dx - _mean(scaled)
        dx = sum(dh, start=dx * inverse)
        terms = [dy * normal, dy]  # of the gradients of scale and bias
        return RowResults([dx], terms[: len(vectors)])

    with call.named():
        # Only the scale is an operand: a bias has no part in the gradients.
        (dx_RD,), sums = _run_rows(
            call, f"{PREFIX}{kind.name}_backward", row, rows, vectors[:1], num_out=1, num_sums=len(vectors)
        )
        d_vectors = tuple(total.astype(vector.dtype) for total, vector in zip(sums, vectors, strict=True))
        # x and the residual enter only through their sum, so their gradients are equal.
        return (dx_RD,) * num_xs, d_vectors


_rows.defvjp(_forward, _backward)


# ---- checks


def _row_reasons(width: int) -> list[str]:
    """Returns why rows of this width are left to XLA."""
    if width % LANES == 0 and width <= MOST_WIDTH:
        return []
    return [f"the row width must be a multiple of {LANES}, at most {MOST_WIDTH:,}, and is {width:,}"]


def _check(kind: _Kind, arrays: dict[str, jax.Array], occupancy: Occupancy | None) -> None:
    """Raises for sizes that do not match, and for knobs that a norm does not have."""
    shape = arrays["x"].shape
    required = {"scale": shape[-1:], "bias": shape[-1:], "residual": shape}
    faults = []
    if not shape:
        faults.append("x must be (..., D).")
    check_shapes(kind.name, arrays, required, faults)
    if occupancy is not None and occupancy.persistent:
        raise KernelError(
            f"{kind.name} has no persistent form.",
            where=str(occupancy),
            why="its blocks are small and short; the GPU decides which multiprocessors they run on.",
            do="Occupancy(persistent=False, smem_pad_bytes=56_320)",
        )


def _check_padding(call: KernelRun) -> None:
    """Raises for padding that leaves a block too little shared memory."""
    if call.knobs.padded_bytes + _OWN_BYTES <= call.device.smem_limit_bytes:
        return
    why = f"smem_pad_bytes={call.knobs.smem_pad_bytes:_} and {_OWN_BYTES:,} bytes of its own exceed what a block"
    refuse_knobs(call.name, call.knobs, call.device, [f"{why} can have: {call.device.smem_limit_bytes:,}."])


# ---- rows of outputs from rows of inputs, on Pallas Mosaic GPU: one warpgroup holds a row in its registers

_ROWS_FORWARD = 8  # rows of a block
_BLOCKS_BACKWARD = 4  # per multiprocessor, where each block keeps a sum


@dataclasses.dataclass(frozen=True)
class RowResults:
    """What a function of rows makes of one row of each input, in float32.

    Attributes:
        outs: one row of each output.
        terms: this row's terms of the sums over all rows.
    """

    outs: Sequence[jax.Array]
    terms: Sequence[jax.Array] = ()


RowFunction = Callable[..., RowResults]
"""Takes a row of each of the inputs, then the vectors, in float32."""


def _run_rows(
    call: KernelRun,
    name: str,
    row: RowFunction,
    xs: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    *,
    num_out: int,
    num_sums: int = 0,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs a function on all rows.

    Args:
        call: how the kernel runs.
        name: of the kernel, in profiles and in the compiled program.
        row: the function.
        xs: its inputs, (R, D) with D a multiple of 128.
        vectors: the vectors that it takes with each row, (D,).
        num_out: how many outputs it has.
        num_sums: how many sums over all rows it has.

    Returns:
        The outputs, (R, D) in the dtype of `xs`; the sums, (D,) in float32.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu  # slow to import, and only where a kernel runs

    num_rows, width = xs[0].shape
    num_blocks = -(-num_rows // _ROWS_FORWARD)
    if num_sums:
        # Each block writes its part of the sums, which are added afterwards: so they should be few.
        num_blocks = min(num_rows, _BLOCKS_BACKWARD * call.device.sms)

    def load(ref: Ref, index: int | slice | jax.Array) -> jax.Array:
        return _compat.pallas_load(ref, index, interpret=call.interpret).astype(jnp.float32)

    def body(*refs: Ref) -> None:
        """Computes the rows of a block, one after another; its part of the sums stays in registers until the end."""
        x_refs, v_refs, out_refs, sum_refs = _divided(refs, [len(xs), len(vectors), num_out, num_sums])
        loaded_vectors = [load(ref, slice(None)) for ref in v_refs]

        def step(loop: plgpu.NDLoopInfo, carry: Arrays) -> Arrays:
            number = loop.index[0]
            results = row(*(load(ref, number) for ref in x_refs), *loaded_vectors)
            for ref, out in zip(out_refs, results.outs, strict=True):
                ref[number] = out.astype(ref.dtype)
            return tuple(total + term for total, term in zip(carry, results.terms, strict=True))

        # Float32, as many rows are summed. Each block starts from zeros, and writes only to its own row of the parts.
        zeros = tuple(jnp.zeros((width,), jnp.float32) for _ in sum_refs)
        # Each block takes its share of the rows.
        totals = plgpu.nd_loop((num_rows,), collective_axes="block", init_carry=zeros)(step)
        for ref, total in zip(sum_refs, totals, strict=True):
            ref[lax.axis_index("block")] = total

    out_type = jax.ShapeDtypeStruct((num_rows, width), xs[0].dtype)
    sum_type = jax.ShapeDtypeStruct((num_blocks, width), jnp.float32)
    scratch = []
    if call.knobs.padded_bytes:
        scratch.append(plgpu.SMEM((call.knobs.padded_bytes,), jnp.int8))
    kernel = _compat.mosaic_kernel(
        body,
        name=name,
        out_type=[out_type] * num_out + [sum_type] * num_sums,
        scratch=scratch,
        grid=(num_blocks,),
        grid_names=("block",),
        interpret=call.interpret,
    )

    # Of a batch one kernel runs after another: together they would fill the GPU.
    @jax.custom_batching.sequential_vmap
    def launch(*arrays: jax.Array) -> list[jax.Array]:
        return kernel(*arrays)

    moved_bytes = (len(xs) + num_out) * num_rows * width * xs[0].dtype.itemsize
    with stated(call.knobs.latency_ns or traffic_ns(moved_bytes, kind=call.device.kind)):
        results = launch(*xs, *vectors)
    # The kernel's own type does not state over which mesh axes its results vary.
    axes = varying_over(*xs, *vectors)
    outs, parts_of_sums = _divided([vary(result, axes) for result in results], [num_out, num_sums])
    return list(outs), [parts.sum(0) for parts in parts_of_sums]


def _divided(values: Sequence[T], counts: Sequence[int]) -> list[Sequence[T]]:
    """Returns the first values, the next ones and so on, by their numbers; any more are left out."""
    groups = []
    start = 0
    for count in counts:
        groups.append(values[start : start + count])
        start += count
    return groups
