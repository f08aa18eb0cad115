"""Primitives that move whole dims: broadcasts, reshapes, transposes, stacks."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jshard.engine.rules.building_blocks import (
    dim_after_removal,
    remaining_dims,
    same,
    shard_shape,
    split_all,
    split_dim,
)
from jshard.engine.rules.index_dims import index_dim_of
from jshard.engine.rules.registry import (
    IN_ALL,
    Partitioner,
    data_free_source,
    index_dim,
    inverse_rule,
    rule,
)
from jshard.engine.rules.values import Value, type_of

# ---- broadcast_in_dim


@rule("broadcast_in_dim", linear=IN_ALL)
def broadcast_in_dim(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Splits the dim of the result to which the split dim goes."""
    # The split dim keeps its size: only one of size 1 is broadcast, which does not divide.
    dim = eqn.params["broadcast_dimensions"][operands[0].dim]
    return same(p, eqn, operands, dim, shape=shard_shape(p, eqn.params["shape"], dim))


@data_free_source("broadcast_in_dim")
def _broadcast_shard(p: Partitioner, value: Value, dim: int) -> jax.Array:
    """Broadcasts to a shard. The operand is not known without data in general, but small: the result need not exist."""
    assert value.provenance is not None
    operand = value.provenance.operands[0]
    dims = value.provenance.eqn.params["broadcast_dimensions"]
    if dim in dims:  # else it is a new dim, and every shard broadcasts the whole operand
        operand_dim = dims.index(dim)
        is_broadcast = operand.shape[operand_dim] != value.shape[dim]  # from size 1
        if not is_broadcast:
            operand = p.split(operand, operand_dim)
    return lax.broadcast_in_dim(operand.x, shard_shape(p, value.shape, dim), dims)


@index_dim("broadcast_in_dim")
def _broadcast_index_dim(eqn: JaxprEqn, operands: Sequence[Value]) -> int | None:
    dim = index_dim_of(operands[0])
    if dim is None:
        return None
    result_dim = eqn.params["broadcast_dimensions"][dim]
    if operands[0].shape[dim] != type_of(eqn.outvars[0]).shape[result_dim]:
        return None  # the one index 0 is repeated
    return result_dim


# ---- reshape


@dataclasses.dataclass(frozen=True)
class _MergedDims:
    """Dims of an array that a reshape makes into other dims, of the same number of elements together."""

    old: range
    new: range


@dataclasses.dataclass(frozen=True)
class _SplitPair:
    """A dim of a reshape's operand and one of its result, of which a shard has the same elements if both are split."""

    old: int
    new: int


@rule("reshape", linear=IN_ALL, resizes_batch=True)
def reshape(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the outermost of the dims that the split dim is merged with, or divided into.

    If the split dim is not the outermost itself, or the new outermost dim does not divide, the operand is split along
    another dim for the time of the reshape: the outermost of those that are merged, else any that the reshape keeps.
    """
    (value,) = operands
    old_shape = type_of(eqn.invars[0]).shape
    new_shape = eqn.params["new_sizes"]
    if 0 in old_shape:
        return None  # without elements, no dim can be said to become another
    order = eqn.params["dimensions"]
    if order is not None:  # the reshape transposes before
        value = Value(lax.transpose(value.x, order), order.index(value.dim))
        old_shape = [old_shape[d] for d in order]

    # (batch 8, time 4) to 32: a shard of the batch has 4 elements of 32 in a row, and reshapes them alone. A shard of
    # the time has some of every 4, and no dim of the result is split like that.
    groups = merged_dims(old_shape, new_shape)
    group = next(group for group in groups if value.dim in group.old)
    pairs = [pair for pair in _same_parts(old_shape, new_shape) if _divides(p, pair, old_shape, new_shape)]
    if not pairs:
        return None  # no dim is there on both sides that the devices divide: it is reshaped whole
    # Nothing moves if the operand stays split as it is. Second best is another dim of the same group.
    pair = min(pairs, key=lambda pair: (pair.old != value.dim, pair.old not in group.old))
    # On a shard both dims are smaller by the same factor, so it reshapes its part as the whole would be.
    x = lax.reshape(p.split(value, pair.old).x, shard_shape(p, new_shape, pair.new))
    result = Value(x, pair.new)
    if pair.old in group.old:
        return [result]
    # It was split along a dim that the reshape keeps. The split dim's own group may still have a dim to split.
    for dim in group.new:
        if p.divides(new_shape[dim]):
            return [p.split(result, dim)]
    return [result]


def merged_dims(old: Sequence[int], new: Sequence[int]) -> list[_MergedDims]:
    """Returns which dims of a shape a reshape makes into which, outermost first.

    Groups are as small as may be: (6, 4, 5) to (2, 3, 20) has 6 -> 2 * 3 and 4 * 5 -> 20. Dims of size 1 at the end
    have a group that is empty on the other side.
    """
    groups = []
    old_start = new_start = 0
    while old_start < len(old) or new_start < len(new):
        old_end = min(old_start + 1, len(old))
        new_end = min(new_start + 1, len(new))
        while True:
            old_size = math.prod(old[old_start:old_end])
            new_size = math.prod(new[new_start:new_end])
            if old_size == new_size:
                break
            can_take_old = old_end < len(old)
            # The smaller side takes its next dim; if it has none left, the other side does.
            if new_end == len(new) or (old_size < new_size and can_take_old):
                old_end += 1
            else:
                new_end += 1
        groups.append(_MergedDims(range(old_start, old_end), range(new_start, new_end)))
        old_start = old_end
        new_start = new_end
    return groups


def _same_parts(old: Sequence[int], new: Sequence[int]) -> list[_SplitPair]:
    """Returns the pairs of dims, of the operand and of the result, that have equally many indices before them.

    Split along either, a shard has the same elements. For (4, 6) to (4, 2, 3), with dims 1 and 1: there are 4 blocks of
    6 elements, and a shard has the same part of each block, whether it is seen as 6 elements or as 2 * 3.
    """
    pairs = []
    for i in range(len(old)):
        for j in range(len(new)):
            if math.prod(old[:i]) == math.prod(new[:j]):
                pairs.append(_SplitPair(i, j))
    return pairs


def _divides(p: Partitioner, pair: _SplitPair, old: Sequence[int], new: Sequence[int]) -> bool:
    return p.divides(old[pair.old]) and p.divides(new[pair.new])


@inverse_rule("reshape")
def _reshape_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int] | None:
    """Splits the dim with the same number of elements before it."""
    if eqn.params["dimensions"] is not None:
        return None
    (value,) = operands
    for pair in _same_parts(value.shape, type_of(eqn.outvars[0]).shape):
        if pair.new == dim and p.divides(value.shape[pair.old]):
            return [pair.old]
    return None


@index_dim("reshape")
def _reshape_index_dim(eqn: JaxprEqn, operands: Sequence[Value]) -> int | None:
    if eqn.params["dimensions"] is not None:  # it also transposes
        return None
    return _index_dim_beside_ones(eqn, operands)


def _index_dim_beside_ones(eqn: JaxprEqn, operands: Sequence[Value]) -> int | None:
    """Returns where the dim of an index is if only dims of size 1 are added and removed."""
    dim = index_dim_of(operands[0])
    old_shape = operands[0].shape
    new_shape = type_of(eqn.outvars[0]).shape
    if dim is None or old_shape[dim] == 1:
        return None
    # Merged or divided, a dim counts its index no longer by itself.
    old_sizes = _sizes_beside_ones(old_shape)
    new_sizes = _sizes_beside_ones(new_shape)
    if list(old_sizes.values()) != list(new_sizes.values()):
        return None
    index_among_sizes = list(old_sizes).index(dim)
    return list(new_sizes)[index_among_sizes]


def _sizes_beside_ones(shape: Sequence[int]) -> dict[int, int]:
    """Returns the sizes other than 1, by dim."""
    return {dim: size for dim, size in enumerate(shape) if size != 1}


# ---- transpose, squeeze, stack, unstack: a rule, and below it its inverse


@rule("transpose", linear=IN_ALL)
def transpose(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Splits the dim of the result to which the split dim goes."""
    dim = eqn.params["permutation"].index(operands[0].dim)
    return same(p, eqn, operands, dim)


@inverse_rule("transpose")
def _transpose_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int]:
    return [eqn.params["permutation"][dim]]


@rule("squeeze", linear=IN_ALL)
def squeeze(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Removes dims of size 1, none of which is split."""
    old_dim = operands[0].dim
    return same(p, eqn, operands, dim_after_removal(eqn.params["dimensions"], old_dim))


@inverse_rule("squeeze")
def _squeeze_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int]:
    ndim = operands[0].ndim
    removed = {d % ndim for d in eqn.params["dimensions"]}  # negative ones count from the end
    remaining = remaining_dims(ndim, removed)
    return [remaining[dim]]


index_dim("squeeze")(_index_dim_beside_ones)


@rule("stack", linear=IN_ALL)
def stack(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Splits all operands alike; the new dim is whole."""
    dim = split_dim(operands)
    # The new axis moves those behind it by one.
    new_axis = eqn.params["axis"]
    result_dim = dim + 1 if new_axis <= dim else dim
    return same(p, eqn, split_all(p, operands, dim), result_dim)


@inverse_rule("stack")
def _stack_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int] | None:
    new_axis = eqn.params["axis"]
    if dim == new_axis:
        return None  # along the new axis, each shard has other operands
    operand_dim = dim - 1 if new_axis < dim else dim
    return [operand_dim] * len(operands)


@rule("unstack", linear=IN_ALL)
def unstack(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Keeps the split dim. The dim that is divided must be whole."""
    # As of `squeeze`, the dims behind the one that is removed move by one.
    dim = operands[0].dim
    removed_axis = eqn.params["axis"]
    if dim == removed_axis:
        return None  # each result is on one shard alone
    result_dim = dim - 1 if removed_axis < dim else dim
    return same(p, eqn, operands, result_dim)


@inverse_rule("unstack")
def _unstack_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int]:
    removed_axis = eqn.params["axis"]
    return [dim + 1 if removed_axis <= dim else dim]
