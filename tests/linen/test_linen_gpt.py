"""models/linen_gpt.py: a Linen model in a model file trains sharded as on one device, and on real text."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jshard as js
from jshard import cli
from jshard.recipes.state import create
from jshard.train import TrainStep
from jshard.train.jsonl import read_metrics
from tests.models.model_files import MODELS, model_file, module, tiny
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE
from tests.wide import wide

FILE = model_file("linen_gpt")
SMALL = {"block_size": 16, "n_layer": 2, "d_model": 64}
RECIPE = dataclasses.replace(
    tiny("linen_gpt"), model=module("linen_gpt").Config(**SMALL), sequence_length=16, batch_size=16
)
STEPS = 5


def batches():
    tokens = np.random.default_rng(0).integers(0, RECIPE.model.vocab_size, (STEPS, 16, 17), np.int32)
    return [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in tokens]


@functools.cache
def alone():
    """Losses and parameters of plain Linen on one device."""
    model = FILE.build(RECIPE.model, None)
    params = jax.jit(model.init)(jax.random.key(RECIPE.seed), batches()[0]["inputs"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=RECIPE.optimizer())

    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for batch in batches():
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize("replica", [1, wide(2)])
def test_it_trains_as_on_one_device(replica):
    mesh = js.mesh(replica=replica)
    model, optimizer = create(FILE, RECIPE, mesh)
    kernel = model.block_0.up.kernel.get_raw_value()
    assert kernel.addressable_shards[0].data.size * (8 // replica) == kernel.size
    step = TrainStep(FILE.loss_fn, model, optimizer, js.shard_batch(batches()[0], mesh))
    losses = [float(step(js.shard_batch(batch, mesh))["loss"]) for batch in batches()]
    wanted_losses, wanted = alone()
    np.testing.assert_allclose(losses, wanted_losses, rtol=GRADIENT_TOLERANCE)
    square = lambda tree: sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(tree))
    params = jax.tree.map(np.asarray, step.model.variables["params"])
    apart = square(jax.tree.map(np.subtract, params, wanted)) / square(wanted)
    assert apart**0.5 <= PARAMETER_TOLERANCE


@pytest.mark.wide
def test_it_learns_real_text_and_writes_some(tmp_path, capsys):
    settings = [f"--set=model.{key}={value}" for key, value in SMALL.items()]
    settings += ["--set=sequence_length=16", "--set=batch_size=16", "--set=warmup_steps=2", "--set=eval_sequences=64"]
    command = ["train", str(MODELS / "linen_gpt.py"), "--out", str(tmp_path / "run"), "--steps", "20", *settings]
    assert cli.main([*command, "--track", "--sample-tokens", "8", "--set=model.dropout=0.1"]) == 0
    said = capsys.readouterr().out
    assert "block_0..1" in said
    assert "a sample; its first words are of held-out text" in said
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
