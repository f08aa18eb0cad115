"""The events of devices in a profile: the work of each device, and which part of its time is one program run.

Read with `jax.profiler.ProfileData`, JAX's own reader. What each platform writes:

CPU  host threads; an event per operation with `hlo_op`, `hlo_module`, `run_id` and `device_ordinal`
GPU  a plane `/device:GPU:0` with a line per stream (`Stream #14(Compute)`); kernels, most with `hlo_op`, `hlo_module`
TPU  a plane `/device:TPU:0` with `XLA Modules` (the runs), `XLA Ops` and `Async XLA Ops` (from start to done)
"""

import bisect
import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from jshard.inspect.hlo.collectives import KINDS, OTHERS, Forms, base_opcode, group_of, unit_and_phase
from jshard.inspect.hlo.module import Computation, Instruction, Module, parse_module

_HOST = "/host:CPU"
_DEVICE = re.compile(r"^/device:(GPU|TPU):(\d+)$")
_PROGRAM_ID = re.compile(r"\(\d+\)$")  # as in `jit_step(123)`
_STREAM = re.compile(r"^Stream\b")
# Copies between host and device: the device neither computes nor talks to another one.
_HOST_COPY = re.compile(r"^Memcpy\s?(H2D|D2H|HtoD|DtoH)\b", re.IGNORECASE)
_SKIPPED = ("Threadpool", "Wait", "Rendezvous", "$")  # most reports of a CPU's threads; $ are frames of Python
_END = "end: "
_NEXT = "ThunkExecutor::Execute"  # the thread that ends an operation begins the next ones before it reports that
_AT_ONCE = 10**8  # picoseconds from the end of that to the word of it
_POOL = "tf_"  # threads of XLA's
_TICKS = 1000  # picoseconds of a nanosecond


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


def process_events(data: Any) -> ProcessEvents:
    """Reads the events of devices."""
    planes = list(data.planes)
    readers = {"GPU": _gpu, "TPU": _tpu}
    devices = [readers[match[1]](plane, int(match[2])) for plane in planes if (match := _DEVICE.match(plane.name))]
    host = [plane for plane in planes if plane.name == _HOST]
    found = tuple(d for d in devices if d.events)
    if not found:
        found = tuple(d for plane in host for d in _cpu_devices(plane))
    return ProcessEvents(found, tuple(sorted({n for plane in host for n in _marks(plane)})))


def _gpu(plane: Any, number: int) -> DeviceEvents:
    events = [_event(raw, _details(raw)) for line in plane.lines if _STREAM.match(line.name) for raw in line.events]
    return DeviceEvents(f"gpu:{number}", "gpu", _by_begin(e for e in events if not _HOST_COPY.match(e.label)))


def _tpu(plane: Any, number: int) -> DeviceEvents:
    """A TPU's events, each with the run of a program that it is in. The runs are among them: steps begin and end so."""
    lines = {line.name: list(line.events) for line in plane.lines}
    plain = lambda name: [_event(raw, _details(raw)) for raw in lines.get(name, ())]
    runs = [
        dataclasses.replace(
            e, module=_PROGRAM_ID.sub("", e.label), run=place if e.run is None else e.run, computes=False
        )
        for place, e in enumerate(_by_begin(plain("XLA Modules")))
    ]
    begins = [run.begin_ps for run in runs]
    found = _nested(plain("XLA Ops")) + _paired(lines.get("Async XLA Ops", ()))
    for at, event in enumerate(found):
        run = runs[max(bisect.bisect_right(begins, event.begin_ps) - 1, 0)] if runs else event
        if run.begin_ps <= event.begin_ps < run.end_ps:
            found[at] = dataclasses.replace(event, module=run.module, run=run.run)
    return DeviceEvents(f"tpu:{number}", "tpu", _by_begin([*runs, *found]))


def _paired(raws: Iterable[Any]) -> list[Event]:
    """Asynchronous operations: where start and done are two events with one `flow`, from the one to the other."""
    pairs: dict[Any, list[Event]] = {}
    for place, raw in enumerate(raws):
        details = _details(raw)
        event = dataclasses.replace(_event(raw, details), computes=False)
        flow = details.get("flow")
        key = place if flow is None else (flow, re.sub("-(start|done)", "", event.op))
        pairs.setdefault(key, []).append(event)
    begins = ((min(events, key=lambda e: e.begin_ps), max(e.end_ps for e in events)) for events in pairs.values())
    return [dataclasses.replace(first, end_ps=end_ps) for first, end_ps in begins]


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


def _event(raw: Any, details: dict[str, Any]) -> Event:
    begin = round(raw.start_ns * _TICKS)
    run = details.get("run_id")
    return Event(
        op=str(details.get("hlo_op", "")) or raw.name.lstrip("%").partition(" ")[0],  # `%all-gather.3 = f32[8] ...`
        label=raw.name,
        begin_ps=begin,
        end_ps=begin + round(raw.duration_ns * _TICKS),
        module=str(details.get("hlo_module", "")),
        run=None if run is None else int(run),
    )


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


# Classification of operations.

_CONTAINERS = ("while", "conditional")  # others are recognised by events inside their time
_NAMES = "|".join((*KINDS, *OTHERS, "all-reduce-scatter"))
# Names given by compilers, and by jax after its own primitives: `all_gather.3`, `psum_invariant.7`.
_COLLECTIVE = re.compile(rf"({_NAMES})(-start|-done)?(\.\d+)*(\.call-(start|done))?")
_JAX_NAMES = {
    "psum": "all-reduce",
    "psum-invariant": "all-reduce",
    "psum-scatter": "reduce-scatter",
    "ppermute": "collective-permute",
}
_NCCL = re.compile(r"nccl\w*?_?(AllGather|ReduceScatter|AllReduce|SendRecv|Broadcast|Reduce)", re.IGNORECASE)
_NCCL_KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "sendrecv": "send or recv",  # all-to-all and collective-permute are made of these
    "broadcast": "collective-broadcast",
    "reduce": "all-reduce",
}


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation of the program."""

    name: str  # that of its instruction; start and end of an asynchronous one have one name
    kind: str = ""  # of the collective, such as `all-gather`; empty for one that computes
    units: tuple[str, ...] = ()  # paths of the units that it gathers or reduces, if known
    phase: str | None = None  # `forward`, `backward` or `both`; None if it is not known
    contains: bool = False  # it is a loop, a branch or a call: its work is known from others
    place: int | None = None  # in the order of the program's outermost instructions, which run once; None for others


class Ops:
    """Identifies operations: by the text of their program if there is one, else by their names."""

    def __init__(self, text: str | None) -> None:
        self._known: dict[str, Op] = {}
        self._asked: dict[tuple[str, str, str, bool], Op] = {}
        self.program: str | None = None
        if text is not None:
            named = re.match(r"\s*HloModule ([\w.\-]+)", text)
            self.program = named[1] if named else None
            self._known = _Table(parse_module(text)).ops

    @property
    def has_text(self) -> bool:
        """Whether there is a text."""
        return bool(self._known)

    @functools.cached_property
    def outermost(self) -> frozenset[str]:
        """Names of the operations outside loops and branches, as far as a text has them."""
        return frozenset(op.name for op in self._known.values() if op.place is not None)

    def of(self, event: Event) -> Op:
        """The operation of an event."""
        key = event.op, event.label, event.module, event.computes
        if key not in self._asked:
            self._asked[key] = self._of(event)
        return self._asked[key]

    def _of(self, event: Event) -> Op:
        ours = not event.module or self.program is None or event.module == self.program
        known = (self._known.get(event.op) or self._known.get(_one_name(event.op))) if ours else None
        kernel = _NCCL.match(event.label)
        if kernel and not (known and known.kind):
            return Op(_one_name(event.op), _NCCL_KINDS[kernel[1].lower()])
        op = known or _by_name(event.op)
        return dataclasses.replace(op, contains=True) if not (event.computes or op.kind) else op

    def not_in_text(self, events: Iterable[Event]) -> set[str]:
        """Names of collectives that are missing from the program's text."""
        ours = {e.op for e in events if self.has_text and e.module == self.program and self.of(e).kind}
        return {name for name in ours if not _NCCL.match(name) and _one_name(name) not in self._known}

    def lacks_an_end(self, seen: Set[str]) -> bool:
        """Whether an outermost collective comes before or after everything that was seen: it was cut off."""
        places = {op: op.place for op in self._known.values() if op.place is not None}
        found = [place for op, place in places.items() if op.name in seen]
        return bool(found) and any(op.kind and not min(found) <= at <= max(found) for op, at in places.items())


class _Table:
    """The operations of a program by the names of their instructions."""

    def __init__(self, module: Module) -> None:
        self._module, self._forms = module, Forms(module)
        self._begun: dict[str, Op] = {}  # by what the end of an asynchronous one names
        self.ops: dict[str, Op] = {}
        for computation in module.computations.values():
            is_outermost = computation.name == module.entry
            for place, instruction in enumerate(computation.instructions):
                op = self._op(computation, instruction, place if is_outermost else None)
                self.ops[instruction.name] = op
        for op in [*self.ops.values()]:
            self.ops.setdefault(op.name, op)

    def _op(self, home: Computation, instruction: Instruction, place: int | None) -> Op:
        name = _one_name(instruction.name)
        base = base_opcode(instruction.opcode)
        if instruction.opcode in _CONTAINERS:
            return Op(name, contains=True, place=place)
        if base in OTHERS:
            return Op(name, base, *unit_and_phase(instruction.op_name), place=place)
        role = self._forms.role(instruction)
        if role is None:
            return Op(name, place=place)
        if role.collective is None:
            source = home.source(home.operand(instruction, 0))
            begun = self._begun.get(role.key or (source.name if source else ""))
            return begun or dataclasses.replace(_by_name(instruction.name), place=place)
        kind = "" if self._is_alone(role.collective) else role.kind
        op = Op(name, kind, *unit_and_phase(instruction.op_name or role.collective.op_name), place=place)
        self._begun[role.key or instruction.name] = op
        return op

    def _is_alone(self, collective: Instruction) -> bool:
        """Whether its groups have one device: nothing is sent."""
        kind, num_devices = base_opcode(collective.opcode), self._module.num_devices
        return len(group_of(collective, kind, num_devices)) <= 1


def _by_name(name: str) -> Op:
    plain = name.replace("_", "-")
    found = _COLLECTIVE.fullmatch(plain)
    if found:
        kind = "reduce-scatter" if found[1] == "all-reduce-scatter" else found[1]
        return Op(_one_name(name), kind)
    stem = re.sub(r"(\.\d+)+$", "", plain)
    if stem in _JAX_NAMES:
        return Op(name, _JAX_NAMES[stem])
    return Op(_one_name(name), contains=stem in _CONTAINERS)


def _one_name(name: str) -> str:
    """The name that start and end of an asynchronous operation share."""
    return re.sub(r"\.call-(start|done|update)$|-(start|done|update)(?=$|\.)", "", name)


# Which part of a device's time is one run of the step's program.

_EARLY, _LATE = 1 / 3, 2 / 3  # of the operations of a run in their order


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a program on one device."""

    begin_ps: int  # of its first event
    end_ps: int  # of its last one
    id: int | None  # how the profile calls it; None if it does not
    ops: frozenset[str]  # names of the operations that it did


def busiest_program(devices: Iterable[DeviceEvents]) -> str:
    """The program whose operations take the most time on the devices."""
    busy_ps: dict[str, int] = collections.defaultdict(int)
    for device in devices:
        for event in device.events:
            if event.module and event.computes:
                busy_ps[event.module] += event.end_ps - event.begin_ps
    return max(busy_ps, key=lambda name: busy_ps[name], default="")


def runs_of(device: DeviceEvents, program: str, ops: Ops, *, marked: int) -> list[Run]:
    """The runs of a program on a device, in order, those included that are cut off."""
    own = [e for e in device.events if e.module in ("", program) or not program]
    if any(e.run is not None for e in own):
        by_id: dict[int, list[Event]] = collections.defaultdict(list)
        for event in own:
            if event.run is not None:
                by_id[event.run].append(event)
        runs = [_run(events, ops, id) for id, events in by_id.items()]
    else:
        runs = [_run(events, ops, None) for events in _repeated(own, ops, marked)]
    return sorted(runs, key=lambda r: r.begin_ps)


def expected_ops(runs: Iterable[Run], ops: Ops | None) -> frozenset[str]:
    """The operations that some run did, and which every whole one does: without those in branches, if that is known."""
    seen = frozenset(name for run in runs for name in run.ops)
    return seen & ops.outermost if ops is not None and ops.has_text else seen


def _run(events: Sequence[Event], ops: Ops, id: int | None) -> Run:
    names = frozenset(ops.of(e).name for e in events)
    return Run(min(e.begin_ps for e in events), max(e.end_ps for e in events), id, names)


def _repeated(events: Sequence[Event], ops: Ops, marked: int) -> list[list[Event]]:
    """Events of a device without a note of runs: a run begins where late operations are followed by early ones.

    Late and early are the program's outermost operations, which run once; without its text those that come as often as
    steps are marked, or else least often, in the order in which they appear.
    """
    places = {e.op: place for e in events if (place := ops.of(e).place) is not None}
    order = sorted(places, key=lambda name: places[name])
    if not ops.has_text:
        counts = collections.Counter(e.op for e in events)
        once = marked if marked in counts.values() else min(counts.values(), default=0)
        order = [name for name in counts if counts[name] == once]
    ranks = {name: place / max(1, len(order) - 1) for place, name in enumerate(order)}
    groups: list[list[Event]] = [[]]
    is_late = False
    for event in events:
        rank = ranks.get(event.op)
        if rank is not None:
            if is_late and rank < _EARLY:
                groups.append([])
                is_late = False
            elif rank > _LATE:
                is_late = True
        groups[-1].append(event)
    return [group for group in groups if group]
