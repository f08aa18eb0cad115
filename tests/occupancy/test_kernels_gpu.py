"""The kernels on a Hopper GPU, against float64: `JAX_PLATFORMS=cuda pytest -m gpu` of this file."""

import functools

import jax.numpy as jnp
import pytest

import jshard as js
from jshard.kernels import Occupancy
from tests.occupancy.kernel_truth import SINGLE, both_ways, drawn, exact, exact_mlp, exact_norm, too_far

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FORMS = {
    "persistent": Occupancy(),
    "reserved": Occupancy(reserved_sms=16),
    "tiled": Occupancy(persistent=False, tile_m=128),
    "padded": Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2, smem_pad_bytes=56_320),
}
# The last ones have several tiles for each multiprocessor: blocks walk on, after one step along k or after some.
SHAPES = [(1, 1, 1), (64, 64, 64), (1000, 500, 300), (513, 1031, 777), (8192, 64, 4096), (4096, 320, 8192)]


def on_gpu(function, arrays, dy):
    """Results and gradients by the kernels."""
    lowered = both_ways(function, arrays, dy)
    assert "mosaic_gpu" in lowered.as_text()
    return lowered.compile()(arrays, dy)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mkn", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_matmul(form, mkn, dtype):
    m, k, n = mkn
    x, w, b, dy = drawn(m, (m, k), (k, n), (n,), (m, n), dtype=dtype)
    call = functools.partial(js.kernels.matmul, occupancy=FORMS[form], backend="mosaic")
    y, grads = on_gpu(call, {"x": x, "w": w, "bias": b}, dy)
    x, w, b, dy = exact(x, w, b, dy)
    wanted = {"y": x @ w + b, "x": dy @ w.T, "w": x.T @ dy, "bias": dy.sum(0)}
    assert too_far({"y": y, **grads}, wanted) == {}


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
    y, grads = on_gpu(call, arrays, dy)
    wanted, wanted_grads = exact_mlp(activation, arrays, dy)
    assert too_far({"y": y}, {"y": wanted}, limit=2 * SINGLE) == {}
    assert too_far(grads, wanted_grads, limit=4 * SINGLE) == {}


@pytest.mark.parametrize("width", [128, 1024, 4096])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms(name, width):
    centred = name == "layer_norm"
    x, residual, dy, dh = drawn(1, *[(1003, width)] * 4)
    scale, bias = drawn(2, (width,), (width,))
    arrays = {"x": x, "scale": scale, "residual": residual} | ({"bias": bias} if centred else {})
    call = functools.partial(getattr(js.kernels, name), eps=1e-5, backend="mosaic")
    (y, stream), grads = on_gpu(call, arrays, (dy, dh))
    x, residual, scale, bias, dy, dh, kept = exact(x, residual, scale, bias, dy, dh, stream)
    normal = exact_norm(centred, 1e-5, x + residual, scale, centred * bias, dy)[0]
    assert too_far({"y": y, "stream": stream}, {"y": normal, "stream": x + residual}) == {}
    _, dx, d_scale, d_bias = exact_norm(centred, 1e-5, kept, scale, 0, dy)
    wanted = {"x": dx + dh, "residual": dx + dh, "scale": d_scale, "bias": d_bias}
    assert too_far(grads, wanted) == {}
