"""Training on four devices, generation on the other four: weights moved every few steps, in memory."""

import jax
import numpy as np
import optax
from flax import nnx

import jshard as js
from jshard.train.sampling import Draw, Sampler
from tests.micro_gpt import annotate, build, loss_fn, micro

RECIPE = micro()
PROMPT = np.array([72, 101, 108, 108], np.int32)


def test_tokens_are_those_of_a_checkpoint_round_trip(tmp_path):
    devices = jax.devices()
    trained_on = js.mesh(fsdp=4, devices=devices[:4])
    served_on = js.mesh(replica=2, fsdp=2, devices=devices[4:])
    model = js.shard_init(lambda: build(RECIPE.model, nnx.Rngs(0)), lambda model: annotate(model, trained_on))
    optimizer = js.shard_optimizer(model, optax.adamw(1e-2))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    serve = lambda model: annotate(model, served_on)
    like = js.abstract_init(lambda: build(RECIPE.model, nnx.Rngs(0)), serve)
    tokens = np.random.default_rng(0).integers(0, 256, (10, 16, 33), dtype=np.int32)
    texts = []
    for number, rows in enumerate(tokens, 1):
        step(model, optimizer, {"inputs": rows[:, :-1], "targets": rows[:, 1:]})
        if number % 5:
            continue
        served = js.reshard(model, serve)
        js.checkpoint.save(tmp_path / str(number), {"model": model})
        restored = js.checkpoint.restore(tmp_path / str(number), like={"model": like})["model"]
        assert {device for x in jax.tree.leaves(nnx.state(served)) for device in x.devices()} == set(devices[4:])
        text, expected = (continued(each, served_on) for each in (served, restored))
        np.testing.assert_array_equal(text, expected)
        texts.append(text.tolist())
    assert texts[0] != texts[1]  # the weights have changed between the moves


def continued(model, mesh):
    sampler = Sampler(model, mesh, window=32, num_ids=256, draw=Draw(temperature=0.8, seed=1))
    return sampler.continued(PROMPT, 12)
