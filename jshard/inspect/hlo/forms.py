"""How compilers write a collective that runs beside the computation: its start, its end.

A collective may be an instruction, a pair of start and done, or be wrapped: in an asynchronous call, or in a fusion. A
TPU's fusions may print one collective three times: where it starts, where something computes beside it, where it ends.
"""

import dataclasses
import re
from collections.abc import Iterator

from jshard.inspect.hlo.collectives import KINDS, OTHERS, base_opcode, cannot, is_between_slices, kind_of, rendezvous
from jshard.inspect.hlo.module import Instruction, Module

# Asynchronous calls: `async-start` on a GPU, and `call-start` on a TPU, for its sparse cores.
_WRAPPED = ("async", "call")
# Instructions whose computations may hold a collective.
_PRINTING = frozenset(
    "fusion fusion-start call async-start async-update async-done call-start call-update call-done".split()
)
_MAX_DEPTH = 6  # of calls in calls


@dataclasses.dataclass(frozen=True)
class Role:
    """The role of an instruction in a collective."""

    stage: str  # `start`, `done`, or `blocking` for one that is start and end at once
    kind: str = ""  # one of `KINDS`; empty for a `done`
    collective: Instruction | None = None  # the instruction that has its shape and its group; None for a `done`
    key: str | None = None  # what start and end have in common, where they do not name each other


class Forms:
    """Finds the role of each instruction of a module in a collective."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def role(self, instruction: Instruction) -> Role | None:
        """Returns the role of an instruction; None if it only computes."""
        opcode = instruction.opcode
        base = base_opcode(opcode)
        if opcode.endswith("-update"):
            return None  # between start and end
        if base in ("send", "recv") and is_between_slices(instruction):
            return _role_between_slices(instruction)
        if base in OTHERS:
            raise cannot(instruction.text, f"{opcode} is not one of {', '.join(KINDS)}.")
        if base in KINDS:
            return self._plain(instruction, base, instruction)
        if opcode == "fusion":
            return self._fusion(instruction)
        if opcode.endswith("-start") and base in (*_WRAPPED, "fusion"):  # fusion-start: a GPU's, since jax 0.12
            wrapped = self._first_collective(instruction)
            if wrapped is None:
                return None  # a computation runs beside the others
            return self._plain(instruction, base_opcode(wrapped.opcode), wrapped)
        if opcode.endswith("-done") and base in _WRAPPED:
            return Role("done")
        return None

    def collectives(self, instruction: Instruction, depth: int = 0) -> list[Instruction]:
        """Returns the collectives that an instruction prints, through fusions and calls."""
        if base_opcode(instruction.opcode) in KINDS or instruction.opcode == "send":
            return [instruction]
        if depth >= _MAX_DEPTH or instruction.opcode not in _PRINTING:
            return []
        collectives = []
        for inner in self._inside(instruction):
            collectives += self.collectives(inner, depth + 1)
        return collectives

    def carries(self, instruction: Instruction) -> bool:
        """Returns whether it computes beside a collective that another fusion began, and prints that one again."""
        names = self._module.called(instruction)
        return instruction.opcode == "fusion" and any("async_collective_fusion" in name for name in names)

    def _plain(self, instruction: Instruction, kind: str, collective: Instruction) -> Role:
        if instruction.opcode.endswith("-done"):
            return Role("done")
        # A start that XLA:GPU has marked as synchronous is waited for at once, on the same stream.
        is_start = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
        stage = "start" if is_start else "blocking"
        return Role(stage, kind, collective)

    def _fusion(self, fusion: Instruction) -> Role | None:
        targets = self._custom_call_targets(fusion)
        collective = self._first_collective(fusion)
        if "AsyncCollectiveStart" in targets and collective is not None:
            return Role("start", base_opcode(collective.opcode), collective, _chain(fusion, collective))
        if "AsyncCollectiveDone" in targets:
            return Role("done", key=_chain(fusion, collective))
        # With products inside it is work beside a collective, which is counted where it begins.
        if collective is None or self.carries(fusion) or self._multiplies(fusion):
            return None
        # A TPU fuses an all-reduce with the slice of its result: that is a reduce-scatter.
        names = (fusion.name, *self._module.called(fusion))
        if any("scatter" in name for name in names):
            return Role("blocking", "reduce-scatter", collective)
        return Role("blocking", base_opcode(collective.opcode), collective)

    def _first_collective(self, instruction: Instruction) -> Instruction | None:
        return next(iter(self.collectives(instruction)), None)

    def _custom_call_targets(self, fusion: Instruction) -> set[str]:
        targets: set[str] = set()
        for inner in self._inside(fusion):
            if inner.opcode == "custom-call":
                targets.update(re.findall(r'custom_call_target="([^"]*)"', inner.attributes))
        return targets

    def _multiplies(self, fusion: Instruction) -> bool:
        return any(inner.opcode in ("dot", "convolution") for inner in self._inside(fusion))

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instructions of the computations that an instruction calls."""
        for computation in self._module.callees(instruction):
            yield from computation.instructions


def _role_between_slices(instruction: Instruction) -> Role | None:
    """Returns the role of a part of a collective between TPU slices: it lasts from its send to the end of its recv."""
    if instruction.opcode == "send":
        return Role("start", kind_of(instruction), instruction, rendezvous(instruction))
    return Role("done") if instruction.opcode == "recv-done" else None


def channel(collective: Instruction) -> str | None:
    """Returns the channel id of a collective, if it has one. Several collectives may share one."""
    match = re.search(r"channel_id=(\d+)", collective.attributes)
    return match[1] if match else None


def _chain(fusion: Instruction, collective: Instruction | None) -> str:
    """Returns what the fusions of a collective's start and end have in common: its chain, or most of their names."""
    if collective is not None:
        chain = re.search(r'chain_id="?(\d+)', collective.attributes)
        if chain:
            return f"chain {chain[1]}"
    common = re.sub("start|done", "", fusion.name)
    return f"chain {common}"
