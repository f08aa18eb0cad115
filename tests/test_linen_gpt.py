"""models/linen_gpt.py: a Linen model in a loop of its own trains sharded as on one device, and on real text."""

import functools

import jax
import numpy as np
import optax
import pytest

import jshard as js
from models import linen_gpt
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE

CONFIG = linen_gpt.Config(block_size=16, n_layer=2, d_model=64)
STEPS = 5


def batches():
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (STEPS, 16, CONFIG.block_size + 1), np.int32)
    return [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in tokens]


def trained(model, state):
    losses = []
    for batch in batches():
        state, loss = linen_gpt.step(state, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, state.params)


@functools.cache
def alone():
    model = linen_gpt.GPT(CONFIG)
    return trained(model, linen_gpt.creator(model, optax.adamw(1e-3))())


@pytest.mark.parametrize("replica", [1, 2])
def test_it_trains_as_on_one_device(replica):
    model = linen_gpt.annotated(CONFIG, js.mesh(replica=replica))
    state = js.shard_init(linen_gpt.creator(model, optax.adamw(1e-3)), model)
    kernel = state.params["block_0"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * (8 // replica) == kernel.size
    losses, params = trained(model, state)
    wanted_losses, wanted = alone()
    np.testing.assert_allclose(losses, wanted_losses, rtol=GRADIENT_TOLERANCE)
    square = lambda tree: sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(tree))
    apart = square(jax.tree.map(np.subtract, params, wanted)) / square(wanted)
    assert apart**0.5 <= PARAMETER_TOLERANCE


def test_it_learns_real_text(capsys):
    losses = linen_gpt.train(CONFIG, js.mesh(), steps=20)
    assert losses[-1] < 0.8 * losses[0]
    said = capsys.readouterr().out
    assert "block_0..1" in said
    assert f"step 20/20  loss {losses[-1]:.4f}" in said
