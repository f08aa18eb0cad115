"""What an operation of a profile is, and which part of a device's time is one run of the step's program."""

import bisect
import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence, Set

from jshard.inspect.hlo.collectives import KINDS, OTHERS, group_of
from jshard.inspect.hlo.forms import Forms, base_opcode, unit_and_phase
from jshard.inspect.hlo.module import Computation, Instruction, Module, parse_module
from jshard.inspect.profile.planes import DeviceEvents, Event

_CONTAINERS = ("while", "conditional")  # others are known by what is inside their time
_NAMES = "|".join((*KINDS, *OTHERS, "all-reduce-scatter"))
# Names as compilers give them, and as jax does after its own primitives: `all_gather.3`, `psum_invariant.7`.
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
    """What an operation does."""

    name: str  # that of its instruction; start and end of an asynchronous one have one name
    kind: str = ""  # of the collective, such as `all-gather`; empty for one that computes
    units: tuple[str, ...] = ()  # paths of the units that it gathers or reduces, if the program says so
    phase: str | None = None  # `forward`, `backward` or `both`; None if it is not known
    contains: bool = False  # it is a loop, a branch or a call: what it does is known from others
    place: int | None = None  # in the order of the program's outermost instructions, which run once; None for others


class Ops:
    """Tells operations apart: by the text of their program if there is one, else by their names."""

    def __init__(self, text: str | None) -> None:
        self._known: dict[str, Op] = {}
        self._asked: dict[tuple[str, str, str, bool], Op] = {}
        self.program: str | None = None
        if text is not None:
            named = re.match(r"\s*HloModule ([\w.\-]+)", text)
            self.program = named[1] if named else None
            self._known = _Table(parse_module(text)).ops

    @property
    def is_told(self) -> bool:
        """Whether there is a text."""
        return bool(self._known)

    @functools.cached_property
    def outermost(self) -> frozenset[str]:
        """Names of the operations outside loops and branches, as far as a text has them."""
        return frozenset(op.name for op in self._known.values() if op.place is not None)

    def of(self, event: Event) -> Op:
        """What an event is about."""
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

    def untold(self, events: Iterable[Event]) -> set[str]:
        """Names of collectives that the program's text should have, and does not."""
        ours = {e.op for e in events if self.is_told and e.module == self.program and self.of(e).kind}
        return {name for name in ours if not _NCCL.match(name) and _one_name(name) not in self._known}

    def missing_at_an_end(self, seen: Set[str]) -> tuple[Op, ...]:
        """Outermost collectives of the program that come before or after everything that was seen: it was cut off."""
        places = {op: op.place for op in self._known.values() if op.place is not None}
        found = [place for op, place in places.items() if op.name in seen]
        if not found:
            return ()
        return tuple(op for op, place in places.items() if op.kind and not min(found) <= place <= max(found))


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
        for event in device.runs or device.events:
            if event.module and event.computes:
                busy_ps[event.module] += event.end_ps - event.begin_ps
    return max(busy_ps, key=lambda name: busy_ps[name], default="")


def runs_of(device: DeviceEvents, program: str, ops: Ops, *, marked: int) -> list[Run]:
    """The runs of a program on a device, in order, those included that are cut off."""
    if device.runs:
        return [
            Run(r.begin_ps, r.end_ps, r.run, _names(_between(device.events, r.begin_ps, r.end_ps), ops))
            for r in device.runs
            if r.module == program
        ]
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


def whole(runs: Sequence[Run], expected: frozenset[str], ops: Ops | None) -> list[bool]:
    """Of each run, whether it is in the profile from its begin to its end."""
    if ops is not None and len(runs) == 1:  # no other run to hold it against, but perhaps the program's text
        return [expected <= runs[0].ops and not ops.missing_at_an_end(runs[0].ops)]
    return [expected <= run.ops for run in runs]


def expected_ops(runs: Iterable[Run], ops: Ops | None) -> frozenset[str]:
    """The operations that some run did, and which every whole one does: without those in branches, if that is known."""
    seen = frozenset(name for run in runs for name in run.ops)
    return seen & ops.outermost if ops is not None and ops.is_told else seen


def _run(events: Sequence[Event], ops: Ops, id: int | None) -> Run:
    return Run(min(e.begin_ps for e in events), max(e.end_ps for e in events), id, _names(events, ops))


def _names(events: Iterable[Event], ops: Ops) -> frozenset[str]:
    return frozenset(ops.of(e).name for e in events)


def _between(events: Sequence[Event], begin: int, end: int) -> Sequence[Event]:
    first = bisect.bisect_left(events, begin, key=lambda e: e.begin_ps)
    last = bisect.bisect_left(events, end, key=lambda e: e.begin_ps)
    return events[first:last]


def _repeated(events: Sequence[Event], ops: Ops, marked: int) -> list[list[Event]]:
    """Events of a device without a note of runs: a run begins where late operations are followed by early ones."""
    ranks = _ranks(events, ops, marked)
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


def _ranks(events: Sequence[Event], ops: Ops, marked: int) -> dict[str, float]:
    """Where operations that run once stand in the order of a run, from 0 to 1."""
    if ops.is_told:
        places = {e.op: place for e in events if (place := ops.of(e).place) is not None}
        order = sorted(places, key=lambda name: places[name])
    else:
        counts = collections.Counter(e.op for e in events)
        once = min(counts.values(), default=0)
        if marked in counts.values():
            once = marked
        order = [name for name in counts if counts[name] == once]  # as they appear
    return {name: place / max(1, len(order) - 1) for place, name in enumerate(order)}
