"""What each knob asks of an H200, exactly, as the kernels are lowered for it: no GPU is needed, and no compiler."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jshard as js
from benchmarks.kernels.launches import launches
from jshard.kernels import Occupancy
from jshard.kernels.knobs import product_ns, traffic_ns
from jshard.kernels.mosaic_product import Product, smem_bytes
from jshard.plans.policies import checkpoint_policy
from tests.wide import wide

KIND = "NVIDIA H200"
M, K, N = 2048, 1024, 4096
PLAIN = Product("any", False, False, 1, lambda *products: products)
TILED = {"persistent": False, "tile_m": 128, "tile_n": 128, "stages": 4}


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def on_h200(function, *arrays, axes=(), cores=132):
    device = AbstractDevice(device_kind=KIND, platform="gpu", num_cores=cores)
    types = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(d for _, d in axes), tuple(a for a, _ in axes), types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return function(*arrays)


def lowered(function, *arrays, **where):
    lower = lambda *arrays: jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    return on_h200(lower, *arrays, **where)


def both_ways(function, *arrays, **how):
    """The kernels of a function and of its gradient."""

    def run(*arrays):
        y, back = jax.vjp(function, *arrays)
        return y, back(jax.tree.map(jnp.ones_like, y))

    return {launch.name: launch for launch in launches(lowered(run, *arrays, **how))}


@pytest.mark.parametrize(
    ("knobs", "blocks"),
    [
        ({}, 132),
        wide({"tile_m": 128}, 132),
        ({"tile_n": 64}, 132),
        ({"tile_k": 128, "stages": 2}, 132),
        wide({"stages": 3}, 132),
        ({"reserved_sms": 16}, 116),
        wide({"stages": 3, "smem_pad_bytes": 10_000}, 132),
        wide(TILED, 16 * 32),
        (TILED | {"tile_m": 64}, 32 * 32),
        wide(TILED | {"tile_n": 64}, 16 * 64),
        wide(TILED | {"tile_k": 128, "stages": 2}, 16 * 32),
        (TILED | {"stages": 2, "smem_pad_bytes": 25_600}, 16 * 32),
        wide(TILED | {"stages": 2, "smem_pad_bytes": 1}, 16 * 32),
    ],
    ids=str,
)
def test_each_knob_is_in_the_program(knobs, blocks):
    how = Occupancy(**knobs)
    call = functools.partial(js.kernels.matmul, backend="mosaic", occupancy=how)
    (found,) = launches(lowered(call, of(M, K), of(K, N)))
    assert (found.grid, found.threads) == ((blocks, 1, 1), 384 if how.persistent else 128)
    # Stages of both operands, of 2 bytes each; what outputs leave through; the padding, in whole KiB.
    leaving = 2 * (4 * 64 * 64) if how.persistent else 2 * how.tile_m * how.tile_n
    bytes_ = how.stages * 2 * how.tile_k * (how.tile_m + how.tile_n) + leaving + -(-how.smem_pad_bytes // 1024) * 1024
    assert smem_bytes(PLAIN, how, jnp.bfloat16) == bytes_
    # Of 8 bytes, one for each stage that is full; between warpgroups also one for each that is empty again.
    barriers = 8 * how.stages * (2 if how.persistent else 1)
    assert found.smem_bytes == bytes_ + barriers <= bytes_ + 1024
    assert found.name == f"jshard_matmul_nn_{'persistent' if how.persistent else 'tiled'}"
    assert found.latency_ns == product_ns(M, N, K, kind=KIND)


def test_a_persistent_kernel_starts_no_more_blocks_than_tiles_and_counts_the_devices_multiprocessors():
    call = functools.partial(js.kernels.matmul, backend="mosaic")
    (few,) = launches(lowered(call, of(500, K), of(K, 500)))
    assert few.num_blocks == 2 * 4
    (small,) = launches(lowered(call, of(M, K), of(K, N), cores=114))
    assert small.num_blocks == 114


def test_tiles_shrink_to_small_arrays_and_stages_to_short_sums():
    call = functools.partial(js.kernels.matmul, backend="mosaic", occupancy=Occupancy(**TILED))
    (found,) = launches(lowered(call, of(5, 70), of(70, 40)))
    assert found.num_blocks == 1
    assert found.smem_bytes == 2 * 2 * (64 * 64 + 64 * 64) + 2 * 64 * 64 + 8 * 2


def mlp(*arrays, **settings):
    x, up, down, gate = arrays
    return js.kernels.mlp(x, up, down, w_gate=gate, activation="silu", backend="mosaic", **settings)


def rms_norm(x, scale, **settings):
    return js.kernels.rms_norm(x, scale, residual=x, backend="mosaic", **settings)


def layer_norm(x, scale, **settings):
    return js.kernels.layer_norm(x, scale, scale, residual=x, backend="mosaic", **settings)


SMALL = Occupancy(persistent=False, tile_m=128, tile_n=64, stages=2)
GATED = (of(256, 128), of(128, 256), of(256, 128), of(128, 256))


@pytest.mark.parametrize(
    ("function", "arrays", "names"),
    [
        (
            functools.partial(js.kernels.matmul, backend="mosaic"),
            (of(256, 128), of(128, 256), of(256)),
            "matmul_nn_tiled matmul_nt_tiled matmul_tn_tiled",
        ),
        (mlp, GATED, "mlp_silu_tiled mlp_nn_tiled mlp_nt_tiled mlp_tn_tiled"),
        (rms_norm, (of(256, 128), of(128)), "rms_norm rms_norm_backward"),
        (layer_norm, (of(256, 128), of(128)), "layer_norm layer_norm_backward"),
    ],
    ids=["matmul", "mlp", "rms_norm", "layer_norm"],
)
def test_names_and_the_latency_that_is_said_forward_and_backward(function, arrays, names):
    reported = Occupancy(persistent=False, tile_m=128, tile_n=64, stages=2, latency_ns=123_456)
    found = both_ways(functools.partial(function, occupancy=reported), *arrays)
    assert found.keys() == {f"jshard_{name}" for name in names.split()}
    assert {launch.latency_ns for launch in found.values()} == {123_456}


def test_estimates_are_of_the_work_that_is_done():
    """One of k = 70, padded to 128 by the kernel, is reported as of 70; a product with two sums takes twice as long."""
    found = both_ways(functools.partial(js.kernels.matmul, backend="mosaic", occupancy=SMALL), of(500, 70), of(70, 900))
    assert {launch.latency_ns for launch in found.values()} == {product_ns(500, 900, 70, kind=KIND)}
    found = both_ways(functools.partial(mlp, occupancy=SMALL), *GATED)
    assert found["jshard_mlp_silu_tiled"].latency_ns == product_ns(256, 256, 128, kind=KIND, products=2)
    found = both_ways(rms_norm, of(256, 128), of(128))
    assert found["jshard_rms_norm"].latency_ns == traffic_ns(2 * 4 * 256 * 128, kind=KIND)
    assert found["jshard_rms_norm_backward"].latency_ns == traffic_ns(2 * 4 * 256 * 128, kind=KIND)


def test_a_norm_takes_the_padding_and_a_block_for_every_eight_rows():
    plain, padded = (
        launches(lowered(functools.partial(rms_norm, occupancy=occupancy), of(250, 1024), of(1024)))[0]
        for occupancy in (None, Occupancy(persistent=False, smem_pad_bytes=56_320))
    )
    assert (plain.grid, plain.threads) == (padded.grid, padded.threads) == ((32, 1, 1), 128)
    assert padded.smem_bytes - plain.smem_bytes == 56_320


def test_the_sums_of_a_norms_gradient_take_four_blocks_of_each_multiprocessor():
    assert both_ways(rms_norm, of(4096, 128), of(128))["jshard_rms_norm_backward"].num_blocks == 4 * 132
    assert both_ways(rms_norm, of(100, 128), of(128))["jshard_rms_norm_backward"].num_blocks == 100


def test_inside_loops_remat_and_other_programs():
    """A loop has its kernel once; remat one more for backward."""
    call = functools.partial(js.kernels.matmul, backend="mosaic", occupancy=SMALL)

    def looped(x, ws):
        return jax.lax.scan(lambda x, w: (jax.checkpoint(lambda x, w: jnp.sin(call(x, w)))(x, w), None), x, ws)[0]

    def loss(x, ws):
        return looped(x, ws).astype(jnp.float32).sum()

    program = lowered(jax.grad(loss, (0, 1)), of(128, 128), of(3, 128, 128))
    names = [launch.name.removeprefix("jshard_matmul_") for launch in launches(program)]
    assert sorted(names) == ["nn_tiled", "nn_tiled", "nt_tiled", "tn_tiled"]


def test_a_policy_that_keeps_products_keeps_those_of_kernels():
    call = functools.partial(js.kernels.matmul, backend="mosaic", occupancy=Occupancy(**TILED))

    def run(policy):
        inner = jax.checkpoint(lambda x, w: call(jnp.sin(call(x, w)), w), policy=checkpoint_policy(policy))
        loss = lambda x, w: inner(x, w).astype(jnp.float32).sum()
        return len(launches(lowered(jax.value_and_grad(loss, argnums=(0, 1)), of(64, 64), of(64, 64))))

    # Forward, backward, and what is computed again: the product under the sine.
    assert (run("dots"), run(jax.checkpoint_policies.dots_saveable)) == (2 + 4, 2 + 4 + 1)


def test_of_a_batch_one_kernel_runs_after_another():
    """All at once they would take the multiprocessors that one leaves."""
    knobs = Occupancy(reserved_sms=16)
    batched = jax.vmap(functools.partial(js.kernels.matmul, occupancy=knobs))
    (found,) = launches(lowered(batched, of(3, M, K), of(3, K, N)))
    assert found.grid == (116, 1, 1)
    (norm,) = launches(lowered(jax.vmap(js.kernels.rms_norm, in_axes=(0, None)), of(4, 256, 128), of(128)))
    assert norm.grid == (32, 1, 1)


def test_kernels_inside_shard_map_are_those_of_a_shard():
    call = functools.partial(js.kernels.matmul, backend="mosaic", occupancy=Occupancy(**TILED))
    spread = jax.shard_map(call, in_specs=(jax.P("fsdp"), jax.P()), out_specs=jax.P("fsdp"))
    (found,) = launches(lowered(spread, of(8 * 512, 256), of(256, 512), axes=(("fsdp", 8),)))
    assert found.num_blocks == 4 * 4
