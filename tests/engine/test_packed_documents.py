"""Documents packed into one sequence and kept apart: sharded, the numbers are those of one device."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from tests.parity import flat, worst

SEGMENTS_BT = np.repeat([[1, 1, 2, 2], [1, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 2]] * 2, 4, axis=1)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 32, (8, 16)), "tokens_segment_ids": SEGMENTS_BT}


class AttendsWithinDocuments(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.qkv = nnx.Embed(32, 32, rngs=rngs), nnx.Linear(32, 96, rngs=rngs)

    def __call__(self, tokens_BT, segments_BT):
        q, k, v = jnp.split(self.qkv(self.embed(tokens_BT)).reshape(*tokens_BT.shape, 4, 24), 3, axis=-1)
        bias = jnp.where(segments_BT[:, None, :, None] == segments_BT[:, None, None, :], 0.0, -1e9)
        y = js.kernels.attention(q, k, v, bias=bias, is_causal=True)
        return self.embed.attend(y.reshape(*tokens_BT.shape, 32))


def loss_fn(model, batch):
    segments_BT = batch["tokens_segment_ids"]
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"], segments_BT)[:, :-1], batch["tokens"][:, 1:]
    )
    return losses_BT.mean(where=segments_BT[:, 1:] == segments_BT[:, :-1])


def outcome(model, batch):
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, batch)
    return flat(nnx.state(grads)) | {"loss": np.asarray(loss)}


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "context": 2}], ids=str)
def test_loss_and_gradients_count_each_target_once_on_every_mesh(sizes):
    """Shards have different numbers of targets that count."""
    mesh = js.mesh(**sizes)
    model = js.shard_init(lambda: AttendsWithinDocuments(nnx.Rngs(0)), lambda model: js.fully_shard(model, mesh=mesh))
    found, wanted = outcome(model, js.shard_batch(BATCH, mesh)), outcome(AttendsWithinDocuments(nnx.Rngs(0)), BATCH)
    assert {k: worst(found[k], wanted[k]) for k in wanted if worst(found[k], wanted[k]) > 1e-6} == {}
