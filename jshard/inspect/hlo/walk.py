"""Walks a compiled program in execution order, and records its collectives and the steps of a device.

The walk counts what is computed between the start of a collective and its end. These need not be in one round of a
loop: a collective may begin in one round and end in the next, or begin before the loop and end after it. So it has a
token, by which start and end find each other: the name of its start, or the place that it has in the loop's state.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh

from jshard._text import kernels_of
from jshard.inspect.hlo import Blocking, Compute, KernelUse, Loop, Schedule, Start, Step, Wait, Window
from jshard.inspect.hlo.collectives import (
    KINDS,
    asks_for_sum,
    axes_of_groups,
    base_opcode,
    cannot,
    group_of,
    is_between_slices,
    joined_arrays,
    kind_of,
    links_of,
    mixing_in,
    num_slices_of,
    rendezvous,
    results_of,
    sizes_of,
    unit_and_phase,
)
from jshard.inspect.hlo.forms import Forms, Role, channel
from jshard.inspect.hlo.module import (
    Computation,
    Instruction,
    Module,
    ProgramError,
    parse_module,
    trip_count,
    tuple_index,
)
from jshard.inspect.hlo.readers import Readers
from jshard.inspect.hlo.work import OpWork, added
from jshard.inspect.hlo.worker import CUDNN, MOSAIC, TPU_KERNEL, Worker

_ARRIVING = " state"  # in the tokens of what is under way when a round of a loop begins; no instruction's name has it


@dataclasses.dataclass(frozen=True)
class _PassedWork:
    """The computation that was passed on the way through a computation."""

    operations: int = 0  # instructions that compute
    matmuls: int = 0  # matrix products in these
    flops: float = 0.0  # floating-point operations of the products

    @classmethod
    def of(cls, operations: int, work: OpWork) -> "_PassedWork":
        return cls(operations, work.matmuls, work.total_flops)

    def __add__(self, other: "_PassedWork") -> "_PassedWork":
        return _PassedWork(self.operations + other.operations, self.matmuls + other.matmuls, self.flops + other.flops)

    def __sub__(self, other: "_PassedWork") -> "_PassedWork":
        return _PassedWork(self.operations - other.operations, self.matmuls - other.matmuls, self.flops - other.flops)


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """A collective that began and was not waited for."""

    window: int  # its index in `Walk.windows`
    passed_at_start: _PassedWork | None  # None if what runs beside it was counted where it began, in a loop


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Where a computation is run."""

    loop: str = ""  # name of the innermost loop around it
    executions: int = 1
    in_unknown_loop: bool = False  # a loop of unknown length is around it
    in_branch: bool = False


@dataclasses.dataclass
class _Body:
    """One computation while it is walked."""

    home: Computation
    scope: _Scope
    steps: list[Step] = dataclasses.field(default_factory=list)  # so far
    parts: list[OpWork] = dataclasses.field(default_factory=list)  # the work of each
    passed: _PassedWork = _PassedWork()  # the same, counted
    # By token. None if the end is to be ignored: of a collective that blocks, or that sends nothing.
    under_way: dict[str, _UnderWay | None] = dataclasses.field(default_factory=dict)
    # What was passed in a loop's body when it waited for a part of the loop's state.
    arrivals: dict[str, _PassedWork] = dataclasses.field(default_factory=dict)

    def append(self, other: "_Body") -> None:
        """Does what another computation does, in place."""
        self.steps += other.steps
        self.parts += other.parts
        self.passed = self.passed + other.passed

    def prepend(self, other: "_Body") -> None:
        """Does what another computation does, before everything else."""
        self.steps = [*other.steps, *self.steps]
        self.parts = [*other.parts, *self.parts]
        self.passed = other.passed + self.passed

    def tokens_in(self, state: Instruction | None) -> dict[int, str]:
        """Returns the tokens of the collectives under way in the parts of a tuple, by place."""
        tokens: dict[int, str] = {}
        if state is not None and state.opcode == "tuple":
            for place, operand in enumerate(self.home.operands(state)):
                token = self.token(operand)
                if token is not None:
                    tokens[place] = token
        return tokens

    def token(self, value: Instruction | None) -> str | None:
        """Returns the token of a collective in flight: its start, or a part of a loop's state or result."""
        source = self.home.source(value)
        if source is None:
            return None
        if source.opcode.endswith("-start"):
            return source.name
        if source.opcode == "recv":
            return rendezvous(source)
        if source.opcode != "get-tuple-element":
            return None
        whole = self.home.operand(source, 0)
        place = tuple_index(source)
        if whole is not None and whole.opcode == "parameter":
            return self.arriving(place)
        if whole is not None and whole.opcode == "while":
            return _leaving(whole, place)
        return None

    def arriving(self, place: int) -> str:
        """Returns the token of what is in flight in a part of the loop's state when a round begins."""
        return f"{self.home.name}{_ARRIVING}[{place}]"


def _leaving(loop: Instruction, place: int) -> str:
    """Returns the token of what is in flight in a part of a loop's result."""
    return f"{loop.name}[{place}]"


class Walk:
    """The walk through a module: `run` once, then read `windows` and `notes`."""

    def __init__(self, module: Module, mesh: Mesh | AbstractMesh | None) -> None:
        self.windows: list[Window] = []
        self.notes: list[str] = []
        self._module = module
        self._mesh = mesh
        self._forms = Forms(module)
        self._worker = Worker(module)
        self._readers = Readers(module)
        # To find collectives that the walk has missed.
        self._seen: set[str] = set()  # names of the collectives that were walked over
        self._channels: set[str | None] = set()  # theirs
        self._printed_again: list[Instruction] = []  # where something computes beside one of them

    def run(self) -> tuple[tuple[Step, ...], float]:
        """Returns the steps of the program and its floating-point operations."""
        body = self._walk(self._module.entry, _Scope())
        total = added(body.parts)
        for target in total.uncounted:
            self.notes.append(f"custom call {target}: its operations are unknown; only its memory traffic is counted")
        self._refuse_unseen()
        return tuple(body.steps), total.total_flops

    def _walk(self, name: str, scope: _Scope) -> _Body:
        """Walks through a computation."""
        body = _Body(self._module.computations[name], scope)
        for instruction in body.home.instructions:
            role = self._forms.role(instruction)
            if role is not None:
                self._note_seen(self._forms.collectives(instruction))
                self._visit_collective(body, instruction, role)
            # It has no role, since an asynchronous fusion may be computation alone, such as a copy from the host.
            elif instruction.opcode == "fusion-done" and self._ended_by(body, instruction) in body.under_way:
                self._end(body, instruction, self._ended_by(body, instruction))
            elif instruction.opcode == "while":
                self._visit_loop(body, instruction)
            elif instruction.opcode == "call":
                for called in self._module.called(instruction):
                    body.append(self._walk(called, scope))  # as if its instructions were here
            elif instruction.opcode == "conditional":
                self._visit_branches(body, instruction)
            else:
                self._visit_computation(body, instruction)
        return body

    def _visit_computation(self, body: _Body, instruction: Instruction) -> None:
        if self._forms.carries(instruction):
            self._printed_again += self._forms.collectives(instruction)
        work = self._worker.work(body.home, instruction)
        if not work.is_nothing:
            body.steps.append(Compute(instruction.name, work))
            body.parts.append(work)
            body.passed = body.passed + _PassedWork.of(1, work)

    # ---- collectives

    def _visit_collective(self, body: _Body, instruction: Instruction, role: Role) -> None:
        if role.collective is None:
            self._end(body, instruction, role.key or self._ended_by(body, instruction))
            return
        token = role.key or instruction.name
        group = group_of(role.collective, kind_of(role.collective), self._module.num_devices)
        if len(group) <= 1:
            body.under_way[token] = None  # nothing is sent; but its end is in the text, too
            return
        self.windows.append(self._window(body, instruction, role, role.collective, group))
        index = len(self.windows) - 1
        if role.stage == "start":
            body.steps.append(Start(index, token))
            body.under_way[token] = _UnderWay(index, body.passed)
        else:
            body.steps.append(Blocking(index))
            body.under_way[token] = None

    def _window(
        self, body: _Body, instruction: Instruction, role: Role, collective: Instruction, group: tuple[int, ...]
    ) -> Window:
        """Returns the record of a collective, before anything has run beside it."""
        sizes = sizes_of(collective, kind_of(collective), len(group))
        arrays = results_of(collective, kind_of(collective))
        if role.kind == "all-reduce":
            arrays = joined_arrays(self._module, body.home, instruction, arrays)
        traced_name = instruction.op_name or collective.op_name
        units, phase = unit_and_phase(traced_name)
        mixing, is_mixing = mixing_in(traced_name)
        return Window(
            name=instruction.name,
            kind=role.kind,
            sizes=tuple(sizes.items()),
            group=group,
            axes=None if self._mesh is None else axes_of_groups(group, self._mesh),
            units=units,
            read_by=() if units else self._readers.units(body.home, instruction),
            phase=phase,
            loop=body.scope.loop,
            executions=body.scope.executions,
            per_iteration=body.scope.in_unknown_loop,
            is_async=role.stage == "start",
            conditional=body.scope.in_branch,
            arrays=arrays,
            mixing=mixing,
            is_mixing=is_mixing,
            # Of several that it joins, the TPU compiler keeps one name, perhaps that of a bias alone.
            is_sum=len(arrays) == 1 and asks_for_sum(traced_name),
            links=links_of(collective),
        )

    def _ended_by(self, body: _Body, done: Instruction) -> str | None:
        """Returns the token that an end waits for; an asynchronous fusion may contain only computation."""
        return body.token(body.home.operand(done, 0))

    def _end(self, body: _Body, instruction: Instruction, token: str | None) -> None:
        """Visits the end of a collective."""
        if token is not None and _ARRIVING in token:
            # It began in the round before, or before the loop: which one is known when the loop is left.
            body.arrivals[token] = body.passed
            body.steps.append(Wait(token))
        elif token in body.under_way:
            under_way = body.under_way.pop(token)
            if under_way is not None:
                self._count_beside(under_way, body.passed)
                body.steps.append(Wait(token))
        elif base_opcode(instruction.opcode) in (*KINDS, "recv") or instruction.opcode == "fusion":
            raise cannot(instruction.text, "it ends a collective whose start was not found.")

    def _count_beside(self, under_way: _UnderWay, passed: _PassedWork) -> None:
        """Adds to a window what was passed since it began."""
        if under_way.passed_at_start is None:
            return
        window = self.windows[under_way.window]
        passed_beside = passed - under_way.passed_at_start
        self.windows[under_way.window] = dataclasses.replace(
            window,
            operations=window.operations + passed_beside.operations,
            matmuls=window.matmuls + passed_beside.matmuls,
            flops=window.flops + passed_beside.flops,
        )

    # ---- loops

    def _visit_loop(self, body: _Body, loop: Instruction) -> None:
        scope = body.scope
        count = trip_count(self._module, body.home, loop)
        is_unknown = count is None
        if count is None:
            count = 1
        num_windows = len(self.windows)
        in_loop = dataclasses.replace(scope, loop=loop.name, in_unknown_loop=scope.in_unknown_loop or is_unknown)
        # The condition runs once more than the body; of an unknown length one iteration of both is counted.
        num_conditions = 1 if is_unknown else count + 1
        condition = self._condition(loop, dataclasses.replace(in_loop, executions=scope.executions * num_conditions))
        in_loop = dataclasses.replace(in_loop, executions=scope.executions * count)
        inner = self._walk(loop.attribute("body") or "", in_loop)
        if condition is not None:
            inner.prepend(condition)
        if is_unknown:
            communicates = len(self.windows) > num_windows
            counted = "its collectives are counted once per iteration" if communicates else "counted once"
            self.notes.append(f"loop {loop.name}: the number of iterations is unknown; {counted}")
        self._add_loop(body, loop, inner, count)

    def _condition(self, loop: Instruction, scope: _Scope) -> _Body | None:
        """Walks through the condition of a loop; None if it only compares a counter."""
        name = loop.attribute("condition") or ""
        if name not in self._module.computations:
            return None
        num_windows = len(self.windows)
        condition = self._walk(name, scope)
        communicates = len(self.windows) > num_windows
        if communicates or condition.passed.matmuls:
            return condition
        return None

    def _add_loop(self, body: _Body, loop: Instruction, inner: _Body, count: int) -> None:
        """Adds a loop to the steps, with the collectives that are under way across its edges.

        Such a collective is a part of the loop's state: it enters from before the loop, or turns from one round to the
        next. Either way the loop waits for the same part, `arriving`, in the next round, and leaves it when it ends.
        """
        initial = body.home.source(body.home.operand(loop, 0))
        entering = _in_flight(body.tokens_in(initial), body)
        arriving = {inner.arriving(place) for place in entering}
        unknown = inner.arrivals.keys() - arriving
        if unknown:
            raise cannot(loop.text, f"it waits for {min(unknown)}, which has no collective in flight at its start.")
        turning = _in_flight(inner.tokens_in(inner.home.root), inner, passed_on=arriving)
        turns: list[tuple[str, str]] = []
        leaves: list[tuple[str, str]] = []
        for place, token in turning.items():
            self._turn(body, inner, token, inner.arriving(place), _leaving(loop, place))
            turns.append((token, inner.arriving(place)))
            leaves.append((inner.arriving(place), _leaving(loop, place)))
        enters: list[tuple[str, str]] = []
        for place, token in entering.items():
            self._enter(body, inner, token, inner.arriving(place), _leaving(loop, place))
            enters.append((token, inner.arriving(place)))
        step = Loop(loop.name, count, tuple(inner.steps), tuple(enters), tuple(turns), tuple(leaves))
        # A collective outside of the loop that runs beside it runs beside all of its rounds.
        work = added(inner.parts).times(count)
        body.steps.append(step)
        body.parts.append(work)
        body.passed = body.passed + _PassedWork.of(inner.passed.operations * count, work)

    def _turn(self, body: _Body, inner: _Body, token: str, arriving: str, leaving: str) -> None:
        """Visits a collective that begins in one round and is waited for in the next, or after the last."""
        under_way = inner.under_way.pop(token, None)
        if under_way is not None:
            # From its start to the end of the round, and from the begin of the next one to the wait.
            self._count_beside(under_way, inner.passed + inner.arrivals.get(arriving, _PassedWork()))
            body.under_way[leaving] = _UnderWay(under_way.window, passed_at_start=None)

    def _enter(self, body: _Body, inner: _Body, token: str, arriving: str, leaving: str) -> None:
        """Visits a collective that begins before the loop and is waited for in its first round, or after the loop."""
        under_way = body.under_way.pop(token)
        if under_way is not None and arriving in inner.arrivals:
            self._count_beside(under_way, body.passed + inner.arrivals[arriving])
        else:
            body.under_way[leaving] = under_way

    # ---- branches

    def _visit_branches(self, body: _Body, conditional: Instruction) -> None:
        """Takes the branch with the most work, as it is unknown which one runs; of those that are alike the first."""
        scope = dataclasses.replace(body.scope, in_branch=True)
        first_window = len(self.windows)
        branches = []
        of_branches = []
        for name in self._module.called(conditional):
            num_windows = len(self.windows)
            branches.append(self._walk(name, scope))
            of_branches.append(self.windows[num_windows:])
        if not branches:
            return
        if len(self.windows) == first_window or not _are_alike(branches, of_branches):
            body.append(max(branches, key=_amount_of_work))
            return
        # Whichever runs, it sends this once. A place on pipeline stages has a branch for each of two rounds.
        sent = [dataclasses.replace(window, conditional=body.scope.in_branch) for window in of_branches[0]]
        self.windows[first_window:] = sent
        body.append(branches[0])

    # ---- what the walk has missed

    def _note_seen(self, printed: Iterable[Instruction]) -> None:
        for collective in printed:
            self._seen.add(collective.name)
            self._channels.add(channel(collective))

    def _refuse_unseen(self) -> None:
        """Raises unless every collective was visited: an unknown form would look like no communication."""
        seen = set(self._seen)
        for collective in self._printed_again:
            # Of the one that it repeats it has the channel, under another name.
            if channel(collective) in self._channels:
                seen.add(collective.name)
        missed = []
        for computation in self._module.computations.values():
            for instruction in computation.instructions:
                is_collective = base_opcode(instruction.opcode) in KINDS or instruction.opcode == "send"
                if is_collective and instruction.name not in seen:
                    missed.append(instruction.text)
        if missed:
            raise cannot(missed[0], f"it is one of {len(missed)} in a form that the walk through the schedule missed.")


def _in_flight(tokens: dict[int, str], body: _Body, passed_on: Collection[str] = ()) -> dict[int, str]:
    """Returns those tokens whose collectives began in a computation, or are passed on by it."""
    chosen = {}
    for place, token in tokens.items():
        if body.under_way.get(token) is not None or token in passed_on:
            chosen[place] = token
    return chosen


def _are_alike(branches: Sequence[_Body], of_branches: Sequence[Sequence[Window]]) -> bool:
    """Returns whether the branches of a conditional multiply and send the same."""
    forms = set()
    for branch, windows in zip(branches, of_branches, strict=True):
        sent = tuple((window.kind, window.sizes, window.group, window.executions) for window in windows)
        forms.add((branch.passed.matmuls, branch.passed.flops, sent))
    return len(branches) > 1 and len(forms) == 1


def _amount_of_work(branch: _Body) -> tuple[float, float]:
    return branch.passed.flops, added(branch.parts).memory_bytes


# ---- reading a program


CompiledProgram: TypeAlias = Any
"""A compiled program: a `jax.stages.Compiled` or another object with `as_text()`, or its text."""


def _text_of(program: CompiledProgram) -> str:
    """Returns the text of a program; raises for what is none."""
    if isinstance(program, str):
        return program
    if not callable(getattr(program, "as_text", None)):
        raise ProgramError(
            "This is not a compiled program.",
            where=f"a {type(program).__name__}",
            why="it has no text; a function has to be compiled for its arguments first.",
            do="jax.jit(step).lower(state, batch).compile()",
        )
    return program.as_text()


def collectives(program: CompiledProgram, *, mesh: Mesh | AbstractMesh | None = None) -> tuple[Window, ...]:
    """Returns the collectives of a program, a `jax.stages.Compiled` or its text; their axes are those of a mesh.

    Those in loops count with their trip counts, in a loop of unknown length once per iteration; groups of one device
    send nothing.

    Raises:
        ProgramError: communication that cannot be counted: an unknown kind or dtype.
    """
    walk = Walk(parse_module(_text_of(program)), mesh)
    walk.run()
    return tuple(walk.windows)


_KERNEL_TARGETS = tuple(f'custom_call_target="{target}' for target in (MOSAIC, CUDNN, TPU_KERNEL))


def kernels_in(module: Module) -> tuple[KernelUse, ...]:
    """Returns the kernels of `jshard.kernels` in a program, by name."""
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            is_call = any(target in instruction.attributes for target in _KERNEL_TARGETS)
            for name_and_form in set(kernels_of(instruction.op_name)):
                calls[name_and_form] += is_call  # plain XLA counts as no call, and is listed with 0
    return tuple(KernelUse(name, form, count) for (name, form), count in sorted(calls.items()))


def read_schedule(
    program: CompiledProgram, *, mesh: Mesh | AbstractMesh | None = None, expect_collectives: bool = False
) -> Schedule:
    """Reads the schedule of a program for GPU, TPU or CPU, a `jax.stages.Compiled` or its text.

    With `expect_collectives` a program of several devices without any is an error, because overlooked communication
    would look like hidden communication.

    Raises:
        ProgramError: the text has no schedule, or it holds communication that is not understood.
    """
    module = parse_module(_text_of(program))
    if not module.is_scheduled:
        raise ProgramError(
            "The program has no schedule.",
            where=f"computation {module.entry}",
            why="its text lacks is_scheduled=true, so its order is not the order of execution.",
            do="js.audit(jax.jit(step).lower(...).compile())  # pass the result of compile()",
        )
    num_slices = _num_slices(module)
    num_devices = module.num_devices * num_slices
    if mesh is not None:
        _check_size(mesh, num_devices)
    walk = Walk(module, mesh)
    steps, flops = walk.run()
    if expect_collectives and num_devices > 1 and not walk.windows:
        raise ProgramError(
            "A program of several devices without a single collective.",
            where=f"computation {module.entry}, {num_devices} devices",
            why="no communication would look like fully hidden communication.",
            do="print(js.explain(model))  # shows whether the arrays are sharded at all",
        )
    return Schedule(
        tuple(walk.windows),
        steps,
        num_devices,
        flops,
        tuple(walk.notes),
        kernels=kernels_in(module),
        num_slices=num_slices,
    )


def _num_slices(module: Module) -> int:
    """Returns the number of TPU slices that run a program: those that its collectives join."""
    num_slices = 1
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "send" and is_between_slices(instruction):
                num_slices = max(num_slices, num_slices_of(instruction))
    return num_slices


def _check_size(mesh: Mesh | AbstractMesh, num_devices: int) -> None:
    """Raises unless a program runs on as many devices as a mesh has."""
    mesh_size = math.prod(mesh.axis_sizes)
    if num_devices != mesh_size:
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise ProgramError(
            "The program was not compiled for this mesh.",
            where=f"mesh ({sizes})",
            why=f"the program runs on {num_devices} devices, the mesh has {mesh_size}.",
            do="pass the mesh or the model that the program was compiled with.",
        )
