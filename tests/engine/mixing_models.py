"""nnx models that mix the examples of a batch or keep a state of them, as users write them: the table `MODELS`."""

import dataclasses
from collections.abc import Callable
from typing import Any

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
LENGTHS = rng.integers(1, TIME + 1, BATCH, dtype=np.int32)
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


class Normaliser(Layer):
    """Normalises by the sums and the count of all that it has seen, this batch with it."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.n, self.seen = nnx.BatchStat(jnp.ones(())), nnx.Variable(jnp.zeros((), jnp.int32))
        self.total, self.squares = nnx.BatchStat(jnp.zeros(WIDTH)), nnx.BatchStat(jnp.ones(WIDTH))

    def __call__(self, x):
        self.n[...] += x.shape[0]
        self.seen[...] += len(x)
        self.total[...] += x.sum(0)
        self.squares[...] += (x**2).sum(0)
        mean = self.total[...] / self.n[...]
        return self.linear((x - mean) / jnp.sqrt(self.squares[...] / self.n[...] - mean**2 + 1e-3))


class Queue(Layer):
    """Negatives from the batches before, kept in a ring, as in MoCo."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.ring = nnx.Variable(jax.random.normal(rngs.params(), (2 * BATCH, WIDTH)))
        self.at = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, other):
        query, key = self.linear(x), jax.lax.stop_gradient(self.linear(other))
        logits = jnp.concatenate([(query * key).sum(1, keepdims=True), query @ self.ring[...].T], 1) / WIDTH
        self.ring[...] = jax.lax.dynamic_update_slice(self.ring[...], key, (self.at[...], 0))
        self.at[...] = (self.at[...] + len(x)) % len(self.ring[...])
        return -jax.nn.log_softmax(logits)[:, 0]


class Normed(nnx.Module):
    """Convolution, BatchNorm and pooling; or BatchNorm of vectors of which some count."""

    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, WIDTH, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.out(h.mean((1, 2)))

    def masked(self, x, mask):
        return self.out(self.norm(x, mask=mask[..., None] > 0))


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


class Experts(nnx.Module):
    """Each token goes to its best expert while that has room; the loss of balance looks at the whole batch."""

    def __init__(self, rngs):
        self.gate = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, WIDTH, WIDTH)) / 6)

    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        gates = jax.nn.softmax(self.gate(tokens))
        hot = jax.nn.one_hot(jnp.argmax(gates, 1), 4)
        place = (jnp.cumsum(hot, 0) * hot).sum(1) - 1
        room = len(tokens) // 4
        slots = hot[..., None] * jax.nn.one_hot(place.astype(int), room)[:, None] * (place < room)[:, None, None]
        done = jnp.einsum("ecd,edf->ecf", jnp.einsum("tec,td->ecd", slots, tokens), self.up[...])
        out = jnp.einsum("tec,ecf->tf", slots * gates[..., None], jnp.tanh(done))
        return (out**2).mean() + 0.1 * 4 * (hot.mean(0) * gates.mean(0)).sum()


# ---- Sequences ----------------------------------------------------------------------------------


class Recurrent(nnx.Module):
    """Loops over time from zeros, there and back."""

    def __init__(self, rngs):
        self.there = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))
        self.back = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), reverse=True, keep_order=True)

    def __call__(self, x, lengths):
        return self.there(x, seq_lengths=lengths) + self.back(x, seq_lengths=lengths)


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


def with_penalty(model, ids, targets):
    penalty = sum((p**2).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return next_token(model, ids, targets)[0] + 1e-3 * penalty, None


def in_microbatches(model, ids, targets):
    halves = [x.reshape(2, BATCH // 2, TIME) for x in (ids, targets)]
    return jax.lax.scan(lambda c, part: (c + next_token(model, *part)[0] / 2, None), 0.0, halves)[0], None


def over_two_batches(model, ids, targets):
    halves = [x.reshape(2, BATCH // 2, TIME) for x in (ids, targets)]
    return nnx.vmap(lambda m, *part: next_token(m, *part)[0], in_axes=(None, 0, 0))(model, *halves).mean(), None


def gpt(
    how: str = "unrolled", loss: Callable = next_token, units: tuple[type, ...] = (Block,), **settings: Any
) -> Case:
    return Case(lambda rngs: GPT(rngs, how, **settings), loss, (IDS, TARGETS), units)


MODELS = {
    "an EMA codebook": Case(Codebook, squared, (VECTORS,)),
    "a running normaliser": Case(Normaliser, squared, (VECTORS,)),
    "a queue of negatives": Case(Queue, lambda m, *b: (m(*b).mean(), None), (VECTORS, OTHERS)),
    "batch norms": Case(Normed, squared, (IMAGES,), (nnx.Conv, nnx.BatchNorm)),
    "batch norm of what counts": Case(
        Normed, lambda m, *b: ((m.masked(*b) ** 2).mean(), None), (SEQUENCES, MASK), (nnx.Linear,)
    ),
    "dropout, noise, mixup": Case(Drops, squared, (VECTORS,)),
    "two towers": Case(Towers, given, (VECTORS, OTHERS), (Layer,)),
    "a masked mean in the model": Case(Masked, lambda m, *b: m(*b), (SEQUENCES, MASK)),
    "experts with room": Case(Experts, given, (SEQUENCES,)),
    "loops over time": Case(Recurrent, squared, (SEQUENCES, LENGTHS), (nnx.RNN,)),
    "recomputed blocks": gpt("remat", rate=0.3),
    "scanned blocks": gpt("scanned", rate=0.3),
    "a block called three times": gpt("shared"),
    "a parameter of a block, read by the root": gpt("read"),
    "units in units": gpt(units=(Block, nnx.Linear)),
    "a penalty on all parameters": gpt(loss=with_penalty),
    "microbatches in the loss": gpt(loss=in_microbatches),
    "vmapped over two batches": gpt(loss=over_two_batches),
}
