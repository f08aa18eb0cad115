"""The messages between the processes of a run: lines of JSON, and the one reader of them.

Anybody may connect to an open port and write any bytes. So each listener reads a line of bounded length, compares its
proof of the token as bytes, and decodes only what passed: see `opened`. Nothing here raises for any input.

A sealed line is the proof, a space and the JSON object. The proof is a signature of a nonce that the receiver has made
and of the bytes that follow, so that a recorded line cannot be sent again. The token itself is never sent.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from typing import TypeVar, get_args, get_type_hints

from jshard._types import Json

LINE_BYTES = 16384
"""The longest line, without its end."""

_INTEGER_DIGITS = 18  # fits into 64 bits; Python itself would take thousands

T = TypeVar("T")

Message = dict[str, Json]
"""A JSON object. What it has is not known before `parsed` has checked it."""


def encoded(message: Mapping[str, object]) -> bytes:
    """Encodes a message as a line, without its end."""
    return json.dumps(message).encode()


def decoded(line: bytes) -> Message | None:
    """Decodes a line; None if it is too long, or anything but one JSON object of plain values.

    JSON as Python reads it has more: NaN, integers of any size, keys that occur twice, and half characters that no
    stream can print. None of these has a meaning in a message, and each would raise somewhere later.
    """
    if len(line) > LINE_BYTES:
        return None
    try:
        message = _DECODER.decode(line.decode())
        json.dumps(message, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    return message


def sealed(message: Mapping[str, object], token: bytes, nonce: str) -> bytes:
    """Encodes a message with the proof, for the creator of the nonce, that the sender knows the token."""
    body = encoded(message)
    return _proof(body, token, nonce) + b" " + body


def opened(line: bytes, token: bytes, nonce: str) -> Message | None:
    """Decodes a sealed line; None if its proof is wrong. Until then only its length is looked at."""
    if len(line) > LINE_BYTES:
        return None
    proof, _, body = line.partition(b" ")
    # In constant time, so that the time of an answer reveals nothing of the proof.
    if not hmac.compare_digest(proof, _proof(body, token, nonce)):
        return None
    return decoded(body)


def with_token(message: Mapping[str, object], token: str) -> bytes:
    """Encodes a message with the token itself, for a receiver that gave it to this process."""
    return token.encode() + b" " + encoded(message)


def without_token(line: bytes, token: str) -> Message | None:
    """Decodes a line of `with_token`; None if it has another token. Until then only its length is looked at."""
    if len(line) > LINE_BYTES:
        return None
    stated, _, body = line.partition(b" ")
    if not hmac.compare_digest(stated, token.encode()):
        return None
    return decoded(body)


def parsed(kind: type[T], message: object) -> T | None:
    """Parses a dataclass of plain values; None if a field is missing, unknown, or of another type."""
    types = _types(kind)
    if not isinstance(message, dict) or message.keys() != types.keys():
        return None
    if not all(_fits(message[name], types[name]) for name in types):
        return None
    return kind(**message)


@functools.cache
def _types(kind: type) -> dict[str, tuple[type, ...]]:
    """Returns the allowed types of each field: those of a union, or the only one."""
    # A plain `list` or `dict` has no arguments: who uses such a field checks its items.
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}


def _fits(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):  # also an int for Python
        return bool in types
    return isinstance(value, types)


def _proof(body: bytes, token: bytes, nonce: str) -> bytes:
    return hmac.new(token, nonce.encode() + b"|" + body, hashlib.sha256).hexdigest().encode()


def _unique(pairs: list[tuple[str, object]]) -> Message:
    """Makes an object of its pairs, each key once: two readers could see different values under one key."""
    message = dict(pairs)
    if len(message) < len(pairs):
        raise ValueError("a key occurs twice")
    return message


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _integer(text: str) -> int:
    if len(text.removeprefix("-")) > _INTEGER_DIGITS:
        raise ValueError("not an integer of 64 bits")
    return int(text)


# `parse_constant` is called for NaN and the infinities.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_integer, parse_constant=_finite, strict=True
)
