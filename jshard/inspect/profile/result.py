"""What a profile says of its steps, as values."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Group

from jshard._text import folded_names, name_pattern
from jshard.inspect.drawing import chrome_trace, html_page
from jshard.inspect.profile.report import json_of, tables, timeline
from jshard.inspect.profile.shares import MeasuredCollective, MeasuredSpan, Shares
from jshard.inspect.tables import printed

_PICTURE = "The timeline is the middle step of the profile, on the device with the most exposed communication."


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """One step on one device.

    Args:
        device: such as `gpu:3`, or `process 1 gpu:3`.
        measured: its time.
        since_last_s: from the end of the step before; None if that is not in the profile.
    """

    device: str
    measured: MeasuredSpan
    since_last_s: float | None = None

    @property
    def shares(self) -> Shares:
        """How it spent the step."""
        return self.measured.shares

    @property
    def collectives(self) -> tuple[MeasuredCollective, ...]:
        """The collectives that it took part in."""
        return self.measured.collectives


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """One step on all devices.

    Args:
        number: as the program marked it, or counted from 1.
        devices: all of them.
    """

    number: int
    devices: tuple[DeviceStep, ...]

    @property
    def shares(self) -> Shares:
        """The mean over the devices."""
        return Shares.mean(d.shares for d in self.devices)


@dataclasses.dataclass(frozen=True)
class TraceRow:
    """Collectives that are alike; times are those of a step on a device, in the mean.

    Args:
        kind: such as `all-gather`.
        unit: the unit, or several folded as `blocks/0..11`; None if it is not known.
        phase: `forward`, `backward` or `both`; None if it is not known.
        name: of the instruction, if the row is of one.
        runs: how often they ran.
        in_flight_s: from begin to end, each by itself.
        exposed_s: of that, while nothing computed.
    """

    kind: str
    unit: str | None
    phase: str | None
    name: str | None
    runs: float
    in_flight_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True, repr=False)
class Trace:
    """What `js.trace` read. `print` it; in a notebook it shows itself; `to_json` for programs.

    Args:
        source: the files that were read.
        program: name of the step's program.
        platform: `cpu`, `gpu` or `tpu`.
        steps: those that are whole in the profile, in order.
        has_units: the program's text was there, and names the unit of each collective.
        notes: what else is to be said.
    """

    source: tuple[str, ...]
    program: str
    platform: str
    steps: tuple[TraceStep, ...]
    has_units: bool
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices."""
        return tuple(d.device for d in self.steps[0].devices)

    @property
    def shares(self) -> Shares:
        """The four parts of a step, in the mean over steps and devices."""
        return Shares.mean(d.shares for d in self._device_steps)

    @property
    def shares_by_device(self) -> dict[str, Shares]:
        """Of each device the mean over the steps."""
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
        """Each collective of the program by itself, the most exposed first."""
        return self._rows(lambda time: (time.op,), named=True)

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json_of(self)

    def to_html(self) -> str:
        """The report, and a timeline of one step, as one page that needs nothing else.

        The step is the middle one, on the device whose communication is exposed the most.
        """
        step, device = self._drawn
        title = f"Step {step.number} of {self.program} on {device.device}, measured"
        return html_page(title, _PICTURE, timeline(device.measured), str(self))

    def to_chrome_trace(self) -> str:
        """The timeline of the same step, as JSON for https://ui.perfetto.dev."""
        return chrome_trace(timeline(self._drawn[1].measured))

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__

    def __rich__(self) -> Group:
        return tables(self)

    @property
    def _drawn(self) -> tuple[TraceStep, DeviceStep]:
        step = self.steps[len(self.steps) // 2]
        return step, max(step.devices, key=lambda d: d.shares.communicating_s)

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
                unit=_folded(times) if folds else None,
                phase=times[0].op.phase if folds else None,
                name=times[0].op.name if named else None,
                runs=sum(t.runs for t in times) / count,
                in_flight_s=sum(t.in_flight_s for t in times) / count,
                exposed_s=sum(t.exposed_s for t in times) / count,
            )
            for times in alike.values()
        )
        return tuple(sorted(rows, key=lambda row: (-row.exposed_s, -row.in_flight_s)))


def _folded(times: Iterable[MeasuredCollective]) -> str | None:
    return ", ".join(folded_names(sorted({unit for t in times for unit in t.op.units}))) or None
