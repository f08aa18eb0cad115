"""Products: dot_general, convolutions, ragged products."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
