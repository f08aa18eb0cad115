"""Gather, scatter and dynamic slices."""

from typing import TYPE_CHECKING

from jshard.engine.rules.table import rule, same
from jshard.engine.values import PARTIAL, Eqn, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


@rule("dynamic_slice")
def dynamic_slice(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is taken whole."""
    value, sizes = values[0], list(eqn.params["slice_sizes"])
    if not value.is_split or any(v.is_split for v in values[1:]):
        return None
    if sizes[value.dim] != eqn.invars[0].aval.shape[value.dim]:
        return None
    sizes[value.dim] = value.shape[value.dim]
    return same(p, eqn, values, value.dim, slice_sizes=tuple(sizes))


@rule("dynamic_update_slice")
def dynamic_update_slice(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is written whole."""
    operand, update, *starts = values
    dim = operand.state if operand.is_split else update.state
    if not isinstance(dim, int) or any(v.is_split for v in starts):
        return None
    if eqn.invars[0].aval.shape[dim] != eqn.invars[1].aval.shape[dim]:
        return None
    return same(p, eqn, [p.split(operand, dim), p.split(update, dim), *starts], dim)


@rule("gather")
def gather(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batched dims, dims taken whole, or rows of a table that is whole."""
    operand, indices = values
    dims, sizes = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    rows = [k for k in range(eqn.outvars[0].aval.ndim) if k not in dims.offset_dims]
    mine, theirs = dims.operand_batching_dims, dims.start_indices_batching_dims
    at = _batched(operand, indices, mine, theirs)
    if at is not None:
        both = [p.split(operand, mine[at]), p.split(indices, theirs[at])]
        return same(p, eqn, both, rows[theirs[at]])
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


def _batched(operand: Value, indices: Value, mine: tuple[int, ...], theirs: tuple[int, ...]) -> int | None:
    """Which of the batching dims is split in one of the two."""
    if operand.is_split and operand.dim in mine:
        return mine.index(operand.dim)
    if indices.is_split and indices.dim in theirs:
        return theirs.index(indices.dim)
    return None


@rule(
    *"scatter scatter-add scatter_add scatter_mul scatter-mul scatter_min scatter-min scatter_max scatter-max".split()
)
def scatter(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batched dims, windows that are written whole, or rows added to a table, which is partial then."""
    operand, indices, updates = values
    dims = eqn.params["dimension_numbers"]
    rows = [k for k in range(updates.ndim) if k not in dims.update_window_dims]
    mine, theirs = dims.operand_batching_dims, dims.scatter_indices_batching_dims
    at = _batched(operand, indices, mine, theirs)
    if at is not None:
        all_split = [p.split(operand, mine[at]), p.split(indices, theirs[at]), p.split(updates, rows[theirs[at]])]
        return same(p, eqn, all_split, mine[at])
    if "add" in eqn.primitive.name and not operand.is_split:  # a table's gradient: each shard adds its rows
        row = indices.dim if indices.is_split and indices.dim < indices.ndim - 1 else None
        if row is None and updates.is_split and updates.dim in rows:
            row = rows.index(updates.dim)
        if row is not None:
            parts = [p.partial(operand), p.split(indices, row), p.split(updates, rows[row])]
            return same(p, eqn, parts, PARTIAL)
    return None if indices.is_split else _scatter_windows(p, eqn, values)


def _scatter_windows(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
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
