"""What is said of kernels that cannot run: four parts each, with the limit that is passed; texts in tests/golden."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jshard as js
from jshard.kernels import KernelError, Occupancy
from tests.golden_texts import GoldenTexts

H200, A100 = ("NVIDIA H200", "gpu", 132), ("NVIDIA A100-SXM4-80GB", "gpu", 108)


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(function, *arrays, device=H200, axes=(), types=AxisType.Auto, **named):
    """Traces a call for a device that is not there; of this process if it is None."""
    if device is None:
        return jax.eval_shape(function, *arrays, **named)
    kind, platform, cores = device
    mesh = AbstractMesh(
        tuple(degree for _, degree in axes),
        tuple(axis for axis, _ in axes),
        axis_types=(types,) * len(axes),
        abstract_device=AbstractDevice(device_kind=kind, platform=platform, num_cores=cores),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(function, *arrays, **named)


def call(name, **settings):
    return functools.partial(getattr(js.kernels, name), **{"backend": "mosaic"} | settings)


def matmul(device=H200, dtype=jnp.bfloat16, axes=(), **settings):
    return traced(call("matmul", **settings), of(512, 256, dtype=dtype), of(256, 512), device=device, axes=axes)


def knobs(**settings):
    return matmul(occupancy=Occupancy(**settings))


TILED = {"persistent": False, "tile_m": 128, "tile_n": 128}

HEADS = of(2, 128, 4, 264)

ERRORS = {
    "attention: heads, on an A100": lambda: traced(call("attention", backend="cudnn"), *[HEADS] * 3, device=A100),
    "attention: no GPU": lambda: traced(call("attention", backend="cudnn"), *[of(2, 128, 4, 64)] * 3, device=None),
    "attention: parts": lambda: traced(call("attention", backend="xla", queries_at_once=8), *[HEADS] * 3),
    "attention: backend": lambda: traced(call("attention"), *[HEADS] * 3),
    "shapes: matmul, stored the other way": lambda: traced(call("matmul"), of(8, 64), of(32, 64)),
    "shapes: matmul, its bias": lambda: traced(call("matmul"), of(8, 64), of(64, 32), of(64)),
    "shapes: matmul, no matrix": lambda: traced(call("matmul"), of(), of(2, 64, 32)),
    "shapes: mlp, three at once": lambda: traced(
        call("mlp"), of(8, 64), of(32, 256), of(64, 256), b_up=of(256), b_down=of(65)
    ),
    "shapes: mlp, a bias beside a gate": lambda: traced(
        call("mlp"), of(8, 64), of(64, 256), of(256, 64), w_gate=of(64, 256), b_up=of(256)
    ),
    "shapes: rms_norm": lambda: traced(call("rms_norm"), of(8, 128), of(64), of(4, 128)),
    "shapes: layer_norm, no row": lambda: traced(call("layer_norm"), of(), of(), of()),
    "shapes: rms_norm, a width that no warpgroup holds": lambda: traced(call("rms_norm"), of(8, 100), of(100)),
    "shapes: layer_norm, too wide": lambda: traced(call("layer_norm"), of(8, 8192), of(8192), of(8192)),
    "shapes: matmul, nothing to do": lambda: traced(call("matmul"), of(0, 64), of(64, 64)),
    "dtypes: float32": lambda: traced(call("matmul"), *[of(64, 64, dtype=jnp.float32)] * 2),
    "dtypes: two": lambda: matmul(dtype=jnp.float16),
    "dtypes: step by step, too": lambda: matmul(dtype=jnp.float32, backend="interpret", device=None),
    "knobs: all that no GPU has": lambda: Occupancy(
        tile_m=192, tile_n=0, tile_k=96, stages=1, reserved_sms=-1, smem_pad_bytes=-1, latency_ns=0
    ),
    "knobs: reserved where the GPU places blocks": lambda: Occupancy(persistent=False, reserved_sms=16),
    "knobs: rows of a persistent tile": lambda: Occupancy(tile_m=64),
    "knobs: too much padding": lambda: knobs(**TILED, smem_pad_bytes=100_000),
    "knobs: too much padding of a persistent kernel": lambda: knobs(stages=2, smem_pad_bytes=200_000),
    "knobs: too many stages": lambda: traced(
        call("matmul", occupancy=Occupancy(stages=8)), of(4096, 4096), of(4096, 4096)
    ),
    "knobs: too large tiles": lambda: knobs(**TILED | {"tile_n": 256}),
    "knobs: no multiprocessor is left": lambda: knobs(reserved_sms=132),
    "knobs: everything at once": lambda: knobs(tile_n=256, smem_pad_bytes=150_000, reserved_sms=200),
    "knobs: two sums of a gated layer": lambda: traced(
        call("mlp", occupancy=Occupancy(**TILED | {"tile_n": 512}), activation="silu"),
        of(512, 256),
        of(256, 512),
        of(512, 256),
        w_gate=of(256, 512),
    ),
    "knobs: too much padding of a norm": lambda: traced(
        call("rms_norm", occupancy=Occupancy(persistent=False, smem_pad_bytes=300_000)), of(8, 128), of(128)
    ),
    "knobs: a persistent norm": lambda: traced(
        call("rms_norm", occupancy=Occupancy(reserved_sms=16)), of(8, 128), of(128)
    ),
    "backend: unknown": lambda: matmul(backend="cuda"),
    "activation: unknown": lambda: traced(call("mlp", activation="relu"), of(8, 64), of(64, 256), of(256, 64)),
    "device: a CPU": lambda: matmul(device=None),
    "device: a GPU before Hopper": lambda: matmul(device=A100),
    "device: a TPU, and float32": lambda: matmul(device=("TPU v5p", "tpu", 2), dtype=jnp.float32),
    "device: axes that the compiler splits arrays over": lambda: matmul(axes=(("fsdp", 4), ("tensor", 2))),
}


GOLDEN = GoldenTexts("kernel_errors.txt", ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_text(name):
    with pytest.raises(KernelError) as caught:
        ERRORS[name]()
    GOLDEN.check(name, caught.value)


def test_no_golden_text_is_left_over():
    GOLDEN.check_names()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_where_no_kernel_can_run_the_twin_does_without_a_word(dtype):
    """Only with "auto", the default; knobs are then not looked at."""
    x, w = jnp.ones((4, 8), dtype), jnp.ones((8, 6), dtype)
    occupancy = Occupancy(reserved_sms=500)
    assert js.kernels.matmul(x, w, occupancy=occupancy).tolist() == (8 * jnp.ones((4, 6))).tolist()
    text = jax.jit(js.kernels.matmul).lower(x, w).as_text(debug_info=True)
    assert "jshard.kernels.matmul[xla]" in text


@pytest.mark.parametrize("shapes", [((0, 4), (4, 3)), ((3, 0), (0, 2)), ((2, 4), (4, 0))], ids=str)
def test_of_empty_arrays_the_twin_makes_what_there_is(shapes):
    """On a GPU too, where a kernel would have nothing to start."""
    x, w = shapes
    assert traced(call("matmul", backend="auto"), of(*x), of(*w)).shape == (x[0], w[1])
    assert js.kernels.matmul(jnp.ones(x), jnp.ones(w)).tolist() == jnp.zeros((x[0], w[1])).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {**TILED, "smem_pad_bytes": 100_000},
        {**TILED, "tile_n": 256},
        {"tile_n": 256, "smem_pad_bytes": 150_000, "reserved_sms": 200},
        {"tile_m": 512, "tile_k": 512, "stages": 5},
        {**TILED, "tile_m": 512, "tile_k": 256},
    ],
)
def test_what_is_advised_runs(settings):
    x, w = of(8192, 8192), of(8192, 8192)
    occupancy = Occupancy(**settings)
    with pytest.raises(KernelError) as reported:
        traced(call("matmul", occupancy=occupancy), x, w)
    better = eval(reported.value.do, {"dataclasses": dataclasses, "occupancy": occupancy})
    assert traced(call("matmul", occupancy=better), x, w).shape == (8192, 8192)
