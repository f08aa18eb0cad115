"""The pictures of a save or a restore: a row of phases for each process, and the mesh coloured by their times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jshard.checkpoint.timeline import Timeline
from jshard.checkpoint.timeline_report import TimelineReport
from jshard.inspect.drawing import LANE, Box, duration, legend, opened, page, rectangle, written

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
    lines.append(written(_LEFT, heat_top - 10, f"{what}; coloured by the own work of each one's process"))
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
        yield written(8, top + 21, f"process {row.process}", weight="bold")
        for name, begin, end in row.phases:
            tip = f"process {row.process} on {row.host}: {name}, {duration(end - begin)} from {duration(begin)} on"
            yield rectangle(Box(begin, end, _COLORS.get(name, _OTHER), name, tip), _LEFT, top, scale)
    bottom = _TOP + len(shown.rows) * (LANE + 6) + 12
    yield written(_LEFT, bottom, "0 s")
    yield written(_LEFT + _WIDTH - 50, bottom, duration(shown.total_s))


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
                yield written(x + 5, y + 21, label, fill="#fff" if share > 0.6 else "#222")


def _heat(share: float) -> str:
    mixed = (round(cold + (hot - cold) * share) for cold, hot in zip(_COLD, _HOT, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
