"""`--set key=value`: a recipe with other values in it, and `--unit name=value`. The key of a nested field is dotted.

Tyro reads the values by the types of the recipe's dataclasses, as it reads the other options of a command, with a
few texts more: `1e6` for an int, `yes` and `off` for a bool, `none`, and `1,2` for a tuple.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import difflib
import enum
import functools
import inspect
import math
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jshard.api.fully_shard import SETTINGS
from jshard.errors import FourPartError, ShardingError
from jshard.plans.policies import Prefetch, check_remat
from jshard.recipes.recipe import Recipe

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

R = TypeVar("R", bound=Recipe)
Names = tuple[str, ...]

_BOOLS: dict[str, Any] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}  # as Python writes them, in any case
_UNIONS = (typing.Union, types.UnionType)


class SettingError(ShardingError):
    """A `--set` that names no key of the recipe, or whose value does not fit."""


def override(recipe: R, settings: Sequence[str]) -> R:
    """The recipe with some of its values replaced.

    Args:
        recipe: a dataclass, with more of them in its fields. They are not changed.
        settings: texts `key=value`; values are read by the field's annotation.

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
        problem = _wrong_key(key, texts, table, recipe)
        if problem is None:
            try:
                values[table[key].path] = _line(key, texts[0]), read_value(texts[0], table[key].kind)
            except ValueError:
                problem = _wrong_value(key, texts[0], table[key])
        problems += [problem] if problem else []
    changed = _rebuilt(recipe, (), values, table, problems)
    if problems:
        raise _error(problems, table)
    return changed


# Values.


def read_value(text: str, kind: Any) -> Any:
    """The value that a text means for a type.

    Args:
        text: as typed, e.g. `1e-3`, `yes`, `none`, `1,2`.
        kind: a type that tyro reads; items of a tuple or a list are separated by commas. `Any` takes a Python literal,
            true, false and none, and any other text as text; another class takes a Python literal of that class.

    Raises:
        ValueError: the text is no such value.
    """
    spec, args = _spec(kind), typing.get_args(kind)
    if typing.get_origin(kind) in _UNIONS:  # str, which takes everything, comes last, and none after a Literal "none"
        return _first_that_fits(text, sorted(args, key=lambda kind: (kind is str, kind is types.NoneType)))
    if spec is None:
        return _literal(text, kind)
    parts = [text]
    if spec.nargs != 1:
        for opening, closing in ("()", "[]"):
            if text.startswith(opening) and text.endswith(closing):
                text = text[1:-1]
        parts = [part.strip() for part in text.removesuffix(",").split(",")] if text else []
    if spec.nargs not in ("*", len(parts)) or (spec.choices and not {*parts} <= {*spec.choices}):
        raise ValueError(f"{text!r} is not {spec.metavar}")
    return spec.instance_from_str(parts)


def written(value: Any) -> str | None:
    """The text that `read_value` reads as this value; None where there is none, as for a function."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple | list):
        items = [written(item) for item in value]
        return None if None in items else ",".join(map(str, items))
    return str(value) if isinstance(value, str | int | float | Path | dict) else None


def _spec(kind: Any) -> PrimitiveConstructorSpec[Any] | None:
    """How tyro reads a type from its arguments; None where it does not."""
    from tyro.constructors import PrimitiveTypeInfo, UnsupportedTypeAnnotationError  # here: of the extra "train"

    registry = _registry()
    with registry:
        spec = registry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    is_plain = kind is Any or kind is object or (typing.get_origin(kind) or kind) is dict
    return None if isinstance(spec, UnsupportedTypeAnnotationError) or is_plain else spec


@functools.cache
def _registry() -> ConstructorRegistry:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    readers: dict[Any, tuple[str, Callable[[str], Any]]] = {
        int: ("int", _int),
        float: ("float", _float),
        bool: ("true|false", lambda text: _word(text, _BOOLS)),
        types.NoneType: ("none", lambda text: _word(text, {"none": None, "null": None})),
    }
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def with_more_texts(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kind: Any = info.type
        if kind not in readers:
            return None
        name, read = readers[kind]
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=name,
            instance_from_str=lambda args: read(args[0]),
            is_instance=lambda value: isinstance(value, kind),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # 1e6 is how people write steps
    if number.is_integer() and abs(number) < 2**53:
        return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _float(text: str) -> float:
    value = float(text)
    if math.isnan(value):  # inf has a meaning, as in clip_norm=inf
        raise ValueError("nan is not a number")
    return value


def _word(text: str, words: Mapping[str, Any]) -> Any:
    if text.lower() not in words:
        raise ValueError(f"{text!r} is not one of {', '.join(words)}")
    return words[text.lower()]


def _first_that_fits(text: str, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        try:
            return read_value(text, kind)
        except ValueError:
            continue
    raise ValueError(f"{text!r} fits none of {kinds}")


def _literal(text: str, kind: Any) -> Any:
    """A Python literal of a class; of `Any` also a text."""
    value: Any = text
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)
    try:
        fits = kind is Any or isinstance(value, typing.get_origin(kind) or kind)
    except TypeError:  # a form of typing that isinstance does not know
        fits = False
    if not fits:
        raise ValueError(f"{text!r} is not a {kind}")
    return value


# Keys.


@dataclasses.dataclass(frozen=True)
class _Key:
    path: Names
    kind: Any
    value: Any


def _table(recipe: Recipe) -> dict[str, _Key]:
    """The keys, those of the recipe itself before nested ones."""
    found = sorted(_walk(recipe, ()), key=lambda key: len(key.path))
    return {".".join(key.path): key for key in found}


def _walk(node: Any, path: Names) -> Iterator[_Key]:
    hints = _hints(type(node))
    for field in filter(lambda field: field.init, dataclasses.fields(node)):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _walk(value, (*path, field.name))
        else:
            yield _Key((*path, field.name), hints.get(field.name, Any), value)


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


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """The key that was meant: one with the most similar last name, and of several the most similar as a whole."""
    last = {other: other.rpartition(".")[2] for other in known}
    names = difflib.get_close_matches(key.rpartition(".")[2], list(last.values()), n=1)
    same = [other for other in known if last[other] in names]
    return next(iter(difflib.get_close_matches(key, same, n=1, cutoff=0.0)), None)


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
            problems.append(_Problem((), f"--set {shlex.quote(setting)}", why, _present(near, table[near])))
    return given, problems


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
        now = " ".join(_present(name, table[name]) for name in map(".".join, here))
        problems.append(_Problem(path, asked, why, f"{now}  # the recipe's own"))
        return node


# What is wrong with them.


@dataclasses.dataclass(frozen=True)
class _Problem:
    owner: Names  # of the dataclass that cannot be built because of it
    where: str
    why: str
    do: str


def _wrong_key(key: str, texts: list[str], table: Mapping[str, _Key], recipe: Recipe) -> _Problem | None:
    owner, lines = tuple(key.split(".")[:-1]), [_line(key, text) for text in texts]
    if key in table:
        why = f"{key} is set {len(texts)} times."
        return _Problem(owner, " ".join(lines), why, lines[-1]) if len(texts) > 1 else None
    why, near = f"the recipe has no key {key!r}.", _nearest(key, list(table))
    fields = [other for other in table if other.startswith(f"{key}.")]
    if fields:
        node = functools.reduce(getattr, key.split("."), recipe)
        why, near = f"{key} is a {type(node).__name__}, which is set field by field.", fields[0]
    if near is None:
        return _Problem(owner, lines[-1], why, f"take one of its keys, for example {next(iter(table))}.")
    try:
        read_value(texts[-1], table[near].kind)
        fits = not fields
    except ValueError:
        fits = False
    return _Problem(owner, lines[-1], why, _line(near, texts[-1]) if fits else _present(near, table[near]))


def _wrong_value(key: str, text: str, known: _Key) -> _Problem:
    spec = _spec(known.kind)
    name = getattr(known.kind, "__name__", known.kind) if spec is None else spec.metavar
    do = "change it in the model file: it has no text form." if written(known.value) is None else _present(key, known)
    return _Problem(known.path[:-1], _line(key, text), f"{key} takes {name}, not {text!r}.", do)


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


def _present(name: str, key: _Key) -> str:
    """The line that sets a key as it is."""
    return _line(name, written(key.value) or "VALUE")


def _line(key: str, text: str) -> str:
    return f"--set {shlex.quote(f'{key}={text}')}"


# `--unit name=value`: settings of a model's units.


def parse_units(texts: Sequence[str]) -> dict[str, Any]:
    """The settings in texts such as `remat=full`, `prefetch=512MiB`, `reshard_after_forward=false`.

    Raises:
        ShardingError: there is no such setting of a unit, or it has no such value.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in SETTINGS or not value or name in found:
            raise ShardingError(
                "The units have no such setting." if name not in found else "A setting is given twice.",
                where=f"--unit {text}",
                why=f"the settings are {', '.join(SETTINGS)}, each as in js.fully_shard, and given once.",
                do="--unit remat=full --unit prefetch=2 --unit reshard_after_forward=false",
            )
        # The policy of remat is called "none", too.
        found[name] = value if name == "remat" else _setting(value)
        _check_setting(name, found[name])
    return found


def _setting(value: str) -> Any:
    return int(value) if value.isdecimal() else _WORDS.get(value.lower(), value)


def _check_setting(name: str, value: Any) -> None:
    if name == "remat":
        check_remat(value)
    elif name == "prefetch":
        Prefetch.parse(value)
    elif not (value is None or isinstance(value, int)):
        raise ShardingError(
            "The units have no such setting.",
            where=f"--unit {name}={value}",
            why="it is true, false, none, or a number of neighbours.",
            do="--unit reshard_after_forward=true",
        )
