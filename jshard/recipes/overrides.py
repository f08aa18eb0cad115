"""`--set key=value`: a recipe with other values in it, read by the types of its dataclasses."""

from __future__ import annotations

import ast
import collections
import dataclasses
import decimal
import difflib
import enum
import functools
import math
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jshard._errors import FourPartError, ShardingError
from jshard.recipes.recipe import Recipe

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


# `--set key=value`: a recipe with other values in it, read by the types of its dataclasses.

R = TypeVar("R", bound=Recipe)
Names = tuple[str, ...]


class SettingError(ShardingError):
    """A `--set` that names no key of the recipe, or whose value does not fit."""


@dataclasses.dataclass(frozen=True)
class _Key:
    path: Names
    kind: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class _Problem:
    owner: Names  # of the dataclass that cannot be built because of it
    where: str
    why: str
    do: str


def override(recipe: R, settings: Sequence[str]) -> R:
    """The recipe with some of its values replaced.

    Args:
        recipe: a dataclass, with more of them in its fields. They are not changed.
        settings: texts `key=value`; the key of a nested field is dotted. Values are read by the field's annotation.

    Raises:
        SettingError: unknown keys, values of another type, or that the dataclass itself refuses; all of
            them in one message.

    Returns:
        A new recipe of the same class.

    Example:
        override(recipe, ["learning_rate=1e-3", "model.n_layer=4"])
    """
    table = _table(recipe)
    given, problems = _split(settings, table)
    values: dict[Names, tuple[str, Any]] = {}
    for key, texts in given.items():
        read = _read(key, texts, table, recipe)
        if isinstance(read, _Problem):
            problems.append(read)
        else:
            values[table[key].path] = (_line(key, texts[0]), read.value)
    changed = _rebuilt(recipe, (), values, table, problems)
    if problems:
        raise _error(problems, table)
    return changed


def _split(settings: Sequence[str], table: Mapping[str, _Key]) -> tuple[dict[str, list[str]], list[_Problem]]:
    given: dict[str, list[str]] = collections.defaultdict(list)
    problems: list[_Problem] = []
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if equals and key:
            given[key].append(text)
        else:
            near = _nearest(setting.strip(), list(table)) or next(iter(table))
            why = f"{setting!r} is not key=value."
            problems.append(_Problem((), f"--set {shlex.quote(setting)}", why, _example_line(near, table[near])))
    return given, problems


def _table(recipe: Recipe) -> dict[str, _Key]:
    """The keys, those of the recipe itself before nested ones."""
    found = sorted(_walk(recipe, ()), key=lambda key: len(key.path))
    return {".".join(key.path): key for key in found}


def _walk(node: Any, path: Names) -> Iterator[_Key]:
    hints = _hints(type(node))
    for field in filter(lambda field: field.init, dataclasses.fields(node)):
        value = getattr(node, field.name)
        below = (*path, field.name)
        if _is_nested(value):
            yield from _walk(value, below)
        else:
            yield _Key(below, hints.get(field.name, Any), value)


def _is_nested(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields; `Any` for an annotation that cannot be resolved."""
    try:
        return typing.get_type_hints(cls)
    except Exception:  # a name known to type checkers only, for one field: the other fields keep their types
        hints: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            names = vars(sys.modules.get(base.__module__, types))
            for name, annotation in vars(base).get("__annotations__", {}).items():
                holder = types.SimpleNamespace(__annotations__={name: annotation})
                try:
                    hints |= typing.get_type_hints(holder, globalns=names)
                except Exception:
                    hints[name] = Any
        return hints


@dataclasses.dataclass(frozen=True)
class _Read:
    value: Any


def _read(key: str, texts: list[str], table: Mapping[str, _Key], recipe: Recipe) -> _Read | _Problem:
    owner = tuple(key.split(".")[:-1])
    if key not in table:
        return _unknown(key, texts[-1], table, recipe)
    if len(texts) > 1:
        lines = [_line(key, text) for text in texts]
        return _Problem(owner, " ".join(lines), f"{key} is set {len(texts)} times.", lines[-1])
    kind, value = table[key].kind, table[key].value
    try:
        return _Read(read_value(texts[0], kind))
    except ValueError:
        no_text = example(kind, value) is None
        do = "change it in the model file: it has no text form." if no_text else _example_line(key, table[key])
        return _Problem(owner, _line(key, texts[0]), f"{key} takes {type_text(kind)}, not {texts[0]!r}.", do)


def _unknown(key: str, text: str, table: Mapping[str, _Key], recipe: Recipe) -> _Problem:
    owner, asked = tuple(key.split(".")[:-1]), _line(key, text)
    fields = [other for other in table if other.startswith(f"{key}.")]
    if fields:
        node = functools.reduce(getattr, key.split("."), recipe)
        why = f"{key} is a {type(node).__name__}, which is set field by field."
        return _Problem(owner, asked, why, _example_line(fields[0], table[fields[0]]))
    why, near = f"the recipe has no key {key!r}.", _nearest(key, list(table))
    if near is None:
        return _Problem(owner, asked, why, f"take one of its keys, for example {next(iter(table))}.")
    fits = not isinstance(_read(near, [text], table, recipe), _Problem)
    return _Problem(owner, asked, why, _line(near, text) if fits else _example_line(near, table[near]))


def _nearest(key: str, known: list[str]) -> str | None:
    """The key that was meant: one with the most similar last name, and of several the most similar as a whole."""
    last = {other: other.rpartition(".")[2] for other in known}
    names = difflib.get_close_matches(key.rpartition(".")[2], list(last.values()), n=1)
    same = [other for other in known if last[other] in names]
    return next(iter(difflib.get_close_matches(key, same, n=1, cutoff=0.0)), None)


def _rebuilt(
    node: Any, path: Names, values: Mapping[Names, tuple[str, Any]], table: Mapping[str, _Key], problems: list[_Problem]
) -> Any:
    """The dataclass with the values that belong to it and below; what it refuses goes to `problems`."""
    here = {at: value for at, value in values.items() if at[: len(path)] == path}
    if not here:
        return node
    changes = {at[-1]: value for at, (_, value) in here.items() if len(at) == len(path) + 1}
    for name in dict.fromkeys(at[len(path)] for at in here if len(at) > len(path) + 1):
        changes[name] = _rebuilt(getattr(node, name), (*path, name), values, table, problems)
    if any(problem.owner[: len(path)] == path for problem in problems):
        return node  # it would be judged by values that were not meant
    try:
        # All at once: one value may be right only with the other.
        return dataclasses.replace(node, **changes)
    except (ValueError, AssertionError) as error:
        text = f"{error.what} {error.why}" if isinstance(error, FourPartError) else str(error)
        why = f"{type(node).__name__} refuses it: {text or 'an assertion of it does not hold.'}"
        asked = " ".join(line for line, _ in here.values())
        now = " ".join(_example_line(name, table[name]) for name in map(".".join, here))
        problems.append(_Problem(path, asked, why, f"{now}  # the recipe's own"))
        return node


def _error(problems: Sequence[_Problem], table: Mapping[str, _Key]) -> SettingError:
    why = [problem.why for problem in problems]
    if any("has no key" in line for line in why):
        why += textwrap.wrap(f"its keys: {', '.join(table)}", width=100)
    many = len(problems) > 1
    return SettingError(
        f"{len(problems)} settings cannot be used." if many else "A setting cannot be used.",
        where=[problem.where for problem in problems],
        why="\n".join(why),
        do="\n".join(problem.do for problem in problems),
    )


def _example_line(name: str, key: _Key) -> str:
    return _line(name, example(key.kind, key.value) or "VALUE")


def _line(key: str, text: str) -> str:
    return f"--set {shlex.quote(f'{key}={text}')}"
