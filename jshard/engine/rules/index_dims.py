"""Indices that count up along a dim: by these, each shard finds its own rows in its own shard of a table.

`x[jnp.arange(n), labels]` takes one element of each row. JAX makes it a gather with a table of indices, one row of
columns for each element to take:

    table of indices       column 0 counts dim 0: it is the position itself
        [0, labels[0]]
        [1, labels[1]]     <- row 1 of the table of indices reads row 1 of x
        [2, labels[2]]

So if both are split along dim 0, no shard reads another's rows. Nothing says so but how the column was computed: from
an `iota`, by operations that keep it an index. `PrimitiveRecord.index_dim` says which do.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jshard.engine.rules.registry import record_of
from jshard.engine.rules.values import Value, type_of


def index_dim_of(value: Value) -> int | None:
    """Returns the dim whose index a value is at each position; None if it is none that is known without data."""
    provenance = value.provenance
    if provenance is None:
        return None
    find = record_of(provenance.eqn).index_dim
    if find is None:
        return None
    return find(provenance.eqn, provenance.operands)


def index_dims_of(indices: Value) -> dict[int, int]:
    """Returns which columns of a table of indices count which dim."""
    # A table of indices known without data has no `index_dims` yet: no rule has run on shards of it.
    provenance = indices.provenance
    if not indices.index_dims and provenance is not None and provenance.name == "concatenate":
        return concatenated_index_dims(provenance.eqn, provenance.operands)
    return indices.index_dims


def concatenated_index_dims(eqn: JaxprEqn, operands: Sequence[Value]) -> dict[int, int]:
    """Returns which columns of a concatenation count another dim; none unless the columns are joined."""
    result_type = type_of(eqn.outvars[0])
    last_dim = result_type.ndim - 1
    if eqn.params["dimension"] != last_dim or not jnp.issubdtype(result_type.dtype, jnp.integer):
        return {}
    index_dims: dict[int, int] = {}
    first_column = 0
    for atom, operand in zip(eqn.invars, operands, strict=True):
        num_columns = type_of(atom).shape[last_dim]
        dim = index_dim_of(operand)
        # Shards are split along other dims than that of the columns: to count along it says nothing of them.
        if dim is not None and dim != last_dim:
            for column in range(num_columns):
                index_dims[first_column + column] = dim
        # The operand may itself be a table of indices, of columns that count different dims.
        for column, dim_of_column in operand.index_dims.items():
            index_dims[first_column + column] = dim_of_column
        first_column += num_columns
    return index_dims
