"""Who has called: the Python stack of an equation, and that of a function of ours."""

import pathlib
import sys
from collections.abc import Collection
from typing import Any

import flax
import jax
from flax import nnx

import jshard

_MAPPING, _TRANSFORMING = ("jax", "optax", "jshard"), ("init_fn", "update_fn", "init", "update")
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


def called_by_optimizer() -> bool:
    """Whether the function that asks was called by the module of Flax in which `nnx.Optimizer` is."""
    return sys._getframe(2).f_globals.get("__name__") == nnx.Optimizer.__module__


def called_by_optax() -> bool:
    """Whether the function that asks was called, by way of jax's maps over trees, by a transformation of Optax.

    Not so Optax's functions of trees, such as `apply_updates` and `tree.norm`.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _MAPPING:
        if frame.f_code.co_name in _TRANSFORMING and frame.f_globals["__name__"].startswith("optax."):
            return True
        frame = frame.f_back
    return False
