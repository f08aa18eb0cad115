"""The table itself, and what every rule uses."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jshard.engine.values import Eqn, State, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

Rule = Callable[["Partitioner", Eqn, list[Value]], list[Value] | None]

RULES: dict[str, Rule] = {}
TAKE_PARTIAL: set[str] = set()
"""Primitives whose rule takes operands in any state, and is asked always."""
KEEP_STORED: set[str] = set()
"""Primitives whose rule takes stored shards as they are."""


def rule(*names: str, takes_partial: bool = False, keeps_stored: bool = False) -> Callable[[Rule], Rule]:
    """Enters a function into the table.

    Args:
        names: of primitives.
        takes_partial: the rule is called whatever the states are.
        keeps_stored: and stored shards are not gathered for it.
    """

    def enter(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
            if takes_partial or keeps_stored:
                TAKE_PARTIAL.add(name)
            if keeps_stored:
                KEEP_STORED.add(name)
        return function

    return enter


def same(p: "Partitioner", eqn: Eqn, values: Sequence[Value], state: State, **params: Any) -> list[Value]:
    """The equation on what the shards hold; all results in one state."""
    return [Value(x, state) for x in p.bind(eqn, [v.x for v in values], **params)]


def split_dim(values: Sequence[Value]) -> int:
    """The dim that the first split operand is split along."""
    return next(v.dim for v in values if v.is_split)
