"""Linen models that mix the examples of a batch or keep a state of them: the table `LINEN`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.engine.mixing_models import (
    CODES,
    IDS,
    MASK,
    SEQUENCES,
    TARGETS,
    VECTORS,
    VOCAB,
    WIDTH,
    entropy,
)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenCase:
    """A model, its loss of what the call gives and of the whole batch, and how it is called."""

    model: nn.Module
    loss: Callable[..., jax.Array]
    batch: tuple[Any, ...]
    units: Any = None
    inputs: int = 1  # how many arrays of the batch the model is given


class Codebook(nn.Module):
    """A codebook by moving averages of counts and sums."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH, name="linear")(x)
        codes = self.variable("batch_stats", "codes", lambda: jax.random.normal(jax.random.key(7), (CODES, WIDTH)))
        count = self.variable("batch_stats", "count", lambda: jnp.ones(CODES))
        nearest = jnp.argmin(((h[:, None] - codes.value[None]) ** 2).sum(-1), axis=1)
        out, hot = h + jax.lax.stop_gradient(codes.value[nearest] - h), jax.nn.one_hot(nearest, CODES)
        if not self.is_initializing():
            count.value = 0.9 * count.value + 0.1 * hot.sum(0)
            codes.value = 0.9 * codes.value + 0.1 * jax.lax.stop_gradient(hot.T @ h) / count.value[:, None]
        return out


class Drops(nn.Module):
    """Dropout, mixup and noise from the streams of the call."""

    @nn.compact
    def __call__(self, x):
        share = jax.random.beta(self.make_rng("mixup"), 0.5, 0.5, (len(x), 1))
        x = share * x + (1 - share) * x[jax.random.permutation(self.make_rng("mixup"), len(x))]
        h = nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(x))
        return h + 0.1 * jax.random.normal(self.make_rng("noise"), h.shape)


class Experts(nn.Module):
    """Each expert takes the tokens that it likes best."""

    @nn.compact
    def __call__(self, x):
        tokens = x.reshape(-1, WIDTH)
        gates, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(4)(tokens)).T, len(tokens) // 4)
        up = self.param("up", nn.initializers.lecun_normal(), (4, WIDTH, WIDTH))
        done = jnp.einsum("ecd,edf->ecf", tokens[chosen], up) * gates[..., None]
        return jnp.zeros_like(tokens).at[chosen.reshape(-1)].add(done.reshape(-1, WIDTH)).reshape(x.shape)


class Block(nn.Module):
    """A norm of the batch, dropout, and a mask that the root has made."""

    norm: bool = True

    @nn.compact
    def __call__(self, x, mask):
        h = nn.BatchNorm(use_running_average=False)(x) if self.norm else nn.LayerNorm()(x)
        scores = jnp.einsum("btd,bsd->bts", nn.Dense(WIDTH, use_bias=False)(h), h) / 6 + jnp.where(mask, 0.0, -1e9)
        h = nn.Dense(4 * WIDTH)(jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), h))
        return x + nn.Dense(WIDTH)(nn.Dropout(0.3, deterministic=False)(nn.gelu(h)))


class GPT(nn.Module):
    scanned: bool = False
    norm: bool = True

    @nn.compact
    def __call__(self, ids):
        n, t = ids.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (n, t, t))
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(ids)
        if self.scanned:
            body = nn.scan(
                lambda block, x, mask: (block(x, mask), None),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=2,
            )
            return embed.attend(body(Block(self.norm, name="blocks"), x, mask)[0])
        for i in range(2):
            x = Block(self.norm, name=f"block_{i}")(x, mask)
        return embed.attend(x)


class Alone(nn.Module):
    """A block for one example, normed over all of them by the name of the vmap around."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH, use_bias=False)(x)
        h = nn.BatchNorm(use_running_average=False, axis_name="rows")(h)
        h = x + nn.Dropout(0.3, deterministic=False)(h)
        return h - 0.1 * jax.lax.pmax(jax.lax.stop_gradient(h), "rows")


class OfOne(nn.Module):
    """A model for one example, with a parameter and blocks of its own making."""

    def setup(self):
        self.blocks = [Alone() for _ in range(2)]
        self.scale = self.param("scale", nn.initializers.ones, (WIDTH,))

    def __call__(self, x):
        for block in self.blocks:
            x = nn.gelu(block(x))
        return (x * self.scale).mean(0)


OfAll = nn.vmap(
    OfOne,
    variable_axes={"params": None, "batch_stats": None},
    split_rngs={"params": False, "dropout": True},
    axis_name="rows",
)

squared = lambda out, *batch: (out**2).mean()
masked = lambda out, ids, targets, mask: (entropy(out, targets) * mask).sum() / mask.sum()

LINEN = {
    "an EMA codebook": LinenCase(Codebook(), squared, (VECTORS,)),
    "dropout, noise, mixup": LinenCase(Drops(), squared, (VECTORS,)),
    "experts choose": LinenCase(Experts(), squared, (SEQUENCES,)),
    "norms and dropout in blocks": LinenCase(GPT(), masked, (IDS, TARGETS, MASK), units=Block),
    "scanned blocks": LinenCase(GPT(scanned=True, norm=False), masked, (IDS, TARGETS, MASK), units=Block),
    "a vmapped model, normed over its rows": LinenCase(OfAll(), squared, (SEQUENCES,)),
}
