"""`jshard trace RUN`: the steps of a run, from its profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard.cli._arguments import parse, parse_steps
from jshard.cli._output import answer, check_writable, write
from jshard.inspect.profile import read_profile


@dataclasses.dataclass(frozen=True)
class TraceArgs:
    """Reads a profile: the time of each step in which devices compute, communicate, do both, or do neither.

    Profiles are recorded by `jshard train gpt --profile 10:15`, or by jax.profiler in your own program. Times
    are unions of intervals on a device's timeline, never sums over kernels. Exit codes: 0 done, 1 the profile is empty,
    truncated or has no complete step, 2 invalid request.
    """

    path: tyro.conf.Positional[Path]
    """Folder of a run, folder of a profile, or one *.xplane.pb file."""
    steps: Annotated[str, tyro.conf.arg(metavar="A:B")] = ""
    """Only the steps after step A, up to step B."""
    json: bool = False
    """Print JSON only."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the report with a timeline of one step as an HTML file, and the timeline beside it as *.trace.json."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard trace`."""
    args = parse(TraceArgs, argv, command="jshard trace")
    check_writable(args.html, option="--html")  # before a large profile is read
    steps = parse_steps(args.steps, option="--steps") if args.steps else None
    report = read_profile(args.path, steps=steps)
    if args.html is not None:
        write(args.html, report.to_html())
        write(args.html.with_suffix(".trace.json"), report.to_chrome_trace())
    answer(report, json=args.json)
    return 0
