"""What each knob asks of a GPU, exactly, as the kernels are lowered for it: no GPU is needed, and no compiler."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jshard as js
from benchmarks.kernels.launches import launches
from jshard.kernels import Occupancy
from jshard.kernels.backend import product_ns, traffic_ns
from jshard.kernels.hopper_product import stage_shape
from jshard.kernels.product import Product, smem_bytes
from jshard.plans.remat import checkpoint_policy
from tests.occupancy.absent_gpu import A40, A100, KIND, lowered, needs_ampere_kernels, of
from tests.wide import wide

M, K, N = 2048, 1024, 4096
PLAIN = Product("any", False, False, 1, lambda *products: products)
matmul = functools.partial(js.kernels.matmul, backend="mosaic")
TILED = {"persistent": False, "tile_m": 128, "tile_n": 128, "stages": 4}


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
        ({"tile_n": 64, "reserved_sms": 16}, 116),
        wide({"tile_k": 128, "stages": 2}, 132),
        wide({"stages": 3, "smem_pad_bytes": 10_000}, 132),
        (TILED | {"tile_m": 64}, 32 * 32),
        (TILED | {"stages": 2, "smem_pad_bytes": 25_600}, 16 * 32),
        wide(TILED | {"tile_n": 64, "tile_k": 128, "stages": 2}, 16 * 64),
    ],
    ids=str,
)
def test_each_knob_is_in_the_program(knobs, blocks):
    how = Occupancy(**knobs)
    (found,) = launches(lowered(functools.partial(matmul, occupancy=how), of(M, K), of(K, N)))
    assert (found.grid, found.threads) == ((blocks, 1, 1), 384 if how.persistent else 128)
    # Stages of both operands, of 2 bytes each; what outputs leave through; the padding, in whole KiB.
    leaving = 2 * (4 * 64 * 64) if how.persistent else 2 * how.tile_m * how.tile_n
    bytes_ = how.stages * 2 * how.tile_k * (how.tile_m + how.tile_n) + leaving + -(-how.smem_pad_bytes // 1024) * 1024
    assert smem_bytes(PLAIN, how, jnp.bfloat16, stage_shape(how)) == bytes_
    # Of 8 bytes, one for each stage that is full; between warpgroups also one for each that is empty again.
    barriers = 8 * how.stages * (2 if how.persistent else 1)
    assert found.smem_bytes == bytes_ + barriers <= bytes_ + 1024
    assert found.name == f"jshard_matmul_nn_{'persistent' if how.persistent else 'tiled'}"
    assert found.latency_ns == product_ns(M, N, K, kind=KIND)


@needs_ampere_kernels
@pytest.mark.parametrize(
    ("device", "knobs", "blocks", "smem_bytes"),
    [
        # Stages of both operands, of 2 bytes each; a tile of the output; the padding. No barriers.
        (A100, {"reserved_sms": 16}, 92, 3 * 2 * 64 * (128 + 64) + 2 * 128 * 64),
        (
            A40,
            TILED | {"tile_n": 64, "stages": 2, "smem_pad_bytes": 10_000},
            1024,
            2 * 2 * 64 * 192 + 2 * 8192 + 10_240,
        ),
        wide(A40, {"tile_m": 64, "tile_n": 64, "stages": 2}, 84, 2 * 2 * 64 * 128 + 2 * 64 * 64),
    ],
    ids=str,
)
def test_each_knob_is_in_the_program_for_ampere(device, knobs, blocks, smem_bytes):
    how = Occupancy(**knobs)
    kind, _, _ = device
    (found,) = launches(lowered(functools.partial(matmul, occupancy=how), of(M, K), of(K, N), device=device))
    assert (found.grid, found.threads, found.smem_bytes) == ((blocks, 1, 1), 128, smem_bytes)
    assert found.name == f"jshard_matmul_nn_{'persistent' if how.persistent else 'tiled'}"
    assert found.latency_ns == product_ns(M, N, K, kind=kind) > product_ns(M, N, K, kind=KIND)


@pytest.mark.wide
def test_blocks_are_no_more_than_tiles_or_multiprocessors_and_tiles_shrink_to_small_arrays():
    """Also on the shards of a mesh; and of a batch one kernel runs after another, as together they would fill a GPU."""
    (few,) = launches(lowered(matmul, of(500, K), of(K, 500)))
    (fewer,) = launches(lowered(matmul, of(M, K), of(K, N), device=(KIND, "gpu", 114)))
    assert (few.num_blocks, fewer.num_blocks) == (2 * 4, 114)
    tiled = functools.partial(matmul, occupancy=Occupancy(**TILED))
    (small,) = launches(lowered(tiled, of(5, 70), of(70, 40)))
    assert (small.num_blocks, small.smem_bytes) == (1, 2 * 2 * (64 * 64 + 64 * 64) + 2 * 64 * 64 + 8 * 2)
    spread = jax.shard_map(tiled, in_specs=(jax.P("fsdp"), jax.P()), out_specs=jax.P("fsdp"))
    (shard,) = launches(lowered(spread, of(8 * 512, 256), of(256, 512), axes=(("fsdp", 8),)))
    assert shard.num_blocks == 4 * 4
    (batched,) = launches(lowered(jax.vmap(matmul), of(3, M, K), of(3, K, N)))
    assert batched.grid == (132, 1, 1)


def mlp(x, up, down, gate, **settings):
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
        (matmul, (of(256, 128), of(128, 256), of(256)), "matmul_nn_tiled matmul_nt_tiled matmul_tn_tiled"),
        (mlp, GATED, "mlp_silu_tiled mlp_nn_tiled mlp_nt_tiled mlp_tn_tiled"),
        (rms_norm, (of(256, 128), of(128)), "rms_norm rms_norm_backward"),
        wide(layer_norm, (of(256, 128), of(128)), "layer_norm layer_norm_backward"),
    ],
)
def test_names_and_the_latency_that_is_stated_forward_and_backward(function, arrays, names):
    stated = dataclasses.replace(SMALL, latency_ns=123_456)
    found = both_ways(functools.partial(function, occupancy=stated), *arrays)
    assert found.keys() == {f"jshard_{name}" for name in names.split()}
    assert {launch.latency_ns for launch in found.values()} == {123_456}


def test_estimates_are_of_the_work_that_is_done():
    """One of k = 70, padded to 128 by the kernel, is reported as of 70; a product with two sums takes twice as long."""
    (found,) = launches(lowered(functools.partial(matmul, occupancy=SMALL), of(500, 70), of(70, 900)))
    assert found.latency_ns == product_ns(500, 900, 70, kind=KIND)
    gated, _ = launches(lowered(functools.partial(mlp, occupancy=SMALL), *GATED))
    assert gated.latency_ns == product_ns(256, 256, 128, kind=KIND, products=2)


def test_norms_take_the_padding_a_block_for_eight_rows_and_four_on_a_multiprocessor_for_sums():
    padded = Occupancy(persistent=False, smem_pad_bytes=56_320)
    found = both_ways(functools.partial(rms_norm, occupancy=padded), of(4096, 128), of(128))
    forward, backward = found["jshard_rms_norm"], found["jshard_rms_norm_backward"]
    assert (forward.grid, forward.threads) == ((512, 1, 1), 128) and backward.num_blocks == 4 * 132
    assert 56_320 <= forward.smem_bytes <= 56_320 + 4096
    assert forward.latency_ns == backward.latency_ns == traffic_ns(2 * 4 * 4096 * 128, kind=KIND)


@pytest.mark.wide
def test_inside_loops_remat_and_other_programs():
    """A loop has its kernel once; remat one more for backward."""
    call = functools.partial(matmul, occupancy=SMALL)

    def looped(x, ws):
        return jax.lax.scan(lambda x, w: (jax.checkpoint(lambda x, w: jnp.sin(call(x, w)))(x, w), None), x, ws)[0]

    def loss(x, ws):
        return looped(x, ws).astype(jnp.float32).sum()

    program = lowered(jax.grad(loss, (0, 1)), of(128, 128), of(3, 128, 128))
    names = [launch.name.removeprefix("jshard_matmul_") for launch in launches(program)]
    assert sorted(names) == ["nn_tiled", "nn_tiled", "nt_tiled", "tn_tiled"]


@pytest.mark.wide
def test_a_policy_that_keeps_products_keeps_those_of_kernels():
    call = functools.partial(matmul, occupancy=Occupancy(**TILED))

    def run(policy):
        inner = jax.checkpoint(lambda x, w: call(jnp.sin(call(x, w)), w), policy=checkpoint_policy(policy))
        loss = lambda x, w: inner(x, w).astype(jnp.float32).sum()
        return len(launches(lowered(jax.value_and_grad(loss, argnums=(0, 1)), of(64, 64), of(64, 64))))

    # Forward, backward, and what is computed again: the product under the sine.
    assert (run("dots"), run(jax.checkpoint_policies.dots_saveable)) == (2 + 4, 2 + 4 + 1)
