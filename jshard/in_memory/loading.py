"""`js.load`: values from a tree in memory, placed as a state is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import jax

from jshard._processes import ProcessGroup, exchange
from jshard._types import PyTree
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import Names
from jshard.checkpoint.groups import group_of_state
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import ForeignCheckpoint
from jshard.checkpoint.restore_operation import Extra, Missing, RestoreOperation
from jshard.checkpoint.saving import TIMEOUT_S
from jshard.in_memory.live_state import SHOWN_AS, LiveState, NamedArrays, StateOfOneProcess

T = TypeVar("T")


def load(
    like: T,
    values: PyTree | None,
    *,
    only: str | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Missing = "error",
    extra: Extra = "error",
    names: Names | None = None,
    timeout_s: float = TIMEOUT_S,
) -> T:
    """Places values from a tree in memory as a state is sharded; the inverse of `js.gather`.

    Leaves are matched as by `js.checkpoint.restore`: by the same paths, with the same arguments, and the same messages.
    The values may be whole arrays in every process, or in one process alone: then each device receives its shards, a
    leaf at a time, and no device ever holds more.

    Args:
        like: a state, live or abstract (`js.abstract_init`), that says where every array belongs. It is not changed.
        values: the tree: from `js.gather`, or any nested dict with the paths of `like`, of arrays of NumPy, JAX or
            another library. None in a process that has none; another process then has all of them.
        only: as in `js.checkpoint.restore`.
        rename: as in `js.checkpoint.restore`.
        missing: what to do if there is no value for a leaf: "error", or "init" to keep its value in `like`.
        extra: what to do with values that `like` has no place for: "error", or "ignore" to skip them, with a warning.
        names: another library's names for the leaves, as from `hf_names(config)` in a model file: `values` is then a
            flat dict by those names.
        timeout_s: how long to wait for other processes.

    Returns:
        New objects of the kinds in `like`.

    Raises:
        CheckpointError: the leaves do not match, or no process has values.

    Examples:
        >>> values = js.gather(model)
        >>> model = js.load(model, values)
        >>> head = js.load(model.head, values.pop("head"))
    """
    group = group_of_state(like, None)
    opened = _opened(values, names, group, timeout_s)
    operation = RestoreOperation(opened, like, only=only, rename=rename, missing=missing, extra=extra, group=group)
    return operation.run(verify=False, timeout_s=timeout_s)


def _opened(values: PyTree | None, names: Names | None, group: ProcessGroup, timeout_s: float) -> Opened:
    """Returns the values as an open checkpoint, whichever processes have them."""
    have_values = exchange("values", values is not None, timeout_s=timeout_s, group=group)
    holders = [process for process, has_values in zip(group.members, have_values, strict=True) if has_values]
    if not holders:
        raise CheckpointError(
            "There are no values to load.",
            where="load(like, None)",
            why="no process has a tree of values.",
            do='values = js.gather(model, where="process0"); model = js.load(model, values)',
        )
    source = None if values is None else _source(values, names, group)
    if len(holders) == len(group.members):
        assert source is not None, "every process has values"
        return source
    holder = holders[0]
    if jax.process_index() != holder:
        source = None
    return StateOfOneProcess(source, holder, group, timeout_s=timeout_s)


def _source(values: PyTree, names: Names | None, group: ProcessGroup) -> Opened:
    if names is None:
        live = LiveState(values, group)
        live.check_has_values()
        return live
    return ForeignCheckpoint(SHOWN_AS, NamedArrays(values), names)
