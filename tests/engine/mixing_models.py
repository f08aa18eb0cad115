"""Models that mix the examples of a batch or keep a state of them, as users write them: `MODELS` and `LINEN`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BATCH, WIDTH, CODES, TIME, VOCAB = 16, 32, 8, 6, 64


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what is trained of it, and on what; `units` are the classes of its blocks."""

    build: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[..., Any]
    batch: tuple[Any, ...]
    units: tuple[type, ...] = ()


rng = np.random.default_rng(0)
VECTORS = rng.standard_normal((BATCH, WIDTH)).astype(np.float32)
OTHERS = rng.standard_normal((BATCH, WIDTH)).astype(np.float32)
SEQUENCES = rng.standard_normal((BATCH, TIME, WIDTH)).astype(np.float32)
IDS = rng.integers(0, VOCAB, (BATCH, TIME), dtype=np.int32)
TARGETS = np.roll(IDS, 1, 1)
MASK = (rng.random((BATCH, TIME)) < 0.6).astype(np.float32)
IMAGES = rng.standard_normal((BATCH, 4, 4, 3)).astype(np.float32)

squared = lambda model, *batch: ((model(*batch) ** 2).mean(), None)
given = lambda model, *batch: (model(*batch), None)


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Decodes(nnx.Module):
    """Attention that keeps keys and values of the tokens before."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=rngs)
        self.attention.init_cache((len(IDS), 8, WIDTH))

    def __call__(self, token):
        return self.embed.attend(self.attention(self.embed(token)))


def next_token(model, ids, targets):
    return entropy(model(ids), targets).mean(), None


# ---- State of the batch -------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Codebook(Layer):
    """A codebook by moving averages of counts and sums, as in VQ-VAE."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.codes = nnx.BatchStat(jax.random.normal(rngs.params(), (CODES, WIDTH)))
        self.count = nnx.BatchStat(jnp.ones(CODES))
        self.sums = nnx.BatchStat(self.codes[...])

    def __call__(self, x):
        h, codes = self.linear(x), self.codes[...]
        nearest = jnp.argmin(((h[:, None] - codes[None]) ** 2).sum(-1), axis=1)
        hot = jax.nn.one_hot(nearest, CODES)
        self.count[...] = 0.9 * self.count[...] + 0.1 * hot.sum(0)
        self.sums[...] = 0.9 * self.sums[...] + 0.1 * hot.T @ jax.lax.stop_gradient(h)
        self.codes[...] = self.sums[...] / self.count[...][:, None]
        return h + jax.lax.stop_gradient(codes[nearest] - h) + 0.25 * (h - codes[nearest])


class Normed(nnx.Module):
    """Convolution, BatchNorm and pooling; or BatchNorm of vectors of which some count."""

    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, WIDTH, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.out(h.mean((1, 2)))


class Drops(Layer):
    """Dropout, noise and mixup from the model's own streams."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.drop, self.rngs = nnx.Dropout(0.5, rngs=rngs), rngs.fork()

    def __call__(self, x):
        order = jax.random.permutation(self.rngs.mixup(), len(x))
        share = jax.random.uniform(self.rngs.mixup(), (len(x), 1))
        h = self.drop(self.linear(share * x + (1 - share) * x[order]))
        return h + 0.1 * jax.random.normal(self.rngs.noise(), h.shape)


# ---- Losses of the whole batch ------------------------------------------------------------------


class Towers(nnx.Module):
    """Two encoders, all pairs, a temperature that is learnt; labels by place."""

    def __init__(self, rngs):
        self.left, self.right, self.scale = Layer(rngs), Layer(rngs), nnx.Param(jnp.asarray(1.5))

    def __call__(self, x, y):
        a, b = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in (self.left(x), self.right(y)))
        logits, labels = jnp.exp(self.scale[...]) * a @ b.T, jnp.arange(x.shape[0])
        return (entropy(logits, labels).mean() + entropy(logits.T, labels).mean()) / 2


class Masked(Layer):
    """A loss of the tokens that count, in the model, with figures beside it."""

    def __call__(self, x, mask):
        losses = (self.linear(x) ** 2).mean(-1)
        loss = (losses * mask).sum() / mask.sum()
        return loss, {"tokens": mask.sum().astype(jnp.int32), "worst": losses.max(), "examples": x.shape[0] * loss}


# ---- Sequences ----------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm, self.up = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.query, self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, mask, positions):
        h = self.norm(x)
        scores = jnp.einsum("btd,bsd->bts", self.query(h), h) / 6 + jnp.where(mask, 0.0, -1e9)
        mixed = jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), h) * jnp.cos(positions)[..., None]
        return x + self.drop(self.down(nnx.gelu(self.up(mixed))))


class GPT(nnx.Module):
    """Mask and positions are made once, by the root; blocks as `how` has them."""

    def __init__(self, rngs, how="unrolled", rate=0.0):
        self.how, self.embed = how, nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Embed(TIME, WIDTH, rngs=rngs)
        self.blocks = (
            nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Block(rngs, rate)))(rngs)
            if how == "scanned"
            else nnx.List([Block(rngs, rate) for _ in range(2)])
        )

    def __call__(self, ids):
        n, t = ids.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (n, t, t))
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.float32), (n, t))
        x = self.embed(ids) + self.places(positions.astype(int))
        if self.how == "scanned":
            run = nnx.scan(lambda x, b, m, p: b(x, m, p), in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry)
            return self.embed.attend(run(x, self.blocks, mask, positions))
        for block in [self.blocks[0]] * 3 if self.how == "shared" else self.blocks:
            call = nnx.remat(Block.__call__) if self.how == "remat" else Block.__call__
            x = call(block, x, mask, positions)
        if self.how == "read":
            x = x + self.blocks[0].query.kernel[...].mean(0)
        return self.embed.attend(x)


def in_microbatches(model, ids, targets):
    halves = [x.reshape(2, BATCH // 2, TIME) for x in (ids, targets)]
    return jax.lax.scan(lambda c, part: (c + next_token(model, *part)[0] / 2, None), 0.0, halves)[0], None


def gpt(
    how: str = "unrolled", loss: Callable = next_token, units: tuple[type, ...] = (Block,), **settings: Any
) -> Case:
    return Case(lambda rngs: GPT(rngs, how, **settings), loss, (IDS, TARGETS), units)


def over_two_batches(model, ids, targets):
    halves = [x.reshape(2, BATCH // 2, TIME) for x in (ids, targets)]
    return nnx.vmap(lambda m, *part: next_token(m, *part)[0], in_axes=(None, 0, 0))(model, *halves).mean(), None


MODELS = {
    "an EMA codebook": Case(Codebook, squared, (VECTORS,)),
    "batch norms": Case(Normed, squared, (IMAGES,), (nnx.Conv, nnx.BatchNorm)),
    "dropout, noise, mixup": Case(Drops, squared, (VECTORS,)),
    "two towers": Case(Towers, given, (VECTORS, OTHERS), (Layer,)),
    "a masked mean in the model": Case(Masked, lambda m, *b: m(*b), (SEQUENCES, MASK)),
    "recomputed blocks": gpt("remat", rate=0.3),
    "scanned blocks": gpt("scanned", rate=0.3),
    "a block called three times": gpt("shared"),
    "a parameter of a block, read by the root": gpt("read"),
    "units in units": gpt(units=(Block, nnx.Linear)),
    "microbatches in the loss": gpt(loss=in_microbatches),
    "vmapped over two batches": gpt(loss=over_two_batches),
}


# ---- Linen ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LinenCase:
    """A model, its loss of what the call gives and of the whole batch, and how it is called."""

    model: nn.Module
    loss: Callable[..., jax.Array]
    batch: tuple[Any, ...]
    units: Any = None
    inputs: int = 1  # how many arrays of the batch the model is given


class LinenBlock(nn.Module):
    """A norm of the batch, dropout, and a mask that the root has made."""

    norm: bool = True

    @nn.compact
    def __call__(self, x, mask):
        h = nn.BatchNorm(use_running_average=False)(x) if self.norm else nn.LayerNorm()(x)
        scores = jnp.einsum("btd,bsd->bts", nn.Dense(WIDTH, use_bias=False)(h), h) / 6 + jnp.where(mask, 0.0, -1e9)
        h = nn.Dense(4 * WIDTH)(jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), h))
        return x + nn.Dense(WIDTH)(nn.Dropout(0.3, deterministic=False)(nn.gelu(h)))


class LinenGPT(nn.Module):
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
            return embed.attend(body(LinenBlock(self.norm, name="blocks"), x, mask)[0])
        for i in range(2):
            x = LinenBlock(self.norm, name=f"block_{i}")(x, mask)
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

squares = lambda out, *batch: (out**2).mean()
masked_loss = lambda out, ids, targets, mask: (entropy(out, targets) * mask).sum() / mask.sum()

LINEN = {
    "norms and dropout in blocks": LinenCase(LinenGPT(), masked_loss, (IDS, TARGETS, MASK), units=LinenBlock),
    "scanned blocks": LinenCase(
        LinenGPT(scanned=True, norm=False), masked_loss, (IDS, TARGETS, MASK), units=LinenBlock
    ),
    "a vmapped model, normed over its rows": LinenCase(OfAll(), squares, (SEQUENCES,)),
}
