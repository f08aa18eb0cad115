"""One form for every timeline: bars in lanes, as a Chrome trace for Perfetto, as one HTML page, or as a PNG."""

import dataclasses
import html
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from jshard._text import duration

COLORS = {
    "matmul": "#3b6ea5",
    "computing": "#3b6ea5",
    "other": "#a9c3dd",
    "exposed": "#d1495b",
    "all-gather": "#2f9e6e",
    "reduce-scatter": "#e09f3e",
    "all-reduce": "#8e6bbf",
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
_LEAST_SHARE = 1 / 3000  # narrower bars cannot be seen: a page joins them with their neighbours
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em; }} pre {{ font-size: 13px; line-height: 1.35; }}
.lane {{ position: relative; height: 32px; margin: 3px 0 3px 130px; }} .lane b {{ margin-left: -130px; }}
i {{ position: absolute; top: 0; height: 100%; overflow: hidden; font: 12px/32px sans-serif; color: #fff; }}</style>
</head><body><h1>{title}</h1>
<p>{subtitle}</p>
{timeline}
<pre>{report}</pre>
</body></html>
"""


@dataclasses.dataclass(frozen=True)
class Bar:
    """Something that takes time."""

    lane: str  # the line in which it is drawn; lanes come in the order of their first bars
    begin_s: float  # seconds from the begin of the timeline
    end_s: float  # seconds from the same moment
    kind: str  # what it is, of `COLORS` or another word
    label: str  # written into it, if there is room
    tip: str  # shown when the pointer rests on it, and as its name in a trace


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
    """One page that needs nothing else: a timeline, and a report below it."""
    escaped = {"title": html.escape(title), "subtitle": html.escape(subtitle), "report": html.escape(report)}
    return _PAGE.format(**escaped, timeline="\n".join(_html_lanes(bars)))


def write_png(path: Path, title: str, bars: Iterable[Bar]) -> None:
    """Draws a timeline into a PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = _by_lane(bars)
    figure = Figure(figsize=(10, 1.5 + 0.35 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, found) in enumerate(lanes.items()):
        spans = [(bar.begin_s, bar.end_s - bar.begin_s) for bar in found]
        axes.broken_barh(spans, (place - 0.35, 0.7), facecolors=[_color(bar.kind) for bar in found], label=name)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=10)
    kinds = dict.fromkeys(bar.kind for found in lanes.values() for bar in found)
    if kinds:
        marks = [Patch(color=_color(kind), label=kind) for kind in kinds]
        axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1))
    FigureCanvasAgg(figure).print_png(str(path))


def _html_lanes(bars: Iterable[Bar]) -> Iterator[str]:
    lanes = _by_lane(bars)
    whole_s = max((bar.end_s for found in lanes.values() for bar in found), default=0.0) or 1.0
    kinds = dict.fromkeys(bar.kind for found in lanes.values() for bar in found)
    legend = (f'<span style="color:{_color(kind)}">&#9632;</span> {html.escape(kind)}' for kind in kinds)
    yield f"<p>{' &nbsp; '.join(legend)} &nbsp; (0 to {duration(whole_s)})</p>"
    for name, found in lanes.items():
        yield f'<div class="lane"><b>{html.escape(name)}</b>'
        for bar in _joined(found, whole_s * _LEAST_SHARE):
            left, width = 100 * bar.begin_s / whole_s, 100 * (bar.end_s - bar.begin_s) / whole_s
            place = f"left:{left:.3f}%;width:{width:.3f}%;background:{_color(bar.kind)}"
            yield f'<i style="{place}" title="{html.escape(bar.tip)}">{html.escape(bar.label)}</i>'
        yield "</div>"


def _by_lane(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    lanes: dict[str, list[Bar]] = {}
    for bar in bars:
        lanes.setdefault(bar.lane, []).append(bar)
    return lanes


def _joined(bars: Iterable[Bar], least_s: float) -> Iterator[Bar]:
    """Joins neighbours of which one is too narrow to be seen; the longer one gives color and text."""
    last: Bar | None = None
    for bar in bars:
        if last is None:
            last = bar
        elif bar.begin_s - last.end_s < least_s and min(bar.end_s - bar.begin_s, last.end_s - last.begin_s) < least_s:
            longer = max(last, bar, key=lambda b: b.end_s - b.begin_s)
            last = dataclasses.replace(longer, begin_s=last.begin_s, end_s=bar.end_s)
        else:
            yield last
            last = bar
    if last is not None:
        yield last


def _color(kind: str) -> str:
    return COLORS.get(kind, _OTHER)
