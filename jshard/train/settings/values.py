"""Values written on a command line: read as their annotated type, and types told in words."""

from __future__ import annotations

import ast
import decimal
import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_BOOLS: dict[str, Any] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_NONES: dict[str, Any] = dict.fromkeys(("none", "null"))
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}  # as Python writes them, in any case
_UNIONS = (typing.Union, types.UnionType)
_MOST_DIGITS = 30  # of an integer written 1e6: 1e999999999 would fill the memory


def read_value(text: str, kind: Any) -> Any:
    """The value that a text means for a type.

    Args:
        text: as typed, e.g. `1e-3`, `yes`, `none`, `1,2`.
        kind: int, float, bool, str, Path, None, a union, a Literal, an enum (by name), tuple or list of these; `Any`
            takes a Python literal, true, false and none, and any other text as text. Another class takes a Python
            literal of that class.

    Raises:
        ValueError: the text is no such value.
    """
    kind = _bare(kind)
    origin = typing.get_origin(kind)
    if kind is Any:
        return _anything(text)
    if kind is None or kind is types.NoneType:
        return _choice(text.lower(), _NONES)
    if origin in _UNIONS:
        return _first_that_fits(text, typing.get_args(kind))
    if origin is typing.Literal:
        return _choice(text, {written(value) or "": value for value in typing.get_args(kind)})
    if origin in (tuple, list):
        return _items(text, kind, origin)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choice(text, kind.__members__)
    return _READERS[kind](text) if kind in _READERS else _literal_of_class(text, origin or kind)


def type_text(kind: Any) -> str:
    """A type as a user reads it: `int`, `float | none`, `'none' | 'full'`, `tuple[int, ...]`."""
    kind = _bare(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return "any value"
    if kind is None or kind is types.NoneType:
        return "none"
    if origin in _UNIONS:
        return " | ".join(map(type_text, args))
    if origin is typing.Literal:
        return " | ".join(map(repr, args))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(kind.__members__)
    if origin is not None and args:
        inner = ("..." if arg is ... else type_text(arg) for arg in args)
        return f"{getattr(origin, '__name__', origin)}[{', '.join(inner)}]"
    return getattr(kind, "__name__", str(kind))


def written(value: Any) -> str | None:
    """The text that `read_value` reads as this value; None where there is none, as for a function."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str | int | float | Path):
        return str(value)
    if isinstance(value, tuple | list):
        items = [written(item) for item in value]
        return None if None in items else ",".join(map(str, items))
    return repr(value) if isinstance(value, dict) else None


def example(kind: Any, value: Any) -> str | None:
    """A text that the type takes: the present value where it has one to write, else any."""
    kind = _bare(kind)
    if value is not None:
        return written(value)
    if typing.get_origin(kind) in _UNIONS:
        kinds = [each for each in typing.get_args(kind) if each is not types.NoneType]
        return next(filter(None, (example(each, None) for each in kinds)), "none")
    if typing.get_origin(kind) is typing.Literal:
        return written(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (tuple, list):
        items = [example(each, None) for each in typing.get_args(kind) if each is not ...]
        return None if None in items else ",".join(map(str, items))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind.__members__), None)
    return {int: "8", float: "0.1", bool: "true", str: "text", Path: "some/path"}.get(kind)


def _bare(kind: Any) -> Any:
    """The type below the names that `NewType` and `type X = ...` give it, and below `Annotated`."""
    while True:
        if typing.get_origin(kind) is typing.Annotated:
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif type(kind).__name__ == "TypeAliasType":  # Python 3.12
            kind = kind.__value__
        else:
            return kind


def _bool(text: str) -> bool:
    return _choice(text.lower(), _BOOLS)


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = _decimal(text)
    # 1e6 is how people write steps; a float would lose digits of large ones.
    if number.is_finite() and number.adjusted() < _MOST_DIGITS and number == number.to_integral_value():
        return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _decimal(text: str) -> decimal.Decimal:
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise ValueError(f"{text!r} is not a number") from None


def _float(text: str) -> float:
    value = float(text)
    if math.isnan(value):  # inf has a meaning, as in clip_norm=inf
        raise ValueError("nan is not a number")
    return value


_READERS: Mapping[Any, Callable[[str], Any]] = {bool: _bool, int: _int, float: _float, str: str, Path: Path}


def _choice(text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
    return choices[text]


def _first_that_fits(text: str, kinds: tuple[Any, ...]) -> Any:
    for kind in sorted(kinds, key=lambda kind: _bare(kind) is str):  # str, which takes everything, comes last
        try:
            return read_value(text, kind)
        except ValueError:
            continue
    raise ValueError(f"{text!r} fits none of {' | '.join(map(type_text, kinds))}")


def _items(text: str, kind: Any, origin: type) -> Any:
    for opening, closing in ("()", "[]"):
        if text.startswith(opening) and text.endswith(closing):
            text = text[1:-1]
    parts = [part.strip() for part in text.removesuffix(",").split(",")] if text else []
    kinds = typing.get_args(kind)
    if origin is list or kinds[1:] == (...,):
        kinds = kinds[:1] * len(parts)
    if len(kinds) != len(parts):
        raise ValueError(f"{text!r} has {len(parts)} items, not {len(kinds)}")
    return origin(read_value(part, each) for part, each in zip(parts, kinds, strict=True))


def _anything(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _literal_of_class(text: str, cls: Any) -> Any:
    value = _anything(text)
    try:
        fits = isinstance(value, cls)
    except TypeError:  # a form of typing that isinstance does not know
        fits = False
    if not fits:
        raise ValueError(f"{text!r} is not a {type_text(cls)}")
    return value
