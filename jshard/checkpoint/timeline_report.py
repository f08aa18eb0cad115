"""The report on the saves and restores of a run: tables, the effective training time ratio, and pictures."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard._text import duration, human_bytes
from jshard.checkpoint.timeline import SLOWER, Timeline
from jshard.inspect.drawing import LANE, Box, legend, opened, page, rectangle, text_at
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
    """What `jshard ckpt timeline` tells.

    Attributes:
        folder: of the series.
        shown: the save or restore that is shown process by process.
        every: all of them, oldest first.
        mtbf_s: assumed time between failures.
        interval_s: training between two saves, if it was given and not measured.
    """

    folder: Path
    shown: Timeline
    every: tuple[Timeline, ...]
    mtbf_s: float
    interval_s: float | None = None

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
            why = "no save was measured" if not self.saves_s else "one save tells no interval: --interval SECONDS"
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


# The pictures of a save or a restore: a row of phases for each process, and the mesh coloured by their times.

_COLORS = {
    "plan": "#7a7a7a",
    "device_to_host": "#8e6bbf",
    "write": "#3b6ea5",
    "read": "#3b6ea5",
    "verify": "#2f9e6e",
    "sums": "#2f9e6e",
    "commit": "#e09f3e",
    "finish": "#a9c3dd",
}
_OTHER = "#555555"
_COLD, _HOT = (236, 242, 248), (209, 73, 91)
_LEFT, _WIDTH, _TOP, _CELL, _WIDE_CELL = 130, 820, 60, 34, 92
_MOST_COLUMNS = 8  # of wide cells; then they are squares without words


def to_html(report: TimelineReport) -> str:
    """The report with its pictures, as one page that needs nothing else."""
    return page(report.title, report.verdict, _svg(report), str(report))


def write_png(report: TimelineReport, path: Path) -> None:
    """Draws the same into a PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = report.shown
    figure = Figure(figsize=(10, 3.2 + 0.35 * len(shown.rows)), layout="constrained")
    lanes, heat = figure.subplots(2, 1, height_ratios=[max(2, len(shown.rows)), 2])
    for place, row in enumerate(shown.rows):
        for name, begin, end in row.phases:
            lanes.barh(place, end - begin, left=begin, color=_COLORS.get(name, _OTHER), height=0.7)
    lanes.set_yticks(range(len(shown.rows)), [f"process {row.process}" for row in shown.rows])
    lanes.invert_yaxis()
    lanes.set_xlabel("seconds")
    lanes.set_title(f"{report.title}\n{report.verdict}", loc="left", fontsize=10)
    marks = [lanes.barh(0, 0, color=_COLORS.get(name, _OTHER), label=name) for name in shown.phases]
    if marks:
        lanes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    _png_heat(heat, figure, shown)
    FigureCanvasAgg(figure).print_png(str(path))


def grid(shown: Timeline) -> tuple[list[list[int]], str]:
    """The process of each device, as rows and columns, and what these are: the last axis runs along the columns."""
    axes = {axis: degree for axis, degree in shown.axes.items() if degree > 1}
    if not shown.devices or math.prod(axes.values()) != len(shown.devices):
        return [[row.process for row in shown.rows]], "processes"
    *outer, last = axes or {"device": 1}
    columns = axes.get(last, 1)
    rows = [list(shown.devices[i : i + columns]) for i in range(0, len(shown.devices), columns)]
    return rows, f"devices: {' x '.join(outer) + ' down, ' if outer else ''}{last} across"


def _png_heat(axes: Any, figure: Any, shown: Timeline) -> None:
    times = {row.process: row.own_s for row in shown.rows}
    cells, what = grid(shown)
    seconds = [[times.get(process, math.nan) for process in row] for row in cells]
    image = axes.imshow(seconds, aspect="auto", vmin=0, cmap="YlOrRd")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{what}; seconds of own work of each one's process", loc="left", fontsize=10)
    if len(cells[0]) <= 2 * _MOST_COLUMNS and len(cells) <= _MOST_COLUMNS:
        for i, row in enumerate(cells):
            for j, process in enumerate(row):
                axes.text(j, i, str(process), ha="center", va="center")
    figure.colorbar(image, ax=axes, label="s")


def _svg(report: TimelineReport) -> str:
    shown = report.shown
    cells, what = grid(shown)
    heat_top = _TOP + len(shown.rows) * (LANE + 6) + 60
    height = heat_top + 40 + len(cells) * (_CELL + 4)
    lines = [opened(_LEFT + _WIDTH + 30, height, report.title)]
    lines += legend({_COLORS.get(name, _OTHER): _names(shown, name) for name in shown.phases}, _LEFT, 18)
    lines += _lanes(shown)
    lines.append(text_at(_LEFT, heat_top - 10, f"{what}; coloured by the own work of each one's process"))
    lines += _cells(shown, cells, heat_top + 4)
    return "\n".join([*lines, "</svg>"])


def _names(shown: Timeline, phase: str) -> str:
    """The phases that share a color."""
    color = _COLORS.get(phase, _OTHER)
    return ", ".join(name for name in shown.phases if _COLORS.get(name, _OTHER) == color)


def _lanes(shown: Timeline) -> Iterator[str]:
    scale = _WIDTH / max(shown.total_s, 1e-9)
    for place, row in enumerate(shown.rows):
        top = _TOP + place * (LANE + 6)
        yield text_at(8, top + 21, f"process {row.process}", weight="bold")
        for name, begin, end in row.phases:
            tip = f"process {row.process} on {row.host}: {name}, {duration(end - begin)} from {duration(begin)} on"
            yield rectangle(Box(begin, end, _COLORS.get(name, _OTHER), name, tip), _LEFT, top, scale)
    bottom = _TOP + len(shown.rows) * (LANE + 6) + 12
    yield text_at(_LEFT, bottom, "0 s")
    yield text_at(_LEFT + _WIDTH - 50, bottom, duration(shown.total_s))


def _cells(shown: Timeline, cells: list[list[int]], top: float) -> Iterator[str]:
    times = {row.process: row.own_s for row in shown.rows}
    most = max(times.values(), default=0.0)
    wide = len(cells[0]) <= _MOST_COLUMNS
    width = _WIDE_CELL if wide else max(4.0, min(_CELL, (_WIDTH - 4) / len(cells[0]) - 4))
    for i, row in enumerate(cells):
        for j, process in enumerate(row):
            time_s = times.get(process, 0.0)
            label = f"{process}: {duration(time_s)}" if wide else ""
            x, y, share = _LEFT + j * (width + 4), top + i * (_CELL + 4), time_s / most if most else 0.0
            yield (
                f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_CELL}" fill="{_heat(share)}">'
                f"<title>process {process}: {duration(time_s)}</title></rect>"
            )
            if label:
                yield text_at(x + 5, y + 21, label, fill="#fff" if share > 0.6 else "#222")


def _heat(share: float) -> str:
    mixed = (round(cold + (hot - cold) * share) for cold, hot in zip(_COLD, _HOT, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
