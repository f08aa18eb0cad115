"""Products: dot_general, convolutions, ragged products of rows in groups."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jshard.engine.rules.table import can_be_partial, rule, same
from jshard.engine.values import PARTIAL, Eqn, Value, array_bytes

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


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
    else:
        return 0
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * terms


@rule("dot_general")
def dot_general(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batch dims: each shard its part. Contracted dims: partial. A free dim: the other operand is whole."""
    left, right = values
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    for mine, theirs in ((lb, rb), (lc, rc)):
        at = _shared(left, right, mine, theirs)
        if at is not None:
            if mine is lc and not can_be_partial(left):
                return None  # of bools, any of the products
            both = [p.split(left, mine[at]), p.split(right, theirs[at])]
            return same(p, eqn, both, at if mine is lb else PARTIAL)
    free_left, free_right = free_dims(left.ndim, lc, lb), free_dims(right.ndim, rc, rb)
    if left.is_split and (not right.is_split or array_bytes(left.x) >= array_bytes(right.x)):
        return same(p, eqn, [left, p.whole(right)], len(lb) + free_left.index(left.dim))
    return same(p, eqn, [p.whole(left), right], len(lb) + len(free_left) + free_right.index(right.dim))


def _shared(left: Value, right: Value, mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Which of the dims that both operands have is split in one of them."""
    if left.is_split and left.dim in mine:
        return tuple(mine).index(left.dim)
    if right.is_split and right.dim in theirs:
        return tuple(theirs).index(right.dim)
    return None


@rule("conv_general_dilated")
def conv_general_dilated(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
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


# Products of rows in groups, as of tokens sorted by their expert: a shard's rows are in few of the groups.


@rule("ragged_dot_general", "ragged_dot", converts_partial=True)
def ragged_dot(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Rows split: each shard multiplies its own, with the part of each group that is among them.

    The same for the gradient of the groups' matrices, which contracts the rows: partial. Sorting the tokens of the
    whole batch is another equation, and moves them all; `js.per_example` around both sorts those of a shard.
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


def _own_part(p: "Partitioner", sizes: Value, num_rows: int) -> Value:
    """How many rows of each group are on this shard."""
    ends: jax.Array = jnp.cumsum(sizes.x)
    start = (p.shard * num_rows).astype(ends.dtype)
    inside = lambda row: jnp.clip(row, start, start + num_rows)
    return Value((inside(ends) - inside(ends - sizes.x)).astype(sizes.x.dtype))
