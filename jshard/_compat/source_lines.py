"""The lines of the user's code: where an equation came from, where an error was raised, whom a warning addresses."""

import itertools
import pathlib
import sysconfig
import traceback
import types
import warnings
from typing import Any

import flax
import jax
import optax

import jshard


def _folder_of(file: str | None) -> str:
    return str(pathlib.Path(file or "").parent)


_JAX = _folder_of(jax.__file__)
_FLAX = _folder_of(flax.__file__)
_OPTAX = _folder_of(optax.__file__)
_JSHARD = _folder_of(jshard.__file__)
_MODELS = f"{_JSHARD}/models/"  # files that users read and copy: they count as theirs
_PYTHON = sysconfig.get_path("stdlib")


def user_place(eqn: Any) -> str:
    """Returns `file:line (function)` of the user's code that created an equation; empty without one.

    That is the innermost frame outside the libraries.
    """
    for frame in _frames(eqn.source_info):
        if not _is_library(frame.file_name):
            return f"{_line(frame)} ({frame.function_name})"
    return ""


def failed_check(error: Any, *, below: str) -> str:
    """Returns `file:line` of the user's code where a check of `jax.experimental.checkify` failed.

    Without user code, as in a loss of jshard, that of the innermost function outside jax, flax and optax; empty if that
    is inside a jitted function of JAX.

    Args:
        error: the error of the check.
        below: the file that traced the program; frames outside its own are not the model's.
    """
    # The innermost frame is first.
    model_frames = itertools.takewhile(lambda frame: frame.file_name != below, error.traceback_info.frames)
    frames = [frame for frame in model_frames if not frame.file_name.startswith((_JAX, _FLAX, _OPTAX, "<"))]
    user_frames = [frame for frame in frames if not _is_library(frame.file_name)]
    if user_frames:
        return _line(user_frames[0])
    return _line(frames[0]) if frames else ""


def failed_line(error: BaseException) -> str:
    """Returns `file:line (function)` of the user's code that raised an error: the innermost frame outside libraries."""
    frame = _innermost_user_frame(error)
    if frame is None:
        return ""
    return f"{pathlib.Path(frame.filename).name}:{frame.lineno} ({frame.name})"


def users_line(error: BaseException) -> str:
    """Returns the innermost line of user code that an error was raised through; of any code if there is none."""
    frame = _innermost_user_frame(error)
    if frame is None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{pathlib.Path(frame.filename).name}:{frame.lineno}: {frame.line}"


def _innermost_user_frame(error: BaseException) -> traceback.FrameSummary | None:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_no_users(frame.filename):
            return frame
    return None


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the file and line of the user's calling code: the innermost outside jax, flax and jshard."""
    frame, line = _calling_frame()
    # Not by `stacklevel`: how many frames of libraries are in between depends on the way here.
    warnings.warn_explicit(text, category, frame.f_code.co_filename, line)


def _calling_frame() -> tuple[types.FrameType, int]:
    """Returns the innermost frame of user code, and its line; the outermost of all if there is none."""
    # Innermost first.
    frames = list(traceback.walk_stack(None))
    for frame, line in frames:
        if not _is_no_users(frame.f_code.co_filename):
            return frame, line
    return frames[-1]


def _is_no_users(file: str) -> bool:
    """Returns whether a file is not user code; jax's frames include the standard library, as for context managers."""
    # `site-packages` is in the folder of the standard library: what is installed there counts as the user's.
    return _is_library(file) or (file.startswith(_PYTHON) and "-packages" not in file)


def _is_library(file: str) -> bool:
    """Returns whether a file belongs to a library; "<" begins the names of code without a file."""
    return file.startswith((_JAX, _FLAX, _JSHARD, "<")) and not file.startswith(_MODELS)


def _line(frame: Any) -> str:
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"


def _frames(source_info: object) -> list[Any]:
    """Returns the Python stack that JAX records with an equation; empty if it was switched off."""
    recorded = getattr(source_info, "traceback", None)
    return [] if recorded is None else list(recorded.frames)
