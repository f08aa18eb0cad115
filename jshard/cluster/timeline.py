"""A picture of one estimated step: what computes, what communicates beside it, and where the computation waits."""

import dataclasses
import html
from collections.abc import Iterable, Iterator, Sequence

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.replay import Replay, Segment, Span
from jshard.inspect.schedule import Schedule
from jshard.inspect.steps import Window

_MARGIN, _GAP = 110, 14  # left of the lanes; between segments
_LANE, _COMPUTE, _LINKS, _HEIGHT = 34, 72, 120, 228  # height of a lane; tops; of the picture
_CHAR, _LEAST = 6.2, 0.4  # width of a letter; narrower pieces are merged with their neighbours
_COLORS = {
    "matmul": "#3b6ea5",
    "other": "#a9c3dd",
    "exposed": "#d1495b",
    "all-gather": "#2f9e6e",
    "reduce-scatter": "#e09f3e",
    "all-reduce": "#8e6bbf",
    "all-to-all": "#7a7a7a",
    "collective-permute": "#7a7a7a",
}
_LEGEND = {
    "matmul": "matrix products",
    "other": "other computation",
    "exposed": "waits for communication",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
}


def timeline_svg(schedule: Schedule, assumptions: Assumptions, *, title: str = "", width: int = 1200) -> str:
    """Draws the computing and the communicating stream of one step, as a self-contained SVG.

    A loop is drawn as one steady round with the number of rounds above it, so lengths are true within a part, and
    between parts of the picture, but the picture is shorter than the step.

    Args:
        schedule: the program.
        assumptions: the machine.
        title: first line.
        width: in pixels.

    Example:
        >>> pathlib.Path("step.svg").write_text(timeline_svg(schedule, h100))
    """
    replay = Replay(schedule, assumptions)
    shown_s = sum(s.end_s - s.begin_s for s in replay.segments) or 1.0
    room = width - _MARGIN - 20 - _GAP * max(0, len(replay.segments) - 1)
    scale = max(room, 100) / shown_s
    parts: list[str] = []
    left = float(_MARGIN)
    for segment in replay.segments:
        parts += _segment(segment, replay.spans, schedule.windows, left, scale)
        left += (segment.end_s - segment.begin_s) * scale + _GAP
    heading = title or "One step, estimated"
    total = f"step {_seconds(replay.clock_s)}, exposed {_seconds(sum(replay.exposed_s))} (estimate)"
    head = [_text(12, 22, f"{heading}: {total}", weight="bold"), _text(12, 40, str(assumptions))]
    lanes = [_text(12, _COMPUTE + 21, "computation"), _text(12, _LINKS + 21, "communication")]
    return "\n".join([_open(width, heading), *head, *lanes, *parts, *_legend(), "</svg>"])


@dataclasses.dataclass(frozen=True)
class _Box:
    """A rectangle of the picture before it is written: seconds from the begin of its segment."""

    begin_s: float
    end_s: float
    color: str
    label: str
    tip: str


def _segment(
    segment: Segment, spans: Sequence[Span], windows: Sequence[Window], left: float, scale: float
) -> Iterator[str]:
    boxes: dict[bool, list[_Box]] = {True: [], False: []}
    for span in spans:
        begin_s, end_s = max(span.begin_s, segment.begin_s), min(span.end_s, segment.end_s)
        if end_s > begin_s:
            box = _box(span, windows, begin_s - segment.begin_s, end_s - segment.begin_s)
            boxes[span.lane == "communication"].append(box)
    for communicates, top in ((False, _COMPUTE), (True, _LINKS)):
        for box in _merged(boxes[communicates], _LEAST / scale):
            yield _rectangle(box, left, top, scale)
    length = (segment.end_s - segment.begin_s) * scale
    duration = _seconds(segment.end_s - segment.begin_s)
    if length > _CHAR * len(duration):
        yield _text(left, _LINKS + _LANE + 18, duration)
    if segment.rounds > 1:
        yield _text(left, _COMPUTE - 6, f"x {segment.rounds}", weight="bold")
    yield f'<path d="M{left:.1f} {_LINKS + _LANE + 4} h{length:.1f}" stroke="#444" fill="none"/>'


def _box(span: Span, windows: Sequence[Window], begin_s: float, end_s: float) -> _Box:
    took = _seconds(span.end_s - span.begin_s)
    if span.window is None:
        return _Box(begin_s, end_s, _COLORS[span.lane], "", f"{span.name}: {took}")
    window = windows[span.window]
    unit = window.unit or ""
    color = _COLORS["exposed"] if span.lane == "exposed" else _COLORS[window.kind]
    verb = "waits for " if span.lane == "exposed" else ""
    tip = f"{verb}{window.kind} {unit} ({window.full_bytes / 2**20:.1f} MiB over {len(window.group)}): {took}"
    return _Box(begin_s, end_s, color, "" if span.lane == "exposed" else unit, tip)


def _merged(boxes: Iterable[_Box], least_s: float) -> Iterator[_Box]:
    """Joins neighbours of which one is too narrow to be seen; the longer one gives color and text."""
    last: _Box | None = None
    for box in boxes:
        if last is None:
            last = box
        elif box.begin_s - last.end_s < least_s and min(box.end_s - box.begin_s, last.end_s - last.begin_s) < least_s:
            longer = max(last, box, key=lambda b: b.end_s - b.begin_s)
            last = dataclasses.replace(longer, begin_s=last.begin_s, end_s=box.end_s)
        else:
            yield last
            last = box
    if last is not None:
        yield last


def _rectangle(box: _Box, left: float, top: int, scale: float) -> str:
    x, width = left + box.begin_s * scale, (box.end_s - box.begin_s) * scale
    shape = f'<rect x="{x:.1f}" y="{top}" width="{max(width, 0.3):.1f}" height="{_LANE}" fill="{box.color}"'
    if box.label:
        shape += ' stroke="#fff" stroke-width="0.6"'
    drawn = f"{shape}><title>{html.escape(box.tip)}</title></rect>"
    if box.label and width > _CHAR * len(box.label) + 6:
        drawn += _text(x + 3, top + 21, box.label, fill="#fff")
    return drawn


def _legend() -> Iterator[str]:
    x = float(_MARGIN)
    for key, label in _LEGEND.items():
        yield f'<rect x="{x:.1f}" y="{_HEIGHT - 26}" width="12" height="12" fill="{_COLORS[key]}"/>'
        yield _text(x + 17, _HEIGHT - 16, label)
        x += 34 + _CHAR * len(label)


def _open(width: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}"'
        f' font-family="system-ui, sans-serif" font-size="12" role="img"><title>{html.escape(title)}</title>'
        f'<rect width="{width}" height="{_HEIGHT}" fill="#fff"/>'
    )


def _text(x: float, y: float, text: str, *, fill: str = "#222", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}" font-weight="{weight}">{html.escape(text)}</text>'


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
