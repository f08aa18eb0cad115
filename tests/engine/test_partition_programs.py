"""Operations that mix the examples of a batch, alone and in random programs: value and gradients equal one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jshard as js
from tests.engine.on_shards import ONE_BY_8, TWO_BY_4, mesh_of, run_alone
from tests.wide import slow, wide

pytestmark = pytest.mark.usefixtures("ranks_as_users_have_them")

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
    "weights by place": lambda h, w: h * jnp.arange(h.shape[0])[:, None] / h.shape[0],
    "a median": lambda h, w: h - jnp.median(h, 0),
    "rows in a list": lambda h, w: jnp.stack([row - h[0] for row in h]),
    "a gradient inside": lambda h, w: jax.grad(lambda h: (jnp.tanh(h @ w) ** 2).mean())(h) * BATCH,
    "gradients of examples": lambda h, w: jax.vmap(jax.grad(lambda r: (jnp.tanh(r @ w) ** 2).sum()))(h),
    "gradients of a weight": lambda h, w: h * _squares_of_gradients(h, w)[:, None],
    "a clipped norm": lambda h, w: h * jnp.minimum(1.0, 3.0 / jnp.sqrt((h**2).sum())),
    "a key for each row": lambda h, w: jax.vmap(lambda r, k: r * jax.random.bernoulli(k, 0.5, r.shape))(
        h, jax.random.split(jax.random.key(3), len(h))
    ),
    "a number of the row folded in": lambda h, w: jax.vmap(
        lambda r, i: r + jax.random.normal(jax.random.fold_in(jax.random.key(3), i), r.shape)
    )(h, jnp.arange(len(h))),
    "places within a capacity": lambda h, w: _within_capacity(h),
}


def _squares_of_gradients(h: Array, w: Array) -> Array:
    """Of a weight, for each example."""
    of_row = jax.grad(lambda w, row: (jnp.tanh(row @ w / 16) ** 2).sum())
    return (jax.vmap(of_row, (None, 0))(w, h) ** 2).sum((1, 2))


def _within_capacity(h: Array) -> Array:
    """The first 10 examples of each of 4 experts pass."""
    hot = jax.nn.one_hot(jnp.argmax(h[:, :4], 1), 4)
    return h * ((jnp.cumsum(hot, 0) * hot).sum(1) <= 10)[:, None]


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


@pytest.mark.wide
@pytest.mark.parametrize(
    "first", [0, *(wide(first) if first % 100 == 5 else slow(first) for first in range(5, 405, 20))]
)
def test_random_programs_equal_one_device(first: int) -> None:
    count = 5 if first == 0 else 20
    try:
        assert list(filter(None, map(disagreement, range(first, first + count)))) == []
    finally:
        jax.clear_caches()


class Body(nnx.Module):
    """A layer, and what a user wrote behind it."""

    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        self.name, self.linear = name, nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.weight = nnx.Param(jnp.eye(WIDTH) + 0.1)

    def __call__(self, x: Array) -> Array:
        return OPERATIONS[self.name](self.linear(x), self.weight[...])


class Bodies(nnx.Module):
    def __init__(self, names: list[str]) -> None:
        self.bodies = nnx.List([Body(name, nnx.Rngs(0)) for name in names])

    def __call__(self, x: Array) -> dict[str, Array]:
        return {body.name: body(x) for body in self.bodies}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what the mixing costs
@pytest.mark.parametrize(("half", "mesh"), [(0, {"fsdp": 8}), (1, {"replica": 2, "fsdp": 4})], ids=["8", "2x4"])
def test_each_operation_in_a_unit_equals_one_device(half: int, mesh: dict[str, int]) -> None:
    names = [*OPERATIONS][half::2]
    x = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)

    @nnx.jit
    def run(model: Bodies, x: Any) -> Any:
        def loss(model: Bodies, x: Any) -> Any:
            out = model(x)
            return sum(jnp.sin(3 * y).mean() for y in out.values()), out

        return nnx.value_and_grad(loss, has_aux=True)(model, x)

    found, wanted = (
        run(model, x) for model in (js.fully_shard(Bodies(names), mesh=js.mesh(**mesh), units=Body), Bodies(names))
    )
    results = lambda run, k: [run[0][1][names[k]], *jax.tree.leaves(run[1]["bodies"][k])]
    apart = {name: difference(results(wanted, k), results(found, k)) for k, name in enumerate(names)}
    assert {name: x for name, x in apart.items() if not x < 1e-5} == {}
