"""How a device spent a step: computing, communicating, both or neither, as unions of intervals."""

import collections
import dataclasses
from collections.abc import Iterable

from jshard.inspect.profile.intervals import Interval, clipped, common, length, shared_out, union, without
from jshard.inspect.profile.ops import Op, Ops
from jshard.inspect.profile.planes import Event

Seconds = tuple[float, float]  # begin and end

_PER_S = 10**12


@dataclasses.dataclass(frozen=True)
class Shares:
    """The four parts of a step; they add up to it.

    Args:
        computing_s: something computes, and nothing communicates.
        communicating_s: something communicates, and nothing computes: communication that is exposed.
        both_s: communication that is hidden behind computation.
        idle_s: neither.
    """

    computing_s: float
    communicating_s: float
    both_s: float
    idle_s: float

    @property
    def step_s(self) -> float:
        """The whole."""
        return self.computing_s + self.communicating_s + self.both_s + self.idle_s

    @property
    def hidden(self) -> float | None:
        """The share of the communication that is hidden; None without communication."""
        total_s = self.communicating_s + self.both_s
        return self.both_s / total_s if total_s else None

    @classmethod
    def mean(cls, shares: Iterable["Shares"]) -> "Shares":
        """Of each part the mean."""
        rows = [dataclasses.astuple(one) for one in shares]
        return cls(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """The time of one collective of the program, on one device in one step.

    Args:
        op: what it is.
        runs: how often it ran.
        in_flight_s: from its begin to its end.
        exposed_s: the part in which nothing computed; where several are exposed at one time, each has an equal part.
    """

    op: Op
    runs: int
    in_flight_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """A span of time of one device.

    Args:
        shares: how it was spent.
        collectives: those in it, in the order in which they begin.
        computing: when something computed, in seconds from the begin of the span.
        flights: when collectives were in flight, likewise; with their places in `collectives`.
        exposed: when something communicated and nothing computed.
    """

    shares: Shares
    collectives: tuple[CollectiveTime, ...]
    computing: tuple[Seconds, ...] = ()
    flights: tuple[tuple[Seconds, int], ...] = ()
    exposed: tuple[Seconds, ...] = ()


def measure(events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int) -> Measured:
    """Measures a span of time of one device.

    Args:
        events: of the device, by their begin; others than those of the span may be among them.
        ops: tells operations apart.
        begin_ps: of the span.
        end_ps: likewise.
    """
    computing, in_flight = [], collections.defaultdict[Op, list[Interval]](list)
    for event in events:
        for part in clipped([(event.begin_ps, event.end_ps)], begin_ps, end_ps):
            op = ops.of(event)
            if op.kind:
                in_flight[op].append(part)
            elif not op.contains:
                computing.append(part)
    busy = union(computing)
    flights = {op: union(parts) for op, parts in in_flight.items()}
    communicating = union(part for parts in flights.values() for part in parts)
    exposed = without(communicating, busy)
    both_ps, exposed_ps = length(common(communicating, busy)), length(exposed)
    computing_ps = length(busy) - both_ps
    idle_ps = end_ps - begin_ps - computing_ps - exposed_ps - both_ps
    owned = [(part, place) for place, parts in enumerate(flights.values()) for part in parts]
    parts = shared_out(owned, exposed)
    times = (
        CollectiveTime(op, len(found), length(found) / _PER_S, parts.get(place, 0.0) / _PER_S)
        for place, (op, found) in enumerate(flights.items())
    )
    from_begin = lambda part: ((part[0] - begin_ps) / _PER_S, (part[1] - begin_ps) / _PER_S)
    return Measured(
        Shares(*(part / _PER_S for part in (computing_ps, exposed_ps, both_ps, idle_ps))),
        tuple(times),
        tuple(map(from_begin, busy)),
        tuple((from_begin(part), place) for part, place in sorted(owned)),
        tuple(map(from_begin, exposed)),
    )
