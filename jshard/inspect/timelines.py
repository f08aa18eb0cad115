"""Timelines of bars in lanes, as a Chrome trace, an HTML page, or a PNG."""

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jshard._text import duration

_EXPOSED_KIND = "exposed"  # time spent waiting
_EXPOSED_COLOR = "#d1495b"
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


def last_end_s(bars: Iterable[Bar]) -> float:
    """Returns when the last bar ends; 0 if there is none."""
    return max((bar.end_s for bar in bars), default=0.0)


def phase_bars(turn_s: float, end_s: float) -> list[Bar]:
    """Returns the phases of a step in a lane: backward begins with its first collective; no lane if it has none (0)."""
    if not turn_s:
        return []
    return [_phase("forward", 0.0, turn_s), _phase("backward and update", turn_s, end_s)]


def _phase(name: str, begin_s: float, end_s: float) -> Bar:
    return Bar("phase", begin_s, end_s, name, name, f"{name}: {duration(end_s - begin_s)}")


def chrome_trace(bars: Iterable[Bar]) -> str:
    """Returns bars in the JSON of Chrome traces, which https://ui.perfetto.dev opens; every bar is in it."""
    thread_ids: dict[str, int] = {}  # a lane is drawn as a thread
    events: list[dict[str, object]] = []
    for bar in bars:
        event = {
            "ph": "X",  # a complete event: begin and duration
            "pid": 0,
            "tid": thread_ids.setdefault(bar.lane, len(thread_ids)),
            "name": bar.tip,
            "cat": bar.kind,
            "ts": bar.begin_s * 1e6,
            "dur": (bar.end_s - bar.begin_s) * 1e6,
        }
        events.append(event)
    names: list[dict[str, object]] = []
    for lane, thread_id in thread_ids.items():
        names.append({"ph": "M", "pid": 0, "tid": thread_id, "name": "thread_name", "args": {"name": lane}})
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def html_page(title: str, subtitle: str, bars: Iterable[Bar], report: str) -> str:
    """Returns a self-contained page: a timeline, and a report below it."""
    return _PAGE.format(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        timeline="\n".join(_html_lines(list(bars))),
        report=html.escape(report),
    )


def write_png(path: Path, title: str, bars: Iterable[Bar]) -> None:
    """Draws a timeline into a PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = list(bars)
    lanes = _by_lane(bars)
    colors = _colors(bars)
    figure = Figure(figsize=(10, 1.5 + 0.35 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for place, lane in enumerate(lanes.values()):
        spans = []
        bar_colors = []
        for bar in lane:
            spans.append((bar.begin_s, _length_s(bar)))
            bar_colors.append(colors[bar.kind])
        axes.broken_barh(spans, (place - 0.35, 0.7), facecolors=bar_colors)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()  # the first lane on top
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=10)
    marks = [Patch(color=color, label=kind) for kind, color in colors.items()]
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1))
    FigureCanvasAgg(figure).print_png(str(path))


def _html_lines(bars: Sequence[Bar]) -> Iterator[str]:
    """Yields the legend, the lanes, and the axis of a page."""
    total_s = last_end_s(bars) or 1.0  # an empty timeline has an axis, too
    colors = _colors(bars)
    legend = []
    for kind, color in colors.items():
        square = f'<span style="color:{color}">&#9632;</span>'
        legend.append(f'<span class="kind">{square} {html.escape(kind)}</span>')
    yield f"<p>{' &nbsp; '.join(legend)} &nbsp; (0 to {duration(total_s)})</p>"
    for name, lane in _by_lane(bars).items():
        yield f'<div class="lane"><b>{html.escape(name)}</b>'
        for bar in _joined(lane, total_s * _LEAST_SHARE):
            yield _html_bar(bar, total_s, colors[bar.kind])
        yield "</div>"
    yield f'<div class="lane">{_html_ticks(total_s)}</div>'


def _html_bar(bar: Bar, total_s: float, color: str) -> str:
    left_percent = 100 * bar.begin_s / total_s
    width_percent = 100 * (bar.end_s - bar.begin_s) / total_s
    style = f"left:{left_percent:.3f}%;width:{width_percent:.3f}%;background:{color}"
    label = ""
    if bar.label:
        label = f"<span>{html.escape(bar.label)}</span>"
    return f'<i style="{style}" title="{html.escape(bar.tip)}">{label}</i>'


def _html_ticks(total_s: float) -> str:
    ticks = ""
    for tick_s in _ticks(total_s):
        left_percent = 100 * tick_s / total_s
        ticks += f'<u style="left:{left_percent:.3f}%">{duration(tick_s)}</u>'
    return ticks


def _ticks(total_s: float) -> list[float]:
    """Returns round times along an axis, 5 to 10 of them."""
    step_s = _tick_step_s(total_s)
    return [i * step_s for i in range(math.floor(total_s / step_s) + 1)]


def _tick_step_s(total_s: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(total_s))
    for part in (0.1, 0.2, 0.5):
        if total_s <= 10 * magnitude * part:
            return magnitude * part
    return magnitude


def _by_lane(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    lanes: dict[str, list[Bar]] = {}
    for bar in bars:
        lanes.setdefault(bar.lane, []).append(bar)
    return lanes


def _colors(bars: Iterable[Bar]) -> dict[str, str]:
    """Returns the colors of kinds in the order of the legend, exposed time last."""
    kinds = dict.fromkeys(bar.kind for bar in bars)  # a set that keeps the order
    colors: dict[str, str] = {}
    for kind in kinds:
        if kind != _EXPOSED_KIND:
            colors[kind] = _COLORS[len(colors) % len(_COLORS)]
    if _EXPOSED_KIND in kinds:
        colors[_EXPOSED_KIND] = _EXPOSED_COLOR
    return colors


def _joined(bars: Iterable[Bar], least_s: float) -> list[Bar]:
    """Joins neighbours if one is too narrow to be seen; color and text are those of the longer one."""
    joined: list[Bar] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if last is not None and _are_joined(last, bar, least_s):
            longer = max(last, bar, key=_length_s)
            joined[-1] = dataclasses.replace(longer, begin_s=last.begin_s, end_s=bar.end_s)
        else:
            joined.append(bar)
    return joined


def _are_joined(last: Bar, bar: Bar, least_s: float) -> bool:
    is_near = bar.begin_s - last.end_s < least_s
    is_one_narrow = min(_length_s(bar), _length_s(last)) < least_s
    return is_near and is_one_narrow


def _length_s(bar: Bar) -> float:
    return bar.end_s - bar.begin_s
