"""The results of reading a profile: values, tables, JSON, and the timeline of one measured step."""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard._text import duration, folded_names, name_pattern
from jshard.inspect.profile.events import Event, Op, Ops
from jshard.inspect.tables import Bar, FittedTable, Printed, add_row, chrome_trace, html_page, made_table, phase_bars

Seconds = tuple[float, float]  # begin and end

_PER_S = 10**12


@dataclasses.dataclass(frozen=True)
class Shares:
    """The four parts of a step; they add up to it."""

    computing_s: float  # something computes, and nothing communicates
    communicating_s: float  # something communicates, and nothing computes: communication that is exposed
    both_s: float  # communication that is hidden behind computation
    idle_s: float  # neither

    @property
    def step_s(self) -> float:
        """The whole."""
        return self.computing_s + self.communicating_s + self.both_s + self.idle_s

    @property
    def hidden(self) -> float | None:
        """The share of the communication that is hidden; None without communication."""
        total_s = self.communicating_s + self.both_s
        return self.both_s / total_s if total_s else None

    @classmethod
    def mean(cls, shares: Iterable["Shares"]) -> "Shares":
        """The mean of each part."""
        rows = [dataclasses.astuple(one) for one in shares]
        return cls(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """The time of one collective of the program, on one device in one step."""

    op: Op  # the operation
    runs: int  # how often it ran
    in_flight_s: float  # from its begin to its end
    # The part in which nothing computed; where several are exposed at one time, each has an equal part.
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """One step on one device."""

    device: str  # such as `gpu:3`, or `process 1 gpu:3`
    shares: Shares  # how it spent the step
    collectives: tuple[MeasuredCollective, ...]  # those that it took part in, in the order in which they begin
    since_last_s: float | None  # from the end of the step before; None if that is not in the profile
    # Spans in seconds from the start of the step: when something computed, when something communicated and nothing
    # computed, and when collectives were in flight, with their places in `collectives`.
    computing: tuple[Seconds, ...] = ()
    exposed: tuple[Seconds, ...] = ()
    flights: tuple[tuple[Seconds, int], ...] = ()


def measure(
    device: str, events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int, *, since_last_s: float | None = None
) -> DeviceStep:
    """Measures a span of time of one device; the events are sorted by begin, and may include others."""
    totals: collections.Counter[tuple[bool, bool]] = collections.Counter()  # by whether it computes, communicates
    computing, exposed, flights = _Spans(), _Spans(), collections.defaultdict[Op, _Spans](_Spans)
    alone: dict[Op, float] = collections.defaultdict(float)  # picoseconds in which nothing computed
    for begin, end, owners in _moments(events, ops, begin_ps, end_ps):
        is_busy, flying = None in owners, [op for op in owners if op is not None]
        totals[is_busy, bool(flying)] += end - begin
        if is_busy:
            computing.add(begin, end)
        elif flying:
            exposed.add(begin, end)
        for op in flying:
            flights[op].add(begin, end)
            alone[op] += 0 if is_busy else (end - begin) / len(flying)  # several at one time take equal parts
    idle_ps = end_ps - begin_ps - totals.total()
    parts = totals[True, False], totals[False, True], totals[True, True], idle_ps
    times = (
        MeasuredCollective(op, len(spans.found), sum(b - a for a, b in spans.found) / _PER_S, alone[op] / _PER_S)
        for op, spans in flights.items()
    )
    from_begin = lambda span: ((span[0] - begin_ps) / _PER_S, (span[1] - begin_ps) / _PER_S)
    owned = sorted((span, place) for place, spans in enumerate(flights.values()) for span in spans.found)
    return DeviceStep(
        device,
        Shares(*(part / _PER_S for part in parts)),
        tuple(times),
        since_last_s,
        tuple(map(from_begin, computing.found)),
        tuple(map(from_begin, exposed.found)),
        tuple((from_begin(span), place) for span, place in owned),
    )


class _Spans:
    """Merges sorted spans of time: a span that touches the last one becomes part of it."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def add(self, begin: int, end: int) -> None:
        if self.found and self.found[-1][1] == begin:
            begin = self.found.pop()[0]
        self.found.append((begin, end))


def _moments(
    events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int
) -> Iterator[tuple[int, int, tuple[Op | None, ...]]]:
    """The time between two changes, and the operations in it: collectives, and None for computation."""
    edges: list[tuple[int, int, Op | None]] = []  # time, 1 where something begins and -1 where it ends
    for event in events:
        begin, end = max(event.begin_ps, begin_ps), min(event.end_ps, end_ps)
        if begin < end:
            op = ops.of(event)
            if op.kind or not op.contains:
                edges += [(begin, 1, op if op.kind else None), (end, -1, op if op.kind else None)]
    going: collections.Counter[Op | None] = collections.Counter()
    since = begin_ps
    for time, change, op in sorted(edges, key=lambda edge: edge[0]):
        if time > since and going:
            yield since, time, tuple(going)
        since = time
        going[op] += change
        if not going[op]:
            del going[op]


# The report.

_PICTURE = "The timeline is the middle step of the profile, on the device with the most exposed communication."
_SHOWN = 12
_CPU = (
    "CPU devices are threads that share this machine's cores: the profile says nothing about overlap on an accelerator."
)


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """One step on all devices."""

    number: int  # as the program marked it, or counted from 1
    devices: tuple[DeviceStep, ...]  # all of them

    @property
    def shares(self) -> Shares:
        """The mean over the devices."""
        return Shares.mean(d.shares for d in self.devices)


@dataclasses.dataclass(frozen=True)
class TraceRow:
    """Equal collectives; times are means over the steps and devices."""

    kind: str  # such as `all-gather`
    unit: str | None  # the unit, or several folded as `blocks/0..11`; None if it is not known
    phase: str | None  # `forward`, `backward` or `both`; None if it is not known
    name: str | None  # of the instruction, if the row is of one
    runs: float  # how often they ran
    in_flight_s: float  # from begin to end, each by itself
    exposed_s: float  # of that, while nothing computed


@dataclasses.dataclass(frozen=True, repr=False)
class Trace(Printed):
    """The result of `js.trace`. `print` it; a notebook displays it; `to_json` is for programs."""

    source: tuple[str, ...]  # the files that were read
    program: str  # name of the step's program
    platform: str  # `cpu`, `gpu` or `tpu`
    steps: tuple[TraceStep, ...]  # those that are whole in the profile, in order
    has_units: bool  # the program's text was there, and names the unit of each collective
    notes: tuple[str, ...] = ()  # further remarks

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices."""
        return tuple(d.device for d in self.steps[0].devices)

    @property
    def shares(self) -> Shares:
        """The four parts of a step, as means over steps and devices."""
        return Shares.mean(d.shares for d in self._device_steps)

    @property
    def shares_by_device(self) -> dict[str, Shares]:
        """The mean over the steps, for each device."""
        found = {device: [d.shares for d in self._device_steps if d.device == device] for device in self.devices}
        return {device: Shares.mean(shares) for device, shares in found.items()}

    @property
    def between_s(self) -> float | None:
        """Mean time between two steps on a device; it is part of neither. None if no step follows another."""
        gaps = [d.since_last_s for d in self._device_steps if d.since_last_s is not None]
        return sum(gaps) / len(gaps) if gaps else None

    @property
    def by_kind(self) -> tuple[TraceRow, ...]:
        """The collectives by kind, the most exposed first."""
        return self._rows(lambda time: (time.op.kind,), folds=False)

    @property
    def by_unit(self) -> tuple[TraceRow, ...]:
        """The collectives by kind, phase and unit, equal units of a list together; the most exposed first."""
        patterns = lambda time: frozenset(name_pattern(unit)[0] for unit in time.op.units)
        return self._rows(lambda time: (time.op.kind, time.op.phase, patterns(time)))

    @property
    def by_instruction(self) -> tuple[TraceRow, ...]:
        """Each collective of the program separately, the most exposed first."""
        return self._rows(lambda time: (time.op,), named=True)

    def to_json(self) -> str:
        """Everything as JSON text; times of rows are means over steps and devices."""
        rows = ("by_kind", "by_unit", "by_instruction")
        whole = {
            "source": list(self.source),
            "program": self.program,
            "platform": self.platform,
            "devices": list(self.devices),
            "has_units": self.has_units,
            "mean": _shares_dict(self.shares),
            "between_s": self.between_s,
            "steps": [
                {"number": step.number, **_shares_dict(step.shares)}
                | {"devices": {d.device: _shares_dict(d.shares) for d in step.devices}}
                for step in self.steps
            ],
            **{name: [dataclasses.asdict(row) for row in getattr(self, name)] for name in rows},
            "notes": list(self.notes),
        }
        return json.dumps(whole, indent=1)

    def to_html(self) -> str:
        """The report, and a timeline of one step, as a self-contained page.

        The step is the middle one, on the device with the most exposed communication.
        """
        step, device = self._drawn
        title = f"Step {step.number} of {self.program} on {device.device}, measured"
        return html_page(title, _PICTURE, _timeline(device), str(self))

    def to_chrome_trace(self) -> str:
        """The timeline of the same step, as JSON for https://ui.perfetto.dev."""
        return chrome_trace(_timeline(self._drawn[1]))

    @property
    def _drawn(self) -> tuple[TraceStep, DeviceStep]:
        step = self.steps[len(self.steps) // 2]
        return step, max(step.devices, key=lambda d: d.shares.communicating_s)

    def __rich__(self) -> Group:
        by_step = [(str(step.number), step.shares) for step in self.steps]
        parts: list[Any] = [Text(_headline(self)), Text(), _parts_table(self.shares)]
        if len(self.steps) > 1:
            parts += [Text(), _shares_table("Steps (mean of the devices)", "step", by_step)]
        if len(self.devices) > 1:
            by_device = list(self.shares_by_device.items())
            parts += [Text(), _shares_table("Devices (mean of the steps)", "device", by_device)]
        if self.by_kind:
            parts += [Text(), _collectives_table(self)]
        return Group(*parts, Text(), *map(Text, _closing_lines(self)))

    @property
    def _device_steps(self) -> list[DeviceStep]:
        return [d for step in self.steps for d in step.devices]

    def _rows(
        self, key: Callable[[MeasuredCollective], Any], *, named: bool = False, folds: bool = True
    ) -> tuple[TraceRow, ...]:
        alike: dict[Any, list[MeasuredCollective]] = {}
        for time in (time for d in self._device_steps for time in d.collectives):
            alike.setdefault(key(time), []).append(time)
        count = len(self._device_steps)
        rows = (
            TraceRow(
                kind=times[0].op.kind,
                unit=", ".join(folded_names(sorted({u for t in times for u in t.op.units}))) or None if folds else None,
                phase=times[0].op.phase if folds else None,
                name=times[0].op.name if named else None,
                runs=sum(t.runs for t in times) / count,
                in_flight_s=sum(t.in_flight_s for t in times) / count,
                exposed_s=sum(t.exposed_s for t in times) / count,
            )
            for times in alike.values()
        )
        return tuple(sorted(rows, key=lambda row: (-row.exposed_s, -row.in_flight_s)))


def _timeline(measured: DeviceStep) -> list[Bar]:
    """A measured step as bars to be drawn: the device's own work, and the collectives in flight."""
    bars = [
        Bar("computation", begin_s, end_s, kind, "", f"{kind}: {duration(end_s - begin_s)}")
        for kind, spans in (("computing", measured.computing), ("exposed", measured.exposed))
        for begin_s, end_s in spans
    ]
    bars.sort(key=lambda bar: bar.begin_s)
    free_s: list[float] = []  # when each lane is free again: bars of one do not overlap
    for (begin_s, end_s), place in measured.flights:
        lane = next((i for i, free in enumerate(free_s) if free <= begin_s), len(free_s))
        free_s[lane : lane + 1] = [end_s]
        op = measured.collectives[place].op
        unit = "+".join(folded_names(op.units))
        tip = f"{op.kind} {unit} {op.phase or ''} ({op.name}): {duration(end_s - begin_s)}"
        lane_name = f"communication {lane + 1}" if lane else "communication"
        kind = f"{op.kind} {op.phase or ''}".strip()
        bars.append(Bar(lane_name, begin_s, end_s, kind, unit, " ".join(tip.split())))
    backward = (s[0] for s, place in measured.flights if measured.collectives[place].op.phase == "backward")
    return [*phase_bars(min(backward, default=0.0), max((bar.end_s for bar in bars), default=0.0)), *bars]


def _shares_dict(shares: Shares) -> dict[str, Any]:
    return {"step_s": shares.step_s, **dataclasses.asdict(shares), "hidden": shares.hidden}


def _headline(trace: Trace) -> str:
    numbers = [step.number for step in trace.steps]
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps ({numbers[0]}..{numbers[-1]})"
    devices = f"{len(trace.devices)} {trace.platform.upper()} device{'s' * (len(trace.devices) != 1)}"
    shares = trace.shares
    hidden = "no communication" if shares.hidden is None else f"{shares.hidden:.1%} of the communication hidden"
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
    caption = "Means over steps and devices. in flight: begin to end; collectives of one row may overlap."
    if not trace.has_units:
        caption += " By kind only: the profile lacks the program's text, which names the units."
    columns = "collective", "unit", "runs>", "in flight ms>", "exposed ms>", "of the step>"
    table = made_table("Collectives", *columns, caption=caption)
    rows = trace.by_unit if trace.has_units else trace.by_kind
    for row in rows[:_SHOWN]:
        _add_row(table, trace, row, row.kind)
    if len(rows) > _SHOWN:
        add_row(table, f"... and {len(rows) - _SHOWN} more", *[""] * 5)
    for row in trace.by_kind if trace.has_units else ():
        _add_row(table, trace, row, f"all {row.kind}", style="bold")
    return table


def _add_row(table: FittedTable, trace: Trace, row: TraceRow, name: str, style: str | None = None) -> None:
    unit = f"{row.unit} {row.phase or ''}".rstrip() if row.unit else "" if style else "-"
    times = _ms(row.in_flight_s), _ms(row.exposed_s), _share(row.exposed_s, trace.shares)
    add_row(table, name, unit, f"{row.runs:g}" if row.runs < 1e4 else f"{row.runs:.0f}", *times, style=style)


def _closing_lines(trace: Trace) -> list[str]:
    lines = [*trace.notes]
    if trace.between_s is not None:
        lines.append(f"Between two steps: {_ms(trace.between_s)} ms, part of neither.")
    return lines + ([_CPU] if trace.platform == "cpu" else [])


def _share(part_s: float, shares: Shares) -> str:
    return f"{part_s / shares.step_s:.1%}" if shares.step_s else "-"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"
