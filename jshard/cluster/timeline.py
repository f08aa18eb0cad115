"""A picture of one estimated step: what computes, what communicates beside it, and where the computation waits."""

from collections.abc import Iterator, Sequence

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.replay import Replay, Segment, Span
from jshard.inspect.drawing import (
    CHAR,
    COLORS,
    LANE,
    LEAST,
    OTHER_KIND,
    Box,
    duration,
    legend,
    merged,
    opened,
    rectangle,
    written,
)
from jshard.inspect.schedule import Schedule
from jshard.inspect.steps import Window

_MARGIN, _GAP = 110, 14  # left of the lanes; between segments
_COMPUTE, _LINKS, _HEIGHT = 72, 120, 228  # tops of the lanes; height of the picture
_LEGEND = {
    COLORS["matmul"]: "matrix products",
    COLORS["other"]: "other computation",
    COLORS["exposed"]: "waits for communication",
    **{COLORS[kind]: kind for kind in ("all-gather", "reduce-scatter", "all-reduce")},
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
    total = f"step {duration(replay.clock_s)}, exposed {duration(sum(replay.exposed_s))} (estimate)"
    head = [written(12, 22, f"{heading}: {total}", weight="bold"), written(12, 40, str(assumptions))]
    lanes = [written(12, _COMPUTE + 21, "computation"), written(12, _LINKS + 21, "communication")]
    return "\n".join(
        [opened(width, _HEIGHT, heading), *head, *lanes, *parts, *legend(_LEGEND, _MARGIN, _HEIGHT - 26), "</svg>"]
    )


def _segment(
    segment: Segment, spans: Sequence[Span], windows: Sequence[Window], left: float, scale: float
) -> Iterator[str]:
    boxes: dict[bool, list[Box]] = {True: [], False: []}
    for span in spans:
        begin_s, end_s = max(span.begin_s, segment.begin_s), min(span.end_s, segment.end_s)
        if end_s > begin_s:
            box = _box(span, windows, begin_s - segment.begin_s, end_s - segment.begin_s)
            boxes[span.lane == "communication"].append(box)
    for communicates, top in ((False, _COMPUTE), (True, _LINKS)):
        for box in merged(boxes[communicates], LEAST / scale):
            yield rectangle(box, left, top, scale)
    length = (segment.end_s - segment.begin_s) * scale
    took = duration(segment.end_s - segment.begin_s)
    if length > CHAR * len(took):
        yield written(left, _LINKS + LANE + 18, took)
    if segment.rounds > 1:
        yield written(left, _COMPUTE - 6, f"x {segment.rounds}", weight="bold")
    yield f'<path d="M{left:.1f} {_LINKS + LANE + 4} h{length:.1f}" stroke="#444" fill="none"/>'


def _box(span: Span, windows: Sequence[Window], begin_s: float, end_s: float) -> Box:
    took = duration(span.end_s - span.begin_s)
    if span.window is None:
        return Box(begin_s, end_s, COLORS[span.lane], "", f"{span.name}: {took}")
    window = windows[span.window]
    unit = window.unit or ""
    color = COLORS["exposed"] if span.lane == "exposed" else COLORS.get(window.kind, OTHER_KIND)
    verb = "waits for " if span.lane == "exposed" else ""
    tip = f"{verb}{window.kind} {unit} ({window.full_bytes / 2**20:.1f} MiB over {len(window.group)}): {took}"
    return Box(begin_s, end_s, color, "" if span.lane == "exposed" else unit, tip)
