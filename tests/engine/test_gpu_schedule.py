"""What the GPU compiler makes of the schedules: every collective of a loop beside matrix products, memory as planned.

The real compiler of XLA:GPU, for a cluster that is not there: it needs the extra `plan-gpu`, and no GPU.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.api.init import abstract_optimizer
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.inspect.audit import Audit, audit
from jshard.plans.mesh import batch_sharding
from jshard.recipes.step import lower_step
from tests.gpu_compiler import needs_gpu_compiler
from tests.helpers import Config, Decoder

pytestmark = [needs_gpu_compiler, pytest.mark.usefixtures("no_stored_programs")]


class Scanning(Decoder):
    """The decoder, with `scan_layers` in the place of its loop."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = js.scan_layers(self.blocks, self.embed(ids))
        return self.head(self.norm(x))


LARGE = Config(layers=6, width=2048, hidden=8192, heads=16, vocab=512, tied=False)
LARGE_BYTES = 2**20
UNIT_BYTES = 2 * (2048 * (4 * 2048 + 2 * 8192) + 8192 + 2048)  # of a block, in bfloat16, without what is replicated


@functools.cache
def compiled(
    *,
    scan: bool = False,
    ahead: int | str | None = 1,
    loop: bool = False,
    profile: str | None = "fastest",
) -> Audit:
    """A training step on 64 GPUs, 8 in each host; one sequence of 1024 tokens on each."""
    config = dataclasses.replace(LARGE, scanned=loop)
    mesh = js.mesh(fsdp=-1, devices=topology_devices(parse_topology("h100:8x8")))
    policy = js.MixedPrecision(param="bfloat16", reduce="float32", output="float32" if loop else None)

    def build() -> Decoder:
        return (Scanning if scan else Decoder)(config, nnx.Rngs(0))

    def annotate(model: Decoder) -> None:
        for unit in [model.blocks] if loop else model.blocks:
            js.fully_shard(
                unit,
                mesh=mesh,
                mixed_precision=policy,
                remat="full",
                prefetch=ahead,
                placement=js.ShardPlacement(stacked=1 if loop else 0),
            )
        js.fully_shard(model.head, mesh=mesh, mixed_precision=policy, reshard_after_forward=False)
        js.fully_shard(model, mesh=mesh, mixed_precision=policy)

    model = js.abstract_init(build, annotate)
    shape = jax.ShapeDtypeStruct((64, 1024), jnp.int32, sharding=batch_sharding(mesh))
    lowered = lower_step(loss_fn, model, abstract_optimizer(model, optax.adamw(1e-3)), (shape, shape))
    return audit(lowered.compile(compiler_options=js.compiler_options(profile, platform="gpu")), model=model)


def loss_fn(model: Decoder, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    logits = model(batch[0]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def amounts(found: Audit) -> tuple[float, float, float]:
    return tuple(found.amount(kind) for kind in ("all-gather", "reduce-scatter", "all-reduce"))


@pytest.mark.parametrize("form", [{"scan": True}, {"loop": True}], ids=["scan_layers", "nnx.scan"])
def test_in_a_scan_every_large_collective_has_a_matrix_product_beside_it(form):
    found = compiled(**form)
    # Four gathers in forward and four in backward, a reduction, each twice as loops are double-buffered, some merged.
    assert len([w for w in found.schedule.in_loops if w.full_bytes > LARGE_BYTES]) >= 2 * (4 + 4 + 1) - 4
    assert found.not_overlapped(at_least_bytes=LARGE_BYTES) == ()
    # So have those beside the loop; in forward nothing computes before the first layer.
    last = [w for w in found.schedule.windows if w.kind == "all-gather" and w.phase == "backward"]
    assert all(w.is_overlapped for w in last if w.full_bytes > LARGE_BYTES)
    gathers, reduces, all_reduces = amounts(found)
    assert gathers == pytest.approx(2.0, abs=0.02)
    assert reduces == pytest.approx(1.0, abs=0.01)
    assert all_reduces < 0.001
    assert found.ok, found.differences


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(2048)(nn.gelu(nn.Dense(8192)(nn.LayerNorm()(x)))), None


class Checkpointed(nn.Module):
    """A checkpoint of the user's in a loop of Flax's."""

    @nn.compact
    def __call__(self, x):
        stacked: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(nn.remat(Layer), length=LARGE.layers, **stacked)(name="layers")(x, None)[0]


def test_a_checkpoint_in_a_loop_has_the_same_schedule():
    mesh = js.mesh(fsdp=-1, devices=topology_devices(parse_topology("h100:8x8")))
    model = js.fully_shard(Checkpointed(), mesh=mesh, units=Layer)
    x = jax.ShapeDtypeStruct((64 * 1024, 2048), jnp.float32, sharding=batch_sharding(mesh))
    params = js.abstract_init(lambda: model.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype)), model)
    lowered = jax.jit(jax.grad(lambda params, x: (model.apply(params, x) ** 2).mean())).lower(params, x)
    found = audit(lowered.compile(compiler_options=js.compiler_options("fastest", platform="gpu")), model=model)
    assert found.not_overlapped(at_least_bytes=LARGE_BYTES) == ()
    gathers, reduces, _ = amounts(found)
    assert (gathers, reduces) == (pytest.approx(2.0, abs=0.02), pytest.approx(1.0, abs=0.01))


def test_the_check_notices_collectives_that_lose_their_overlap():
    assert compiled(scan=True, ahead=0).not_overlapped(at_least_bytes=LARGE_BYTES)
    assert compiled(loop=True, ahead=0).not_overlapped(at_least_bytes=LARGE_BYTES)


def bytes_of(window: Any) -> int:
    return window.full_bytes * window.executions


def overlapped(found: Audit) -> float:
    """Part of the bytes of large collectives that have matrix products beside them."""
    large = [w for w in found.schedule.windows if w.full_bytes > LARGE_BYTES]
    return sum(bytes_of(w) for w in large if w.is_overlapped) / sum(map(bytes_of, large))


def test_unrolled_the_chain_overlaps_and_bounds_memory():
    chain, free = compiled(), compiled(ahead=None)
    assert overlapped(chain) > max(0.85, overlapped(free))
    gathers, reduces, _ = amounts(chain)
    assert gathers == pytest.approx(2.0, abs=0.02)  # re-gathers are not merged with the gathers of forward
    assert reduces == pytest.approx(1.0, abs=0.01)
    scatters = [w for w in chain.schedule.windows if w.kind == "reduce-scatter" and w.full_bytes > LARGE_BYTES]
    assert len(scatters) >= LARGE.layers  # one for each unit, and not one for all at the end
    assert chain.memory.peak_bytes < free.memory.peak_bytes - UNIT_BYTES  # without a schedule several are there at once


@pytest.mark.parametrize(("settings", "first"), [({"scan": True}, 3), ({}, 1)], ids=["scan", "chain"])
def test_each_unit_ahead_adds_one_unit_at_most(settings, first):
    """The first one adds gradients in a loop, of a unit, in float32: without it they are reduced in their own trip."""
    peaks = [compiled(ahead=n, profile=None, **settings).memory.peak_bytes / UNIT_BYTES for n in (0, 1, 2)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[1] - peaks[0] < first + 0.15
    assert peaks[2] - peaks[1] < 1.05


def test_without_prefetch_a_loop_holds_one_unit():
    """Its trips are double-buffered, and yet there are gradients of one."""
    assert compiled(scan=True, ahead=0).memory.peak_bytes < 0.7 * compiled(scan=True).memory.peak_bytes
