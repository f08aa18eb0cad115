"""Primitives that act along some dims of their operands, and on all others as on a batch."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jshard.engine.rules.building_blocks import run_on_free_dim, same, split_all, split_dim
from jshard.engine.rules.index_dims import concatenated_index_dims
from jshard.engine.rules.registry import IN_ALL, Partitioner, inverse_rule, rule
from jshard.engine.rules.values import Value, type_of

# ---- scans, sorts, joins

_NO_PADDING = (0, 0, 0)
"""Low, high and interior padding of a dim that stays as it is."""


# The first group is linear: each element of its results is an element of an operand, a padding value, or a sum of
# elements. Of a product, a largest or a sorted element that does not hold.
@rule("cumsum", "split", "rev", "tile", "pad", linear=IN_ALL)
@rule("cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "approx_top_k", "fft")
def along_dims(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Runs on each shard. If it acts along the split dim, the operands are split along another one for that time."""
    # Along the split dim no shard can compute its part alone: a cumulative sum needs those before it, a sort all.
    return run_on_free_dim(p, eqn, operands, acts_along(eqn))


def acts_along(eqn: JaxprEqn) -> Sequence[int]:
    """Returns the dims that an equation of `along_dims` or `concatenate` acts along."""
    params = eqn.params
    ndim = type_of(eqn.invars[0]).ndim
    match eqn.primitive.name:
        case "fft":
            num_transformed = len(params["fft_lengths"])
            return range(ndim - num_transformed, ndim)
        case "rev":
            return params["dimensions"]
        case "tile":
            return [d for d, num_copies in enumerate(params["reps"]) if num_copies != 1]
        case "pad":
            return [d for d, padding in enumerate(params["padding_config"]) if tuple(padding) != _NO_PADDING]
        case "sort" | "concatenate":
            dim = params["dimension"]
        case "approx_top_k":
            dim = params["reduction_dimension"]
        case _:
            dim = params["axis"]
    return [dim % ndim]


@inverse_rule("cumsum", "cumprod", "cummax", "cummin", "split", "rev", "tile", "concatenate")
@inverse_rule("sort", is_costly=True)
def _along_dims_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int] | None:
    if dim in acts_along(eqn):
        return None  # a shard of the operands does not have what a shard of the result is computed from
    return [dim] * len(operands)


@inverse_rule("pad")
def _pad_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int | None]:
    """Splits the padded array alone; what it is padded with is a scalar."""
    return [dim, None]


@rule("concatenate", linear=IN_ALL)
def concatenate(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Joins shards like `along_dims`, and notes which columns of a table of indices count."""
    results = along_dims(p, eqn, operands)
    # Noted on the result itself: what is joined on a shard is no longer known without data, and has no equation to ask.
    if results is not None:
        results[0].index_dims = concatenated_index_dims(eqn, operands)
    return results


# ---- linear algebra


_VECTOR_OPERANDS = {
    "householder_product": (1,),
    "ormqr": (1,),
    "geqp3": (1,),
    "cholesky_update": (1,),
    "tridiagonal_solve": (0, 1, 2),
    "lu_pivots_to_permutation": (0,),
}
"""Positions of operands that are vectors: their last dim is not batched. Of all others, matrices, the last two."""


@rule(
    "cholesky",
    "cholesky_update",
    "eig",
    "eigh",
    "geqp3",
    "geqrf",
    "hessenberg",
    "householder_product",
    "lu",
    "lu_pivots_to_permutation",
    "ormqr",
    "qr",
    "schur",
    "svd",
    "symmetric_product",
    "triangular_solve",
    "tridiagonal",
    "tridiagonal_solve",
)
def linear_algebra(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits leading dims, over which it is batched: those that all operands and results have."""
    dim = split_dim(operands)
    vector_positions = _VECTOR_OPERANDS.get(eqn.primitive.name, ())
    for position, atom in enumerate(eqn.invars):
        num_matrix_dims = 1 if position in vector_positions else 2
        num_batch_dims = type_of(atom).ndim - num_matrix_dims
        if dim >= num_batch_dims:
            return None  # a part of a matrix has not the decomposition of the matrix
    return same(p, eqn, split_all(p, operands, dim), dim)
