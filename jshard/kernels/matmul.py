"""`matmul`: a matrix product that leaves room on the GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp

from jshard._text import PREFIX
from jshard.engine.per_example import per_example
from jshard.kernels.backend import Backend, KernelRun, check_sizes, decide
from jshard.kernels.knobs import Occupancy, as_matrix, as_row, vary_alike


def matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    occupancy: Occupancy | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """The product `x @ w + bias`, summed in float32, by a kernel that can leave room for communication.

    On a Hopper GPU it runs on Pallas Mosaic GPU, forward and backward; everywhere else, and for other dtypes than
    bfloat16 and float16, as plain XLA. It takes arrays that are whole on the device: inside a sharded module it sees
    its shard of the batch and gathered parameters, which is that.

    Args:
        x: (..., K).
        w: (K, N), of the same dtype.
        bias: (N,), of the same dtype, or none.
        occupancy: how much of the GPU it may hold.
        backend: "auto", "mosaic" (an error where it cannot run), "interpret" (step by step on a CPU, to test), "xla".

    Returns:
        (..., N) in the dtype of `x`.

    Raises:
        KernelError: the sizes do not go together, or the device has not what is asked for.

    Example:
        >>> x, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> js.kernels.matmul(x, w, occupancy=js.kernels.Occupancy(reserved_sms=16)).shape
        (8, 32)
    """
    given = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    _check(given)
    call = decide("matmul", backend, occupancy, given.values())
    with call.named():
        if call.is_plain:
            return plain_matmul(x, w, bias)
        x_MK, w, *biases = vary_alike(as_matrix(x), w, *([] if bias is None else [bias]))
        rows = per_example(functools.partial(_matmul, call), in_axes=(0, None, None))
        y_MN = cast(jax.Array, rows(x_MK, w, biases[0] if biases else None))
        return y_MN.reshape(*x.shape[:-1], w.shape[1])


def _check(given: Mapping[str, jax.Array]) -> None:
    """Refuses sizes that do not go together."""
    x, w, bias = given["x"], given["w"], given.get("bias")
    wrong, do = [], "js.kernels.matmul(x, w, bias) of x (..., K), w (K, N) and bias (N,)."
    if x.ndim == 0 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        wrong.append(f"w is ({x.shape[-1] if x.ndim else 'K'}, N) for an x of {x.shape}.")
        do = "js.kernels.matmul(x, w.T)" if w.ndim == 2 and x.shape[-1:] == w.shape[1:] else do
    if bias is not None and bias.shape != w.shape[-1:]:
        wrong.append(f"bias is {w.shape[-1:]} for a w of {w.shape}.")
    check_sizes("matmul", given, wrong, do)


def plain_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """The twin of `matmul`, as XLA compiles it."""
    y = jnp.matmul(x, w, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
    return (y if bias is None else y + as_row(bias, y)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, bias_N: jax.Array | None) -> jax.Array:
    return product(call, x_MK, w_KN, bias_N)


def _forward(call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, bias_N: jax.Array | None) -> tuple[jax.Array, tuple]:
    return product(call, x_MK, w_KN, bias_N), (x_MK, w_KN, bias_N)


def _backward(call: KernelRun, kept: tuple, dy_MN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x_MK, w_KN, bias_N = kept
    with call.named():
        return *gradients(call, x_MK, w_KN, dy_MN), None if bias_N is None else sum_of_rows(dy_MN)


_matmul.defvjp(_forward, _backward)


def gradients(call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, dy_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of both operands of a product."""
    return product(call, dy_MN, w_KN, kind="nt"), product(call, x_MK, dy_MN, kind="tn")


def sum_of_rows(dy_MN: jax.Array) -> jax.Array:
    """The gradient of what was added to every row."""
    return dy_MN.sum(0, dtype=jnp.float32).astype(dy_MN.dtype)


def product(
    call: KernelRun, a: jax.Array, b: jax.Array, bias: jax.Array | None = None, *, kind: str = "nn"
) -> jax.Array:
    """One product on Mosaic GPU; `kind` says of each operand whether it is stored (n)ormally or (t)ransposed."""
    from jshard.kernels.mosaic_product import Product  # slow to import, and only where a kernel runs
    from jshard.kernels.mosaic_run import run

    what = Product(f"{PREFIX}{call.name}_{kind}", kind[0] == "t", kind[1] == "t", 1, _sum)
    return run(call, what, a, [b], [] if bias is None else [bias])[0]


def _sum(*terms: jax.Array) -> tuple[jax.Array]:
    return (sum(terms[1:], start=terms[0]),)
