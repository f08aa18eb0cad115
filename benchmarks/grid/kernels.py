"""The operations of two compiled programs by their time, side by side: where one takes longer than the other.

    python -m benchmarks.run grid --only '*124M h100:1x8*' --programs programs
    python -m benchmarks.grid.kernels h100:1x8 programs/OURS.hlo.gz programs/THEIRS.hlo.gz

The times are those of the plan's estimate, each operation alone, with all rounds of its loops. Operations are equal if
they have the same kind and the same results: the numbers at the ends of names are left out.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.tables import markdown_table
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.replay import Replay
from jshard.cluster.topology import parse_topology
from jshard.inspect.hlo import Compute, Loop, Schedule, Step
from jshard.inspect.hlo.module import Instruction, Module, parse_module
from jshard.inspect.hlo.walk import read_schedule

_SHOWN = 25
_LEAST_MS = 0.05  # of a difference
_NUMBER = re.compile(r"(\.\d+|\.clone|\.remat\d*|\.double_buffer_clone)+$")
_LAYOUT = re.compile(r"\{[^{}]*\}")
# The sort of an operation is the first of these words in its name. A fusion's name has those of its main operations.
_SORTS = ("product", "attention", "transpose", "copy", "dynamic_update_slice", "dynamic_slice", "scatter", "convert")
_OTHERS = "others"


@dataclasses.dataclass
class Kernels:
    """Equal operations of a program."""

    executions: int = 0
    seconds: float = 0.0
    memory_bytes: float = 0.0
    flops: float = 0.0
    example: str = ""  # name of one of them
    origin: str = ""  # of it, in the traced program


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, as it takes its time."""

    kernels: Mapping[str, Kernels]  # by kind and results
    exposed: Mapping[str, float]  # seconds that the device waits, by collective, unit and loop

    def of(self, name: str) -> Kernels:
        """Returns the operations of a kind; none if it has none."""
        return self.kernels.get(name, Kernels())


def program_of(path: Path, topology: str) -> Program:
    """Reads the text of a compiled program, compressed by gzip."""
    text = gzip.decompress(path.read_bytes()).decode()
    assumptions = PlannedCluster(parse_topology(topology)).assumptions
    schedule = read_schedule(text)
    return Program(_kernels(parse_module(text), schedule, assumptions), _exposed(schedule, assumptions))


def _kernels(module: Module, schedule: Schedule, assumptions: Assumptions) -> dict[str, Kernels]:
    instructions = {}
    for computation in module.computations.values():
        instructions.update(computation.by_name)
    kernels: dict[str, Kernels] = collections.defaultdict(Kernels)
    for step, rounds in _computing(schedule.steps, 1):
        instruction = instructions[step.name]
        kind = kernels[_kind(instruction, step)]
        kind.executions += rounds
        kind.seconds += rounds * assumptions.compute_s(step.work)
        kind.memory_bytes += rounds * step.work.memory_bytes
        kind.flops += rounds * step.work.total_flops
        kind.example = kind.example or step.name
        kind.origin = kind.origin or instruction.op_name
    return kernels


def _computing(steps: Sequence[Step], rounds: int) -> Iterator[tuple[Compute, int]]:
    """Yields what computes, and how often it does."""
    for step in steps:
        if isinstance(step, Compute):
            yield step, rounds
        elif isinstance(step, Loop):
            yield from _computing(step.steps, rounds * step.rounds)


def _kind(instruction: Instruction, step: Compute) -> str:
    """Returns what equal operations share."""
    name = "product" if step.work.products else _NUMBER.sub("", instruction.name)
    if any(product.is_attention for product in step.work.products):
        name = "attention"
    shape = _LAYOUT.sub("", instruction.shape)
    return f"{name} {shape}"


def _exposed(schedule: Schedule, assumptions: Assumptions) -> dict[str, float]:
    seconds: dict[str, float] = collections.defaultdict(float)
    for window, exposed_s in zip(schedule.windows, Replay(schedule, assumptions).exposed_s, strict=True):
        place = f"in {window.loop}" if window.loop else "outside loops"
        arrays = ", ".join(f"{array.dtype}{list(array.dims)}" for array in window.arrays[:2])
        seconds[f"{window.kind} {window.dtype} {window.unit or '-'} {window.phase or ''} {place} ({arrays})"] += (
            exposed_s
        )
    return seconds


# ---- side by side


def main() -> None:
    """Reads the command line, and prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grid.kernels", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("topology", help="the cluster, as h100:8x8")
    parser.add_argument("ours", type=Path, help="a program")
    parser.add_argument("theirs", type=Path, help="the one to compare it with")
    parser.add_argument("--shown", type=int, default=_SHOWN, metavar="N", help="rows of a table")
    args = parser.parse_args()
    ours, theirs = program_of(args.ours, args.topology), program_of(args.theirs, args.topology)
    print("\n".join(side_by_side(ours, theirs, shown=args.shown)))


def side_by_side(ours: Program, theirs: Program, *, shown: int = _SHOWN) -> list[str]:
    """Returns tables of the operations and of the waits that differ most, the largest difference first."""
    sorts = markdown_table(["sort of operations", "ms", "of the other, ms", "difference"], _by_sort(ours, theirs))
    head = ["operation", "an example", "times", "ms", "GB", "of the other: times", "ms", "GB", "difference, ms"]
    operations = markdown_table(head, _by_operation(ours, theirs)[:shown], num_words=2)
    waits = markdown_table(["waits for", "ms", "of the other, ms"], _by_wait(ours, theirs)[:shown])
    return [*sorts, "", *operations, "", *waits]


def _by_operation(ours: Program, theirs: Program) -> list[list[str]]:
    differences = {}
    for name in dict.fromkeys((*ours.kernels, *theirs.kernels)):
        differences[name] = ours.of(name).seconds - theirs.of(name).seconds
    largest = sorted(differences, key=lambda name: -abs(differences[name]))
    shown = [name for name in largest if abs(differences[name]) * 1e3 >= _LEAST_MS]
    return [_cells(name, ours.of(name), theirs.of(name)) for name in shown]


def _by_wait(ours: Program, theirs: Program) -> list[list[str]]:
    waits_ms = {}
    for name in dict.fromkeys((*ours.exposed, *theirs.exposed)):
        waits_ms[name] = (1e3 * ours.exposed.get(name, 0.0), 1e3 * theirs.exposed.get(name, 0.0))
    longest = sorted(waits_ms, key=lambda name: -max(waits_ms[name]))
    shown = [name for name in longest if max(waits_ms[name]) >= _LEAST_MS]
    return [[name, *(f"{wait_ms:.2f}" for wait_ms in waits_ms[name])] for name in shown]


def _by_sort(ours: Program, theirs: Program) -> Iterator[list[str]]:
    for sort in (*_SORTS, _OTHERS):
        mine, other = (1e3 * _seconds_of(sort, program) for program in (ours, theirs))
        yield [sort, f"{mine:.2f}", f"{other:.2f}", f"{mine - other:+.2f}"]


def _seconds_of(sort: str, program: Program) -> float:
    return sum(kernels.seconds for name, kernels in program.kernels.items() if _sort(name) == sort)


def _sort(kind: str) -> str:
    name, _, _ = kind.partition(" ")
    return next((sort for sort in _SORTS if sort in name), _OTHERS)


def _cells(name: str, ours: Kernels, theirs: Kernels) -> list[str]:
    shown = ours if ours.executions else theirs
    difference_ms = (ours.seconds - theirs.seconds) * 1e3
    return [name, f"{shown.example} {shown.origin[-80:]}", *_figures(ours), *_figures(theirs), f"{difference_ms:+.2f}"]


def _figures(kernels: Kernels) -> list[str]:
    return [str(kernels.executions), f"{kernels.seconds * 1e3:.2f}", f"{kernels.memory_bytes / 1e9:.2f}"]


if __name__ == "__main__":
    main()
