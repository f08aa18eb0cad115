"""Gradients in a dtype of their own: what a sum in float32 has is not rounded to parameters in bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jshard as js
from jshard.errors import AnnotationError

WIDTH, ROWS = 64, 32
SMALL = 2.0**-13
"""A sum of all of these is less than half of the last place of bfloat16 beside 1."""

PLACEMENT = js.PlacementPolicy(min_size=1)
PRECISION = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")


def rows() -> np.ndarray:
    """The first of two microbatches has a row of ones; the second has small ones, and none on the same data shard."""
    x = np.zeros((ROWS, WIDTH), np.float32)
    x[0] = 1.0
    x[ROWS // 8 + 1 :: 2] = SMALL
    return x


SUM = 1.0 + rows()[1:, 0].sum()
"""The gradient of each element of the kernel, times the number of rows; it is exact in float32."""


def linear() -> nnx.Linear:
    return nnx.Linear(WIDTH, 16, use_bias=False, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def annotate(model: nnx.Module) -> None:
    js.fully_shard(model, mesh=js.mesh(), placement=PLACEMENT, mixed_precision=PRECISION)


def mean(model: nnx.Module, x: jax.Array) -> jax.Array:
    return model(x.astype(jnp.bfloat16)).astype(jnp.float32).sum() / ROWS


def gradient(model: nnx.Module, grad_dtype: Any, accumulate: int, sync: str) -> jax.Array:
    grad_fn = js.value_and_grad(mean, accumulate=accumulate, sync=sync, grad_dtype=grad_dtype)
    _, grads = nnx.jit(grad_fn)(model, rows())
    if sync == "none":
        grads = nnx.jit(js.reduce_gradients)(model, grads)
    (kernel,) = jax.tree.leaves(grads)
    return kernel


WITHOUT_ROUNDING = [(2, "each"), (2, "last"), (1, "last"), (2, "none"), (1, "none")]


@pytest.mark.parametrize(("accumulate", "sync"), WITHOUT_ROUNDING)
def test_small_gradients_survive_in_float32(accumulate, sync):
    model = js.shard_init(linear, annotate)
    kernel = gradient(model, "float32", accumulate, sync)
    assert kernel.dtype == jnp.float32
    assert kernel.sharding.is_equivalent_to(model.kernel.get_raw_value().sharding, 2)
    np.testing.assert_array_equal(kernel, np.full((WIDTH, 16), SUM / ROWS / accumulate))


@pytest.mark.parametrize(("accumulate", "sync"), WITHOUT_ROUNDING)
def test_in_the_dtype_of_the_parameter_they_are_rounded_away(accumulate, sync):
    kernel = gradient(js.shard_init(linear, annotate), None, accumulate, sync)
    assert kernel.dtype == jnp.bfloat16
    assert not np.any(np.float32(kernel) == SUM / ROWS / accumulate)


def test_plain_differentiation_rounds_once_and_returns_the_dtype():
    kernel = gradient(js.shard_init(linear, annotate), "float32", 1, "each")
    assert kernel.dtype == jnp.float32
    np.testing.assert_allclose(kernel, SUM / ROWS, rtol=2**-8)


def test_aux_of_one_microbatch_is_not_stacked():
    grad_fn = js.value_and_grad(lambda m, x: (mean(m, x), x.sum()), sync="last", has_aux=True, grad_dtype="float32")
    (_, aux), grads = nnx.jit(grad_fn)(js.shard_init(linear, annotate), rows())
    assert aux.shape == ()
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_narrower_than_the_parameters():
    annotate_float32 = lambda model: js.fully_shard(model, mesh=js.mesh(), placement=PLACEMENT)
    build = lambda: nnx.Linear(WIDTH, 16, rngs=nnx.Rngs(0))
    grad_fn = js.value_and_grad(mean, accumulate=2, grad_dtype="bfloat16")
    _, grads = nnx.jit(grad_fn)(js.shard_init(build, annotate_float32), rows())
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("tx", [optax.sgd(0.5), optax.adamw(1e-2)], ids=["sgd", "adamw"])
def test_an_optimizer_takes_them_and_its_state_stays_sharded(tx):
    model = js.shard_init(linear, annotate)
    optimizer = js.shard_optimizer(model, tx)
    grad_fn = js.value_and_grad(mean, accumulate=2, sync="last", grad_dtype="float32")

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> None:
        _, grads = grad_fn(model, x)
        optimizer.update(model, grads)

    before = np.float32(model.kernel[...])
    for _ in range(2):
        step(model, optimizer, rows())
    kernel = model.kernel.get_raw_value()
    assert kernel.dtype == jnp.bfloat16
    assert np.all(np.float32(kernel) < before)
    for x in [kernel, *jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))]:
        if x.ndim:
            assert x.addressable_shards[0].data.size == x.size // 8


def test_a_linen_model_and_its_train_state():
    model = js.fully_shard(
        nn.Dense(16, use_bias=False, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16),
        mesh=js.mesh(),
        placement=PLACEMENT,
        mixed_precision=PRECISION,
    )
    tx = js.shard_optimizer(model, optax.sgd(0.5))

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((ROWS, WIDTH), jnp.bfloat16))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    state = js.shard_init(create, model)
    loss = lambda params, x: mean(lambda x: model.apply({"params": params}, x), x)
    grad_fn = js.value_and_grad(loss, model=model, accumulate=2, sync="last", grad_dtype="float32")
    _, grads = jax.jit(grad_fn)(state.params, rows())
    np.testing.assert_array_equal(grads["kernel"], np.full((WIDTH, 16), SUM / ROWS / 2))
    updated = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(state, grads)
    kernel = updated.params["kernel"]
    assert kernel.dtype == jnp.bfloat16
    assert kernel.addressable_shards[0].data.size == kernel.size // 8


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float33", jnp.complex64], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(AnnotationError, match="Gradients cannot have this dtype"):
        js.value_and_grad(mean, grad_dtype=dtype)
