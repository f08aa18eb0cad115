"""How tyro shows the options of a command, and the words in which it refuses some."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Literal

import tyro


def description_of(cls: type) -> str:
    """Returns the docstring of a dataclass of arguments, wrapped for the terminal."""
    # tyro joins lines, except those that begin with a space, and wraps none.
    columns = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(columns, initial_indent=" ", subsequent_indent=" ")
    paragraphs = (cls.__doc__ or "").split("\n\n")
    filled = [wrapper.fill(" ".join(paragraph.split())) for paragraph in paragraphs]
    return "\n".join(filled)


# Cached: after the first call the types in the class are no longer those that are returned.
@functools.cache
def prepare_help(cls: type) -> dict[str, object]:
    """Prepares the help of a dataclass of arguments: whole lines, no `{None}|`, no empty default.

    tyro reads the help of a field from its type. So the types in the class, and in its bases, get what tyro shows.

    Returns:
        The types of the fields, as they were.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    texts = _option_texts(cls)
    with_help: dict[str, object] = {}
    for name, hint in hints.items():
        shown = tyro.conf.arg(metavar=_shown_value(name, hint), help=texts.get(name), help_behavior_hint=_default)
        with_help[name] = Annotated[hint, shown]
    for base in cls.__mro__[:-1]:
        annotations = {}
        for name, hint in inspect.get_annotations(base).items():  # of this class alone
            # `pop`: a field belongs to the first class that has it, and a base's own type of it is not shown.
            annotations[name] = with_help.pop(name, hint)
        base.__annotations__ = annotations
    return hints


def _option_texts(cls: type) -> dict[str, str]:
    """Returns the docstrings of fields, each in one line: tyro leaves the line breaks of the source in the help."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):  # the text of a subclass replaces that of its base
        if not dataclasses.is_dataclass(base):
            continue
        (class_def,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(class_def, ast.ClassDef)
        for field, following in itertools.pairwise(class_def.body):
            if not isinstance(field, ast.AnnAssign):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                texts[ast.unparse(field.target)] = " ".join(str(following.value.value).split())
    return texts


def _shown_value(name: str, hint: object) -> str | None:
    """Returns what the help calls the value of an option; None where tyro's own name for it is good."""
    metavar = _metavar(hint)
    if metavar:
        return metavar
    if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
        return name.upper()
    return _optional_value(hint)


def _metavar(hint: object) -> str | None:
    for annotation in getattr(hint, "__metadata__", ()):
        metavar = getattr(annotation, "metavar", None)
        if metavar:
            return metavar
    return None


def _optional_value(hint: object) -> str | None:
    """Returns what to call the value of an option that may be None by default; None for any other."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return None
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(typing.get_args(kind))}}}"
    return _metavar(kind) or kind.__name__.upper()


def _default(label: str) -> str:
    if label in ("", "''", "None", "False"):  # the text of the option says what happens without it
        return ""
    return f"(default: {label})"


@contextlib.contextmanager
def wide_messages(is_needed: bool) -> Iterator[None]:
    """Keeps tyro from breaking the lines of its messages in the block, if that is needed."""
    before = os.environ.get("COLUMNS")
    if is_needed:
        os.environ["COLUMNS"] = "2000"
    try:
        yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        elif is_needed:
            del os.environ["COLUMNS"]


_BORDER = re.compile(r"[\W_]*")  # a line of the box, without letters
_NO_NUMBER = re.compile(r"Error parsing (\S+): .*(base 10|convert string to float): (.+)")
_NO_CHOICE = re.compile(r"invalid choice (.+) for argument '(.+)'. Expected one of \((.*)\)")


def refusal(printed: str) -> str:
    """Returns why tyro refuses the arguments, in one line: what it printed, without its box and its own types."""
    text = _text_in_box(printed)
    no_number = _NO_NUMBER.match(text)
    if no_number:
        option, conversion, value = no_number.groups()
        kind = "a whole number" if conversion == "base 10" else "a number"
        return f"{option} takes {kind}, not {value}."
    no_choice = _NO_CHOICE.match(text)
    if no_choice:
        value, option, listed = no_choice.groups()
        choices = sorted(set(re.findall(r"'(.+?)'", listed)) - {"None"})
        return f"{option} takes one of {', '.join(choices)}, not {value}."
    return f"{text}."


def _text_in_box(printed: str) -> str:
    _title, *lines = printed.splitlines()
    words: list[str] = []
    for line in lines:
        content = line.strip("\u2502| ")
        if content.startswith(("For full helptext", "Argument helptext")):
            break
        if not _BORDER.fullmatch(content):
            words += content.split()
    return " ".join(words).rstrip(".").replace(" Perhaps you meant:", ". Perhaps you meant:")
