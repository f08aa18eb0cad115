"""The state of an iterator as text, and back: exactly, and without pickle.

Plain JSON is not enough: it turns tuples into lists, and Grain's `ConcatThenSplitIterDataset` (0.2.18) then takes "no
remainder" for an empty one and drops a document.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from jshard._errors import ShardingError

_TUPLE, _BYTES, _ARRAY, _SCALAR, _ITEMS = _TAGS = tuple("~tuple ~bytes ~array ~scalar ~items".split())


def to_text(state: Any) -> str:
    """A state of dicts, lists, tuples, numbers, texts, bytes and numpy arrays as one line of JSON.

    Raises:
        ShardingError: it holds something else.
    """
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
        do="let get_state() return dicts, lists, numbers, texts, bytes or numpy arrays.",
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
