"""`jshard ckpt timeline RUN`: the times of a run's saves and restores, by process, and what they cost the run."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import counted, duration, human_bytes
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.lookup import series_at
from jshard.checkpoint.timeline import SLOWER, Timeline, timelines
from jshard.cli._arguments import check_writable, parse, remark, write
from jshard.cli.ckpt import as_json
from jshard.errors import ShardingError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table, show
from jshard.inspect.timelines import Bar, chrome_trace, html_page, write_png

_MIB = 1 << 20
_MOST_ROWS = 1000  # a table takes some milliseconds for each
_CLOCKS = "Seconds; a process begins as the clock of its host says, and its phases are by its own."
_FORMULA = "ETTR = I / (I + B) * (1 - (L + S + (I + B) / 2) / M)"


@dataclasses.dataclass(frozen=True)
class TimelineArgs:
    """Shows a save or a restore process by process, names the slowest one, and sums up all of them.

    A process is named if it took 1.5 times as long as the median of the others in a phase of its own work, and that
    costs 5 % of the total. Exit codes: 0 done, 2 there is no history, or the request is invalid.
    """

    path: tyro.conf.Positional[Path]
    """Folder of a run, or folder of checkpoints by step."""
    step: int | None = None
    """The checkpoint of this step; the last one by default."""
    kind: Literal["save", "restore"] | None = None
    """Which operation to show; by default the last save, or the last restore if there is no save."""
    out: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE")] = ()
    """Files to plot it into: *.png, *.html, or *.json, a trace for https://ui.perfetto.dev."""
    mtbf: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 4 * 3600.0
    """Assumed time between failures of the whole job, for the ETTR."""
    interval: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Training time between two saves for the ETTR, instead of the measured one."""
    json: bool = False
    """Print JSON only."""


def run_timeline(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt timeline`."""
    args = parse(TimelineArgs, argv, command="jshard ckpt timeline")
    _check(args)
    series = series_at(args.path)
    every = timelines(series, remark) if series is not None else []
    report = _Report(series or args.path, _chosen(args, every), every, args.mtbf, args.interval)
    for path in args.out:
        if path.suffix == ".png":
            write_png(path, f"{report.title}\n{report.verdict}", report.bars)
            remark(f"written: {path}")
        elif path.suffix == ".html":
            write(path, html_page(report.title, report.verdict, report.bars, str(report)))
        else:
            write(path, chrome_trace(report.bars))
    if args.json:
        print(as_json(report.to_dict()))
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
    for path in args.out:
        check_writable(path, option="--out")
    if args.mtbf <= 0 or (args.interval is not None and args.interval <= 0):
        raise ShardingError(
            "The ETTR cannot be computed.",
            where=f"--mtbf {args.mtbf:g}" + ("" if args.interval is None else f" --interval {args.interval:g}"),
            why="both are seconds, more than 0.",
            do="--mtbf 14400 --interval 600",
        )


def ettr(*, interval_s: float, stall_s: float, save_s: float, load_s: float, mtbf_s: float) -> float:
    """The effective training time ratio: the share of a run's time that makes progress which stays; at least 0.

    In every interval, I seconds train and B are blocked by the save. A failure, every M seconds on average, costs the
    load L, the work since the last save (half of I + B on average, as it may come at any time), and the time S in
    which that save was not yet complete: until then the previous one is used. The job's start after a failure is not
    included; add it to `load_s` if you know it.

    Args:
        interval_s: I, training between two saves.
        stall_s: B, how long a save blocks the step.
        save_s: S, from the start of a save until it is complete.
        load_s: L, a restore.
        mtbf_s: M, time between failures of the whole job.

    Example:
        >>> round(ettr(interval_s=600, stall_s=0.5, save_s=40, load_s=130, mtbf_s=3 * 3600), 3)
        0.956
    """
    period_s = interval_s + stall_s
    lost_s = load_s + save_s + period_s / 2
    return max(0.0, interval_s / period_s * (1 - lost_s / mtbf_s)) if period_s > 0 else 0.0


class _Report(Printed):
    """One save or restore by process, and a summary of a whole series."""

    def __init__(
        self, folder: Place, shown: Timeline, every: Sequence[Timeline], mtbf_s: float, interval_s: float | None
    ) -> None:
        self.folder, self.shown, self.is_given = folder, shown, interval_s is not None
        self.failed = sum(x.error is not None for x in every)
        good = [x for x in every if x.error is None and x.rows]
        self.stalls_s = [x.blocked_s for x in good if x.kind == "save" and x.blocked_s is not None]
        self.saves_s = [x.total_s for x in good if x.kind == "save"]
        self.loads_s = [x.total_s for x in good if x.kind == "restore"]
        interval_s = _measured_interval_s(every) if interval_s is None else interval_s
        self.known: dict[str, float] | None = None  # what the ETTR is made from
        if self.saves_s and interval_s is not None and interval_s > 0:
            median = lambda times: statistics.median(times) if times else 0.0
            of_saves = {"stall_s": median(self.stalls_s), "save_s": median(self.saves_s)}
            self.known = {"interval_s": interval_s, **of_saves, "load_s": median(self.loads_s), "mtbf_s": mtbf_s}

    @property
    def title(self) -> str:
        shown = self.shown
        what = f"{shown.kind.capitalize()} of step {shown.step}"
        if not shown.rows:
            return f"{what}: failed"
        count = counted(len(shown.rows), "process")
        return f"{what}: {count}, {duration(shown.total_s)}, {human_bytes(shown.num_bytes, 1)}"

    @property
    def verdict(self) -> str:
        """One line: which process is slow in which phase, or that none is."""
        shown, slow = self.shown, self.shown.slowest if self.shown.rows else None
        if not shown.rows:
            return f"it failed: {shown.error}"
        if len(shown.rows) == 1:
            row = shown.rows[0]
            phase = max(shown.phases, key=row.phase_s)
            share = row.phase_s(phase) / max(shown.total_s, 1e-9)
            return f"one process: most of it is {phase}, {duration(row.phase_s(phase))} ({share:.0%})"
        if slow is None:
            return f"even: no process takes {SLOWER} times as long as the others in any phase"
        who = f"slowest: process {slow.process} on {next(x.host for x in shown.rows if x.process == slow.process)}"
        if slow.phase == "late":
            return f"{who} began {duration(slow.time_s)} after the first one"
        ratio = f"{slow.time_s / slow.median_s:.1f} times " if slow.median_s > 0 else ""
        others = "that of the other" if len(shown.rows) == 2 else "the median of the others"
        return f"{who}: {slow.phase} took {duration(slow.time_s)}, {ratio}{others}, {duration(slow.median_s)}"

    def __rich__(self) -> Group:
        head = Text(self.title, style="bold"), Text(self.verdict)
        table = (self._table(), *self._rest(), Text(_CLOCKS)) if self.shown.rows else ()
        return Group(*head, *table, Text(), self._sums(), Text("\n".join(self._ettr_lines())))

    def to_dict(self) -> dict[str, Any]:
        """The report as values of JSON."""
        slow, known = self.shown.slowest, self.known
        return {
            "folder": str(self.folder),
            "shown": dataclasses.asdict(self.shown) | {"total_s": self.shown.total_s},
            "verdict": self.verdict,
            "slowest": None if slow is None else dataclasses.asdict(slow),
            "stall_s": self.stalls_s,
            "save_s": self.saves_s,
            "load_s": self.loads_s,
            "failed": self.failed,
            "ettr": None if known is None else {"value": ettr(**known), "formula": _FORMULA, **known},
        }

    @property
    def bars(self) -> list[Bar]:
        """The phases of each process, for a plot."""
        found = []
        for row in self.shown.rows:
            for phase, begin_s, end_s in row.phases:
                took = f"{duration(end_s - begin_s)} from {duration(begin_s)} on"
                tip = f"process {row.process} on {row.host}: {phase}, {took}"
                found.append(Bar(f"process {row.process}", begin_s, end_s, phase, phase, tip))
        return found

    def _table(self) -> FittedTable:
        phases = self.shown.phases
        names = (f"{phase}>" for phase in phases)
        table = made_table("", "process>", "host", "began>", *names, "MiB>??", "MiB/s>?")
        for row in self.shown.rows[:_MOST_ROWS]:
            moved_s, mib = row.phase_s("write", "read"), row.num_bytes / _MIB
            times = [f"+{row.began_s:.3f}", *(f"{row.phase_s(phase):.3f}" for phase in phases)]
            rate = f"{mib / moved_s:.0f}" if moved_s > 0 else ""
            add_row(table, str(row.process), row.host, *times, f"{mib:.1f}", rate)
        return table

    def _rest(self) -> list[Text]:
        """A line for the processes that the table leaves out."""
        count = len(self.shown.rows) - _MOST_ROWS
        return [Text(f"{counted(count, 'process')} more: --json")] if count > 0 else []

    def _sums(self) -> FittedTable:
        title = f"All saves and restores of this folder ({self.failed} failed)"
        table = made_table(title, "", "times>", "median>", "longest>")
        named = {
            "stall: the step is blocked": self.stalls_s,
            "save, until it is complete": self.saves_s,
            "load": self.loads_s,
        }
        for name, times in named.items():
            shown = (duration(statistics.median(times)), duration(max(times))) if times else ("", "")
            add_row(table, name, str(len(times)), *shown)
        return table

    def _ettr_lines(self) -> list[str]:
        if self.known is None:
            why = "no save was measured" if not self.saves_s else "one save has no interval: --interval SECONDS"
            return [f"ETTR: not known, as {why}."]
        interval, stall, save, load, mtbf = map(duration, self.known.values())
        given = "given" if self.is_given else "measured"
        loaded = "measured" if self.loads_s else "no restore was measured: taken as 0"
        return [
            f"{_FORMULA} = {ettr(**self.known):.4f}",
            f"  I = {interval} between saves ({given}), B = {stall} stall (measured), S = {save} save (measured),",
            f"  L = {load} load ({loaded}), M = {mtbf} between failures (assumed, --mtbf); medians",
        ]


def _measured_interval_s(every: Sequence[Timeline]) -> float | None:
    """Training between two saves: the median of those with no restore between them."""
    found = []
    for before, after in itertools.pairwise(every):
        if before.kind == after.kind == "save" and before.rows and after.rows:
            found.append(after.began_at - before.began_at - (before.blocked_s or 0.0))
    return statistics.median(found) if found else None
