"""How a device spent a step: computing, communicating, both or neither, as unions of intervals."""

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Sequence

from jshard.inspect.profile.ops import Op, Ops
from jshard.inspect.profile.planes import Event

Interval = tuple[int, int]  # begin and end


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The time that at least one of some intervals covers; they may overlap, and come in any order.

    Example:
        >>> union([(5, 9), (0, 3), (2, 4), (4, 4)])
        ((0, 4), (5, 9))
    """
    joined: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return tuple(joined)


def length(intervals: Iterable[Interval]) -> int:
    """The time that intervals cover which do not overlap."""
    return sum(end - begin for begin, end in intervals)


def common(left: Sequence[Interval], right: Sequence[Interval]) -> tuple[Interval, ...]:
    """What two unions share."""
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def without(left: Sequence[Interval], right: Sequence[Interval]) -> tuple[Interval, ...]:
    """What one union has and another has not."""
    if not left:
        return ()
    begin, end = left[0][0], left[-1][1]
    edges = [begin, *(edge for interval in common([(begin, end)], right) for edge in interval), end]
    return common(left, [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b])


def clipped(intervals: Iterable[Interval], begin: int, end: int) -> Iterator[Interval]:
    """The parts of intervals between two times."""
    for a, b in intervals:
        if a < end and b > begin:
            yield max(a, begin), min(b, end)


def shared_out(owned: Iterable[tuple[Interval, int]], within: Sequence[Interval]) -> dict[int, float]:
    """The time of a union, given to those whose intervals cover it; several at one time take equal parts.

    Returns:
        Picoseconds by owner; their sum is the part of `within` that is covered at all.
    """
    queue: list[tuple[int, int, int]] = []  # time, +1 or -1, owner
    for (begin, end), owner in owned:
        if end > begin:
            queue += [(begin, 1, owner), (end, -1, owner)]
    heapq.heapify(queue)
    shares: dict[int, float] = {}
    open_now: dict[int, int] = {}
    since, place = 0, 0
    while queue:
        time, change, owner = heapq.heappop(queue)
        if open_now and time > since:
            while place < len(within) and within[place][1] <= since:
                place += 1
            part = _covered(within, place, since, time) / len(open_now)
            for each in open_now:
                shares[each] = shares.get(each, 0.0) + part
        since = time
        open_now[owner] = open_now.get(owner, 0) + change
        if not open_now[owner]:
            del open_now[owner]
    return shares


def _covered(within: Sequence[Interval], place: int, begin: int, end: int) -> int:
    """How much of the time between two moments a union covers, looked for from a place on."""
    total = 0
    while place < len(within) and within[place][0] < end:
        total += max(0, min(within[place][1], end) - max(within[place][0], begin))
        place += 1
    return total


# How a device spent a step: computing, communicating, both or neither, as unions of intervals.

Seconds = tuple[float, float]  # begin and end

_PER_S = 10**12


@dataclasses.dataclass(frozen=True)
class Shares:
    """The four parts of a step; they add up to it."""

    computing_s: float  # something computes, and nothing communicates
    communicating_s: float  # something communicates, and nothing computes: communication that is exposed
    both_s: float  # communication that is hidden behind computation
    idle_s: float  # neither

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
class MeasuredCollective:
    """The time of one collective of the program, on one device in one step."""

    op: Op  # what it is
    runs: int  # how often it ran
    in_flight_s: float  # from its begin to its end
    # the part in which nothing computed; where several are exposed at one time, each has an equal part
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class MeasuredSpan:
    """A span of time of one device."""

    shares: Shares  # how it was spent
    collectives: tuple[MeasuredCollective, ...]  # those in it, in the order in which they begin
    computing: tuple[Seconds, ...] = ()  # when something computed, in seconds from the begin of the span
    # when collectives were in flight, in seconds from the same moment, with their places in `collectives`
    flights: tuple[tuple[Seconds, int], ...] = ()
    exposed: tuple[Seconds, ...] = ()  # when something communicated and nothing computed


def measure(events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int) -> MeasuredSpan:
    """Measures a span of time of one device."""
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
        MeasuredCollective(op, len(found), length(found) / _PER_S, parts.get(place, 0.0) / _PER_S)
        for place, (op, found) in enumerate(flights.items())
    )
    from_begin = lambda part: ((part[0] - begin_ps) / _PER_S, (part[1] - begin_ps) / _PER_S)
    return MeasuredSpan(
        Shares(*(part / _PER_S for part in (computing_ps, exposed_ps, both_ps, idle_ps))),
        tuple(times),
        tuple(map(from_begin, busy)),
        tuple((from_begin(part), place) for part, place in sorted(owned)),
        tuple(map(from_begin, exposed)),
    )
