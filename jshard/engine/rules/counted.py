"""Indices that count a dim, as in `logits[arange(batch), labels]`: a shard finds its rows in its own part.

Such a column of indices equals the index along a dim of the indices. Where both that dim and the dim of the operand are
split, the shard's offset is subtracted, and nothing is gathered.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._compat import is_tracer
from jshard.engine.values import Eqn, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


def counted_columns(eqn: Eqn, values: Sequence[Value]) -> dict[int, int]:
    """Columns of a concatenation along the last dim that count another dim."""
    last = eqn.outvars[0].aval.ndim - 1
    if eqn.params["dimension"] != last or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
        return {}
    found, column = {}, 0
    for atom, value in zip(eqn.invars, values, strict=True):
        dim = counted_dim(value)
        if dim is not None and dim != last:
            found.update(dict.fromkeys(range(column, column + atom.aval.shape[last]), dim))
        found.update({column + inner: dim for inner, dim in value.counted.items()})
        column += atom.aval.shape[last]
    return found


def columns(value: Value) -> dict[int, int]:
    """The columns of indices that count a dim."""
    if not value.counted and value.source is not None and value.source.eqn.primitive.name == "concatenate":
        return counted_columns(value.source.eqn, value.source.values)
    return value.counted


def counted_dim(value: Value) -> int | None:
    """The dim of which a known value is the index at each place; None if it is not."""
    if value.source is None:
        return None
    eqn, values, _ = value.source
    shape = eqn.outvars[0].aval.shape
    inner = None if eqn.primitive.name in ("iota", "select_n") else counted_dim(values[0])
    match eqn.primitive.name:
        case "iota":
            return eqn.params["dimension"]
        case "copy" | "name":
            return inner
        case "convert_element_type":
            new = eqn.params["new_dtype"]
            fits = inner is not None and jnp.issubdtype(new, jnp.integer) and shape[inner] - 1 <= jnp.iinfo(new).max
            return inner if fits else None
        case "broadcast_in_dim":
            if inner is None:
                return None
            outer = eqn.params["broadcast_dimensions"][inner]
            return outer if values[0].shape[inner] == shape[outer] else None
        case "reshape" | "squeeze":  # of dims of size 1
            old = values[0].shape
            if inner is None or (eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None):
                return None
            if [n for n in old if n != 1] != [n for n in shape if n != 1] or old[inner] == 1:
                return None
            return [i for i, n in enumerate(shape) if n != 1][[i for i, n in enumerate(old) if n != 1].index(inner)]
        case "select_n":  # where(i < 0, i + n, i)
            return counted_dim(values[1]) if _is_never(values[0]) else None
    return None


def _is_never(value: Value) -> bool:
    """Whether a predicate is `index < 0`."""
    if value.source is None or value.source.eqn.primitive.name != "lt":
        return False
    left, right = value.source.values
    if is_tracer(right.x) or counted_dim(left) is None:
        return False
    return bool((np.asarray(right.x) <= 0).all())


def on_shard(p: "Partitioner", indices: Value, column: int, start: Any) -> jax.Array:
    """Split indices, of which a column counts from the first row of this shard.

    Args:
        p: the partitioner.
        indices: split along the dim that the column counts.
        column: which.
        start: index of the shard's first row.
    """
    is_column = jnp.arange(indices.shape[-1]).reshape((1,) * (indices.ndim - 1) + (-1,)) == column
    return indices.x - jnp.where(is_column, start.astype(indices.x.dtype), 0).astype(indices.x.dtype)
