"""A step's program is little longer than plain Flax's: what units have in common stands in it once."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.extend import core as jex

import jshard as js
from jshard.engine.equality import are_equal
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


@pytest.mark.wide
@pytest.mark.parametrize(("scanned", "most", "most_distinct"), [(False, 1.3, 0.8), (True, 2.95, 1.73)])
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


DIFFER = {
    "order": (lambda x, y: x - y, lambda x, y: y - x),
    "number": (lambda x, y: x * 2.0, lambda x, y: x * 3.0),
    "sign of zero": (lambda x, y: jnp.maximum(x, 0.0), lambda x, y: jnp.maximum(x, -0.0)),
    "setting": (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
    "results": (lambda x, y: (x, x + y), lambda x, y: (x + y, x)),
    "in a call": (jax.jit(lambda x, y: jnp.sin(x) * y), jax.jit(lambda x, y: jnp.cos(x) * y)),
    "in a loop": (
        lambda x, y: jax.lax.fori_loop(0, 3, lambda i, z: z @ y, x),
        lambda x, y: jax.lax.fori_loop(0, 3, lambda i, z: y @ z, x),
    ),
    "derivative": (lambda x, y: jax.nn.relu(x), lambda x, y: own_relu(x)),
    "name": (lambda x, y: x + y, jax.named_call(lambda x, y: x + y, name="layer")),
}


@jax.custom_jvp
@jax.jit
def own_relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


own_relu.defjvps(lambda g, ans, x: 2 * g)


@pytest.mark.parametrize("what", DIFFER)
def test_programs_are_equal_if_nothing_differs(what: str) -> None:
    one, other = DIFFER[what]
    traced = lambda f: jax.make_jaxpr(lambda *args: f(*args))(*[jnp.ones((4, 4))] * 2)
    assert are_equal(traced(one), traced(one))
    assert not are_equal(traced(one), traced(other))
