"""Products of matrices: contracted dims, batch dims, and dims that only one operand has."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jshard.engine.rules.building_blocks import can_be_partial, same, shared_dim
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
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left_shape = type_of(eqn.invars[0]).shape
    return math.prod(left_shape[d] for d in contracted)


def _num_terms_of_convolution(eqn: JaxprEqn) -> int:
    # Each element of the result is a sum over the kernel of one output feature.
    kernel_shape = type_of(eqn.invars[1]).shape
    num_outputs = kernel_shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(kernel_shape) // max(num_outputs, 1)


def _num_terms_of_ragged_dot(eqn: JaxprEqn) -> float:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left_shape = type_of(eqn.invars[0]).shape
    num_terms = math.prod(left_shape[d] for d in contracted)
    if set(numbers.lhs_ragged_dimensions) & set(contracted):  # a result for each group, of its own rows
        num_groups = type_of(eqn.invars[2]).shape[-1]
        return num_terms / max(num_groups, 1)
    return num_terms


def _free_dims(ndim: int, *taken: Sequence[int]) -> list[int]:
    """Returns the dims of an operand that are neither contracted nor batched."""
    all_taken = {d for dims in taken for d in dims}
    return [d for d in range(ndim) if d not in all_taken]


@rule("dot_general", linear=IN_EITHER, resizes_batch=True)
def dot_general(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Multiplies shards. Its result has batch dims, then the left operand's free dims, then the right one's.

    A batch dim stays split. A contracted dim gives a partial result: the sum over the shards is the contraction. With
    a free dim, the other operand is whole.
    """
    left, right = operands
    (left_contracted, right_contracted), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    # In the order of what is sent: along a batch dim at most one operand moves, a contraction leaves a sum open, and
    # along a free dim an operand is gathered.
    batch = shared_dim(left, right, left_batch, right_batch)
    if batch is not None:
        local = [p.split(left, left_batch[batch]), p.split(right, right_batch[batch])]
        return same(p, eqn, local, batch)

    contracted = shared_dim(left, right, left_contracted, right_contracted)
    if contracted is not None:
        if not can_be_partial(left):
            return None  # of bools, the result is whether any product is true
        local = [p.split(left, left_contracted[contracted]), p.split(right, right_contracted[contracted])]
        return same(p, eqn, local, PARTIAL)

    # Free dims of both operands may be split, and one operand must be whole: the smaller one is gathered.
    num_batch = len(left_batch)
    left_free = _free_dims(left.ndim, left_contracted, left_batch)
    right_free = _free_dims(right.ndim, right_contracted, right_batch)
    keeps_left = left.is_split and (not right.is_split or left.bytes >= right.bytes)
    if keeps_left:
        dim = num_batch + left_free.index(left.dim)
        return same(p, eqn, [left, p.whole(right)], dim)
    dim = num_batch + len(left_free) + right_free.index(right.dim)
    return same(p, eqn, [p.whole(left), right], dim)


@inverse_rule("dot_general", is_costly=True)
def _dot_general_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int | None]:
    """Follows the dims of the result in their order: see `dot_general`."""
    left, right = operands
    (left_contracted, right_contracted), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if dim < len(left_batch):
        return [left_batch[dim], right_batch[dim]]
    dim -= len(left_batch)
    left_free = _free_dims(left.ndim, left_contracted, left_batch)
    if dim < len(left_free):
        return [left_free[dim], None]
    right_free = _free_dims(right.ndim, right_contracted, right_batch)
    return [None, right_free[dim - len(left_free)]]


@rule("scaled_dot")
def scaled_dot(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Multiplies shards like `dot_general`. Scales are split like the operands that they are of."""
    left, right, left_scale, right_scale = operands
    (left_contracted, right_contracted), (left_batch, right_batch) = eqn.params["dimension_numbers"]

    def run(left_dim: int | None, right_dim: int | None, state: State) -> list[Value] | None:
        if not (
            _has_whole_blocks(p, left, left_scale, left_dim) and _has_whole_blocks(p, right, right_scale, right_dim)
        ):
            return None
        local = [_split_or_whole(p, left, left_dim), _split_or_whole(p, right, right_dim)]
        local += [_split_or_whole(p, left_scale, left_dim), _split_or_whole(p, right_scale, right_dim)]
        return same(p, eqn, local, state)

    batch = shared_dim(left, right, left_batch, right_batch)
    if batch is not None:
        return run(left_batch[batch], right_batch[batch], batch)
    contracted = shared_dim(left, right, left_contracted, right_contracted)
    if contracted is not None:
        return run(left_contracted[contracted], right_contracted[contracted], PARTIAL)

    num_batch = len(left_batch)
    left_free = _free_dims(left.ndim, left_contracted, left_batch)
    right_free = _free_dims(right.ndim, right_contracted, right_batch)
    if left.is_split and (not right.is_split or left.bytes >= right.bytes):
        return run(left.dim, None, num_batch + left_free.index(left.dim))
    if right.is_split:
        return run(None, right.dim, num_batch + len(left_free) + right_free.index(right.dim))
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


@rule("conv_general_dilated", linear=IN_EITHER)
def conv_general_dilated(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the batch, or a kernel's output features. Split input features, which are contracted, give a sum."""
    left, right = operands
    dims = eqn.params["dimension_numbers"]
    is_grouped = eqn.params["feature_group_count"] != 1
    is_batch_grouped = eqn.params["batch_group_count"] != 1
    # Each spec has the batch (of the kernel: the output features) first, then the features.
    left_batch, left_features = dims.lhs_spec[:2]
    right_outputs, right_features = dims.rhs_spec[:2]

    # Groups of the batch have kernels of their own: a shard would need those of its groups alone.
    if left.state == left_batch and not is_batch_grouped:
        return same(p, eqn, [left, p.whole(right)], dims.out_spec[0])
    if not is_grouped and (left.state == left_features or right.state == right_features):
        # As in a kernel's gradient, which contracts the batch.
        local = [p.split(left, left_features), p.split(right, right_features)]
        return same(p, eqn, local, PARTIAL)
    if right.state == right_outputs and not is_grouped and not is_batch_grouped:
        return same(p, eqn, [p.whole(left), right], dims.out_spec[1])
    return None


@rule("ragged_dot_general", "ragged_dot", operands=OperandStates.PARTIAL_BESIDE_SPLIT)
def ragged_dot(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the rows: each shard multiplies its own, with the part of each group that is among them.

    The same for the gradient of the groups' matrices, which contracts the rows: partial. The rows are tokens sorted by
    their expert: sorting the whole batch moves them all; `js.per_example` around both sorts only those of a shard.
    """
    left, right, sizes = operands
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left_contracted, _), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (ragged_dim,) = numbers.lhs_ragged_dimensions
    # Several batches of rows, with group sizes for each: such as `jax.vmap` makes.
    is_batched = left_batch or right_batch or sizes.ndim != 1
    if is_batched or eqn.params.get("group_offset") is not None:
        return None
    operands = [left, right, p.whole(sizes)]
    if ragged_dim in left_contracted:  # as the gradient of the matrices does
        results = _contract_rows(p, eqn, operands)
        if results is not None:
            return results
    return _ragged_dot_on_free_dim(p, eqn, operands)


def _contract_rows(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Contracts the rows of a shard: partial, as all shards have rows of a group."""
    left, right, sizes = operands
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left_contracted, right_contracted), _ = numbers.dot_dimension_numbers
    (left_rows,) = numbers.lhs_ragged_dimensions
    right_rows = right_contracted[left_contracted.index(left_rows)]
    if left.state != left_rows and right.state != right_rows:
        return None
    left = p.split(left, left_rows)
    right = p.split(right, right_rows)
    return same(p, eqn, [left, right, _sizes_on_shard(p, sizes, left.shape[left_rows])], PARTIAL)


def _ragged_dot_on_free_dim(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits rows, or a free dim of either operand. The result has a dim of groups, if any, then those of each."""
    left, right, sizes = operands
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left_contracted, right_contracted), _ = numbers.dot_dimension_numbers
    (ragged_dim,) = numbers.lhs_ragged_dimensions
    left_free = _free_dims(left.ndim, left_contracted)
    right_free = _free_dims(right.ndim, right_contracted, numbers.rhs_group_dimensions)
    num_group_dims = 1 if ragged_dim in left_contracted else 0
    if left.is_split and left.dim in left_free:
        if left.dim == ragged_dim:
            sizes = _sizes_on_shard(p, sizes, left.shape[ragged_dim])
        dim = num_group_dims + left_free.index(left.dim)
        return same(p, eqn, [left, p.whole(right), sizes], dim)
    if right.is_split and right.dim in right_free:
        dim = num_group_dims + len(left_free) + right_free.index(right.dim)
        return same(p, eqn, [p.whole(left), right, sizes], dim)
    return None


def _sizes_on_shard(p: Partitioner, sizes: Value, num_rows: int) -> Value:
    """Returns the number of rows of each group that are on this shard.

    With groups of 3, 4 and 1 rows, and 2 rows to a shard:

        groups      0  0  0  1  1  1  1  2
        shards      0  0 |1  1 |2  2 |3  3         on shard 1: 1, 1, 0
    """
    ends: jax.Array = jnp.cumsum(sizes.x)
    first_row = (p.shard * num_rows).astype(ends.dtype)
    ends_here = jnp.clip(ends, first_row, first_row + num_rows)
    starts_here = jnp.clip(ends - sizes.x, first_row, first_row + num_rows)
    return Value((ends_here - starts_here).astype(sizes.x.dtype))
