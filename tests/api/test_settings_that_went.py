"""Settings that say what a trace shows are gone: code that has them runs, and gives the numbers of one device."""

import inspect
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.plans.moved import GONE, MovedSettings, batch_mean, per_shard

X = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
SETTINGS = {
    "outputs": ["mean", "sum"],
    "batch_arg": ["x", ("x", "y")],
    "replicated_args": [("y",)],
    "batch_dim": [1],
    "sync_batch_norm": [False],
}
CASES = [(name, value) for name, values in SETTINGS.items() for value in values]


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


def assert_close(found, wanted):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max() + 1e-7), found, wanted)


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_old_code_runs_with_a_warning_and_gives_the_numbers_of_one_device(name, value):
    with pytest.warns(FutureWarning, match=rf"^{name}: these settings of fully_shard are gone") as caught:
        model = js.fully_shard(Model(nnx.Rngs(0)), mesh=js.mesh(), **{name: value})
    assert caught[0].filename == __file__
    assert f"Delete them:\n  {name}: {GONE[name]}." in str(caught[0].message)
    assert_close(run(model), run(Model(nnx.Rngs(0))))


def test_one_warning_names_all_of_them():
    with pytest.warns(FutureWarning) as caught:
        js.fully_shard(Model(nnx.Rngs(0)), mesh=js.mesh(), outputs="mean", batch_arg="x", min_size=16)
    gone, moved = (str(one.message) for one in caught)
    assert gone.startswith("outputs, batch_arg: these settings of fully_shard are gone")
    assert moved.startswith("min_size: these settings of fully_shard have moved")


def test_a_linen_model_takes_them_with_the_same_warning():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(nn.BatchNorm(use_running_average=False)(x)).mean()

    with pytest.warns(FutureWarning, match="sync_batch_norm: statistics are always those of the whole batch"):
        model = js.fully_shard(Normed(), mesh=js.mesh(), sync_batch_norm=False, outputs="sum")
    variables = Normed().init(jax.random.key(0), X)
    apply = lambda model: jax.jit(lambda v: model.apply(v, X, mutable=["batch_stats"]))(variables)
    assert_close(apply(model), apply(Normed()))


@pytest.mark.parametrize("function", [batch_mean, per_shard])
def test_what_declared_a_value_returns_it_as_it_is(function):
    name = function.__name__

    def called(h):
        return h - getattr(js, name)(h.mean(0, keepdims=True))

    class Centred(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x):
            return called(self.linear(x))

    with pytest.warns(FutureWarning, match=rf"js.{name}\(x\) is gone(.|\n)*Write x") as caught:
        found = nnx.jit(lambda model, x: model(x))(js.fully_shard(Centred(nnx.Rngs(0)), mesh=js.mesh()), X)
    assert {one.filename for one in caught} == {__file__}
    with pytest.warns(FutureWarning):
        wanted = Centred(nnx.Rngs(0))(X)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    tree = {"a": jnp.ones(3)}
    with pytest.warns(FutureWarning):
        assert function(tree) is tree


def test_microbatches_are_cut_along_the_leading_dim():
    def loss_fn(model, x, y):
        return (model.linear(x) ** 2).mean()

    with pytest.warns(FutureWarning, match="js.value_and_grad cuts microbatches along dim 0"):
        model = js.fully_shard(Model(nnx.Rngs(0)), mesh=js.mesh(), batch_dim=1)
    found = nnx.jit(lambda m, x, y: js.value_and_grad(loss_fn, accumulate=2)(m, x, y))(model, X, X)
    wanted = nnx.value_and_grad(loss_fn)(Model(nnx.Rngs(0)), X, X)
    assert_close(found[0], wanted[0])


def test_without_them_nothing_warns_and_few_settings_are_left():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(run(js.fully_shard(Model(nnx.Rngs(0)), mesh=js.mesh())), run(Model(nnx.Rngs(0))))
    parameters = inspect.signature(js.fully_shard).parameters.values()
    named = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    assert len(named) <= 10
    assert not set(named) & set(MovedSettings.__annotations__)
