"""The table itself, and what every rule uses."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jshard.engine.values import Eqn, State, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

Rule = Callable[["Partitioner", Eqn, list[Value]], list[Value] | None]

RULES: dict[str, Rule] = {}
TAKE_PARTIAL: set[str] = set()
"""Primitives whose rule takes operands in any state, and is asked always."""
KEEP_STORED: set[str] = set()
"""Of these, those whose rule takes stored shards as they are."""
CONVERT_PARTIAL: set[str] = set()
"""Primitives whose rule reads no operand but by `whole` and `split`, and so takes partial ones beside a split one."""


def rule(
    *names: str, takes_partial: bool = False, keeps_stored: bool = False, converts_partial: bool = False
) -> Callable[[Rule], Rule]:
    """Enters a function into the table.

    Args:
        names: of primitives.
        takes_partial: the rule is called whatever the states are.
        keeps_stored: and stored shards are not gathered for it.
        converts_partial: the rule is called with partial operands, too, if one is split.
    """

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        if takes_partial or keeps_stored:
            TAKE_PARTIAL.update(names)
        if keeps_stored:
            KEEP_STORED.update(names)
        if converts_partial:
            CONVERT_PARTIAL.update(names)
        return function

    return enter


def same(p: "Partitioner", eqn: Eqn, values: Sequence[Value], state: State, **params: Any) -> list[Value]:
    """The equation on what the shards hold; all results in one state."""
    return [Value(x, state) for x in p.bind(eqn, [v.x for v in values], **params)]


def split_dim(values: Sequence[Value]) -> int:
    """The dim that the largest split operand is split along."""
    return max((v for v in values if v.is_split), key=lambda v: v.bytes).dim


def can_be_partial(value: Value) -> bool:
    """Whether a dtype has sums."""
    return jnp.issubdtype(value.x.dtype, jnp.number)


def free_dim(p: "Partitioner", shape: Sequence[int], taken: Collection[int]) -> int | None:
    """A dim of an array that can be split, other than those taken."""
    return next((i for i, n in enumerate(shape) if i not in taken and p.divides(n)), None)


def beside(
    p: "Partitioner",
    eqn: Eqn,
    values: list[Value],
    taken: Collection[int],
    run: Callable[[list[Value]], list[Value] | None] | None = None,
) -> list[Value] | None:
    """An equation that acts along some dims, of operands and results of one rank, on values split along another dim.

    If they are split along one of those, they are split along another for as long as it takes, which costs two moves of
    a shard and gathers nothing.

    Args:
        p: the partitioner.
        eqn: the equation.
        values: its operands; those without dims are whole.
        taken: dims that it acts along.
        run: the equation on operands split along one dim; by default as it is.
    """
    dim = split_dim(values)
    other = dim if dim not in taken else free_dim(p, eqn.invars[0].aval.shape, taken)
    if other is None:
        return None
    values = [p.split(v, other) if v.ndim else v for v in values]
    found = same(p, eqn, values, other) if run is None else run(values)
    if found is None or other == dim:
        return found
    return [p.split(v, dim) if v.state == other and p.divides(v.shape[dim]) else v for v in found]
