"""A parameter tied between modules that were given in one list belongs to their unit, with its settings."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.plans.plan import ShardPlan

IDS = np.random.default_rng(0).integers(0, 1024, (16, 8))


class Head(nnx.Module):
    def __init__(self, table: nnx.Param):
        self.table = table

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.table[...].T


class Wrapped(nnx.Module):
    def __init__(self, table: nnx.Param, rngs: nnx.Rngs):
        self.gate = nnx.Linear(64, 64, rngs=rngs)
        self.head = Head(table)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.gate(x))


class WrappedTied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(1024, 64, rngs=rngs)
        self.body = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.out = Wrapped(self.embed.embedding, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.out(self.norm(self.body(self.embed(ids))))


def loss_fn(model: WrappedTied, ids: jax.Array) -> jax.Array:
    return (model(ids).astype(jnp.float32) ** 2).mean()


def grouped(**settings) -> WrappedTied:
    """The head of the list is inside another unit, as in a model with a unit for its last stage."""
    model, mesh = WrappedTied(nnx.Rngs(0)), js.mesh()
    js.fully_shard([model.embed, model.norm, model.out.head], mesh=mesh, **settings)
    js.fully_shard(model.out, mesh=mesh)
    return js.fully_shard(model, mesh=mesh)


def table_of(model: WrappedTied):
    return js.plan(model).leaf("out/head/table")


def test_it_has_the_dtypes_of_the_list():
    model = grouped(mixed_precision=js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32"))
    leaf = table_of(model)
    assert leaf.unit == "embed+norm+out/head"
    assert (leaf.placement.gathered_dtype, leaf.placement.reduce_dtype) == ("bfloat16", "float32")
    program = str(jax.make_jaxpr(lambda ids: model(ids))(IDS))
    assert "bf16[1024,64] = all_gather" in program and "f32[1024,64] = all_gather" not in program


def test_it_has_the_placement_of_the_list():
    columns = js.PlacementPolicy(shard_dim=lambda path, shape: 1 if len(shape) == 2 else None)
    assert table_of(grouped(placement=columns)).placement.spec == (None, "fsdp")
    by_alias = js.PlacementPolicy(shard_dim=lambda path, shape: None)
    assert table_of(grouped(placement=by_alias)).placement.spec == ("fsdp", None)


@pytest.mark.parametrize("pattern", ["embedding", "table", "*"])
def test_it_is_ignored_by_any_of_its_paths(pattern):
    placement = js.PlacementPolicy(ignored=pattern)
    assert table_of(grouped(placement=placement)).placement.dim is None


def test_it_keeps_its_dtype_by_any_of_its_paths():
    precision = js.MixedPrecision(param_dtype="bfloat16", keep=("table",))
    assert table_of(grouped(mixed_precision=precision)).placement.gathered_dtype == "float32"


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_its_gradients_are_those_of_one_device(reshard, accumulate):
    model, plain = grouped(reshard_after_forward=reshard), WrappedTied(nnx.Rngs(0))
    grad = js.value_and_grad(loss_fn, accumulate=accumulate)
    loss, grads = nnx.jit(lambda model, ids: grad(model, ids))(model, IDS)
    wanted, wanted_grads = nnx.value_and_grad(loss_fn)(plain, IDS)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert grads["embed"]["embedding"].get_raw_value().sharding.spec[0] == "fsdp"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), grads, wanted_grads)


def gathers_of_the_table(model: WrappedTied) -> int:
    grads = nnx.jit(nnx.grad(loss_fn)).lower(model, IDS).lowered.as_text()
    return len(re.findall(r"all_gather.*-> tensor<1024x64x", grads))


@pytest.mark.parametrize(("reshard", "times"), [(True, 2), (False, 1)])
def test_it_is_gathered_once_in_each_pass_as_its_list_says(reshard, times):
    assert gathers_of_the_table(grouped(reshard_after_forward=reshard)) == times


def test_the_program_does_as_explain_says():
    model = grouped()
    leaf = table_of(model)
    assert leaf.sharers == (("embed",), ("out", "head"))
    plan = js.plan(model)
    assert ShardPlan.from_json(plan.to_json()) == plan
    notes = str(js.explain(model))
    assert "Tied: embed/embedding = out/head/table, gathered by embed+norm+out/head" in notes.replace("\n", " ")
    optimizer = js.shard_optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(model, optimizer, ids):
        loss, grads = nnx.value_and_grad(loss_fn)(model, ids)
        optimizer.update(model, grads)
        return loss

    audited = js.audit(step.lower(model, optimizer, IDS).lowered, model=model)
    assert audited.ok, str(audited)


def test_a_list_that_does_not_have_all_uses_leaves_it_to_the_root():
    model, mesh = WrappedTied(nnx.Rngs(0)), js.mesh()
    precision = js.MixedPrecision(param_dtype="bfloat16")
    js.fully_shard([model.embed, model.norm], mesh=mesh, mixed_precision=precision)
    js.fully_shard(model, mesh=mesh)
    assert table_of(model).unit == "(root)" and table_of(model).placement.gathered_dtype == "float32"


def test_a_list_that_is_never_gathered_may_share_it():
    model, mesh = WrappedTied(nnx.Rngs(0)), js.mesh()
    js.fully_shard([model.embed, model.out.head], mesh=mesh, placement=js.PlacementPolicy(gathered=False))
    js.fully_shard([model.body, model.norm, model.out.gate], mesh=mesh)
    assert model.embed(IDS).shape == (16, 8, 64)
    np.testing.assert_allclose(model.embed(IDS), WrappedTied(nnx.Rngs(0)).embed(IDS), rtol=1e-6)
