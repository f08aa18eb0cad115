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
LABELS = rng.integers(0, 8, BATCH, dtype=np.int32)
SEQUENCES = rng.standard_normal((BATCH, TIME, WIDTH)).astype(np.float32)
IDS = rng.integers(0, VOCAB, (BATCH, TIME), dtype=np.int32)
TARGETS = np.roll(IDS, 1, 1)
MASK = (rng.random((BATCH, TIME)) < 0.6).astype(np.float32)
LENGTHS = rng.integers(1, TIME + 1, BATCH, dtype=np.int32)
IMAGES = rng.standard_normal((BATCH, 4, 4, 3)).astype(np.float32)
SENDERS, RECEIVERS = rng.integers(0, BATCH, (2, 48), dtype=np.int32)

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


class OwnCache(nnx.Module):
    """A cache of plain variables, of which each example has its own end."""

    def __init__(self, rngs):
        self.embed, self.mix = nnx.Embed(64, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.kept = nnx.Variable(jnp.zeros((len(IDS), 8, WIDTH)))
        self.end = nnx.Variable(jnp.arange(len(IDS), dtype=np.int32) % 3)

    def __call__(self, token):
        h, rows = self.mix(self.embed(token[:, 0])), jnp.arange(len(token))
        self.kept[...] = self.kept[...].at[rows, self.end[...]].set(h)
        self.end[...] += 1
        seen = jnp.arange(8)[None] < self.end[...][:, None]
        return self.embed.attend(jnp.where(seen[..., None], self.kept[...], 0).sum(1))


def next_token(model, ids, targets):
    return entropy(model(ids), targets).mean(), None


# ---- State of the batch -------------------------------------------------------------------------


class Layer(nnx.Module):
    """A linear layer; without a bias where its gradient would be nothing but noise."""

    bias = True

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=self.bias, rngs=rngs)

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


class Teacher(nnx.Module):
    """Keeps a moving average of its own parameters, which gives the targets."""

    def __init__(self, rngs):
        self.student, self.teacher = Layer(rngs), Layer(rngs)
        kernel, bias = self.teacher.linear.kernel[...], self.teacher.linear.bias[...]
        self.kernel, self.bias = nnx.Variable(kernel), nnx.Variable(bias)
        del self.teacher

    def __call__(self, x):
        target = x @ self.kernel[...] + self.bias[...]
        self.kernel[...] = 0.9 * self.kernel[...] + 0.1 * self.student.linear.kernel[...]
        self.bias[...] = 0.9 * self.bias[...] + 0.1 * self.student.linear.bias[...]
        return ((self.student(x) - jax.lax.stop_gradient(target - target.mean(0))) ** 2).mean(1)


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

    def judged(self, x):
        return self.out(self.norm(x, use_running_average=True))


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


class Sows(Layer):
    """Keeps a value in a variable that is not there before the call, and one for each example."""

    def __call__(self, x):
        h = self.linear(x)
        self.sow(nnx.Intermediate, "mean", h.mean())
        self.sow(nnx.Intermediate, "hidden", h)
        return h


# ---- Losses of the whole batch ------------------------------------------------------------------


class Towers(nnx.Module):
    """Two encoders, all pairs, a temperature that is learnt; labels by place."""

    def __init__(self, rngs):
        self.left, self.right, self.scale = Layer(rngs), Layer(rngs), nnx.Param(jnp.asarray(1.5))

    def __call__(self, x, y):
        a, b = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in (self.left(x), self.right(y)))
        logits, labels = jnp.exp(self.scale[...]) * a @ b.T, jnp.arange(x.shape[0])
        return (entropy(logits, labels).mean() + entropy(logits.T, labels).mean()) / 2


class Swaps(Layer):
    """Assigns examples to prototypes in equal shares: rows and columns are normalised in turn, as in SwAV."""

    def __call__(self, x, y):
        a, b = self.linear(x)[:, :CODES], self.linear(y)[:, :CODES]
        q = jnp.exp(jax.lax.stop_gradient(a) / 2)
        q = jax.lax.fori_loop(0, 3, lambda _, q: (lambda p: p / p.sum(1, keepdims=True))(q / q.sum(0) / CODES), q)
        return -(q * jax.nn.log_softmax(b)).sum(1).mean()


class Masked(Layer):
    """A loss of the tokens that count, in the model, with figures beside it."""

    def __call__(self, x, mask):
        losses = (self.linear(x) ** 2).mean(-1)
        loss = (losses * mask).sum() / mask.sum()
        return loss, {"tokens": mask.sum().astype(jnp.int32), "worst": losses.max(), "examples": x.shape[0] * loss}


class Weighted(Layer):
    """A weight for each example, and one for each class by how often it is in the batch."""

    def __call__(self, x, labels, weights):
        losses = entropy(self.linear(x)[:, :8], labels)
        frequency = jnp.bincount(labels, length=8) / labels.shape[0]
        return (losses * weights / (frequency[labels] + 0.1)).sum() / weights.sum()


class Triplets(Layer):
    """The hardest positive and negative of the batch for each example."""

    bias = False

    def __call__(self, x, labels):
        h = self.linear(x)
        apart = jnp.sqrt(((h[:, None] - h[None]) ** 2).sum(-1) + 1e-3)
        same = labels[:, None] == labels[None]
        furthest, closest = jnp.where(same, apart, 0).max(1), jnp.where(same, jnp.inf, apart).min(1)
        return jnp.maximum(furthest - closest + 1, 0).mean()


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


class Graph(Layer):
    """One large graph: sums over its edges, divided by how many each node has."""

    def __call__(self, nodes, senders, receivers):
        h = self.linear(nodes)
        degree = 1 + jax.ops.segment_sum(jnp.ones(len(receivers)), receivers, len(nodes))
        return (h + jax.ops.segment_sum(h[senders], receivers, len(nodes))) / degree[:, None]


class Graphs(Layer):
    """A batch of small graphs, packed: nodes are pooled by the graph they belong to."""

    def __call__(self, nodes, senders, receivers, sizes):
        graph = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(nodes))
        h = jnp.tanh(self.linear(nodes))
        h = h + jax.ops.segment_sum(h[senders], receivers, len(nodes))
        return jax.ops.segment_sum(h, graph, len(sizes)) / sizes[:, None]


# ---- Sequences ----------------------------------------------------------------------------------


class Recurrent(nnx.Module):
    """Loops over time from zeros, there and back."""

    def __init__(self, rngs):
        self.there = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))
        self.back = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs), reverse=True, keep_order=True)

    def __call__(self, x, lengths):
        return self.there(x, seq_lengths=lengths) + self.back(x, seq_lengths=lengths)


class Lengths(Layer):
    """Pools each sequence over the tokens that it has; batches are padded."""

    bias = False

    def __call__(self, x, lengths):
        mask = jnp.arange(x.shape[1])[None] < lengths[:, None]
        pooled = jnp.where(mask[..., None], self.linear(x), 0).sum(1) / lengths[:, None]
        return pooled - pooled.mean(0)


class TimeFirst(Layer):
    """The batch is the second dim of what comes in."""

    def __call__(self, x):
        return jnp.tanh(self.linear(x)).mean(0) - x[-1].mean(0)


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
            x = {"remat": nnx.remat, "jitted": nnx.jit}.get(self.how, lambda f: f)(Block.__call__)(
                block, x, mask, positions
            )
        if self.how == "read":
            x = x + self.blocks[0].query.kernel[...].mean(0)
        return self.embed.attend(x)


class Uneven(nnx.Module):
    """No dim of any parameter divides by the devices."""

    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(VOCAB + 3, 63, rngs=rngs), nnx.BatchNorm(63, rngs=rngs)
        self.mid, self.out = nnx.Linear(63, 61, rngs=rngs), nnx.Linear(61, VOCAB + 5, rngs=rngs)

    def __call__(self, ids):
        return self.out(nnx.relu(self.mid(self.norm(self.embed(ids)))))


def masked_tokens(model, ids, targets, mask):
    return (entropy(model(ids), targets) * mask).sum() / mask.sum(), None


def with_penalty(model, ids, targets):
    penalty = sum((p**2).sum() for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return next_token(model, ids, targets)[0] + 1e-3 * penalty, None


def in_microbatches(model, ids, targets):
    halves = [x.reshape(2, BATCH // 2, TIME) for x in (ids, targets)]
    return jax.lax.scan(lambda c, part: (c + next_token(model, *part)[0] / 2, None), 0.0, halves)[0], None


def over_two_batches(model, ids, targets):
    halves = [x.reshape(2, BATCH // 2, TIME) for x in (ids, targets)]
    return nnx.vmap(lambda m, *part: next_token(m, *part)[0], in_axes=(None, 0, 0))(model, *halves).mean(), None


def called_twice(model, ids, targets):
    return next_token(model, ids, targets)[0] + 0.1 * model(ids[::-1]).mean(), None


def gpt(
    how: str = "unrolled", loss: Callable = next_token, units: tuple[type, ...] = (Block,), **settings: Any
) -> Case:
    extra = (MASK,) if loss is masked_tokens else ()
    return Case(lambda rngs: GPT(rngs, how, **settings), loss, (IDS, TARGETS, *extra), units)


MODELS = {
    "an EMA codebook": Case(Codebook, squared, (VECTORS,)),
    "a running normaliser": Case(Normaliser, squared, (VECTORS,)),
    "a queue of negatives": Case(Queue, lambda m, *b: (m(*b).mean(), None), (VECTORS, OTHERS)),
    "a teacher": Case(Teacher, lambda m, *b: (m(*b).mean(), None), (VECTORS,), (Layer,)),
    "batch norms": Case(Normed, squared, (IMAGES,), (nnx.Conv, nnx.BatchNorm)),
    "batch norm of what counts": Case(
        Normed, lambda m, *b: ((m.masked(*b) ** 2).mean(), None), (SEQUENCES, MASK), (nnx.Linear,)
    ),
    "batch norm in evaluation": Case(Normed, lambda m, *b: ((m.judged(*b) ** 2).mean(), None), (VECTORS,)),
    "sown values": Case(Sows, squared, (VECTORS,)),
    "dropout, noise, mixup": Case(Drops, squared, (VECTORS,)),
    "two towers": Case(Towers, given, (VECTORS, OTHERS), (Layer,)),
    "equal shares": Case(Swaps, given, (VECTORS, OTHERS)),
    "a masked mean in the model": Case(Masked, lambda m, *b: m(*b), (SEQUENCES, MASK)),
    "weights of examples": Case(Weighted, given, (VECTORS, LABELS, MASK[:, 0] + 0.5)),
    "the hardest of the batch": Case(Triplets, given, (VECTORS, LABELS)),
    "experts with room": Case(Experts, given, (SEQUENCES,)),
    "one large graph": Case(Graph, squared, (VECTORS, SENDERS, RECEIVERS)),
    "as many edges as nodes": Case(Graph, squared, (VECTORS, SENDERS[:BATCH], RECEIVERS[:BATCH])),
    "a batch of graphs": Case(Graphs, squared, (VECTORS, SENDERS, RECEIVERS, np.array([5, 1, 7, 3], np.int32))),
    "loops over time": Case(Recurrent, squared, (SEQUENCES, LENGTHS), (nnx.RNN,)),
    "padded sequences": Case(Lengths, squared, (SEQUENCES, LENGTHS)),
    "time first": Case(TimeFirst, squared, (SEQUENCES.swapaxes(0, 1),)),
    "a masked loss outside": gpt(loss=masked_tokens),
    "recomputed blocks": gpt("remat", rate=0.3),
    "jitted blocks": gpt("jitted"),
    "scanned blocks": gpt("scanned", rate=0.3),
    "dropout in blocks": gpt(rate=0.3),
    "a block called three times": gpt("shared"),
    "a parameter of a block, read by the root": gpt("read"),
    "units in units": gpt(units=(Block, nnx.Linear)),
    "no units": gpt(loss=masked_tokens, units=()),
    "a penalty on all parameters": gpt(loss=with_penalty),
    "microbatches in the loss": gpt(loss=in_microbatches),
    "vmapped over two batches": gpt(loss=over_two_batches),
    "called twice": gpt(loss=called_twice),
    "nothing divides": Case(Uneven, next_token, (IDS, TARGETS), (nnx.Linear,)),
}
