"""Who has called: the Python stack of an equation."""

import itertools
import pathlib
import sys
import sysconfig
import warnings
from collections.abc import Collection
from typing import Any

import flax
import jax
import optax

import jshard

_LIBRARY = tuple(str(pathlib.Path(file or "").parent) for file in (jax.__file__, flax.__file__, jshard.__file__))
_MODELS = f"{_LIBRARY[-1]}/models/"
_PYTHON = sysconfig.get_path("stdlib")
_TRACING = (*_LIBRARY[:2], str(pathlib.Path(optax.__file__).parent))


def made_in(eqn: Any, files: Collection[str], prefix: str) -> bool:
    """Whether functions of these files, whose qualified names start with a prefix, made an equation of a jaxpr."""
    return any(f.file_name in files and f.function_name.startswith(prefix) for f in _frames(eqn))


def user_frame(eqn: Any) -> str:
    """`file:line` of the user's code that made an equation: the innermost frame outside jax, flax and jshard.

    Empty where there is none.
    """
    for frame in _frames(eqn):
        if not _is_library(frame.file_name):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""


def user_place(eqn: Any) -> str:
    """`file:line (function)` of the user's code that made an equation; empty where there is none."""
    for frame in _frames(eqn):
        if not _is_library(frame.file_name):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num} ({frame.function_name})"
    return ""


def warn_user(text: str) -> None:
    """Warns with the file and line of the user's code that has called: the innermost outside jax, flax and jshard."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_no_users(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def _is_no_users(file: str) -> bool:
    """Python's own library is between frames of jax: context managers, cached functions."""
    return _is_library(file) or (file.startswith(_PYTHON) and "-packages" not in file)


def user_frames(eqn: Any, *, below: str) -> tuple[str, ...]:
    """`file:line` of the user's frames that made an equation of a trace, innermost first.

    Where there is none, as in a loss of ours, that of the innermost function outside jax, flax and optax.

    Args:
        eqn: the equation.
        below: the file that has traced it; frames outside of its own are not the model's.
    """
    inside = list(itertools.takewhile(lambda frame: frame.file_name != below, _frames(eqn)))
    named = [frame for frame in inside if not frame.file_name.startswith((*_TRACING, "<"))]
    users = [frame for frame in named if not _is_library(frame.file_name)]
    return tuple(f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}" for frame in users or named[:1])


def _is_library(file: str) -> bool:
    """The model files that are installed beside jshard are not: they are there to be read and copied."""
    return file.startswith((*_LIBRARY, "<")) and not file.startswith(_MODELS)


def _frames(eqn: Any) -> list[Any]:
    traceback = getattr(eqn.source_info, "traceback", None)
    return list(traceback.frames) if traceback is not None else []


def scope_of(eqn: Any) -> str:
    """The `jax.named_scope` around an equation, inside its own jaxpr."""
    return str(eqn.source_info.name_stack)
