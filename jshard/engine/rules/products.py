"""Products of matrices: contracted dims, batch dims, and dims that only one operand has."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jshard.engine.rules.building_blocks import can_be_partial, remaining_dims, same, shared_dim
from jshard.engine.rules.registry import IN_EITHER, OperandStates, Partitioner, inverse_rule, rule
from jshard.engine.rules.values import PARTIAL, State, Value, type_of


def flops(eqn: JaxprEqn) -> float:
    """Returns the floating-point operations of a product in global view; 0 for any other equation."""
    match eqn.primitive.name:
        case "dot_general" | "scaled_dot":
            num_terms = _num_terms_of_dot(eqn)
        case "conv_general_dilated":
            num_terms = _num_terms_of_convolution(eqn)
        case "ragged_dot_general":
            num_terms = _num_terms_of_ragged_dot(eqn)
        case _:
            return 0
    return 2.0 * math.prod(type_of(eqn.outvars[0]).shape) * num_terms  # a product and a sum for each term


def _num_terms_of_dot(eqn: JaxprEqn) -> int:
    dims = _DotDims.of(eqn)
    lhs_shape = type_of(eqn.invars[0]).shape
    return _num_elements(lhs_shape, dims.lhs_contracted)


def _num_terms_of_convolution(eqn: JaxprEqn) -> int:
    # Each element of the result is a sum over the kernel of one output feature.
    kernel_shape = type_of(eqn.invars[1]).shape
    output_feature_dim = eqn.params["dimension_numbers"].rhs_spec[0]
    num_outputs = kernel_shape[output_feature_dim]
    return math.prod(kernel_shape) // max(num_outputs, 1)


def _num_terms_of_ragged_dot(eqn: JaxprEqn) -> float:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_contracted, _), _ = numbers.dot_dimension_numbers
    lhs_shape = type_of(eqn.invars[0]).shape
    num_terms = _num_elements(lhs_shape, lhs_contracted)
    contracts_rows = not set(numbers.lhs_ragged_dimensions).isdisjoint(lhs_contracted)
    if contracts_rows:  # a result for each group, of its own rows
        num_groups = type_of(eqn.invars[2]).shape[-1]
        return num_terms / max(num_groups, 1)
    return num_terms


def _num_elements(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Returns the number of elements along some dims together."""
    return math.prod(shape[d] for d in dims)


# ---- dot_general, scaled_dot


@dataclasses.dataclass(frozen=True)
class _DotDims:
    """The dims of a product's operands, and where they are in its result.

    The dims of the result are:

        batch dims, of both operands | free dims of the left operand | free dims of the right operand

    Contracted and batch dims are pairs: the dim at one position of both lists is the same.

    Attributes:
        lhs_contracted: dims of the left operand that are contracted.
        rhs_contracted: those of the right operand.
        lhs_batch: batch dims of the left operand.
        rhs_batch: those of the right operand.
        lhs_free: dims of the left operand alone.
        rhs_free: dims of the right operand alone.
    """

    lhs_contracted: Sequence[int]
    rhs_contracted: Sequence[int]
    lhs_batch: Sequence[int]
    rhs_batch: Sequence[int]
    lhs_free: list[int]
    rhs_free: list[int]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "_DotDims":
        """Reads the dims of a `dot_general` or a `scaled_dot`."""
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
        lhs_ndim = type_of(eqn.invars[0]).ndim
        rhs_ndim = type_of(eqn.invars[1]).ndim
        lhs_free = remaining_dims(lhs_ndim, removed=(*lhs_contracted, *lhs_batch))
        rhs_free = remaining_dims(rhs_ndim, removed=(*rhs_contracted, *rhs_batch))
        return cls(lhs_contracted, rhs_contracted, lhs_batch, rhs_batch, lhs_free, rhs_free)

    def result_dim_of_lhs(self, free_dim: int) -> int:
        """Returns which dim of the result a free dim of the left operand is."""
        return len(self.lhs_batch) + self.lhs_free.index(free_dim)

    def result_dim_of_rhs(self, free_dim: int) -> int:
        """Returns which dim of the result a free dim of the right operand is."""
        return len(self.lhs_batch) + len(self.lhs_free) + self.rhs_free.index(free_dim)


def _keeps_lhs_split(lhs: Value, rhs: Value) -> bool:
    """Returns whether the left operand stays split along a free dim. If both are, the smaller one is gathered."""
    if lhs.is_split and rhs.is_split:
        return lhs.bytes >= rhs.bytes
    return lhs.is_split


@rule("dot_general", linear=IN_EITHER, resizes_batch=True)
def dot_general(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Multiplies shards.

    A batch dim stays split. A contracted dim gives a partial result: the sum over the shards is the contraction. With
    a free dim, the other operand is whole.
    """
    lhs, rhs = operands
    dims = _DotDims.of(eqn)
    # In the order of what is sent: along a batch dim at most one operand moves, a contraction leaves a sum open, and
    # along a free dim an operand is gathered.
    batch = shared_dim(lhs, rhs, dims.lhs_batch, dims.rhs_batch)
    if batch is not None:
        local = [p.split(lhs, dims.lhs_batch[batch]), p.split(rhs, dims.rhs_batch[batch])]
        return same(p, eqn, local, batch)

    contracted = shared_dim(lhs, rhs, dims.lhs_contracted, dims.rhs_contracted)
    if contracted is not None:
        if not can_be_partial(lhs):
            return None  # of bools, the result is whether any product is true
        local = [p.split(lhs, dims.lhs_contracted[contracted]), p.split(rhs, dims.rhs_contracted[contracted])]
        return same(p, eqn, local, PARTIAL)

    # Free dims of both operands may be split, and one operand must be whole: a shard would have its rows times its own
    # columns, and not those times the columns of others.
    if _keeps_lhs_split(lhs, rhs):
        return same(p, eqn, [lhs, p.whole(rhs)], dims.result_dim_of_lhs(lhs.dim))
    return same(p, eqn, [p.whole(lhs), rhs], dims.result_dim_of_rhs(rhs.dim))


@inverse_rule("dot_general", is_costly=True)
def _dot_general_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int | None]:
    """Follows the dims of the result in their order: see `_DotDims`."""
    dims = _DotDims.of(eqn)
    num_batch = len(dims.lhs_batch)
    end_of_lhs = num_batch + len(dims.lhs_free)
    if dim < num_batch:
        return [dims.lhs_batch[dim], dims.rhs_batch[dim]]
    if dim < end_of_lhs:
        return [dims.lhs_free[dim - num_batch], None]
    return [None, dims.rhs_free[dim - end_of_lhs]]


@rule("scaled_dot")
def scaled_dot(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Multiplies shards like `dot_general`. Scales are split like the operands that they are of."""
    lhs, rhs, lhs_scale, rhs_scale = operands
    dims = _DotDims.of(eqn)

    def run(lhs_dim: int | None, rhs_dim: int | None, state: State) -> list[Value] | None:
        # Both are tested before either is split: what a rule that returns None has sent would be sent for nothing.
        if not _has_whole_blocks(p, lhs, lhs_scale, lhs_dim):
            return None
        if not _has_whole_blocks(p, rhs, rhs_scale, rhs_dim):
            return None
        local = [
            _split_or_whole(p, lhs, lhs_dim),
            _split_or_whole(p, rhs, rhs_dim),
            _split_or_whole(p, lhs_scale, lhs_dim),
            _split_or_whole(p, rhs_scale, rhs_dim),
        ]
        return same(p, eqn, local, state)

    # The order is that of `dot_general`. A scale has the dims of its operand, so it is split along the same one.
    batch = shared_dim(lhs, rhs, dims.lhs_batch, dims.rhs_batch)
    if batch is not None:
        return run(dims.lhs_batch[batch], dims.rhs_batch[batch], batch)
    contracted = shared_dim(lhs, rhs, dims.lhs_contracted, dims.rhs_contracted)
    if contracted is not None:
        return run(dims.lhs_contracted[contracted], dims.rhs_contracted[contracted], PARTIAL)
    if _keeps_lhs_split(lhs, rhs):
        return run(lhs.dim, None, dims.result_dim_of_lhs(lhs.dim))
    if rhs.is_split:
        return run(None, rhs.dim, dims.result_dim_of_rhs(rhs.dim))
    return None  # only scales are split


def _has_whole_blocks(p: Partitioner, value: Value, scale: Value, dim: int | None) -> bool:
    """Returns whether shards of an operand of `scaled_dot` have whole blocks: the elements that share one of its scale.

    JAX takes blocks of two elements or more along a contracted dim.
    """
    if dim is None or p.divides(p.full_shape(scale)[dim]):
        return True
    is_one_block = p.full_shape(scale)[dim] == 1
    return is_one_block and p.full_shape(value)[dim] // p.degree > 1


def _split_or_whole(p: Partitioner, value: Value, dim: int | None) -> Value:
    """Returns a value split along a dim; whole without one, or if there is one block along it."""
    if dim is None or p.full_shape(value)[dim] == 1:
        return p.whole(value)
    return p.split(value, dim)


# ---- convolutions


@rule("conv_general_dilated", linear=IN_EITHER)
def conv_general_dilated(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the batch, or a kernel's output features. Split input features, which are contracted, give a sum."""
    lhs, kernel = operands
    dims = eqn.params["dimension_numbers"]
    is_feature_grouped = eqn.params["feature_group_count"] != 1
    is_batch_grouped = eqn.params["batch_group_count"] != 1
    # The kernel moves along the spatial dims, past the end of a shard: those are never split here.
    # Each spec has the batch (of the kernel: the output features) first, then the features.
    batch_dim, lhs_feature_dim = dims.lhs_spec[:2]
    output_feature_dim, kernel_feature_dim = dims.rhs_spec[:2]
    result_batch_dim, result_feature_dim = dims.out_spec[:2]

    # Groups of the batch have kernels of their own: a shard would need those of its groups alone.
    if lhs.state == batch_dim and not is_batch_grouped:
        return same(p, eqn, [lhs, p.whole(kernel)], result_batch_dim)
    are_features_split = lhs.state == lhs_feature_dim or kernel.state == kernel_feature_dim
    if are_features_split and not is_feature_grouped:
        # As in a kernel's gradient, which contracts the batch.
        local = [p.split(lhs, lhs_feature_dim), p.split(kernel, kernel_feature_dim)]
        return same(p, eqn, local, PARTIAL)
    is_grouped = is_feature_grouped or is_batch_grouped
    if kernel.state == output_feature_dim and not is_grouped:
        return same(p, eqn, [p.whole(lhs), kernel], result_feature_dim)
    return None


# ---- ragged_dot


@rule("ragged_dot_general", "ragged_dot", operands=OperandStates.PARTIAL_BESIDE_SPLIT)
def ragged_dot(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the rows: each shard multiplies its own, with the part of each group that is among them.

    The same for the gradient of the groups' matrices, which contracts the rows: partial. The rows are tokens sorted by
    their expert: sorting the whole batch moves them all; `js.per_example` around both sorts only those of a shard.
    """
    lhs, rhs, sizes = operands
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_contracted, _), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged_dim,) = numbers.lhs_ragged_dimensions
    # Several batches of rows, with group sizes for each: such as `jax.vmap` makes.
    is_batched = lhs_batch or rhs_batch or sizes.ndim != 1
    if is_batched or eqn.params.get("group_offset") is not None:
        return None
    # The sizes of all groups on each shard: from them it counts how many of the rows before its own are in each group.
    operands = [lhs, rhs, p.whole(sizes)]
    if ragged_dim in lhs_contracted:  # as the gradient of the matrices does
        results = _contract_rows(p, eqn, operands)
        if results is not None:
            return results
    return _ragged_dot_on_free_dim(p, eqn, operands)


def _contract_rows(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Contracts the rows of a shard: partial, as all shards have rows of a group."""
    lhs, rhs, sizes = operands
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    # Rows of both operands are the same tokens, so both are split by them.
    (lhs_contracted, rhs_contracted), _ = numbers.dot_dimension_numbers
    (lhs_row_dim,) = numbers.lhs_ragged_dimensions
    rhs_row_dim = rhs_contracted[lhs_contracted.index(lhs_row_dim)]
    if lhs.state != lhs_row_dim and rhs.state != rhs_row_dim:
        return None
    lhs = p.split(lhs, lhs_row_dim)
    rhs = p.split(rhs, rhs_row_dim)
    local_sizes = _sizes_on_shard(p, sizes, num_rows=lhs.shape[lhs_row_dim])
    return same(p, eqn, [lhs, rhs, local_sizes], PARTIAL)


def _ragged_dot_on_free_dim(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits rows, or a free dim of either operand. The result has a dim of groups, if any, then those of each."""
    lhs, rhs, sizes = operands
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_contracted, rhs_contracted), _ = numbers.dot_dimension_numbers
    (ragged_dim,) = numbers.lhs_ragged_dimensions
    lhs_free = remaining_dims(lhs.ndim, removed=lhs_contracted)
    rhs_free = remaining_dims(rhs.ndim, removed=(*rhs_contracted, *numbers.rhs_group_dimensions))
    num_group_dims = 1 if ragged_dim in lhs_contracted else 0
    if lhs.is_split and lhs.dim in lhs_free:
        # Along another dim than the rows, each shard has all rows, and so the sizes of the whole groups.
        if lhs.dim == ragged_dim:
            sizes = _sizes_on_shard(p, sizes, num_rows=lhs.shape[ragged_dim])
        result_dim = num_group_dims + lhs_free.index(lhs.dim)
        return same(p, eqn, [lhs, p.whole(rhs), sizes], result_dim)
    if rhs.is_split and rhs.dim in rhs_free:
        result_dim = num_group_dims + len(lhs_free) + rhs_free.index(rhs.dim)
        return same(p, eqn, [p.whole(lhs), rhs, sizes], result_dim)
    return None


def _sizes_on_shard(p: Partitioner, sizes: Value, num_rows: int) -> Value:
    """Returns the number of rows of each group that are on this shard.

    With groups of 3, 4 and 1 rows, and 2 rows to a shard:

        groups      0  0  0  1  1  1  1  2
        shards      0  0 |1  1 |2  2 |3  3         on shard 1: 1, 1, 0
    """
    ends: jax.Array = jnp.cumsum(sizes.x)
    first_row = (p.shard * num_rows).astype(ends.dtype)
    # A group that has no row on this shard is clipped to nothing: its start and its end are the same.
    local_ends = jnp.clip(ends, first_row, first_row + num_rows)
    local_starts = jnp.clip(ends - sizes.x, first_row, first_row + num_rows)
    return Value((local_ends - local_starts).astype(sizes.x.dtype))
