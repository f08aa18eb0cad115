"""The events of devices in a profile, whatever the platform: a CPU's threads, a GPU's streams, a TPU's lines.

Read with `jax.profiler.ProfileData`, JAX's own reader. What each platform writes:

CPU  host threads; an event per operation with `hlo_op`, `hlo_module`, `run_id` and `device_ordinal`
GPU  a plane `/device:GPU:0` with a line per stream (`Stream #14(Compute)`); kernels, most with `hlo_op`, `hlo_module`
TPU  a plane `/device:TPU:0` with `XLA Modules` (the runs), `XLA Ops` and `Async XLA Ops` (from start to done)
"""

import bisect
import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

_HOST = "/host:CPU"
_DEVICE = re.compile(r"^/device:(GPU|TPU):(\d+)$")
_RUNS, _OPS, _ASYNC = "XLA Modules", "XLA Ops", "Async XLA Ops"
_STREAM = re.compile(r"^Stream\b")
# Copies between host and device: the device neither computes nor talks to another one.
_HOST_COPY = re.compile(r"^Memcpy\s?(H2D|D2H|HtoD|DtoH)\b", re.IGNORECASE)
_PROGRAM_ID = re.compile(r"\(\d+\)$")  # as in `jit_step(123)`
_SKIPPED = ("Threadpool", "Wait", "Rendezvous", "$")  # most of what a CPU's threads report; $ are frames of Python
_END = "end: "
_NEXT = "ThunkExecutor::Execute"  # the thread that ends an operation begins the next ones before it says so
_AT_ONCE = 10**8  # picoseconds from the end of that to the word of it
_POOL = "tf_"  # threads of XLA's
_TICKS = 1000  # picoseconds of a nanosecond


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that a device did."""

    op: str  # name of the operation in the program's text, or what stands for it: a kernel may come without
    label: str  # how the profile calls it, such as the name of a kernel
    begin_ps: int  # when it began
    end_ps: int  # when it ended
    module: str = ""  # name of the program; empty if the profile does not say
    run: int | None = None  # which run of the program, where the profile says so
    # It computes if it does not communicate. Not so what has other events inside, and copies beside them.
    computes: bool = True


@dataclasses.dataclass(frozen=True)
class DeviceEvents:
    """What a profile has of one device."""

    name: str  # such as `gpu:0`; as counted by the process
    platform: str  # `cpu`, `gpu` or `tpu`
    events: tuple[Event, ...]  # of all its lines, by their begin
    runs: tuple[Event, ...] = ()  # whole runs of programs, where the profile has a line of them


@dataclasses.dataclass(frozen=True)
class ProcessEvents:
    """What one file of a profile has."""

    devices: tuple[DeviceEvents, ...]  # those that did something
    # Numbers of the steps that the program marked with `jax.profiler.StepTraceAnnotation`, in order.
    marks: tuple[int, ...]


def process_events(data: Any) -> ProcessEvents:
    """Reads the events of devices."""
    planes = list(data.planes)
    devices = [_device(plane, match) for plane in planes if (match := _DEVICE.match(plane.name))]
    host = [plane for plane in planes if plane.name == _HOST]
    found = tuple(d for d in devices if d.events)
    if not found:
        found = tuple(d for plane in host for d in _cpu_devices(plane))
    return ProcessEvents(found, tuple(sorted({n for plane in host for n in _marks(plane)})))


def _device(plane: Any, match: re.Match[str]) -> DeviceEvents:
    platform = match[1].lower()
    events, runs = list[Event](), list[Event]()
    for line in plane.lines:
        if line.name == _RUNS:
            runs += (dataclasses.replace(e, module=_PROGRAM_ID.sub("", e.label)) for e in _plain(line))
        elif line.name == _OPS and platform == "tpu":
            events += _nested(_plain(line))
        elif line.name == _ASYNC and platform == "tpu":
            events += (dataclasses.replace(e, computes=False) for e in _paired(line))
        elif _STREAM.match(line.name) and platform == "gpu":
            events += (e for e in _plain(line) if not _HOST_COPY.match(e.label))
    return DeviceEvents(f"{platform}:{match[2]}", platform, _by_begin(events), _by_begin(runs))


def _cpu_devices(plane: Any) -> Iterator[DeviceEvents]:
    by_ordinal: dict[int, list[Event]] = collections.defaultdict(list)
    flows: dict[tuple[int, str, int], int] = {}  # of an event, by its device, operation and begin
    ends: dict[int, list[int]] = {}  # by flow: an operation may be done in other threads, and end after its event
    for line in plane.lines:
        of_line: dict[int, list[Event]] = collections.defaultdict(list)
        said, nexts = dict[int, int](), list[Event]()
        for raw in line.events:
            if raw.name.startswith(_SKIPPED):
                continue
            details = _details(raw)
            if raw.name.startswith(_END) and "_c" in details:
                said[details["_c"]] = round(raw.start_ns * _TICKS)
            elif raw.name == _NEXT:
                nexts.append(_event(raw, details))
            elif "hlo_op" in details and "device_ordinal" in details:
                event, ordinal = _event(raw, details), int(details["device_ordinal"])
                of_line[ordinal].append(event)
                flows[ordinal, event.op, event.begin_ps] = details.get("_p", -1)
        nexts.sort(key=_end)
        for flow, at in said.items():
            first, last = bisect.bisect_left(nexts, at - _AT_ONCE, key=_end), bisect.bisect_right(nexts, at, key=_end)
            ends[flow] = [at, *(e.begin_ps for e in nexts[first:last])]
        for ordinal, events in of_line.items():
            by_ordinal[ordinal] += _nested(events)
    for place, ordinal in enumerate(sorted(by_ordinal)):  # ordinals of later processes do not begin at 0
        done = ((e, ends.get(flows[ordinal, e.op, e.begin_ps], ())) for e in by_ordinal[ordinal])
        ended = ((e, min((end for end in found if end >= e.begin_ps), default=0)) for e, found in done)
        events = [dataclasses.replace(e, end_ps=end) if end > e.end_ps else e for e, end in ended]
        yield DeviceEvents(f"cpu:{place}", "cpu", _by_begin(events))


def _end(event: Event) -> int:
    return event.end_ps


def _marks(plane: Any) -> Iterator[int]:
    for line in plane.lines:
        if line.name.startswith(_POOL):
            continue  # a thread of the program has its command's name: python, jshard
        for raw in line.events:
            if not raw.name.startswith(_SKIPPED):
                number = _details(raw).get("step_num")
                if number is not None:
                    yield int(number)


def _plain(line: Any) -> list[Event]:
    return [_event(raw, _details(raw)) for raw in line.events]


def _paired(line: Any) -> list[Event]:
    """Asynchronous operations: where start and done are two events with one `flow`, from the one to the other."""
    single, pairs = list[Event](), dict[Any, list[Event]]()
    for raw in line.events:
        details = _details(raw)
        event = _event(raw, details)
        if details.get("flow") is None:
            single.append(event)
        else:
            pairs.setdefault((details["flow"], re.sub("-(start|done)", "", event.op)), []).append(event)
    for events in pairs.values():
        first = min(events, key=lambda e: e.begin_ps)
        single.append(dataclasses.replace(first, end_ps=max(e.end_ps for e in events)))
    return single


def _event(raw: Any, details: dict[str, Any]) -> Event:
    begin = round(raw.start_ns * _TICKS)
    run = details.get("run_id")
    return Event(
        op=str(details.get("hlo_op", "")) or _op_name(raw.name),
        label=raw.name,
        begin_ps=begin,
        end_ps=begin + round(raw.duration_ns * _TICKS),
        module=str(details.get("hlo_module", "")),
        run=None if run is None else int(run),
    )


def _op_name(name: str) -> str:
    """`all-gather.3` of `%all-gather.3 = f32[8]{0} all-gather(...)`."""
    return name.lstrip("%").partition(" ")[0]


def _details(raw: Any) -> dict[str, Any]:
    return {key: value for key, value in raw.stats if key is not None}


def _nested(events: Iterable[Event]) -> list[Event]:
    """The events of a thread, those noted that have others inside: loops, branches, calls."""
    found: list[Event] = []
    around: list[int] = []  # places of the events that are open
    for event in sorted(events, key=lambda e: (e.begin_ps, -e.end_ps)):
        while around and found[around[-1]].end_ps <= event.begin_ps:
            around.pop()
        if around and event.end_ps <= found[around[-1]].end_ps:
            outer = around[-1]
            found[outer] = dataclasses.replace(found[outer], computes=False)
        around.append(len(found))
        found.append(event)
    return found


def _by_begin(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda e: (e.begin_ps, e.end_ps)))
