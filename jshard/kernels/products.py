"""`matmul` and `mlp`: products that leave room on the GPU; an MLP's activation is fused into its first product.

Shapes, as suffixes: M, K, N rows, contracted dim and columns of a product; of an MLP, M rows, D model, F hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

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
    """Computes `x @ w + bias`, accumulated in float32, with a kernel that can leave room for communication.

    On Hopper GPUs, and with jax 0.12 on Ampere GPUs, it runs on Pallas Mosaic GPU, forward and backward; on other
    devices, and for dtypes other than bfloat16 and float16, as plain XLA. It needs arrays that are whole on the device;
    inside a sharded module this holds, because it sees the local shard of the batch and gathered parameters.

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

    Examples:
        >>> x, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> js.kernels.matmul(x, w, occupancy=js.kernels.Occupancy(reserved_sms=16)).shape
        (8, 32)
    """
    arrays = {"x": x, "w": w}
    if bias is not None:
        arrays["bias"] = bias
    _check_matmul(arrays)
    call = decide("matmul", backend, occupancy, arrays.values())
    with call.named():
        if call.is_plain:
            return plain_matmul(x, w, bias)
        x_MK = as_matrix(x)
        # Outside of `_matmul`, which has its own gradient: see `vary_alike`.
        if bias is None:
            bias_N = None
            x_MK, w_KN = vary_alike(x_MK, w)
        else:
            x_MK, w_KN, bias_N = vary_alike(x_MK, w, bias)
        run = per_example(functools.partial(_matmul, call), in_axes=(0, None, None))
        y_MN = cast(jax.Array, run(x_MK, w_KN, bias_N))
        return y_MN.reshape(*x.shape[:-1], w.shape[1])


def _check_matmul(arrays: dict[str, jax.Array]) -> None:
    """Raises for sizes that do not match, listing all of them."""
    x = arrays["x"]
    w = arrays["w"]
    required = {"w": (*x.shape[-1:], *w.shape[-1:]), "bias": w.shape[-1:]}
    faults = []
    if not x.ndim:
        faults.append("x must be (..., K).")
    check_shapes("matmul", arrays, required, faults)


def plain_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes the same as `matmul`, as XLA compiles it."""
    # float64 stays float64.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.matmul(x, w, preferred_element_type=wide)
    if bias is not None:
        y = y + as_row(bias, y)
    return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, bias_N: jax.Array | None) -> jax.Array:
    return product(call, x_MK, w_KN, bias_N)


def _matmul_forward(
    call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, bias_N: jax.Array | None
) -> tuple[jax.Array, tuple]:
    residuals = (x_MK, w_KN, bias_N)
    return product(call, x_MK, w_KN, bias_N), residuals


def _matmul_backward(
    call: KernelRun, residuals: tuple, dy_MN: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x_MK, w_KN, bias_N = residuals
    with call.named():
        dx_MK, dw_KN = gradients(call, x_MK, w_KN, dy_MN)
        if bias_N is None:
            return dx_MK, dw_KN, None
        return dx_MK, dw_KN, sum_of_rows(dy_MN)


_matmul.defvjp(_matmul_forward, _matmul_backward)


class OperandGradients(NamedTuple):
    """The gradients of both operands of a product."""

    dx: jax.Array
    dw: jax.Array


def gradients(call: KernelRun, x_MK: jax.Array, w_KN: jax.Array, dy_MN: jax.Array) -> OperandGradients:
    """Computes the gradients of a product, which are products of transposed operands."""
    # On a GPU the kernel takes operands as they are stored: no transposed copy is made.
    dx_MK = product(call, dy_MN, w_KN, kind="nt")
    dw_KN = product(call, x_MK, dy_MN, kind="tn")
    return OperandGradients(dx_MK, dw_KN)


def sum_of_rows(dy_MN: jax.Array) -> jax.Array:
    """Computes the gradient of a vector that was added to every row."""
    # In float32: a sum of thousands of rows in 16 bits would lose the small terms.
    return dy_MN.sum(0, dtype=jnp.float32).astype(dy_MN.dtype)


def product(
    call: KernelRun, a: jax.Array, b: jax.Array, bias: jax.Array | None = None, *, kind: str = "nn"
) -> jax.Array:
    """Runs one product on Mosaic GPU.

    Args:
        call: how the kernel runs.
        a: first operand.
        b: second operand.
        bias: added to every row.
        kind: whether each operand is stored (n)ormally or (t)ransposed, which the kernel's name states, too.
    """
    # Slow to import, and only where a kernel runs.
    from jshard.kernels.product import Product
    from jshard.kernels.run_product import run

    kernel = Product(
        name=f"{PREFIX}{call.name}_{kind}",
        a_transposed=kind[0] == "t",
        b_transposed=kind[1] == "t",
        num_b=1,
        epilogue=_sum,  # of the product and the bias, if there is one
    )
    biases = [] if bias is None else [bias]
    (y,) = run(call, kernel, a, [b], biases)
    return y


def _sum(*terms: jax.Array) -> tuple[jax.Array]:
    return (sum(terms[1:], start=terms[0]),)


# ---- a feed-forward layer


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
    """Computes `act(x @ w_up + b_up) @ w_down + b_down`; if gated, `(act(x @ w_gate) * (x @ w_up)) @ ...`.

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

    Examples:
        >>> x, up, down = jnp.ones((8, 64)), jnp.ones((64, 256)), jnp.ones((256, 64))
        >>> js.kernels.mlp(x, up, down).shape
        (8, 64)
    """
    # x comes first: `_kernel_mlp` takes all that follow as weights.
    arguments = {"x": x, "w_up": w_up, "w_down": w_down, "w_gate": w_gate, "b_up": b_up, "b_down": b_down}
    arrays = {name: array for name, array in arguments.items() if array is not None}
    _check_mlp(arrays, activation)
    call = decide("mlp", backend, occupancy, arrays.values())
    with call.named():
        if call.is_plain:
            firsts = [arrays[name] for name in _firsts(arrays)]
            # The hidden layer is rounded to the dtype in between, as what the first kernel writes is.
            return plain_matmul(plain_hidden(x, firsts, b_up, activation), w_down, b_down)
        return _kernel_mlp(call, activation, arrays)


def _check_mlp(arrays: dict[str, jax.Array], activation: str) -> None:
    """Raises for sizes that do not match, listing all of them."""
    check_known("mlp", "activation", activation, ACTIVATIONS)
    # Slices, because an array without dims has no last one: it is reported below.
    d = arrays["x"].shape[-1:]
    f = arrays["w_up"].shape[-1:]
    required = {"w_up": (*d, *f), "w_gate": (*d, *f), "w_down": (*f, *d), "b_up": f, "b_down": d}
    faults = []
    if "w_gate" in arrays and "b_up" in arrays:
        faults.append("b_up needs a layer without a gate.")
    check_shapes("mlp", arrays, required, faults)


def _kernel_mlp(call: KernelRun, activation: Activation, arrays: dict[str, jax.Array]) -> jax.Array:
    """Computes the layer on Mosaic GPU."""
    x, *weights = arrays.values()
    x_MD, *weights = vary_alike(as_matrix(x), *weights)
    # A list of weights and their names, in one order: `vary_alike` returns arrays without names.
    names = list(arrays)[1:]

    def run(x_MD: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        named = dict(zip(names, weights, strict=True))
        return _mlp(call, activation, x_MD, named)

    y_MD = cast(jax.Array, per_example(run, in_axes=(0, None))(x_MD, weights))
    return y_MD.reshape(x.shape)


def plain_hidden(x: jax.Array, ws: Sequence[jax.Array], bias: jax.Array | None, activation: Activation) -> jax.Array:
    """Computes the hidden layer, as XLA compiles it."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    products = [jnp.matmul(x, w, preferred_element_type=wide) for w in ws]
    if bias is not None:
        products = [products[0] + as_row(bias, products[0])]
    return _activated(activation, *products).astype(x.dtype)


def _activated(activation: Activation, first: jax.Array, *second: jax.Array) -> jax.Array:
    """Applies the activation to one product, and multiplies by the other product if there is one."""
    y = ACTIVATIONS[activation](first)
    for factor in second:
        y = y * factor
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(call: KernelRun, activation: Activation, x_MD: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    arrays = {"x": x_MD, **weights}
    # Without a gradient: the activation's inputs are not even written.
    h_MF, _ = _hidden(call, activation, arrays, keep=False)
    return _down(call, h_MF, arrays)


def _mlp_forward(
    call: KernelRun, activation: Activation, x_MD: jax.Array, weights: dict[str, jax.Array]
) -> tuple[jax.Array, tuple]:
    arrays = {"x": x_MD, **weights}
    h_MF, inputs = _hidden(call, activation, arrays, keep=True)
    # In 16 bits, as the kernel has written them.
    residuals = (arrays, inputs)
    return _down(call, h_MF, arrays), residuals


def _mlp_backward(
    call: KernelRun, activation: Activation, residuals: tuple, dy_MD: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    arrays, inputs = residuals
    dtype = dy_MD.dtype
    with call.named():
        # The hidden layer again, from the activation's inputs, in float32 as in forward.
        wide_inputs = [x_MF.astype(jnp.float32) for x_MF in inputs]
        h_MF, activation_vjp = jax.vjp(functools.partial(_activated, activation), *wide_inputs)
        # In the dtype in which forward multiplied it.
        dh_MF, dw_down = gradients(call, h_MF.astype(dtype), arrays["w_down"], dy_MD)
        d_inputs = [d_MF.astype(dtype) for d_MF in activation_vjp(dh_MF.astype(jnp.float32))]

        grads = {"w_down": dw_down}
        dxs = []
        # `inputs` has the order of `_firsts`, and so do their gradients.
        for name, d_MF in zip(_firsts(arrays), d_inputs, strict=True):
            dx_MD, grads[name] = gradients(call, arrays["x"], arrays[name], d_MF)
            dxs.append(dx_MD)
        dx_MD = sum(dxs[1:], start=dxs[0])
        if "b_up" in arrays:
            # The only input: a layer with this bias has no gate.
            grads["b_up"] = sum_of_rows(d_inputs[0])
        if "b_down" in arrays:
            grads["b_down"] = sum_of_rows(dy_MD)
        return dx_MD, grads


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _firsts(arrays: Mapping[str, jax.Array]) -> list[str]:
    """Returns the weights of the products that the activation uses: the one it is applied to comes first."""
    return ["w_gate", "w_up"] if "w_gate" in arrays else ["w_up"]


def _down(call: KernelRun, h_MF: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    return product(call, h_MF, arrays["w_down"], arrays.get("b_down"))


def _hidden(
    call: KernelRun, activation: Activation, arrays: Mapping[str, jax.Array], *, keep: bool
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes the hidden layer on Mosaic GPU.

    Args:
        call: how the kernel runs.
        activation: its name.
        arrays: those of the layer, by argument.
        keep: whether to return the activation's inputs.

    Returns:
        The hidden layer, and the activation's inputs, for backward: one or, with a gate, two; none if not kept.
    """
    from jshard.kernels.product import Product
    from jshard.kernels.run_product import run

    ws = [arrays[name] for name in _firsts(arrays)]
    biases = [arrays["b_up"]] if "b_up" in arrays else []

    def in_range(x: jax.Array) -> jax.Array:
        if ws[0].dtype != jnp.float16:
            return x
        # float16 ends at 65,504: infinities kept for backward would make gradients NaN.
        limit = float(jnp.finfo(jnp.float16).max)
        return jnp.clip(x, -limit, limit)

    def epilogue(*terms: jax.Array) -> tuple[jax.Array, ...]:
        """Takes a tile of each product, and a row of the bias, if there is one, for each row of the tile."""
        inputs = list(terms)
        if biases:
            product, bias = terms
            inputs = [product + bias]
        h = _activated(activation, *inputs)
        if not keep:
            return (h,)
        return (h, *(in_range(x) for x in inputs))

    kernel = Product(
        name=f"{PREFIX}{call.name}_{activation}",
        a_transposed=False,
        b_transposed=False,
        num_b=len(ws),
        epilogue=epilogue,
        num_out=1 + len(ws) if keep else 1,
    )
    if len(ws) > 1:
        # Each element of the output has two sums in the registers, which have no room for more.
        call = dataclasses.replace(call, knobs=with_half_the_rows(call.knobs, call.generation))
    h_MF, *inputs = run(call, kernel, arrays["x"], ws, biases)
    return h_MF, inputs
