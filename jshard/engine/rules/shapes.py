"""Elementwise operations, and those that move elements: by position alone, or by indices.

Indices may count a dim; in these a shard finds its own rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard._compat import is_tracer
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

ELEMENTWISE = frozenset(
    """
    abs add add_any and asin asinh acos acosh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
    min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow random_clone
    random_fold_in random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
    zeta
    """.split()
)


@rule(*ELEMENTWISE, converts_partial=True)
def elementwise(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Split like the largest operand. Scalars and dims of size 1 stay whole."""
    dim, old, new = split_dim(values), eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim
    if eqn.primitive.name == "bitcast_convert_type" and old != new:  # the last dim is added or removed
        return same(p, eqn, [p.split(values[0], dim)], dim) if dim < max(old, new) - 1 else None
    if eqn.primitive.name == "random_fold_in" and not draws_alone(values[0]):
        return None
    if any(v.ndim and p.full_shape(v)[dim] not in (1, eqn.outvars[0].aval.shape[dim]) for v in values):
        return None
    stays = lambda v: v.ndim == 0 or p.full_shape(v)[dim] == 1
    return same(p, eqn, [p.whole(v) if stays(v) else p.split(v, dim) for v in values], dim)


@rule("tie", takes_partial=True)
def tie(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """The second operand."""
    return [values[1]]


@rule("broadcast_in_dim")
def broadcast_in_dim(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim moves with its dim."""
    dim = eqn.params["broadcast_dimensions"][values[0].dim]
    shape = [n // p.degree if i == dim else n for i, n in enumerate(eqn.params["shape"])]
    return same(p, eqn, values, dim, shape=tuple(shape))


@rule("reshape")
def reshape(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim stays the outermost of those that it is merged with or split into.

    If it is not the outermost, or the new outermost dim does not divide, the value is temporarily split along another
    dim: the outermost of those that are merged, else any that a reshape keeps.
    """
    (value,), old, new = values, eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if 0 in old:
        return None  # no elements, of which to find the dims
    if (order := eqn.params["dimensions"]) is not None:  # it transposes before
        value, old = Value(lax.transpose(value.x, order), order.index(value.dim)), [old[d] for d in order]
    mine, theirs = next(group for group in merged_dims(old, new) if value.dim in group[0])
    outer = lambda shape: [math.prod(shape[:i]) for i in range(len(shape))]  # those with as many elements before them
    same_parts = [(i, j) for i, n in enumerate(outer(old)) for j, m in enumerate(outer(new)) if n == m]
    pairs = [(i, j) for i, j in same_parts if p.divides(old[i]) and p.divides(new[j])]
    pairs.sort(key=lambda pair: (pair[0] != value.dim, pair[0] not in mine))
    if not pairs:
        return None
    i, j = pairs[0]
    local = [n // p.degree if k == j else n for k, n in enumerate(new)]
    found = Value(lax.reshape(p.split(value, i).x, local), j)
    if i in mine:
        return [found]
    again = next((k for k in theirs if p.divides(new[k])), None)
    return [found if again is None else p.split(found, again)]


def merged_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The mapping of dims in a reshape."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        mine, theirs = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(mine), j + len(theirs)
        size = lambda shape, dims: math.prod(shape[d] for d in dims)
        while size(old, mine) != size(new, theirs):
            if j == len(new) or (size(old, mine) < size(new, theirs) and i < len(old)):
                mine.append(i)
                i += 1
            else:
                theirs.append(j)
                j += 1
        groups.append((mine, theirs))
    return groups


@rule("transpose", "squeeze", "stack", "unstack")
def moved_dims(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim moves with its dim. A dim that is divided is whole."""
    dim, params = split_dim(values), eqn.params
    match eqn.primitive.name:
        case "transpose":
            to = params["permutation"].index(dim)
        case "squeeze":
            to = dim - sum(a < dim for a in params["dimensions"])
        case "stack":
            to = dim + (params["axis"] <= dim)
        case _ if dim == params["axis"]:
            return None
        case _:
            to = dim - (params["axis"] < dim)
    return same(p, eqn, [p.split(v, dim) for v in values], to)


@data_free("transpose")
def _transpose_operands(eqn: Eqn, values: Sequence[Value], dim: int) -> Sequence[int]:
    return [eqn.params["permutation"][dim]]


@data_free("squeeze")
def _squeeze_operands(eqn: Eqn, values: Sequence[Value], dim: int) -> Sequence[int]:
    ndim = values[0].ndim
    removed = {d % ndim for d in eqn.params["dimensions"]}
    remaining = [d for d in range(ndim) if d not in removed]
    return [remaining[dim]]


@data_free("stack")
def _stack_operands(eqn: Eqn, values: Sequence[Value], dim: int) -> Sequence[int] | None:
    new_axis = eqn.params["axis"]
    if dim == new_axis:
        return None
    operand_dim = dim - 1 if new_axis < dim else dim
    return [operand_dim] * len(values)


@data_free("unstack")
def _unstack_operands(eqn: Eqn, values: Sequence[Value], dim: int) -> Sequence[int]:
    removed_axis = eqn.params["axis"]
    return [dim + 1 if removed_axis <= dim else dim]


@rule("slice")
def slice_(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is taken whole. Of one row of it, the shard that has it is the sum."""
    (value,), params, shape = values, eqn.params, eqn.invars[0].aval.shape
    starts, limits = params["start_indices"], list(params["limit_indices"])
    strides = params["strides"] or [1] * len(shape)
    taken = [d for d, n in enumerate(shape) if (starts[d], limits[d], strides[d]) != (0, n, 1)]
    if value.dim in taken and limits[value.dim] - starts[value.dim] == 1 and can_be_partial(value):
        dim, at = value.dim, starts[value.dim]
        starts = [0 if d == dim else n for d, n in enumerate(starts)]
        limits = [value.shape[dim] if d == dim else n for d, n in enumerate(limits)]
        strides = [1 if d == dim else n for d, n in enumerate(strides)]
        return [one_row(p, Value(lax.slice(value.x, starts, limits, strides), dim), at)]

    def of_shard(value: Value) -> list[Value]:
        ends = [value.shape[d] if d == value.dim else n for d, n in enumerate(limits)]
        return same(p, eqn, [value], value.dim, limit_indices=tuple(ends))

    return beside(p, eqn, values, taken, lambda values: of_shard(values[0]))


def one_row(p: Partitioner, value: Value, at: Any) -> Value:
    """Row `at`, in global view, of a value along its split dim: partial, because the other shards have zeros."""
    at = at - p.shard * value.shape[value.dim]
    inside = (at >= 0) & (at < value.shape[value.dim])
    row = lax.dynamic_slice_in_dim(value.x, jnp.where(inside, at, 0), 1, value.dim)
    return Value(jnp.where(inside, row, jnp.zeros_like(row)), PARTIAL)


def draws_alone(key: Value) -> bool:
    """Whether each key of a batch draws the same as alone; with `rbg` the first key draws for all of them."""
    return str(jax.random.key_impl(key.x)).startswith(("threefry", "philox"))


@rule("random_wrap", "random_unwrap", "random_split", "random_bits")
def keys(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Typed keys: the dims of the keys are first in all their forms, and in their draws."""
    dim = values[0].dim
    if eqn.primitive.name in ("random_split", "random_bits") and not draws_alone(values[0]):
        return None
    return same(p, eqn, values, dim) if dim < min(values[0].ndim, eqn.outvars[0].aval.ndim) else None


@rule("random_gamma")
def random_gamma(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Each key is split by the number of the samples that it draws: only the dims of the keys can be split."""
    key, dim = values[0], split_dim(values)
    if dim >= key.ndim or not draws_alone(key):
        return None
    return same(p, eqn, [p.split(v, dim) for v in values], dim)


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
    """The dim whose index a known value is at each position, or None."""
    if value.source is None:
        return None
    eqn, values, _ = value.source
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == "iota":
        return eqn.params["dimension"]
    if name == "select_n":  # where(i < 0, i + n, i): never
        test = values[0].source
        if test is None or test.eqn.primitive.name != "lt" or counted_dim(test.values[0]) is None:
            return None
        bound = test.values[1].x
        return counted_dim(values[1]) if not is_tracer(bound) and (np.asarray(bound) <= 0).all() else None
    if (inner := counted_dim(values[0])) is None:
        return None
    match name:
        case "copy" | "name":
            return inner
        case "convert_element_type":
            new = eqn.params["new_dtype"]
            return inner if jnp.issubdtype(new, jnp.integer) and shape[inner] - 1 <= jnp.iinfo(new).max else None
        case "broadcast_in_dim":
            outer = eqn.params["broadcast_dimensions"][inner]
            return outer if values[0].shape[inner] == shape[outer] else None
        case "reshape" | "squeeze" if eqn.params["dimensions"] is None or name == "squeeze":  # of dims of size 1
            old = values[0].shape
            if [n for n in old if n != 1] != [n for n in shape if n != 1] or old[inner] == 1:
                return None
            return [i for i, n in enumerate(shape) if n != 1][[i for i, n in enumerate(old) if n != 1].index(inner)]
    return None


def _on_shard(p: Partitioner, indices: Value, column: int, size: int) -> jax.Array:
    """Split indices, of which a column counts from the first row of this shard, which has `size` of them."""
    start, dtype = p.shard * size, indices.x.dtype
    is_column = jnp.arange(indices.shape[-1]).reshape((1,) * (indices.ndim - 1) + (-1,)) == column
    return indices.x - jnp.where(is_column, start.astype(dtype), 0).astype(dtype)


@rule("dynamic_slice")
def dynamic_slice(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is taken whole. Of one row of it, the shard that has it is the sum."""
    value, *starts = values[0], *map(p.whole, values[1:])
    if not value.is_split:
        return None
    sizes, shape = list(eqn.params["slice_sizes"]), eqn.invars[0].aval.shape
    taken = [d for d, n in enumerate(shape) if sizes[d] != n]

    def of_shard(value: Value, dim: int) -> Value:
        local = [value.shape[d] if d == dim else n for d, n in enumerate(sizes)]
        begin = [jnp.zeros_like(s.x) if d == dim else s.x for d, s in enumerate(starts)]
        return Value(lax.dynamic_slice(value.x, begin, local), dim)

    if value.dim in taken and sizes[value.dim] == 1 and can_be_partial(value):
        dim, start = value.dim, starts[value.dim].x
        start = start.astype(jnp.int32) if start.dtype.itemsize < 4 else start  # 8 bits cannot hold every size
        return [one_row(p, of_shard(value, dim), jnp.clip(start, 0, shape[dim] - 1).astype(jnp.int32))]
    return beside(p, eqn, [value], taken, lambda values: [of_shard(values[0], values[0].dim)])


@rule("dynamic_update_slice")
def dynamic_update_slice(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is written whole."""
    operand, update, *starts = *values[:2], *map(p.whole, values[2:])
    if not operand.is_split and not update.is_split:
        return None
    shapes = zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
    taken = [d for d, (n, m) in enumerate(shapes) if n != m]
    if not operand.is_split and update.dim in taken:
        return None  # only the written value is split

    def of_shard(values: list[Value]) -> list[Value]:
        dim = values[0].dim
        begin = [jnp.zeros_like(s.x) if d == dim else s.x for d, s in enumerate(starts)]
        return [Value(lax.dynamic_update_slice(values[0].x, values[1].x, begin), dim)]

    return beside(p, eqn, [operand, update], taken, of_shard)


@rule("gather")
def gather(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batched dims, dims taken whole, or rows of a table that is whole."""
    operand, indices = values
    dims, sizes = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    rows = [k for k in range(eqn.outvars[0].aval.ndim) if k not in dims.offset_dims]
    mine, theirs = dims.operand_batching_dims, dims.start_indices_batching_dims
    at = shared_dim(operand, indices, mine, theirs)
    if at is not None:
        both = [p.split(operand, mine[at]), p.split(indices, theirs[at])]
        return same(p, eqn, both, rows[theirs[at]])
    indexed = [d if sizes[d] == 1 else None for d in dims.start_index_map]
    if (operand.is_split or operand.is_known) and (at := _counted(p, operand, indices, indexed)) is not None:
        column, row, dim = at  # each shard takes its own rows
        operand, indices = p.split(operand, dim), p.split(indices, row)
        return [Value(p.bind(eqn, [operand.x, _on_shard(p, indices, column, operand.shape[dim])])[0], rows[row])]
    if operand.is_split and not indices.is_split:
        kept = [k for k in range(operand.ndim) if k not in dims.collapsed_slice_dims and k not in mine]
        dim = operand.dim
        taken_whole = sizes[dim] == eqn.invars[0].aval.shape[dim]
        if dim in kept and dim not in dims.start_index_map and taken_whole:
            sizes[dim] = operand.shape[dim]
            return same(p, eqn, values, dims.offset_dims[kept.index(dim)], slice_sizes=tuple(sizes))
    if indices.is_split and indices.dim < indices.ndim - 1:  # rows of a table
        return same(p, eqn, [p.whole(operand), indices], rows[indices.dim])
    return None


def _counted(p: Partitioner, operand: Value, indices: Value, indexed: list[int | None]) -> tuple[int, int, int] | None:
    """A column of the indices that counts, the dim that it counts, and the operand's dim that it indexes.

    The two dims have one size and divide, so that a shard of the indices indexes the same shard of the operand.
    `indexed` has the operand's dim of each column; None where more than one element is taken, as windows at the end of
    a shard reach into the next.
    """
    shape, rows = p.full_shape(operand), p.full_shape(indices)
    for column, row in columns(indices).items():
        if (dim := indexed[column]) is None:
            continue
        fits = p.divides(shape[dim]) and shape[dim] == rows[row]
        if fits and operand.state in (None, dim) and indices.state in (None, row):
            return column, row, dim
    return None


@data_free("gather")
def _gather_operands(eqn: Eqn, values: Sequence[Value], dim: int) -> Sequence[int | None] | None:
    """Returns the rows of the indices: a shard gathers its own from the whole operand."""
    dims = eqn.params["dimension_numbers"]
    if dims.operand_batching_dims or dim in dims.offset_dims:
        return None
    result_ndim = eqn.outvars[0].aval.ndim
    index_dims = [d for d in range(result_ndim) if d not in dims.offset_dims]
    return [None, index_dims.index(dim)]


@rule(*"scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split())
def scatter(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batched dims, windows that are written whole, or rows added to a table, which is partial then."""
    operand, indices, updates = values
    dims = eqn.params["dimension_numbers"]
    rows = [k for k in range(updates.ndim) if k not in dims.update_window_dims]
    mine, theirs = dims.operand_batching_dims, dims.scatter_indices_batching_dims
    at = shared_dim(operand, indices, mine, theirs)
    if at is None and updates.is_split and updates.dim in rows and rows.index(updates.dim) in theirs:
        at = theirs.index(rows.index(updates.dim))
    if at is not None:
        all_split = [p.split(operand, mine[at]), p.split(indices, theirs[at]), p.split(updates, rows[theirs[at]])]
        return same(p, eqn, all_split, mine[at])
    indexed = [d if d in dims.inserted_window_dims else None for d in dims.scatter_dims_to_operand_dims]
    if (at := _counted(p, operand, indices, indexed)) is not None:
        column, row, dim = at
        operand, indices, updates = p.split(operand, dim), p.split(indices, row), p.split(updates, rows[row])
        x = _on_shard(p, indices, column, operand.shape[dim])
        return [Value(p.bind(eqn, [operand.x, x, updates.x])[0], dim)]
    if eqn.primitive.name in ("scatter-add", "scatter-sub") and not operand.is_split:
        # a table's gradient: each shard adds its rows
        row = indices.dim if indices.is_split and indices.dim < indices.ndim - 1 else None
        if row is None and updates.is_split and updates.dim in rows:
            row = rows.index(updates.dim)
        if row is not None:
            parts = [p.partial(operand), p.split(indices, row), p.split(updates, rows[row])]
            return same(p, eqn, parts, PARTIAL)
    return None if indices.is_split else _scatter_windows(p, eqn, values)


def _scatter_windows(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is a dim of the windows, and written whole."""
    operand, indices, updates = values
    dims = eqn.params["dimension_numbers"]
    taken = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    kept = [k for k in range(operand.ndim) if k not in taken]
    if operand.is_split:
        dim = operand.dim
    elif updates.state in dims.update_window_dims:
        dim = kept[dims.update_window_dims.index(updates.state)]
    else:
        return None
    if dim not in kept or dim in dims.scatter_dims_to_operand_dims:
        return None
    update_dim = dims.update_window_dims[kept.index(dim)]
    if eqn.invars[0].aval.shape[dim] != eqn.invars[2].aval.shape[update_dim]:
        return None
    return same(p, eqn, [p.split(operand, dim), indices, p.split(updates, update_dim)], dim)
