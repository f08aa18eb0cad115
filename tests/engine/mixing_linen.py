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
    LABELS,
    LENGTHS,
    MASK,
    OTHERS,
    RECEIVERS,
    SENDERS,
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


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)


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


class Normaliser(nn.Module):
    """Normalises by all that it has seen, and counts it."""

    @nn.compact
    def __call__(self, x):
        n = self.variable("moments", "n", lambda: jnp.ones((), jnp.int32))
        total = self.variable("moments", "total", lambda: jnp.zeros(WIDTH))
        if not self.is_initializing():
            n.value, total.value = n.value + x.shape[0], total.value + x.sum(0)
        return nn.Dense(WIDTH)(x - total.value / n.value)


class Drops(nn.Module):
    """Dropout, mixup and noise from the streams of the call."""

    @nn.compact
    def __call__(self, x):
        share = jax.random.beta(self.make_rng("mixup"), 0.5, 0.5, (len(x), 1))
        x = share * x + (1 - share) * x[jax.random.permutation(self.make_rng("mixup"), len(x))]
        h = nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(x))
        return h + 0.1 * jax.random.normal(self.make_rng("noise"), h.shape)


class Recurrent(nn.Module):
    """Loops over time from zeros, there and back."""

    @nn.compact
    def __call__(self, x, lengths):
        there, back = nn.RNN(nn.LSTMCell(WIDTH)), nn.RNN(nn.GRUCell(WIDTH))
        return nn.Bidirectional(there, back)(x, seq_lengths=lengths)


class Towers(nn.Module):
    """Two encoders, all pairs, labels by place."""

    @nn.compact
    def __call__(self, x, y):
        a, b = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in (Layer(name="left")(x), Layer(name="right")(y)))
        logits = jnp.exp(self.param("scale", nn.initializers.ones, ())) * a @ b.T
        return (entropy(logits, jnp.arange(len(x))) + entropy(logits.T, jnp.arange(len(x)))).mean()


class Masked(nn.Module):
    """A loss of the tokens that count, in the model."""

    @nn.compact
    def __call__(self, x, mask):
        losses = (nn.Dense(WIDTH)(x) ** 2).mean(-1)
        return (losses * mask).sum() / mask.sum()


class Graph(nn.Module):
    """One large graph: sums over its edges."""

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        h = nn.Dense(WIDTH)(nodes)
        degree = 1 + jax.ops.segment_sum(jnp.ones(len(receivers)), receivers, len(nodes))
        return (h + jax.ops.segment_sum(h[senders], receivers, len(nodes))) / degree[:, None]


class Experts(nn.Module):
    """Each expert takes the tokens that it likes best."""

    @nn.compact
    def __call__(self, x):
        tokens = x.reshape(-1, WIDTH)
        gates, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(4)(tokens)).T, len(tokens) // 4)
        up = self.param("up", nn.initializers.lecun_normal(), (4, WIDTH, WIDTH))
        done = jnp.einsum("ecd,edf->ecf", tokens[chosen], up) * gates[..., None]
        return jnp.zeros_like(tokens).at[chosen.reshape(-1)].add(done.reshape(-1, WIDTH)).reshape(x.shape)


class Sows(nn.Module):
    """Keeps a mean of the batch, and a value for each example."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH)(x)
        self.sow("intermediates", "mean", h.mean(0))
        self.sow("intermediates", "hidden", h)
        return h


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
    how: str = "unrolled"
    norm: bool = True

    @nn.compact
    def __call__(self, ids):
        n, t = ids.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (n, t, t))
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(ids)
        if self.how == "scanned":
            body = nn.scan(
                lambda block, x, mask: (block(x, mask), None),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=2,
            )
            return embed.attend(body(Block(self.norm, name="blocks"), x, mask)[0])
        block = {"remat": nn.remat, "jitted": nn.jit}.get(self.how, lambda kind: kind)(Block)
        for i in range(2):
            x = block(self.norm, name=f"block_{i}")(x, mask)
        return embed.attend(x)


class Decodes(nn.Module):
    """Attention that keeps keys and values of the tokens before; given token by token."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH)(x)
        return nn.MultiHeadDotProductAttention(4, decode=True)(h, h)


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
itself = lambda out, *batch: out
next_token = lambda out, ids, targets: entropy(out, targets).mean()
masked = lambda out, ids, targets, mask: (entropy(out, targets) * mask).sum() / mask.sum()
weighted = lambda out, x, labels: (entropy(out, labels) / (1 + jnp.bincount(labels, length=WIDTH)[labels])).sum()

LINEN = {
    "an EMA codebook": LinenCase(Codebook(), squared, (VECTORS,)),
    "a running normaliser": LinenCase(Normaliser(), squared, (VECTORS,)),
    "dropout, noise, mixup": LinenCase(Drops(), squared, (VECTORS,)),
    "loops over time": LinenCase(Recurrent(), squared, (SEQUENCES, LENGTHS), inputs=2),
    "two towers": LinenCase(Towers(), itself, (VECTORS, OTHERS), units=Layer, inputs=2),
    "a masked mean in the model": LinenCase(Masked(), itself, (SEQUENCES, MASK), inputs=2),
    "weights by class": LinenCase(Layer(), weighted, (VECTORS, LABELS)),
    "one large graph": LinenCase(Graph(), squared, (VECTORS, SENDERS, RECEIVERS), inputs=3),
    "experts choose": LinenCase(Experts(), squared, (SEQUENCES,)),
    "sown values": LinenCase(Sows(), squared, (VECTORS,)),
    "norms and dropout in blocks": LinenCase(GPT(), masked, (IDS, TARGETS, MASK), units=Block),
    "recomputed blocks": LinenCase(GPT("remat"), next_token, (IDS, TARGETS), units=Block),
    "jitted blocks": LinenCase(GPT("jitted"), next_token, (IDS, TARGETS), units=Block),
    "scanned blocks": LinenCase(GPT("scanned", norm=False), next_token, (IDS, TARGETS), units=Block),
    "a vmapped model, normed over its rows": LinenCase(OfAll(), squared, (SEQUENCES,)),
    "a cache of tokens before": LinenCase(Decodes(), squared, (SEQUENCES[:, :1],)),
}
