"""Walks a compiled program in execution order, and records its collectives and the steps of a device."""

import collections
import dataclasses
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jshard._text import kernels_of
from jshard.inspect.hlo import Blocking, Compute, KernelUse, Loop, Schedule, Start, Step, Wait, Window
from jshard.inspect.hlo.collectives import (
    KINDS,
    Forms,
    Readers,
    Role,
    axes_of_groups,
    base_opcode,
    cannot,
    channel,
    group_of,
    mixing_in,
    results_of,
    sizes_of,
    unit_and_phase,
)
from jshard.inspect.hlo.module import (
    Computation,
    Instruction,
    Module,
    ProgramError,
    parse_module,
    trip_count,
    tuple_index,
)
from jshard.inspect.hlo.work import CUDNN, MOSAIC, TPU_KERNEL, OpWork, Worker, added

_ARRIVING = " state"


# Work that was passed on the way: operations, matmuls, flops.
_Passed = collections.Counter[str]

# The place in `Walk.windows` of a collective under way, and what had been passed at its start; None: noted already.
_UnderWay = tuple[int, _Passed | None]


@dataclasses.dataclass
class _Body:
    """One computation while it is walked."""

    home: Computation  # the computation
    steps: list[Step] = dataclasses.field(default_factory=list)  # so far
    parts: list[OpWork] = dataclasses.field(default_factory=list)  # the work of each
    passed: _Passed = dataclasses.field(default_factory=collections.Counter)  # the same, counted
    # By token, the collectives that began and were not waited for; None if the end is to be ignored.
    under_way: dict[str, _UnderWay | None] = dataclasses.field(default_factory=dict)
    # What was passed in a loop's body when it waited for a part of the loop's state.
    arrivals: dict[str, _Passed] = dataclasses.field(default_factory=dict)

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

    def state(self, whole: Instruction | None) -> dict[int, str]:
        """Tokens of the collectives under way in the parts of a tuple, by place."""
        if whole is None or whole.opcode != "tuple":
            return {}
        tokens = ((place, self.token(self.home.by_name.get(name))) for place, name in enumerate(whole.operands))
        return {place: token for place, token in tokens if token is not None}

    def token(self, value: Instruction | None) -> str | None:
        """The token of a collective in flight: its start, or a part of a loop's state or result."""
        source = self.home.source(value)
        if source is None:
            return None
        if source.opcode != "get-tuple-element":
            return source.name if source.opcode.endswith("-start") else None
        whole, place = self.home.operand(source, 0), tuple_index(source)
        if whole is None or whole.opcode not in ("parameter", "while"):
            return None
        return self.arriving(place) if whole.opcode == "parameter" else f"{whole.name}[{place}]"

    def arriving(self, place: int) -> str:
        """Token of the collective in flight in a part of the loop's state when a round begins."""
        return f"{self.home.name}{_ARRIVING}[{place}]"


class Walk:
    """The walk through a module: `run` once, then read `windows` and `notes`."""

    def __init__(self, module: Module, mesh: Mesh | AbstractMesh | None) -> None:
        self._module, self._mesh = module, mesh
        self._forms, self._worker, self._readers = Forms(module), Worker(module), Readers(module)
        self._seen: set[str] = set()  # names of the collectives that were walked over
        self._channels: set[str | None] = set()  # theirs
        self._again: list[Instruction] = []  # printed again where something computes beside one of them
        self._loop, self._executions, self._in_branch = "", 1, False
        self._in_unknown_loop = False
        self.windows: list[Window] = []
        self.notes: list[str] = []

    def run(self) -> tuple[tuple[Step, ...], float]:
        """The steps of the program and its floating-point operations."""
        body = self._walk(self._module.entry)
        total = added(body.parts)
        for target in total.uncounted:
            self.notes.append(f"custom call {target}: its operations are unknown; only its memory traffic is counted")
        self._refuse_unseen()
        return tuple(body.steps), total.total_flops

    def _walk(self, name: str) -> _Body:
        body = _Body(self._module.computations[name])
        for instruction in body.home.instructions:
            role = self._forms.role(instruction)
            if role is not None:
                printed = self._forms.collectives(instruction)
                self._seen.update(c.name for c in printed)
                self._channels.update(map(channel, printed))
                self._collective(body, instruction, role)
            elif instruction.opcode == "fusion-done" and self._ended_by(body, instruction) in body.under_way:
                self._end(body, instruction, self._ended_by(body, instruction))
            elif instruction.opcode == "while":
                self._loop_step(body, instruction)
            elif instruction.opcode == "call":
                for called in self._module.called(instruction):
                    body.append(self._walk(called))
            elif instruction.opcode == "conditional":
                self._branches(body, instruction)
            else:
                self._compute(body, instruction)
        return body

    def _compute(self, body: _Body, instruction: Instruction) -> None:
        if self._forms.carries(instruction):
            self._again += self._forms.collectives(instruction)
        work = self._worker.work(body.home, instruction)
        if not work.is_nothing:
            body.steps.append(Compute(instruction.name, work))
            body.parts.append(work)
            body.passed = body.passed + _passed(1, work)

    def _collective(self, body: _Body, instruction: Instruction, role: Role) -> None:
        if role.collective is None:
            self._end(body, instruction, role.key or self._ended_by(body, instruction))
            return
        token = role.key or instruction.name
        group = group_of(role.collective, base_opcode(role.collective.opcode), self._module.num_devices)
        if len(group) <= 1:
            body.under_way[token] = None
            return
        self.windows.append(self._window(body.home, instruction, role, group))
        place = len(self.windows) - 1
        if role.stage == "start":
            body.steps.append(Start(place, token))
            body.under_way[token] = place, body.passed
        else:
            body.steps.append(Blocking(place))
            body.under_way[token] = None

    def _window(self, home: Computation, instruction: Instruction, role: Role, group: tuple[int, ...]) -> Window:
        collective = role.collective
        assert collective is not None
        sizes = sizes_of(collective, base_opcode(collective.opcode), len(group))
        traced = instruction.op_name or collective.op_name
        (units, phase), (mixing, is_mixing) = unit_and_phase(traced), mixing_in(traced)
        return Window(
            name=instruction.name,
            kind=role.kind,
            sizes=tuple(sizes.items()),
            group=group,
            axes=None if self._mesh is None else axes_of_groups(group, self._mesh),
            units=units,
            read_by=() if units else self._readers.units(home, instruction),
            phase=phase,
            loop=self._loop,
            executions=self._executions,
            per_iteration=self._in_unknown_loop,
            is_async=role.stage == "start",
            conditional=self._in_branch,
            arrays=results_of(collective, base_opcode(collective.opcode)),
            mixing=mixing,
            is_mixing=is_mixing,
        )

    def _ended_by(self, body: _Body, done: Instruction) -> str | None:
        """The token that an end waits for; an asynchronous fusion may contain only computation."""
        return body.token(body.home.operand(done, 0))

    def _end(self, body: _Body, instruction: Instruction, token: str | None) -> None:
        if token is not None and _ARRIVING in token:
            body.arrivals[token] = body.passed
            body.steps.append(Wait(token))
        elif token in body.under_way:
            found = body.under_way.pop(token)
            if found is not None:
                self._between(found, body.passed)
                body.steps.append(Wait(token))
        elif base_opcode(instruction.opcode) in KINDS or instruction.opcode == "fusion":
            raise cannot(instruction.text, "it ends a collective whose start was not found.")

    def _between(self, under_way: _UnderWay, passed: _Passed) -> None:
        """Adds to a window what was passed since it began."""
        place, begin = under_way
        if begin is None:
            return
        window, more = self.windows[place], passed - begin
        sums = {name: getattr(window, name) + count for name, count in more.items()}
        self.windows[place] = dataclasses.replace(window, **sums)

    def _loop_step(self, body: _Body, loop: Instruction) -> None:
        count = trip_count(self._module, body.home, loop)
        num_windows = len(self.windows)
        around = self._loop, self._executions, self._in_unknown_loop
        self._loop, self._in_unknown_loop = loop.name, self._in_unknown_loop or count is None
        condition = self._condition(loop, around[1] * (1 if count is None else count + 1))
        self._executions = around[1] * (1 if count is None else count)
        inner = self._walk(loop.attribute("body") or "")
        self._loop, self._executions, self._in_unknown_loop = around
        if condition is not None:
            inner.prepend(condition)
        if count is None:
            communicates = len(self.windows) > num_windows
            what = "its collectives are counted once per iteration" if communicates else "counted once"
            self.notes.append(f"loop {loop.name}: the number of iterations is unknown; {what}")
        self._carry(body, loop, inner, 1 if count is None else count)

    def _condition(self, loop: Instruction, executions: int) -> _Body | None:
        """Walks the condition of a loop, which runs once more than the body; None if it only compares a counter."""
        name, self._executions = loop.attribute("condition") or "", executions
        if name not in self._module.computations:
            return None
        num_windows = len(self.windows)
        condition = self._walk(name)
        communicates = len(self.windows) > num_windows
        return condition if communicates or condition.passed["matmuls"] else None

    def _carry(self, body: _Body, loop: Instruction, inner: _Body, count: int) -> None:
        """Writes the loop down, with the collectives that are under way across its edges."""
        entering = body.state(body.home.source(body.home.operand(loop, 0)))
        enters = {p: t for p, t in entering.items() if body.under_way.get(t) is not None}
        passing = {inner.arriving(p) for p in enters}
        unknown = inner.arrivals.keys() - passing
        if unknown:
            raise cannot(loop.text, f"it waits for {min(unknown)}, which has no collective in flight at its start.")
        turning = inner.state(inner.home.root)
        turns = {p: t for p, t in turning.items() if inner.under_way.get(t) is not None or t in passing}
        leaves = {p: f"{loop.name}[{p}]" for p in turns}
        for place, token in turns.items():
            self._turn(body, inner, token, inner.arriving(place), leaves[place])
        for place, token in enters.items():
            self._enter(body, inner, token, inner.arriving(place), f"{loop.name}[{place}]")
        step = Loop(
            loop.name,
            count,
            tuple(inner.steps),
            enters=tuple((t, inner.arriving(p)) for p, t in enters.items()),
            turns=tuple((t, inner.arriving(p)) for p, t in turns.items()),
            leaves=tuple((inner.arriving(p), t) for p, t in leaves.items()),
        )
        work = added(inner.parts).times(count)
        body.steps.append(step)
        body.parts.append(work)
        body.passed = body.passed + _passed(inner.passed["operations"] * count, work)

    def _turn(self, body: _Body, inner: _Body, token: str, arriving: str, leaving: str) -> None:
        """A collective that begins in one round and is waited for in the next, or after the last."""
        found = inner.under_way.pop(token, None)
        if found is not None:
            self._between(found, inner.passed + inner.arrivals.get(arriving, collections.Counter()))
            body.under_way[leaving] = found[0], None

    def _enter(self, body: _Body, inner: _Body, token: str, arriving: str, leaving: str) -> None:
        """A collective that begins before the loop and is waited for in its first round, or after the loop."""
        found = body.under_way.pop(token)
        if found is not None and arriving in inner.arrivals:
            self._between(found, body.passed + inner.arrivals[arriving])
        else:
            body.under_way[leaving] = found

    def _branches(self, body: _Body, conditional: Instruction) -> None:
        """Takes the branch with the most work, because it is unknown which one runs."""
        outside, self._in_branch = self._in_branch, True
        branches = [self._walk(name) for name in self._module.called(conditional)]
        self._in_branch = outside
        if branches:
            body.append(max(branches, key=lambda b: (b.passed["flops"], added(b.parts).memory_bytes)))

    def _refuse_unseen(self) -> None:
        """Raises unless every collective was visited: an unknown form would look like no communication."""
        seen = self._seen | {c.name for c in self._again if channel(c) in self._channels}
        missed = [
            instruction.text
            for computation in self._module.computations.values()
            for instruction in computation.instructions
            if base_opcode(instruction.opcode) in KINDS and instruction.name not in seen
        ]
        if missed:
            raise cannot(missed[0], f"it is one of {len(missed)} in a form that the walk through the schedule missed.")


def _passed(operations: int, work: OpWork) -> _Passed:
    return collections.Counter(operations=operations, matmuls=work.matmuls, flops=work.total_flops)  # type: ignore[arg-type]


def _text_of(program: Any) -> str:
    """The text of a program; an error for what is none."""
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


def collectives(program: Any, *, mesh: Mesh | AbstractMesh | None = None) -> tuple[Window, ...]:
    """The collectives of a program, a `jax.stages.Compiled` or its text; their axes are those of a mesh.

    Those in loops count with their trip counts, in a loop of unknown length once per iteration; groups of one device
    send nothing.

    Raises:
        ProgramError: communication that cannot be counted: an unknown kind or dtype.
    """
    walk = Walk(parse_module(_text_of(program)), mesh)
    walk.run()
    return tuple(walk.windows)


_KERNELS = MOSAIC, CUDNN, TPU_KERNEL


def kernels_in(module: Module) -> tuple[KernelUse, ...]:
    """The kernels of a program, by name."""
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for found in set(kernels_of(instruction.op_name)):
                calls[found] += any(f'custom_call_target="{name}' in instruction.attributes for name in _KERNELS)
    return tuple(KernelUse(*found, count) for found, count in sorted(calls.items()))


def read_schedule(
    program: Any, *, mesh: Mesh | AbstractMesh | None = None, expect_collectives: bool = False
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
    if mesh is not None and math.prod(mesh.axis_sizes) != module.num_devices:
        sizes = ", ".join(f"{a}={n}" for a, n in zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        raise ProgramError(
            "The program was not compiled for this mesh.",
            where=f"mesh ({sizes})",
            why=f"the program runs on {module.num_devices} devices, the mesh has {math.prod(mesh.axis_sizes)}.",
            do="pass the mesh or the model that the program was compiled with.",
        )
    walk = Walk(module, mesh)
    steps, flops = walk.run()
    if expect_collectives and module.num_devices > 1 and not walk.windows:
        raise ProgramError(
            "A program of several devices without a single collective.",
            where=f"computation {module.entry}, {module.num_devices} devices",
            why="no communication would look like fully hidden communication.",
            do="print(js.explain(model))  # shows whether the arrays are sharded at all",
        )
    return Schedule(
        tuple(walk.windows), steps, module.num_devices, flops, tuple(walk.notes), kernels=kernels_in(module)
    )
