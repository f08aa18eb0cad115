"""`jshard trace RUN`: what a profile of a run says about its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard.cli._arguments import answer, check_writable, parse, remark
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
    json: bool = False
    """Print JSON and nothing else."""
    timeline: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the timeline of the middle step on its most exposed device, too, as JSON for https://ui.perfetto.dev."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard trace`."""
    args = parse(TraceArgs, argv, command="jshard trace")
    check_writable(args.timeline, option="--timeline")
    found = trace(args.path)
    if args.timeline is not None:
        args.timeline.write_text(found.to_chrome_trace())
        remark(f"written: {args.timeline}")
    answer(found, json=args.json)
    return 0
