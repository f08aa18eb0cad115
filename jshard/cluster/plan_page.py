"""The page and the trace of plans: their answers as cards, and the timelines of their steps.

A timeline has the parts of an estimated step, each with the bars of the two streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jshard._text import duration, human_bytes
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.replay import Replay, Segment, Span
from jshard.cluster.report import ANSWERS, NOT_MEASURED, ClusterPlan, EstimatedFigure
from jshard.inspect.hlo import Schedule, Window
from jshard.inspect.timeline_page import Card, Panel, Section, html_page
from jshard.inspect.timelines import EXPOSED, Bar, chrome_trace, exposed_bars, exposure_text, phase_bars

_BACKWARD_TIP = ", backward"
_UPDATE = "update"


@dataclasses.dataclass(frozen=True)
class StepPart:
    """A part of the step: what is between two loops, or one steady round of a loop."""

    segment: Segment
    bars: tuple[Bar, ...]  # seconds from its begin
    phases: tuple[str, ...]  # `forward`, `backward` and `update`, those that it has, in order

    @property
    def length_s(self) -> float:
        """Returns the time of one round."""
        return self.segment.end_s - self.segment.begin_s


def step_parts(schedule: Schedule, assumptions: Assumptions) -> list[StepPart]:
    """Replays a schedule, and returns the parts of the step."""
    replay = Replay(schedule, assumptions)
    details = []
    for window, in_flight_s, exposed_s in zip(schedule.windows, replay.communication_s, replay.exposed_s, strict=True):
        details.append(f"{_size(window)}; {exposure_text(window.executions, in_flight_s, exposed_s)}")
    return [_part(segment, replay.spans, schedule.windows, details) for segment in replay.segments]


def timeline(schedule: Schedule, assumptions: Assumptions) -> list[Bar]:
    """Returns the computing and the communicating stream of one step, as bars to draw.

    A loop is drawn as one steady round, labelled with the number of rounds. Lengths are to scale within and between
    parts, but the picture is shorter than the step.
    """
    bars: list[Bar] = []
    begin_s = 0.0  # of the part, in the picture
    for part in step_parts(schedule, assumptions):
        segment = part.segment
        end_s = begin_s + part.length_s
        if segment.rounds > 1:
            label = f"x {segment.rounds}"
            tip = f"{segment.loop}: {label} {duration(part.length_s)}"
            bars.append(Bar("loops", begin_s, end_s, "loop", label, tip))
        for bar in part.bars:
            bars.append(dataclasses.replace(bar, begin_s=bar.begin_s + begin_s, end_s=bar.end_s + begin_s))
        begin_s = end_s
    # Forward ends where the first collective of backward begins.
    backward_begins_s = [bar.begin_s for bar in bars if bar.tip.endswith(_BACKWARD_TIP)]
    turn_s = min(backward_begins_s, default=0.0)
    return [*phase_bars(turn_s, begin_s), *bars]


def step_panels(schedule: Schedule, assumptions: Assumptions, step_s: float) -> tuple[Panel, ...]:
    """Returns the parts of a step of a known time, for a page."""
    parts = step_parts(schedule, assumptions)
    if len(parts) == 1 and parts[0].segment.rounds == 1:
        note = f"0 to {duration(step_s)}: {_phases_text(parts[0])}"
        return (Panel("The whole step", note, parts[0].bars),)
    panels = []
    for part in parts:
        rounds = part.segment.rounds
        title = _title(part)
        label = _phases_text(part)
        if rounds > 1:
            label += f" x {rounds}"
        panels.append(Panel(title, _note(part, step_s), part.bars, rounds, label))
    return tuple(panels)


def _title(part: StepPart) -> str:
    phases = _phases_text(part)
    if part.segment.rounds > 1:
        return f"One of {part.segment.rounds} rounds of the {phases} loop"
    return phases.capitalize()


def _phases_text(part: StepPart) -> str:
    """Returns the phases of a part as text; one without collectives only computes."""
    if not part.phases:
        return "computation"
    *first, last = part.phases
    return f"{', '.join(first)} and {last}" if first else last


def _note(part: StepPart, step_s: float) -> str:
    """Returns which times of the step the axis of a part shows."""
    segment = part.segment
    total_s = segment.rounds * part.length_s
    share = f"{total_s / step_s:.0%}"
    if segment.rounds > 1:
        rounds = f"{segment.rounds} rounds take {duration(total_s)}"
        return f"0 to {duration(part.length_s)} of one round; {rounds} of the step's {duration(step_s)} ({share})"
    begin = f"{duration(total_s)} of the step's {duration(step_s)} ({share})"
    return f"{begin}, from {duration(segment.begin_s)} on"


# ---- bars


def _part(segment: Segment, spans: Iterable[Span], windows: Sequence[Window], details: Sequence[str]) -> StepPart:
    """Returns a part of the step; `details` are those of the windows."""
    bars: list[Bar] = []
    flights: list[Bar] = []
    waits: list[tuple[float, float]] = []
    phases: dict[str, None] = {}  # a set that keeps the order
    for span in spans:
        # Cut to the segment: a collective may be in flight at both of its ends.
        begin_s = max(span.begin_s, segment.begin_s) - segment.begin_s
        end_s = min(span.end_s, segment.end_s) - segment.begin_s
        if end_s <= begin_s:
            continue
        if span.kind == EXPOSED:
            waits.append((begin_s, end_s))
        elif span.window is None:
            bars.append(_computation_bar(span, begin_s, end_s))
            if span.kind == _UPDATE:
                phases[_UPDATE] = None
        else:
            window = windows[span.window]
            flights.append(_flight_bar(span, window, details[span.window], begin_s, end_s))
            phases |= dict.fromkeys(_phases(window))
    return StepPart(segment, (*bars, *flights, *exposed_bars(flights, waits)), tuple(phases))


def _phases(window: Window) -> tuple[str, ...]:
    if window.phase == "both":
        return "forward", "backward"
    return (window.phase,) if window.phase else ()


def _computation_bar(span: Span, begin_s: float, end_s: float) -> Bar:
    """Returns the bar of an operation; its tip has the whole time, also if the bar is a part of it."""
    tip = f"{span.name}: {duration(span.end_s - span.begin_s)}"
    return Bar("computation", begin_s, end_s, span.kind, "", tip, span.kind)


def _flight_bar(span: Span, window: Window, detail: str, begin_s: float, end_s: float) -> Bar:
    """Returns the bar of a collective, with the whole time in its tip, too."""
    unit = window.unit or ""
    named = f"{window.kind} {unit}".rstrip()
    tip = f"{named} ({window.name}): {duration(span.end_s - span.begin_s)}"
    if window.phase == "backward":
        tip += _BACKWARD_TIP
    return Bar("communication", begin_s, end_s, window.kind, unit, tip, detail)


def _size(window: Window) -> str:
    return f"{human_bytes(window.full_bytes, 1)} over {len(window.group)} devices"


# ---- the page


def plan_page(plan: ClusterPlan, report: str, others: Sequence[ClusterPlan] = ()) -> str:
    """Returns a self-contained page: a report and the timeline of the step, with those of others below."""
    subtitle = f"{NOT_MEASURED}. {plan.axes}. {plan.estimates.stated.assumptions}"
    sections = []
    for name, shown in _by_name(plan, others).items():
        stated = shown.estimates.stated
        panels = step_panels(shown.audit.schedule, stated.assumptions, stated.step_s)
        sections.append(Section(_cards(shown), panels, title=name))
    return html_page(f"{plan.name} on {plan.topology.text}", subtitle, sections, report)


def plan_trace(plan: ClusterPlan, others: Sequence[ClusterPlan] = ()) -> str:
    """Returns the same timelines, as JSON for https://ui.perfetto.dev."""
    bars: list[Bar] = []
    for name, shown in _by_name(plan, others).items():
        for bar in timeline(shown.audit.schedule, shown.estimates.stated.assumptions):
            # Each plan has lanes of its own.
            lane = f"{name}: {bar.lane}" if name else bar.lane
            bars.append(dataclasses.replace(bar, lane=lane))
    return chrome_trace(bars)


def _by_name(plan: ClusterPlan, others: Sequence[ClusterPlan]) -> Mapping[str, ClusterPlan]:
    """Returns the plans by the names that distinguish them; one plan needs none."""
    if not others:
        return {"": plan}
    plans = {"as asked": plan}
    for other in others:
        plans[other.name] = other
    return plans


def _cards(plan: ClusterPlan) -> tuple[Card, ...]:
    """Returns the answers: whether it fits, and how long it takes."""
    figures = [_estimate_card(plan, figure) for figure in ANSWERS]
    return (_memory_card(plan), *figures)


def _memory_card(plan: ClusterPlan) -> Card:
    peak = human_bytes(plan.step.memory.peak_bytes, 1)
    capacity = human_bytes(plan.topology.device.hbm_bytes, 1)
    if plan.fits:
        return Card("memory, compiled", peak, f"fits: a device has {capacity}", mood="good")
    return Card("memory, compiled", peak, f"does not fit: a device has {capacity}", mood="bad")


def _estimate_card(plan: ClusterPlan, figure: EstimatedFigure) -> Card:
    """Returns a figure with its range, which is all there is without a source for its middle."""
    lowest, highest = figure.bounds(plan)
    between = f"{lowest} to {highest}"
    if plan.cluster.has_bounds_only:
        return Card(figure.name, between, "estimated bounds")
    return Card(figure.name, figure.stated(plan), f"estimated, {between}")
