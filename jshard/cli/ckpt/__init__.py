"""`jshard ckpt COMMAND`: tools for checkpoints, a file for each; it is imported only when its command is used.

No accelerator is needed or used. Exit codes are those of `jshard`; in addition `verify` exits with 1 if something is
damaged, and `diff` if something differs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jshard.cli import no_command, usage

COMMANDS = {
    "ls": "the checkpoints of a run: steps, sizes, whether their files are all there",
    "inspect": "the leaves of a checkpoint: shapes, dtypes, bytes, how they were sharded",
    "verify": "whether all files are there, and the sums of all values are those of the save",
    "diff": "where two checkpoints differ, by path, with norms",
    "reshard": "rewrite a checkpoint in pieces for another mesh",
    "import": "write a checkpoint of what other libraries saved: safetensors, PyTorch, Orbax",
    "export": "write safetensors of a checkpoint",
    "timeline": "what the saves and restores of a run took, in each process",
}

_FILES = {"import": "import_"}  # of the commands that Python does not allow as names
_NOTE = "A path is a checkpoint, a folder of them (its newest counts), or the folder of a run."


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt`."""
    if not argv:
        print(usage("jshard ckpt", COMMANDS, _NOTE), file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("-h", "--help"):
        print(usage("jshard ckpt", COMMANDS, _NOTE))
        return 0
    if name not in COMMANDS:
        raise no_command("jshard ckpt", name, rest, COMMANDS)
    # By default: JAX would otherwise take most of the memory of a GPU, on which a run may be training.
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    module = importlib.import_module(f"jshard.cli.ckpt.{_FILES.get(name, name)}")
    return module.run(rest)


# Shared by the commands.


@contextlib.contextmanager
def progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr during the block, if that is a terminal.

    Yields a function to call with the bytes done, from any thread.
    """
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def as_json(value: object) -> str:
    """Returns a value as JSON; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
