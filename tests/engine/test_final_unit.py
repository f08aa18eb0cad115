"""The final unit of backward is reduced after the region's own parameters, and its gradients computed beside them.

The gradient of an embedding comes last: without this, nothing would be left to compute beside its reduction.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from jshard import _compat
from jshard.engine.schedule import unit_schedule
from jshard.engine.schedule.held_gradients import HeldGradient, reduction_parts
from jshard.engine.stored import HeldOrder
from jshard.plans.mesh import reduces_in_parts
from tests.engine.fake_devices import Device
from tests.engine.program_order import Node, Region, regions
from tests.helpers import Block, Config, Decoder, Scanning, loss_fn, token_batch

CONFIG = Config(layers=5, attends=False)
BATCH = tuple(map(jnp.asarray, token_batch(CONFIG, batch=16, length=8)))
NUM_KERNELS = 2  # of a block that does not attend: all of its parameters that are sharded


def unrolled() -> Decoder:
    return Decoder(CONFIG, nnx.Rngs(0))


def stacked() -> Decoder:
    return Decoder(dataclasses.replace(CONFIG, scanned=True), nnx.Rngs(0))


def scanned_modules() -> Decoder:
    return Scanning(CONFIG, nnx.Rngs(0))


FORMS = pytest.mark.parametrize("build", [unrolled, stacked, scanned_modules])


def annotate(model: Decoder, mesh: Mesh, **settings: Any) -> Decoder:
    if model.config.scanned:
        settings["placement"] = js.PlacementPolicy(stacked=1)
    for unit in [model.blocks] if model.config.scanned else model.blocks:
        js.fully_shard(unit, mesh=mesh, **settings)
    return js.fully_shard(model, mesh=mesh)


def backward_of(build: Callable[[], Decoder], mesh: Mesh, **settings: Any) -> Region:
    model = js.abstract_init(build, lambda model: annotate(model, mesh, **settings))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda params: loss_fn(nnx.merge(graphdef, params, rest, copy=True), *BATCH)
    _, backward = regions(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    return Region(backward)


def reductions_of_blocks(region: Region) -> list[Node]:
    return [node for node in region.of_kind("reduce_scatter") if node.unit.startswith("blocks")]


def gradients(build: Callable[[], nnx.Module], wrap: Callable[[Any], Any]) -> Any:
    model = wrap(build())
    grads = nnx.jit(nnx.grad(loss_fn))(model, *BATCH)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(grads)))


def assert_equal(results: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), results, expected)


@FORMS
def test_its_gradients_are_computed_beside_the_reduction_of_the_embedding_and_reduced_after_it(build):
    backward = backward_of(build, js.mesh(), remat="none")
    (embedding,) = backward.find("reduce_scatter", "(root)", backward=True)
    last = [node for node in reductions_of_blocks(backward) if backward.waits_for(node, [embedding])]
    assert len(last) == NUM_KERNELS
    products = [node for node in backward.of_kind("dot_general") if node.unit.startswith("blocks")]
    beside = []
    for product in products:
        is_needed = any(backward.waits_for(node, [product]) for node in last)
        if is_needed and not backward.waits_for(embedding, [product]):
            beside.append(product)
    assert len(beside) == NUM_KERNELS


@FORMS
def test_units_before_it_are_reduced_as_always(build):
    backward = backward_of(build, js.mesh(), remat="none")
    (embedding,) = backward.find("reduce_scatter", "(root)", backward=True)
    before = [node for node in reductions_of_blocks(backward) if not backward.waits_for(node, [embedding])]
    assert before and all(backward.waits_for(embedding, [node]) for node in before)


@FORMS
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"replica": 2, "fsdp": 4}], ids=str)
def test_gradients_are_those_of_one_device(build, mesh):
    expected = gradients(build, lambda model: model)
    assert_equal(gradients(build, lambda model: annotate(model, js.mesh(**mesh))), expected)


@pytest.mark.parametrize("prefetch", [0, "compiler"])
def test_units_on_demand_and_in_the_compilers_order_wait_for_nothing(prefetch):
    backward = backward_of(unrolled, js.mesh(), remat="none", prefetch=prefetch)
    embedding = backward.find("reduce_scatter", "(root)", backward=True)
    assert embedding
    assert not any(backward.waits_for(node, embedding) for node in reductions_of_blocks(backward))


# ---- units that are not final


class ReadsFirst(Decoder):
    """Reads a parameter of its first block itself, before all blocks."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        kernel = jax.tree.leaves(nnx.state(self.blocks[0], nnx.Param))[-1]
        return super().__call__(ids) * (1 + jnp.mean(kernel**2))


class SumOfStacks(Decoder):
    """Its layers have two parameters for one: the gradient of their sum is cut into rows twice."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.deltas = nnx.List([Block(config, rngs) for _ in range(config.layers)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        def stack(layers: Any) -> Any:
            return jax.tree.map(lambda *rows: jnp.stack(rows), *[nnx.state(layer, nnx.Param) for layer in layers])

        graphdef, _ = nnx.split(self.blocks[0])
        rows = jax.tree.map(jnp.add, stack(self.blocks), stack(self.deltas))
        x, _ = jax.lax.scan(lambda x, row: (nnx.merge(graphdef, row)(x), None), self.embed(ids), rows)
        return self.embed.attend(self.norm(x))


class CallsFirstAgain(Decoder):
    """Its first block is also its last: the gradient is the sum of both."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.embed.attend(self.norm(x))


@pytest.mark.parametrize("model", [ReadsFirst, SumOfStacks, CallsFirstAgain])
def test_gradients_that_something_else_reads(model):
    build = lambda: model(CONFIG, nnx.Rngs(0))
    expected = gradients(build, lambda model: model)
    assert_equal(gradients(build, lambda model: annotate(model, js.mesh())), expected)


class WithTower(Decoder):
    """As many products before its blocks as a block has: beside them the first block is reduced."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.tower = nnx.List([nnx.Linear(config.width, config.width, rngs=rngs) for _ in range(8)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for linear in self.tower:
            x = jnp.tanh(linear(x))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


@pytest.mark.parametrize("model", [CallsFirstAgain, WithTower])
def test_a_unit_whose_gradients_are_read_or_that_much_follows_is_reduced_in_order(model):
    backward = backward_of(lambda: model(CONFIG, nnx.Rngs(0)), js.mesh(), remat="none")
    *before, last = reductions_of_blocks(backward)
    assert backward.waits_for(last, before[:-1])
    assert not backward.waits_for(last, backward.find("reduce_scatter", "(root)", backward=True))


def test_without_parameters_of_the_region_the_last_unit_waits_for_no_sum_of_small_gradients():
    model = js.abstract_init(unrolled, lambda model: annotate(model, js.mesh(), remat="none"))
    of_blocks = nnx.All(nnx.Param, nnx.PathContains("blocks"))
    graphdef, trained, frozen, rest = nnx.split(model, of_blocks, nnx.Param, ...)
    loss = lambda trained, frozen: loss_fn(nnx.merge(graphdef, trained, frozen, rest, copy=True), *BATCH)
    _, backward = regions(jax.make_jaxpr(jax.grad(loss))(trained, frozen).jaxpr)
    region = Region(backward)
    *before, last = reductions_of_blocks(region)
    assert region.waits_for(last, before[:-1])
    assert not region.waits_for(last, region.of_kind("psum"))


# ---- reductions in parts


def held(num_bytes: int) -> HeldGradient:
    array: Any = jax.ShapeDtypeStruct((num_bytes // 2,), jnp.bfloat16)
    shard: Any = None
    return HeldGradient(array, HeldOrder((0,)), np.dtype("float32"), shard)


MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "part_bytes", "parts"),
    [
        ([8, 112, 112, 32], 32, [[1], [2], [3], [0]]),
        ([4, 40, 16, 20], 32, [[1], [3, 2], [0]]),
        ([4, 40, 16, 20], None, [[0, 1, 2, 3]]),
        ([4, 2, 1], 32, [[0, 1, 2]]),
        ([4, 1024, 2], 32, [[0, 1, 2]]),
        ([2, 4, 1], 32, [[0, 1, 2]]),
        ([], 32, [[]]),
    ],
)
def test_parts_have_the_largest_gradients_first(sizes, part_bytes, parts):
    """Each has at least so many bytes, but the last; where the compiler joins none, there is one."""
    limit = None if part_bytes is None else part_bytes * MIB
    assert reduction_parts([held(size * MIB) for size in sizes], limit) == parts


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", False),
        ("NVIDIA A100-SXM4-80GB", "gpu", _compat.ESTIMATES_AMPERE),
        ("AMD Instinct MI300X", "gpu", False),
        ("TPU v5p", "tpu", False),
        ("cpu", "cpu", False),
    ],
)
def test_where_the_compiler_starts_reductions_late_they_are_in_parts(kind, platform, expected):
    assert reduces_in_parts(Mesh(np.array([Device(kind, platform)]), ("fsdp",))) is expected


@pytest.fixture
def parts_of_one(monkeypatch):
    """Each gradient is a part."""
    monkeypatch.setattr(unit_schedule, "reduces_in_parts", lambda mesh: True)
    monkeypatch.setattr(unit_schedule, "PART_BYTES", 1)


@pytest.mark.usefixtures("parts_of_one")
@FORMS
def test_each_part_waits_for_the_part_before(build):
    backward = backward_of(build, js.mesh(), remat="none")
    reductions = reductions_of_blocks(backward)
    assert len(reductions) >= 2 * NUM_KERNELS
    for before, after in zip(reductions[::2], reductions[1::2], strict=True):
        assert backward.waits_for(after, [before])


@pytest.mark.usefixtures("parts_of_one")
@FORMS
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"replica": 2, "fsdp": 4}], ids=str)
def test_in_parts_gradients_are_those_of_one_device(build, mesh):
    expected = gradients(build, lambda model: model)
    assert_equal(gradients(build, lambda model: annotate(model, js.mesh(**mesh))), expected)
