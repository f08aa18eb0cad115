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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jshard._parsing import is_text, shown, whole_number
from jshard.api.revise import LAYER_SETTINGS
from jshard.errors import FourPartError, ShardingError
from jshard.plans.policies import Prefetch
from jshard.plans.remat import check_remat
from jshard.recipes.recipe import Recipe

R = TypeVar("R", bound=Recipe)
V = TypeVar("V")

Kind = Any
"""The annotation of a field: a class, or a form of typing."""

_NONES = {"none": None, "null": None}
_BOOLS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
_KEYS = "--print-config  # shows the keys and their values"
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None}  # as Python writes them, in any case


class SettingError(ShardingError):
    """A `--set` with an unknown key, or a value that does not fit."""


def override(recipe: R, settings: Sequence[str]) -> R:
    """Returns the recipe with some of its values replaced.

    Args:
        recipe: a dataclass, which may have others as fields. It is not changed.
        settings: texts `key=value`; values are parsed by the field's annotation.

    Raises:
        SettingError: an unknown key, a value of another type, or a value that the dataclass itself refuses.

    Returns:
        A new recipe of the same class.

    Examples:
        >>> override(recipe, ["learning_rate=1e-3", "model.n_layer=4"])
    """
    by_depth = sorted(_walk(recipe), key=lambda item: item[0].count("."))  # its own before nested ones
    keys = dict(by_depth)
    values: dict[str, object] = {}
    lines: dict[str, str] = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        line = _line(key, text) if equals else f"--set {shlex.quote(setting)}"
        if not equals or key not in keys:
            raise _unknown(key, text, line, keys)
        # Twice is refused, as the order would decide.
        if key in values:
            raise _refused(f"{lines[key]} {line}", f"{key} is set twice.", line)
        try:
            values[key] = read_value(text, keys[key])
        except ValueError:
            raise _refused(line, f"{key} takes {_described(keys[key])}, not {shown(text)}.", _KEYS) from None
        lines[key] = line
    return _rebuilt(recipe, "", values, lines)


# Values.


def read_value(text: str, kind: Kind) -> object:
    """Parses a text as a value of a type; raises a ValueError if it is not valid.

    Items of a tuple or a list are separated by commas. `Any` accepts a Python literal, true, false and none, and any
    other text as text; an unknown class accepts a Python literal of that class.
    """
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is typing.Annotated:
        return read_value(text, args[0])
    if origin in (typing.Union, types.UnionType):
        return _read_union(text, args)
    if origin is typing.Literal:
        return _chosen(text, {str(value): value for value in args})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _chosen(text, kind.__members__)
    if (origin or kind) in (tuple, list):
        return _read_items(text, origin or kind, args)
    if kind in _READERS:
        return _READERS[kind](text)
    return _literal(text, kind)


def _read_union(text: str, kinds: Sequence[Kind]) -> object:
    """Parses a text as the first type of a union that it fits."""

    def order(kind: Kind) -> tuple[bool, bool]:
        return kind is str, kind is types.NoneType  # str, which takes everything, is last; Literal "none" before None

    for kind in sorted(kinds, key=order):
        with contextlib.suppress(ValueError):
            return read_value(text, kind)
    raise ValueError(f"{text!r} fits none of {kinds}")


def _read_items(text: str, container: type[tuple | list], kinds: Sequence[Kind]) -> object:
    """Parses the items of a tuple or a list, with or without brackets; a last comma is allowed, as in Python."""
    items = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    parts = []
    if items:
        parts = [part.strip() for part in items.removesuffix(",").split(",")]
    if not kinds:  # without brackets in the annotation
        kinds = [Any] * len(parts)
    elif container is list or kinds[-1] is ...:
        kinds = [kinds[0]] * len(parts)
    # `strict`: another number of items raises a ValueError, like an item that does not fit.
    return container(read_value(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _int(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    number = float(text)  # people write steps as 1e6
    # From 2**53 on a float does not hold every whole number, and another one would be set than was written.
    if number.is_integer() and abs(number) < 2**53:
        return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _float(text: str) -> float:
    value = float(text)
    if math.isnan(value):  # inf has a meaning, as in clip_norm=inf
        raise ValueError("nan is not a number")
    return value


def _chosen(text: str, choices: Mapping[str, V]) -> V:
    """Returns the choice that a text names."""
    if text not in choices:
        raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
    return choices[text]


def _literal(text: str, kind: Kind) -> object:
    """Parses a Python literal of a class; for `Any` any other text is a text."""
    value: object = text
    if text.lower() in _WORDS:
        value = _WORDS[text.lower()]
    else:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = _evaluated(text)
    try:
        fits = kind is Any or isinstance(value, typing.get_origin(kind) or kind)
    except TypeError:  # a form of typing that isinstance does not know
        fits = False
    if not fits:
        raise ValueError(f"{text!r} is not a {kind}")
    return value


def _evaluated(text: str) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python about unknown escapes: the text is not a program
        return ast.literal_eval(text)


def _path(text: str) -> Path:
    if not is_text(text):
        raise ValueError(f"{shown(text)} is not a path")
    return Path(text)


_READERS: dict[Kind, Callable[[str], object]] = {
    str: str,
    Path: _path,
    int: _int,
    float: _float,
    bool: lambda text: _chosen(text.lower(), _BOOLS),
    types.NoneType: lambda text: _chosen(text.lower(), _NONES),
}


def _described(kind: Kind) -> str:
    """Returns a type as a user reads it in a message."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is typing.Literal:
        return f"{{{','.join(map(str, args))}}}"
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(_described, args))
    if kind is types.NoneType:
        return "none"
    if kind is bool:
        return "true|false"
    return getattr(kind, "__name__", str(kind))


# Keys.


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Kind]]:
    """Yields the keys and their types."""
    hints = _hints(type(node))
    for field in dataclasses.fields(node):
        if not field.init:
            continue
        value = getattr(node, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _walk(value, f"{name}.")
        else:
            yield name, hints.get(field.name, Any)


def _hints(cls: type) -> dict[str, Kind]:
    """Returns the types of a dataclass's fields; `Any` for an annotation that only type checkers can resolve."""
    hints: dict[str, Kind] = {}
    # The class itself last: its annotations replace those of its bases.
    for base in reversed(cls.__mro__):
        # An annotation as text is resolved where its class was written. `types` stands for a module that is gone.
        names = vars(sys.modules.get(base.__module__, types))
        for name, annotation in inspect.get_annotations(base).items():
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            try:  # one by one: the other fields keep their types
                hints |= typing.get_type_hints(holder, globalns=names)
            except (NameError, AttributeError, TypeError, SyntaxError):
                hints[name] = Any
    return hints


def _rebuilt(node: Any, prefix: str, values: Mapping[str, object], lines: Mapping[str, str]) -> Any:
    """Returns the dataclass with the values for it and for the dataclasses in it."""
    keys = [key for key in values if key.startswith(prefix)]
    if not keys:
        return node
    changes: dict[str, Any] = {}
    for key in keys:
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
        raise _refused(" ".join(lines[key] for key in keys), why, _KEYS) from error


def _unknown(key: str, text: str, line: str, keys: Mapping[str, Kind]) -> SettingError:
    """Returns the error for a setting that is not a key and a value, with a similar key if there is one."""
    has_fields = any(recipe_key.startswith(f"{key}.") for recipe_key in keys)
    if key in keys:
        why = "it is not key=value."
    elif has_fields:
        why = f"{key} is set field by field."
    else:
        why = f"the recipe has no key {key!r}."
    do = _KEYS
    similar = _similar_key(key, keys)
    if similar is not None and not has_fields:
        with contextlib.suppress(ValueError):  # the value is not one of that key: then it was not meant
            read_value(text, keys[similar])
            do = _line(similar, text)
    return _refused(line, "\n".join([why, *textwrap.wrap(f"its keys: {', '.join(keys)}", width=100)]), do)


def _similar_key(key: str, keys: Mapping[str, Kind]) -> str | None:
    """Returns the key that is most similar: first by its last name, as users forget `model.`, then as a whole."""
    last_names = {recipe_key: _last_name(recipe_key) for recipe_key in keys}
    names = difflib.get_close_matches(_last_name(key), list(last_names.values()), n=1)
    candidates = [recipe_key for recipe_key, last_name in last_names.items() if last_name in names]
    # No cutoff: the candidates have a similar last name, and one of them is proposed in any case.
    matches = difflib.get_close_matches(key, candidates, n=1, cutoff=0.0)
    return matches[0] if matches else None


def _last_name(key: str) -> str:
    return key.rpartition(".")[2]


def _refused(where: str, why: str, do: str) -> SettingError:
    return SettingError("A setting cannot be used.", where=where, why=why, do=do)


def _line(key: str, text: str) -> str:
    return f"--set {shlex.quote(f'{key}={text}')}"


# `--unit name=value`: settings of a model's units.


def _number_or_word(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return whole_number(text)
    return _WORDS.get(text.lower(), text)


def parse_units(texts: Sequence[str]) -> dict[str, bool | int | str | None]:
    """Parses settings such as `remat=full`, `prefetch=512MiB`, `reshard_after_forward=false`."""
    settings: dict[str, bool | int | str | None] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in LAYER_SETTINGS or not value or name in settings:
            why = f"the settings are {', '.join(LAYER_SETTINGS)}, each as in js.fully_shard and at most once."
            raise _refused_unit(text, why)
        settings[name] = _unit_value(text, name, value)
    return settings


def _unit_value(text: str, name: str, value: str) -> bool | int | str | None:
    if name == "remat":  # one of its policies is called "none"
        check_remat(value)
        return value
    parsed = _number_or_word(value)
    if name == "prefetch":
        Prefetch.parse(parsed)
    elif isinstance(parsed, str):
        raise _refused_unit(text, "it is true, false, none, or a number of neighbours.")
    return parsed


def _refused_unit(text: str, why: str) -> ShardingError:
    return ShardingError(
        "A setting of the units cannot be used.",
        where=f"--unit {text}",
        why=why,
        do="--unit remat=full --unit prefetch=2 --unit reshard_after_forward=false",
    )
