"""The kernels against numpy in float64: results, gradients, and that nothing is left unwritten.

Step by step on a CPU: one device, as the interpreter has no more, and small arrays, as it is slow. It fills what a
kernel is to write with NaN beforehand. After an exception inside a kernel it hangs: every test here has a time limit.
On a Hopper or an Ampere GPU: `JAX_PLATFORMS=cuda pytest -m gpu` of this file.
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
from jshard.kernels import Occupancy, ampere_product, hopper_product
from jshard.kernels.device import TracedDevice, planned_for
from tests.occupancy.absent_gpu import needs_ampere_kernels
from tests.occupancy.kernel_truth import SINGLE, drawn, error, exact, exact_mlp, exact_norm, results, too_far
from tests.occupancy.late_copies import late_copies
from tests.wide import wide

TILED = Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2)
PERSISTENT = Occupancy(tile_m=128, tile_n=64, stages=2, reserved_sms=130)  # two blocks walk over the tiles
FORMS = {
    "persistent": Occupancy(),
    "reserved": Occupancy(reserved_sms=16),
    "tiled": Occupancy(persistent=False, tile_m=128, tile_n=64, stages=3),
    "large": Occupancy(persistent=False, tile_m=128),
    "padded": Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2, smem_pad_bytes=56_320),
}
# The last ones have several tiles for each multiprocessor: blocks walk on, after one step along k or after some.
SHAPES = [(1, 1, 1), (64, 64, 64), (1000, 500, 300), (513, 1031, 777), (8192, 64, 4096), (4096, 320, 8192)]
on_gpu = pytest.mark.gpu


def form_on_gpu(form):
    """A form, on a GPU whose registers hold its sums."""
    if form == "large" and jax.devices()[0].compute_capability.startswith("8."):
        pytest.skip("a warpgroup of Ampere does not hold as many sums")
    return FORMS[form]


def check_matmul(m, k, n, *, bias=True, dtype=jnp.bfloat16, occupancy=TILED, lead=(), backend="interpret"):
    x, w, b, dy = drawn(m + 1000 * k + n, (*lead, m, k), (k, n), (n,), (*lead, m, n), dtype=dtype)
    arrays = {"x": x, "w": w} | ({"bias": b} if bias else {})
    y, grads = results("matmul", arrays, dy, occupancy=occupancy, backend=backend)
    assert y.dtype == dtype and {g.dtype for g in grads.values()} == {jnp.dtype(dtype)}
    x64, w64, b64, dy64 = exact(x, w, b, dy)
    rows = lambda a: a.reshape(-1, a.shape[-1])
    wanted = {"x": dy64 @ w64.T, "w": rows(x64).T @ rows(dy64), "bias": rows(dy64).sum(0)}
    assert too_far({"y": y, **grads}, wanted | {"y": x64 @ w64 + bias * b64}) == {}


@pytest.mark.wide
@settings(max_examples=2, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))
@given(m=st.integers(1, 130), k=st.integers(1, 130), n=st.integers(1, 130), bias=st.booleans())
def test_matmul_of_any_shape(m, k, n, bias):
    check_matmul(m, k, n, bias=bias)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mkn", "how"),
    [
        ((33, 70, 90), {"dtype": jnp.float16, "lead": (2,)}),
        wide((130, 70, 66), {"occupancy": PERSISTENT}),
        # A block continues to its next tile while nothing of the last one is under way: with one step all would be.
        wide((384, 64, 128), {"bias": False, "occupancy": dataclasses.replace(PERSISTENT, reserved_sms=131)}),
    ],
    ids=str,
)
def test_matmul(mkn, how):
    check_matmul(*mkn, **how)


# Ampere's form, step by step too.

AMPERE = TracedDevice("gpu", "NVIDIA A100-SXM4-80GB", 108, smem_limit_bytes=163 * 1024, capability=8)
WALKING = Occupancy(tile_m=64, tile_n=64, stages=2, reserved_sms=106)  # two blocks


@needs_ampere_kernels
@pytest.mark.parametrize(
    ("mkn", "how"),
    [
        ((66, 70, 66), {"occupancy": TILED}),
        wide((130, 200, 66), {"occupancy": WALKING}),
        wide((384, 64, 128), {"occupancy": WALKING, "bias": False}),  # one step along k for each of several tiles
        wide((130, 70, 66), {"occupancy": dataclasses.replace(TILED, smem_pad_bytes=2048)}),
        wide((33, 70, 90), {"dtype": jnp.float16, "lead": (2,)}),
        wide((200, 200, 200), {"occupancy": Occupancy()}),  # the tiles of the generation
    ],
    ids=str,
)
def test_matmul_on_ampere(mkn, how, monkeypatch):
    refuse_hopper(monkeypatch)
    with planned_for(AMPERE), late_copies() as count:
        check_matmul(*mkn, **how)
    assert count["copies"] >= 2 * count["waits"] - 1 > 0


@needs_ampere_kernels
def test_a_wait_for_too_few_copies_is_seen():
    """The last step of a pipeline waits for all copies: with one less, a tile of an operand is not there."""
    x, w = drawn(1, (64, 200), (200, 64))
    with planned_for(AMPERE), late_copies(too_few=1):
        y = js.kernels.matmul(x, w, occupancy=TILED, backend="interpret")
    x64, w64 = exact(x, w)
    assert not error(y, x64 @ w64) <= SINGLE


def refuse_hopper(monkeypatch):
    """Lets no test of Ampere's form pass by Hopper's."""
    for form in ("tiled", "persistent"):
        assert hasattr(ampere_product, form)
        monkeypatch.delattr(hopper_product, form)


@needs_ampere_kernels
@pytest.mark.wide
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_mlp_on_ampere(activation, monkeypatch):
    refuse_hopper(monkeypatch)
    with planned_for(AMPERE), late_copies():
        check_mlp(activation)


@on_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mkn", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_matmul_on_a_gpu(form, mkn, dtype):
    check_matmul(*mkn, dtype=dtype, occupancy=form_on_gpu(form), backend="mosaic")


def test_more_tiles_than_blocks_visit_before_they_continue():
    x, w = drawn(5, (600, 64), (64, 66))
    y = js.kernels.matmul(x, w, occupancy=TILED, backend="interpret")
    x64, w64 = exact(x, w)
    assert too_far({"y": y}, {"y": x64 @ w64}) == {}


def mlp_arrays(activation, m, d, f, scale):
    x, up, down, gate, dy = drawn(7, (m, d), (d, f), (f, d), (d, f), (m, d))
    b_up, b_down = drawn(8, (f,), (d,))
    arrays = {"x": x, "w_up": up / scale, "w_down": down / scale}
    gated = activation == "silu"
    return arrays | ({"w_gate": gate / scale} if gated else {"b_up": b_up, "b_down": b_down}), dy


@pytest.mark.wide
@pytest.mark.parametrize("activation", [wide("gelu"), "silu"])
def test_mlp_errs_no_more_than_its_twin(activation):
    """Two roundings to bfloat16 are in it, as in its twin, whose own error is the measure.

    In the gradients there is one more for each product that the activation takes: they are kept in bfloat16, and the
    twin's in float32.
    """
    check_mlp(activation)


def check_mlp(activation):
    arrays, dy = mlp_arrays(activation, 66, 70, 130, 8)
    wanted, wanted_grads = exact_mlp(activation, arrays, dy)

    def errors(backend):
        y, grads = results("mlp", arrays, dy, activation=activation, occupancy=TILED, backend=backend)
        return {"y": error(y, wanted)} | {name: error(g, wanted_grads[name]) for name, g in grads.items()}

    twin, kernel = errors("xla"), errors("interpret")
    assert max(twin.values()) < 1e-2
    more = {"y": 1.1, "b_down": 1.1}
    assert {name: (e, twin[name]) for name, e in kernel.items() if not e <= more.get(name, 1.6) * twin[name]} == {}


@on_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_mlp_on_a_gpu(activation, form):
    """Several roundings to bfloat16 are one behind the other in it."""
    arrays, dy = mlp_arrays(activation, 1000, 300, 1100, 16)
    y, grads = results("mlp", arrays, dy, activation=activation, occupancy=form_on_gpu(form), backend="mosaic")
    wanted, wanted_grads = exact_mlp(activation, arrays, dy)
    assert too_far({"y": y}, {"y": wanted}, limit=2 * SINGLE) == {}
    assert too_far(grads, wanted_grads, limit=4 * SINGLE) == {}


def check_norm(name, rows, width, *, residual, backend="interpret"):
    centred = name == "layer_norm"
    x, added, dy, dh = drawn(3, *[(rows, width)] * 4)
    scale, bias = drawn(4, (width,), (width,))
    arrays = {"x": x, "scale": scale} | ({"bias": bias} if centred else {}) | ({"residual": added} if residual else {})
    found, grads = results(name, arrays, (dy, dh) if residual else dy, eps=1e-3, backend=backend)
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


@pytest.mark.parametrize(
    ("name", "residual"),
    [("rms_norm", True), ("layer_norm", False), wide("rms_norm", False), wide("layer_norm", True)],
)
def test_norms(name, residual):
    check_norm(name, *((11, 256) if residual else (19, 128)), residual=residual)


@on_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [128, 1024, 4096])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms_on_a_gpu(name, width):
    check_norm(name, 1003, width, residual=True, backend="mosaic")


def test_a_tile_that_is_left_out_is_seen(monkeypatch):
    """What no block writes is NaN, so the comparisons above would fail: here the last of four tiles."""
    whole = _compat.mosaic_kernel
    monkeypatch.setattr(_compat, "mosaic_kernel", lambda *a, grid, **how: whole(*a, grid=(grid[0] - 1,), **how))
    x, w = drawn(0, (65, 64), (64, 90))
    y = np.asarray(js.kernels.matmul(x, w, occupancy=TILED, backend="interpret"), np.float32)
    assert np.isnan(y).sum() in {1 * 26, 1 * 64, 64 * 26, 64 * 64}
    assert not error(y, np.zeros(y.shape)) <= SINGLE


def test_under_vmap():
    x, w = drawn(1, (2, 65, 30), (2, 30, 40))
    call = functools.partial(js.kernels.matmul, occupancy=TILED, backend="interpret")
    x64, w64 = exact(x, w)
    assert error(jax.jit(jax.vmap(call))(x, w), x64 @ w64) <= SINGLE


@pytest.mark.wide
def test_in_a_loop():
    """The gradient of a scan over layers, against that with the twin."""
    x, ws = drawn(2, (20, 64), (3, 64, 64), scale=0.2)

    def loss(x, ws, backend):
        layer = functools.partial(js.kernels.matmul, occupancy=TILED, backend=backend)
        y, _ = jax.lax.scan(lambda x, w: (x + layer(x, w), None), x, ws)
        return (y.astype(jnp.float32) ** 2).sum()

    found, wanted = (jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, ws, how) for how in ("interpret", "xla"))
    assert [error(a, np.asarray(b, np.float64)) < 1e-2 for a, b in zip(found, wanted, strict=True)] == [True, True]
