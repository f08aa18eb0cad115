"""Who has called: the Python stack of an equation."""

import pathlib
from collections.abc import Collection
from typing import Any

import flax
import jax

import jshard

_LIBRARY = tuple(str(pathlib.Path(file or "").parent) for file in (jax.__file__, flax.__file__, jshard.__file__))


def made_in(eqn: Any, files: Collection[str], prefix: str) -> bool:
    """Whether functions of these files, whose qualified names start with a prefix, made an equation of a jaxpr."""
    return any(f.file_name in files and f.function_name.startswith(prefix) for f in _frames(eqn))


def user_frame(eqn: Any) -> str:
    """`file:line` of the user's code that made an equation: the innermost frame outside jax, flax and jshard.

    Empty where there is none.
    """
    for frame in _frames(eqn):
        if not frame.file_name.startswith((*_LIBRARY, "<")):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""


def _frames(eqn: Any) -> list[Any]:
    traceback = getattr(eqn.source_info, "traceback", None)
    return list(traceback.frames) if traceback is not None else []


def scope_of(eqn: Any) -> str:
    """The `jax.named_scope` around an equation, inside its own jaxpr."""
    return str(eqn.source_info.name_stack)
