"""Models that name axes of their own are split by one line, `axis_rules`, and compute what one device does."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from tests.helpers import mean_square
from tests.toy_models import Tower

RULES = {"tp": "tensor", "embed": None}
BY_RULES = js.PlacementPolicy(axis_rules=RULES)
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
normal = jax.nn.initializers.normal(0.1)


class NamesItsAxes(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        make = functools.partial(nnx.with_partitioning, eager_sharding=False)
        self.up = nnx.Linear(64, 256, kernel_init=make(normal, ("embed", "tp")), rngs=rngs)
        self.down = nnx.Linear(256, 64, kernel_init=make(normal, ("tp", "fsdp")), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Logical(nn.Module):
    boxed: object = nn.with_logical_partitioning

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(256, kernel_init=self.boxed(normal, ("embed", "tp")), name="up")(x))
        return x + nn.Dense(64, kernel_init=self.boxed(normal, ("tp", "embed")), name="down")(h)


def tower() -> Tower:
    rngs = nnx.Rngs(0)
    return Tower([NamesItsAxes(rngs) for _ in range(2)])


def sharded(mesh, placement=BY_RULES):
    return js.fully_shard(tower(), mesh=mesh, units=NamesItsAxes, placement=placement)


def assert_same(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.wide
def test_nnx_gradients_equal_those_of_one_device():
    model = sharded(js.mesh(fsdp=2, replica=2, tensor=2))
    assert model.blocks[0].up.kernel.sharding.spec == jax.P("fsdp", "tensor")
    assert model.blocks[0].down.kernel.sharding.spec == jax.P("tensor", "fsdp")
    step = nnx.value_and_grad(mean_square)
    assert_same(nnx.jit(step)(model, X), step(tower(), X))


@pytest.mark.parametrize("boxed", [nn.with_partitioning, nn.with_logical_partitioning], ids=["mesh", "logical"])
def test_linen_gradients_equal_those_of_one_device(boxed):
    plain = Logical(boxed)
    model = js.fully_shard(plain, mesh=js.mesh(fsdp=4, tensor=2), placement=BY_RULES)
    params = js.shard_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    assert nn.unbox(params)["up"]["kernel"].sharding.spec == jax.P("fsdp", "tensor")
    grad = lambda m: jax.jit(jax.value_and_grad(lambda p: mean_square(lambda x: m.apply({"params": p}, x), X)))
    found = grad(model)(params)
    assert_same(nn.unbox(found), grad(plain)(jax.device_get(nn.unbox(params))))


def test_a_checkpoint_restores_on_another_mesh(tmp_path):
    model = sharded(js.mesh(fsdp=4, tensor=2))
    js.checkpoint.save(tmp_path / "1", nnx.state(model))
    other = sharded(js.mesh(fsdp=2, tensor=4))
    nnx.update(other, jax.tree.map(jax.numpy.zeros_like, nnx.state(other)))
    nnx.update(other, js.checkpoint.restore(tmp_path / "1", nnx.state(other)))
    assert_same(nnx.state(other), nnx.state(tower()))


def test_a_name_without_a_rule_is_an_error_whose_line_works():
    mesh = js.mesh(fsdp=4, tensor=2)
    with pytest.raises(AnnotationError, match="kernel") as caught:
        sharded(mesh, js.PlacementPolicy(axis_rules={"embed": None}))
    assert "axis_rules={'tp': 'tensor'}" in " ".join(str(caught.value).split())


def test_two_dims_on_one_axis_and_an_axis_that_is_none_are_errors():
    with pytest.raises(AnnotationError, match="cannot be split over one axis"):
        sharded(js.mesh(fsdp=4, tensor=2), js.PlacementPolicy(axis_rules={"tp": "tensor", "embed": "tensor"}))
    with pytest.raises(AnnotationError, match="axis_rules"):
        js.PlacementPolicy(axis_rules={"tp": "model"})
