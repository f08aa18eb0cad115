"""The kernels, step by step on a CPU, against numpy in float64: results, gradients, and that nothing is left unwritten.

One device, as the interpreter has no more, and small arrays, as it is slow; it cannot run under `jax.checkpoint`:
that kernels lower there is in test_kernel_launch.py. It fills what a kernel is to write with NaN beforehand.
After an exception inside a kernel it hangs: every test here has a time limit.
"""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings

import jshard as js
from jshard import _compat
from jshard.kernels import Occupancy
from tests.occupancy.kernel_truth import SINGLE, both_ways, drawn, error, exact, exact_mlp, exact_norm, too_far
from tests.wide import wide

TILED = Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2)
PERSISTENT = Occupancy(tile_m=128, tile_n=64, stages=2, reserved_sms=130)  # two blocks walk over the tiles


def check_matmul(m, k, n, *, bias, dtype=jnp.bfloat16, occupancy=TILED, lead=()):
    x, w, b, dy = drawn(m + 1000 * k + n, (*lead, m, k), (k, n), (n,), (*lead, m, n), dtype=dtype)
    arrays = {"x": x, "w": w} | ({"bias": b} if bias else {})
    call = functools.partial(js.kernels.matmul, occupancy=occupancy, backend="interpret")
    y, grads = both_ways(call, arrays, dy).compile()(arrays, dy)
    assert y.dtype == dtype and {g.dtype for g in grads.values()} == {jnp.dtype(dtype)}
    x64, w64, b64, dy64 = exact(x, w, b, dy)
    rows = lambda a: a.reshape(-1, a.shape[-1])
    wanted = {"x": dy64 @ w64.T, "w": rows(x64).T @ rows(dy64), "bias": rows(dy64).sum(0)}
    assert too_far({"y": y, **grads}, wanted | {"y": x64 @ w64 + bias * b64}) == {}


@settings(max_examples=2, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))
@given(m=st.integers(1, 130), k=st.integers(1, 130), n=st.integers(1, 130), bias=st.booleans())
def test_matmul_of_any_shape(m, k, n, bias):
    check_matmul(m, k, n, bias=bias)


def test_matmul_in_float16_of_an_array_of_rank_three():
    check_matmul(33, 70, 90, bias=True, dtype=jnp.float16, lead=(2,))


def test_more_tiles_than_blocks_visit_before_they_go_on():
    x, w = drawn(5, (600, 64), (64, 66))
    y = js.kernels.matmul(x, w, occupancy=TILED, backend="interpret")
    x64, w64 = exact(x, w)
    assert too_far({"y": y}, {"y": x64 @ w64}) == {}


@pytest.mark.wide
def test_matmul_persistent_with_fewer_blocks_than_tiles():
    check_matmul(130, 70, 66, bias=True, occupancy=PERSISTENT)


@pytest.mark.parametrize("activation", [wide("gelu"), "silu"])
def test_mlp_errs_no_more_than_its_twin(activation):
    """Two roundings to bfloat16 lie in it, as in its twin, whose own error is the measure.

    In the gradients there is one more for each product that the activation takes: they are kept in bfloat16, and the
    twin's in float32.
    """
    gated = activation == "silu"
    m, d, f = 66, 70, 130
    x, up, down, gate, dy = drawn(7, (m, d), (d, f), (f, d), (d, f), (m, d))
    b_up, b_down = drawn(8, (f,), (d,))
    arrays = {"x": x, "w_up": up / 8, "w_down": down / 8}
    arrays |= {"w_gate": gate / 8} if gated else {"b_up": b_up, "b_down": b_down}
    wanted, wanted_grads = exact_mlp(activation, arrays, dy)

    def errors(backend):
        call = functools.partial(js.kernels.mlp, activation=activation, occupancy=TILED, backend=backend)
        y, grads = both_ways(call, arrays, dy).compile()(arrays, dy)
        return {"y": error(y, wanted)} | {name: error(g, wanted_grads[name]) for name, g in grads.items()}

    twin, kernel = errors("xla"), errors("interpret")
    assert max(twin.values()) < 1e-2
    more = {"y": 1.1, "b_down": 1.1}
    assert {name: (e, twin[name]) for name, e in kernel.items() if not e <= more.get(name, 1.6) * twin[name]} == {}


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms(name, residual):
    centred = name == "layer_norm"
    rows, width = (11, 256) if residual else (19, 128)
    x, added, dy, dh = drawn(3, *[(rows, width)] * 4)
    scale, bias = drawn(4, (width,), (width,))
    arrays = {"x": x, "scale": scale} | ({"bias": bias} if centred else {}) | ({"residual": added} if residual else {})
    call = functools.partial(getattr(js.kernels, name), eps=1e-3, backend="interpret")
    cotangents = (dy, dh) if residual else dy
    found, grads = both_ways(call, arrays, cotangents).compile()(arrays, cotangents)
    x64, added64, dy64, dh64, scale64, bias64 = exact(x, added, dy, dh, scale, bias)
    stream = x64 + residual * added64
    # Backward takes the sum as it was stored, and a mistake of the kernel in that would show in `found[1]`.
    kept = exact(found[1])[0] if residual else stream
    y, _, _, _ = exact_norm(centred, 1e-3, stream, scale64, centred * bias64, dy64)
    _, dx, d_scale, d_bias = exact_norm(centred, 1e-3, kept, scale64, 0, dy64)
    dx = dx + residual * dh64
    if residual:
        assert too_far({"stream": found[1]}, {"stream": stream}) == {}
        found = found[0]
    assert too_far({"y": found, **grads}, {"y": y, "x": dx, "residual": dx, "scale": d_scale, "bias": d_bias}) == {}


def test_a_tile_that_is_left_out_is_seen(monkeypatch):
    """What no block writes is NaN, so the comparisons above would fail: here the last of four tiles."""
    whole = _compat.mosaic_kernel
    monkeypatch.setattr(_compat, "mosaic_kernel", lambda *a, grid, **how: whole(*a, grid=(grid[0] - 1,), **how))
    x, w = drawn(0, (65, 64), (64, 90))
    y = np.asarray(js.kernels.matmul(x, w, occupancy=TILED, backend="interpret"), np.float32)
    assert np.isnan(y).sum() in {1 * 26, 1 * 64, 64 * 26, 64 * 64}
    assert not error(y, np.zeros(y.shape)) <= SINGLE


def test_a_row_that_is_left_out_is_seen(monkeypatch):
    from jshard.kernels import mosaic_run

    whole = mosaic_run.plgpu.nd_loop
    monkeypatch.setattr(mosaic_run.plgpu, "nd_loop", lambda grid, **how: whole((grid[0] - 1,), **how))
    x, scale = drawn(0, (9, 128), (128,))
    y = np.asarray(js.kernels.rms_norm(x, scale, backend="interpret"), np.float32)
    assert np.isnan(y[8]).all() and not np.isnan(y[:8]).any()


def test_under_vmap():
    x, w = drawn(1, (2, 65, 30), (2, 30, 40))
    call = functools.partial(js.kernels.matmul, occupancy=TILED, backend="interpret")
    x64, w64 = exact(x, w)
    assert error(jax.jit(jax.vmap(call))(x, w), x64 @ w64) <= SINGLE


def test_in_a_loop():
    """The gradient of a scan over layers, against that with the twin."""
    x, ws = drawn(2, (20, 64), (3, 64, 64), scale=0.2)

    def loss(x, ws, backend):
        layer = functools.partial(js.kernels.matmul, occupancy=TILED, backend=backend)
        y, _ = jax.lax.scan(lambda x, w: (x + layer(x, w), None), x, ws)
        return (y.astype(jnp.float32) ** 2).sum()

    found, wanted = (jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, ws, how) for how in ("interpret", "xla"))
    assert [error(a, np.asarray(b, np.float64)) < 1e-2 for a, b in zip(found, wanted, strict=True)] == [True, True]


@pytest.mark.wide
def test_persistent_over_one_step_and_many_tiles_for_each_block():
    """A block goes on to its next tile while nothing of the last one is under way: with one step all would be."""
    check_matmul(384, 64, 128, bias=False, occupancy=dataclasses.replace(PERSISTENT, reserved_sms=131))
