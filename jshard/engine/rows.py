"""Arrays with a row per layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard.engine.collectives import vary


def take(rows: Any, i: Any) -> Any:
    """Row i of every array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), rows)


def put(rows: Any, i: Any, values: Any) -> Any:
    """The rows with row i written, the last one if i is beyond it."""
    return jax.tree.map(lambda x, v: lax.dynamic_update_index_in_dim(x, v.astype(x.dtype), i, 0), rows, values)


def like(x: jax.Array) -> jax.Array:
    """Rows of an array's type, to be written."""
    return _rows(jax.typeof(x), x.shape)


def empty(aval: Any, length: int) -> jax.Array:
    """Rows of a type, to be written."""
    return _rows(aval, (length, *aval.shape))


def _rows(aval: Any, shape: tuple[int, ...]) -> jax.Array:
    """Zeros; in host memory, if that is where the type lies."""
    rows = _compat.host_rows(shape, aval.dtype) if _compat.on_host(aval) else jnp.zeros(shape, aval.dtype)
    return vary(rows, tuple(aval.manual_axis_type.varying))
