"""`jshard ckpt timeline RUN`: what the saves and restores of a run took, in each process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.lookup import series_at
from jshard.checkpoint.timeline import Timeline, timelines
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import as_json
from jshard.cli.ckpt._timeline_report import TimelineReport
from jshard.errors import ShardingError
from jshard.inspect.tables import show


@dataclasses.dataclass(frozen=True)
class TimelineArgs:
    """Shows a save or a restore process by process, names the slowest one, and sums up all of them.

    A process is named if it took 1.5 times as long as the median of the others in a phase of its own work, and that
    costs 5 % of the whole. Exit codes: 0 done, 2 there is no history, or the request was wrong.
    """

    path: tyro.conf.Positional[Path]
    """Folder of a run, or folder of checkpoints by step."""
    step: int | None = None
    """The checkpoint of this step; the last one by default."""
    kind: Literal["save", "restore"] | None = None
    """What to show of it; by default its last save, or its last restore if there is no save."""
    out: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE")] = ()
    """Files to draw it into: *.png, *.html, or *.json, a trace for https://ui.perfetto.dev."""
    mtbf: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 4 * 3600.0
    """Time between failures of the whole job that is assumed for the ETTR."""
    interval: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Training between two saves for the ETTR, instead of what was measured."""
    json: bool = False
    """Print JSON and nothing else."""


def run_timeline(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt timeline`."""
    args = parse(TimelineArgs, argv, command="jshard ckpt timeline")
    _check(args)
    series = series_at(args.path)
    every = timelines(series) if series is not None else []
    report = TimelineReport(
        folder=series or args.path,
        shown=_chosen(args, every),
        every=tuple(every),
        mtbf_s=args.mtbf,
        interval_s=args.interval,
    )
    for path in args.out:
        if path.suffix == ".png":
            report.write_png(path)
        else:
            path.write_text(report.to_html() if path.suffix == ".html" else report.to_chrome_trace())
        print(f"written: {path}", file=sys.stderr)
    if args.json:
        print(as_json(report.to_json()))
    else:
        show(report)
    return 0


def _chosen(args: TimelineArgs, every: Sequence[Timeline]) -> Timeline:
    found = [x for x in every if args.step in (None, x.step) and args.kind in (None, x.kind)]
    if not found:
        steps = sorted({x.step for x in every if x.step is not None})
        raise CheckpointError(
            "There is no record of such a save or restore.",
            where=str(args.path),
            why=f"history.jsonl there has the steps {', '.join(map(str, steps)) or '(none)'}.",
            do="give the folder of a run that has saved with this jshard; it writes the history by itself.",
        )
    saves = [x for x in found if x.kind == "save"]
    return (saves or found)[-1]


def _check(args: TimelineArgs) -> None:
    wrong = [path for path in args.out if path.suffix not in (".png", ".html", ".json")]
    if wrong:
        raise ShardingError(
            "The picture cannot be drawn.",
            where=f"--out {' '.join(map(str, wrong))}",
            why="a file ends in .png, .html or .json.",
            do="--out timeline.png timeline.html",
        )
    homeless = [path for path in args.out if not path.absolute().parent.is_dir()]
    if homeless:
        raise ShardingError(
            "The file cannot be written.",
            where=f"--out {' '.join(map(str, homeless))}",
            why=f"there is no folder {homeless[0].absolute().parent}.",
            do=f"mkdir -p {homeless[0].parent}",
        )
    if args.mtbf <= 0 or (args.interval is not None and args.interval <= 0):
        raise ShardingError(
            "The ETTR cannot be computed.",
            where=f"--mtbf {args.mtbf:g}" + ("" if args.interval is None else f" --interval {args.interval:g}"),
            why="both are seconds, more than 0.",
            do="--mtbf 14400 --interval 600",
        )
