"""How a trace is shown: tables, JSON, and a timeline of one measured step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from jshard._text import duration, folded_names
from jshard.inspect.drawing import Bar
from jshard.inspect.profile.ops import Op
from jshard.inspect.profile.shares import MeasuredSpan, Seconds, Shares
from jshard.inspect.tables import FittedTable, add_row, made_table

if TYPE_CHECKING:
    from jshard.inspect.profile.result import Trace, TraceRow


_MOST_ROWS = 6  # of collectives in flight at one time; more are drawn over one another


def timeline(measured: MeasuredSpan) -> list[Bar]:
    """A measured step as bars to be drawn: what the device did itself, and the collectives in flight."""
    bars = [
        Bar("computation", begin_s, end_s, kind, "", f"{kind}: {duration(end_s - begin_s)}")
        for kind, spans in (("computing", measured.computing), ("exposed", measured.exposed))
        for begin_s, end_s in spans
    ]
    bars.sort(key=lambda bar: bar.begin_s)
    for number, flights in enumerate(_rows(measured.flights), start=1):
        lane = "communication" if number == 1 else f"communication {number}"
        bars += [_flight(lane, span, measured.collectives[place].op) for span, place in flights]
    return bars


def _flight(lane: str, span: Seconds, op: Op) -> Bar:
    unit = "+".join(folded_names(op.units))
    tip = f"{op.kind} {unit} {op.phase or ''} ({op.name}): {duration(span[1] - span[0])}"
    return Bar(lane, *span, op.kind, unit, " ".join(tip.split()))


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


# The tables, and JSON.

_SHOWN = 12
_CPU = (
    "CPU devices are threads that share this machine's cores: the profile shows that the ruler works, and says nothing"
    " about overlap on an accelerator."
)


def tables(trace: Trace) -> Group:
    """The report that is printed."""
    parts: list[Any] = [Text(_headline(trace)), Text(), _parts_table(trace.shares)]
    if len(trace.steps) > 1:
        parts += [Text(), _shares_table("Steps (mean of the devices)", "step", _by_step(trace))]
    if len(trace.devices) > 1:
        parts += [Text(), _shares_table("Devices (mean of the steps)", "device", _by_device(trace))]
    if trace.by_kind:
        parts += [Text(), _collectives_table(trace)]
    if trace.shares.communicating_s:
        parts += [Text(), _longest_table(trace)]
    return Group(*parts, Text(), *map(Text, _closing_lines(trace)))


def json_of(trace: Trace) -> str:
    """Everything as JSON text; times of rows are those of a step on a device, in the mean."""
    whole = {
        "source": list(trace.source),
        "program": trace.program,
        "platform": trace.platform,
        "devices": list(trace.devices),
        "has_units": trace.has_units,
        "mean": _shares_dict(trace.shares),
        "between_s": trace.between_s,
        "steps": [
            {"number": step.number, **_shares_dict(step.shares)}
            | {"devices": {d.device: _shares_dict(d.shares) for d in step.devices}}
            for step in trace.steps
        ],
        "by_kind": _kinds_json(trace.by_kind),
        "by_unit": _kinds_json(trace.by_unit),
        "by_instruction": _kinds_json(trace.by_instruction),
        "notes": list(trace.notes),
    }
    return json.dumps(whole, indent=1)


def _shares_dict(shares: Shares) -> dict[str, Any]:
    return {"step_s": shares.step_s, **dataclasses.asdict(shares), "hidden": shares.hidden}


def _kinds_json(rows: Iterable[TraceRow]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def _headline(trace: Trace) -> str:
    numbers = [step.number for step in trace.steps]
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps ({numbers[0]}..{numbers[-1]})"
    devices = f"{len(trace.devices)} {trace.platform.upper()} device{'s' * (len(trace.devices) != 1)}"
    shares = trace.shares
    hidden = "nothing is communicated" if shares.hidden is None else f"{shares.hidden:.1%} of the communication hidden"
    return f"Measured: {which} of {trace.program} on {devices}, {_ms(shares.step_s)} ms a step, {hidden}."


def _parts_table(shares: Shares) -> FittedTable:
    table = made_table("A step (measured, mean of steps and devices)", "", "ms>", "share>")
    rows = {
        "computing": shares.computing_s,
        "communicating, nothing computes: exposed": shares.communicating_s,
        "both: communication that is hidden": shares.both_s,
        "idle": shares.idle_s,
    }
    for name, part_s in rows.items():
        add_row(table, name, _ms(part_s), _share(part_s, shares))
    add_row(table, "step", _ms(shares.step_s), "", style="bold")
    return table


def _by_step(trace: Trace) -> list[tuple[str, Shares]]:
    return [(str(step.number), step.shares) for step in trace.steps]


def _by_device(trace: Trace) -> list[tuple[str, Shares]]:
    return list(trace.shares_by_device.items())


def _shares_table(title: str, first: str, rows: list[tuple[str, Shares]]) -> FittedTable:
    left = len(rows) - _SHOWN
    if left > 0:  # those that stand out are the interesting ones
        most = sorted(rows, key=lambda row: -row[1].communicating_s)[:_SHOWN]
        rows = [row for row in rows if row in most]
    caption = f"The {_SHOWN} with the most exposed communication; {left} more." if left > 0 else ""
    table = made_table(title, first, "ms>", "computing>", "exposed>", "both>", "idle>", caption=caption)
    for name, shares in rows:
        parts = (shares.computing_s, shares.communicating_s, shares.both_s, shares.idle_s)
        add_row(table, name, _ms(shares.step_s), *(_share(part_s, shares) for part_s in parts))
    return table


def _collectives_table(trace: Trace) -> FittedTable:
    caption = "Of a step on a device, in the mean. in flight: begin to end; those of one row may overlap."
    if not trace.has_units:
        caption += " By kind only: the program's text, which names the units, is not beside the profile."
    table = made_table("Collectives", "collective", "unit", "runs>", "in flight ms>", "exposed ms>", "of the step>")
    table.caption = caption
    rows = trace.by_unit if trace.has_units else trace.by_kind
    for row in rows[:_SHOWN]:
        _add_row(table, trace, row, row.kind)
    if len(rows) > _SHOWN:
        add_row(table, f"... and {len(rows) - _SHOWN} more", *[""] * 5)
    for row in trace.by_kind if trace.has_units else ():
        _add_row(table, trace, row, f"all {row.kind}", style="bold")
    return table


def _longest_table(trace: Trace) -> FittedTable:
    table = made_table(
        "Longest exposed", "instruction", "unit", "runs>", "in flight ms>", "exposed ms>", "of the step>"
    )
    for row in trace.by_instruction[:_SHOWN]:
        if row.exposed_s:
            _add_row(table, trace, row, row.name or row.kind)
    return table


def _add_row(table: FittedTable, trace: Trace, row: TraceRow, name: str, style: str | None = None) -> None:
    unit = f"{row.unit} {row.phase or ''}".rstrip() if row.unit else "" if style else "-"
    times = _ms(row.in_flight_s), _ms(row.exposed_s), _share(row.exposed_s, trace.shares)
    add_row(table, name, unit, f"{row.runs:g}" if row.runs < 1e4 else f"{row.runs:.0f}", *times, style=style)


def _closing_lines(trace: Trace) -> list[str]:
    lines = [*trace.notes]
    if trace.between_s is not None:
        lines.append(f"Between two steps: {_ms(trace.between_s)} ms, which is part of neither.")
    return lines + ([_CPU] if trace.platform == "cpu" else [])


def _share(part_s: float, shares: Shares) -> str:
    return f"{part_s / shares.step_s:.1%}" if shares.step_s else "-"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"
