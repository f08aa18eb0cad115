"""`jshard ckpt timeline RUN`: the times of a run's saves and restores, by process, and what they cost the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import counted, duration, human_bytes
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.lookup import series_at
from jshard.checkpoint.series.timeline import SLOWER, ProcessTimes, Slowest, Timeline, timelines
from jshard.cli._arguments import parse
from jshard.cli._output import check_writable, remark, write
from jshard.cli.ckpt import as_json
from jshard.cli.ckpt._ettr import SavingCosts
from jshard.errors import ShardingError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table, show
from jshard.inspect.timeline_page import Card, Panel, Section, html_page
from jshard.inspect.timelines import Bar, chrome_trace, write_png

_MIB = 1 << 20
_PICTURES = (".png", ".html", ".json")
_MOST_ROWS = 1000  # a table takes some milliseconds for each
_CLOCKS = "Seconds; a process begins as the clock of its host says, and its phases are by its own."


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


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt timeline`."""
    args = parse(TimelineArgs, argv, command="jshard ckpt timeline")
    _check(args)
    series = series_at(args.path)
    history = timelines(series, remark) if series is not None else []
    shown = _requested(args, history)
    costs = SavingCosts.of(history, mtbf_s=args.mtbf, interval_s=args.interval)
    report = _Report(folder=series or args.path, shown=shown, costs=costs)
    for path in args.out:
        _draw(report, path)
    if args.json:
        print(as_json(report.to_dict()))
    else:
        show(report)
    return 0


def _check(args: TimelineArgs) -> None:
    unknown = [str(path) for path in args.out if path.suffix not in _PICTURES]
    if unknown:
        raise ShardingError(
            "The picture cannot be drawn.",
            where=f"--out {' '.join(unknown)}",
            why="a file ends in .png, .html or .json.",
            do="--out timeline.png timeline.html",
        )
    # Before the history of many processes is read.
    for path in args.out:
        check_writable(path, option="--out")
    if args.mtbf <= 0 or (args.interval is not None and args.interval <= 0):
        interval = "" if args.interval is None else f" --interval {args.interval:g}"
        raise ShardingError(
            "The ETTR cannot be computed.",
            where=f"--mtbf {args.mtbf:g}{interval}",
            why="both are seconds, more than 0.",
            do="--mtbf 14400 --interval 600",
        )


def _requested(args: TimelineArgs, history: Sequence[Timeline]) -> Timeline:
    """Returns the save or restore to show: the last of those that the options allow, and a save if there is any."""
    matching: list[Timeline] = []
    for timeline in history:
        if args.step in (None, timeline.step) and args.kind in (None, timeline.kind):
            matching.append(timeline)
    if not matching:
        steps = sorted({timeline.step for timeline in history if timeline.step is not None})
        raise CheckpointError(
            "There is no record of such a save or restore.",
            where=str(args.path),
            why=f"history.jsonl there has the steps {', '.join(map(str, steps)) or '(none)'}.",
            do="give the folder of a run that has saved with this jshard; it writes the history by itself.",
        )
    saves = [timeline for timeline in matching if timeline.kind == "save"]
    # The history is oldest first.
    return saves[-1] if saves else matching[-1]


def _draw(report: _Report, path: Path) -> None:
    # A page and a trace are texts, which `write` reports itself.
    if path.suffix == ".png":
        write_png(path, f"{report.title}\n{report.verdict}", report.bars)
        remark(f"written: {path}")
    elif path.suffix == ".html":
        write(path, html_page(report.title, report.verdict, [report.section], str(report)))
    else:
        write(path, chrome_trace(report.bars))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Report(Printed):
    """One save or restore by process, and what all of a series cost."""

    folder: Place
    shown: Timeline
    costs: SavingCosts

    @property
    def title(self) -> str:
        shown = self.shown
        operation = f"{shown.kind.capitalize()} of step {shown.step}"
        if not shown.rows:
            return f"{operation}: failed"
        processes = counted(len(shown.rows), "process")
        return f"{operation}: {processes}, {duration(shown.total_s)}, {human_bytes(shown.num_bytes, 1)}"

    @property
    def verdict(self) -> str:
        """One line: which process is slow in which phase, or that none is."""
        shown = self.shown
        if not shown.rows:
            return f"it failed: {shown.error}"
        if len(shown.rows) == 1:
            return self._longest_phase(shown.rows[0])
        if shown.slowest is None:
            return f"even: no process takes {SLOWER} times as long as the others in any phase"
        return self._on_slowest(shown.slowest)

    def _longest_phase(self, row: ProcessTimes) -> str:
        phase = max(self.shown.phases, key=row.phase_s)
        share = row.phase_s(phase) / max(self.shown.total_s, 1e-9)  # phases may all be of no length
        return f"one process: most of it is {phase}, {duration(row.phase_s(phase))} ({share:.0%})"

    def _on_slowest(self, slow: Slowest) -> str:
        rows = self.shown.rows
        host = next(row.host for row in rows if row.process == slow.process)
        process = f"slowest: process {slow.process} on {host}"
        if slow.phase == "late":  # not a phase of its own work
            return f"{process} began {duration(slow.time_s)} after the first one"
        ratio = f"{slow.time_s / slow.median_s:.1f} times " if slow.median_s > 0 else ""
        peers = "that of the other" if len(rows) == 2 else "the median of the others"
        return f"{process}: {slow.phase} took {duration(slow.time_s)}, {ratio}{peers}, {duration(slow.median_s)}"

    @property
    def section(self) -> Section:
        """The same for a page."""
        shown = self.shown
        cards = (
            Card(shown.kind, duration(shown.total_s), "measured"),
            Card("written" if shown.kind == "save" else "read", human_bytes(shown.num_bytes, 1)),
            Card("processes", str(len(shown.rows))),
        )
        note = f"0 to {duration(shown.total_s)}: from the begin of the first process to the end of the last"
        panel = Panel(f"The whole {shown.kind} of step {shown.step}", note, tuple(self.bars))
        return Section(cards, (panel,))

    def __rich__(self) -> Group:
        parts: list[Text | FittedTable] = [Text(self.title, style="bold"), Text(self.verdict)]
        if self.shown.rows:
            parts.append(self._table())
            num_left_out = len(self.shown.rows) - _MOST_ROWS
            if num_left_out > 0:
                parts.append(Text(f"{counted(num_left_out, 'process')} more: --json"))
            parts.append(Text(_CLOCKS))
        parts += [Text(), self.costs.table(), Text("\n".join(self.costs.ettr_lines()))]
        return Group(*parts)

    def _table(self) -> FittedTable:
        phases = self.shown.phases
        # The marks `>` and `?` align numbers, and choose what a narrow terminal leaves out: see `FittedTable`.
        table = made_table("", "process>", "host", "began>", *(f"{phase}>" for phase in phases), "MiB>??", "MiB/s>?")
        for row in self.shown.rows[:_MOST_ROWS]:
            times = [f"{row.phase_s(phase):.3f}" for phase in phases]
            mib = row.num_bytes / _MIB
            moved_s = row.phase_s("write", "read")  # of a save the one, of a restore the other
            rate = f"{mib / moved_s:.0f}" if moved_s > 0 else ""
            add_row(table, str(row.process), row.host, f"+{row.began_s:.3f}", *times, f"{mib:.1f}", rate)
        return table

    def to_dict(self) -> dict[str, object]:
        """Returns the report as values of JSON."""
        slow = self.shown.slowest
        return {
            "folder": str(self.folder),
            "shown": dataclasses.asdict(self.shown) | {"total_s": self.shown.total_s},
            "verdict": self.verdict,
            "slowest": None if slow is None else dataclasses.asdict(slow),
            "stall_s": self.costs.stalls_s,
            "save_s": self.costs.saves_s,
            "load_s": self.costs.loads_s,
            "failed": self.costs.num_failed,
            "ettr": self.costs.ettr_dict(),
        }

    @property
    def bars(self) -> list[Bar]:
        """The phases of each process, for a plot."""
        bars: list[Bar] = []
        for row in self.shown.rows:
            lane = f"process {row.process}"
            for phase, begin_s, end_s in row.phases:
                took = f"{duration(end_s - begin_s)} from {duration(begin_s)} on"
                tip = f"{lane} on {row.host}: {phase}, {took}"
                bars.append(Bar(lane, begin_s, end_s, phase, label=phase, tip=tip))
        return bars
