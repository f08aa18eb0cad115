"""What stays split and what stays partial: which operations gather nothing, and when a sum is taken."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jshard.engine.rules import PARTIAL
from tests.engine.on_shards import ONE_BY_8, mesh_of, run_alone

BATCH = 32
Array = jax.Array


class Run:
    """A function on 8 shards: of arguments those are split whose first dim is the batch.

    Args:
        function: of arrays.
        args: whole ones.
        gradients: which of its results are gradients.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, gradients: Any = ()) -> None:
        found = run_alone(function, args, mesh_of(*ONE_BY_8), batch=BATCH, gradients=gradients)
        self.kinds, self.states, self.lowered = [moved.kind for moved in found.moved], found.states, found.lowered
        for got, want in zip(found.outs, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
            np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-5, atol=1e-5)


def normal(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


X, W = normal(BATCH, 16), normal(16, 8)
LABELS = jnp.arange(BATCH) * 7 % 16


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, labels: x[jnp.arange(BATCH), labels],
        lambda x, labels: x[jnp.arange(x.shape[0])[:, None], labels[:, None] + jnp.arange(2)[None]],
        lambda x, labels: jnp.take_along_axis(x, labels[:, None], 1),
        lambda x, labels: x.at[jnp.arange(BATCH), labels].set(0.0),
        lambda x, labels: jax.vmap(lambda row, label: row[label])(x, labels),
    ],
)
def test_indices_that_count_the_batch_gather_nothing(pick: Callable[..., Array]) -> None:
    both = lambda x, labels: (pick(x, labels), jax.grad(lambda x: (pick(x, labels) ** 2).sum())(x))
    run = Run(both, X, LABELS % 15)
    assert run.kinds == [] and run.states == [0, 0]


def test_indices_that_only_look_as_if_they_counted_are_gathered_for() -> None:
    for rows in (jnp.arange(BATCH)[::-1], (jnp.arange(BATCH) + 1) % BATCH, jnp.arange(BATCH) // 2):
        assert "whole" in Run(lambda x, labels, rows=rows: x[rows * 1, labels], X, LABELS).kinds
    assert "whole" in Run(lambda x, i: x[jnp.arange(16), i], X, jnp.arange(16)).kinds


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sort(x, 0),
        lambda x: jnp.flip(x, 0),
        lambda x: jnp.roll(x, 3, 0),
        lambda x: jnp.cumsum(x, 0),
        lambda x: x[:16] * x[16:],
        lambda x: x[1:] - x[:-1],
        lambda x: jnp.concatenate([x, x], 0),
        lambda x: jnp.pad(x, ((8, 0), (0, 0))),
        lambda x: x.reshape(4, 8, 16).std(0),
        lambda x: jnp.swapaxes(x.reshape(BATCH, 8, 2), 0, 1).reshape(-1, 2),
    ],
)
def test_operations_along_the_batch_move_shards_and_gather_nothing(function: Callable[..., Array]) -> None:
    run = Run(function, X)
    assert set(run.kinds) == {"move"} and isinstance(run.states[0], int)


@pytest.mark.parametrize("row", [lambda x: x[3], lambda x: x[(x[:, 0].argmax() + 2) % BATCH]])
def test_one_row_of_the_batch_is_a_sum(row: Callable[..., Array]) -> None:
    run = Run(row, X)
    assert run.states == [PARTIAL]


def test_what_is_computed_whole_is_split_again() -> None:
    run = Run(lambda x: jnp.tanh(x[np.random.default_rng(0).permutation(BATCH)]), X)
    assert run.kinds == ["whole"] and run.states == [0]


def experts(x: Array, w: Array) -> Array:
    """Each expert's rows of w are sliced, as of a stack of experts."""
    return sum(jnp.tanh(x @ w[2 * i : 2 * i + 2].T).sum() for i in range(8))  # type: ignore[return-value]


def test_gradients_of_experts_are_summed_once() -> None:
    grad = lambda x, w: jax.grad(experts, 1)(x, w)
    w = normal(16, 16)
    assert "sum" in Run(grad, X, w).kinds
    run = Run(grad, X, w, gradients=[0])
    assert run.kinds == [] and run.states == [PARTIAL]
    inside = Run(jax.jit(grad), X, w, gradients=[0])
    assert inside.kinds == [] and inside.states == [PARTIAL]


def test_what_does_not_flow_to_a_gradient_alone_is_summed_before_it_grows() -> None:
    both = lambda x, w: (jax.grad(experts, 1)(x, w), (jnp.pad(x.sum(0), (0, 16)) ** 2).sum())
    run = Run(both, X, normal(16, 16), gradients=[0])
    assert run.kinds == ["sum"]


def test_a_sum_beside_a_split_value_is_scattered() -> None:
    run = Run(lambda x, w: x.T @ x + jnp.sort(x.T, 1)[:, :16], normal(BATCH, 16), W)
    assert "sum" in run.kinds and "whole" not in run.kinds


def test_a_scalar_sum_does_not_grow_to_the_size_of_the_batch() -> None:
    run = Run(lambda x: jnp.ones((BATCH, 16)) * x.sum(), X)
    assert run.kinds == ["sum"] and run.states == [None]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.concatenate([x[:, :0], x], 1),
        lambda x: (x[:, :0] * 2, x[:0].sum(0)),
        lambda x: x[:0].reshape(0, 4, 4).sum((1, 2)),
        lambda x: jnp.zeros((0, BATCH)) @ x,
        lambda x: x.reshape(np.int64(4), np.int64(8), np.int32(16)).transpose(np.array([1, 0, 2])),
        lambda x: jnp.squeeze(x[:, None], np.int64(1)),
        lambda x: jax.vjp(lambda x, i: x * i.astype(x.dtype), x, jnp.arange(BATCH)[:, None])[1](x)[0],
    ],
)
def test_empty_arrays_and_dims_of_numpy(function: Callable[..., Any]) -> None:
    Run(function, X)


def test_bits_of_an_old_stream_are_those_of_one_device() -> None:
    with jax.threefry_partitionable(False):
        Run(lambda x: x * jax.random.bernoulli(jax.random.key(3), 0.5, x.shape), X)


def test_metadata_of_the_user_is_kept() -> None:
    def function(x: Array) -> Array:
        with set_xla_metadata(mine="yes"):
            x = lax.sin(x)
        return lax.cos(x)

    lines = Run(function, X).lowered.as_text().splitlines()
    assert [("mine" in line) for line in lines if "stablehlo.sine" in line or "stablehlo.cosine" in line] == [
        True,
        False,
    ]
