"""What the tests of kernels hold them against: numpy in float64, and how far results may be from it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard as js

SINGLE = 2e-3  # relative error of one product or norm, whose many results are rounded to bfloat16; one errs up to 2**-8


def drawn(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> list[jax.Array]:
    """Normal random numbers."""
    random = np.random.default_rng(seed)
    return [jnp.asarray((scale * random.standard_normal(shape)).astype(dtype)) for shape in shapes]


def exact(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in arrays]


def error(found: jax.Array, wanted: np.ndarray) -> float:
    """Relative, over the whole array; NaN where something was not written."""
    assert found.shape == wanted.shape
    return float(np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted))


def allowed(wanted: np.ndarray) -> float:
    return SINGLE if wanted.size >= 1000 else 2.0**-8


def results(kernel: str, arrays: Mapping[str, jax.Array], dy: Any, **settings: Any) -> Any:
    """Results and gradients of a kernel, by one program."""

    def run(arrays, dy):
        y, back = jax.vjp(lambda arrays: getattr(js.kernels, kernel)(**arrays, **settings), arrays)
        return y, back(dy)[0]

    return jax.jit(run)(arrays, dy)


def too_far(found: Mapping[str, jax.Array], wanted: Mapping[str, np.ndarray], limit: float = 0.0) -> dict[str, float]:
    """The errors that are larger than allowed."""
    errors = {name: error(array, wanted[name]) for name, array in found.items()}
    return {name: e for name, e in errors.items() if not e <= max(limit, allowed(wanted[name]))}


def hidden(activation, gated, a, *rest):
    """The activation and its derivative by what it is taken of, in float64."""
    if activation == "silu":
        s = 1 / (1 + np.exp(-a))
        y, slope = a * s, s * (1 + a * (1 - s))
    else:
        c = np.sqrt(2 / np.pi)
        t = np.tanh(c * (a + 0.044715 * a**3))
        y = 0.5 * a * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * a * (1 - t**2) * c * (1 + 3 * 0.044715 * a**2)
    return (y * rest[0], [slope * rest[0], y]) if gated else (y, [slope])


def exact_mlp(activation, arrays, dy):
    """Result and gradients in float64."""
    given, dy = {name: np.asarray(a, np.float64) for name, a in arrays.items()}, np.asarray(dy, np.float64)
    firsts = ["w_gate", "w_up"] if "w_gate" in given else ["w_up"]
    before = [given["x"] @ given[name] for name in firsts]
    before[0] = before[0] + given.get("b_up", 0)
    h, slopes = hidden(activation, "w_gate" in given, *before)
    dh = dy @ given["w_down"].T
    d_before = [dh * slope for slope in slopes]
    grads = {name: given["x"].T @ d for name, d in zip(firsts, d_before, strict=True)}
    grads |= {"x": sum(d @ given[name].T for name, d in zip(firsts, d_before, strict=True)), "w_down": h.T @ dy}
    grads |= {"b_up": d_before[0].sum(0), "b_down": dy.sum(0)}
    return h @ given["w_down"] + given.get("b_down", 0), {name: grads[name] for name in given}


def exact_norm(centred, eps, h, scale, bias, dy):
    """Result and gradients in float64, of the sum that is normalised, the scale and the bias."""
    h = h - centred * h.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((h * h).mean(-1, keepdims=True) + eps)
    normal, scaled = h * inverse, dy * scale
    dh = scaled - normal * (scaled * normal).mean(-1, keepdims=True)
    dh = inverse * (dh - centred * scaled.mean(-1, keepdims=True))
    return normal * scale + bias, dh, (dy * normal).sum(0), dy.sum(0)
