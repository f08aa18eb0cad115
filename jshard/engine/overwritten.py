"""Variables whose "gradient" is their next value, as Flax's fp8 products keep them: scales, and the largest seen.

The gradient of what is the same on all data shards is a sum over them. These are no gradients: each shard says what it
has seen of its own examples, and the next value is the largest.
"""

import functools
from typing import Any

import jax
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as COLLECTION
from jax import lax
from jax.flatten_util import ravel_pytree

from jshard.engine.call import Live
from jshard.engine.collectives import vary

__all__ = ["COLLECTION", "Overwritten", "largest_over_shards"]


class Overwritten(nnx.Variable):
    """A variable of Flax's collection `_overwrite_with_gradient`."""


def largest_over_shards(live: Live, axes: tuple[str, ...]) -> None:
    """Makes the next value of each such variable the largest over the data shards: one reduction for all of them."""
    variables = [variable for _, variable in live.variables(Overwritten)]
    if not variables:
        return
    values: Any = _largest(axes, [variable.get_raw_value() for variable in variables])
    for variable, value in zip(variables, values, strict=True):
        variable.set_raw_value(value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _largest(axes: tuple[str, ...], values: list[jax.Array]) -> list[jax.Array]:
    return [vary(x, axes) for x in values]


def _forward(axes: tuple[str, ...], values: list[jax.Array]) -> tuple[list[jax.Array], None]:
    return _largest(axes, values), None


def _backward(axes: tuple[str, ...], _: None, after: list[jax.Array]) -> tuple[list[jax.Array]]:
    together, apart = ravel_pytree(after)
    return (apart(lax.pmax(together, axes)),)


_largest.defvjp(_forward, _backward)
