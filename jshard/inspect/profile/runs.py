"""Which part of a device's time is one run of the step's program.

The boundaries are those of the work on the device. Where the host marked a step says only which one it is: with
asynchronous dispatch the host is a step ahead.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Sequence

from jshard.inspect.profile.ops import Ops
from jshard.inspect.profile.planes import DeviceEvents, Event

_EARLY, _LATE = 1 / 3, 2 / 3  # of the operations of a run in their order


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a program on one device.

    Args:
        begin_ps: of its first event.
        end_ps: of its last one.
        id: how the profile calls it; None if it does not.
        ops: names of the operations that it did.
    """

    begin_ps: int
    end_ps: int
    id: int | None
    ops: frozenset[str]


def busiest_program(devices: Iterable[DeviceEvents]) -> str:
    """The program whose operations take the most time on the devices."""
    busy_ps: dict[str, int] = collections.defaultdict(int)
    for device in devices:
        for event in device.runs or device.events:
            if event.module and event.computes:
                busy_ps[event.module] += event.end_ps - event.begin_ps
    return max(busy_ps, key=lambda name: busy_ps[name], default="")


def runs_of(device: DeviceEvents, program: str, ops: Ops, *, marked: int) -> list[Run]:
    """The runs of a program on a device, in order, those included that are cut off.

    Args:
        device: its events.
        program: name of the program; empty for all.
        ops: tells operations apart.
        marked: how many steps the host marked.
    """
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
    """Of each run, whether it is in the profile from its begin to its end.

    Args:
        runs: of one program on one device.
        expected: names of the operations that every run does.
        ops: tells what the program has before and after what was seen; None if it cannot.
    """
    if ops is not None and len(runs) == 1:  # no other run to hold it against, but perhaps the program's text
        return [expected <= runs[0].ops and not ops.missing_at_an_end(runs[0].ops)]
    return [expected <= run.ops for run in runs]


def expected_ops(runs: Iterable[Run], ops: Ops | None) -> frozenset[str]:
    """The operations that some run did, and which every whole one does: without those in branches, if that is told."""
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
