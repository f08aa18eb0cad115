"""The events of devices in a profile: the work of each device.

Read with `jax.profiler.ProfileData`, JAX's own reader. What each platform writes:

CPU  host threads; an event per operation with `hlo_op`, `hlo_module`, `run_id` and `device_ordinal`
GPU  a plane `/device:GPU:0` with a line per stream (`Stream #14(Compute)`); kernels, most with `hlo_op`, `hlo_module`
TPU  a plane `/device:TPU:0` with `XLA Modules` (the runs), `XLA Ops` and `Async XLA Ops` (from start to done)

An operation on a CPU may end after its event: where it continues on another thread, that reports `end: NAME`, with the
number of the operation's flow. But a thread that ends an operation begins the next ones before it reports the end. So
the report may be late by all that these take, and the operation has ended when they begin.
"""

import bisect
import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

_HOST = "/host:CPU"
_DEVICE = re.compile(r"^/device:(GPU|TPU):(\d+)$")
_PROGRAM_ID = re.compile(r"\(\d+\)$")  # as in `jit_step(123)`
_STREAM = re.compile(r"^Stream\b")
# Copies between host and device: the device neither computes nor talks to another one.
_HOST_COPY = re.compile(r"^Memcpy\s?(H2D|D2H|HtoD|DtoH)\b", re.IGNORECASE)
_SKIPPED = ("Threadpool", "Wait", "Rendezvous", "$")  # most reports of a CPU's threads; $ are frames of Python
_END = "end: "
_NEXT_OPERATIONS = "ThunkExecutor::Execute"
_REPORT_DELAY_PS = 10**8  # at most, from the end of the next operations to the report
_POOL = "tf_"  # threads of XLA's
_PS_PER_NS = 1000

_Details = dict[str, Any]
"""The stats of an event."""


# The types of JAX's reader, as far as they are used: it exports them as plain names, which annotations cannot have.


class _RawEvent(Protocol):
    name: str
    start_ns: float
    duration_ns: float
    stats: Iterable[tuple[str | None, Any]]


class _RawLine(Protocol):
    name: str
    events: Iterable[_RawEvent]


class _RawPlane(Protocol):
    name: str
    lines: Iterable[_RawLine]


class _RawProfile(Protocol):
    planes: Iterable[_RawPlane]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An operation on a device."""

    op: str  # name of the operation in the program's text, or a substitute: a kernel may lack one
    label: str  # how the profile calls it, such as the name of a kernel
    begin_ps: int  # when it began
    end_ps: int  # when it ended
    module: str = ""  # name of the program; empty if unknown
    run: int | None = None  # which run of the program, if the profile records it
    computes: bool = True  # if it does not communicate; not so what has other events inside


@dataclasses.dataclass(frozen=True)
class DeviceEvents:
    """The events of one device in a profile."""

    name: str  # such as `gpu:0`; as counted by the process
    platform: str  # `cpu`, `gpu` or `tpu`
    events: tuple[Event, ...]  # of all its lines, by their begin


@dataclasses.dataclass(frozen=True)
class ProcessEvents:
    """The contents of one file of a profile."""

    devices: tuple[DeviceEvents, ...]  # those that did something
    # Numbers of the steps that the program marked with `jax.profiler.StepTraceAnnotation`, in order.
    marks: tuple[int, ...]


def process_events(data: _RawProfile) -> ProcessEvents:
    """Reads the events of devices."""
    devices: list[DeviceEvents] = []
    host: list[_RawPlane] = []
    for plane in data.planes:
        if plane.name == _HOST:
            host.append(plane)
        elif match := _DEVICE.match(plane.name):
            read = _gpu_events if match[1] == "GPU" else _tpu_events
            devices.append(read(plane, int(match[2])))
    active = [device for device in devices if device.events]
    if not active:
        # Only then: beside a GPU, the host's threads also run small programs of their own.
        for plane in host:
            active += _cpu_devices(plane)
    marks: set[int] = set()
    for plane in host:
        marks.update(_marks(plane))
    return ProcessEvents(tuple(active), tuple(sorted(marks)))


# ---- GPU


def _gpu_events(plane: _RawPlane, number: int) -> DeviceEvents:
    events = []
    for line in plane.lines:
        if _STREAM.match(line.name):  # other lines are derived from these
            events += _plain_events(line.events)
    without_copies = [event for event in events if not _HOST_COPY.match(event.label)]
    return DeviceEvents(f"gpu:{number}", "gpu", _by_begin(without_copies))


# ---- TPU


def _tpu_events(plane: _RawPlane, number: int) -> DeviceEvents:
    """Returns a TPU's events, each with the run of a program that it is in.

    The runs themselves are among them, as a step begins and ends with its run, not with its first and last operation.
    """
    lines = {line.name: list(line.events) for line in plane.lines}
    runs = _tpu_runs(lines.get("XLA Modules", ()))
    operations = _nested(_plain_events(lines.get("XLA Ops", ())))
    operations += _paired(lines.get("Async XLA Ops", ()))
    if runs:
        operations = [_within_run(event, runs) for event in operations]
    return DeviceEvents(f"tpu:{number}", "tpu", _by_begin([*runs, *operations]))


def _tpu_runs(raws: Iterable[_RawEvent]) -> list[Event]:
    """Returns the runs of programs, numbered in their order if the profile does not number them."""
    runs = []
    for place, event in enumerate(_by_begin(_plain_events(raws))):
        module = _PROGRAM_ID.sub("", event.label)
        number = event.run
        if number is None:
            number = place
        # It contains the operations of its program: as computation it would cover their gaps, too.
        runs.append(dataclasses.replace(event, module=module, run=number, computes=False))
    return runs


def _within_run(event: Event, runs: Sequence[Event]) -> Event:
    """Returns an event with the program and the number of the run that it begins in, if there is one."""
    num_begun = bisect.bisect_right(runs, event.begin_ps, key=_begin)
    run = runs[max(num_begun - 1, 0)]
    if not run.begin_ps <= event.begin_ps < run.end_ps:
        return event
    return dataclasses.replace(event, module=run.module, run=run.run)


def _paired(raws: Iterable[_RawEvent]) -> list[Event]:
    """Returns asynchronous operations, from start to done.

    Start and done may be two events with one `flow`, which is unique only among those of one operation.
    """
    pairs: dict[int | tuple[object, str], list[Event]] = {}
    for place, raw in enumerate(raws):
        details = _details(raw)
        event = dataclasses.replace(_event(raw, details), computes=False)
        flow = details.get("flow")
        # An event without a flow is a whole operation.
        key = place if flow is None else (flow, re.sub("-(start|done)", "", event.op))
        pairs.setdefault(key, []).append(event)
    operations = []
    for events in pairs.values():
        first = min(events, key=_begin)
        last = max(events, key=_end)
        operations.append(dataclasses.replace(first, end_ps=last.end_ps))
    return operations


# ---- CPU


def _cpu_devices(plane: _RawPlane) -> Iterator[DeviceEvents]:
    """Yields the devices of a process on the CPU, whose operations run on threads of the host."""
    threads = _CpuThreads()
    for line in plane.lines:
        threads.add_line(line.events)
    for place, ordinal in enumerate(sorted(threads.events)):  # ordinals of later processes do not begin at 0
        events = [threads.ended(ordinal, event) for event in threads.events[ordinal]]
        yield DeviceEvents(f"cpu:{place}", "cpu", _by_begin(events))


class _CpuThreads:
    """Collects the events of a CPU's devices from threads."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = collections.defaultdict(list)  # by ordinal of the device
        self._flows: dict[tuple[int, str, int], int] = {}  # by device, operation and begin of an event
        self._ends_ps: dict[int, list[int]] = {}  # by flow: when its operation may have ended

    def add_line(self, raws: Iterable[_RawEvent]) -> None:
        """Adds the events of a thread."""
        events: dict[int, list[Event]] = collections.defaultdict(list)  # by ordinal of the device
        reports_ps: dict[int, int] = {}  # by flow
        next_operations: list[Event] = []
        for raw in raws:
            if raw.name.startswith(_SKIPPED):
                continue
            details = _details(raw)
            # The number of a flow is `_p` where the operation began, and `_c` where its end is reported.
            if raw.name.startswith(_END) and "_c" in details:
                reports_ps[details["_c"]] = _begin_ps(raw)
            elif raw.name == _NEXT_OPERATIONS:
                next_operations.append(_event(raw, details))
            elif "hlo_op" in details and "device_ordinal" in details:
                event = _event(raw, details)
                ordinal = int(details["device_ordinal"])
                events[ordinal].append(event)
                self._flows[ordinal, event.op, event.begin_ps] = details.get("_p", -1)  # -1: it has no report
        self._add_ends(reports_ps, next_operations)
        for ordinal, of_device in events.items():
            self.events[ordinal] += _nested(of_device)

    def _add_ends(self, reports_ps: Mapping[int, int], next_operations: list[Event]) -> None:
        """Notes the reports of a thread, and the begins of what it ran immediately before it reported."""
        next_operations.sort(key=_end)
        for flow, report_ps in reports_ps.items():
            first = bisect.bisect_left(next_operations, report_ps - _REPORT_DELAY_PS, key=_end)
            last = bisect.bisect_right(next_operations, report_ps, key=_end)
            begins_ps = [event.begin_ps for event in next_operations[first:last]]
            self._ends_ps[flow] = [report_ps, *begins_ps]

    def ended(self, ordinal: int, event: Event) -> Event:
        """Returns an event with the end of its operation, if that is later."""
        flow = self._flows[ordinal, event.op, event.begin_ps]
        ends_ps = [end_ps for end_ps in self._ends_ps.get(flow, ()) if end_ps >= event.begin_ps]
        if not ends_ps or min(ends_ps) <= event.end_ps:
            return event
        return dataclasses.replace(event, end_ps=min(ends_ps))


def _marks(plane: _RawPlane) -> Iterator[int]:
    """Yields the numbers of the steps that the program marked."""
    for line in plane.lines:
        if line.name.startswith(_POOL):
            continue  # a thread of the program has its command's name: python, jshard
        for raw in line.events:
            if not raw.name.startswith(_SKIPPED):
                number = _details(raw).get("step_num")
                if number is not None:
                    yield int(number)


# ---- all platforms


def _plain_events(raws: Iterable[_RawEvent]) -> list[Event]:
    return [_event(raw, _details(raw)) for raw in raws]


def _event(raw: _RawEvent, details: _Details) -> Event:
    begin_ps = _begin_ps(raw)
    name_in_label = raw.name.lstrip("%").partition(" ")[0]  # `%all-gather.3 = f32[8] ...`
    run = details.get("run_id")
    return Event(
        op=str(details.get("hlo_op", "")) or name_in_label,
        label=raw.name,
        begin_ps=begin_ps,
        end_ps=begin_ps + round(raw.duration_ns * _PS_PER_NS),
        module=str(details.get("hlo_module", "")),
        run=None if run is None else int(run),
    )


def _details(raw: _RawEvent) -> _Details:
    return {key: value for key, value in raw.stats if key is not None}


def _begin_ps(raw: _RawEvent) -> int:
    return round(raw.start_ns * _PS_PER_NS)


def _begin(event: Event) -> int:
    return event.begin_ps


def _end(event: Event) -> int:
    return event.end_ps


def _nested(events: Iterable[Event]) -> list[Event]:
    """Returns the events of a thread by their begin; those with others inside, such as loops, do not compute."""
    nested: list[Event] = []
    open_events: list[int] = []  # indices of the events around the current one
    for event in sorted(events, key=lambda event: (event.begin_ps, -event.end_ps)):
        while open_events and nested[open_events[-1]].end_ps <= event.begin_ps:
            open_events.pop()
        if open_events:
            innermost = open_events[-1]
            if event.end_ps <= nested[innermost].end_ps:
                nested[innermost] = dataclasses.replace(nested[innermost], computes=False)
        open_events.append(len(nested))
        nested.append(event)
    return nested


def _by_begin(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: (event.begin_ps, event.end_ps)))
