"""Python processes that jshard starts for itself.

They import the modules of this process. `python -m` would put the working folder first in `sys.path`, and a `random.py`
or `jax.py` of the user there would take the place of the real one.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_SAFE_PATH = "PYTHONSAFEPATH"
_OURS = "jshard"  # any text that is not empty sets it
# As `-m`, and the last place to look for jshard is the one from which this process has it: maybe a folder that Python
# adds only for the program that was started, such as a checkout that is not installed.
_RUN = (
    "import sys; sys.path.append(sys.argv.pop(1)); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of jshard as a program."""
    home = Path(__file__).resolve().parent.parent
    return [sys.executable, "-P", "-c", _RUN, str(home), module, *arguments]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Starts Python processes inside the context as by `-P`; for those whose command is not ours, as multiprocessing's.

    A process that it starts calls `forget_safe_path`, or its own children would inherit this.
    """
    # Set by the user, whose own value stays.
    if _SAFE_PATH in os.environ:
        yield
        return
    os.environ[_SAFE_PATH] = _OURS
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH, None)


@contextlib.contextmanager
def libraries_first(folders: Sequence[str]) -> Iterator[None]:
    """Moves folders to the end of `sys.path`, which multiprocessing copies to the processes started in the context.

    The folder of a model file comes first in this process, which had imported its libraries before. A new process has
    not, and a `random.py` beside the model would be Python's; it calls `neighbours_first` once it has them.
    """
    before = list(sys.path)
    sys.path[:] = [*(path for path in before if path not in folders), *folders]
    try:
        yield
    finally:
        sys.path[:] = before


def neighbours_first(folders: Sequence[str]) -> None:
    """Moves the folders of model files to the front of `sys.path`, as where the model file was loaded."""
    sys.path[:] = [*folders, *(path for path in sys.path if path not in folders)]


def forget_safe_path() -> None:
    """Removes what `safe_path` has set, and not what the user did."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]
