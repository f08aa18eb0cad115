"""The result of reading a profile: tables, JSON, and the timeline of one measured step."""

import dataclasses
import json
from collections.abc import Callable, Hashable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from jshard._text import counted, duration, folded_names, name_pattern
from jshard.inspect.profile.measured import DeviceStep, MeasuredCollective, Shares, mean_shares
from jshard.inspect.tables import FittedTable, Printed, add_row, dicts_of, made_table
from jshard.inspect.timeline_page import Card, Panel, Section, html_page
from jshard.inspect.timelines import Bar, chrome_trace, exposed_bars, exposure_text, last_end_s, phase_bars

_PICTURE = "The timeline is the middle step of the profile, on the device with the most exposed communication."
_SHOWN = 12  # rows of a table
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
        return mean_shares(self.devices)


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
    """The result of `js.read_profile`. `print` it; a notebook displays it; `to_json` is for programs."""

    source: tuple[str, ...]  # the files that were read
    program: str  # name of the step's program
    platform: str  # `cpu`, `gpu` or `tpu`
    steps: tuple[TraceStep, ...]  # those that are whole in the profile, in order
    has_units: bool  # the program's text was there, and names the unit of each collective
    notes: tuple[str, ...] = ()  # further remarks

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices."""
        return tuple(measured.device for measured in self.steps[0].devices)

    @property
    def shares(self) -> Shares:
        """The four parts of a step, as means over steps and devices."""
        return mean_shares(self._device_steps)

    @property
    def shares_by_device(self) -> dict[str, Shares]:
        """The mean over the steps, for each device."""
        means = {}
        for device in self.devices:
            means[device] = mean_shares(step for step in self._device_steps if step.device == device)
        return means

    @property
    def between_s(self) -> float | None:
        """Mean time between two steps on a device; it is part of neither. None if no step follows another."""
        gaps_s = [step.since_last_s for step in self._device_steps if step.since_last_s is not None]
        if not gaps_s:
            return None
        return sum(gaps_s) / len(gaps_s)

    @property
    def by_kind(self) -> tuple[TraceRow, ...]:
        """The collectives by kind, the most exposed first."""
        return self._rows(_kind)

    @property
    def by_unit(self) -> tuple[TraceRow, ...]:
        """The collectives by kind, phase and unit, equal units of a list together; the most exposed first."""
        return self._rows(_kind_phase_and_units, has_unit=True)

    @property
    def by_instruction(self) -> tuple[TraceRow, ...]:
        """Each collective of the program separately, the most exposed first."""
        return self._rows(_operation, has_unit=True, has_name=True)

    def to_json(self) -> str:
        """Returns everything as JSON text; times of rows are means over steps and devices."""
        values = {
            "source": list(self.source),
            "program": self.program,
            "platform": self.platform,
            "devices": list(self.devices),
            "has_units": self.has_units,
            "mean": _shares_dict(self.shares),
            "between_s": self.between_s,
            "steps": [_step_dict(step) for step in self.steps],
            "by_kind": dicts_of(self.by_kind),
            "by_unit": dicts_of(self.by_unit),
            "by_instruction": dicts_of(self.by_instruction),
            "notes": list(self.notes),
        }
        return json.dumps(values, indent=1)

    def to_html(self) -> str:
        """Returns the report, and a timeline of one step, as a self-contained page.

        The step is the middle one, on the device with the most exposed communication.
        """
        measured = self._drawn_device
        step_s = measured.shares.step_s
        panel = Panel(
            title=f"The whole step {self._drawn_step.number} on {measured.device}",
            note=f"0 to {duration(step_s)}: all of it, with each round of its loops",
            bars=tuple(_timeline(measured)),
        )
        title = f"Step {self._drawn_step.number} of {self.program} on {measured.device}, measured"
        section = Section(_cards(self), (panel,))
        return html_page(title, f"{_headline(self)} {_PICTURE}", [section], str(self))

    def to_chrome_trace(self) -> str:
        """Returns the timeline of the same step, as JSON for https://ui.perfetto.dev."""
        return chrome_trace(_timeline(self._drawn_device))

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [Text(_headline(self)), Text(), _parts_table(self.shares)]
        if len(self.steps) > 1:
            by_step = {str(step.number): step.shares for step in self.steps}
            parts += [Text(), _shares_table("Steps (mean of the devices)", "step", by_step)]
        if len(self.devices) > 1:
            parts += [Text(), _shares_table("Devices (mean of the steps)", "device", self.shares_by_device)]
        if self.by_kind:
            parts += [Text(), _collectives_table(self)]
        return Group(*parts, Text(), *map(Text, _closing_lines(self)))

    @property
    def _device_steps(self) -> list[DeviceStep]:
        measured: list[DeviceStep] = []
        for step in self.steps:
            measured += step.devices
        return measured

    @property
    def _drawn_step(self) -> TraceStep:
        return self.steps[len(self.steps) // 2]  # the first and the last are the least typical

    @property
    def _drawn_device(self) -> DeviceStep:
        return max(self._drawn_step.devices, key=lambda measured: measured.shares.communicating_s)

    def _grouped(self, key: Callable[[MeasuredCollective], Hashable]) -> list[list[MeasuredCollective]]:
        """Returns the collectives of all steps and devices, those with equal keys together."""
        groups: dict[Hashable, list[MeasuredCollective]] = {}
        for measured in self._device_steps:
            for time in measured.collectives:
                groups.setdefault(key(time), []).append(time)
        return list(groups.values())

    def _rows(
        self, key: Callable[[MeasuredCollective], Hashable], *, has_unit: bool = False, has_name: bool = False
    ) -> tuple[TraceRow, ...]:
        """Returns a row for the collectives with equal keys, the most exposed first.

        Args:
            key: what those of one row have in common.
            has_unit: whether those of one row are of equal units, in one phase.
            has_name: whether those of one row are one instruction.
        """
        rows = [self._row(times, has_unit, has_name) for times in self._grouped(key)]
        return tuple(sorted(rows, key=lambda row: (-row.exposed_s, -row.in_flight_s)))

    def _row(self, times: Sequence[MeasuredCollective], has_unit: bool, has_name: bool) -> TraceRow:
        """Returns the row of some collectives, with means over all steps and devices, also those without them."""
        units: set[str] = set()
        runs = 0
        in_flight_s = 0.0
        exposed_s = 0.0
        for time in times:
            units.update(time.op.units)
            runs += time.runs
            in_flight_s += time.in_flight_s
            exposed_s += time.exposed_s
        num_device_steps = len(self._device_steps)
        row = TraceRow(
            kind=times[0].op.kind,
            unit=None,
            phase=None,
            name=None,
            runs=runs / num_device_steps,
            in_flight_s=in_flight_s / num_device_steps,
            exposed_s=exposed_s / num_device_steps,
        )
        if has_unit:
            unit = ", ".join(folded_names(sorted(units))) or None
            row = dataclasses.replace(row, unit=unit, phase=times[0].op.phase)
        if has_name:
            row = dataclasses.replace(row, name=times[0].op.name)
        return row


# ---- rows


def _kind(time: MeasuredCollective) -> Hashable:
    return time.op.kind


def _kind_phase_and_units(time: MeasuredCollective) -> Hashable:
    patterns = {name_pattern(unit)[0] for unit in time.op.units}  # `blocks/*`: equal units of a list are one row
    return time.op.kind, time.op.phase, frozenset(patterns)


def _operation(time: MeasuredCollective) -> Hashable:
    return time.op


# ---- JSON


def _step_dict(step: TraceStep) -> dict[str, object]:
    devices = {measured.device: _shares_dict(measured.shares) for measured in step.devices}
    return {"number": step.number, **_shares_dict(step.shares), "devices": devices}


def _shares_dict(shares: Shares) -> dict[str, object]:
    return {"step_s": shares.step_s, **dataclasses.asdict(shares), "hidden": shares.hidden}


# ---- the timeline


def _timeline(measured: DeviceStep) -> list[Bar]:
    """Returns a measured step as bars to be drawn: the device's own work, and the collectives in flight."""
    flights = _flight_bars(measured)
    bars = [*_computation_bars(measured), *flights, *exposed_bars(flights, measured.exposed)]
    return [*phase_bars(_backward_begin_s(measured), last_end_s(bars)), *bars]


def _computation_bars(measured: DeviceStep) -> list[Bar]:
    bars = []
    for (begin_s, end_s), work in measured.computing:
        kind = work or "computation"
        bars.append(Bar("computation", begin_s, end_s, kind, "", f"{kind}: {duration(end_s - begin_s)}"))
    return bars


def _flight_bars(measured: DeviceStep) -> list[Bar]:
    """Returns the bars of collectives, in as many lanes as are in flight at one time."""
    bars = []
    lane_ends_s: list[float] = []
    for (begin_s, end_s), collective in measured.flights:
        lane = _free_lane(lane_ends_s, begin_s)
        lane_ends_s[lane : lane + 1] = [end_s]  # a new lane if all are in use
        lane_name = "communication"
        if lane > 0:
            lane_name += f" {lane + 1}"
        times = measured.collectives[collective]
        op = times.op
        unit = "+".join(folded_names(op.units))
        phase = op.phase or ""
        tip = f"{op.kind} {unit} {phase} ({op.name}): {duration(end_s - begin_s)}"
        tip = " ".join(tip.split())  # without the gaps of what is unknown
        detail = exposure_text(times.runs, times.in_flight_s, times.exposed_s)
        bars.append(Bar(lane_name, begin_s, end_s, op.kind, unit, tip, detail))
    return bars


def _free_lane(lane_ends_s: Sequence[float], begin_s: float) -> int:
    """Returns the first lane that is free at a time; the number of lanes if none is."""
    for lane, end_s in enumerate(lane_ends_s):
        if end_s <= begin_s:
            return lane
    return len(lane_ends_s)


def _backward_begin_s(measured: DeviceStep) -> float:
    """Returns when the first collective of backward begins; 0 if there is none."""
    for span, collective in measured.flights:  # by their begin
        if measured.collectives[collective].op.phase == "backward":
            return span.begin_s
    return 0.0


# ---- cards


def _cards(trace: Trace) -> tuple[Card, ...]:
    """Returns the measured parts of a step: means over steps and devices, as in the tables."""
    shares = trace.shares
    steps = counted(len(trace.steps), "step")
    hidden = "none" if shares.hidden is None else f"{shares.hidden:.1%}"
    return (
        Card("step", duration(shares.step_s), f"measured, mean of {steps}"),
        _share_card("computing", shares.computing_s + shares.both_s, shares),
        Card("communication hidden", hidden, f"{duration(shares.both_s)} beside computation"),
        _share_card("communication exposed", shares.communicating_s, shares),
        _share_card("idle", shares.idle_s, shares),
    )


def _share_card(name: str, part_s: float, shares: Shares) -> Card:
    return Card(name, duration(part_s), f"{_share(part_s, shares)} of the step")


# ---- the report


def _headline(trace: Trace) -> str:
    first = trace.steps[0].number
    steps = f"step {first}"
    if len(trace.steps) > 1:
        steps = f"{len(trace.steps)} steps ({first}..{trace.steps[-1].number})"
    devices = counted(len(trace.devices), f"{trace.platform.upper()} device")
    hidden = "no communication"
    if trace.shares.hidden is not None:
        hidden = f"{trace.shares.hidden:.1%} of the communication hidden"
    return f"Measured: {steps} of {trace.program} on {devices}, {_ms(trace.shares.step_s)} ms a step, {hidden}."


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


def _shares_table(title: str, first_column: str, shares_of: Mapping[str, Shares]) -> FittedTable:
    """Returns a table of shares by name; of many rows those that stand out, which are the interesting ones."""
    names = list(shares_of)
    caption = ""
    if len(names) > _SHOWN:
        by_exposure = sorted(names, key=lambda name: -shares_of[name].communicating_s)
        most_exposed = set(by_exposure[:_SHOWN])
        caption = f"The {_SHOWN} with the most exposed communication; {len(names) - _SHOWN} more."
        names = [name for name in names if name in most_exposed]
    table = made_table(title, first_column, "ms>", "computing>", "exposed>", "both>", "idle>", caption=caption)
    for name in names:
        shares = shares_of[name]
        add_row(
            table,
            name,
            _ms(shares.step_s),
            _share(shares.computing_s, shares),
            _share(shares.communicating_s, shares),
            _share(shares.both_s, shares),
            _share(shares.idle_s, shares),
        )
    return table


def _collectives_table(trace: Trace) -> FittedTable:
    caption = "Means over steps and devices. in flight: begin to end; collectives of one row may overlap."
    if not trace.has_units:
        caption += " By kind only: the profile lacks the program's text, which names the units."
    columns = ("collective", "unit", "runs>", "in flight ms>", "exposed ms>", "of the step>")
    table = made_table("Collectives", *columns, caption=caption)
    rows = trace.by_unit if trace.has_units else trace.by_kind
    for row in rows[:_SHOWN]:
        unit = "-"
        if row.unit:
            unit = f"{row.unit} {row.phase or ''}".rstrip()
        add_row(table, row.kind, unit, *_times(row, trace.shares))
    if len(rows) > _SHOWN:
        add_row(table, f"... and {len(rows) - _SHOWN} more", "", "", "", "", "")
    if trace.has_units:
        for row in trace.by_kind:
            add_row(table, f"total {row.kind}", "", *_times(row, trace.shares), style="bold")
    return table


def _times(row: TraceRow, step: Shares) -> tuple[str, str, str, str]:
    """Returns the cells of a row after its names: runs, in flight, exposed, share of the step."""
    runs = f"{row.runs:g}"
    if row.runs >= 1e4:
        runs = f"{row.runs:.0f}"  # not 1e+04
    return runs, _ms(row.in_flight_s), _ms(row.exposed_s), _share(row.exposed_s, step)


def _closing_lines(trace: Trace) -> list[str]:
    lines = list(trace.notes)
    if trace.between_s is not None:
        lines.append(f"Between two steps: {_ms(trace.between_s)} ms, part of neither.")
    if trace.platform == "cpu":
        lines.append(_CPU)
    return lines


def _share(part_s: float, shares: Shares) -> str:
    if not shares.step_s:
        return "-"
    return f"{part_s / shares.step_s:.1%}"


def _ms(seconds: float) -> str:
    """Returns a time in milliseconds, with about three digits."""
    ms = seconds * 1e3
    if ms >= 100:
        return f"{ms:,.1f}"
    if ms >= 1:
        return f"{ms:.2f}"
    return f"{ms:.3f}"
