"""A model that mixes the examples of a batch, or keeps a state of them: the numbers of one device, or an error."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js

X = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
WIDTH, CODES = 64, 8


def call(model, *args):
    return nnx.jit(lambda model, *args: model(*args))(model, *args)


def trained(model, *batch, loss_fn=lambda model, *batch: (model(*batch) ** 2).mean(), steps=3):
    """Losses and all variables after some jitted steps."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, *batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, *batch) for _ in range(steps)]
    return losses, nnx.to_pure_dict(nnx.state(model))


def linen_trained(model, variables, x, steps=3):
    """Losses and all variables after some jitted steps of a Linen model, which returns its state."""

    @jax.jit
    def step(variables, x):
        def loss_fn(params):
            out, state = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return (out**2).mean(), state

        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
        return loss, {"params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads), **state}

    losses = []
    for _ in range(steps):
        loss, variables = step(variables, x)
        losses.append(loss)
    return losses, variables


def assert_close(found, wanted):
    """Each array to 2e-5 of its largest element."""
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max() + 1e-9)
    jax.tree.map(close, found, wanted)


# ---- State that is a sum or a count over the batch ----------------------------------------------


def quantised(h, codes):
    """The nearest code of each row, and one-hot which it is."""
    nearest = jnp.argmin(((h[:, None] - codes[None]) ** 2).sum(-1), axis=1)
    return h + jax.lax.stop_gradient(codes[nearest] - h), jax.nn.one_hot(nearest, CODES)


class Codebook(nnx.Module):
    """A codebook by moving averages of counts and sums, as in VQ-VAE."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.codes = nnx.BatchStat(jax.random.normal(rngs.params(), (CODES, WIDTH)))
        self.count = nnx.BatchStat(jnp.ones(CODES))
        self.sums = nnx.BatchStat(self.codes[...])

    def __call__(self, x):
        h = self.linear(x)
        out, hot = quantised(h, self.codes[...])
        self.count[...] = 0.9 * self.count[...] + 0.1 * hot.sum(0)
        self.sums[...] = 0.9 * self.sums[...] + 0.1 * hot.T @ h
        self.codes[...] = self.sums[...] / self.count[...][:, None]
        return out


class Normaliser(nnx.Module):
    """Normalises by the sums and the count of all that it has seen."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.n = nnx.BatchStat(jnp.ones(()))
        self.total, self.squares = nnx.BatchStat(jnp.zeros(WIDTH)), nnx.BatchStat(jnp.ones(WIDTH))

    def __call__(self, x):
        mean = self.total[...] / self.n[...]
        scale = jnp.sqrt(self.squares[...] / self.n[...] - mean**2 + 1e-3)
        out = self.linear((x - mean[None]) / scale[None])
        self.n[...] += x.shape[0]
        self.total[...] += x.sum(0)
        self.squares[...] += (x**2).sum(0)
        return out


class Counter(nnx.Module):
    """Counts the examples that it has seen, which is the same number on every data shard."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.n = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.n[...] += x.shape[0]
        return self.linear(x)


class LinenCodebook(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH, name="linear")(x)
        codes = self.variable("batch_stats", "codes", lambda: jax.random.normal(jax.random.key(7), (CODES, WIDTH)))
        count = self.variable("batch_stats", "count", lambda: jnp.ones(CODES))
        out, hot = quantised(h, codes.value)
        if not self.is_initializing():
            count.value = 0.9 * count.value + 0.1 * hot.sum(0)
            codes.value = 0.9 * codes.value + 0.1 * (hot.T @ h) / count.value[:, None]
        return out


class LinenNormaliser(nn.Module):
    @nn.compact
    def __call__(self, x):
        n = self.variable("batch_stats", "n", lambda: jnp.ones(()))
        total = self.variable("batch_stats", "total", lambda: jnp.zeros(WIDTH))
        out = nn.Dense(WIDTH, name="linear")(x - (total.value / n.value)[None])
        if not self.is_initializing():
            n.value, total.value = n.value + x.shape[0], total.value + x.sum(0)
        return out


DIFFERS = r"State differs between data shards(.|\n)*{}(.|\n)*computed at test_mixing.py:\d+"
COUNTS = r"depends on how many there are(.|\n)*the number of examples at test_mixing.py:\d+"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Codebook, DIFFERS.format(r"codes \(BatchStat, float32\[8, 64\]\)")),
        (Normaliser, COUNTS),
        (Counter, COUNTS),
    ],
)
def test_state_that_is_a_sum_or_a_count_is_refused_and_right_in_global_view(kind, message):
    wanted = trained(kind(nnx.Rngs(0)), X)
    model = js.fully_shard(kind(nnx.Rngs(0)), mesh=js.mesh())
    with pytest.raises(js.CallError, match=message):
        call(model, X)
    with js.global_view():
        assert_close(trained(model, X), wanted)


@pytest.mark.parametrize(
    ("kind", "message"), [(LinenCodebook, DIFFERS.format("batch_stats:codes")), (LinenNormaliser, COUNTS)]
)
def test_state_of_linen_that_is_a_sum_or_a_count_is_refused_and_right_in_global_view(kind, message):
    plain = kind()
    variables = plain.init(jax.random.key(0), X)
    wanted = linen_trained(plain, variables, X)
    model = js.fully_shard(plain, mesh=js.mesh())
    with pytest.raises(js.CallError, match=message):
        model.apply(variables, X, mutable=["batch_stats"])
    with js.global_view():
        assert_close(linen_trained(model, variables, X), wanted)


class DeclaredWrongly(nnx.Module):
    """Calls a sum a mean, so that the region cannot see what is wrong with its state."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.total = nnx.BatchStat(jnp.zeros(WIDTH))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.total[...] += js.batch_mean(x.sum(0))
        self.calls[...] += 1
        return self.linear(x)


class LinenDeclaredWrongly(nn.Module):
    @nn.compact
    def __call__(self, x):
        total = self.variable("batch_stats", "total", lambda: jnp.zeros(WIDTH))
        total.value = total.value + js.batch_mean(x.sum(0)) * (not self.is_initializing())
        return nn.Dense(WIDTH)(x)


def test_check_compares_state_that_the_call_changed():
    model = js.fully_shard(DeclaredWrongly(nnx.Rngs(0)), mesh=js.mesh())
    with pytest.raises(
        js.CallError, match=r"do not agree.\n  where: DeclaredWrongly: __call__: state total  8.7e-01\n"
    ):
        js.check(model, X)
    model = js.fully_shard(BatchNorm(nnx.Rngs(0)), mesh=js.mesh())
    report = js.check(model, X)
    assert report.state.keys() == {"norm/mean", "norm/var"}
    assert "1 outputs, 4 gradients and 2 changed states agree" in str(report)


def test_check_compares_state_that_a_linen_call_returns():
    plain = LinenDeclaredWrongly()
    model, variables = js.fully_shard(plain, mesh=js.mesh()), plain.init(jax.random.key(0), X)
    with pytest.raises(js.CallError, match=r"state batch_stats/total  8.[78]e-01"):
        js.check(model, variables, X, mutable=["batch_stats"])


class Sowing(nnx.Module):
    """Keeps what it centred, of which nothing is returned."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.seen = nnx.Cache(jnp.zeros((16, WIDTH)))

    def __call__(self, x):
        h = self.linear(x)
        self.seen[...] = h - h.mean(0, keepdims=True)
        return h


def test_state_with_a_batch_dim_that_combines_examples_is_refused():
    with pytest.raises(js.CallError, match=r"combines examples(.|\n)*reduce_sum at test_mixing.py"):
        call(js.fully_shard(Sowing(nnx.Rngs(0)), mesh=js.mesh()), X)


class BatchNorm(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x, mask=None):
        return self.norm(self.linear(x), mask=mask)


class LayerNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, reduction_axes=(0, 1), rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


def test_only_batch_norm_is_known_to_have_statistics_of_the_whole_batch():
    with pytest.raises(js.CallError, match=r"reduce_sum at test_mixing.py"):
        call(js.fully_shard(LayerNorm(nnx.Rngs(0)), mesh=js.mesh()), X)
    mask = np.arange(16)[:, None] < 5
    with pytest.raises(
        js.CallError, match=r"a mean under a mask at test_mixing.py"
    ):  # a mean of masked means is another
        call(js.fully_shard(BatchNorm(nnx.Rngs(0)), mesh=js.mesh(), batch_arg=("x", "mask")), X, mask)


# ---- Outputs that mix the examples --------------------------------------------------------------


class Mixing(nnx.Module):
    """A linear layer, and what is made of its result."""

    def __init__(self, rngs, how):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.how = how

    def __call__(self, x):
        return self.how(self.linear(x))


class LinenMixing(nn.Module):
    how: Any

    @nn.compact
    def __call__(self, x):
        return self.how(nn.Dense(WIDTH, name="linear")(x))


def with_a_pick(h):
    return h[jnp.arange(h.shape[0]), jnp.zeros(h.shape[0], int)][:, None]


def permuted(h):
    return np.random.default_rng(3).permutation(h.shape[0])


def beside(pair):
    return pair[0] + js.batch_mean(pair[1])


def of_sixteen(h):
    assert h.shape[0] <= 16
    return h - h.mean(0, keepdims=True)


MIXES: dict[str, Callable] = {
    "a mean": lambda h: h - h.mean(0, keepdims=True),
    "similarities": lambda h: h @ (h.T @ h),
    "the first example": lambda h: h - h[:1],
    "a shift": lambda h: h - jnp.roll(h, 1, axis=0),
    "halves": lambda h: jnp.multiply(*jnp.split(h, 2)),
    "a permutation": lambda h: h + h[permuted(h)],
    "a permutation beside a pick": lambda h: h[permuted(h)] + with_a_pick(h),
    "a segment sum": lambda h: h + jnp.zeros((4, 64)).at[jnp.zeros(h.shape[0], int)].add(h)[:1],
    "an example set": lambda h: h.at[0].set(0.0),
    "an update": lambda h: jax.lax.dynamic_update_slice(h, jnp.ones((1, 64)), (0, 0)),
    "a scan over examples": lambda h: jax.lax.scan(lambda c, r: (c + r, c + r), js.per_shard(jnp.zeros(64)), h)[1],
    "a scan that carries a mean": lambda h: jax.lax.scan(
        lambda c, t: (c - c.mean(0, keepdims=True), c * t), h, jnp.arange(3.0)
    )[1][2],
    "the largest": lambda h: h + jax.lax.top_k(h.T, 1)[0].T,
    "a window": lambda h: jax.lax.reduce_window(h, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME"),
    "a convolution": lambda h: jax.lax.conv(h.T[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0].T,
    "a sort": lambda h: jnp.sort(h, axis=0),
    "a loop over rows": lambda h: jnp.stack([row - h[0] for row in h]),
    "a branch on the batch": lambda h: h * 2.0 if len(h) > 16 else h * len(h),
    "places in the batch": lambda h: h * jnp.arange(h.shape[0])[:, None],
    "places in a constant": lambda h: h * np.linspace(0, 1, h.shape[0])[:, None],
    "the number of examples": lambda h: h / h.shape[0],
    "a deviation in groups of the batch": lambda h: h + jnp.tile(h.reshape(4, -1, 64).std(0), (4, 1)),
    "a map over examples with the mean of all": lambda h: jax.lax.map(lambda row: row - h.mean(0), h),
    "a mask of a key made in the model": lambda h: h * jax.random.bernoulli(jax.random.key(3), 0.5, h.shape),
    "a mask of an old key made in the model": lambda h: h * jax.random.bernoulli(jax.random.PRNGKey(3), 0.5, h.shape),
    "a key for each example": lambda h: jax.vmap(lambda k, r: r * jax.random.normal(k, (64,)))(
        jax.random.split(jax.random.key(0), h.shape[0]), h
    ),
}
SEPARATE: dict[str, Callable] = {
    "a mean over features": lambda h: h - h.mean(1, keepdims=True),
    "a pick per example": lambda h: h - with_a_pick(h),
    "a pick along features": lambda h: h + jnp.take_along_axis(h, jnp.zeros((h.shape[0], 1), int), axis=1),
    "a pick by vmap": lambda h: jax.vmap(lambda row, i: row * row[i])(h, jnp.argmax(h, 1)),
    "a feature set per example": lambda h: h.at[jnp.arange(h.shape[0]), jnp.argmax(h, 1)].set(0.0),
    "rows of a flat array": lambda h: h.reshape(-1)[jnp.arange(h.shape[0])[:, None] * WIDTH + jnp.arange(3)[None]],
    "a slice of features": lambda h: h[:, :8],
    "a pick by a constant": lambda h: h - h[np.arange(h.shape[0]), jnp.argmax(h, 1)][:, None],
    "a sort of features": lambda h: jnp.sort(h, axis=1),
    "an order of features": lambda h: jnp.argsort(h, axis=1) + jax.nn.one_hot(jnp.argmax(h, 1), WIDTH),
    "a window of features": lambda h: jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 3), (1, 1), "SAME"),
    "kernels per example": lambda h: jax.lax.conv_general_dilated(
        h[None], h[:, None, :3], (1,), "SAME", feature_group_count=h.shape[0]
    )[0],
    "a declared sum beside a scan": lambda h: beside(
        jax.lax.scan(
            lambda c, t: ((c[0] * t, c[1] + c[0].mean()), None), (h, js.per_shard(jnp.zeros(()))), jnp.ones(3)
        )[0]
    ),
    "a map over examples": lambda h: jax.lax.map(lambda row: row * row.mean(), h),
    "a map over examples, two at a time": lambda h: jax.lax.map(lambda row: row * row.mean(), h, batch_size=2),
    "a projection of a key made in the model": lambda h: h @ jax.random.normal(jax.random.key(3), (64, 64)),
    "examples behind another dim": lambda h: (
        h.reshape(-1, 8, 8).swapaxes(0, 1).reshape(-1, 8).reshape(8, -1, 8)[0] @ jnp.ones((8, 64))
    ),
    "constants": lambda h: h + np.ones((h.shape[0], 1), np.float32) * jnp.full((h.shape[0], 1), 2.0),
}


@pytest.mark.parametrize("how", MIXES)
def test_what_combines_examples_is_refused_and_right_in_global_view(how):
    wanted = trained(Mixing(nnx.Rngs(0), MIXES[how]), X, steps=1)
    model = js.fully_shard(Mixing(nnx.Rngs(0), MIXES[how]), mesh=js.mesh())
    message = r"combines examples of the batch(.|\n)*Mixing.__call__: .* at test_mixing.py:\d+(.|\n)*own 2 of 16"
    with pytest.raises(js.CallError, match=message):
        call(model, X)
    with js.global_view():
        assert_close(trained(model, X, steps=1), wanted)


def test_a_list_of_examples_is_refused():
    with pytest.raises(js.CallError, match="results whose number the size of the batch decides"):
        call(js.fully_shard(Mixing(nnx.Rngs(0), list), mesh=js.mesh()), X)


@pytest.mark.parametrize("how", SEPARATE)
def test_what_stays_within_an_example_is_not_refused(how):
    found = call(js.fully_shard(Mixing(nnx.Rngs(0), SEPARATE[how]), mesh=js.mesh()), X)
    np.testing.assert_allclose(found, Mixing(nnx.Rngs(0), SEPARATE[how])(X), rtol=1e-5, atol=1e-5)


def test_a_linen_model_that_combines_examples_is_refused_and_right_in_global_view():
    plain = LinenMixing(MIXES["a mean"])
    variables = plain.init(jax.random.key(0), X)
    model = js.fully_shard(plain, mesh=js.mesh())
    with pytest.raises(js.CallError, match=r"LinenMixing.__call__: reduce_sum at test_mixing.py"):
        model.apply(variables, X)
    with js.global_view():
        assert_close(linen_trained(model, variables, X), linen_trained(plain, variables, X))


def centred_per_shard(h):
    return h - js.per_shard(h.mean(0, keepdims=True))


def test_per_shard_says_that_the_examples_of_a_data_shard_are_meant():
    plain = Mixing(nnx.Rngs(0), centred_per_shard)
    found = call(js.fully_shard(Mixing(nnx.Rngs(0), centred_per_shard), mesh=js.mesh()), X)
    wanted = np.concatenate([plain(X[i : i + 2]) for i in range(0, 16, 2)])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    linen = LinenMixing(centred_per_shard)
    variables = linen.init(jax.random.key(0), X)
    found = js.fully_shard(linen, mesh=js.mesh()).apply(variables, X)
    wanted = np.concatenate([linen.apply(variables, X[i : i + 2]) for i in range(0, 16, 2)])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_declared_mean_is_right():
    model = js.fully_shard(Mixing(nnx.Rngs(0), lambda h: h - js.batch_mean(h.mean(0, keepdims=True))), mesh=js.mesh())
    report = js.check(model, X)
    assert report.worst < 1e-4 and report.outputs and set(report.gradients) == {"linear/kernel", "linear/bias"}


def test_check_finds_mixed_examples_by_their_results():
    model = js.fully_shard(Mixing(nnx.Rngs(0), MIXES["a mean"]), mesh=js.mesh())
    with pytest.raises(js.CallError, match=r"do not agree(.|\n)*linear/kernel(.|\n)*reduce_sum at test_mixing.py"):
        js.check(model, X)
    harmless = js.fully_shard(Mixing(nnx.Rngs(0), lambda h: jnp.stack([2 * row for row in h])), mesh=js.mesh())
    report = js.check(harmless, X)
    assert report.worst < 1e-5 and "test_mixing.py" in str(report) and "js.per_shard(x)" in str(report)


def test_a_batch_that_cannot_be_doubled_is_said():
    model = js.fully_shard(Mixing(nnx.Rngs(0), of_sixteen), mesh=js.mesh())
    with pytest.warns(
        UserWarning, match=r"cannot be traced with twice its batch of 16 \(AssertionError: .*\)(.|\n)*js.check"
    ):
        call(model, X)
    with pytest.warns(UserWarning, match="twice its batch"), pytest.raises(js.CallError, match="do not agree"):
        js.check(model, X)


# ---- Means that are not means over equally many examples ----------------------------------------


class Masked(nnx.Module):
    """A loss of the examples that count."""

    def __init__(self, rngs, inside):
        self.linear, self.inside = nnx.Linear(WIDTH, WIDTH, rngs=rngs), inside

    def __call__(self, x, mask):
        loss = (self.linear(x) ** 2).mean(1)
        return (loss * mask).sum() / mask.sum() if self.inside else loss


def test_the_advice_for_a_masked_mean_gives_the_numbers_of_one_device():
    mask = (np.arange(16) % 5 < 2).astype(np.float32)
    inside = lambda model, x, mask: model(x, mask)
    outside = lambda model, x, mask: (model(x, mask) * mask).sum() / mask.sum()
    wanted = trained(Masked(nnx.Rngs(0), True), X, mask, loss_fn=inside)
    model = js.fully_shard(Masked(nnx.Rngs(0), True), mesh=js.mesh(), batch_arg=("x", "mask"))
    with pytest.raises(
        js.CallError, match=r"one value for each example(.|\n)*m.sum\(\)(.|\n)*global_view(.|\n)*[Oo]nly an"
    ):
        call(model, X, mask)
    with js.global_view():
        assert_close(trained(model, X, mask, loss_fn=inside), wanted)
    model = js.fully_shard(Masked(nnx.Rngs(0), False), mesh=js.mesh(), batch_arg=("x", "mask"))
    assert_close(trained(model, X, mask, loss_fn=outside), wanted)


class Graph(nnx.Module):
    """A layer of a graph network: sums over the edges of one large graph."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, nodes, senders, receivers):
        h = self.linear(nodes)
        degree = 1 + jax.ops.segment_sum(jnp.ones(len(receivers)), receivers, len(nodes))
        self_loop = h[jnp.arange(len(nodes)), :]  # counts the nodes, as its edges do not
        return (self_loop + jax.ops.segment_sum(h[senders], receivers, len(nodes))) / degree[:, None]


@pytest.mark.parametrize("edges", [48, 16])
def test_a_graph_of_the_whole_batch_is_refused_and_right_in_global_view(edges):
    senders, receivers = np.random.default_rng(1).integers(0, 16, (2, edges), dtype=np.int32)
    wanted = trained(Graph(nnx.Rngs(0)), X, senders, receivers)
    model = js.fully_shard(
        Graph(nnx.Rngs(0)), mesh=js.mesh(), batch_arg=("nodes", "senders", "receivers")[: 3 if edges == 16 else 1]
    )
    with pytest.raises(js.CallError, match=r"gather at test_mixing.py"):
        call(model, X, senders, receivers)
    with js.global_view():
        assert_close(trained(model, X, senders, receivers), wanted)
