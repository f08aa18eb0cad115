"""What kernels are compared with: their formulas in float64 on the CPU, and the gradients that JAX derives of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Mapping[str, np.ndarray]
"""Arrays by the name of an argument, or "y" for the result."""


def matmul(*, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies two matrices."""
    return x @ w


def mlp(*, x: jax.Array, w_up: jax.Array, w_down: jax.Array, w_gate: jax.Array) -> jax.Array:
    """Computes SwiGLU."""
    gate = x @ w_gate
    return (gate / (1 + jnp.exp(-gate)) * (x @ w_up)) @ w_down


def rms_norm(*, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides rows by their root mean square."""
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None]


def layer_norm(*, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Divides rows without their mean by their standard deviation."""
    centred = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return centred / deviation * scale[None] + bias[None]


def attention(*, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Computes causal attention."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    is_seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
    return jnp.einsum("bhts,bshk->bthk", weights, v)


REFERENCES: dict[str, Callable[..., jax.Array]] = {
    function.__name__: function for function in (matmul, mlp, rms_norm, layer_norm, attention)
}


def both_ways(run: Callable[..., jax.Array], arrays: Mapping[str, jax.Array], dy: jax.Array) -> dict[str, jax.Array]:
    """Returns the result "y", and the gradient of each array by its name."""
    y, backward = jax.vjp(lambda arrays: run(**arrays), dict(arrays))
    (gradients,) = backward(dy)
    return {"y": y, **gradients}


def exact(kernel: str, arrays: Arrays, dy: np.ndarray) -> dict[str, np.ndarray]:
    """Returns result and gradients in float64, computed on the CPU."""
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        doubles = {name: jnp.asarray(array.astype(np.float64)) for name, array in arrays.items()}
        results = both_ways(REFERENCES[kernel], doubles, jnp.asarray(dy.astype(np.float64)))
        return {name: np.asarray(array) for name, array in results.items()}


def relative_error(array: jax.Array, reference: np.ndarray) -> float:
    """Returns how far an array is from its reference, in the norm of the whole; NaN if something was not written."""
    return float(np.linalg.norm(np.asarray(array, np.float64) - reference) / np.linalg.norm(reference))
