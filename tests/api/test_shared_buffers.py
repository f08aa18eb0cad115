"""Parameters that share a buffer, as after `nnx.clone`, are placed apart: a step may donate all of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.train import TrainStep
from tests.helpers import mean_square

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
BOTH = js.PlacementPolicy(min_size=1, allow_replicated=["*bias"])


class Target(nnx.Module):
    """A network beside its delayed copy, as in deep Q-learning."""

    def __init__(self, annotate_first=None):
        self.online = nnx.Linear(32, 4, rngs=nnx.Rngs(0))
        if annotate_first is not None:
            js.fully_shard(self.online, mesh=annotate_first, placement=BOTH)
        self.target = nnx.clone(self.online)

    def __call__(self, x):
        return self.online(x) - 0.5 * jax.lax.stop_gradient(self.target(x))


class Shared(nnx.Module):
    """One array in parameters, in a buffer and in a plain attribute."""

    def __init__(self):
        array = jnp.ones((1, 32))
        self.a, self.b = nnx.Param(array), nnx.Param(array)
        self.mean, self.table = nnx.Variable(array), nnx.data(array)

    def __call__(self, x):
        return x * self.a[...] * self.b[...] + self.mean[...] * self.table


def buffers(tree):
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return [(s.device.id, s.data.unsafe_buffer_pointer()) for x in leaves for s in x.addressable_shards]


def wanted(build, tx=None, steps=3):
    model = build()
    optimizer = nnx.Optimizer(model, tx or optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, X)) for _ in range(steps)]


@pytest.mark.parametrize("build", [Target, Shared])
def test_a_model_that_holds_an_array_twice_trains_in_a_step_that_donates_it(build):
    mesh = js.mesh()
    model = js.fully_shard(build(), mesh=mesh, placement=BOTH)
    params = nnx.state(model, nnx.Param)
    assert len(buffers(params)) == len(set(buffers(params)))
    x = js.shard_batch(X, mesh)
    step = TrainStep(mean_square, model, js.shard_optimizer(model, optax.sgd(0.1)), x)
    np.testing.assert_allclose([float(step(x)["loss"]) for _ in range(3)], wanted(build), rtol=1e-5)


@pytest.mark.parametrize("first", [False, True])
def test_a_clone_in_the_model_may_be_donated_by_a_step_of_plain_flax(first):
    mesh = js.mesh()
    model = js.fully_shard(Target(mesh if first else None), mesh=mesh, placement=BOTH)
    optimizer = js.shard_optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, grads)
        return loss

    np.testing.assert_allclose([float(step(model, optimizer, X)) for _ in range(3)], wanted(Target), rtol=1e-5)


def test_two_models_of_the_same_arrays_are_placed_apart():
    plain = nnx.Linear(32, 4, rngs=nnx.Rngs(0))
    kept = [np.array(x) for x in jax.tree.leaves(nnx.state(plain))]
    online, target = (js.fully_shard(nnx.clone(plain), mesh=js.mesh(), placement=BOTH) for _ in range(2))
    optimizer = js.shard_optimizer(online, optax.sgd(0.1))
    x = js.shard_batch(X, js.mesh())
    step = TrainStep(mean_square, online, optimizer, x)
    step(x)
    for model in (plain, target):
        for now, before in zip(jax.tree.leaves(nnx.state(model)), kept, strict=True):
            np.testing.assert_array_equal(now, before)


def keeps_parameters():
    """A transformation whose state begins as the parameters themselves, as that of a lookahead does."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(lambda g: -0.1 * g, grads), state

    return optax.GradientTransformation(lambda params: {"slow": params, "slower": params}, update)


def test_optimizer_state_that_is_the_parameters_is_donated_apart():
    mesh = js.mesh()
    model = js.fully_shard(nnx.Linear(32, 4, rngs=nnx.Rngs(0)), mesh=mesh, placement=BOTH)
    optimizer = nnx.Optimizer(model, keeps_parameters(), wrt=nnx.Param)
    x = js.shard_batch(X, mesh)
    step = TrainStep(mean_square, model, optimizer, x)
    found = [float(step(x)["loss"]) for _ in range(3)]
    build = lambda: nnx.Linear(32, 4, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(found, wanted(build, keeps_parameters()), rtol=1e-5)


def test_a_linen_tree_that_holds_an_array_twice_may_be_donated():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(32, name="b")(nn.Dense(32, name="a")(x))

    plain = Twice()
    one = plain.init(jax.random.key(0), X)["params"]["a"]
    tree = {"params": {"a": one, "b": one}}
    model = js.fully_shard(plain, mesh=js.mesh(), placement=BOTH)
    model.init(jax.random.key(0), X)
    params = js.shard_init(lambda: tree, model)
    assert len(buffers(params)) == len(set(buffers(params)))

    def step(model, params, x):
        grads = jax.grad(lambda params: jnp.square(model.apply(params, x)).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    expected = step(plain, tree, X)
    found = jax.jit(lambda params, x: step(model, params, x), donate_argnums=0)(params, X)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
    assert not any(x.is_deleted() for x in jax.tree.leaves(tree))
