"""Timelines of bars in lanes, as a Chrome trace or a PNG; `jshard.inspect.timeline_page` draws them as HTML."""

import bisect
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jshard._text import counted, duration

EXPOSED = "exposed"
"""The kind of the bars that mark, over a collective's, the time in which nothing computes."""

PHASES = ("forward", "backward and update", "part", "loop")
"""The kinds of bars that are no work of their own: parts of a step."""

_NOTHING_S = 1e-12  # what the rounding of sums leaves
_COLORS = "#3b6ea5 #4aa3c7 #2f9e6e #e09f3e #8e6bbf #7a7a7a #b5838d #5b8c85".split()  # of a PNG


@dataclasses.dataclass(frozen=True)
class Bar:
    """A span of time in a timeline."""

    lane: str  # the line in which it is drawn; lanes are in the order of their first bars
    begin_s: float  # seconds from the start of the timeline
    end_s: float  # seconds from the same start
    kind: str  # the kind of work, such as `products` or `all-gather`, which has a colour
    label: str  # written into it, if there is room
    tip: str  # shown when the pointer rests on it, and as its name in a trace
    detail: str = ""  # more of that, which is no part of the name: its bytes, and how much of it is exposed


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


def exposed_bars(flights: Iterable[Bar], waits: Sequence[tuple[float, float]]) -> list[Bar]:
    """Returns the bars that mark what is exposed of collectives, in the lanes of these.

    Args:
        flights: the bars of the collectives.
        waits: begins and ends of the times in which nothing computes for their sake, in order; they do not overlap.
    """
    ends_s = [end_s for _, end_s in waits]
    bars = []
    for flight in flights:
        # A step has thousands of both: only the waits within this flight are looked at.
        for place in range(bisect.bisect_right(ends_s, flight.begin_s), len(waits)):
            begin_s = max(waits[place][0], flight.begin_s)
            end_s = min(waits[place][1], flight.end_s)
            if waits[place][0] >= flight.end_s:
                break
            if end_s - begin_s > _NOTHING_S:
                tip = f"exposed {duration(end_s - begin_s)} of {flight.tip}"
                bars.append(Bar(flight.lane, begin_s, end_s, EXPOSED, "", tip, flight.detail))
    return bars


def exposure_text(runs: float, in_flight_s: float, exposed_s: float) -> str:
    """Returns how much of a collective is exposed in a step, as text.

    Args:
        runs: how often it runs in the step.
        in_flight_s: the time of all runs.
        exposed_s: of that, while nothing computes.
    """
    shown_runs = counted(round(runs), "run")
    if exposed_s <= _NOTHING_S:
        return f"in the step {shown_runs}, {duration(in_flight_s)}, all of it hidden"
    return f"in the step {shown_runs}, {duration(in_flight_s)}, of which {duration(exposed_s)} exposed"


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
        if bar.detail:
            event["args"] = {"detail": bar.detail}
        events.append(event)
    names: list[dict[str, object]] = []
    for lane, thread_id in thread_ids.items():
        names.append({"ph": "M", "pid": 0, "tid": thread_id, "name": "thread_name", "args": {"name": lane}})
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def write_png(path: Path, title: str, bars: Iterable[Bar]) -> None:
    """Draws a timeline into a PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = list(bars)
    lanes = by_lane(bars)
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


def by_lane(bars: Iterable[Bar]) -> dict[str, list[Bar]]:
    """Returns bars by their lanes."""
    lanes: dict[str, list[Bar]] = {}
    for bar in bars:
        lanes.setdefault(bar.lane, []).append(bar)
    return lanes


def _colors(bars: Iterable[Bar]) -> dict[str, str]:
    """Returns the colors of kinds in the order of the legend."""
    kinds = dict.fromkeys(bar.kind for bar in bars)  # a set that keeps the order
    return {kind: _COLORS[place % len(_COLORS)] for place, kind in enumerate(kinds)}


def joined_bars(bars: Iterable[Bar], least_s: float) -> list[Bar]:
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
