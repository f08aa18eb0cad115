"""Primitives that take or write some elements: slices, gathers, scatters."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jshard.engine.rules.building_blocks import (
    can_be_partial,
    remaining_dims,
    run_on_free_dim,
    same,
    shared_dim,
    whole_all,
)
from jshard.engine.rules.index_dims import index_dims_of
from jshard.engine.rules.registry import IN_ALL, IN_FIRST, Linear, Partitioner, inverse_rule, rule
from jshard.engine.rules.values import PARTIAL, Value, type_of

T = TypeVar("T")


@inverse_rule("slice", "dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add")
def _first_operand_dims(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int | None]:
    """Splits the array that is read or written along the same dim. Whether its shard suffices, the rule will say."""
    return [dim, *[None] * (len(operands) - 1)]


# ---- slices


@rule("slice", linear=IN_ALL)
def slice_(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Slices each shard, along dims that are not split. One row of the split dim is a sum: see `_one_row`."""
    (value,) = operands
    shape = type_of(eqn.invars[0]).shape
    starts = eqn.params["start_indices"]
    limits = eqn.params["limit_indices"]
    strides = eqn.params["strides"] or [1] * len(shape)
    taken = []
    for dim, size in enumerate(shape):
        is_taken_whole = (starts[dim], limits[dim], strides[dim]) == (0, size, 1)
        if not is_taken_whole:
            taken.append(dim)

    # One row is small. To make it partial sends nothing, and its sum is taken where it is read: less than splitting
    # the whole array along another dim, as below.
    is_one_row = limits[value.dim] - starts[value.dim] == 1
    if value.dim in taken and is_one_row and can_be_partial(value):
        dim = value.dim
        all_rows = lax.slice(
            value.x,
            _with_item(starts, dim, 0),
            _with_item(limits, dim, value.shape[dim]),
            _with_item(strides, dim, 1),
        )
        return [_one_row(p, Value(all_rows, dim), starts[dim])]

    def run(operands: list[Value]) -> list[Value]:
        # The dim that is split now is taken whole, and a shard has fewer elements along it. Its start is 0 and its
        # stride 1 already, or it would be one of those taken.
        (local,) = operands
        local_limits = _with_item(limits, local.dim, local.shape[local.dim])
        return same(p, eqn, operands, local.dim, limit_indices=tuple(local_limits))

    return run_on_free_dim(p, eqn, operands, taken, run)


def _with_item(items: Sequence[T], position: int, item: T) -> list[T]:
    """Returns a sequence with another item at a position."""
    result = list(items)
    result[position] = item
    return result


def _one_row(p: Partitioner, value: Value, row: jax.Array) -> Value:
    """Takes one row, by its number in global view, of a value along its split dim.

    The result is partial, as the other shards have zeros:

        shard 0: rows 0, 1      shard 1: rows 2, 3      shard 2: rows 4, 5      row 3 is
        zeros                 + its row 1             + zeros                   the sum
    """
    # Each shard slices a row, as all run one program; those that do not have it slice any, and drop it.
    num_rows = value.shape[value.dim]
    local_row = row - p.shard * num_rows
    is_here = (local_row >= 0) & (local_row < num_rows)
    x = lax.dynamic_slice_in_dim(value.x, jnp.where(is_here, local_row, 0), 1, value.dim)
    return Value(jnp.where(is_here, x, jnp.zeros_like(x)), PARTIAL)


@rule("dynamic_slice", linear=IN_FIRST)
def dynamic_slice(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Slices each shard, along dims that are not split. One row of the split dim is a sum: see `_one_row`."""
    value = operands[0]
    # Each shard slices at the same place.
    starts = whole_all(p, operands[1:])
    if not value.is_split:
        return None  # only a start was, which is whole now
    shape = type_of(eqn.invars[0]).shape
    sizes = eqn.params["slice_sizes"]
    taken = _dims_taken_in_part(shape, sizes)

    def slice_other_dims(value: Value) -> Value:
        local_sizes = _with_item(sizes, value.dim, value.shape[value.dim])
        return Value(lax.dynamic_slice(value.x, _local_starts(starts, value.dim), local_sizes), value.dim)

    dim = value.dim
    if dim in taken and sizes[dim] == 1 and can_be_partial(value):
        start = starts[dim].x
        if start.dtype.itemsize < 4:
            start = start.astype(jnp.int32)  # 8 bits cannot hold every size
        all_rows = slice_other_dims(value)
        last_row = shape[dim] - 1
        row = jnp.clip(start, 0, last_row).astype(jnp.int32)  # JAX clamps what is out of bounds
        return [_one_row(p, all_rows, row)]
    return run_on_free_dim(p, eqn, [value], taken, lambda operands: [slice_other_dims(operands[0])])


def _dims_taken_in_part(shape: Sequence[int], slice_sizes: Sequence[int]) -> list[int]:
    """Returns the dims of an array that a slice does not take whole: along these, a shard has not what it takes."""
    return [d for d, size in enumerate(shape) if slice_sizes[d] != size]


def _local_starts(starts: Sequence[Value], split_dim: int) -> list[jax.Array]:
    """Returns the start of a slice in each dim; the split dim is taken whole, from the start of the shard."""
    return [jnp.zeros_like(start.x) if d == split_dim else start.x for d, start in enumerate(starts)]


@rule("dynamic_update_slice", linear=Linear(slice(2)))
def dynamic_update_slice(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Writes into each shard, along dims that are not split: the split dim is written whole."""
    target, update = operands[:2]
    starts = whole_all(p, operands[2:])  # as of a slice: all shards write at the same place
    if not target.is_split and not update.is_split:
        return None  # only a start was, which is whole now
    target_shape = type_of(eqn.invars[0]).shape
    update_shape = type_of(eqn.invars[1]).shape
    taken = _dims_taken_in_part(target_shape, update_shape)
    if not target.is_split and update.dim in taken:
        return None  # only what is written is split, along a dim of which the target has more

    def run(operands: list[Value]) -> list[Value]:
        local_target, local_update = operands
        dim = local_target.dim
        x = lax.dynamic_update_slice(local_target.x, local_update.x, _local_starts(starts, dim))
        return [Value(x, dim)]

    return run_on_free_dim(p, eqn, [target, update], taken, run)


# ---- gather and scatter: by indices


def _is_filled_with_zero(eqn: JaxprEqn) -> bool:
    """Returns whether what a gather reads out of bounds is linear in the operand: 0, NaN, or some element of it."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    if fill is None:  # NaN for floats, else the smallest integer
        return jnp.issubdtype(type_of(eqn.outvars[0]).dtype, jnp.inexact)
    return bool(fill == 0 or np.isnan(fill))


@rule("gather", linear=Linear(slice(1), condition=_is_filled_with_zero), resizes_batch=True)
def gather(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits batch dims, dims taken whole, or the rows of the indices into a table that is whole."""
    # In this order: what sends nothing comes first, what gathers the table last.
    for run in (_gather_in_batches, _gather_own_rows, _gather_windows, _gather_own_indices):
        results = run(p, eqn, operands)
        if results is not None:
            return results
    return None


def _index_dims_of_result(eqn: JaxprEqn) -> list[int]:
    """Returns the dims of a gather's result that are those of the indices, but the last: these, in order."""
    offset_dims = eqn.params["dimension_numbers"].offset_dims
    return remaining_dims(type_of(eqn.outvars[0]).ndim, removed=offset_dims)


def _gather_in_batches(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits a dim that table and indices have in common."""
    table, indices = operands
    dims = eqn.params["dimension_numbers"]
    batch = shared_dim(table, indices, dims.operand_batching_dims, dims.start_indices_batching_dims)
    if batch is None:
        return None
    # Element i of a batch dim is read by indices i alone: so a shard of both has all that its result needs.
    table_dim = dims.operand_batching_dims[batch]
    index_dim = dims.start_indices_batching_dims[batch]
    local = [p.split(table, table_dim), p.split(indices, index_dim)]
    return same(p, eqn, local, _index_dims_of_result(eqn)[index_dim])


def _gather_own_rows(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits a dim of the table that a column of the indices counts."""
    table, indices = operands
    if not table.is_split and not table.is_data_free:
        return None  # a whole table is not cut: each shard looks up its rows in it
    # A window of more than one element, at the end of a shard, would reach into the next shard.
    slice_sizes = eqn.params["slice_sizes"]
    start_index_map = eqn.params["dimension_numbers"].start_index_map
    indexed_dims = [d if slice_sizes[d] == 1 else None for d in start_index_map]
    own_rows = _find_own_rows(p, table, indices, indexed_dims)
    if own_rows is None:
        return None
    table = p.split(table, own_rows.table_dim)
    indices = p.split(indices, own_rows.index_dim)
    # The indices are those of the whole table. A shard's first row has the index 0 in its part.
    local_indices = own_rows.from_start_of_shard(p, indices, table)
    (x,) = p.bind(eqn, [table.x, local_indices])
    return [Value(x, _index_dims_of_result(eqn)[own_rows.index_dim])]


def _gather_windows(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits a dim of the table that is taken whole."""
    table, indices = operands
    if not table.is_split or indices.is_split:
        return None
    dims = eqn.params["dimension_numbers"]
    slice_sizes = eqn.params["slice_sizes"]
    without_window = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    window_dims = remaining_dims(table.ndim, removed=without_window)  # the offset dims of the result, in order
    # Else a window may reach into another shard, or the indices say where along this dim it begins.
    dim = table.dim
    is_taken_whole = slice_sizes[dim] == type_of(eqn.invars[0]).shape[dim]
    if dim not in window_dims or dim in dims.start_index_map or not is_taken_whole:
        return None
    local_sizes = tuple(_with_item(slice_sizes, dim, table.shape[dim]))
    return same(p, eqn, operands, dims.offset_dims[window_dims.index(dim)], slice_sizes=local_sizes)


def _gather_own_indices(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the indices. The table is whole, and each shard looks up its own rows."""
    table, indices = operands
    if not indices.is_split or indices.dim == indices.ndim - 1:  # the last dim has the columns
        return None
    return same(p, eqn, [p.whole(table), indices], _index_dims_of_result(eqn)[indices.dim])


@dataclasses.dataclass(frozen=True)
class _OwnRows:
    """Indices by which each shard finds its own rows of a table: see `index_dims.py`.

    Attributes:
        column: the column of the indices that counts.
        index_dim: the dim of the indices that it counts.
        table_dim: the dim of the table that it indexes, of the same size.
    """

    column: int
    index_dim: int
    table_dim: int

    def from_start_of_shard(self, p: Partitioner, indices: Value, table: Value) -> jax.Array:
        """Returns a shard's indices with the column counted from the start of its shard of the table."""
        start = p.shard * table.shape[self.table_dim]
        dtype = indices.x.dtype
        num_columns = indices.shape[-1]
        leading_dims = (1,) * (indices.ndim - 1)
        columns = jnp.arange(num_columns).reshape(leading_dims + (-1,))
        is_column = columns == self.column
        start_of_columns = jnp.where(is_column, start.astype(dtype), 0).astype(dtype)
        return indices.x - start_of_columns


def _find_own_rows(p: Partitioner, table: Value, indices: Value, indexed_dims: Sequence[int | None]) -> _OwnRows | None:
    """Finds a column of indices that counts, so that a shard of the indices indexes the same shard of the table.

    Args:
        p: the partitioner.
        table: the array that is indexed.
        indices: the indices.
        indexed_dims: the dim of the table that each column indexes; None where more than one element is taken.
    """
    table_shape = p.full_shape(table)
    indices_shape = p.full_shape(indices)
    for column, index_dim in index_dims_of(indices).items():
        table_dim = indexed_dims[column]
        if table_dim is None:
            continue
        # Equal sizes in global view, so that shard i of the indices counts the rows of shard i of the table.
        size = table_shape[table_dim]
        if not p.divides(size) or size != indices_shape[index_dim]:
            continue
        # Operands that are split along other dims are left to the other ways to run.
        if table.state in (None, table_dim) and indices.state in (None, index_dim):
            return _OwnRows(column, index_dim, table_dim)
    return None


@inverse_rule("gather")
def _gather_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int | None] | None:
    """Splits the rows of the indices: a shard gathers its own from the whole operand."""
    dims = eqn.params["dimension_numbers"]
    # Along an offset dim, a shard would need its part of the operand: such a result is computed whole, and cut.
    if dims.operand_batching_dims or dim in dims.offset_dims:
        return None
    return [None, _index_dims_of_result(eqn).index(dim)]


@rule("scatter-add", "scatter-sub", linear=Linear(slice(0, None, 2)))  # operand 1 is the indices
@rule("scatter", "scatter-mul", "scatter-min", "scatter-max")
def scatter(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits batch dims, windows that are written whole, or rows added to a table, which is partial then."""
    # In this order: the first two leave the table split, the third makes its sum partial.
    for run in (_scatter_in_batches, _scatter_own_rows, _scatter_sum, _scatter_windows):
        results = run(p, eqn, operands)
        if results is not None:
            return results
    return None


def _index_dims_of_updates(eqn: JaxprEqn) -> list[int]:
    """Returns the dims of a scatter's updates that are those of the indices, but the last: these, in order."""
    window_dims = eqn.params["dimension_numbers"].update_window_dims
    return remaining_dims(type_of(eqn.invars[2]).ndim, removed=window_dims)


def _scatter_in_batches(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits a dim that table, indices and updates have in common."""
    table, indices, updates = operands
    dims = eqn.params["dimension_numbers"]
    index_dims = _index_dims_of_updates(eqn)
    batch = _shared_batch_dim(eqn, operands, index_dims)
    if batch is None:
        return None
    # As in a gather: element i of a batch dim is written by indices and updates i alone.
    table_dim = dims.operand_batching_dims[batch]
    index_dim = dims.scatter_indices_batching_dims[batch]
    local = [p.split(table, table_dim), p.split(indices, index_dim), p.split(updates, index_dims[index_dim])]
    return same(p, eqn, local, table_dim)


def _scatter_own_rows(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits a dim of the table that a column of the indices counts."""
    table, indices, updates = operands
    dims = eqn.params["dimension_numbers"]
    # As in a gather, a window of more than one element would reach into the next shard.
    indexed_dims = [d if d in dims.inserted_window_dims else None for d in dims.scatter_dims_to_operand_dims]
    own_rows = _find_own_rows(p, table, indices, indexed_dims)
    if own_rows is None:
        return None
    table = p.split(table, own_rows.table_dim)
    indices = p.split(indices, own_rows.index_dim)
    updates = p.split(updates, _index_dims_of_updates(eqn)[own_rows.index_dim])
    local_indices = own_rows.from_start_of_shard(p, indices, table)
    (x,) = p.bind(eqn, [table.x, local_indices, updates.x])
    return [Value(x, own_rows.table_dim)]


def _scatter_sum(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the rows that are added to a table, as in the gradient of an embedding: the tables of shards add up."""
    table, indices, updates = operands
    # Only of sums do the tables of the shards add up: a row that is set, or multiplied, twice is another one.
    is_sum = eqn.primitive.name in ("scatter-add", "scatter-sub")
    if not is_sum or table.is_split:
        return None
    index_dims = _index_dims_of_updates(eqn)
    row_dim = _split_row_dim(indices, updates, index_dims)
    if row_dim is None:
        return None
    # A table that is not partial counts once: the first shard has it, the others begin with zeros.
    local = [p.partial(table), p.split(indices, row_dim), p.split(updates, index_dims[row_dim])]
    return same(p, eqn, local, PARTIAL)


def _shared_batch_dim(eqn: JaxprEqn, operands: Sequence[Value], index_dims: Sequence[int]) -> int | None:
    """Returns which batch dim of a scatter is split in one of its operands, as a position in the lists of them."""
    table, indices, updates = operands
    dims = eqn.params["dimension_numbers"]
    batch_dims = dims.scatter_indices_batching_dims
    batch = shared_dim(table, indices, dims.operand_batching_dims, batch_dims)
    if batch is not None:
        return batch
    if updates.is_split and updates.dim in index_dims:
        row_dim = index_dims.index(updates.dim)
        if row_dim in batch_dims:
            return batch_dims.index(row_dim)
    return None


def _split_row_dim(indices: Value, updates: Value, index_dims: Sequence[int]) -> int | None:
    """Returns along which dim of the indices the rows of a scatter are split."""
    if indices.is_split and indices.dim < indices.ndim - 1:
        return indices.dim
    if updates.is_split and updates.dim in index_dims:
        return index_dims.index(updates.dim)
    return None


def _scatter_windows(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits a dim of the windows, which is written whole."""
    table, indices, updates = operands
    if indices.is_split:
        return None  # a shard of the table would get the rows of its own indices alone
    dims = eqn.params["dimension_numbers"]
    without_window = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window_dims = remaining_dims(table.ndim, removed=without_window)  # those of the updates, in order
    if table.is_split:
        table_dim = table.dim
    elif updates.state in dims.update_window_dims:
        table_dim = window_dims[dims.update_window_dims.index(updates.state)]
    else:
        return None
    if table_dim not in window_dims or table_dim in dims.scatter_dims_to_operand_dims:
        return None
    # A window that is smaller than the table along this dim is written into the first shards alone.
    update_dim = dims.update_window_dims[window_dims.index(table_dim)]
    if type_of(eqn.invars[0]).shape[table_dim] != type_of(eqn.invars[2]).shape[update_dim]:
        return None
    local = [p.split(table, table_dim), indices, p.split(updates, update_dim)]
    return same(p, eqn, local, table_dim)
