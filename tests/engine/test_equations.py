"""A step's program is little longer than plain Flax's: what units have in common stands in it once."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core as jex

import jshard as js
from tests import linen_models
from tests.helpers import Config, annotator, builder, fresh, loss_fn, placed, token_batch


def equations(function: Any, *args: Any) -> tuple[int, int]:
    """Equations of a function's program: all, and with a program that several calls share counted once."""
    seen: set[int] = set()

    def count(jaxpr: Any) -> tuple[int, int]:
        every, distinct = len(jaxpr.eqns), 0 if id(jaxpr) in seen else len(jaxpr.eqns)
        seen.add(id(jaxpr))
        for inner in (i for e in jaxpr.eqns for i in jex.jaxprs_in_params(e.params)):
            more, new = count(inner)
            every, distinct = every + more, distinct + new
        return every, distinct

    closed = jax.make_jaxpr(function)(*args)
    return count(closed.jaxpr)


def of_step(model: Any, optimizer: Any, loss: Any, *batch: Any) -> tuple[int, int]:
    graphdef, state = nnx.split((model, optimizer))

    def step(state: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        value, grads = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return value, nnx.state((model, optimizer))

    return equations(step, state, *batch)


@pytest.mark.parametrize(("scanned", "most", "most_distinct"), [(False, 1.3, 0.8), (True, 2.95, 1.75)])
def test_twelve_layers(scanned: bool, most: float, most_distinct: float) -> None:
    config, tx = Config(layers=12, scanned=scanned), optax.adamw(1e-3)
    batch, plain, model = token_batch(config), fresh(builder(config)), placed(builder(config), annotator(js.mesh()))
    every, distinct = of_step(model, js.shard_optimizer(model, tx), loss_fn, *batch)
    plain_every, plain_distinct = of_step(plain, nnx.Optimizer(plain, tx, wrt=nnx.Param), loss_fn, *batch)
    assert every <= most * plain_every
    assert distinct <= most_distinct * plain_distinct


def test_a_loop_is_as_long_for_any_number_of_trips() -> None:
    """And a row of what it is over costs two equations where it is cut, two where it is written."""
    counts = []
    for layers in (4, 12):
        config = Config(layers=layers, scanned=True)
        model = placed(builder(config), annotator(js.mesh()))
        counts.append(equations(nnx.grad(loss_fn), model, *token_batch(config)))
    assert counts[0] == counts[1]


class Masked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.drop = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        for i in range(8):
            x = self.drop(self.dense(x), rngs=jax.random.fold_in(key, i))
        return x


def test_masks_of_dropout_of_one_shape_are_made_by_one_function() -> None:
    model = js.fully_shard(Masked(nnx.Rngs(0)), mesh=js.mesh())
    loss = lambda model, x, key: (model(x, key) ** 2).mean()
    args = np.ones((16, 4, 16), np.float32), jax.random.key(1)
    _, sharded = equations(nnx.grad(loss), model, *args)
    _, plain = equations(nnx.grad(loss), Masked(nnx.Rngs(0)), *args)
    assert sharded <= 2.2 * plain  # whole ones are traced, too, and dropped by the compiler


def test_a_linen_step_has_at_most_half_as_many_equations_more() -> None:
    plain = linen_models.Decoder(depth=4)
    variables = jax.jit(plain.init)(jax.random.key(0), linen_models.X)
    model = js.fully_shard(plain, mesh=js.mesh(), units=linen_models.Block)
    jax.eval_shape(model.init, jax.random.key(0), linen_models.X)
    loss = lambda model: lambda v: linen_models.cross_entropy(model.apply(v, linen_models.X))
    found, wanted = (equations(jax.value_and_grad(loss(m)), variables)[0] for m in (model, plain))
    assert found <= 1.5 * wanted
