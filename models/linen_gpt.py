"""A small GPT in Flax Linen, sharded without a change to it, and trained by a loop of one's own.

    python models/linen_gpt.py                  text from Python's standard library, all devices
    JAX_NUM_CPU_DEVICES=4 python models/linen_gpt.py --steps 50 --replica 2     HSDP, on simulated devices

`jshard train` takes nnx models. A Linen model brings its own loop: the `TrainState` and the step below are plain Flax,
and jshard is in three lines, `fully_shard`, `shard_init` and `to_devices`.

Dims of arrays, as suffixes of their names:

    B batch   T tokens of a sequence   D width   F width of the feed-forward part   V vocabulary   H heads, 1 for all
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import jshard as js
from jshard.train import Loader, load_text, local_rows, to_devices


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128


class Block(nn.Module):
    """Attention, then two layers at each position; both added to what came in."""

    config: Config

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        width = self.config.d_model
        mask_BHTT = nn.make_causal_mask(x_BTD[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.config.n_head, use_bias=False, name="attention")
        x_BTD += attention(nn.LayerNorm(name="attention_norm")(x_BTD), mask=mask_BHTT)
        h_BTF = nn.Dense(4 * width, name="up")(nn.LayerNorm(name="mlp_norm")(x_BTD))
        return x_BTD + nn.Dense(width, name="down")(nn.gelu(h_BTF))


class GPT(nn.Module):
    """Tokens in, for each position the scores of the token that comes next out."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        config = self.config
        table = nn.Embed(config.vocab_size, config.d_model, name="tokens")
        positions = nn.Embed(config.block_size, config.d_model, name="positions")
        x_BTD = table(tokens_BT) + positions(jnp.arange(tokens_BT.shape[1]))[None]
        for layer in range(config.n_layer):
            x_BTD = Block(config, name=f"block_{layer}")(x_BTD)
        return table.attend(nn.LayerNorm(name="norm")(x_BTD))


def annotated(config: Config, mesh: Mesh) -> Any:
    """The model, each block a unit."""
    return js.fully_shard(GPT(config), mesh=mesh, units=Block)


def creator(model: Any, tx: optax.GradientTransformation, *, seed: int = 0) -> Callable[[], TrainState]:
    """Makes the state when called: for `js.shard_init`, or as it is on one device."""
    tokens_BT = jnp.zeros((1, model.config.block_size), jnp.int32)

    def create() -> TrainState:
        params = model.init(jax.random.key(seed), tokens_BT)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create


@jax.jit
def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    """One update; the mean loss over the whole batch."""

    def loss_fn(params: Any) -> jax.Array:
        logits_BTV = state.apply_fn({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(config: Config, mesh: Mesh, *, steps: int, batch_size: int = 16) -> list[float]:
    """Trains on the standard library's sources; the losses of all steps."""
    data = load_text(sequence_length=config.block_size)
    loader = Loader(data=data, batch_size=batch_size, seed=0, rows=local_rows(batch_size, mesh))
    model = annotated(config, mesh)
    state = js.shard_init(creator(model, optax.adamw(1e-3)), model)
    print(js.explain(model))
    losses = []
    for number, batch in enumerate(to_devices(loader.train(steps), mesh), 1):
        state, loss = step(state, batch)
        losses.append(float(loss))
        if number % 10 == 0 or number == steps:
            print(f"step {number}/{steps}  loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--replica", type=int, default=1, help="copies of the model; each is sharded over the rest")
    arguments = parser.parse_args()
    mesh: Any = js.mesh(replica=arguments.replica)
    train(Config(), mesh, steps=arguments.steps)


if __name__ == "__main__":
    main()
