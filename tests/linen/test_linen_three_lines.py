"""A Linen model after mesh and `fully_shard`: its `init` makes sharded parameters, and a plain `TrainState` trains."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jshard as js
from tests.linen_models import Block, Decoder, X, Y, assert_same, cross_entropy


def of_rows(kind):
    return nn.vmap(kind, variable_axes={"params": None}, split_rngs={"params": False})


def trained(model, params):
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    @jax.jit
    def step(state):
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(state.apply_fn({"params": p}, X), Y))(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    first = state
    for _ in range(3):
        state, loss = step(state)
        losses.append(loss)
    return first, state, losses


@pytest.mark.parametrize("init", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_parameters_and_state_are_sharded_from_the_start(init):
    model = js.fully_shard(Decoder(depth=2), mesh=js.mesh(), units=Block)
    params = init(model.init)(jax.random.key(0), X)["params"]
    first, last, losses = trained(model, params)
    plain = Decoder(depth=2)
    _, wanted, wanted_losses = trained(plain, plain.init(jax.random.key(0), X)["params"])
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert_same(last.params, wanted.params, 1e-4)
    for state in (first, last):
        for tree in (state.params, state.opt_state[0].mu):
            kernel = tree["block_0"]["Dense_0"]["kernel"]
            assert kernel.addressable_shards[0].data.size * 8 == kernel.size


@pytest.mark.parametrize("transformed", [nn.remat, nn.jit, of_rows])
def test_init_of_a_root_that_a_transformation_made_shards_its_parameters(transformed):
    kind = transformed(Decoder)
    model = js.fully_shard(kind(depth=1), mesh=js.mesh(), units=Block)
    wanted = kind(depth=1).init(jax.random.key(0), X)["params"]
    for made in (model.init, jax.jit(model.init)):
        params = made(jax.random.key(0), X)["params"]
        assert_same(params, wanted, 1e-6)
        kernel = params["block_0"]["Dense_0"]["kernel"]
        assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def test_other_parameters_are_placed_by_one_line():
    model = js.fully_shard(Decoder(depth=1), mesh=js.mesh(), units=Block)
    plain = Decoder(depth=1).init(jax.random.key(0), X)["params"]
    jax.eval_shape(model.init, jax.random.key(0), X)
    kernel = js.shard_init(lambda: plain, model)["block_0"]["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
