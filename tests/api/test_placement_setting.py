"""Where parameters lie is one value, `js.ShardPlacement`; its fields as arguments of `fully_shard` run for now."""

import inspect
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from jshard.plans.moved import GONE, MovedSettings
from jshard.plans.placement import ShardPlacement

SETTINGS = {"shard_dim": 1, "ignored": "bias", "min_size": 16, "offload": "optimizer"}


def planned(**settings):
    return js.plan(js.fully_shard(nnx.Linear(128, 64, rngs=nnx.Rngs(0)), mesh=js.mesh(), **settings))


def test_one_value_says_what_the_arguments_said():
    placement = js.ShardPlacement(**SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = planned(placement=placement)
    with pytest.warns(FutureWarning, match="have moved"):
        assert planned(**SETTINGS) == new
    kernel = new.leaf("kernel").placement
    assert (kernel.dim, kernel.offload, new.leaf("bias").placement.dim) == (1, "optimizer", None)


def test_the_warning_prints_the_line_that_gives_the_same_plan():
    with pytest.warns(FutureWarning) as caught:
        old = planned(**SETTINGS)
    (line,) = (line.strip() for line in str(caught[0].message).splitlines() if "js.fully_shard(" in line)
    assert caught[0].filename == __file__
    placement = eval(line.partition("placement=")[2].removesuffix(")"), {"js": js})
    assert planned(placement=placement) == old


def test_a_field_beside_the_value_counts():
    with pytest.warns(FutureWarning, match=r"js.ShardPlacement\(shard_dim=1, min_size=16\)"):
        found = planned(placement=js.ShardPlacement(shard_dim=1), min_size=16)
    assert found == planned(placement=js.ShardPlacement(shard_dim=1, min_size=16))


def test_functions_are_named_in_the_warning():
    with pytest.warns(FutureWarning, match=r"shard_dim=\.\.\.\)"):
        planned(shard_dim=lambda path, shape: None)


def test_linen_models_take_it():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="out")(x)

    model = js.fully_shard(Model(), mesh=js.mesh(), placement=js.ShardPlacement(shard_dim=1, min_size=16))
    jax.eval_shape(model.init, jax.random.key(0), jnp.ones((8, 128)))
    assert js.plan(model).leaf("out/kernel").placement.dim == 1


def test_what_is_no_setting_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        planned(colour="red")
    with pytest.raises(AnnotationError, match=r"is no js.ShardPlacement(.|\n)*js.ShardPlacement\(shard_dim=0\)"):
        planned(placement=1)


def test_the_old_arguments_are_the_fields():
    assert list(MovedSettings.__annotations__) == [*inspect.signature(ShardPlacement).parameters, "strategy", *GONE]


def test_a_unit_of_a_linen_model_takes_it():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="out")(nn.Dense(128, name="inner")(x))

    def plan_of(settings):
        model = js.fully_shard(Model(), mesh=js.mesh(), units={"inner": settings})
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((8, 128)))
        return js.plan(model)

    new = plan_of({"placement": js.ShardPlacement(shard_dim=1, min_size=16)})
    with pytest.warns(FutureWarning, match=r'"placement": js.ShardPlacement\(shard_dim=1, min_size=16\)') as caught:
        assert plan_of({"shard_dim": 1, "min_size": 16}) == new
    assert caught[0].filename == __file__
    assert (new.leaf("inner/kernel").placement.dim, new.leaf("out/kernel").placement.dim) == (1, 0)
    with pytest.raises(AnnotationError, match="'stacked'; a unit sets"):
        plan_of({"placement": js.ShardPlacement(stacked=1)})
