"""Output of reports: tables as text; timelines of bars in lanes as a Chrome trace, an HTML page, or a PNG."""

import dataclasses
import html
import io
import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from jshard._text import duration
from jshard.errors import printable

_PIPED_WIDTH = 110  # of output that no terminal shows
_LONG = 24  # characters of a word that may be broken as a last resort


class _PlainConsole(Console):
    """A console that escapes the control characters in what it prints: only its own colours reach the terminal.

    Every report passes here, and any text in one may come from a file that somebody else wrote.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text, keep="\n"))


def width() -> int:
    """Characters of a line: those of the terminal, if standard output is one."""
    return Console(file=sys.stdout).width if _is_terminal() else _PIPED_WIDTH


def printed(renderable: Any) -> str:
    """An object rendered by `rich`, as plain text."""
    console = _PlainConsole(file=io.StringIO(), width=width(), color_system=None, legacy_windows=False)
    console.print(renderable, crop=False)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


class Printed:
    """A base for objects that `print`, the console and notebooks show by their `__rich__`."""

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__


def show(*things: Any) -> None:
    """Prints texts and objects that `rich` can print: in colour on a terminal, as plain text elsewhere.

    On a terminal lines end between words; elsewhere the lines of a text stay whole.
    """
    for thing in things:
        if _is_terminal():
            plain = Text(thing) if isinstance(thing, str) else thing
            _PlainConsole(file=sys.stdout, highlight=False).print(plain, crop=False)
        else:
            print(printable(thing, keep="\n\t") if isinstance(thing, str) else printed(thing), flush=True)


def _is_terminal() -> bool:
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def whole_line(text: str) -> Text:
    """A line that is not broken, so that it can be copied: a path, a command."""
    return Text(text, no_wrap=True, overflow="ignore")


def broken_line(command: str) -> str:
    """A long command in several lines, broken before options, so that it can be pasted as printed."""
    lines, longest = [""], width() / 2
    for word in shlex.split(command):
        part = shlex.quote(word)
        if word.startswith("--") and len(lines[-1]) > longest:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{part} "
    return "\n".join(line.rstrip() for line in lines)


class FittedTable:
    """A table that fits the given width without cutting a number or a word.

    If there is too little room, texts are wrapped between words. If that is not enough, columns are omitted,
    and the caption names them; then long words are broken. A column whose name ends in > holds numbers; one that ends
    in ? may be omitted, and in ?? before the others.
    """

    def __init__(self, title: str, columns: Sequence[str], caption: str = "") -> None:
        self.title, self.caption = title, caption
        self._names = [column.rstrip(">?") for column in columns]
        self._is_number = [">" in column[len(name) :] for name, column in zip(self._names, columns, strict=True)]
        self._spare = [column[len(name) :].count("?") for name, column in zip(self._names, columns, strict=True)]
        self._rows: list[tuple[list[str], str | None, bool]] = []

    def add_row(self, *cells: str | Sequence[str], style: str | None = None, end_section: bool = False) -> None:
        """Adds a row of plain text, a cell as a text or as its lines: no control characters in paths and shapes."""
        texts = ["\n".join(map(printable, [cell] if isinstance(cell, str) else cell)) for cell in cells]
        self._rows.append((texts, style, end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown, widths, is_tight = self._layout(options.max_width)
        left_out = ", ".join(name for i, name in enumerate(self._names) if i not in shown)
        caption = f"{self.caption} Left out at this width: {left_out}.".strip() if left_out else self.caption
        table = Table(
            title=Text(self.title, style="bold") if self.title else None,
            title_justify="left",
            caption=Text(caption, style="table.caption") if caption else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=is_tight,
        )
        for i, room in zip(shown, widths, strict=True):
            justify = "right" if self._is_number[i] else "left"
            fixed = room if is_tight else None
            table.add_column(Text(self._names[i]), justify=justify, width=fixed, overflow="fold")
        for cells, style, end_section in self._rows:
            table.add_row(*(Text(cells[i]) for i in shown), style=style, end_section=end_section)
        yield table

    def _layout(self, room: int) -> tuple[list[int], list[int], bool]:
        """The columns that are shown, their widths, and whether they are close together."""
        shown = list(range(len(self._names)))
        most = [max(_longest_line(text) for text in self._texts(i)) for i in shown]
        if sum(most) + 3 * len(shown) - 1 <= room:
            return shown, most, False
        least = [self._least(i) for i in shown]
        for spare in sorted((i for i in shown if self._spare[i]), key=lambda i: (-self._spare[i], -i)):
            if sum(least[i] for i in shown) + 2 * len(shown) <= room:
                break
            shown.remove(spare)
        room -= 2 * len(shown)
        widths = [most[i] for i in shown]
        first_whole = [most[shown[0]], *(least[i] for i in shown[1:])]  # it identifies the row
        for limits in (first_whole, [least[i] for i in shown]):
            widths = _squeezed(widths, limits, room)
        return shown, widths, True

    def _texts(self, i: int) -> list[str]:
        return [self._names[i], *(cells[i] for cells, _, _ in self._rows)]

    def _least(self, i: int) -> int:
        """The width at which a column cuts no number, and otherwise only long words."""
        name, *cells = self._texts(i)
        if self._is_number[i]:
            return max((_longest_word(name), *map(_longest_line, cells)))
        return max(_longest_word(name), min(_LONG, max(map(_longest_word, cells), default=0)))


def made_table(title: str, *columns: str, caption: str = "") -> FittedTable:
    """A table; see `FittedTable` for the names of columns."""
    return FittedTable(title, columns, caption)


def add_row(
    table: FittedTable, *cells: str | Sequence[str], style: str | None = None, end_section: bool = False
) -> None:
    """Adds a row of plain text, a cell as a text or as its lines: no markup in paths and shapes."""
    table.add_row(*cells, style=style, end_section=end_section)


def _squeezed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that fit the room, if possible: the widest shrink first."""
    found = list(widths)
    while sum(found) > room:
        can = [i for i in range(len(found)) if found[i] > least[i]]
        if not can:
            break
        found[max(can, key=lambda i: found[i])] -= 1
    return found


def _longest_line(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


_EXPOSED = "#d1495b"  # time spent waiting
_COLORS = "#3b6ea5 #4aa3c7 #2f9e6e #e09f3e #8e6bbf #7a7a7a #b5838d #5b8c85".split()  # of other kinds, in their order
_LEAST_SHARE = 1 / 3000  # narrower bars cannot be seen: a page joins them with their neighbours
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em; }} pre {{ font-size: 13px; line-height: 1.35; overflow-x: auto; }}
.lane {{ position: relative; height: 32px; margin: 3px 50px 3px 190px; }} .lane b {{ margin-left: -190px; }}
.lane u {{ position: absolute; padding-left: 3px; border-left: 1px solid #888; font: 12px sans-serif; color: #555;
  text-decoration: none; white-space: nowrap; }}
i {{ position: absolute; top: 0; height: 100%; container-type: inline-size; font: 12px/32px sans-serif; color: #fff; }}
i span {{ display: block; padding: 0 3px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }}
@container (max-width: 40px) {{ i span {{ display: none; }} }} .kind {{ white-space: nowrap; }}</style>
</head><body><h1>{title}</h1>
<p>{subtitle}</p>
{timeline}
<pre>{report}</pre>
</body></html>
"""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A span of time in a timeline."""

    lane: str  # the line in which it is drawn; lanes are in the order of their first bars
    begin_s: float  # seconds from the start of the timeline
    end_s: float  # seconds from the same start
    kind: str  # the kind of work, such as `matmul` or `all-gather`, which has a colour
    label: str  # written into it, if there is room
    tip: str  # shown when the pointer rests on it, and as its name in a trace


def phase_bars(turn_s: float, end_s: float) -> list[Bar]:
    """The phases of a step in a lane: backward begins with its first collective; no lane if it has none (0)."""
    parts = {"forward": (0.0, turn_s), "backward and update": (turn_s, end_s)} if turn_s else {}
    return [Bar("phase", a, b, name, name, f"{name}: {duration(b - a)}") for name, (a, b) in parts.items()]


def chrome_trace(bars: Iterable[Bar]) -> str:
    """Bars in the JSON of Chrome traces, which https://ui.perfetto.dev opens; every bar is in it."""
    lanes: dict[str, int] = {}
    events = []
    for bar in bars:
        lane = lanes.setdefault(bar.lane, len(lanes))
        times = {"ts": bar.begin_s * 1e6, "dur": (bar.end_s - bar.begin_s) * 1e6}
        events.append({"ph": "X", "pid": 0, "tid": lane, "name": bar.tip, "cat": bar.kind, **times})
    names = [
        {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for name, lane in lanes.items()
    ]
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def html_page(title: str, subtitle: str, bars: Iterable[Bar], report: str) -> str:
    """A self-contained page: a timeline, and a report below it."""
    texts = {"title": html.escape(title), "subtitle": html.escape(subtitle), "report": html.escape(report)}
    return _PAGE.format(**texts, timeline="\n".join(_html_lanes(list(bars))))


def write_png(path: Path, title: str, bars: Iterable[Bar]) -> None:
    """Draws a timeline into a PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = list(bars)
    lanes, colors = _by_lane(bars), _colors(bars)
    figure = Figure(figsize=(10, 1.5 + 0.35 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for place, found in enumerate(lanes.values()):
        spans = [(bar.begin_s, bar.end_s - bar.begin_s) for bar in found]
        axes.broken_barh(spans, (place - 0.35, 0.7), facecolors=[colors[bar.kind] for bar in found])
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=10)
    marks = [Patch(color=color, label=kind) for kind, color in colors.items()]
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1))
    FigureCanvasAgg(figure).print_png(str(path))


def _html_lanes(bars: list[Bar]) -> Iterator[str]:
    whole_s, colors = max((bar.end_s for bar in bars), default=0.0) or 1.0, _colors(bars)
    square = '<span class="kind"><span style="color:{}">&#9632;</span> {}</span>'
    legend = (square.format(color, html.escape(kind)) for kind, color in colors.items())
    yield f"<p>{' &nbsp; '.join(legend)} &nbsp; (0 to {duration(whole_s)})</p>"
    for name, found in _by_lane(bars).items():
        yield f'<div class="lane"><b>{html.escape(name)}</b>'
        for bar in _joined(found, whole_s * _LEAST_SHARE):
            left, width = 100 * bar.begin_s / whole_s, 100 * (bar.end_s - bar.begin_s) / whole_s
            place = f"left:{left:.3f}%;width:{width:.3f}%;background:{colors[bar.kind]}"
            label = bar.label and f"<span>{html.escape(bar.label)}</span>"
            yield f'<i style="{place}" title="{html.escape(bar.tip)}">{label}</i>'
        yield "</div>"
    marks = (f'<u style="left:{100 * at_s / whole_s:.3f}%">{duration(at_s)}</u>' for at_s in _ticks(whole_s))
    yield f'<div class="lane">{"".join(marks)}</div>'


def _ticks(whole_s: float) -> list[float]:
    """Round times along an axis, 5 to 10 of them."""
    unit = 10.0 ** math.floor(math.log10(whole_s))
    step = next(unit * part for part in (0.1, 0.2, 0.5, 1.0) if whole_s <= 10 * unit * part)
    return [i * step for i in range(math.floor(whole_s / step) + 1)]


def _by_lane(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    lanes: dict[str, list[Bar]] = {}
    for bar in bars:
        lanes.setdefault(bar.lane, []).append(bar)
    return lanes


def _colors(bars: Iterable[Bar]) -> dict[str, str]:
    kinds = sorted(dict.fromkeys(bar.kind for bar in bars), key="exposed".__eq__)  # that one last
    return {kind: _EXPOSED if kind == "exposed" else _COLORS[i % len(_COLORS)] for i, kind in enumerate(kinds)}


def _joined(bars: Iterable[Bar], least_s: float) -> list[Bar]:
    """Joins neighbours if one is too narrow to be seen; color and text are those of the longer one."""
    took = lambda bar: bar.end_s - bar.begin_s
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if last and bar.begin_s - last.end_s < least_s and min(took(bar), took(last)) < least_s:
            found[-1] = dataclasses.replace(max(last, bar, key=took), begin_s=last.begin_s, end_s=bar.end_s)
        else:
            found.append(bar)
    return found
