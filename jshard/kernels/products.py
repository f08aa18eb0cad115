"""`matmul` and `mlp`: products that leave room on the GPU; an MLP's activation is fused into its first product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, cast

import jax
import jax.numpy as jnp

from jshard._text import PREFIX
from jshard.engine.per_example import per_example
from jshard.kernels.backend import (
    Backend,
    KernelRun,
    Occupancy,
    as_matrix,
    as_row,
    check_known,
    check_shapes,
    decide,
    vary_alike,
    with_half_the_rows,
)

Activation = Literal["gelu", "silu"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"gelu": jax.nn.gelu, "silu": jax.nn.silu}


def matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    occupancy: Occupancy | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """The product `x @ w + bias`, accumulated in float32, with a kernel that can leave room for communication.

    On Hopper GPUs it runs on Pallas Mosaic GPU, forward and backward; on other devices, and for dtypes other than
    bfloat16 and float16, as plain XLA. It needs arrays that are whole on the device; inside a sharded module this
    holds, because it sees the local shard of the batch and gathered parameters.

    Args:
        x: (..., K).
        w: (K, N), of the same dtype.
        bias: (N,), of the same dtype, or None.
        occupancy: how much of the GPU it may occupy.
        backend: "auto", "mosaic" (raises if it cannot run), "interpret" (step by step on a CPU, for tests), "xla".

    Returns:
        (..., N) in the dtype of `x`.

    Raises:
        KernelError: the sizes do not match, or the device cannot provide the requested resources.

    Example:
        >>> x, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> js.kernels.matmul(x, w, occupancy=js.kernels.Occupancy(reserved_sms=16)).shape
        (8, 32)
    """
    given = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    wanted = {"w": (*x.shape[-1:], *w.shape[-1:]), "bias": w.shape[-1:]}
    check_shapes("matmul", given, wanted, [] if x.ndim else ["x must be (..., K)."])
    call = decide("matmul", backend, occupancy, given.values())
    with call.named():
        if call.is_plain:
            return plain_matmul(x, w, bias)
        x_MK, w, *biases = vary_alike(as_matrix(x), w, *([] if bias is None else [bias]))
        rows = per_example(functools.partial(_matmul, call), in_axes=(0, None, None))
        y_MN = cast(jax.Array, rows(x_MK, w, biases[0] if biases else None))
        return y_MN.reshape(*x.shape[:-1], w.shape[1])


def plain_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """The twin of `matmul`, as XLA compiles it."""
    y = jnp.matmul(x, w, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
    return (y if bias is None else y + as_row(bias, y)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, bias_N: jax.Array | None) -> jax.Array:
    return product(call, x_MK, w_KN, bias_N)


def _matmul_forward(
    call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, bias_N: jax.Array | None
) -> tuple[jax.Array, tuple]:
    return product(call, x_MK, w_KN, bias_N), (x_MK, w_KN, bias_N)


def _matmul_backward(call: KernelRun, kept: tuple, dy_MN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x_MK, w_KN, bias_N = kept
    with call.named():
        return *gradients(call, x_MK, w_KN, dy_MN), None if bias_N is None else sum_of_rows(dy_MN)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def gradients(call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, dy_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of both operands of a product."""
    return product(call, dy_MN, w_KN, kind="nt"), product(call, x_MK, dy_MN, kind="tn")


def sum_of_rows(dy_MN: jax.Array) -> jax.Array:
    """The gradient of a vector that was added to every row."""
    return dy_MN.sum(0, dtype=jnp.float32).astype(dy_MN.dtype)


def product(
    call: KernelRun, a: jax.Array, b: jax.Array, bias: jax.Array | None = None, *, kind: str = "nn"
) -> jax.Array:
    """One product on Mosaic GPU; `kind` states whether each operand is stored (n)ormally or (t)ransposed."""
    from jshard.kernels.mosaic_product import Product, run  # slow to import, and only where a kernel runs

    what = Product(f"{PREFIX}{call.name}_{kind}", kind[0] == "t", kind[1] == "t", 1, _sum)
    return run(call, what, a, [b], [] if bias is None else [bias])[0]


def _sum(*terms: jax.Array) -> tuple[jax.Array]:
    return (sum(terms[1:], start=terms[0]),)


# A feed-forward layer.


def mlp(
    x: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    w_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    activation: Activation = "gelu",
    occupancy: Occupancy | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """A feed-forward layer: `act(x @ w_up + b_up) @ w_down + b_down`, or gated, `(act(x @ w_gate) * (x @ w_up)) @ ...`.

    With a gate and "silu" it is SwiGLU (arXiv 2002.05202). The activation is computed in float32 on the sums of the
    first product, before they leave the registers: one kernel instead of two or three, with no array between them.
    The activation's input is kept for backward, not its output. Runs where `matmul` does.

    Args:
        x: (..., D).
        w_up: (D, F); all arrays have the same dtype.
        w_down: (F, D).
        w_gate: (D, F), or None.
        b_up: (F,), or None; not with a gate.
        b_down: (D,), or None.
        activation: "gelu" (the tanh form, as in `jax.nn.gelu`) or "silu".
        occupancy: how much of the GPU each product may occupy; with a gate, the first one has half the rows per tile.
        backend: as for `matmul`.

    Returns:
        (..., D) in the dtype of `x`.

    Raises:
        KernelError: the sizes do not match, or the device cannot provide the requested resources.

    Example:
        >>> x, up, down = jnp.ones((8, 64)), jnp.ones((64, 256)), jnp.ones((256, 64))
        >>> js.kernels.mlp(x, up, down).shape
        (8, 64)
    """
    named = {"x": x, "w_up": w_up, "w_down": w_down, "w_gate": w_gate, "b_up": b_up, "b_down": b_down}
    given = {name: array for name, array in named.items() if array is not None}
    _check_mlp(given, activation)
    firsts = [w_up] if w_gate is None else [w_gate, w_up]
    call = decide("mlp", backend, occupancy, given.values())
    with call.named():
        if call.is_plain:
            return plain_matmul(plain_hidden(x, firsts, b_up, activation), w_down, b_down)
        names = [name for name in named if name in given]
        x_MD, *weights = vary_alike(as_matrix(x), *(given[name] for name in names[1:]))
        rows = per_example(
            lambda x, ws: _mlp(call, activation, x, dict(zip(names[1:], ws, strict=True))), in_axes=(0, None)
        )
        return cast(jax.Array, rows(x_MD, weights)).reshape(x.shape)


def plain_hidden(x: jax.Array, ws: Sequence[jax.Array], bias: jax.Array | None, activation: Activation) -> jax.Array:
    """The twin of the first half, as XLA compiles it."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    before = [jnp.matmul(x, w, preferred_element_type=wide) for w in ws]
    if bias is not None:
        before = [before[0] + as_row(bias, before[0])]
    return _bend(activation, *before).astype(x.dtype)


def _bend(activation: Activation, first: jax.Array, *second: jax.Array) -> jax.Array:
    """The activation of one product, times the other product if there is one."""
    bent = ACTIVATIONS[activation](first)
    return bent * second[0] if second else bent


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(call: KernelRun, activation: Activation, x_MD: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    return _mlp_forward(call, activation, x_MD, weights, keep=False)[0]


def _mlp_forward(
    call: KernelRun, activation: Activation, x_MD: jax.Array, weights: dict[str, jax.Array], *, keep: bool = True
) -> tuple[jax.Array, tuple]:
    arrays = {"x": x_MD, **weights}
    h_MF, *before = _hidden(call, activation, arrays, keep=keep)
    return product(call, h_MF, arrays["w_down"], arrays.get("b_down")), (arrays, before)


def _mlp_backward(call: KernelRun, activation: Activation, kept: tuple, dy_MD: jax.Array) -> tuple[jax.Array, dict]:
    arrays, before = kept
    with call.named():
        wide = [each.astype(jnp.float32) for each in before]
        h_MF, bend_back = jax.vjp(functools.partial(_bend, activation), *wide)
        dh_MF, d_down = gradients(call, h_MF.astype(dy_MD.dtype), arrays["w_down"], dy_MD)
        d_before = [each.astype(dy_MD.dtype) for each in bend_back(dh_MF.astype(jnp.float32))]
        firsts = _firsts(arrays)
        pairs = [gradients(call, arrays["x"], arrays[name], d) for name, d in zip(firsts, d_before, strict=True)]
        dx_MD = sum((dx for dx, _ in pairs[1:]), start=pairs[0][0])
        found = {"w_down": d_down} | {name: dw for name, (_, dw) in zip(firsts, pairs, strict=True)}
        biases = {"b_up": d_before[0], "b_down": dy_MD}
        return dx_MD, found | {name: sum_of_rows(d) for name, d in biases.items() if name in arrays}


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _firsts(arrays: dict[str, jax.Array]) -> list[str]:
    """The weights of the products that the activation uses: the one it is applied to comes first."""
    return ["w_gate", "w_up"] if "w_gate" in arrays else ["w_up"]


def _hidden(call: KernelRun, activation: Activation, arrays: dict[str, jax.Array], *, keep: bool) -> list[jax.Array]:
    """The hidden layer on Mosaic GPU; with `keep` also the activation's inputs."""
    from jshard.kernels.mosaic_product import Product, run

    ws = [arrays[name] for name in _firsts(arrays)]
    biases = [arrays["b_up"]] if "b_up" in arrays else []

    # float16 ends at 65,504: infinities kept for backward would make gradients NaN.
    limit = float(jnp.finfo(jnp.float16).max)
    in_range = lambda x: jnp.clip(x, -limit, limit) if ws[0].dtype == jnp.float16 else x

    def epilogue(first: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        before = (first + rest[0],) if biases else (first, *rest)
        return (_bend(activation, *before), *(map(in_range, before) if keep else ()))

    what = Product(f"{PREFIX}{call.name}_{activation}", False, False, len(ws), epilogue, 1 + keep * len(ws))
    # Each element of the output has two sums in the registers, which have no room for more.
    call = call if len(ws) == 1 else dataclasses.replace(call, knobs=with_half_the_rows(call.knobs))
    return run(call, what, arrays["x"], ws, biases)


def _check_mlp(given: dict[str, jax.Array], activation: str) -> None:
    """Raises for sizes that do not match, listing all of them."""
    check_known("mlp", "activation", activation, ACTIVATIONS)
    d, f = given["x"].shape[-1:], given["w_up"].shape[-1:]
    wanted = {"w_up": (*d, *f), "w_gate": (*d, *f), "w_down": (*f, *d), "b_up": f, "b_down": d}
    both = {"w_gate", "b_up"} <= given.keys()
    check_shapes("mlp", given, wanted, ["b_up needs a layer without a gate."] if both else [])
