"""One form for every timeline: bars in lanes, as a Chrome trace for Perfetto, as one HTML page, or as a PNG."""

import dataclasses
import html
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from jshard._text import duration

_EXPOSED = "#d1495b"  # what is waited for
_COLORS = "#3b6ea5", "#a9c3dd", "#2f9e6e", "#e09f3e", "#8e6bbf", "#7a7a7a"  # of the other kinds, as they come
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
    kind: str  # what it is, such as `matmul` or `all-gather`: it has a colour
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
    legend = (f'<span style="color:{color}">&#9632;</span> {html.escape(kind)}' for kind, color in colors.items())
    yield f"<p>{' &nbsp; '.join(legend)} &nbsp; (0 to {duration(whole_s)})</p>"
    for name, found in _by_lane(bars).items():
        yield f'<div class="lane"><b>{html.escape(name)}</b>'
        for bar in _joined(found, whole_s * _LEAST_SHARE):
            left, width = 100 * bar.begin_s / whole_s, 100 * (bar.end_s - bar.begin_s) / whole_s
            place = f"left:{left:.3f}%;width:{width:.3f}%;background:{colors[bar.kind]}"
            yield f'<i style="{place}" title="{html.escape(bar.tip)}">{html.escape(bar.label)}</i>'
        yield "</div>"


def _by_lane(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    lanes: dict[str, list[Bar]] = {}
    for bar in bars:
        lanes.setdefault(bar.lane, []).append(bar)
    return lanes


def _colors(bars: Iterable[Bar]) -> dict[str, str]:
    kinds = [kind for kind in dict.fromkeys(bar.kind for bar in bars) if kind != "exposed"]
    return {kind: _COLORS[i % len(_COLORS)] for i, kind in enumerate(kinds)} | {"exposed": _EXPOSED}


def _joined(bars: Iterable[Bar], least_s: float) -> list[Bar]:
    """Joins neighbours of which one is too narrow to be seen; the longer one gives color and text."""
    took = lambda bar: bar.end_s - bar.begin_s
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if last and bar.begin_s - last.end_s < least_s and min(took(bar), took(last)) < least_s:
            found[-1] = dataclasses.replace(max(last, bar, key=took), begin_s=last.begin_s, end_s=bar.end_s)
        else:
            found.append(bar)
    return found
