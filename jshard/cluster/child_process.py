"""A separate process that compiles: it is started with a request, and writes a result or an error to a folder.

A process can compile for absent devices if its environment says so before it imports JAX. And a compiler that crashes,
or takes all memory, ends only its own process.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard._children import module_command
from jshard._types import Json
from jshard.errors import FourPartError, RunError

# Files of the child.
_RESULT = "result.pickle"
_OUTPUT = "output.txt"

_LAST_LINES = 8
_KILLED = -9  # exit code of a process that the system ended with signal 9

# Variables of the shell that would change what the child compiles, or the devices it sees.
_DROPPED_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES")


class CompileError(RunError):
    """The compiler, or its process, failed."""


def child_environment(environ: Mapping[str, str], xla_flags: str = "") -> dict[str, str]:
    """Returns the environment of the child: no accelerator is used, and XLA only gets the requested flags.

    Args:
        environ: of this process.
        xla_flags: XLA_FLAGS of the child.
    """
    variables = {name: value for name, value in environ.items() if name not in _DROPPED_VARIABLES}
    if xla_flags:
        variables["XLA_FLAGS"] = xla_flags
    variables["JAX_PLATFORMS"] = "cpu"
    variables["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu asks the metadata server of a cloud for devices
    variables["TPU_LIBRARY_LOG"] = "0"
    return variables


# ---- in the parent


def run_child(
    module: str,
    request: Mapping[str, Json],
    folder: Path,
    *,
    subject: str,
    timeout_s: float,
    environ: Mapping[str, str],
    more_time: str,
    do: str,
) -> Any:
    """Runs a module with the arguments REQUEST FOLDER, whose `main` calls `answer`, and returns its result.

    Args:
        module: the module.
        request: passed to it as JSON.
        folder: an empty folder, for the files of the child.
        subject: what is compiled, for errors.
        timeout_s: how long it may take.
        environ: its environment.
        more_time: advice if it takes too long.
        do: advice if it crashes.

    Raises:
        FourPartError: the error of the child.
        CompileError: it crashed, or took too long.
    """
    command = module_command(module, json.dumps(request), str(folder))
    # Its output goes to a file, not to a pipe: so the last lines are left even if the system kills it.
    with (folder / _OUTPUT).open("wb") as output:
        try:
            finished = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                "Compiling took too long.",
                where=subject,
                why=f"it was stopped after {timeout_s:g} s.",
                do=more_time,
            ) from error
    # A signal may have ended it while it wrote the result.
    if finished.returncode < 0 or not (folder / _RESULT).exists():
        raise _crash(subject, finished.returncode, folder, do)
    result = pickle.loads((folder / _RESULT).read_bytes())
    if isinstance(result, FourPartError):
        raise result
    return result


def _crash(subject: str, code: int, folder: Path, do: str) -> CompileError:
    """Returns the error for a child that ended without a result or an error."""
    output = (folder / _OUTPUT).read_text(errors="replace").splitlines()
    last_lines = [line for line in output if line.strip()][-_LAST_LINES:]
    ending = f"signal {-code}" if code < 0 else f"exit code {code}"
    summary = f"{ending}; its last lines:" if last_lines else f"{ending}, without output."
    if code == _KILLED:
        do = "give it more memory: the system kills processes with signal 9 when it runs out."
    error = CompileError(
        "The compiling process failed.",
        where=subject,
        why="\n".join([summary, *last_lines]),
        do=do,
    )
    if os.environ.get("JSHARD_DEBUG", "0") not in ("", "0"):
        error.add_note("\n".join(["its whole output:", *output]))
    return error


# ---- in the child


def answer(argv: Sequence[str], work: Callable[[Json, Path], object]) -> int:
    """Does the child's side of `run_child`: writes the result of `work`, or its error.

    Args:
        argv: REQUEST FOLDER.
        work: called with the request and the folder. Its result is pickled.

    Returns:
        The exit code.
    """
    request, folder_name = argv
    folder = Path(folder_name)
    try:
        result = work(json.loads(request), folder)
    except FourPartError as error:
        result = portable(error)
    (folder / _RESULT).write_bytes(pickle.dumps(result))
    return 1 if isinstance(result, FourPartError) else 0


def portable(error: FourPartError) -> FourPartError:
    """Returns an error of a class that the parent can also import, not one defined in a model file."""
    importable = next(cls for cls in type(error).__mro__ if cls.__module__.startswith("jshard."))
    return importable(error.what, where=error.where, why=error.why, do=error.do)
