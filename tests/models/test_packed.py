"""Packed conversations have the logits and the loss that each has by itself; only tokens with a weight are learned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.recipes.building import create, new_model
from jshard.recipes.model_file import ModelFileError, next_token_loss
from jshard.train import TrainStep
from tests.models.model_files import model_file, smaller, tiny
from tests.wide import wide

SIZES = {"vocab_size": 48, "block_size": 32, "n_layer": 2, "d_model": 32, "d_ff": 32}
MODELS = {
    "gpt": {"n_head": 2, "positions": "learned"},
    "llama": {"n_head": 4, "n_kv_head": 2, "scan": True, "sliding_window": 6},
    "gemma": {"n_head": 4, "n_kv_head": 2, "head_dim": 16, "full_every": 2, "sliding_window": 4},
    "moe": {"n_head": 4, "n_kv_head": 2, "capacity": 0.0},  # no token is dropped, whatever is beside it
}
LENGTHS = (7, 4, 5)


def packed_batch(rows=8):
    """Three texts in each sequence of 20, with padding at the end."""
    rng = np.random.default_rng(0)
    batch = {key: np.zeros((rows, 20), np.int32) for key in ("inputs", "targets", "segment_ids", "positions")}
    batch["weights"] = np.zeros((rows, 20), np.float32)
    start = 0
    for segment, length in enumerate(LENGTHS, 1):
        place = slice(start, start + length)
        batch["inputs"][:, place] = rng.integers(1, 48, (rows, length))
        batch["targets"][:, place] = rng.integers(1, 48, (rows, length))
        batch["segment_ids"][:, place] = segment
        batch["positions"][:, place] = np.arange(length)
        batch["weights"][:, place] = rng.integers(0, 2, (rows, length))
        start += length
    batch["weights"][:, 1] = 1
    return batch


def small(name, **config):
    recipe = smaller(tiny(name), sequence_length=20, **SIZES, **MODELS[name], **config)
    return dataclasses.replace(recipe, learning_rate=0.01, warmup_steps=0)


def logits_of(model, *args, **packed):
    result = nnx.jit(lambda model, args, packed: model(*args, **packed))(model, args, packed)
    return np.asarray(result[0] if isinstance(result, tuple) else result)


@pytest.mark.parametrize("name", [wide("gpt"), "llama", wide("gemma"), wide("moe")])
def test_a_packed_text_has_the_logits_of_the_text_alone(name):
    recipe, batch = small(name), packed_batch()
    model = new_model(model_file(name), recipe, js.mesh(fsdp=4, devices=jax.devices()[:4]))
    packed = logits_of(
        model,
        jnp.asarray(batch["inputs"]),
        segments=jnp.asarray(batch["segment_ids"]),
        positions=jnp.asarray(batch["positions"]),
    )
    start = 0
    for length in LENGTHS:
        alone = logits_of(model, jnp.asarray(batch["inputs"][:, start : start + length]))
        np.testing.assert_allclose(packed[:, start : start + length], alone, atol=2e-6)
        start += length


@pytest.mark.wide
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_loss_is_the_mean_over_the_weights_of_the_whole_batch(name):
    file, recipe, batch = model_file(name), small(name), packed_batch()
    # Microbatches and data shards with very different numbers of tokens to learn.
    batch["weights"][4:] = 0
    batch["weights"][4:, 3] = 1
    plain = new_model(file, recipe, js.mesh(fsdp=1, devices=jax.devices()[:1]))
    logits = logits_of(
        plain,
        jnp.asarray(batch["inputs"]),
        segments=jnp.asarray(batch["segment_ids"]),
        positions=jnp.asarray(batch["positions"]),
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    wanted = (losses * batch["weights"]).sum() / batch["weights"].sum()
    norms = []
    meshes = (js.mesh(fsdp=1, devices=jax.devices()[:1]), js.mesh(replica=2, fsdp=2, devices=jax.devices()[:4]))
    for mesh, accumulate in zip(meshes, (1, 2), strict=True):
        model, optimizer = create(file, recipe, mesh)
        placed = js.shard_batch(batch, mesh)
        scalars = TrainStep(file.loss_fn, model, optimizer, placed, accumulate=accumulate)(placed)
        np.testing.assert_allclose(scalars["loss"], wanted, rtol=2e-6)
        norms.append(scalars["grad_norm"])
    np.testing.assert_allclose(norms[0], norms[1], rtol=2e-5)


def test_the_default_loss_reads_weights_and_segments():
    calls = {}

    def model(inputs, **packed):
        calls.update(packed)
        return jax.nn.one_hot(inputs, 48)

    batch = packed_batch()
    loss = next_token_loss(model, batch)
    assert isinstance(loss, js.WeightedMean) and loss.weight == batch["weights"].sum()
    assert calls["segments"] is batch["segment_ids"] and calls["positions"] is batch["positions"]
    text = {key: batch[key] for key in ("inputs", "targets")}
    calls.clear()
    assert jnp.shape(next_token_loss(model, text)) == () and not calls


def test_a_model_without_segments_says_how_to_train_it():
    batch = packed_batch()
    with pytest.raises(ModelFileError, match="--pack no"):
        next_token_loss(lambda inputs: jax.nn.one_hot(inputs, 48), batch)
