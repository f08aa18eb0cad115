"""Loops on pipeline stages, in every form and setting: the loss, gradients and state of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jshard as js
from jshard.plans.stages import Stages
from tests.engine.one_device import assert_equal, nnx_results
from tests.engine.staged_models import (
    LAYERS,
    LENGTH,
    RANDOM,
    WEIGHT,
    WIDTH,
    Layer,
    X,
    Y,
    assert_parity,
    staged_mesh,
    weighted_loss,
)
from tests.helpers import fresh

pytestmark = [
    pytest.mark.usefixtures("ranks_as_users_have_them"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what an operation over the batch costs
]
ALL = {"min_size": 1}

# ---- forms


class StackedTower(nnx.Module):
    """Layers stacked by `nnx.vmap`: in `js.scan_layers`, in `nnx.scan`, or in that with `nnx.remat` inside."""

    def __init__(self, rngs: nnx.Rngs, form: str) -> None:
        self.form = form
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        if self.form == "js.scan_layers":
            return js.scan_layers(self.layers, x)
        run = lambda x, layer: layer(x)
        if self.form == "nnx.remat":
            run = nnx.remat(run)
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.parametrize("form", ["js.scan_layers", "nnx.scan", "nnx.remat"])
def test_stacked(form):
    build = lambda: StackedTower(nnx.Rngs(0), form)
    wanted = nnx_results(fresh(build), weighted_loss, X, Y, WEIGHT)
    model = fresh(build)
    js.fully_shard(model.layers, mesh=staged_mesh(), placement=js.PlacementPolicy(stacked=1, min_size=1))
    js.fully_shard(model, mesh=staged_mesh())
    assert_equal(nnx_results(model, weighted_loss, X, Y, WEIGHT), wanted)


class Rich(nnx.Module):
    """A layer with all that is hard but right: see `RichTower`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.direction = nnx.BatchStat(jnp.ones(WIDTH) / 4)  # as of a spectral norm: of the weights alone
        self.load = nnx.BatchStat(jnp.zeros(WIDTH))  # a mean over all examples, which the layer does not read

    def __call__(self, carry: dict, rows: dict, mask: jax.Array, positions: jax.Array, bias: jax.Array) -> Any:
        self.calls[...] += 1
        w = self.up.kernel[...]
        u = w @ (w.T @ self.direction[...])
        self.direction[...] = u / jnp.linalg.norm(u)
        x = carry["x"]
        h = x * mask[..., None] + rows["cache"] + bias + jnp.sin(positions)[:, None]
        window = jnp.abs(positions[:, None] - positions[None]) <= rows["window"]
        h = jnp.einsum("ts,bsd->btd", window / window.sum(-1, keepdims=True), h)
        h = jax.nn.gelu(self.up(h))
        h = self.dropout(h)
        h = self.down(h)
        h = lax.cond(rows["flag"], lambda h: 2 * h, jnp.sin, h)

        def over_time(state, x):
            state = jnp.tanh(0.5 * state + x)
            return state, state

        _, over = lax.scan(over_time, jnp.zeros_like(h[:, 0]), jnp.moveaxis(h, 1, 0))
        h = h + jnp.moveaxis(over, 0, 1)
        h = lax.fori_loop(0, 3, lambda i, h: h * 0.9 + 0.01 * i, h)
        self.load[...] = 0.9 * self.load[...] + 0.1 * lax.stop_gradient(h).mean((0, 1))
        x = x + h
        return {"x": x, "depth": carry["depth"] + 1, "seen": carry["seen"] | (x > 3).any((1, 2))}, {
            "kv": h,
            "per_example": (h**2).mean((1, 2)),
            "sum": h.sum((0, 1)),
            "depth": carry["depth"],
        }


class RichTower(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Rich(rngs) for _ in range(LAYERS)])
        self.bias = nnx.Param(0.1 * jax.random.normal(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        mask = (x.sum(-1) > -3).astype(jnp.float32)
        carry = {"x": x, "depth": jnp.zeros((), jnp.int32), "seen": jnp.zeros(x.shape[0], bool)}
        rows = {
            "cache": jnp.stack([x * i for i in range(LAYERS)]),
            "window": jnp.arange(LAYERS),
            "flag": jnp.arange(LAYERS) % 2 == 0,
        }
        carry, outs = js.scan_layers(
            self.layers, carry, mask, jnp.arange(LENGTH, dtype=jnp.float32), self.bias[...], xs=rows, collect=True
        )
        balance = (outs["sum"] / x.shape[0]) ** 2  # a product of sums over the batch, outside of the loop
        y = carry["x"] + outs["kv"].sum(0)
        return y + balance.mean() + outs["per_example"].mean(), (carry["depth"], carry["seen"], outs)


@pytest.mark.parametrize("settings", [{}, {"remat": "full"}])
@pytest.mark.parametrize(
    "stages", [None, Stages(microbatches=4), Stages(microbatches=4, late=True), Stages(rounds=1)], ids=str
)
def test_rich(settings, stages):
    assert_parity(lambda: RichTower(nnx.Rngs(0)), Rich, stages=stages, **settings)


class TwoTowers(nnx.Module):
    def __init__(self, rngs):
        self.encoder = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.decoder = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        memory = js.scan_layers(self.encoder, x)
        return js.scan_layers(self.decoder, jnp.flip(x, 1), jnp.concatenate([memory, memory], -1))


def test_two_towers():
    assert_parity(lambda: TwoTowers(nnx.Rngs(0)))


class OuterRows(nnx.Module):
    """The loop reads rows of a parameter of the root beside its units, and rows of two units."""

    def __init__(self, rngs):
        stack = lambda make: nnx.split_rngs(splits=LAYERS)(nnx.vmap(make))(rngs)
        self.a, self.b = stack(Layer), stack(Layer)
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (LAYERS, WIDTH)))
        self.mix = nnx.Param(0.1 * jax.random.normal(rngs.params(), (LAYERS, WIDTH, 2 * WIDTH)))

    def __call__(self, x):
        def run(x, a, b, scale, mix):
            x = a(x, 0.1 * jnp.tanh(x @ mix)) * scale
            return b(x)

        run = nnx.scan(run, in_axes=(nnx.Carry, 0, 0, 0, 0), out_axes=nnx.Carry)
        return run(x, self.a, self.b, self.scale[...], self.mix[...])


def test_rows_of_two_units_and_of_the_root():
    build = lambda: OuterRows(nnx.Rngs(0))
    wanted = nnx_results(fresh(build), weighted_loss, X, Y, WEIGHT)
    model = fresh(build)
    for layers in (model.a, model.b):
        js.fully_shard(layers, mesh=staged_mesh(), placement=js.PlacementPolicy(stacked=1, min_size=1))
    js.fully_shard(model, mesh=staged_mesh(), placement=js.PlacementPolicy(min_size=1))
    assert_equal(nnx_results(model, weighted_loss, X, Y, WEIGHT), wanted)


class Coincidence(nnx.Module):
    """Its sequences are as long, and its layers as wide, as the batch is large."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)
        self.scales = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (LAYERS, WIDTH)))
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (WIDTH,)))
        self.state = nnx.BatchStat(jnp.ones((LAYERS, WIDTH)))

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))

        def run(x, layer, scale, state):
            x = x * scale * self.scale[...]
            x = jnp.einsum("ts,bsd->btd", mask / mask.sum(-1, keepdims=True), x)
            x = jnp.where(jnp.arange(x.shape[1])[:, None] > 2, x, 1.01 * x)
            state = state * jnp.linalg.norm(state * scale)
            return layer(x, 0.1), state

        x, self.state[...] = nnx.scan(run, in_axes=(nnx.Carry, 0, 0, 0), out_axes=(nnx.Carry, 0))(
            x, self.layers, self.scales[...], self.state[...]
        )
        return x


def test_dims_as_large_as_the_batch():
    x, y = RANDOM.standard_normal((2, WIDTH, WIDTH, WIDTH)).astype(np.float32)
    batch = (x, y, np.linspace(0, 1, WIDTH, dtype=np.float32))
    build = lambda: Coincidence(nnx.Rngs(0))
    wanted = nnx_results(fresh(build), weighted_loss, *batch)
    model = fresh(build)
    js.fully_shard(model.layers, mesh=staged_mesh(), placement=js.PlacementPolicy(stacked=1, min_size=1))
    js.fully_shard(model, mesh=staged_mesh())
    assert_equal(nnx_results(model, weighted_loss, *batch), wanted)
