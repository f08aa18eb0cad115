"""A small decoder for tests of pipeline stages: dropout, a mask, tied embeddings, and a loss weighted by tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard as js

WIDTH = 16
HEADS = 2
LENGTH = 8
VOCAB = 64
BATCH = 16


@dataclasses.dataclass(frozen=True)
class StagedConfig:
    """What a test varies.

    Attributes:
        layers: the number of blocks.
        dropout: the rate of dropout in each block.
        tied: whether the embedding also scores the tokens.
        masked: whether blocks get a mask, which is split along the batch.
        experts: whether each block routes its tokens, and returns sums for a loss of balance.
        unrolled: whether the blocks run in a loop of Python.
    """

    layers: int = 4
    dropout: float = 0.0
    tied: bool = False
    masked: bool = False
    experts: bool = False
    unrolled: bool = False


class StagedBlock(nnx.Module):
    """Attention and a feed-forward layer; with experts it also returns how often, and how surely, each was chosen."""

    def __init__(self, config: StagedConfig, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None
        self.router = nnx.Linear(WIDTH, 4, rngs=rngs) if config.experts else None
        if config.experts:
            self.experts = nnx.Linear(4, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> Any:
        x = x + self.out(self._attention(self.norm(x), mask))
        x = x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))
        if self.router is None:
            return x
        shares = jax.nn.softmax(self.router(x))
        chosen = jax.nn.one_hot(shares.argmax(-1), 4)
        return x + self.experts(chosen * shares), (chosen.sum((0, 1)), shares.sum((0, 1)))

    def _attention(self, h: jax.Array, mask: jax.Array | None) -> jax.Array:
        parts = self.qkv(h).reshape(*h.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = (parts[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
        if mask is not None:
            scores = jnp.where(mask[:, None, None, :], scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
        return mixed if self.dropout is None else self.dropout(mixed)


class StagedDecoder(nnx.Module):
    """Returns the scores of the next tokens, and a loss of balance."""

    def __init__(self, config: StagedConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([StagedBlock(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = None if config.tied else nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.embed(tokens)
        args = (tokens > 5,) if self.config.masked else ()
        balance = jnp.zeros(())
        if self.config.experts:
            x, (chosen, shares) = js.scan_layers(self.blocks, x, *args, collect=True)
            balance = 4 * (chosen * shares).sum(-1).mean() / tokens.size**2
        elif self.config.unrolled:
            for block in self.blocks:
                x = block(x, *args)
        else:
            x = js.scan_layers(self.blocks, x, *args)
        x = self.norm(x)
        scores = self.embed.attend(x) if self.head is None else self.head(x)
        return scores, balance


def token_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Returns the mean over the tokens that count, which are few in half of the sequences: no mean of means."""
    scores, balance = model(tokens[:, :-1])
    weights = (tokens[:, 1:] > 10).astype(jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, 1:, None], -1)[..., 0]
    return (weights * losses).sum() / weights.sum() + balance


def uneven_tokens() -> np.ndarray:
    """Returns sequences of which the first half have almost no tokens that count."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    tokens[: BATCH // 2, 3:] = 0
    return tokens
