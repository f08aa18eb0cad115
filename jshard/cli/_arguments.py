"""The arguments of a command, read by tyro; what it refuses is an error of four parts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import re
import shlex
import typing
from collections.abc import Sequence
from typing import TypeVar

import tyro

from jshard.errors import ShardingError

T = TypeVar("T")


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
        ArgumentError: an option is unknown, a value is missing or of another type, or an option is repeated of
            which the parser would take the last.
    """
    line = f"{command} {shlex.join(argv)}"
    repeated = _repeated(cls, argv)
    if repeated:
        why = "\n".join(f"{name} is given {count} times, and only one would count." for name, count in repeated.items())
        do = "\n".join(f"give {name} once, with all its values." for name in repeated)
        raise ArgumentError("The command line cannot be read.", where=line, why=why, do=do)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(cls, prog=command, args=list(argv), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:  # the help
            raise
        why, *hints = _paragraphs(printed.getvalue())
        unknown = re.findall(r"--[\w-]+", why)
        corrected = [_meant(word, hints) if word.partition("=")[0] in unknown else word for word in argv]
        do = f"{command} {shlex.join(corrected) if corrected != list(argv) else '--help  # lists the options'}"
        if why.startswith("Missing from"):
            why, do = "no file is given.", f"{command} {shlex.join([*shlex.split(example), *argv])}"
        raise ArgumentError("The command line cannot be read.", where=line, why=why, do=do) from stop


def _repeated(cls: type, argv: Sequence[str]) -> dict[str, int]:
    """How often each option is given that is given more than once, and may not be."""
    hints = typing.get_type_hints(cls, include_extras=True)
    once = {
        "--" + field.name.replace("_", "-")
        for field in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if tyro.conf.UseAppendAction not in getattr(hints[field.name], "__metadata__", ())
    }
    given = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    return {name: count for name, count in collections.Counter(given).items() if count > 1 and name in once}


def _paragraphs(printed: str) -> list[str]:
    """The text of the parser without the box around it, of one alphabet or the other; a paragraph a line."""
    lines = [line.strip("│| ") for line in printed.splitlines()[1:-1]]
    parts = re.split(r"(?:^|\n)[─-]{4,}|\n\n", "\n".join(lines))
    return [" ".join(part.split()) for part in parts if part.split()]


def _meant(word: str, hints: Sequence[str]) -> str:
    """An argument with the name of the option that the parser proposes for it, or as it is."""
    name, equals, value = word.partition("=")
    for hint in hints:
        options = re.findall(r"--[\w-]+", hint.removeprefix(f"Arguments similar to {name}:"))
        if options and hint.startswith(("Perhaps you meant:", f"Arguments similar to {name}:")):
            return options[0] + equals + value
    return word
