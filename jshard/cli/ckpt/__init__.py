"""`jshard ckpt COMMAND`: tools for checkpoints; a module is imported only when one of its commands is asked for.

No accelerator is needed, and none is touched. Exit codes are those of `jshard`; 1 is also what `verify` ends with where
something is damaged, and `diff` where something differs.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence

import jax

from jshard.errors import ShardingError

COMMANDS = {
    "ls": "the checkpoints of a run: steps, sizes, whether their files are all there",
    "inspect": "the leaves of a checkpoint: shapes, dtypes, bytes, how they were sharded",
    "verify": "whether all files are there, and the sums of all values are those of the save",
    "diff": "where two checkpoints differ, by path, with norms",
    "reshard": "write a checkpoint anew, cut for another mesh",
    "import": "write a checkpoint of what other libraries saved: safetensors, PyTorch, Orbax",
    "export": "write safetensors of a checkpoint",
    "timeline": "what the saves and restores of a run took, in each process",
}

_MODULES = {
    **dict.fromkeys(("ls", "inspect"), "look"),
    **dict.fromkeys(("verify", "diff"), "compare"),
    **dict.fromkeys(("reshard", "import", "export"), "convert"),
    "timeline": "timeline",
}
_USAGE = "usage: jshard ckpt COMMAND [ARGUMENTS], or jshard ckpt COMMAND --help\n\ncommands:\n" + "\n".join(
    f"  {name:<10}{summary}" for name, summary in COMMANDS.items()
)
_USAGE += "\n\nA path is a checkpoint, a folder of them (its newest counts), or the folder of a run."


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ShardingError(
            f"There is no command {name!r}.",
            where=f"jshard ckpt {name}",
            why=f"the commands are {', '.join(COMMANDS)}.",
            do=shlex.join(["jshard", "ckpt", near[0], *rest]) if near else "jshard ckpt --help",
        )
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    return getattr(importlib.import_module(f"jshard.cli.ckpt.{_MODULES[name]}"), f"run_{name}")(rest)
