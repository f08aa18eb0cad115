"""What code from before says runs for one more release, with a warning that says what to write instead."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from jshard.plans.placement import GONE, batch_mean, per_shard
from tests.helpers import Block, Config, builder

SETTINGS = {"shard_dim": 1, "ignored": "bias", "min_size": 16, "offload": "optimizer"}
OLD = {"outputs": ("mean", "sum"), "batch_arg": ("x", "y"), "replicated_args": ("y",), "batch_dim": 1}
OLD |= {"sync_batch_norm": False}


def planned(**settings):
    return js.plan(js.fully_shard(nnx.Linear(128, 64, rngs=nnx.Rngs(0)), mesh=js.mesh(), **settings))


def test_the_warning_prints_the_line_that_gives_the_same_plan():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = planned(placement=js.PlacementPolicy(**SETTINGS))
    with pytest.warns(FutureWarning, match="have moved") as caught:
        assert planned(**SETTINGS) == new
    (line,) = (line.strip() for line in str(caught[0].message).splitlines() if "js.fully_shard(" in line)
    assert caught[0].filename == __file__
    placement = eval(line.partition("placement=")[2].removesuffix(")"), {"js": js})
    assert planned(placement=placement) == new
    kernel = new.leaf("kernel").placement
    assert (kernel.dim, kernel.offload, new.leaf("bias").placement.dim) == (1, "optimizer", None)


def test_a_field_beside_the_value_counts():
    with pytest.warns(FutureWarning, match=r"js.PlacementPolicy\(shard_dim=1, min_size=16\)"):
        found = planned(placement=js.PlacementPolicy(shard_dim=1), min_size=16)
    assert found == planned(placement=js.PlacementPolicy(shard_dim=1, min_size=16))


def test_what_is_no_setting_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        planned(colour="red")
    with pytest.raises(AnnotationError, match=r"placement=1(.|\n)*js.PlacementPolicy\(shard_dim=0\)"):
        planned(placement=1)


def test_a_unit_of_a_linen_model_takes_it():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="out")(nn.Dense(128, name="inner")(x))

    def plan_of(settings):
        model = js.fully_shard(Model(), mesh=js.mesh(), units={"inner": settings})
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((8, 128)))
        return js.plan(model)

    new = plan_of({"placement": js.PlacementPolicy(shard_dim=1, min_size=16)})
    with pytest.warns(FutureWarning, match=r'"placement": js.PlacementPolicy\(shard_dim=1, min_size=16\)') as caught:
        assert plan_of({"shard_dim": 1, "min_size": 16}) == new
    assert caught[0].filename == __file__
    assert (new.leaf("inner/kernel").placement.dim, new.leaf("out/kernel").placement.dim) == (1, 0)
    with pytest.raises(AnnotationError, match="'stacked'; a unit can set"):
        plan_of({"placement": js.PlacementPolicy(stacked=1)})


def test_settings_that_are_gone_change_nothing():
    with pytest.warns(FutureWarning) as caught:
        found = planned(min_size=16, **OLD)
    gone, moved = (str(one.message) for one in caught)
    assert gone.startswith(f"{', '.join(OLD)}: these settings of fully_shard no longer have")
    assert all(f"\n  {name}: {GONE[name]}." in gone for name in OLD) and OLD.keys() == GONE.keys()
    assert moved.startswith("min_size: these settings of fully_shard have moved")
    assert found == planned(placement=js.PlacementPolicy(min_size=16))


def test_a_strategy_gives_the_layers_their_setting():
    with pytest.warns(FutureWarning, match="strategy: this setting of fully_shard has moved") as caught:
        model = js.fully_shard(builder(Config())(), units=Block, mesh=js.mesh(), strategy="zero2")
    assert "js.fully_shard(layer, mesh=mesh, reshard_after_forward=False)" in str(caught[0].message)
    assert [unit.reshard_after_forward for unit in js.plan(model).units] == [False, False, False]


@pytest.mark.parametrize("function", [batch_mean, per_shard])
def test_what_declared_a_value_returns_it_as_it_is(function):
    tree = {"a": np.ones(3)}
    with pytest.warns(FutureWarning, match=rf"js.{function.__name__}\(x\) is deprecated(.|\n)*Write x") as caught:
        assert getattr(js, function.__name__)(tree) is tree
    assert caught[0].filename == __file__
