"""JSON and TOML from files that anyone may have written, and the check that a value has the expected form.

Every fault is a `FormError`, a ValueError whose text says what is wrong and where in the value. The readers of the
files turn it into an error in four parts. Without this module each reader would meet the other exceptions by itself:
a RecursionError of nested lists, a KeyError or a TypeError of a value that is not what was written.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from jshard.errors import printable

T = TypeVar("T")

# Deeper values could be parsed, but not walked: a recursive function takes one or more frames per level.
_MOST_LEVELS = 100
_MOST_TOML_BYTES = 1 << 16
# Time and memory of `tomllib` grow with the square of the parts of a key: 30000 of them take gigabytes.
_KEY_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:{_KEY_PART}[ \t]*+\.[ \t]*+){{{_MOST_LEVELS}}}")
_INT_BITS = 63  # those of a signed 64-bit integer; `float` raises for much larger ones
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_MOST_SHOWN = 80  # characters
_TOO_DEEP = f"it is nested more than {_MOST_LEVELS} levels deep"


class FormError(ValueError):
    """A text that is not JSON or TOML, or a value that has not the expected form."""


def parse_json(raw: bytes | str) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        FormError: it is not JSON, or nested too deeply.
    """
    try:
        text = _decoded(raw)
        value = json.loads(text)
    except RecursionError:
        raise FormError(_TOO_DEEP) from None
    except ValueError as error:
        raise FormError(f"it is not JSON: {_reason(error)}") from error
    # Counting brackets is fast, and most texts have few. (Brackets in strings only cause a needless walk.)
    if text.count("[") + text.count("{") > _MOST_LEVELS:
        _check_levels(value)
    return value


def parse_toml(raw: bytes | str) -> dict[str, Any]:
    """Returns the table of a TOML text in UTF-8.

    Raises:
        FormError: it is not TOML, too long, or nested too deeply.
    """
    if len(raw) > _MOST_TOML_BYTES:
        raise FormError(f"it is longer than {_MOST_TOML_BYTES} bytes, the most that is read as TOML")
    try:
        text = _decoded(raw)
        if _LONG_KEY.search(text):
            raise FormError(_TOO_DEEP)
        value = tomllib.loads(text)
    except RecursionError:
        raise FormError(_TOO_DEEP) from None
    except FormError:  # also a ValueError, and complete already
        raise
    except ValueError as error:
        raise FormError(f"it is not TOML: {_reason(error)}") from error
    _check_levels(value)
    return value


def _decoded(raw: bytes | str) -> str:
    # Drops the byte-order mark that some editors write first.
    return raw if isinstance(raw, str) else raw.decode("utf-8-sig")


def _reason(error: ValueError) -> str:
    if "integer string conversion" in str(error):  # its text is advice for programmers
        return "it has a number of thousands of digits"
    return str(error)


def _check_levels(value: object) -> None:
    """Raises a FormError for a value that is nested too deeply; by itself it needs no stack."""
    containers = [value]
    for _ in range(_MOST_LEVELS):
        inner: list[object] = []
        for container in containers:
            inner += _inner_containers(container)
        if not inner:
            return
        containers = inner
    raise FormError(_TOO_DEEP)


def _inner_containers(value: object) -> list[object]:
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    else:
        return []
    return [item for item in items if isinstance(item, dict | list)]


def checked(value: Any, kind: type[T], where: str = "") -> T:
    """Returns the value, if it has the form of a type; it is not converted, so that a dataclass is still a dict.

    Args:
        value: made of JSON's types.
        kind: a TypedDict, which allows further keys; a dataclass, which allows no others; `dict[str, X]`, `list[X]`,
            `tuple[X, Y]`; unions, `Literal`, int, float (which takes an int), str, bool, None, Any.
        where: the place of the value, for the error.

    Raises:
        FormError: it has another form, an integer is beyond 64 bits, a float is not finite, or a text is not Unicode.

    Examples:
        >>> checked({"steps": [1, 2]}, dict[str, list[int]])
        {'steps': [1, 2]}
    """
    fault = _fault(value, kind, where)
    if fault is not None:
        raise FormError(fault)
    return value


def check_writable_values(value: object, *, finite: bool) -> None:
    """Checks what a value is made of, wherever it is: parts of it whose form is not known will be written, too.

    Args:
        value: made of JSON's types.
        finite: whether numbers must be finite; JSON has no others, TOML has.

    Raises:
        FormError: a text or a key cannot be written to a file or name one, or a number is not finite.
    """
    # A list instead of recursion, for which a value may be too deep.
    unchecked = [value]
    while unchecked:
        item = unchecked.pop()
        if isinstance(item, dict):
            unchecked += [*item, *item.values()]
        elif isinstance(item, list):
            unchecked += item
        elif isinstance(item, str) and not is_text(item):
            raise FormError(f"{shown(item)} is not a text")
        elif finite and isinstance(item, float) and not math.isfinite(item):
            raise FormError(f"{item} is not a finite number")


# Plain values.


def whole_number(text: str) -> int:
    """Returns the number in decimal digits, as options have them.

    `str.isdecimal` and `int` also take the digits of other alphabets, and `int` fails on thousands of digits with a
    text of its own.

    Raises:
        ValueError: it is none, or has more than 18 digits.
    """
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a whole number of at most 18 digits")
    return int(text)


def is_int(value: object) -> bool:
    """Returns whether a value is an integer of 64 bits, and no bool."""
    # The exact type: bool is a subclass of int.
    return type(value) is int and value.bit_length() <= _INT_BITS


def is_number(value: object) -> bool:
    """Returns whether a value is an integer of 64 bits or a finite float."""
    return is_int(value) or (type(value) is float and math.isfinite(value))


def is_text(value: object) -> bool:
    """Returns whether a value is a text that can be written to a file, and name one.

    It has no zeros, which end a file's name, and no halves of surrogate pairs, which UTF-8 cannot encode.
    """
    if not isinstance(value, str) or "\0" in value:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_null(value: object) -> bool:
    return value is None


def shown(value: object) -> str:
    """Returns a value of a file for a message: short, and without characters that a terminal would obey."""
    if isinstance(value, dict):
        return f"a table of {len(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and not is_int(value) and not isinstance(value, bool):
        return f"an integer of {value.bit_length()} bits"
    text = printable(repr(value))
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}..."


# The form of a value. `_fault` returns the first fault as text, and raises nothing: a union tries each of its kinds.


@dataclasses.dataclass(frozen=True)
class _PlainKind:
    """How a plain type is checked, and what an error calls it."""

    fits: Callable[[object], bool]
    name: str


_PLAIN_KINDS: Mapping[Any, _PlainKind] = {
    int: _PlainKind(is_int, "a whole number"),
    float: _PlainKind(is_number, "a finite number"),
    str: _PlainKind(is_text, "a text"),
    bool: _PlainKind(_is_bool, "true or false"),
    types.NoneType: _PlainKind(_is_null, "null"),
}


def _fault(value: object, kind: Any, where: str) -> str | None:
    """Returns the first fault of a value, and its place; None if it has the form of a type."""
    if kind is Any:
        return None
    if kind in _PLAIN_KINDS:
        plain = _PLAIN_KINDS[kind]
        return None if plain.fits(value) else _mismatch(value, where, plain.name)
    if typing.is_typeddict(kind):
        return _fault_of_table(value, kind, where)
    if dataclasses.is_dataclass(kind):
        return _fault_of_fields(value, kind, where)
    return _fault_of_generic(value, typing.get_origin(kind), typing.get_args(kind), where)


def _fault_of_generic(value: object, origin: Any, args: Sequence[Any], where: str) -> str | None:
    if origin in (typing.Union, types.UnionType):
        return _fault_of_union(value, args, where)
    if origin is Literal:
        return _fault_of_choice(value, args, where)
    if origin in (dict, Mapping):
        _, item_kind = args
        return _fault_of_mapping(value, item_kind, where)
    if origin in (list, Sequence) or (origin is tuple and args[-1] is ...):
        return _fault_of_items(value, args[0], where)
    assert origin is tuple, origin
    return _fault_of_tuple(value, args, where)


def _fault_of_union(value: object, kinds: Sequence[Any], where: str) -> str | None:
    faults = [_fault(value, kind, where) for kind in kinds]
    if None in faults:
        return None
    # The first kind is the one that was meant: the others say only that it may be left out.
    return faults[0]


def _fault_of_choice(value: object, choices: Sequence[Any], where: str) -> str | None:
    for choice in choices:
        if type(value) is type(choice) and value == choice:  # True is not 1 here
            return None
    return _mismatch(value, where, f"one of {', '.join(map(repr, choices))}")


def _fault_of_table(value: object, kind: Any, where: str) -> str | None:
    """Returns the fault of a table that stays a dict: it may have further keys."""
    if not isinstance(value, dict):
        return _mismatch(value, where, "a table")
    missing = [key for key in kind.__annotations__ if key in kind.__required_keys__ and key not in value]
    if missing:
        return f"{where or 'it'} lacks {', '.join(missing)}"
    for key, item_kind in _hints(kind).items():
        if key in value:
            fault = _fault(value[key], item_kind, _below(where, key))
            if fault is not None:
                return fault
    return None


def _fault_of_fields(value: object, kind: Any, where: str) -> str | None:
    """Returns the fault of a table that is to become a dataclass: unlike a TypedDict it has no further keys."""
    if not isinstance(value, dict):
        return _mismatch(value, where, "a table")
    fault = _fault_of_keys(value, dataclasses.fields(kind), where)
    if fault is not None:
        return fault
    hints = _hints(kind)
    for key, item in value.items():
        fault = _fault(item, hints[key], _below(where, key))
        if fault is not None:
            return fault
    return None


def _fault_of_keys(value: Mapping[Any, Any], fields: Sequence[dataclasses.Field[Any]], where: str) -> str | None:
    """Returns the fault of the keys of a table: one that is no field, or fields that are missing."""
    names = {field.name for field in fields}
    # A misspelt key comes first: it explains why another one is missing.
    for key in value:
        if key not in names:
            return f"{where or 'it'} has the unknown key {shown(key)}"
    missing = [field.name for field in fields if field.name not in value and _is_required(field)]
    if missing:
        return f"{where or 'it'} lacks {', '.join(missing)}"
    return None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _fault_of_mapping(value: object, kind: Any, where: str) -> str | None:
    if not isinstance(value, dict):
        return _mismatch(value, where, "a table")
    for key, item in value.items():
        if not is_text(key):
            return _mismatch(key, f"a key of {where or 'it'}", "a text")
        fault = _fault(item, kind, _below(where, key))
        if fault is not None:
            return fault
    return None


def _fault_of_items(value: object, kind: Any, where: str) -> str | None:
    if not isinstance(value, list):
        return _mismatch(value, where, "a list")
    for position, item in enumerate(value):
        fault = _fault(item, kind, f"{where}[{position}]")
        if fault is not None:
            return fault
    return None


def _fault_of_tuple(value: object, kinds: Sequence[Any], where: str) -> str | None:
    if not isinstance(value, list) or len(value) != len(kinds):
        return _mismatch(value, where, f"a list of {len(kinds)}")
    for position, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        fault = _fault(item, kind, f"{where}[{position}]")
        if fault is not None:
            return fault
    return None


def _mismatch(value: object, where: str, expected: str) -> str:
    return f"{where or 'it'} is {shown(value)}, not {expected}"


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
