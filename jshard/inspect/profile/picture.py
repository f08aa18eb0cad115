"""A picture of one measured step of one device: what computed, what was exposed, and every collective in flight."""

from collections.abc import Iterable, Iterator, Sequence

from jshard.inspect.drawing import (
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
from jshard.inspect.profile.shares import CollectiveTime, Measured, Seconds
from jshard.inspect.tables import folded_names

_MARGIN, _TOP, _GAP, _FOOT = 110, 62, 8, 46  # left of the lanes; above, between and below them
_MOST_ROWS = 6  # of collectives in flight at one time; more are drawn over one another
_LEGEND = {
    COLORS["matmul"]: "computing",
    COLORS["exposed"]: "exposed: communicating, nothing computes",
    **{COLORS[kind]: kind for kind in ("all-gather", "reduce-scatter", "all-reduce")},
    OTHER_KIND: "other collectives",
}


def step_svg(measured: Measured, *, title: str, width: int = 1200) -> str:
    """Draws a measured step as a self-contained SVG, true to scale.

    Args:
        measured: the step of one device.
        title: first line.
        width: in pixels.
    """
    shares = measured.shares
    scale = (width - _MARGIN - 20) / (shares.step_s or 1.0)
    rows = _rows(measured.flights)
    height = _TOP + (1 + max(1, len(rows))) * (LANE + _GAP) + _FOOT
    total = (
        f"step {duration(shares.step_s)}, exposed {duration(shares.communicating_s)}, idle {duration(shares.idle_s)}"
    )
    parts = [opened(width, height, title), written(12, 22, f"{title}: {total}", weight="bold")]
    lanes = [_own_lane(measured), *(_boxes(row, measured.collectives) for row in rows)]
    for place, boxes in enumerate(lanes):
        top = _TOP + place * (LANE + _GAP)
        if place < 2:
            parts.append(written(12, top + 21, ("computation", "communication")[place]))
        parts += (rectangle(box, _MARGIN, top, scale) for box in merged(boxes, LEAST / scale))
    parts += legend(_LEGEND, _MARGIN, height - 26)
    return "\n".join([*parts, "</svg>"])


def _own_lane(measured: Measured) -> list[Box]:
    """What the device itself did: computing, or waiting for a collective."""
    kinds = (("computing", COLORS["matmul"], measured.computing), ("exposed", COLORS["exposed"], measured.exposed))
    boxes = [
        Box(begin_s, end_s, color, "", f"{name}: {duration(end_s - begin_s)}")
        for name, color, spans in kinds
        for begin_s, end_s in spans
    ]
    return sorted(boxes, key=lambda box: box.begin_s)


def _rows(flights: Iterable[tuple[Seconds, int]]) -> list[list[tuple[Seconds, int]]]:
    """Flights in rows, so that those of a row do not overlap."""
    rows: list[list[tuple[Seconds, int]]] = []
    for flight in flights:
        free = next((row for row in rows if row[-1][0][1] <= flight[0][0]), None)
        if free is not None:
            free.append(flight)
        elif len(rows) < _MOST_ROWS:
            rows.append([flight])
        else:
            min(rows, key=lambda row: row[-1][0][1]).append(flight)
    return rows


def _boxes(row: Sequence[tuple[Seconds, int]], collectives: Sequence[CollectiveTime]) -> Iterator[Box]:
    for (begin_s, end_s), place in row:
        op = collectives[place].op
        unit = "+".join(folded_names(op.units))
        tip = f"{op.kind} {unit} {op.phase or ''} ({op.name}): {duration(end_s - begin_s)}"
        yield Box(begin_s, end_s, COLORS.get(op.kind, OTHER_KIND), unit, " ".join(tip.split()))
