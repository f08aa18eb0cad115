"""`jshard trace RUN`: what a profile of a run says about its steps."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard.cli._arguments import parse
from jshard.cli._train_args import parse_steps
from jshard.errors import ShardingError
from jshard.inspect.profile.trace import trace
from jshard.inspect.tables import show


@dataclasses.dataclass(frozen=True)
class TraceArgs:
    """Reads a profile: of each step, the time in which devices compute, communicate, do both, or neither.

    Profiles are recorded by `jshard train gpt --profile 10:15`, or by jax.profiler in a program of your own. Times
    are unions of intervals on a device's timeline, never sums over kernels. Exit codes: 0 done, 1 the profile is empty,
    cut off or without a whole step, 2 the request was wrong.
    """

    path: tyro.conf.Positional[Path]
    """Folder of a run, folder of a profile, or one *.xplane.pb file."""
    steps: Annotated[str, tyro.conf.arg(metavar="A:B")] = ""
    """Only the steps after step A, up to step B."""
    json: bool = False
    """Print JSON and nothing else."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the report with a timeline of one step into one file, too."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard trace`."""
    args = parse(TraceArgs, argv, command="jshard trace", example="runs/gpt-tiny")
    if args.html is not None and not args.html.absolute().parent.is_dir():
        raise ShardingError(
            "The file cannot be written.",
            where=f"--html {args.html}",
            why=f"there is no folder {args.html.absolute().parent}.",
            do=f"mkdir -p {args.html.parent}",
        )
    found = trace(args.path, steps=parse_steps(args.steps, option="--steps") if args.steps else None)
    if args.html is not None:
        args.html.write_text(found.to_html())
        print(f"written: {args.html}", file=sys.stderr)
    if args.json:
        print(found.to_json())
    else:
        show(found)
    return 0
