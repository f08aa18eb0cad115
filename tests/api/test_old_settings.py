"""What code from before says runs for one more release, with a warning that says what to write instead."""

import inspect
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from jshard.plans.moved import GONE, MovedSettings, batch_mean, per_shard
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


# Settings and functions that a trace has made needless.

X = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
OLD = {"outputs": ("mean", "sum"), "batch_arg": ("x", "y"), "replicated_args": ("y",), "batch_dim": 1}
OLD |= {"sync_batch_norm": False}


class Model(nnx.Module):
    """Has a norm over the batch, a loss as an output, and an argument of the batch's length beside the batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x, y):
        h = self.linear(self.norm(x))
        return h, ((h - y) ** 2).mean(), jnp.abs(h @ y.T).sum()


def run(model):
    """Outputs, gradients and state of a call."""

    def loss_fn(model, x, y):
        h, loss, total = model(x, y)
        return loss + 1e-3 * total, (h, loss, total)

    (loss, outs), grads = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))(model, X, X[::-1] * 0.5)
    return loss, outs, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


def test_settings_that_are_gone_change_nothing():
    with pytest.warns(FutureWarning) as caught:
        model = js.fully_shard(Model(nnx.Rngs(0)), mesh=js.mesh(), min_size=16, **OLD)
    gone, moved = (str(one.message) for one in caught)
    assert gone.startswith(f"{', '.join(OLD)}: these settings of fully_shard are gone")
    assert all(f"\n  {name}: {GONE[name]}." in gone for name in OLD) and OLD.keys() == GONE.keys()
    assert moved.startswith("min_size: these settings of fully_shard have moved")
    assert caught[0].filename == __file__
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max() + 1e-7)
    jax.tree.map(close, run(model), run(Model(nnx.Rngs(0))))


@pytest.mark.parametrize("function", [batch_mean, per_shard])
def test_what_declared_a_value_returns_it_as_it_is(function):
    tree = {"a": jnp.ones(3)}
    with pytest.warns(FutureWarning, match=rf"js.{function.__name__}\(x\) is gone(.|\n)*Write x") as caught:
        assert getattr(js, function.__name__)(tree) is tree
    assert caught[0].filename == __file__
