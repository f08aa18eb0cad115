"""Finds the runs of a program on a device: which part of its time is one step.

A profile of a CPU or a TPU numbers the runs. One of a GPU does not: there the runs follow from the order of the
operations.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from jshard.inspect.profile.events import DeviceEvents, Event
from jshard.inspect.profile.operations import Ops

# Of the operations of a run in their order: those that may be the first and the last of a run that is cut off.
_EARLY = 1 / 3
_LATE = 2 / 3


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a program on one device."""

    begin_ps: int  # of its first event
    end_ps: int  # of its last one
    id: int | None  # how the profile calls it; None if it does not
    ops: frozenset[str]  # names of the operations that it did


def busiest_program(devices: Iterable[DeviceEvents]) -> str:
    """Returns the program whose operations take the most time on the devices; empty if none is named."""
    busy_ps: dict[str, int] = collections.defaultdict(int)
    for device in devices:
        for event in device.events:
            if event.module and event.computes:  # what contains others would count them twice
                busy_ps[event.module] += event.end_ps - event.begin_ps
    return max(busy_ps, key=lambda name: busy_ps[name], default="")


def runs_of(device: DeviceEvents, program: str, ops: Ops, *, marked: int) -> list[Run]:
    """Returns the runs of a program on a device, in order, those included that are cut off.

    Args:
        device: the device.
        program: name of the program; empty if it is not known.
        ops: its operations.
        marked: how many steps the program marked.
    """
    of_program: list[Event] = []
    events_by_id: dict[int, list[Event]] = collections.defaultdict(list)
    for event in device.events:
        is_of_another = bool(program and event.module) and event.module != program
        if is_of_another:
            continue
        of_program.append(event)
        if event.run is not None:
            events_by_id[event.run].append(event)
    runs = [_run(events, ops, id) for id, events in events_by_id.items()]
    if not runs:  # the profile numbers none
        runs = [_run(events, ops, None) for events in _split_by_repetition(of_program, ops, marked)]
    return sorted(runs, key=lambda run: run.begin_ps)


def expected_ops(runs: Iterable[Run], ops: Ops | None) -> frozenset[str]:
    """Returns the operations that some run did, and which every complete run does.

    Those in branches may be missing from a complete run. They are left out if the program's text shows them.
    """
    seen: set[str] = set()
    for run in runs:
        seen |= run.ops
    if ops is not None and ops.has_text:
        seen &= ops.outermost
    return frozenset(seen)


def _run(events: Sequence[Event], ops: Ops, id: int | None) -> Run:
    begin_ps = events[0].begin_ps  # those of a device are in the order of their begins, not of their ends
    end_ps = begin_ps
    names: set[str] = set()
    for event in events:
        end_ps = max(end_ps, event.end_ps)
        names.add(ops.of(event).name)
    return Run(begin_ps, end_ps, id, frozenset(names))


def _split_by_repetition(events: Sequence[Event], ops: Ops, marked: int) -> list[list[Event]]:
    """Splits events of a device into runs: one begins where late operations are followed by early ones.

    No single operation marks the begin: streams run beside each other, and the first one may be cut off.
    """
    if not events:
        return []
    order = _order_in_program(events, ops, marked)
    ranks = {name: place / max(1, len(order) - 1) for place, name in enumerate(order)}  # 0 to 1
    runs: list[list[Event]] = [[]]
    is_late = False
    for event in events:
        rank = ranks.get(event.op)
        if rank is not None and rank > _LATE:
            is_late = True
        elif rank is not None and rank < _EARLY and is_late:
            runs.append([])
            is_late = False
        runs[-1].append(event)
    return runs


def _order_in_program(events: Sequence[Event], ops: Ops, marked: int) -> list[str]:
    """Returns the operations that a run does once, in their order.

    They are the program's outermost operations. Without its text they are those that come as often as steps are marked,
    or else least often, in the order in which they appear.
    """
    if not ops.has_text:
        counts = collections.Counter(event.op for event in events)
        num_runs = min(counts.values(), default=0)
        if marked in counts.values():
            num_runs = marked
        return [name for name, count in counts.items() if count == num_runs]
    places: dict[str, int] = {}
    for event in events:
        place = ops.of(event).place
        if place is not None:
            places[event.op] = place
    return sorted(places, key=lambda name: places[name])
