"""Microbatches of a Linen model: the gradients of the whole batch, with one gather and one reduction at the end."""

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jshard as js
from tests.helpers import compile_to_read
from tests.linen.test_linen import Layer, Scanned
from tests.linen_models import VOCAB, Block, Decoder, X, Y, assert_same, cross_entropy

STEPS = 2


def loss_of(model: nn.Module, params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss, with a penalty in global view over what may be boxes."""
    penalty = sum((x**2).sum() for x in jax.tree.leaves(params))
    return cross_entropy(model.apply({"params": params}, ids), labels) + 1e-3 * penalty


def gradients(model: nn.Module, **settings: Any) -> Any:
    """Loss and gradients over microbatches."""
    loss_fn = functools.partial(loss_of, model)
    return js.value_and_grad(loss_fn, model=model, accumulate=STEPS, **settings)


class Odd(nn.Module):
    """A table that no dim divides, and one boxed for an axis that the mesh may have."""

    @nn.compact
    def __call__(self, ids):
        named = nn.with_partitioning(nn.initializers.normal(0.1), (None, "tensor"))
        x = nn.Embed(VOCAB + 1, 130, name="table")(ids)
        return nn.Dense(VOCAB, kernel_init=named)(Block(130)(x))


@pytest.mark.parametrize(
    ("plain", "degrees", "sync"),
    [
        (Decoder(depth=2), {}, "last"),
        (Odd(), {"tensor": 2}, "each"),
    ],
    ids=["zero3-last", "padded-each"],
)
def test_gradients_equal_those_of_one_device(plain, degrees, sync):
    model = js.fully_shard(plain, mesh=js.mesh(**degrees), units=Block)
    js.shard_optimizer(model, optax.sgd(1.0))  # the table of one is padded
    params = js.shard_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    found, grads = jax.jit(gradients(model, sync=sync))(params, X, Y)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
    assert all(g.sharding.is_equivalent_to(p.sharding, p.ndim) for g, p in pairs if any(p.sharding.spec))
    logical = nn.unbox(jax.device_get(params))
    wanted = jax.jit(jax.value_and_grad(lambda params: loss_of(plain, params, X, Y)))(logical)
    assert_same((found, nn.unbox(grads)), wanted)


def test_the_compiled_step_sends_what_was_asked():
    model = js.fully_shard(Scanned(), mesh=js.mesh(), units=Layer)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    loss_fn = lambda params, ids, labels: cross_entropy(model.apply({"params": params}, ids), labels)
    run = js.value_and_grad(loss_fn, model=model, accumulate=STEPS, sync="last")
    program = compile_to_read(jax.jit(run).lower(params, X, Y))
    found = js.audit(program, model=model, accumulate=STEPS, sync="last")
    assert not found.differences
    gathered = sum(w.full_bytes * w.executions for w in found.schedule.windows if w.kind == "all-gather")
    reduced = sum(w.full_bytes * w.executions for w in found.schedule.windows if w.kind == "reduce-scatter")
    whole = js.plan(model).logical_bytes
    assert (gathered / whole, reduced / whole) == pytest.approx((1, 1), rel=0.05)


def test_every_microbatch_draws_its_own_dropout_mask():
    model = js.fully_shard(Decoder(depth=1, rate=0.5), mesh=js.mesh(), units=Block)
    params = model.init(jax.random.key(0), X, train=False)["params"]

    def loss_fn(params, ids, labels, key):
        logits = model.apply({"params": params}, ids, rngs={"dropout": key})
        return cross_entropy(logits, labels), logits

    key, half = jax.random.key(1), [slice(i, None, STEPS) for i in range(STEPS)]
    run = js.value_and_grad(loss_fn, model=model, accumulate=STEPS, sync="each", has_aux=True)
    (_, found), _ = jax.jit(run)(params, X, Y, key)
    for i, its in enumerate(jax.random.split(key, STEPS)):
        np.testing.assert_allclose(found[i], jax.jit(loss_fn)(params, X[half[i]], Y[half[i]], its)[1], atol=1e-5)
