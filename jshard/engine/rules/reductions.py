"""Products, reductions, sorts, windows, linear algebra: along some dims, and batched over the others."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.engine.rules import (
    PARTIAL,
    Eqn,
    Partitioner,
    Value,
    beside,
    can_be_partial,
    data_free,
    rule,
    same,
    shared_dim,
    split_dim,
)
from jshard.engine.rules.shapes import counted_columns
from jshard.plans.policies import wide_dtype


def free_dims(ndim: int, *taken: Sequence[int]) -> list[int]:
    """The dims of an operand that are neither contracted nor batched."""
    return [i for i in range(ndim) if not any(i in dims for dims in taken)]


def flops(eqn: Eqn) -> float:
    """Floating-point operations of a product in global view; 0 of any other equation."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    elif eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        terms = math.prod(kernel) // max(kernel[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    elif eqn.primitive.name == "ragged_dot_general":
        numbers, sizes = eqn.params["ragged_dot_dimension_numbers"], eqn.invars[2].aval.shape
        (contracted, _), _ = numbers.dot_dimension_numbers
        terms = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        if set(numbers.lhs_ragged_dimensions) & set(contracted):  # a result for each group, of its own rows
            terms = terms / max(sizes[-1], 1)
    else:
        return 0
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * terms


@rule("dot_general")
def dot_general(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batch dims: each shard its part. Contracted dims: partial. A free dim: the other operand is whole."""
    left, right = values
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    for mine, theirs in ((lb, rb), (lc, rc)):
        at = shared_dim(left, right, mine, theirs)
        if at is not None:
            if mine is lc and not can_be_partial(left):
                return None  # of bools, any of the products
            both = [p.split(left, mine[at]), p.split(right, theirs[at])]
            return same(p, eqn, both, at if mine is lb else PARTIAL)
    free_left, free_right = free_dims(left.ndim, lc, lb), free_dims(right.ndim, rc, rb)
    if left.is_split and (not right.is_split or left.bytes >= right.bytes):
        return same(p, eqn, [left, p.whole(right)], len(lb) + free_left.index(left.dim))
    return same(p, eqn, [p.whole(left), right], len(lb) + len(free_left) + free_right.index(right.dim))


@data_free("dot_general", is_costly=True)
def _dot_general_operands(eqn: Eqn, values: Sequence[Value], dim: int) -> Sequence[int | None]:
    """Returns the dims of a result in their order: batch dims of both operands, then free dims of each."""
    left, right = values
    (left_contracted, right_contracted), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if dim < len(left_batch):
        return [left_batch[dim], right_batch[dim]]
    dim -= len(left_batch)
    left_free = free_dims(left.ndim, left_contracted, left_batch)
    if dim < len(left_free):
        return [left_free[dim], None]
    right_free = free_dims(right.ndim, right_contracted, right_batch)
    return [None, right_free[dim - len(left_free)]]


@rule("conv_general_dilated")
def conv_general_dilated(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The batch, or a kernel's output features, as they are; contracted input features: partial."""
    (left, right), params = values, eqn.params
    dims, groups = params["dimension_numbers"], params["feature_group_count"]
    batch_groups = params["batch_group_count"]
    if left.state == dims.lhs_spec[0] and batch_groups == 1:
        return same(p, eqn, [left, p.whole(right)], dims.out_spec[0])
    if groups == 1 and (left.state == dims.lhs_spec[1] or right.state == dims.rhs_spec[1]):
        # as in a kernel's gradient, which contracts the batch
        return same(p, eqn, [p.split(left, dims.lhs_spec[1]), p.split(right, dims.rhs_spec[1])], PARTIAL)
    if right.state == dims.rhs_spec[0] and batch_groups == groups == 1:
        return same(p, eqn, [p.whole(left), right], dims.out_spec[1])
    return None


@rule("ragged_dot_general", "ragged_dot", converts_partial=True)
def ragged_dot(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Rows split: each shard multiplies its own rows, with the part of each group that is among them.

    The same for the gradient of the groups' matrices, which contracts the rows: partial. The rows are tokens sorted by
    their expert: sorting the whole batch moves them all; `js.per_example` around both sorts only those of a shard.
    """
    left, right, sizes = values
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    (ragged,), group_dims = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    if lb or rb or sizes.ndim != 1 or eqn.params.get("group_offset") is not None:
        return None
    sizes = p.whole(sizes)
    if ragged in lc and (left.state == ragged or right.state == rc[lc.index(ragged)]):
        both = [p.split(left, ragged), p.split(right, rc[lc.index(ragged)])]
        return same(p, eqn, [*both, _own_part(p, sizes, both[0].shape[ragged])], PARTIAL)
    free_left, free_right = free_dims(left.ndim, lc), free_dims(right.ndim, rc, group_dims)
    first = 1 if ragged in lc else 0  # such a gradient has a dim of the groups
    if left.is_split and left.dim in free_left:
        own = _own_part(p, sizes, left.shape[ragged]) if left.dim == ragged else sizes
        return same(p, eqn, [left, p.whole(right), own], first + free_left.index(left.dim))
    if right.is_split and right.dim in free_right:
        return same(p, eqn, [p.whole(left), right, sizes], first + len(free_left) + free_right.index(right.dim))
    return None


def _own_part(p: Partitioner, sizes: Value, num_rows: int) -> Value:
    """The number of rows of each group on this shard."""
    ends: jax.Array = jnp.cumsum(sizes.x)
    start = (p.shard * num_rows).astype(ends.dtype)
    inside = lambda row: jnp.clip(row, start, start + num_rows)
    return Value((inside(ends) - inside(ends - sizes.x)).astype(sizes.x.dtype))


def _all_split(p: Partitioner, values: Sequence[Value], dim: int) -> list[Value]:
    """Operands split along a dim; scalars whole."""
    return [p.split(v, dim) if v.ndim else p.whole(v) for v in values]


@rule(*"reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor".split())
def reduce(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Over other dims: split as before. Over the split dim: first on each shard, then over the shards."""
    (value,), axes, name = values, eqn.params["axes"], eqn.primitive.name
    if value.dim not in axes:
        return same(p, eqn, values, value.dim - sum(a < value.dim for a in axes))
    found = same(p, eqn, values, PARTIAL)
    if name == "reduce_sum":
        return found
    is_extreme = name in ("reduce_max", "reduce_min")
    if is_extreme and not jnp.iscomplexobj(value.x):  # the largest of complex numbers has no all-reduce
        with p.sends("max", eqn, found[0].bytes):
            return [Value(extreme(p, name, found[0].x))]
    with p.sends("whole", eqn, found[0].bytes * p.degree):
        every = p.gather(found[0].x[None], 0)
    return [Value(x) for x in p.bind(eqn, [every], axes=(0,))]


def extreme(p: Partitioner, name: str, x: Any) -> jax.Array:
    """The largest or smallest of the shards' arrays; NaN where one of them has NaN.

    An all-reduce of floats may lose a NaN. So integers are compared, in the order of the floats, with NaN at the end.
    """
    across, is_max = (lax.pmax, True) if name == "reduce_max" else (lax.pmin, False)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return across(x, p.axes)
    wide = x.astype(wide_dtype(x.dtype))  # integers of 16 bits have no all-reduce on GPUs
    limits = jnp.iinfo(f"int{wide.dtype.itemsize * 8}")
    ordered = lambda bits: jnp.where(bits < 0, bits ^ limits.max, bits)  # and back
    last = jnp.asarray(limits.max if is_max else limits.min, limits.dtype)
    bits = jnp.where(jnp.isnan(wide), last, ordered(lax.bitcast_convert_type(wide, limits.dtype)))
    return lax.bitcast_convert_type(ordered(across(bits, p.axes)), wide.dtype).astype(x.dtype)


@rule("argmax", "argmin")
def arg_reduce(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Along the split dim: the best of each shard, then the first of the best."""
    (value,), (axis,) = values, eqn.params["axes"]
    if value.dim != axis:
        return same(p, eqn, values, value.dim - (axis < value.dim))
    (index,) = p.bind(eqn, [value.x])
    best = jnp.take_along_axis(value.x, jnp.expand_dims(index, axis), axis)
    index = jnp.expand_dims(index + (p.shard * value.shape[axis]).astype(index.dtype), axis)
    gathered = []
    for x in (best, index):
        with p.sends("whole", eqn, Value(x).bytes * p.degree):
            gathered.append(p.gather(x, axis))
    bests, indices = gathered
    (shard,) = p.bind(eqn, [bests])
    return [Value(jnp.take_along_axis(indices, jnp.expand_dims(shard, axis), axis).squeeze(axis))]


@rule("reduce")
def reduce_by(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """A custom reduction, over other dims."""
    dim, dims = split_dim(values), eqn.params["dimensions"]
    if dim in dims:
        return None
    return same(p, eqn, _all_split(p, values, dim), dim - sum(d < dim for d in dims))


@rule(*"cumsum cumprod cummax cummin cumlogsumexp sort split concatenate top_k approx_top_k rev fft tile pad".split())
def along(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Operations along some dims. If one is the split dim, values are temporarily split along another."""
    found = beside(p, eqn, values, acts_along(eqn))
    if found is not None and eqn.primitive.name == "concatenate":
        found[0].counted = counted_columns(eqn, values)
    return found


def acts_along(eqn: Eqn) -> tuple[int, ...]:
    """The dims that an operation of `along` acts along."""
    params, ndim = eqn.params, eqn.invars[0].aval.ndim
    match eqn.primitive.name:
        case "fft":
            return tuple(range(ndim - len(params["fft_lengths"]), ndim))
        case "rev":
            return tuple(params["dimensions"])
        case "tile":
            return tuple(d for d, n in enumerate(params["reps"]) if n != 1)
        case "pad":
            return tuple(d for d, config in enumerate(params["padding_config"]) if tuple(config) != (0, 0, 0))
        case "sort" | "concatenate":
            return (params["dimension"] % ndim,)
        case "approx_top_k":
            return (params["reduction_dimension"] % ndim,)
    return (params["axis"] % ndim,)


@data_free("concatenate")
def _concatenate_operands(eqn: Eqn, values: Sequence[Value], dim: int) -> Sequence[int] | None:
    if dim == eqn.params["dimension"]:
        return None
    return [dim] * len(values)


@rule(
    *"reduce_window_sum reduce_window_max reduce_window_min reduce_window".split(),
    *"select_and_scatter select_and_scatter_add select_and_gather_add".split(),
)
def window(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Windows of one element along the split dim."""
    dim = split_dim(values)
    alone = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
    if any(eqn.params.get(name) and eqn.params[name][dim] != one for name, one in alone.items()):
        return None
    return same(p, eqn, _all_split(p, values, dim), dim)


@rule(
    *"cholesky eigh eig qr geqrf geqp3 svd lu triangular_solve householder_product tridiagonal_solve".split(),
    *"tridiagonal schur hessenberg ormqr symmetric_product lu_pivots_to_permutation cholesky_update".split(),
)
def linalg(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batched over leading dims: those that all operands and results have."""
    dim, vectors = split_dim(values), _VECTORS.get(eqn.primitive.name, ())
    if dim >= min(a.aval.ndim - (1 if k in vectors else 2) for k, a in enumerate(eqn.invars)):
        return None
    return same(p, eqn, [p.split(v, dim) for v in values], dim)


_VECTORS = {"householder_product": (1,), "ormqr": (1,), "geqp3": (1,), "cholesky_update": (1,)}
_VECTORS |= {"tridiagonal_solve": (0, 1, 2), "lu_pivots_to_permutation": (0,)}
"""Operands that are not matrices: only their last dim is not batched."""
