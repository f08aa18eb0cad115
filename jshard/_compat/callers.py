"""Who has called: the Python stack of an equation."""

import pathlib
from typing import Any

import flax
import jax

import jshard

_LIBRARY = tuple(str(pathlib.Path(file or "").parent) for file in (jax.__file__, flax.__file__, jshard.__file__))


def frame_files(eqn: Any) -> str:
    """The files of the Python stack that made an equation of a jaxpr, one per line."""
    return "\n".join(frame.file_name for frame in _frames(eqn))


def user_frame(eqn: Any) -> str:
    """`file:line` of the user's code that made an equation: the innermost frame outside jax, flax and jshard."""
    for frame in _frames(eqn):
        if not frame.file_name.startswith((*_LIBRARY, "<")):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return "an unknown place"


def _frames(eqn: Any) -> list[Any]:
    traceback = getattr(eqn.source_info, "traceback", None)
    return list(traceback.frames) if traceback is not None else []


def scope_of(eqn: Any) -> str:
    """The `jax.named_scope` around an equation, inside its own jaxpr."""
    return str(eqn.source_info.name_stack)
