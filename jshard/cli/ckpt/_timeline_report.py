"""The report on the saves and restores of a run: tables, the effective training time ratio, and a timeline."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard._text import duration, human_bytes
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.timeline import SLOWER, ProcessTimes, Timeline
from jshard.inspect.drawing import Bar, chrome_trace, html_page, write_png
from jshard.inspect.tables import FittedTable, add_row, made_table, printed

FORMULA = "ETTR = I / (I + B) * (1 - (L + S + (I + B) / 2) / M)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ettr:
    """What checkpoints cost a run, in lost time.

    Of every interval, I seconds train and B are blocked by the save. A failure, every M seconds on average, costs the
    load L, what was done since the last save (half of I + B on average, as it may come at any time), and the time S in
    which that save was not complete yet: until then the one before counts. The start of the job after a failure is in
    none of these; it is added to `load_s` by whoever knows it.

    Args:
        interval_s: I, training between two saves.
        stall_s: B, how long a save blocks the step.
        save_s: S, from the begin of a save until it is complete.
        load_s: L, a restore.
        mtbf_s: M, time between failures of the whole job.

    Example:
        >>> round(Ettr(interval_s=600, stall_s=0.5, save_s=40, load_s=130, mtbf_s=3 * 3600).value, 3)
        0.956
    """

    interval_s: float
    stall_s: float
    save_s: float
    load_s: float
    mtbf_s: float

    @property
    def value(self) -> float:
        """The ratio; 0 if more is lost than is done."""
        period_s = self.interval_s + self.stall_s
        lost_s = self.load_s + self.save_s + period_s / 2
        return max(0.0, self.interval_s / period_s * (1 - lost_s / self.mtbf_s)) if period_s > 0 else 0.0


# The report on the saves and restores of a run: one of them process by process, and all of them summed up.

_MIB = 1 << 20
_CLOCKS = "Seconds; a process begins as the clock of its host says, and its phases are by its own."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelineReport:
    """What `jshard ckpt timeline` shows: one save or restore process by process, and all of them, oldest first."""

    folder: Place  # of the series
    shown: Timeline
    every: tuple[Timeline, ...]
    mtbf_s: float  # assumed time between failures
    interval_s: float | None = None  # training between two saves, if it was given and not measured

    @property
    def stalls_s(self) -> list[float]:
        """How long each save blocked training."""
        return [x.blocked_s for x in self._good("save") if x.blocked_s is not None]

    @property
    def saves_s(self) -> list[float]:
        """How long each save took until it was complete."""
        return [x.total_s for x in self._good("save")]

    @property
    def loads_s(self) -> list[float]:
        """How long each restore took."""
        return [x.total_s for x in self._good("restore")]

    @property
    def measured_interval_s(self) -> float | None:
        """Training between two saves: the median of those with no restore between them."""
        found = []
        for before, after in zip(self.every, self.every[1:], strict=False):
            if before.kind == after.kind == "save" and before.rows and after.rows:
                found.append(after.began_at - before.began_at - (before.blocked_s or 0.0))
        return statistics.median(found) if found else None

    @property
    def ettr(self) -> Ettr | None:
        """The effective training time ratio; None while no save was measured, or no interval is known."""
        interval_s = self.interval_s if self.interval_s is not None else self.measured_interval_s
        if not self.saves_s or interval_s is None or interval_s <= 0:
            return None
        return Ettr(
            interval_s=interval_s,
            stall_s=_median(self.stalls_s),
            save_s=_median(self.saves_s),
            load_s=_median(self.loads_s),
            mtbf_s=self.mtbf_s,
        )

    @property
    def verdict(self) -> str:
        """One line: which process is slow in which phase, or that none is."""
        shown = self.shown
        if not shown.rows:
            return f"it failed: {shown.error}"
        if len(shown.rows) == 1:
            row = shown.rows[0]
            phase = max(shown.phases, key=row.phase_s)
            share = row.phase_s(phase) / max(shown.total_s, 1e-9)
            return f"one process: most of it is {phase}, {duration(row.phase_s(phase))} ({share:.0%})"
        slow = shown.slowest
        if slow is None:
            return f"even: no process takes {SLOWER} times as long as the others in any phase"
        host = next(row.host for row in shown.rows if row.process == slow.process)
        if slow.phase == "late":
            return f"slowest: process {slow.process} on {host} began {duration(slow.time_s)} after the first one"
        ratio = f"{slow.time_s / slow.median_s:.1f} times " if slow.median_s > 0 else ""
        others = "that of the other" if len(shown.rows) == 2 else "the median of the others"
        return (
            f"slowest: process {slow.process} on {host}: {slow.phase} took {duration(slow.time_s)}, "
            f"{ratio}{others}, {duration(slow.median_s)}"
        )

    @property
    def title(self) -> str:
        """What is shown."""
        shown = self.shown
        what = f"{shown.kind.capitalize()} of step {shown.step}"
        if not shown.rows:
            return f"{what}: failed"
        count = "1 process" if len(shown.rows) == 1 else f"{len(shown.rows)} processes"
        return f"{what}: {count}, {duration(shown.total_s)}, {human_bytes(shown.num_bytes, 1)}"

    def __str__(self) -> str:
        return printed(self)

    def __rich__(self) -> Group:
        head = Text(self.title, style="bold"), Text(self.verdict)
        table = (self._table(), Text(_CLOCKS)) if self.shown.rows else ()
        return Group(*head, *table, Text(), self._sums(), *map(Text, self._ettr_lines()))

    def to_json(self) -> dict[str, Any]:
        """The report as values of JSON."""
        slow, ettr = self.shown.slowest, self.ettr
        return {
            "folder": str(self.folder),
            "shown": dataclasses.asdict(self.shown) | {"total_s": self.shown.total_s},
            "verdict": self.verdict,
            "slowest": None if slow is None else dataclasses.asdict(slow),
            "stall_s": self.stalls_s,
            "save_s": self.saves_s,
            "load_s": self.loads_s,
            "failed": sum(1 for x in self.every if x.error is not None),
            "ettr": None if ettr is None else {"value": ettr.value, "formula": FORMULA, **dataclasses.asdict(ettr)},
        }

    def to_html(self) -> str:
        """The report with a timeline, as one page that needs nothing else."""
        return html_page(self.title, self.verdict, self._bars(), str(self))

    def to_chrome_trace(self) -> str:
        """The timeline as JSON for https://ui.perfetto.dev."""
        return chrome_trace(self._bars())

    def write_png(self, path: Path) -> None:
        """Draws the timeline into a PNG. Needs no display."""
        write_png(path, f"{self.title}\n{self.verdict}", self._bars())

    def _bars(self) -> list[Bar]:
        return [
            Bar(f"process {row.process}", begin, end, name, name, _tip(row, name, begin, end))
            for row in self.shown.rows
            for name, begin, end in row.phases
        ]

    def _table(self) -> FittedTable:
        phases = self.shown.phases
        names = (f"{phase}>" for phase in phases)
        table = made_table("", "process>", "host", "began>", *names, "MiB>??", "MiB/s>?")
        for row in self.shown.rows:
            moved_s = row.phase_s("write", "read")
            rate = f"{row.num_bytes / _MIB / moved_s:.0f}" if moved_s > 0 else ""
            cells = [f"{row.phase_s(phase):.3f}" for phase in phases]
            add_row(
                table, str(row.process), row.host, f"+{row.began_s:.3f}", *cells, f"{row.num_bytes / _MIB:.1f}", rate
            )
        return table

    def _sums(self) -> FittedTable:
        failed = sum(1 for x in self.every if x.error is not None)
        table = made_table(
            f"All saves and restores of this folder ({failed} failed)", "", "times>", "median>", "longest>"
        )
        for name, times in (
            ("stall: the step is blocked", self.stalls_s),
            ("save, until it is complete", self.saves_s),
            ("load", self.loads_s),
        ):
            shown = (duration(statistics.median(times)), duration(max(times))) if times else ("", "")
            add_row(table, name, str(len(times)), *shown)
        return table

    def _ettr_lines(self) -> list[str]:
        ettr = self.ettr
        if ettr is None:
            why = "no save was measured" if not self.saves_s else "one save has no interval: --interval SECONDS"
            return [f"ETTR: not known, as {why}."]
        given = "given" if self.interval_s is not None else "measured"
        loaded = "measured" if self.loads_s else "no restore was measured: taken as 0"
        return [
            f"{FORMULA} = {ettr.value:.4f}",
            f"  I = {duration(ettr.interval_s)} between saves ({given}), B = {duration(ettr.stall_s)} stall (measured),"
            f" S = {duration(ettr.save_s)} save (measured),",
            f"  L = {duration(ettr.load_s)} load ({loaded}), M = {duration(ettr.mtbf_s)} between failures (assumed,"
            " --mtbf); medians",
        ]

    def _good(self, kind: str) -> list[Timeline]:
        return [x for x in self.every if x.kind == kind and x.error is None and x.rows]


def _median(times: Sequence[float]) -> float:
    return statistics.median(times) if times else 0.0


def _tip(row: ProcessTimes, phase: str, begin_s: float, end_s: float) -> str:
    took = f"{duration(end_s - begin_s)} from {duration(begin_s)} on"
    return f"process {row.process} on {row.host}: {phase}, {took}"
