"""Loops and branches on data shards are those of one device, whatever state their carries come to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jshard as js
from jshard.engine.rules import PRIMITIVES
from tests.engine.on_shards import ONE_BY_8, check, mesh_of, on_shards

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 16)).astype("f")
W = rng.normal(size=(16, 16)).astype("f") / 4
S = rng.normal(size=(32, 6, 16)).astype("f")
STACK = rng.normal(size=(5, 16, 16)).astype("f") / 4


def whole(found):
    return [m for m in found.moved if m.kind not in ("sum", "max")]


def rnn(x, w, **how):
    step = lambda h, row: (jnp.tanh(h @ w + row), h.sum(-1))
    return lax.scan(step, jnp.zeros((32, 16)), x.swapaxes(0, 1), **how)


def test_scan_over_time():
    """Seen to fail with `reverse` left out."""
    unrolled_and_short = lambda x, w: (rnn(x, w, reverse=True), rnn(x, w, unroll=4), rnn(x[:, :0], w), rnn(x[:, :1], w))
    found = check(unrolled_and_short, S, W)
    assert not whole(found)


def test_sums_are_taken_once_after_the_loop():
    """A carry that is partial. Seen to fail with the carry settled in every trip: a sum inside the loop."""

    def total(x, w):
        return lax.scan(lambda a, i: (a + (x @ w).sum(0) * i, None), jnp.zeros(16), jnp.arange(4.0))[0]

    found = check(total, X, W, gradients=False)
    assert sum(m.bytes for m in found.moved) == 16 * 4
    mean_of_sum = lambda x: lax.scan(lambda a, _: (jnp.tanh(a) + x.sum(0), None), jnp.zeros(16), None, 4)[0]
    swapped = lambda x: lax.scan(lambda c, _: ((c[1], c[0] * 0.5), c[0][0]), (x.sum(0), jnp.ones(16)), None, 5)
    check(lambda x, w: (total(x, w), mean_of_sum(x), swapped(x)), X / 32, W)


def test_carries_that_change_their_state():
    """Seen to fail with the start's states kept: a split carry gathered in each trip."""
    late = lambda x, w: lax.fori_loop(0, 5, lambda i, c: (c[1], c[2], x * 0.1 + c[0]), (jnp.concatenate([w, w]),) * 3)
    found = check(late, X, W, gradients=False)
    assert not whole(found)
    turning = lambda x: lax.scan(lambda c, _: (jnp.tanh(c.T @ c), None), x.T @ x, None, 3)[0]
    over_examples = lambda x: lax.scan(lambda c, row: (c * 0.9 + row, c), jnp.zeros(16), x)
    check(lambda x, w: (late(x, w), turning(x), over_examples(x)), X / 16, W)


def test_scan_of_stacked_layers():
    def layers(x, stack):
        def layer(h, w):
            mask = jnp.arange(32)[:, None] >= jnp.arange(16)[None]
            return jnp.where(mask, jnp.tanh(h @ w), h), h.mean(0)

        return lax.scan(jax.checkpoint(layer), x, stack)

    found = check(layers, X, STACK)
    assert not whole(found)


def nested(depth, x, start):
    """Loops in loops, each of whose carries is whole at first, and split after two trips."""
    if depth == 0:
        return jnp.sin(x) * start
    step = lambda c, _: ((c[1], nested(depth - 1, x, c[0])), None)
    return lax.scan(step, (start, start), None, 3)[0][1]


def test_a_loop_in_loops_is_traced_a_few_times(monkeypatch):
    """The states of each loop are found once. Seen to fail without `carry_states`: 31 traces and not 9."""
    traces = []
    sin = PRIMITIVES["sin"]
    counted = dataclasses.replace(sin, rule=lambda *args: traces.append(1) or sin.rule(*args))
    monkeypatch.setitem(PRIMITIVES, "sin", counted)
    found = on_shards(
        lambda x, w: nested(4, x, jnp.concatenate([w, w])), (X, W), mesh_of(*ONE_BY_8), gradients=False, run=False
    )
    assert not whole(found)
    assert len(traces) <= 16, len(traces)
    check(lambda x, w: nested(3, x, jnp.concatenate([w, w])), X, W)


def test_while_loops():
    """Seen to fail with the condition of a shard's own rows."""
    until = lambda x: lax.while_loop(lambda c: jnp.any(jnp.abs(c) > 0.1), lambda c: c * 0.5, x)
    by_sum = lambda x: lax.while_loop(lambda c: c[1].sum() < 1e4, lambda c: (c[0] + 1, c[1] * 1.5), (0, jnp.abs(x)))
    counted = lambda x, n: lax.fori_loop(0, n, lambda i, c: c * 0.9 + x.mean(0) * i, jnp.zeros(16))
    check(lambda x, n: (until(x), by_sum(x), counted(x, n)), X, np.int32(5), gradients=False)


def test_a_loop_for_each_row_ends_with_its_row():
    """Seen to fail with rows that go on after their end, where the limits are known without data."""
    halve = lambda row: lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: c * 0.5, row)
    trips = lambda row, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.1), (0, row))[1]
    both = lambda row, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + c[0], c[2] * 1.1), (0, 0, row))
    columns = jax.vmap(lambda col, n: trips(col, n), in_axes=(1, 0), out_axes=1)

    def each(x):
        traced, known = jnp.arange(32), np.arange(32)
        rows = jax.vmap(halve)(x), jax.vmap(trips)(x, traced), jax.vmap(trips)(x, known), jax.vmap(both)(x, traced)
        return rows, columns(x, jnp.arange(16))

    check(each, X, gradients=False)


def test_branches():
    """Seen to fail with the state of the first branch for all of them."""
    differ = lambda x: lax.cond(x.sum() > 1e9, lambda x: x.sum(0), lambda x: x[3], x)
    partial = lambda x: lax.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: jnp.ones(16), x)
    in_loop = lambda x: lax.scan(
        lambda c, i: (lax.cond(i % 2 == 0, lambda c: c + x.sum(0), lambda c: c * 0.5, c), c),
        jnp.zeros(16),
        jnp.arange(5),
    )
    rows = jax.vmap(lambda row: lax.cond(row[0] > 0, jnp.sin, jnp.cos, row))
    check(lambda x: (differ(x), partial(x), partial(-jnp.abs(x)), in_loop(x), rows(x)), X)
    masks = lambda x: lax.cond(x.sum() > 0, lambda x: jnp.ones((32, 16)), lambda x: x * 2, x)
    assert not whole(check(masks, X))
    either = lambda x, w: lax.cond(w.sum() > 0, lambda x: x * 2, lambda x: jnp.concatenate([w, w]), x)
    assert not whole(check(either, X, W, gradients=False))
    chosen = lambda x, i: lax.switch(i, [jnp.sin, lambda x: x.T.T, lambda x: jnp.roll(x, 1, 0), jnp.zeros_like], x)
    check(lambda x, i, w: ([chosen(x, i + k) for k in range(4)], either(x, w)), X, np.int32(0), W)


def test_associative_scans_and_maps():
    linear = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    scans = lambda x: (lax.associative_scan(jnp.add, x, axis=1), lax.associative_scan(linear, (x, x * 2), axis=0))
    maps = lambda x, w: (lax.map(lambda r: jnp.tanh(r @ w), x, batch_size=8), lax.map(jnp.sum, x.swapaxes(0, 1)))
    check(lambda x, w: (scans(x), maps(x, w)), X, W)


def test_references_in_loops():
    """Seen to fail with a reference taken for split."""

    def sums(x):
        total, rows = jax.new_ref(jnp.zeros(16)), jax.new_ref(x)

        def step(i, c):
            total[...] += x.sum(0) * i
            rows[0] = rows[0] * 2.0
            rows[...] += 1.0
            return c

        lax.fori_loop(0, 3, step, 0)
        return total[...], rows[...]

    check(sums, X, gradients=False)


def test_gradients_through_a_branch_that_skips_a_layer():
    """A branch gathers for itself; the other branch, and what follows, must not see its arrays."""

    class Skipping(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first, self.maybe, self.last = (nnx.Linear(32, 32, rngs=rngs) for _ in range(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.first(x)
            x = lax.cond(x[0, 0] < 1e9, lambda x: x + self.maybe(x), lambda x: x, x)
            return self.last(x)

    loss = lambda model, x: (model(x) ** 2).mean()
    x = jnp.ones((16, 32))
    model = Skipping(nnx.Rngs(0))
    expected = nnx.grad(loss)(model, x)
    js.fully_shard(model, mesh=js.mesh(), placement=js.PlacementPolicy(min_size=1))
    gradients = nnx.jit(nnx.grad(loss))(model, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, expected)
