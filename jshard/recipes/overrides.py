"""`--set key=value` overrides values of a recipe, `--unit name=value` those of units. Nested keys are dotted.

Values are parsed by the types of the recipe's dataclasses: `1e6` is also an int, `yes` and `off` are bools, and `1,2`
a tuple.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import enum
import inspect
import math
import shlex
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jshard._parsing import is_text, shown, whole_number
from jshard.api.revise import SETTINGS
from jshard.errors import FourPartError, ShardingError
from jshard.plans.policies import Prefetch
from jshard.plans.remat import check_remat
from jshard.recipes.recipe import Recipe

R = TypeVar("R", bound=Recipe)

_NONES = {"none": None, "null": None}
_BOOLS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
_KEYS = "--print-config  # shows the keys and their values"
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}  # as Python writes them, in any case


class SettingError(ShardingError):
    """A `--set` with an unknown key, or a value that does not fit."""


def override(recipe: R, settings: Sequence[str]) -> R:
    """The recipe with some of its values replaced.

    Args:
        recipe: a dataclass, which may have others as fields. It is not changed.
        settings: texts `key=value`; values are parsed by the field's annotation.

    Raises:
        SettingError: an unknown key, a value of another type, or a value that the dataclass itself refuses.

    Returns:
        A new recipe of the same class.

    Example:
        override(recipe, ["learning_rate=1e-3", "model.n_layer=4"])
    """
    keys = dict(sorted(_walk(recipe), key=lambda item: item[0].count(".")))  # its own before nested ones
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        line = _line(key, text) if equals else f"--set {shlex.quote(setting)}"
        if not equals or key not in keys:
            raise _unknown(key, text, line, keys)
        if key in values:
            raise _refused(f"{lines[key]} {line}", f"{key} is set twice.", line)
        try:
            values[key], lines[key] = read_value(text, keys[key]), line
        except ValueError:
            raise _refused(line, f"{key} takes {_described(keys[key])}, not {shown(text)}.", _KEYS) from None
    return _rebuilt(recipe, "", values, lines)


# Values.


def read_value(text: str, kind: Any) -> Any:
    """The value of a text for a type; a ValueError if it is not valid.

    Items of a tuple or a list are separated by commas. `Any` accepts a Python literal, true, false and none, and any
    other text as text; an unknown class accepts a Python literal of that class.
    """
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return read_value(text, args[0])
    if origin in (typing.Union, types.UnionType):  # str, which takes everything, is last; Literal "none" before None
        for each in sorted(args, key=lambda kind: (kind is str, kind is types.NoneType)):
            with contextlib.suppress(ValueError):
                return read_value(text, each)
        raise ValueError(f"{text!r} fits none of {args}")
    if origin is typing.Literal:
        return _chosen(text, {str(value): value for value in args})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _chosen(text, kind.__members__)
    if (origin or kind) in (tuple, list):
        inside = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
        parts = [part.strip() for part in inside.removesuffix(",").split(",")] if inside else []
        is_open = origin is not tuple or args[-1] is ...
        kinds = [args[0] if args else Any] * len(parts) if is_open else args
        return (origin or kind)(read_value(part, each) for part, each in zip(parts, kinds, strict=True))
    return _READERS[kind](text) if kind in _READERS else _literal(text, kind)


def _int(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    number = float(text)  # people write steps as 1e6
    if number.is_integer() and abs(number) < 2**53:
        return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _float(text: str) -> float:
    value = float(text)
    if math.isnan(value):  # inf has a meaning, as in clip_norm=inf
        raise ValueError("nan is not a number")
    return value


def _chosen(text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
    return choices[text]


def _literal(text: str, kind: Any) -> Any:
    """A Python literal of a class; for `Any` also a text."""
    value: Any = text
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = _WORDS[text.lower()] if text.lower() in _WORDS else _evaluated(text)
    try:
        fits = kind is Any or isinstance(value, typing.get_origin(kind) or kind)
    except TypeError:  # a form of typing that isinstance does not know
        fits = False
    if not fits:
        raise ValueError(f"{text!r} is not a {kind}")
    return value


def _evaluated(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python about unknown escapes: the text is not a program
        return ast.literal_eval(text)


def _path(text: str) -> Path:
    if not is_text(text):
        raise ValueError(f"{shown(text)} is not a path")
    return Path(text)


_READERS: dict[Any, Any] = {
    str: str,
    Path: _path,
    int: _int,
    float: _float,
    bool: lambda text: _chosen(text.lower(), _BOOLS),
    types.NoneType: lambda text: _chosen(text.lower(), _NONES),
}


def _described(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"{{{','.join(map(str, args))}}}"
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(_described, args))
    if kind is types.NoneType:
        return "none"
    return "true|false" if kind is bool else getattr(kind, "__name__", str(kind))


# Keys.


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys and their types."""
    hints = _hints(type(node))
    for field in filter(lambda field: field.init, dataclasses.fields(node)):
        value, name = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _walk(value, f"{name}.")
        else:
            yield name, hints.get(field.name, Any)


def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields; `Any` for an annotation that only type checkers can resolve."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules.get(base.__module__, types))
        for name, annotation in inspect.get_annotations(base).items():
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            try:  # one by one: the other fields keep their types
                hints |= typing.get_type_hints(holder, globalns=names)
            except (NameError, AttributeError, TypeError, SyntaxError):
                hints[name] = Any
    return hints


def _rebuilt(node: Any, prefix: str, values: Mapping[str, Any], lines: Mapping[str, str]) -> Any:
    """The dataclass with the values for it and for the dataclasses in it."""
    here = [key for key in values if key.startswith(prefix)]
    if not here:
        return node
    changes: dict[str, Any] = {}
    for key in here:
        name, nested, _ = key.removeprefix(prefix).partition(".")
        if not nested:
            changes[name] = values[key]
        elif name not in changes:
            changes[name] = _rebuilt(getattr(node, name), f"{prefix}{name}.", values, lines)
    try:
        # All at once: one value may be valid only with another.
        return dataclasses.replace(node, **changes)
    except SettingError:
        raise
    except (ValueError, TypeError, ArithmeticError, AssertionError) as error:  # d_model % n_head, with 0 heads
        text = f"{error.what} {error.why}" if isinstance(error, FourPartError) else str(error)
        why = f"{type(node).__name__} refuses it: {text or 'one of its assertions failed.'}"
        raise _refused(" ".join(lines[key] for key in here), why, _KEYS) from error


def _unknown(key: str, text: str, line: str, keys: Mapping[str, Any]) -> SettingError:
    last = {other: other.rpartition(".")[2] for other in keys}
    names = difflib.get_close_matches(key.rpartition(".")[2], list(last.values()), n=1)
    same = [other for other in keys if last[other] in names]  # by their last names, then by the whole key
    fields = [other for other in keys if other.startswith(f"{key}.")]
    why = f"the recipe has no key {key!r}."
    if key in keys or fields:
        why = "it is not key=value." if key in keys else f"{key} is set field by field."
    near, do = next(iter(difflib.get_close_matches(key, same, n=1, cutoff=0.0)), None), _KEYS
    if near is not None and not fields:
        with contextlib.suppress(ValueError):
            read_value(text, keys[near])
            do = _line(near, text)
    return _refused(line, "\n".join([why, *textwrap.wrap(f"its keys: {', '.join(keys)}", width=100)]), do)


def _refused(where: str, why: str, do: str) -> SettingError:
    return SettingError("A setting cannot be used.", where=where, why=why, do=do)


def _line(key: str, text: str) -> str:
    return f"--set {shlex.quote(f'{key}={text}')}"


# `--unit name=value`: settings of a model's units.


def _number_or_word(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return whole_number(text)
    return _WORDS.get(text.lower(), text)


def parse_units(texts: Sequence[str]) -> dict[str, Any]:
    """The settings in texts such as `remat=full`, `prefetch=512MiB`, `reshard_after_forward=false`."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        why = ""
        if name not in SETTINGS or not value or name in found:
            why = f"the settings are {', '.join(SETTINGS)}, each as in js.fully_shard and at most once."
        elif name == "remat":  # one of its policies is called "none"
            check_remat(value)
            found[name] = value
        else:
            found[name] = _number_or_word(value)
            if name == "prefetch":
                Prefetch.parse(found[name])
            elif isinstance(found[name], str):
                why = "it is true, false, none, or a number of neighbours."
        if why:
            raise ShardingError(
                "A setting of the units cannot be used.",
                where=f"--unit {text}",
                why=why,
                do="--unit remat=full --unit prefetch=2 --unit reshard_after_forward=false",
            )
    return found
