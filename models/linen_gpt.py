"""A small GPT in Flax Linen, as a model file: the same names as for nnx, and `annotate` returns the annotated copy.

    jshard train linen_gpt
    jshard train linen_gpt --mesh replica=2,fsdp=4 --set model.dropout=0.1
    jshard plan linen_gpt --topology h100:2x8

The model is plain Linen and independent of devices; only `annotate` decides what is sharded. docs/linen.md has a
training loop over a `TrainState`.

Dims of arrays, as suffixes of their names:

    B batch   T tokens of a sequence   D width   F width of the feed-forward part   V vocabulary   H heads, 1 for all
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import jshard as js
from jshard.train import Recipe


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128
    dropout: float = 0.0


class Block(nn.Module):
    """Attention, then two layers at each position, both added to their input."""

    config: Config

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        width = self.config.d_model
        mask_BHTT = nn.make_causal_mask(x_BTD[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.config.n_head, use_bias=False, name="attention")
        x_BTD += attention(nn.LayerNorm(name="attention_norm")(x_BTD), mask=mask_BHTT)
        h_BTF = nn.Dense(4 * width, name="up")(nn.LayerNorm(name="mlp_norm")(x_BTD))
        h_BTD = nn.Dense(width, name="down")(nn.gelu(h_BTF))
        return x_BTD + nn.Dropout(self.config.dropout, deterministic=False)(h_BTD)  # still off in evaluation


class GPT(nn.Module):
    """Maps tokens to the logits of the next token at each position."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        config = self.config
        if tokens_BT.shape[1] > config.block_size:
            raise ValueError(f"{tokens_BT.shape[1]} tokens are more than block_size={config.block_size}")
        table = nn.Embed(config.vocab_size, config.d_model, name="tokens")
        positions = nn.Embed(config.block_size, config.d_model, name="positions")
        x_BTD = table(tokens_BT) + positions(jnp.arange(tokens_BT.shape[1]))[None]
        for layer in range(config.n_layer):
            x_BTD = Block(config, name=f"block_{layer}")(x_BTD)
        return table.attend(nn.LayerNorm(name="norm")(x_BTD))


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: Config, rngs: nnx.Rngs) -> GPT:
    """The module; a run initialises it through its loss, with `init`."""
    return GPT(config)


def annotate(model: GPT, mesh: Mesh | AbstractMesh) -> GPT:
    """The model, with each block as a unit."""
    return js.fully_shard(model, mesh=mesh, units=Block)


def tiny() -> Recipe:
    """0.8M parameters over bytes: trains on two CPU cores in minutes."""
    return Recipe(
        model=Config(),
        sequence_length=128,
        batch_size=32,
        num_steps=500,
        learning_rate=4e-3,
        warmup_steps=50,
        eval_every=100,
        eval_sequences=1024,
    )


RECIPES = {"tiny": tiny}
