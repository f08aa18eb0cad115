"""Random programs whose operations mix the examples of a batch: value and gradients on 8 shards equal one device."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.engine.on_shards import ONE_BY_8, TWO_BY_4, mesh_of, run_alone
from tests.wide import wide

BATCH, WIDTH = 32, 16
ORDER = np.random.default_rng(0).permutation(BATCH)
ROWS = np.arange(BATCH)

Array = jax.Array
OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "product": lambda h, w: jnp.tanh(h @ w),
    "transposed product": lambda h, w: h @ w.T,
    "in-batch attention": lambda h, w: jax.nn.softmax(h @ h.T / 8) @ h,
    "covariance": lambda h, w: h @ (h.T @ h) / 32,
    "batch norm": lambda h, w: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-2),
    "layer norm": lambda h, w: (h - h.mean(1, keepdims=True)) / (h.std(1, keepdims=True) + 0.1),
    "maximum of the batch": lambda h, w: h - 0.5 * h.max(0),
    "softmax over the batch": lambda h, w: jax.nn.softmax(h, 0) * 8,
    "transposes": lambda h, w: jnp.concatenate([h.T, h.T], 0).reshape(2, 16, 32)[0].T,
    "permutation": lambda h, w: h[ORDER],
    "sort the batch": lambda h, w: jnp.sort(h, 0),
    "sort rows": lambda h, w: jnp.sort(h, 1),
    "cumsum over the batch": lambda h, w: jnp.cumsum(h, 0) / 16,
    "cumsum of rows": lambda h, w: jnp.cumsum(h, 1) / 8,
    "roll the batch": lambda h, w: jnp.roll(h, 3, 0),
    "roll rows": lambda h, w: jnp.roll(h, 3, 1),
    "pairs": lambda h, w: h.reshape(16, 2, 16)[:, ::-1].reshape(32, 16),
    "minibatch deviation": lambda h, w: h + jnp.tile(h.reshape(4, 8, 16).std(0), (4, 1)),
    "merged behind": lambda h, w: (
        jnp.tanh(h.reshape(32, 2, 8).swapaxes(0, 1).reshape(64, 8)).reshape(2, 32, 8)[1].repeat(2, 1)
    ),
    "dropout": lambda h, w: h * jax.random.bernoulli(jax.random.key(5), 0.7, h.shape),
    "noise": lambda h, w: h + jax.random.normal(jax.random.key(7), h.shape) * ROWS[:, None] / 32,
    "mask": lambda h, w: jnp.where(h > h.mean(), h, 0.1 * h),
    "branch": lambda h, w: lax.cond(h.sum() > 0, lambda h: h * 1.1, lambda h: jnp.flip(h, 0) + h.sum(0) / 32, h),
    "loop": lambda h, w: lax.scan(lambda c, _: (jnp.tanh(c @ w) + c.mean(0), None), h, None, 3)[0],
    "recurrence": lambda h, w: lax.scan(lambda c, x: ((c + x) * 0.5, c), jnp.zeros(32), h.T)[1].T,
    "recurrence over the batch": lambda h, w: lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c), jnp.zeros(16), h)[1],
    "set rows": lambda h, w: h.at[ROWS % 5].set(0.3),
    "add to rows": lambda h, w: h.at[ORDER // 2].add(h),
    "one row": lambda h, w: h + h[3] * h[lax.stop_gradient(h[:, 0]).argmax()],
    "its own column": lambda h, w: h * h[jnp.arange(32), lax.stop_gradient(h).argmax(1)][:, None],
    "set its own column": lambda h, w: h.at[jnp.arange(32), lax.stop_gradient(h).argmin(1)].multiply(0.5),
    "update rows": lambda h, w: lax.dynamic_update_slice(h, h[:, :4] * 2, (0, 5)),
    "update the batch": lambda h, w: lax.dynamic_update_slice(h, h[:4] * 2, (5, 0)),
    "shift": lambda h, w: h - jnp.pad(h[1:], ((0, 1), (0, 0))),
    "take along": lambda h, w: jnp.take_along_axis(h, jnp.argsort(h, 1)[:, ::2].repeat(2, 1), 1),
    "remat": lambda h, w: jax.checkpoint(lambda h: jnp.sin(h @ w) * h.sum(0))(h) / 8,
    "vmap": lambda h, w: jax.vmap(lambda x, y: x * y.sum() + y, (0, None))(h, h[0]),
    "segments": lambda h, w: jax.ops.segment_sum(h, ORDER % 8, 8)[ORDER % 8],
    "experts": lambda h, w: lax.ragged_dot(h, jnp.stack([w, -w, w.T]), jnp.asarray([9, 0, 20], jnp.int32)),
    "einsum": lambda h, w: jnp.einsum("bi,ci,cj->bj", h, h, h) / 64,
    "windows": lambda h, w: lax.reduce_window(h, 0.0, lax.add, (3, 3), (1, 1), "SAME") / 9,
    "divided by a norm": lambda h, w: h * h.shape[0] / (h.sum(1, keepdims=True) ** 2 + 9),
    "constants": lambda h, w: h + jnp.outer(jnp.arange(32) % 3, w[0]),
    "divided by the maximum": lambda h, w: h / (1 + jnp.abs(h).max()),
    "only the first": lambda h, w: h * (jnp.arange(32) < 20)[:, None],
    "padded experts": lambda h, w: h @ jnp.concatenate([w[:8], w[8:] * 2]) + (h @ w)[:, :8].repeat(2, 1),
    "logsumexp": lambda h, w: h - jax.nn.logsumexp(h, 0, keepdims=True),
    "convolution": lambda h, w: lax.conv_general_dilated(
        h.reshape(32, 4, 4, 1),
        w[:3, :3].reshape(3, 3, 1, 1),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ).reshape(32, 16),
}


@pytest.fixture(autouse=True)
def _as_users_write() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def program(names: list[str]) -> Callable[..., Any]:
    """Loss, output and gradients of some operations after each other."""

    def loss(x: Array, w: Array) -> tuple[Array, Array]:
        for name in names:
            x = OPERATIONS[name](x, w)
        # The count makes the loss depend on all shards; above 0, as rows that are equal may cancel up to rounding.
        return (jnp.sin(x) * jnp.cos(jnp.arange(32.0))[:, None]).sum() / (1 + (x > 1e-3).sum()), x

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


def on_shards(function: Callable[..., Any], shape: tuple[int, int], x: Any, w: Any) -> list[Any]:
    """The results of each device, of a program that runs on shards of x; the last two are gradients."""
    return run_alone(function, (x, w), mesh_of(*shape), batch=BATCH, gradients=(2, 3)).outs


def difference(wanted: list[Any], found: list[Any]) -> float:
    """The largest difference of a result, relative to its largest number."""
    return max(float(np.abs(a - b).max() / (np.abs(a).max() + 1e-6)) for a, b in zip(wanted, found, strict=True))


def disagreement(seed: int) -> str:
    """What a random program of four operations gets wrong; empty for nothing."""
    random = np.random.default_rng(seed)
    names = [str(name) for name in random.choice(list(OPERATIONS), 4)]
    x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    w = (random.normal(size=(WIDTH, WIDTH)) * 0.3).astype(np.float32)
    function, compiled = program(names), jax.jit(program(names))
    wanted = jax.tree.leaves(compiled(x, w))
    if not all(np.isfinite(a).all() for a in wanted):
        return ""
    rounding = difference(wanted, jax.tree.leaves(compiled(x * np.float32(1 + 1e-7), w)))
    worst = difference(wanted, on_shards(function, (ONE_BY_8, TWO_BY_4)[seed % 2], x, w))
    return f"{seed}: {names}: {worst:.1e} ({rounding:.1e})" if worst > max(1e-4, 30 * rounding) else ""


@pytest.mark.parametrize("first", [0, *[wide(first) for first in range(5, 1005, 20)]])
def test_random_programs_equal_one_device(first: int) -> None:
    count = 5 if first == 0 else 20
    try:
        assert list(filter(None, map(disagreement, range(first, first + count)))) == []
    finally:
        jax.clear_caches()


@pytest.mark.parametrize("name", [wide(name) for name in OPERATIONS])
def test_each_operation_equals_one_device(name: str) -> None:
    random = np.random.default_rng(1)
    x, w = random.normal(size=(BATCH, WIDTH)).astype(np.float32), np.eye(WIDTH, dtype=np.float32) + 0.1
    wanted, found = jax.tree.leaves(jax.jit(program([name]))(x, w)), on_shards(program([name]), ONE_BY_8, x, w)
    assert difference(wanted[1:], found[1:]) < 1e-4
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-7)  # a sum that may cancel
