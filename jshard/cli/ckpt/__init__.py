"""`jshard ckpt COMMAND`: tools for checkpoints; a module is imported only when one of its commands is used.

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
from typing import Any

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

_MODULES = {
    **dict.fromkeys(("ls", "inspect", "verify", "diff"), "look"),
    **dict.fromkeys(("reshard", "import", "export"), "convert"),
    "timeline": "timeline",
}
_NOTE = "A path is a checkpoint, a folder of them (its newest counts), or the folder of a run."


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage("jshard ckpt", COMMANDS, _NOTE), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        raise no_command("jshard ckpt", name, rest, COMMANDS)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    return getattr(importlib.import_module(f"jshard.cli.ckpt.{_MODULES[name]}"), f"run_{name}")(rest)


# Shared by the commands.


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr during the block, if that is a terminal; call it with the bytes done from any thread."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def as_json(value: Any) -> str:
    """A value as JSON; NaN, which JSON lacks, becomes null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
