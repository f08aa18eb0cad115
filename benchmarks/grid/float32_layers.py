"""Flax layers that compute in bfloat16, and whose products give gradients of weights in float32.

Parameters that are cast before a layer have gradients in bfloat16, and so GSPMD adds them up over devices in
bfloat16. Here the cast is inside the product: its gradient is a float32 array before it is added up. Nothing else of
the model changes. Gradients of biases remain in bfloat16; they are few.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.recipes.model_file import ModelFile, load_model_file

M = TypeVar("M")
Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

_MODELS = Path(__file__).parents[2] / "models"
_LOW = jnp.bfloat16


def changed_model_file(name: str) -> ModelFile:
    """Returns a model file of `models`, whose models have these layers."""
    shipped = load_model_file(_MODELS / f"{name}.py")

    def build(config: Any, rngs: nnx.Rngs) -> Any:
        return with_float32_gradients(shipped.build(config, rngs))

    return dataclasses.replace(shipped, build=build)


def with_float32_gradients(model: M) -> M:
    """Changes the layers of a model, in place, and returns it."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral):
            module.promote_dtype = _inputs_promoted
            module.dot_general = _dot_general
        elif isinstance(module, nnx.LayerNorm | nnx.RMSNorm):
            module.dtype = _LOW
        elif isinstance(module, nnx.Embed):
            module.__class__ = _Table
    return model


def _inputs_promoted(arrays: tuple[Any, ...], **_: object) -> tuple[Any, ...]:
    """Casts all but the weights, which `product` casts."""
    inputs, kernel, bias = arrays
    return inputs.astype(_LOW), kernel, None if bias is None else bias.astype(_LOW)


def _dot_general(inputs: jax.Array, kernel: jax.Array, dims: Dims, **_: object) -> jax.Array:
    (contracted, _), _ = dims
    return product(inputs, kernel, len(contracted))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, kernel: jax.Array, num_contracted: int) -> jax.Array:
    """Multiplies the last dims of `x` with the first ones of a float32 kernel, in the dtype of `x`."""
    return jnp.tensordot(x, kernel.astype(x.dtype), num_contracted)


def _forward(x: jax.Array, kernel: jax.Array, num_contracted: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Backward reads what forward has cast, as in the derivative of a cast and a product.
    cast = kernel.astype(x.dtype)
    return jnp.tensordot(x, cast, num_contracted), (x, cast)


def _backward(
    num_contracted: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    num_rows = x.ndim - num_contracted  # the dims that the result shares with x
    rows = tuple(range(num_rows))
    of_result = tuple(range(num_rows, gradient.ndim))
    of_kernel = tuple(range(num_contracted, kernel.ndim))
    of_x = lax.dot_general(gradient, kernel, ((of_result, of_kernel), ((), ())))
    of_weights = lax.dot_general(x, gradient, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return of_x, of_weights


product.defvjp(_forward, _backward)


@jax.custom_vjp
def rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of a table in bfloat16."""
    return jnp.take(table.astype(_LOW), ids, axis=0)


def _rows_forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rows_of(table, ids), (table, ids)


def _rows_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, ids = saved
    return jnp.zeros_like(table).at[ids].add(gradient.astype(table.dtype)), None


rows_of.defvjp(_rows_forward, _rows_backward)


class _Table(nnx.Embed):
    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        return rows_of(self.embedding[...], inputs)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        return product(query.astype(_LOW), self.embedding[...].T, 1)
