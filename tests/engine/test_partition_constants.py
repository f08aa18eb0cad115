"""Constants as large as the batch are made on the shard: equal to one device, and never whole on a device."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jshard.engine.partitioner import Partitioner
from jshard.engine.rules.known import positions
from tests.engine.on_shards import AXES, TWO_BY_4, check_on, mesh_of
from tests.wide import wide

BATCH, LENGTH, WIDTH = 40, 6, 11
Array = jax.Array


def spec(state: Any) -> PartitionSpec:
    return PartitionSpec(*[None] * state, AXES) if isinstance(state, int) else PartitionSpec()


def waves(*shape: int) -> Array:
    """Numbers made of positions alone."""
    steps = [lax.broadcasted_iota(jnp.float32, shape, k) * (k + 3) for k in range(len(shape))]
    return jnp.sin(functools.reduce(jnp.add, steps))


def picks(*shape: int) -> Array:
    return (waves(*shape) * 50).astype(int) % 8


FORMS: dict[str, Callable[[], Array]] = {
    "elements": lambda: waves(16, 8)[jnp.arange(16), picks(16)],
    "triangle": lambda: jnp.tril(jnp.ones((16, 16))),
    "identity": lambda: jnp.eye(16, 24),
    "normal": lambda: jax.random.normal(jax.random.key(1), (16, 8, 24)),
    "bits of 8": lambda: jax.random.bits(jax.random.key(2), (8, 5, 16), "uint8"),
    "bits of 16": lambda: jax.random.bits(jax.random.key(2), (8, 5, 16), "uint16"),
    "rounded positions": lambda: lax.bitcast_convert_type(lax.iota(jnp.bfloat16, 8 * 1001), jnp.int16),
    "words as bits": lambda: lax.bitcast_convert_type(picks(16, 8).astype(jnp.uint32), jnp.uint4).astype(int),
    "a key for each row": lambda: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (3,)))(
        jnp.arange(16)
    ),
}


def test_shards_of_constants_are_cut_from_the_same_array() -> None:
    programs = {name: jax.make_jaxpr(form)() for name, form in FORMS.items()}
    wanted = jax.jit(lambda: {name: form() for name, form in FORMS.items()})()
    tried = [(name, dim) for name, x in wanted.items() for dim, n in enumerate(x.shape) if n % 8 == 0]
    made = []

    def body() -> list[Array]:
        found = []
        for name, dim in tried:
            p = Partitioner(AXES, 8)
            (out,) = p.run(programs[name].jaxpr, programs[name].consts, [])
            found.append(p.split(out, dim).x)
            made.append(not p.moved)
        return found

    specs: Any = {"in_specs": (), "out_specs": [spec(dim) for _, dim in tried], "check_vma": False}
    results = jax.jit(jax.shard_map(body, mesh=mesh_of(*TWO_BY_4), **specs))()
    for (name, dim), result in zip(tried, results, strict=True):
        np.testing.assert_allclose(result, wanted[name], rtol=2e-5, atol=2e-5, err_msg=f"{name} along {dim}")
    assert sum(made) >= 0.7 * len(made), (sum(made), len(made))  # the others are cut from the whole


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


def mask() -> Array:
    return jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None], 0.0, -1e9) * jnp.ones((BATCH, 1, 1))


def attend(h: Array, m: Array) -> Array:
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, h) + m), h)


def loop(step: Callable[[Array, Array], Array], trips: int = 3) -> Callable[[Array], Array]:
    return lambda h: lax.scan(lambda c, i: (step(c, i), None), h, jnp.arange(trips))[0]


def kept(key: Array) -> Array:
    return jax.random.bernoulli(key, 0.5, (BATCH, LENGTH, WIDTH))


def dropped(key: Array, h: Array) -> Array:
    return jnp.where(kept(key), jnp.tanh(h), 0)


def places() -> Array:
    return jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))


def with_grad(function: Callable[..., Array]) -> Callable[..., Any]:
    return lambda x, *args: jax.value_and_grad(lambda x: (function(x, *args) ** 2).sum())(x)


def stacked(x: Array, key: Array) -> Array:
    masks = jax.random.bernoulli(key, 0.5, (3, BATCH, LENGTH, WIDTH))
    return lax.scan(lambda c, m: (jnp.where(m, jnp.tanh(c), 0), None), x, masks)[0]


def in_while(x: Array, key: Array) -> Array:
    m = mask()
    step = lambda c: (c[0] + 1, jnp.tanh(attend(c[1], m)) + c[2], c[2] * 0.5)
    return lax.while_loop(lambda c: c[0] < 3, step, (0, x, jnp.ones((BATCH, LENGTH, WIDTH))))[1]


def masked_loop(x: Array, key: Array) -> Array:
    m = mask()
    return loop(jax.checkpoint(lambda c, i: attend(c, m)))(x)


def recurrent(x: Array, key: Array) -> Array:
    return lax.scan(lambda c, r: (jnp.tanh(c + r),) * 2, jnp.zeros((BATCH, WIDTH)), x.transpose(1, 0, 2))[1]


remat = jax.checkpoint
PROGRAMS: dict[str, Callable[..., Any]] = {
    "a mask for a loop of remats": with_grad(masked_loop),
    "a mask in a loop, a hoisted residual": with_grad(lambda x, k: loop(lambda c, i: attend(c, mask()))(x)),
    "a mask in a while": in_while,
    "a mask for a branch": with_grad(
        lambda x, k, m=mask: lax.cond(x.sum() > 0, lambda x, m: attend(x, m), lambda x, m: x + m[..., :1], x, m())
    ),
    "zeros that are carried": with_grad(recurrent),
    "positions into a table": with_grad(lambda x, k: x + jnp.sin(jnp.arange(66.0).reshape(6, 11))[places()]),
    "dropout in a loop of remats": with_grad(
        lambda x, k: loop(remat(lambda c, i: dropped(jax.random.fold_in(k, i), c)))(x)
    ),
    "dropout stacked for a loop": with_grad(stacked),
    "dropout in a while": lambda x, k: lax.fori_loop(0, 3, lambda i, c: dropped(jax.random.fold_in(k, i), c), x),
    "noise": with_grad(lambda x, k: x * jax.random.normal(k, x.shape)),
    "returned": lambda x, k: (x, mask(), places()),
}
SOON = ("a mask for a loop of remats", "zeros that are carried", "dropout in a loop of remats", "noise", "returned")


@pytest.mark.parametrize("name", [name if name in SOON else wide(name) for name in PROGRAMS])
def test_nothing_as_large_as_the_batch_is_on_a_device(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    function = lambda x: PROGRAMS[name](x, jax.random.key(3))
    found = check_on(mesh_of(*TWO_BY_4), function, x, batch=BATCH, gradients=False, tolerance=2e-5)
    whole = {BATCH, BATCH * LENGTH, BATCH * WIDTH, BATCH * LENGTH * WIDTH}
    shapes = re.findall(r"\b\w+\[([\d,]+)\]", found.compiled.as_text() or "")
    assert [shape for shape in shapes if whole & set(map(int, shape.split(",")))] == []
