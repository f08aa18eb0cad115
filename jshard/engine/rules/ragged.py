"""Products of rows in groups, as of tokens sorted by their expert: a shard's rows are in few of the groups."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jshard.engine.rules.contraction import free_dims
from jshard.engine.rules.table import rule, same
from jshard.engine.values import PARTIAL, Eqn, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


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
