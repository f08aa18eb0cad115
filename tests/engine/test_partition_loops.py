"""Loops and branches on data shards are those of one device, whatever state their carries come to."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jshard.engine.rules import RULES
from tests.engine.on_shards import ONE_BY_8, check, mesh_of, on_shards
from tests.wide import wide

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


@pytest.mark.parametrize("how", [{"reverse": True}, {"unroll": 4}, wide({}), wide({"unroll": True, "reverse": True})])
def test_scan_over_time(how):
    """Seen to fail with `reverse` left out."""
    found = check(functools.partial(rnn, **how), S, W)
    assert not whole(found)


@pytest.mark.parametrize("length", [0, 1])
def test_scans_of_no_trip_and_of_one(length):
    found = check(lambda x, w: rnn(x[:, :length], w), S, W)
    assert not whole(found)


def test_sums_are_taken_once_after_the_loop():
    """A carry that is partial. Seen to fail with the carry settled in every trip: a sum inside the loop."""

    def total(x, w):
        return lax.scan(lambda a, i: (a + (x @ w).sum(0) * i, None), jnp.zeros(16), jnp.arange(4.0))[0]

    found = check(total, X, W, gradients=False)
    assert sum(m.bytes for m in found.moved) == 16 * 4
    check(total, X, W)
    mean_of_sum = lambda x: lax.scan(lambda a, _: (jnp.tanh(a) + x.sum(0), None), jnp.zeros(16), None, 4)[0]
    check(mean_of_sum, X / 32)
    swapped = lambda x: lax.scan(lambda c, _: ((c[1], c[0] * 0.5), c[0][0]), (x.sum(0), jnp.ones(16)), None, 5)
    check(swapped, X)


def test_carries_that_change_their_state():
    """Seen to fail with the start's states kept: a split carry gathered in each trip."""
    late = lambda x, w: lax.fori_loop(0, 5, lambda i, c: (c[1], c[2], x * 0.1 + c[0]), (jnp.concatenate([w, w]),) * 3)
    check(late, X, W)
    found = check(late, X, W, gradients=False)
    assert not whole(found)
    turning = lambda x: lax.scan(lambda c, _: (jnp.tanh(c.T @ c), None), x.T @ x, None, 3)[0]
    check(turning, X / 16)
    over_examples = lambda x: lax.scan(lambda c, row: (c * 0.9 + row, c), jnp.zeros(16), x)
    check(over_examples, X)


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
    """The states of each loop are found once. Seen to fail without `settled`: 31 traces and not 9."""
    traces = []
    rule = RULES["sin"]
    monkeypatch.setitem(RULES, "sin", lambda *args: traces.append(1) or rule(*args))
    found = on_shards(
        lambda x, w: nested(4, x, jnp.concatenate([w, w])), (X, W), mesh_of(*ONE_BY_8), gradients=False, run=False
    )
    assert not whole(found)
    assert len(traces) <= 16, len(traces)
    check(lambda x, w: nested(3, x, jnp.concatenate([w, w])), X, W)


def test_while_loops():
    """Seen to fail with the condition of a shard's own rows."""
    until = lambda x: lax.while_loop(lambda c: jnp.any(jnp.abs(c) > 0.1), lambda c: c * 0.5, x)
    check(until, X, gradients=False)
    by_sum = lambda x: lax.while_loop(lambda c: c[1].sum() < 1e4, lambda c: (c[0] + 1, c[1] * 1.5), (0, jnp.abs(x)))
    check(by_sum, X, gradients=False)
    counted = lambda x, n: lax.fori_loop(0, n, lambda i, c: c * 0.9 + x.mean(0) * i, jnp.zeros(16))
    check(counted, X, np.int32(5), gradients=False)


def test_a_loop_for_each_row_ends_with_its_row():
    """Seen to fail with rows that go on after their end, where the limits are known without data."""
    halve = lambda row: lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: c * 0.5, row)
    check(jax.vmap(halve), X, gradients=False)
    limits = jnp.arange(32)
    trips = lambda row, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.1), (0, row))[1]
    check(lambda x: jax.vmap(trips)(x, limits), X, gradients=False)
    known = np.arange(32)
    check(lambda x: jax.vmap(trips)(x, known), X, gradients=False)
    both = lambda row, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + c[0], c[2] * 1.1), (0, 0, row))
    check(lambda x: jax.vmap(both)(x, limits), X, gradients=False)
    columns = jax.vmap(lambda col, n: trips(col, n), in_axes=(1, 0), out_axes=1)
    check(lambda x: columns(x, jnp.arange(16)), X, gradients=False)


def test_branches():
    """Seen to fail with the state of the first branch for all of them."""
    differ = lambda x: lax.cond(x.sum() > 1e9, lambda x: x.sum(0), lambda x: x[3], x)
    check(differ, X)
    partial = lambda x: lax.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: jnp.ones(16), x)
    check(partial, X)
    check(partial, -np.abs(X))
    masks = lambda x: lax.cond(x.sum() > 0, lambda x: jnp.ones((32, 16)), lambda x: x * 2, x)
    found = check(masks, X)
    assert not whole(found)
    either = lambda x, w: lax.cond(w.sum() > 0, lambda x: x * 2, lambda x: jnp.concatenate([w, w]), x)
    check(either, X, W)
    found = check(either, X, W, gradients=False)
    assert not whole(found)
    chosen = lambda x, i: lax.switch(i, [jnp.sin, lambda x: x.T.T, lambda x: jnp.roll(x, 1, 0), jnp.zeros_like], x)
    for i in range(4):
        check(chosen, X, np.int32(i))
    check(jax.vmap(lambda row: lax.cond(row[0] > 0, jnp.sin, jnp.cos, row)), X)
    in_loop = lambda x: lax.scan(
        lambda c, i: (lax.cond(i % 2 == 0, lambda c: c + x.sum(0), lambda c: c * 0.5, c), c),
        jnp.zeros(16),
        jnp.arange(5),
    )
    check(in_loop, X)


def test_associative_scans_and_maps():
    check(lambda x: lax.associative_scan(jnp.add, x, axis=1), X)
    check(lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x * 2), axis=0), X)
    check(lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=8), X, W)
    check(lambda x: lax.map(lambda row: row.sum(), x.swapaxes(0, 1)), X)


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


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros(16))

    def __call__(self, x):
        self.seen[...] = 0.9 * self.seen[...] + 0.1 * x.mean(0)
        return jnp.tanh(self.linear(x))


def test_flax_scans_with_remat():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Layer(rngs)

    layers = make(nnx.Rngs(0).split(3))
    graph, state = nnx.split(layers)
    leaves, tree = jax.tree.flatten(state)

    def stacked(x, *leaves):
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return nnx.remat(lambda layer, x: layer(x))(layer, x)

        y = run(x, model)
        return y, model.seen[...]

    found = check(stacked, X, *leaves)
    assert not whole(found)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(16)(nn.Dropout(0.3, deterministic=False)(x))), None

    scanned = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3
    )()
    variables = scanned.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, None)
    leaves, tree = jax.tree.flatten(variables)
    apply = lambda x, *leaves: scanned.apply(tree.unflatten(leaves), x, None, rngs={"dropout": jax.random.key(2)})[0]
    found = check(apply, X, *leaves)
    assert not whole(found)
