"""The arguments of a command: read by tyro, and what it refuses told in four parts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import io
import re
import shlex
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

from jshard._errors import ShardingError

T = TypeVar("T")
Problem = tuple[str, str, str]  # where, why, do


class ArgumentError(ShardingError):
    """Arguments that the command does not take."""


def parse(cls: type[T], argv: Sequence[str], *, command: str, example: str = "gpt") -> T:
    """The arguments as an object of a dataclass; prints the help and ends the process where that is asked for.

    Args:
        cls: a field without a default is the file that the command is given, every other one an option.
        argv: the arguments after the command's name.
        command: the command, e.g. "jshard train".
        example: of the file, for the error where none is given.

    Raises:
        ArgumentError: there is no such option, a value is missing or of another type, or an option is repeated of
            which the parser would take the last.
    """
    options = _options(cls)
    repeated = _repeated(argv, options)
    if repeated:
        raise _error(repeated)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, prog=command, args=list(argv), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:  # the help
            raise
        # The parser has judged; this only says it in our words, and where it has none in the parser's own.
        problems = _problems(argv, options, command, example)
        problems = problems or [(command, _plain(said.getvalue()), f"{command} --help")]
        raise _error(problems) from stop


@dataclasses.dataclass(frozen=True)
class _Option:
    kind: Any  # of a value; bool for a flag
    takes_many: bool
    repeats: bool


def _options(cls: type) -> dict[str, _Option]:
    hints = typing.get_type_hints(cls, include_extras=True)
    with_default = (f for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING)
    return {_flag(field.name): _option(hints[field.name]) for field in with_default}


def _flag(name: str) -> str:
    return "--" + name.removeprefix("--").replace("_", "-")


def _option(kind: Any) -> _Option:
    repeats = takes_many = False
    while True:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            repeats |= tyro.conf.UseAppendAction in args[1:]
            kind = args[0]
        elif origin in (typing.Union, types.UnionType):
            kind = next(arg for arg in args if arg is not types.NoneType)
        elif origin is tuple:
            takes_many, kind = True, args[0]
        else:
            return _Option(kind, takes_many and not repeats, repeats)


def _repeated(argv: Sequence[str], options: dict[str, _Option]) -> list[Problem]:
    given = [_flag(argument.partition("=")[0]) for argument in argv if argument.startswith("--")]
    counts = collections.Counter(name for name in given if name in options and not options[name].repeats)
    return [
        (
            name,
            f"{name} is given {count} times, and only one would count.",
            f"give {name} once" + (f", all values after it: {name} A B" if options[name].takes_many else "."),
        )
        for name, count in counts.items()
        if count > 1
    ]


def _problems(argv: Sequence[str], options: dict[str, _Option], command: str, example: str) -> list[Problem]:
    """What is wrong with the arguments, as far as it can be told."""
    files, problems, rest = [], list[Problem](), collections.deque(argv)
    while rest:
        argument = rest.popleft()
        name, equals, text = argument.partition("=")
        if not argument.startswith("-"):
            files.append(argument)
        elif _flag(name) not in options:
            problems.append((name, f"{command} has no option {name}.", _nearest(argument, rest, options, command)))
        else:
            values = [text] if equals else _values(rest, options[_flag(name)], has_file=bool(files))
            problems += _bad_values(_flag(name), options[_flag(name)], values, command)
    # Only then: what follows an unknown option may be its value, or the file.
    if not problems and not files:
        problems.append((command, "no file is given.", f"{command} {shlex.join([*shlex.split(example), *argv])}"))
    if not problems and len(files) > 1:
        why = f"there is one file, {files[0]}, and this is of no option."
        problems.append((shlex.join(files[1:]), why, "leave it away."))
    return problems


def _values(rest: collections.deque[str], option: _Option, *, has_file: bool) -> list[str]:
    # What follows a flag is the file, or meant as a value that it does not take.
    most = int(has_file) if option.kind is bool else len(rest) if option.takes_many else 1
    values: list[str] = []
    while rest and len(values) < most and not rest[0].startswith("--"):
        values.append(rest.popleft())
    return values


def _bad_values(name: str, option: _Option, values: Sequence[str], command: str) -> Iterator[Problem]:
    kind = option.kind
    if kind is bool:
        if values:
            yield f"{name} {shlex.quote(values[0])}", f"{name} is on where it is given, and takes no value.", name
        return
    words = {int: "a whole number", float: "a number"}
    if not values and not option.takes_many:
        why = f"{name} takes {words.get(kind, 'a value')}, and none follows."
        yield name, why, _example(name, option, command)
    for value in values if kind in words else ():
        try:
            kind(value)
        except ValueError:
            why = f"{value!r} is not {words[kind]}."
            yield f"{name} {shlex.quote(value)}", why, _example(name, option, command)


def _example(name: str, option: _Option, command: str) -> str:
    """The option as it is accepted; where only its user knows a value, what explains it."""
    if option.kind is bool or option.takes_many:
        return name
    numbers = {int: "100", float: "60"}
    return f"{name} {numbers[option.kind]}" if option.kind in numbers else f"{command} --help  # explains {name}"


def _nearest(argument: str, rest: Sequence[str], options: dict[str, _Option], command: str) -> str:
    """The option that is meant, with its values; --dryrun is --dry-run, and --recip the beginning of --recipe."""
    name, equals, text = argument.partition("=")
    flag = _flag(name)
    near = difflib.get_close_matches(flag, options, n=1) or [o for o in options if o.startswith(flag)]
    if not near or not name.startswith("--"):
        return f"{command} --help  # lists the options"
    option = options[near[0]]
    values = [text] if equals else _values(collections.deque(rest), option, has_file=False)
    fitting = values and not [*_bad_values(near[0], option, values, command)]
    return shlex.join([near[0], *values]) if fitting else _example(near[0], option, command)


def _plain(said: str) -> str:
    """The words of the parser without the box around them."""
    lines = (re.sub(r"[\u2500-\u257f]+", " ", line).strip() for line in said.splitlines())
    return "\n".join(line for line in lines if line.strip("- ")) or "the parser refuses it."


def _error(problems: Sequence[Problem]) -> ArgumentError:
    where, why, do = zip(*problems, strict=True)
    return ArgumentError("The command line cannot be read.", where=where, why="\n".join(why), do="\n".join(do))
