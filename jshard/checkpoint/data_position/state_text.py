"""Converts the state of a data iterator to one line of JSON and back, without pickle."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jshard._types import Json
from jshard.errors import ShardingError

# What JSON has no form for is a dict whose only key is one of these.
_TUPLE = "~tuple"
_BYTES = "~bytes"
_ARRAY = "~array"
_SCALAR = "~scalar"
_ITEMS = "~items"  # of a dict with other keys than strings, or with one of these
IteratorState: TypeAlias = Any
"""The state of a data iterator: dicts, lists, tuples, numbers, strings, bytes and numpy arrays."""

_TAGS = (_TUPLE, _BYTES, _ARRAY, _SCALAR, _ITEMS)


def to_text(state: object) -> str:
    """Returns a state of dicts, lists, tuples, numbers, strings, bytes and numpy arrays as one line of JSON."""
    # Without pickle: a position is read from the manifest, which anyone may have written.
    return json.dumps(_encoded(state, "state"), separators=(",", ":"))


def from_text(text: str) -> IteratorState:
    """Inverts `to_text`."""
    return _decoded(json.loads(text))


def _encoded(value: object, where: str) -> Json:
    """Returns a value as JSON has it; `where` is its place in the state, for the error."""
    # A number of a subclass, such as numpy's float64, would come back as a plain one: those are encoded below.
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if type(value) is tuple:  # a named one could not be built again
        return {_TUPLE: _encoded_items(value, where)}
    if isinstance(value, list):
        return _encoded_items(value, where)
    if isinstance(value, bytes):
        return {_BYTES: _base64(value)}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        tag = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
        return {tag: [value.dtype.str, list(value.shape), _base64(value.tobytes())]}
    if isinstance(value, dict):
        return _encoded_dict(value, where)
    raise ShardingError(
        "The position in the data cannot be stored.",
        where=where,
        why=f"it is a {type(value).__name__}; a position is stored without pickle.",
        do="let get_state() return dicts, lists, numbers, strings, bytes or numpy arrays.",
    )


def _encoded_items(items: Sequence[object], where: str) -> list[Json]:
    return [_encoded(item, f"{where}[{number}]") for number, item in enumerate(items)]


def _encoded_dict(value: Mapping[Any, object], where: str) -> dict[str, Json]:
    if all(isinstance(key, str) and key not in _TAGS for key in value):
        return {key: _encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
    items = []
    for key, item in value.items():
        items.append([_encoded(key, where), _encoded(item, f"{where}[{key!r}]")])
    return {_ITEMS: items}


def _decoded(value: Json) -> IteratorState:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    # A tag is the only key: `_encoded_dict` encodes other dicts with such a key as items.
    tag = next(iter(value), None)
    if tag == _TUPLE:
        return tuple(_decoded(item) for item in value[tag])
    if tag == _BYTES:
        return base64.b64decode(value[tag])
    if tag == _ARRAY:
        return _decoded_array(*value[tag])
    if tag == _SCALAR:
        return _decoded_array(*value[tag])[()]
    if tag == _ITEMS:
        return {_decoded(key): _decoded(item) for key, item in value[tag]}
    return {key: _decoded(item) for key, item in value.items()}


def _decoded_array(dtype: str, shape: Sequence[int], values: str) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(values), np.dtype(dtype))
    return flat.reshape(shape).copy()  # an array over bytes is read-only


def _base64(values: bytes) -> str:
    return base64.b64encode(values).decode()
