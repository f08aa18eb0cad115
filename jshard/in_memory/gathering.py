"""`js.gather`: whole values of a sharded state, a leaf at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard._types import PyTree
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.groups import group_of_state
from jshard.checkpoint.state import leaves as _leaves
from jshard.in_memory.arrays import moved
from jshard.in_memory.hosts import on_hosts
from jshard.in_memory.live_state import LiveState

Where = Literal["host", "process0", "all"]


def gather(state: PyTree, *, where: Where = "host") -> PyTree:
    """Returns the whole values of a sharded state as a plain tree, in which nothing is padded.

    It works through the state leaf by leaf. On the way to hosts, a device holds at most one shard of another device
    beside its own, and what one process has never passes through another. All processes call it together; those of its
    mesh alone, if the state is on a mesh of some processes.

    Args:
        state: an annotated model, an optimizer, Linen parameters, a `TrainState`, or a dict of these.
        where: `"host"`: NumPy arrays in every process. `"process0"`: in the first process alone; the others get None.
            `"all"`: JAX arrays that every device of the state's mesh holds whole.

    Returns:
        For Flax's nnx objects a nested dict with the keys of `nnx.to_pure_dict`: `values["blocks"][0]["kernel"]`. The
        state of an optimizer is under the names of its parameters: `values["opt_state"][0]["mu"]["blocks"]...`. Other
        trees keep their structure. A random key becomes its numbers. `js.load` is the inverse.

    Raises:
        CheckpointError: `where` is another text, or an array is deleted, as after a step that donates it.

    Examples:
        >>> values = js.gather(model)
        >>> jax.tree.map(np.shape, values.pop("head"))
        {'kernel': (64, 8)}
    """
    if where not in get_args(Where):
        raise CheckpointError(
            "Values cannot be gathered to this place.",
            where=f"gather(where={where!r})",
            why=f"the places are {', '.join(get_args(Where))}.",
            do='js.gather(model, where="host")',
        )
    group = group_of_state(state, None)
    live = LiveState(state, group)
    live.check_has_values()
    receivers = group.members if where == "host" else group.members[:1]
    values: dict[_leaves.Path, object] = {}
    for path, leaf in _leaves.flatten(state).items():
        key = _leaves.text(path)
        is_array = key in live.leaves and live.leaves[key].is_array
        if not is_array:
            values[path] = leaf
        elif where == "all":
            values[path] = _on_all_devices(live, key)
        else:
            values[path] = _on_hosts(live, key, receivers)
    is_receiver = where == "all" or jax.process_index() in receivers
    return _leaves.plain_like(state, values) if is_receiver else None


def _on_all_devices(live: LiveState, key: str) -> np.ndarray | jax.Array:
    array = live.source_of(key)
    shape = live.leaves[key].shape
    if not isinstance(array, jax.Array):
        return np.array(array)
    return moved(array, shape, _replicated(array, shape))


def _on_hosts(live: LiveState, key: str, receivers: Sequence[int]) -> np.ndarray | None:
    """Returns an array in some processes; None in the others."""
    array = live.source_of(key)
    if not isinstance(array, jax.Array):
        return np.array(array)
    if array.is_fully_addressable:  # each process has one of its own, or this one alone calls
        receivers = [process for process in receivers if process == jax.process_index()]
    return on_hosts(array, live.leaves[key].shape, receivers)


def _replicated(array: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns an array of this shape that all devices of an array hold whole."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype), sharding=sharding)
