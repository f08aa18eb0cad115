"""The `jshard` command: one module per subcommand, each imported only when it is asked for.

Exit codes: 0 done, 1 the work failed, 2 the request was wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from jshard._errors import ShardingError

COMMANDS = {"train": "train a recipe of a model file, or print its plan"}

_USAGE = "usage: jshard COMMAND [ARGUMENTS], or jshard COMMAND --help\n\ncommands:\n" + "\n".join(
    f"  {name:<8}{summary}" for name, summary in COMMANDS.items()
)

# XLA:CPU ends the process when simulated devices meet too late, as they do on a busy machine.
_XLA_CPU_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    "--xla_cpu_collective_timeout_seconds=1200",
)


class MissingExtraError(ShardingError, ImportError):
    """A package is not installed that only the command line needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, *rest = argv
    _set_xla_flags()
    try:
        return _command(name)(rest)
    except ShardingError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        raise ShardingError(
            f"There is no command {name!r}.",
            where=f"jshard {name}",
            why=f"the commands are {', '.join(COMMANDS)}.",
            do="jshard --help",
        )
    _require_extra("train", packages=("tyro", "grain", "matplotlib"), wanted_by=f"jshard {name}")
    return importlib.import_module(f"jshard.cli.{name}").run


def _require_extra(extra: str, *, packages: Sequence[str], wanted_by: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"{', '.join(missing)} is not installed.",
            where=wanted_by,
            why=f"the library does without; this command needs the extra {extra!r}.",
            do=f"pip install 'jshard[{extra}]'",
        )


def _set_xla_flags() -> None:
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in _XLA_CPU_FLAGS if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
