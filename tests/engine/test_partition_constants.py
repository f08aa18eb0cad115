"""Constants and random numbers as large as the batch are made on the shard: equal to one device, and never whole."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.engine.rules.data_free import positions
from tests.engine.on_shards import TWO_BY_4, check_on, mesh_of

BATCH, LENGTH, WIDTH = 40, 6, 11
Array = jax.Array


def test_positions_are_those_of_the_whole_array_beyond_32_bits() -> None:
    shapes = [((512 * 8, 1024, 8192), 0, 512), ((8, 4096 * 16, 4096, 64), 1, 64), ((1 << 20, 1 << 20, 1 << 10), 1, 8)]
    shapes += [((8, 1 << 16, 1 << 13), 1, 8), ((64, 1 << 16, 1 << 10), 0, 8)]  # the last that one word holds
    for shape, dim, shards in shapes:
        strides = [int(np.prod(np.asarray(shape[i + 1 :], object), initial=1)) for i in range(len(shape))]
        rows = shape[dim] // shards
        for shard in (0, shards - 1):
            start = [shard * rows if i == dim else 0 for i in range(len(shape))]
            high, low = positions([3] * len(shape), shape, dim, jnp.uint32(start[dim]))
            for at in np.ndindex(*high.shape):
                want = sum((i + s) * stride for i, s, stride in zip(at, start, strides, strict=True))
                assert int(high[at]) << 32 | int(low[at]) == want % 2**64


# ---- What users make of constants and keys ------------------------------------------------------

KEY = lambda: jax.random.key(3)
still, remat = lax.stop_gradient, jax.checkpoint


def mask(x: Array) -> Array:
    """A mask for each example."""
    return jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None], 0.0, -1e9) * jnp.ones((len(x), 1, 1))


def attend(x: Array, m: Array) -> Array:
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x) + m), x)


def loop(x: Array, step: Callable[[Any, Array], Any], trips: int = 3) -> Any:
    """A loop that is differentiated backwards."""
    return lax.scan(lambda c, i: (step(c, i), None), x, jnp.arange(trips))[0]


def kept(x: Array, key: Array | None = None) -> Array:
    return jax.random.bernoulli(KEY() if key is None else key, 0.5, x.shape)


def dropped(x: Array, i: Any = None) -> Array:
    return jnp.where(kept(x, i if i is None else jax.random.fold_in(KEY(), i)), jnp.tanh(x), 0)


def places(x: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(LENGTH), (len(x), LENGTH))


def stacked(x: Array) -> Array:
    masks = jax.random.bernoulli(KEY(), 0.5, (3, *x.shape))
    return lax.scan(lambda c, m: (jnp.where(m, jnp.tanh(c), 0), None), x, masks)[0]


def key_in_the_carry(x: Array) -> Array:
    def step(carry: Any, i: Array) -> Any:
        now, key = jax.random.split(carry[1])
        return jnp.where(kept(carry[0], now), jnp.tanh(carry[0]), 0), key

    return loop((x, KEY()), step)[0]


def recurrent(x: Array) -> Array:
    return lax.scan(lambda c, r: (jnp.tanh(c + r),) * 2, jnp.zeros((len(x), WIDTH)), x.transpose(1, 0, 2))[1]


def while_masked(x: Array) -> Array:
    step = lambda c: (c[0] + 1, jnp.tanh(attend(c[1], mask(x))) + c[2], c[2] * 0.5)
    return x * lax.while_loop(lambda c: c[0] < 3, step, (0, still(x), jnp.ones(x.shape)))[1]


TABLE = jnp.arange(66.0).reshape(LENGTH, WIDTH)
GROUPS: dict[str, dict[str, Callable[[Array], Any]]] = {
    "masks": {
        "plain": lambda x: attend(x, mask(x)),
        "under jit": lambda x: jax.jit(attend)(x, mask(x)),
        "under remat": lambda x: remat(lambda x: attend(x, mask(x)))(x),
        "into remat": lambda x: remat(attend)(x, mask(x)),
        "in a loop": lambda x: loop(x, lambda c, i: attend(c, mask(c))),
        "into a loop of remats": lambda x: (lambda m: loop(x, remat(lambda c, i: attend(c, m))))(mask(x)),
        "into a loop in a loop": lambda x: (lambda m: loop(x, lambda c, i: loop(c, lambda c, i: attend(c, m), 2)))(
            mask(x)
        ),
        "into a branch": lambda x: lax.cond(x.sum() > 0, attend, lambda x, m: x + m[..., :1] * 1e-9, x, mask(x)),
        "in a while": while_masked,
        "returned": lambda x: (x, mask(x) < 0, places(x)),
    },
    "places": {
        "zeros that are carried": recurrent,
        "ones that are carried": lambda x: loop((x, jnp.ones(x.shape)), lambda c, i: (jnp.tanh(c[0]) + c[1], c[1] / 2))[
            0
        ],
        "carried": lambda x: loop((places(x), x), lambda c, i: (c[0] + 1, c[1] * jnp.cos(c[0])[..., None]))[1],
        "into a table": lambda x: x + jnp.sin(TABLE)[places(x)],
        "by one-hot": lambda x: x * (jax.nn.one_hot(places(x), LENGTH) @ TABLE),
        "rotary": lambda x: x * jnp.cos(places(x)[..., None] * (10.0 ** -jnp.arange(WIDTH))[None, None]),
        "labels": lambda x: x[:, 0] * jax.nn.one_hot(jnp.arange(len(x)) % WIDTH, WIDTH),
    },
    "random": {
        "dropout": dropped,
        "of an old key": lambda x: x * kept(x, jax.random.PRNGKey(0)),
        "over time": lambda x: x * jax.random.bernoulli(KEY(), 0.5, (len(x), 1, WIDTH)),
        "time first": lambda x: x * jax.random.bernoulli(KEY(), 0.5, (LENGTH, len(x), WIDTH)).swapaxes(0, 1),
        "flat": lambda x: x * jax.random.bernoulli(KEY(), 0.5, (len(x) * LENGTH, WIDTH)).reshape(x.shape),
        "noise": lambda x: x * jax.random.normal(KEY(), x.shape),
        "truncated": lambda x: x * jax.random.truncated_normal(KEY(), -2, 2, x.shape),
        "gumbel": lambda x: x + jax.random.gumbel(KEY(), x.shape),
        "whole numbers": lambda x: x * jax.random.randint(KEY(), x.shape, 0, 9),
        "categories": lambda x: (jax.random.categorical(KEY(), still(x)), x),
        "in a loop": lambda x: loop(x, dropped),
        "in a loop of remats": lambda x: loop(x, remat(dropped)),
        "one for a loop": lambda x: (lambda m: loop(x, lambda c, i: jnp.where(m, jnp.tanh(c), 0)))(kept(x)),
        "stacked for a loop": stacked,
        "a key in the carry": key_in_the_carry,
        "in a while": lambda x: x * lax.fori_loop(0, 3, lambda i, c: dropped(c, i), still(x)),
        "in a branch": lambda x: lax.cond(x.sum() > 0, dropped, lambda x: x, x),
        "jitted and recomputed": lambda x: remat(jax.jit(dropped))(x),
    },
}


@pytest.mark.parametrize("group", GROUPS)
def test_they_equal_one_device_and_nothing_as_large_as_the_batch_is_on_a_device(group: str) -> None:
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)

    def function(x: Array) -> Any:
        return [value_and_gradient(one, x) for one in GROUPS[group].values()]

    found = check_on(mesh_of(*TWO_BY_4), function, x, batch=BATCH, gradients=False, tolerance=2e-5)
    whole = {BATCH, BATCH * LENGTH, BATCH * WIDTH, BATCH * LENGTH * WIDTH}
    shapes = re.findall(r"\b\w+\[([\d,]+)\]", found.compiled.as_text() or "")
    assert [shape for shape in shapes if whole & set(map(int, shape.split(",")))] == []


def value_and_gradient(function: Callable[[Array], Any], x: Array) -> Any:
    """Every float that comes out has a say in the gradient."""
    floats = lambda out: [y for y in jax.tree.leaves(out) if jnp.issubdtype(y.dtype, jnp.floating)]
    loss = lambda x: (lambda out: (sum((jnp.sin(y) ** 2).sum() for y in floats(out)), out))(function(x))
    return jax.value_and_grad(loss, has_aux=True)(x)
