"""`jshard trace RUN`: what a profile of a run says about its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard.cli._arguments import answer, check_writable, parse, parse_steps, write
from jshard.inspect.profile import trace


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
    """Write the report with a timeline of one step into one file, too, and the timeline beside it as *.trace.json."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard trace`."""
    args = parse(TraceArgs, argv, command="jshard trace")
    check_writable(args.html, option="--html")
    found = trace(args.path, steps=parse_steps(args.steps, option="--steps") if args.steps else None)
    if args.html is not None:
        write(args.html, found.to_html())
        write(args.html.with_suffix(".trace.json"), found.to_chrome_trace())
    answer(found, json=args.json)
    return 0
