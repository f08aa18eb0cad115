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
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from jshard.errors import printable

T = TypeVar("T")

# Deeper values could be parsed, but not walked: a recursive function takes one or more frames per level.
_MOST_LEVELS = 100
_MOST_TOML_BYTES = 1 << 16
# Time and memory of `tomllib` grow with the square of the parts of a key: 30000 of them take gigabytes.
_KEY_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:{_KEY_PART}[ \t]*+\.[ \t]*+){{{_MOST_LEVELS}}}")
_INT_BITS = 63  # larger integers fit neither an array's index nor a float


class FormError(ValueError):
    """A text that is not JSON or TOML, or a value that has not the expected form."""


def parse_json(raw: bytes | str) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        FormError: it is not JSON, or nested too deeply.
    """
    try:
        text = _decoded(raw)
        value = json.loads(text)
    except RecursionError:
        raise FormError(_TOO_DEEP) from None
    except ValueError as error:
        raise FormError(f"it is not JSON: {_said(error)}") from error
    # Counting brackets is fast, and most texts have few.
    if text.count("[") + text.count("{") > _MOST_LEVELS:
        _check_levels(value)
    return value


def parse_toml(raw: bytes | str) -> dict[str, Any]:
    """The table of a TOML text in UTF-8.

    Raises:
        FormError: it is not TOML, too long, or nested too deeply.
    """
    if len(raw) > _MOST_TOML_BYTES:
        raise FormError(f"it is longer than {_MOST_TOML_BYTES} bytes, the most that is read as TOML")
    try:
        text = _decoded(raw)
        value = None if _LONG_KEY.search(text) else tomllib.loads(text)
    except RecursionError:
        value = None
    except ValueError as error:
        raise FormError(f"it is not TOML: {_said(error)}") from error
    if value is None:
        raise FormError(_TOO_DEEP)
    _check_levels(value)
    return value


def checked(value: Any, kind: type[T], where: str = "") -> T:
    """The value, if it has the form of a type; it is not converted, so that a dataclass is still a dict.

    Args:
        value: made of JSON's types.
        kind: a TypedDict, which allows further keys; a dataclass, which allows no others; `dict[str, X]`, `list[X]`,
            `tuple[X, Y]`; unions, `Literal`, int, float (which takes an int), str, bool, None, Any.
        where: the place of the value, for the error.

    Raises:
        FormError: it has another form, an integer is beyond 64 bits, a float is not finite, or a text is not Unicode.

    Example:
        >>> checked({"steps": [1, 2]}, dict[str, list[int]])
        {'steps': [1, 2]}
    """
    fault = _fault(value, kind, where)
    if fault is not None:
        raise FormError(fault)
    return value


def check_writable_values(value: Any, *, finite: bool) -> None:
    """Checks what a value is made of, wherever it is: parts of it whose form is not known will be written, too.

    Args:
        value: made of JSON's types.
        finite: whether numbers must be finite; JSON has no others, TOML has.

    Raises:
        FormError: a text or a key cannot be written to a file or name one, or a number is not finite.
    """
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, dict):
            rest += [*each, *each.values()]
        elif isinstance(each, list):
            rest += each
        elif isinstance(each, str) and not is_text(each):
            raise FormError(f"{shown(each)} is not a text")
        elif finite and isinstance(each, float) and not math.isfinite(each):
            raise FormError(f"{each} is not a finite number")


def whole_number(text: str) -> int:
    """The number in decimal digits, as options have them; a ValueError if it is none, or has more than 18 digits.

    `str.isdecimal` and `int` also take the digits of other alphabets, and `int` fails on thousands of digits with a
    text of its own.
    """
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a whole number of at most 18 digits")
    return int(text)


_WHOLE = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)

# The form of a value. `_fault` returns the first fault as text: a union tries each of its kinds.


def _fault(value: Any, kind: Any, where: str) -> str | None:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return None
    if origin in (typing.Union, types.UnionType):
        return _fault_of_union(value, args, where)
    if origin is Literal:
        is_one = any(type(value) is type(choice) and value == choice for choice in args)
        return None if is_one else _other(value, where, f"one of {', '.join(map(repr, args))}")
    if typing.is_typeddict(kind):
        return _fault_of_table(value, kind, where)
    if dataclasses.is_dataclass(kind):
        return _fault_of_fields(value, kind, where)
    if origin in (dict, Mapping):
        return _fault_of_mapping(value, args[1], where)
    if origin in (list, Sequence):
        return _fault_of_items(value, args[0], where)
    if origin is tuple and args[-1] is ...:
        return _fault_of_items(value, args[0], where)
    if origin is tuple:
        return _fault_of_tuple(value, args, where)
    fits, name = _PLAIN[kind]
    return None if fits(value) else _other(value, where, name)


def _fault_of_union(value: Any, kinds: Sequence[Any], where: str) -> str | None:
    faults = [_fault(value, kind, where) for kind in kinds]
    # The first kind is the one that was meant: the others say only that it may be left out.
    return None if None in faults else faults[0]


def _fault_of_table(value: Any, kind: Any, where: str) -> str | None:
    if not isinstance(value, dict):
        return _other(value, where, "a table")
    missing = [key for key in kind.__annotations__ if key in kind.__required_keys__ and key not in value]
    if missing:
        return f"{where or 'it'} lacks {', '.join(missing)}"
    hints = _hints(kind)
    faults = (_fault(value[key], hints[key], _below(where, key)) for key in hints if key in value)
    return next((fault for fault in faults if fault is not None), None)


def _fault_of_fields(value: Any, kind: Any, where: str) -> str | None:
    """The fault of a table that is to become a dataclass: unlike a TypedDict it has no further keys."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        return _other(value, where, "a table")
    unknown = [key for key in value if key not in fields]
    if unknown:
        return f"{where or 'it'} has the unknown key {shown(unknown[0])}"
    missing = [name for name, field in fields.items() if name not in value and _is_needed(field)]
    if missing:
        return f"{where or 'it'} lacks {', '.join(missing)}"
    hints = _hints(kind)
    faults = (_fault(item, hints[key], _below(where, key)) for key, item in value.items())
    return next((fault for fault in faults if fault is not None), None)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _fault_of_mapping(value: Any, kind: Any, where: str) -> str | None:
    if not isinstance(value, dict):
        return _other(value, where, "a table")
    for key, item in value.items():
        if not is_text(key):
            return _other(key, f"a key of {where or 'it'}", "a text")
        fault = _fault(item, kind, _below(where, key))
        if fault is not None:
            return fault
    return None


def _fault_of_items(value: Any, kind: Any, where: str) -> str | None:
    if not isinstance(value, list):
        return _other(value, where, "a list")
    faults = (_fault(item, kind, f"{where}[{number}]") for number, item in enumerate(value))
    return next((fault for fault in faults if fault is not None), None)


def _fault_of_tuple(value: Any, kinds: Sequence[Any], where: str) -> str | None:
    if not isinstance(value, list) or len(value) != len(kinds):
        return _other(value, where, f"a list of {len(kinds)}")
    pairs = enumerate(zip(value, kinds, strict=True))
    faults = (_fault(item, kind, f"{where}[{number}]") for number, (item, kind) in pairs)
    return next((fault for fault in faults if fault is not None), None)


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def is_int(value: Any) -> bool:
    """Whether it is an integer of 64 bits, and no bool."""
    return type(value) is int and value.bit_length() <= _INT_BITS


def is_number(value: Any) -> bool:
    """Whether it is an integer of 64 bits or a finite float."""
    return is_int(value) or (type(value) is float and math.isfinite(value))


def is_text(value: Any) -> bool:
    """Whether it is a text that can be written to a file, and name one: without halves of surrogates and zeros."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


_PLAIN: Mapping[Any, tuple[Any, str]] = {
    int: (is_int, "a whole number"),
    float: (is_number, "a finite number"),
    str: (is_text, "a text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    types.NoneType: (lambda value: value is None, "null"),
}


def _other(value: Any, where: str, expected: str) -> str:
    return f"{where or 'it'} is {shown(value)}, not {expected}"


def shown(value: Any) -> str:
    """A value of a file in a message: short, and without characters that a terminal would obey."""
    if isinstance(value, dict | list):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and not is_int(value) and not isinstance(value, bool):
        return f"an integer of {value.bit_length()} bits"
    text = printable(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHOWN = 80  # characters
_TOO_DEEP = f"it is nested more than {_MOST_LEVELS} levels deep"


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _decoded(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode("utf-8-sig")


def _said(error: ValueError) -> str:
    if "integer string conversion" in str(error):
        return "it has a number of thousands of digits"
    return str(error)


def _check_levels(value: Any) -> None:
    """Raises a FormError for a value that is nested too deeply; by itself it needs no stack."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
        if not level:
            return
    raise FormError(_TOO_DEEP)


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, dict | list)]
