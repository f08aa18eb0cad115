"""Identifies the operations of a profile: collectives with their units, computation, and what contains others."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Set

from jshard.inspect.hlo.collectives import KINDS, OTHERS, base_opcode, group_of, unit_and_phase
from jshard.inspect.hlo.forms import Forms
from jshard.inspect.hlo.module import Computation, Instruction, Module, parse_module
from jshard.inspect.hlo.worker import Worker
from jshard.inspect.profile.events import Event

# Instructions that run others. Calls are recognised by events inside their time.
_CONTAINERS = ("while", "conditional")
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
    work: str = ""  # of one that computes: `products`, `attention` or `elementwise`; empty if it is not known
    place: int | None = None  # in the order of the program's outermost instructions, which run once; None for others


class Ops:
    """Identifies operations: by the text of their program if there is one, else by their names."""

    def __init__(self, text: str | None) -> None:
        self._ops_in_text: dict[str, Op] = {}
        self._identified: dict[tuple[str, str, str, bool], Op] = {}
        self.program: str | None = None
        if text is not None:
            header = re.match(r"\s*HloModule ([\w.\-]+)", text)
            self.program = header[1] if header else None
            self._ops_in_text = _Table(parse_module(text)).ops

    @property
    def has_text(self) -> bool:
        """Whether there is a text."""
        return bool(self._ops_in_text)

    @functools.cached_property
    def outermost(self) -> frozenset[str]:
        """Names of the operations outside loops and branches, as far as a text has them."""
        return frozenset(op.name for op in self._outermost_places)

    @functools.cached_property
    def _outermost_places(self) -> dict[Op, int]:
        return {op: op.place for op in self._ops_in_text.values() if op.place is not None}

    def of(self, event: Event) -> Op:
        """Returns the operation of an event."""
        key = (event.op, event.label, event.module, event.computes)  # all that `_identify` reads
        if key not in self._identified:
            self._identified[key] = self._identify(event)
        return self._identified[key]

    def _identify(self, event: Event) -> Op:
        in_text = self._in_text(event)
        nccl = _NCCL.match(event.label)
        is_known_collective = in_text is not None and bool(in_text.kind)
        if nccl and not is_known_collective:
            return Op(_shared_name(event.op), _NCCL_KINDS[nccl[1].lower()])
        op = in_text or _op_by_name(event.op)
        if not event.computes and not op.kind:
            return dataclasses.replace(op, contains=True)  # it has events inside: a call, or a loop of another program
        return op

    def _in_text(self, event: Event) -> Op | None:
        """Returns the operation of the text that an event names, unless the event is of another program."""
        # Each program has its own `fusion.1`.
        if event.module and self.program is not None and event.module != self.program:
            return None
        return self._ops_in_text.get(event.op) or self._ops_in_text.get(_shared_name(event.op))

    def not_in_text(self, events: Iterable[Event]) -> set[str]:
        """Returns the names of collectives that are missing from the program's text.

        They show that the text is of another compilation. Kernels of NCCL without an operation are named by their own
        label, which no text has.
        """
        if not self.has_text:
            return set()
        missing = set()
        for event in events:
            is_collective = event.module == self.program and bool(self.of(event).kind)
            if is_collective and not _NCCL.match(event.op) and _shared_name(event.op) not in self._ops_in_text:
                missing.add(event.op)
        return missing

    def lacks_an_end(self, seen: Set[str]) -> bool:
        """Returns whether an outermost collective comes before or after everything that was seen: it was cut off.

        Args:
            seen: names of operations.
        """
        seen_places = [place for op, place in self._outermost_places.items() if op.name in seen]
        if not seen_places:
            return False
        first = min(seen_places)
        last = max(seen_places)
        for op, place in self._outermost_places.items():
            is_outside = place < first or place > last
            if op.kind and is_outside:
                return True
        return False


class _Table:
    """The operations of a program by the names of their instructions."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._forms = Forms(module)
        self._worker = Worker(module)
        self._started: dict[str, Op] = {}  # asynchronous ones, by what their end names
        self.ops: dict[str, Op] = {}
        for computation in module.computations.values():
            is_outermost = computation.name == module.entry
            for i, instruction in enumerate(computation.instructions):
                place = i if is_outermost else None
                self.ops[instruction.name] = self._op(computation, instruction, place)
        # An event may also have the name that a start and an end share.
        for op in list(self.ops.values()):
            self.ops.setdefault(op.name, op)

    def _op(self, home: Computation, instruction: Instruction, place: int | None) -> Op:
        name = _shared_name(instruction.name)
        base = base_opcode(instruction.opcode)
        if instruction.opcode in _CONTAINERS:
            return Op(name, contains=True, place=place)
        if base in OTHERS:
            return Op(name, base, *unit_and_phase(instruction.op_name), place=place)
        role = self._forms.role(instruction)
        if role is None:
            return Op(name, work=self._worker.products(home, instruction).kind, place=place)
        if role.collective is None:  # an end
            source = home.source(home.operand(instruction, 0))
            source_name = source.name if source else ""
            started = self._started.get(role.key or source_name)
            return started or dataclasses.replace(_op_by_name(instruction.name), place=place)
        kind = role.kind
        if self._has_one_device(role.collective):
            kind = ""  # nothing is sent
        traced_name = instruction.op_name or role.collective.op_name
        op = Op(name, kind, *unit_and_phase(traced_name), place=place)
        self._started[role.key or instruction.name] = op
        return op

    def _has_one_device(self, collective: Instruction) -> bool:
        """Returns whether the groups of a collective have one device."""
        group = group_of(collective, base_opcode(collective.opcode), self._module.num_devices)
        return len(group) <= 1


def _op_by_name(name: str) -> Op:
    """Returns the operation that a name stands for, where there is no text."""
    dashed = name.replace("_", "-")
    collective = _COLLECTIVE.fullmatch(dashed)
    if collective:
        kind = collective[1]
        if kind == "all-reduce-scatter":  # one fused with the slice of its result
            kind = "reduce-scatter"
        return Op(_shared_name(name), kind)
    stem = re.sub(r"(\.\d+)+$", "", dashed)
    if stem in _JAX_NAMES:
        return Op(name, _JAX_NAMES[stem])
    return Op(_shared_name(name), contains=stem in _CONTAINERS)


def _shared_name(name: str) -> str:
    """Returns the name that start and end of an asynchronous operation share."""
    return re.sub(r"\.call-(start|done|update)$|-(start|done|update)(?=$|\.)", "", name)
