"""Converts the position of any data iterator to one string, equal on every process, and back, without pickle."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jshard._processes import gather_texts
from jshard.checkpoint import sample_order
from jshard.checkpoint.errors import CheckpointError
from jshard.errors import RunError, ShardingError

_TUPLE, _BYTES, _ARRAY, _SCALAR, _ITEMS = _TAGS = tuple("~tuple ~bytes ~array ~scalar ~items".split())


def to_text(state: Any) -> str:
    """A state of dicts, lists, tuples, numbers, strings, bytes and numpy arrays as one line of JSON."""
    return json.dumps(_encoded(state, "state"), separators=(",", ":"))


def from_text(text: str) -> Any:
    """The inverse of `to_text`."""
    return _decoded(json.loads(text))


def _encoded(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        return {_TUPLE: [_encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, bytes):
        return {_BYTES: _base64(value)}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        tag = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
        return {tag: [value.dtype.str, list(value.shape), _base64(value.tobytes())]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {key: _encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
        items = [[_encoded(k, where), _encoded(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_ITEMS: items}
    raise ShardingError(
        "The position in the data cannot be stored.",
        where=where,
        why=f"it is a {type(value).__name__}; a position is stored without pickle.",
        do="let get_state() return dicts, lists, numbers, strings, bytes or numpy arrays.",
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), None)
    if tag == _TUPLE:
        return tuple(_decoded(item) for item in value[tag])
    if tag == _BYTES:
        return base64.b64decode(value[tag])
    if tag in (_ARRAY, _SCALAR):
        dtype, shape, raw = value[tag]
        array = np.frombuffer(base64.b64decode(raw), np.dtype(dtype)).reshape(shape).copy()
        return array if tag == _ARRAY else array[()]
    if tag == _ITEMS:
        return {_decoded(key): _decoded(item) for key, item in value[tag]}
    return {key: _decoded(item) for key, item in value.items()}


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# Positions of iterators, and whether one fits an iterator.

_FORMAT = 1
_SHOWN = 200  # characters of a state in a message


@runtime_checkable
class DataPosition(Protocol):
    """An object with a position in the data: jshard's batches, and every Grain iterator.

    With a class attribute `global_position = True`, the state is that of the run, equal on every process, and any
    number of processes can restore it. Without it, each process has its own state. An attribute `sample_order` is
    what `sample_order.describe` says of its data; Grain's iterators are described without it.
    """

    def get_state(self) -> Any:
        """The position: dicts, lists, tuples, numbers, strings, bytes and numpy arrays."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Goes there."""
        ...


def is_data_position(value: Any) -> bool:
    """Whether a part of a state is stored as a position and restored in place."""
    # `isinstance` with a protocol takes a microsecond per name.
    return hasattr(value, "get_state") and hasattr(value, "set_state") and not isinstance(value, type)


def position_text(position: DataPosition) -> str:
    """The stored form of a position, equal on every process; every process calls it."""
    state = position.get_state()
    kind, pipeline = type(position).__name__, _pipeline_of(position)
    if not _is_global(position, state):
        gathered = [from_text(own) for own in gather_texts(to_text([state, pipeline]))]
        states, pipelines = [own for own, _ in gathered], [own for _, own in gathered]
        return to_text({"format": _FORMAT, "kind": kind, "processes": states, "pipelines": pipelines})
    if isinstance(state, dict):
        state = {key: value for key, value in state.items() if key != "pipeline"}
    text = to_text(state)
    # Many lanes make a long string, and one per process would not fit: they compare its start and its digest.
    head = f"{text[:_SHOWN]} {hashlib.sha256(text.encode()).hexdigest()}"
    gathered = [from_text(own) for own in gather_texts(to_text([head, pipeline]))]
    heads = [own for own, _ in gathered]
    if len(set(heads)) > 1:
        raise RunError(
            "The processes are not at the same place in the data.",
            where=[f"process {index}: {head[:_SHOWN]}" for index, head in enumerate(heads)],
            why=f"a {kind} has one position for the run: every process must have taken the same number of batches.",
            do="save between steps, at the same step on every process.",
        )
    together = sample_order.agreed([own for _, own in gathered])
    return to_text({"format": _FORMAT, "kind": kind, "state": state, "pipeline": together})


def set_position(position: DataPosition, text: str) -> None:
    """Moves an iterator to a stored position; one that does not fit leaves it unchanged."""
    check_position(position, text)
    stored = from_text(text)
    position.set_state(stored["state"] if "state" in stored else stored["processes"][jax.process_index()])


def check_position(position: DataPosition, text: str) -> None:
    """Raises the `CheckpointError` that `set_position` would raise, without moving anything; called before a restore.

    Of iterators of other libraries, only Grain's are compared with those that were saved.
    """
    try:
        stored = from_text(text)
        known = {"format", "kind"} <= stored.keys()
    except (ValueError, AttributeError, TypeError, RecursionError):
        stored, known = {}, False
    if not known:
        raise CheckpointError(
            "The stored value is not a position in the data.",
            where=f"restored into a {type(position).__name__}",
            why=f"it is the string {text[:_SHOWN]!r}.",
            do="put a string there in `like`, or save the batches object.",
        )
    if ("state" in stored) != _is_global(position, stored.get("state")):
        raise CheckpointError(
            "The position in the data is of another kind.",
            where=f"saved from a {stored['kind']}, restored into a {type(position).__name__}",
            why="one counts the samples of the whole run, the other those of each process.",
            do=f"restore into a {stored['kind']}; or leave the position out, and choose the start:\n"
            "GlobalBatches(..., start=4096)",
        )
    if "state" in stored:
        check = getattr(position, "check_state", None)
        if check is not None:
            check(stored["state"])
        _check_pipeline(position, stored.get("pipeline"))
        return
    saved, here = len(stored["processes"]), jax.process_count()
    if saved != here:
        raise CheckpointError(
            "The position in the data is for another number of processes.",
            where=f"a {stored['kind']}",
            why=f"{saved} processes saved one each, {here} restore: the progress in each shard cannot be"
            " redistributed.",
            do=f"restore with {saved} processes; or leave the position out, and choose the start, with batches\n"
            "that any number of processes can restore: GlobalBatches(dataset, batch_size=..., rows=mesh, start=4096)",
        )
    if "pipelines" in stored:  # not in positions of earlier versions
        _check_pipeline(position, stored["pipelines"][jax.process_index()])


def misfit(where: Sequence[str], again: str) -> CheckpointError:
    """The error for a position in other data, or in the same data in another order.

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
    if lines := sample_order.differences(saved, _pipeline_of(position)):
        name = type(position).__name__ if isinstance(_own_order(position), dict) else "GlobalBatches"
        raise misfit(lines, f"{name}(..., start=4096)")


def _pipeline_of(position: DataPosition) -> sample_order.Description | None:
    own = _own_order(position)
    return own if isinstance(own, dict) else sample_order.describe(position)


def _own_order(position: DataPosition) -> Any:
    return getattr(position, "sample_order", None)


def _is_global(position: DataPosition, state: Any) -> bool:
    # Grain's ElasticIterator: every process has the same, complete state.
    elastic = isinstance(state, dict) and set(state) == {"global_next_index"}
    return elastic or bool(getattr(position, "global_position", False))
