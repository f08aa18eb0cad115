"""The kernels on a Hopper GPU, against float64: `JAX_PLATFORMS=cuda pytest -m gpu tests/test_kernels_gpu.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from jshard.kernels import Occupancy
from tests.test_kernels import error, exact, exact_mlp, exact_norm

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FORMS = {
    "persistent": Occupancy(),
    "reserved": Occupancy(reserved_sms=16),
    "tiled": Occupancy(persistent=False, tile_m=128),
    "padded": Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2, smem_pad_bytes=56_320),
}
# The last ones have several tiles for each multiprocessor: blocks walk on, after one step along k or after some.
SHAPES = [(1, 1, 1), (64, 64, 64), (1000, 500, 300), (513, 1031, 777), (8192, 64, 4096), (4096, 320, 8192)]
SINGLE = 2e-3  # relative error of one product or norm


def drawn(seed, *shapes, dtype=jnp.bfloat16):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def both_ways(function, arrays, dy):
    def run(arrays, dy):
        y, back = jax.vjp(lambda arrays: function(**arrays), arrays)
        return y, back(dy)[0]

    lowered = jax.jit(run).lower(arrays, dy)
    assert "mosaic_gpu" in lowered.as_text()
    return lowered.compile()(arrays, dy)


def close(found, wanted, limit=SINGLE):
    assert error(found, wanted) <= max(limit, 2.0**-8 if wanted.size < 1000 else 0)  # a single element errs so much


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mkn", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_matmul(form, mkn, dtype):
    m, k, n = mkn
    x, w, b, dy = drawn(m, (m, k), (k, n), (n,), (m, n), dtype=dtype)
    call = functools.partial(js.kernels.matmul, occupancy=FORMS[form], backend="mosaic")
    y, grads = both_ways(call, {"x": x, "w": w, "bias": b}, dy)
    x, w, b, dy = exact(x, w, b, dy)
    for found, wanted in ((y, x @ w + b), (grads["x"], dy @ w.T), (grads["w"], x.T @ dy), (grads["bias"], dy.sum(0))):
        close(found, wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_mlp(activation, form):
    """Several roundings to bfloat16 lie one behind the other in it."""
    m, d, f = 1000, 300, 1100
    x, up, down, gate, dy = drawn(7, (m, d), (d, f), (f, d), (d, f), (m, d))
    arrays = {"x": x, "w_up": up / 16, "w_down": down / 32}
    b_up, b_down = drawn(8, (f,), (d,))
    arrays |= {"w_gate": gate / 16} if activation == "silu" else {"b_up": b_up, "b_down": b_down}
    call = functools.partial(js.kernels.mlp, activation=activation, occupancy=FORMS[form], backend="mosaic")
    y, grads = both_ways(call, arrays, dy)
    wanted, wanted_grads = exact_mlp(activation, arrays, dy)
    close(y, wanted, 2 * SINGLE)
    for name, grad in grads.items():
        close(grad, wanted_grads[name], 4 * SINGLE)


@pytest.mark.parametrize("width", [128, 1024, 4096])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms(name, width):
    centred = name == "layer_norm"
    x, residual, dy, dh = drawn(1, *[(1003, width)] * 4)
    scale, bias = drawn(2, (width,), (width,))
    arrays = {"x": x, "scale": scale, "residual": residual} | ({"bias": bias} if centred else {})
    call = functools.partial(getattr(js.kernels, name), eps=1e-5, backend="mosaic")
    (y, stream), grads = both_ways(call, arrays, (dy, dh))
    x, residual, scale, bias, dy, dh, kept = exact(x, residual, scale, bias, dy, dh, stream)
    close(stream, x + residual)
    close(y, exact_norm(centred, 1e-5, x + residual, scale, centred * bias, dy)[0])
    _, dx, d_scale, d_bias = exact_norm(centred, 1e-5, kept, scale, 0, dy)
    wanted = {"x": dx + dh, "residual": dx + dh, "scale": d_scale, "bias": d_bias}
    for each, grad in grads.items():
        close(grad, wanted[each])
