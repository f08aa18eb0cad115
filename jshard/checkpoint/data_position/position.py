"""Stores the position of any data iterator as one string, equal on every process, and moves an iterator there.

A position is of the run, or one of each process. Beside it stands what the order of samples depends on
(`sample_order`): the same count of samples stands for other samples if that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard, cast, runtime_checkable

import jax

from jshard._processes import gather_texts
from jshard.checkpoint.data_position import sample_order
from jshard.checkpoint.data_position.state_text import IteratorState, from_text, to_text
from jshard.checkpoint.errors import CheckpointError
from jshard.errors import RunError

_FORMAT = 1
_SHOWN = 200  # characters of a state in a message


@runtime_checkable
class DataPosition(Protocol):
    """An object with a position in the data: jshard's batches, and every Grain iterator.

    With a class attribute `global_position = True`, the state is that of the run, equal on every process, and any
    number of processes can restore it. Without it, each process has its own state. An attribute `sample_order` is
    what `sample_order.describe` says of its data; Grain's iterators are described without it.
    """

    def get_state(self) -> IteratorState:
        """Returns the position: dicts, lists, tuples, numbers, strings, bytes and numpy arrays."""
        ...

    def set_state(self, state: IteratorState, /) -> None:
        """Goes there."""
        ...


def is_data_position(value: object) -> TypeGuard[DataPosition]:
    """Returns whether a part of a state is stored as a position and restored in place."""
    # `isinstance` with a protocol takes a microsecond per name.
    return hasattr(value, "get_state") and hasattr(value, "set_state") and not isinstance(value, type)


def position_text(position: DataPosition) -> str:
    """Returns the stored form of a position, equal on every process; every process calls it."""
    state = position.get_state()
    stored: dict[str, IteratorState] = {"format": _FORMAT, "kind": type(position).__name__}
    if _is_global(position, state):
        stored |= _global_position(position, state)
    else:
        stored |= _positions_of_processes(position, state)
    return to_text(stored)


def _global_position(position: DataPosition, state: IteratorState) -> dict[str, IteratorState]:
    """Returns the fields of a position that all processes share."""
    if isinstance(state, dict):
        # Stored once, beside the state: below, as all processes have it.
        state = {key: value for key, value in state.items() if key != "pipeline"}
    text = to_text(state)
    # Many lanes make a long string, and one per process would not fit: they compare its start and its digest.
    start_and_digest = f"{text[:_SHOWN]} {hashlib.sha256(text.encode()).hexdigest()}"
    texts, pipelines = _gathered(start_and_digest, _pipeline_of(position))
    # A position of one process, restored on all, would repeat samples of the others and skip some.
    if len(set(texts)) > 1:
        raise RunError(
            "The processes are not at the same place in the data.",
            where=[f"process {index}: {text[:_SHOWN]}" for index, text in enumerate(texts)],
            why=f"a {type(position).__name__} has one position for the run: every process must have taken the same "
            "number of batches.",
            do="save between steps, at the same step on every process.",
        )
    return {"state": state, "pipeline": sample_order.agreed(pipelines)}


def _positions_of_processes(position: DataPosition, state: IteratorState) -> dict[str, IteratorState]:
    """Returns the fields of a position that each process has for itself."""
    states, pipelines = _gathered(state, _pipeline_of(position))
    return {"processes": states, "pipelines": pipelines}


def _gathered(
    value: IteratorState, pipeline: sample_order.Description | None
) -> tuple[list[IteratorState], list[sample_order.Description | None]]:
    """Returns the values and the descriptions of all processes, in their order; in one exchange."""
    values = []
    pipelines = []
    for text in gather_texts(to_text([value, pipeline])):
        process_value, process_pipeline = from_text(text)
        values.append(process_value)
        pipelines.append(process_pipeline)
    return values, pipelines


def set_position(position: DataPosition, text: str) -> None:
    """Moves an iterator to a stored position; one that does not fit leaves it unchanged."""
    check_position(position, text)
    stored = from_text(text)
    if "state" in stored:
        position.set_state(stored["state"])
    else:
        # As many processes as saved: see `_check_position_of_process`.
        position.set_state(stored["processes"][jax.process_index()])


def check_position(position: DataPosition, text: str) -> None:
    """Raises the `CheckpointError` that `set_position` would raise, without moving anything; called before a restore.

    Of iterators of other libraries, only Grain's are compared with those that were saved.
    """
    stored = _parsed(text)
    if stored is None:
        raise CheckpointError(
            "The stored value is not a position in the data.",
            where=f"restored into a {type(position).__name__}",
            why=f"it is the string {text[:_SHOWN]!r}.",
            do="put a string there in `like`, or save the batches object.",
        )
    is_global = "state" in stored
    if is_global != _is_global(position, stored.get("state")):
        raise CheckpointError(
            "The position in the data is of another kind.",
            where=f"saved from a {stored['kind']}, restored into a {type(position).__name__}",
            why="one counts the samples of the whole run, the other those of each process.",
            do=f"restore into a {stored['kind']}; or leave the position out, and choose the start:\n"
            "GlobalBatches(..., start=4096)",
        )
    if is_global:
        _check_global_position(position, stored)
    else:
        _check_position_of_process(position, stored)


def _parsed(text: str) -> Mapping[str, IteratorState] | None:
    """Returns the fields of a stored position; None if the text is another string."""
    try:
        stored = from_text(text)
    # Any string may be stored there, also one of thousands of brackets.
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
    if not isinstance(stored, dict) or not {"format", "kind"} <= stored.keys():
        return None
    return stored


def _check_global_position(position: DataPosition, stored: Mapping[str, IteratorState]) -> None:
    # jshard's batches have it: they compare more than the fields that every position has.
    check_state = getattr(position, "check_state", None)
    if check_state is not None:
        check_state(stored["state"])
    _check_pipeline(position, stored.get("pipeline"))


def _check_position_of_process(position: DataPosition, stored: Mapping[str, IteratorState]) -> None:
    num_saved = len(stored["processes"])
    if num_saved != jax.process_count():
        raise CheckpointError(
            "The position in the data is for another number of processes.",
            where=f"a {stored['kind']}",
            why=f"{num_saved} processes saved one each, {jax.process_count()} restore: the progress in each shard "
            "cannot be redistributed.",
            do=f"restore with {num_saved} processes; or leave the position out, and choose the start, with batches\n"
            "that any number of processes can restore: GlobalBatches(dataset, batch_size=..., rows=mesh, start=4096)",
        )
    if "pipelines" in stored:  # not in positions of earlier versions
        _check_pipeline(position, stored["pipelines"][jax.process_index()])


def misfit(where: Sequence[str], again: str) -> CheckpointError:
    """Returns the error for a position in other data, or in the same data in another order.

    Args:
        where: the differences, a line each.
        again: the call that starts at a sample of choice.
    """
    return CheckpointError(
        "The position in the data does not fit the data.",
        where=where,
        why="it counts samples: in another order some would repeat and others would be skipped.",
        do="build the batches from the data, the seed and the settings of the saved run;\n"
        f"or leave the position out, and choose the start: {again}.",
    )


def _check_pipeline(position: DataPosition, saved: sample_order.Description | None) -> None:
    """Raises `CheckpointError` if the data were saved with other settings of their order; old positions have none."""
    if saved is None:
        return
    differences = sample_order.differences(saved, _pipeline_of(position))
    if differences:
        is_of_jshard = _own_description(position) is not None
        kind = type(position).__name__ if is_of_jshard else "GlobalBatches"
        raise misfit(differences, f"{kind}(..., start=4096)")


def _pipeline_of(position: DataPosition) -> sample_order.Description | None:
    own_description = _own_description(position)
    if own_description is not None:
        return own_description
    return sample_order.describe(position)


def _own_description(position: DataPosition) -> sample_order.Description | None:
    """Returns the description that an iterator has of its data, as those of jshard have; None if it has none."""
    description = getattr(position, "sample_order", None)
    if not isinstance(description, dict):
        return None
    return cast(sample_order.Description, description)


def _is_global(position: DataPosition, state: IteratorState) -> bool:
    """Returns whether a position is that of the run, and not of one process."""
    # Grain's ElasticIterator: every process has the same, complete state.
    is_elastic = isinstance(state, dict) and set(state) == {"global_next_index"}
    return is_elastic or bool(getattr(position, "global_position", False))
