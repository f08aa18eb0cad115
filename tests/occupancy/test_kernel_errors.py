"""What is said of kernels that cannot run: four parts each, with the limit that is passed; texts in tests/golden."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jshard as js
from jshard.kernels import KernelError, Occupancy
from tests.golden_texts import GoldenTexts
from tests.occupancy.absent_gpu import A40, A100, H200, of, on


def traced(name, *arrays, device=H200, axes=(), backend="mosaic", **settings):
    """Traces a call for a device that is not there; of this process if it is None."""
    function = functools.partial(getattr(js.kernels, name), backend=backend, **settings)
    if device is None:
        return jax.eval_shape(function, *arrays)
    with on(device, axes):
        return jax.eval_shape(function, *arrays)


def matmul(dtype=jnp.bfloat16, **settings):
    return traced("matmul", of(512, 256, dtype=dtype), of(256, 512), **settings)


def knobs(device=H200, **settings):
    return matmul(occupancy=Occupancy(**settings), device=device)


def on_older_jax():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jshard._compat.COMPILES_FOR_AMPERE", False)
        patch.setattr("jshard._compat.jax_version", lambda: "0.11.2")
        return matmul(device=A100)


def on_no_a100():
    """Traced by JAX for a Hopper GPU, as it does for all that are not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jshard._compat.kernel_capability", lambda: 9)
        return matmul(device=A100)


def gated(occupancy, activation="silu"):
    x, up, down = of(512, 256), of(256, 512), of(512, 256)
    function = lambda x, up, down, gate: js.kernels.mlp(
        x, up, down, w_gate=gate, occupancy=occupancy, activation=activation, backend="mosaic"
    )
    with on(H200):
        return jax.eval_shape(function, x, up, down, up)


def mlp(**more):
    function = lambda x, up, down, more: js.kernels.mlp(x, up, down, **more)
    return jax.eval_shape(function, of(8, 64), of(32, 256), of(64, 256), {name: of(*s) for name, s in more.items()})


TILED = {"persistent": False, "tile_m": 128, "tile_n": 128}
HEADS = [of(2, 128, 4, 264)] * 3

ERRORS = {
    "attention: heads, on an A100": lambda: traced("attention", *HEADS, backend="cudnn", device=A100),
    "attention: no GPU": lambda: traced("attention", *[of(2, 128, 4, 64)] * 3, backend="cudnn", device=None),
    "attention: parts": lambda: traced("attention", *HEADS, backend="xla", queries_at_once=8),
    "attention: backend": lambda: traced("attention", *HEADS),
    "shapes: matmul": lambda: traced("matmul", of(8, 64), of(32, 64), of(65)),
    "shapes: matmul, no matrix": lambda: traced("matmul", of(), of(2, 64, 32)),
    "shapes: mlp, all at once": lambda: mlp(w_gate=(64, 256), b_up=(256,), b_down=(65,)),
    "shapes: layer_norm, no row": lambda: traced("layer_norm", of(), of(), of()),
    "shapes: rms_norm, a width that no warpgroup holds": lambda: traced("rms_norm", of(8, 100), of(100)),
    "shapes: matmul, nothing to do": lambda: traced("matmul", of(0, 64), of(64, 64)),
    "dtypes: two": lambda: matmul(dtype=jnp.float16),
    "knobs: all that no GPU has": lambda: Occupancy(
        tile_m=96, tile_n=0, tile_k=96, stages=1, reserved_sms=-1, smem_pad_bytes=-1, latency_ns=0
    ),
    "knobs: reserved where the GPU places blocks": lambda: Occupancy(persistent=False, reserved_sms=16),
    "knobs: too much padding": lambda: knobs(**TILED, smem_pad_bytes=100_000),
    "knobs: everything at once": lambda: knobs(tile_n=256, smem_pad_bytes=150_000, reserved_sms=200),
    "knobs: rows that two warpgroups do not share": lambda: knobs(tile_m=192),
    "knobs: too much for an A40": lambda: knobs(device=A40, tile_m=128, stages=4),
    "knobs: everything at once, on an A100": lambda: knobs(
        device=A100, tile_n=256, smem_pad_bytes=150_000, reserved_sms=108
    ),
    "knobs: two sums of a gated layer": lambda: gated(Occupancy(**TILED | {"tile_n": 512})),
    "knobs: too much padding of a norm": lambda: traced(
        "rms_norm", of(8, 128), of(128), occupancy=Occupancy(persistent=False, smem_pad_bytes=300_000)
    ),
    "knobs: a persistent norm": lambda: traced("rms_norm", of(8, 128), of(128), occupancy=Occupancy(reserved_sms=16)),
    "backend: unknown": lambda: matmul(backend="cuda"),
    "activation: unknown": lambda: gated(Occupancy(), activation="relu"),
    "device: a CPU, step by step and in float32": lambda: matmul(dtype=jnp.float32, backend="interpret", device=None),
    "device: a TPU": lambda: matmul(device=("TPU v5p", "tpu", 2)),
    "device: an A100, of a version of JAX without kernels for it": on_older_jax,
    "device: an A100 that JAX takes for another": on_no_a100,
    "device: axes that the compiler splits arrays over": lambda: matmul(axes=(("fsdp", 4), ("tensor", 2))),
}
GOLDEN = GoldenTexts("kernel_errors.txt", ERRORS)


def test_texts(monkeypatch):
    # The knobs of Ampere are checked before anything is traced: also under a version of JAX that cannot compile it.
    monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", True)
    monkeypatch.setattr("jshard._compat.kernel_capability", lambda: 8)
    for name, call in ERRORS.items():
        with pytest.raises(KernelError) as caught:
            call()
        GOLDEN.check(name, caught.value)
    GOLDEN.check_names()


def test_where_no_kernel_can_run_the_twin_does_silently():
    """Only with "auto", the default; knobs are then not looked at."""
    x, w = jnp.ones((4, 8), jnp.float32), jnp.ones((8, 6), jnp.float32)
    occupancy = Occupancy(reserved_sms=500)
    assert js.kernels.matmul(x, w, occupancy=occupancy).tolist() == (8 * jnp.ones((4, 6))).tolist()


@pytest.mark.parametrize("shapes", [((0, 4), (4, 3)), ((3, 0), (0, 2)), ((2, 4), (4, 0))], ids=str)
def test_of_empty_arrays_the_twin_makes_what_there_is(shapes):
    """On a GPU too, where a kernel would have nothing to start."""
    x, w = shapes
    assert traced("matmul", of(*x), of(*w), backend="auto").shape == (x[0], w[1])
    assert js.kernels.matmul(jnp.ones(x), jnp.ones(w)).tolist() == jnp.zeros((x[0], w[1])).tolist()
