"""Which processes save or restore a state together: all of a run, or those whose devices its arrays are on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax

from jshard._processes import ProcessGroup, all_processes
from jshard._text import counted
from jshard._types import PyTree
from jshard.checkpoint.data_position.position import is_data_position
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.state import leaves as _leaves
from jshard.errors import FourPartError

_Key = TypeVar("_Key")


def group_of_state(state: PyTree, processes: Sequence[int] | None) -> ProcessGroup:
    """Returns the processes that restore a state together; see `group_of_leaves`."""
    if processes is None and jax.process_count() == 1:
        return all_processes()
    return group_of_leaves(_leaves_of(state), processes)


def group_of_leaves(
    leaves: Mapping[_leaves.Path, object], processes: Sequence[int] | None, *, format: str = "packed"
) -> ProcessGroup:
    """Returns the processes that save or restore a state together; this process is one of them.

    Arrays over several processes say which: those of their mesh. Arrays on the devices of one process say nothing, as
    each process may have such arrays of its own.

    Args:
        leaves: those of a state, arrays or abstract ones.
        processes: the indices of the processes, if the caller says which.
        format: see `save`.

    Raises:
        CheckpointError: this process is not one of them, or some leaves need others, too.
    """
    if processes is None and jax.process_count() == 1:
        return all_processes()
    group = _group_of_arrays(leaves) if processes is None else _checked(processes)
    if not group.is_all:
        by_text = _leaves.by_text(leaves)
        _check_holds_arrays(group, by_text)
        _check_needs_no_others(group, by_text, format)
    return group


def _leaves_of(state: PyTree) -> Mapping[_leaves.Path, object]:
    """Returns the leaves of a state; none if it is not one, which is reported where it is used."""
    try:
        return _leaves.flatten(state)
    except (FourPartError, TypeError, ValueError):
        return {}


def processes_of_arrays(leaves: Mapping[_Key, object]) -> dict[_Key, frozenset[int]]:
    """Returns the processes whose devices each array is on; leaves that are no arrays are left out."""
    processes = {}
    # Most arrays of a state have one of a few shardings, whose devices are many.
    by_sharding: dict[jax.sharding.Sharding, frozenset[int]] = {}
    for key, leaf in leaves.items():
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.Sharding):
            continue
        if sharding not in by_sharding:
            by_sharding[sharding] = frozenset(device.process_index for device in sharding.device_set)
        processes[key] = by_sharding[sharding]
    return processes


def _group_of_arrays(leaves: Mapping[_leaves.Path, object]) -> ProcessGroup:
    """Returns the processes of the mesh of all arrays that are over several processes; without one, all processes."""
    meshes = set()
    for members in processes_of_arrays(leaves).values():
        if len(members) > 1:
            meshes.add(members)
    if len(meshes) != 1:
        # Of several meshes, no process may hold a part of all arrays: the save says which are missing where.
        return all_processes()
    (members,) = meshes
    return ProcessGroup(tuple(sorted(members)))


def _check_holds_arrays(group: ProcessGroup, leaves: Mapping[str, object]) -> None:
    """Raises `CheckpointError` unless this process is in the group, and no process outside of it holds an array."""
    if jax.process_index() not in group.members:
        raise _not_a_member(group, leaves)
    shared = []
    for path, members in processes_of_arrays(leaves).items():
        if not members.issubset(group.members):
            shared.append(path)
    if shared:
        raise CheckpointError(
            f"Other processes hold {counted(len(shared), 'array')} of the state, too.",
            where=shared,
            why=f"it is saved or restored by {_named(group)} alone.",
            do="leave out `processes`, and let all processes that hold these arrays call it.",
        )


def _check_needs_no_others(group: ProcessGroup, leaves: Mapping[str, object], format: str) -> None:
    """Raises `CheckpointError` if a leaf, or the format, needs all processes of the run."""
    positions = [path for path, leaf in leaves.items() if is_data_position(leaf)]
    if positions or format == "orbax":
        raise _needs_all(group, positions)


def _checked(processes: Sequence[int]) -> ProcessGroup:
    """Returns processes as a group; raises `CheckpointError` if these are no processes of the run."""
    known = range(jax.process_count())
    are_known = bool(processes) and all(process in known for process in processes)
    if not are_known or len(set(processes)) < len(processes):
        raise CheckpointError(
            "These processes cannot save or restore together.",
            where=f"processes={list(processes)}",
            why=f"each is one of the {len(known)} processes of the run, counted from 0, and named once.",
            do="processes=[jax.process_index()]",
        )
    return ProcessGroup(tuple(sorted(processes)))


def _named(group: ProcessGroup) -> str:
    """Returns a text such as "processes 0, 2"."""
    noun = "process" if len(group.members) == 1 else "processes"
    return f"{noun} {', '.join(map(str, group.members))}"


def _not_a_member(group: ProcessGroup, leaves: Mapping[str, object]) -> CheckpointError:
    return CheckpointError(
        f"Process {jax.process_index()} does not save or restore this state.",
        where=list(processes_of_arrays(leaves)),
        why=f"that is for {_named(group)}, whose devices its arrays are on: they do not wait for this one.",
        do=f"if jax.process_index() in {group.members}:  # around the call",
    )


def _needs_all(group: ProcessGroup, positions: Sequence[str]) -> CheckpointError:
    """Makes the error for what all processes of a run do together."""
    if positions:
        where = list(positions)
        why = "a position in the data is that of all processes"
        do = "leave them out of the state: save them in all processes, to another path."
    else:
        where = ['format="orbax"']
        why = "Orbax's own form is written by all"
        do = 'format="packed"'
    return CheckpointError(
        f"The state needs all processes, and only {_named(group)} would save or restore it.",
        where=where,
        why=f"{why}, of which there are {jax.process_count()}.",
        do=do,
    )
