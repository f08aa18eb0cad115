"""The most bytes that the values of a traced program take at once, on one device."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

from jshard.inspect.traced_program import FUSED, KERNEL, LOOP, READ, WINDOW, TracedOp, TracedProgram, TracedValue


@dataclasses.dataclass(frozen=True)
class LiveBytes:
    """The most bytes at one time, beside parameters, their copies and their gradients.

    Attributes:
        in_layers: while a layer computes, with what all layers have saved until then; 0 without layers.
        outside: at any other time, such as at the head.
    """

    in_layers: float
    outside: float


def live_bytes(program: TracedProgram, *, num_outer: int = 0) -> LiveBytes:
    """Returns the most that the stored values of a program take at once.

    Args:
        program: the operations.
        num_outer: how many of its inputs are counted where it is called.
    """
    last_use = _last_uses(program)
    for value in program.inputs[:num_outer]:
        last_use.pop(value, None)
    ending: dict[int, list[TracedValue]] = collections.defaultdict(list)
    now = 0.0
    for value in program.inputs[num_outer:]:
        if value in last_use:
            ending[last_use[value]].append(value)
            now += value.bytes
    in_layers = 0.0
    outside = now
    for number, op in enumerate(program.ops):
        stored = [result for result in op.results if result in last_use]
        ended = ending.pop(number, [])
        here = now + _total(stored) - min(_total(stored), _total(_reusable(op, ended)))
        inner = _in_bodies(op)
        if op.in_layer or inner.in_layers:
            in_layers = max(in_layers, here + max(inner.in_layers, inner.outside))
        else:
            outside = max(outside, here + inner.outside)
        for result in stored:
            ending[last_use[result]].append(result)
        now += _total(stored) - _total(ended)
    return LiveBytes(in_layers, outside)


def _in_bodies(op: TracedOp) -> LiveBytes:
    """Returns what a round of a loop takes beside the loop's operands and results."""
    in_layers = 0.0
    outside = 0.0
    for body in op.bodies:
        num_outer = op.num_consts + op.num_carry if op.name == "scan" else len(body.inputs)
        live = live_bytes(body, num_outer=num_outer)
        in_layers = max(in_layers, live.in_layers)
        outside = max(outside, live.outside)
    return LiveBytes(in_layers, outside)


def _last_uses(program: TracedProgram) -> dict[TracedValue, int]:
    """Returns where each stored value is used last: the number of an operation, or that of all of them."""
    last_use: dict[TracedValue, int] = {}
    for number, op in enumerate(program.ops):
        is_fused = op.kind in (FUSED, WINDOW) and not op.is_stored
        if op.kind == READ or is_fused:
            continue
        for value in _counted((*op.operands, *op.results)):
            last_use[value] = number
    for value in _counted(program.outputs):
        last_use[value] = len(program.ops)
    return last_use


def _counted(values: Iterable[TracedValue]) -> Iterator[TracedValue]:
    """Yields the stored values that some values are, or are computed from."""
    for value in values:
        for source in value.stored:
            if not source.is_free:
                yield source


def _reusable(op: TracedOp, ended: list[TracedValue]) -> list[TracedValue]:
    """Returns the values that end with an operation, and whose memory its results may take."""
    if op.kind == KERNEL:
        return []
    if op.kind == LOOP:
        carries = op.operands[op.num_consts : op.num_consts + op.num_carry]
        return [value for value in ended if value in carries]
    return ended


def _total(values: list[TracedValue]) -> float:
    # Rounded once: a set has another order in each run, and the numbers of a search are to be the same.
    return math.fsum(value.bytes for value in values)
