"""How a device spent a step: computing, communicating, both or neither, as unions of intervals."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from jshard.inspect.profile.ops import Op, Ops
from jshard.inspect.profile.planes import Event

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
    # The part in which nothing computed; where several are exposed at one time, each has an equal part.
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class MeasuredSpan:
    """A span of time of one device."""

    shares: Shares  # how it was spent
    collectives: tuple[MeasuredCollective, ...]  # those in it, in the order in which they begin
    computing: tuple[Seconds, ...] = ()  # when something computed, in seconds from the begin of the span
    # When collectives were in flight, in seconds from the same moment, with their places in `collectives`.
    flights: tuple[tuple[Seconds, int], ...] = ()
    exposed: tuple[Seconds, ...] = ()  # when something communicated and nothing computed


def measure(events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int) -> MeasuredSpan:
    """Measures a span of time of one device; its events come by their begin, and others may be among them."""
    totals: collections.Counter[tuple[bool, bool]] = collections.Counter()  # by whether it computes, communicates
    computing, exposed, flights = _Spans(), _Spans(), collections.defaultdict[Op, _Spans](_Spans)
    alone: dict[Op, float] = collections.defaultdict(float)  # picoseconds in which nothing computed
    for begin, end, owners in _moments(events, ops, begin_ps, end_ps):
        is_busy, flying = None in owners, [op for op in owners if op is not None]
        totals[is_busy, bool(flying)] += end - begin
        if is_busy:
            computing.add(begin, end)
        elif flying:
            exposed.add(begin, end)
        for op in flying:
            flights[op].add(begin, end)
            alone[op] += 0 if is_busy else (end - begin) / len(flying)  # several at one time take equal parts
    idle_ps = end_ps - begin_ps - totals.total()
    parts = totals[True, False], totals[False, True], totals[True, True], idle_ps
    times = (
        MeasuredCollective(op, len(spans.found), sum(b - a for a, b in spans.found) / _PER_S, alone[op] / _PER_S)
        for op, spans in flights.items()
    )
    from_begin = lambda span: ((span[0] - begin_ps) / _PER_S, (span[1] - begin_ps) / _PER_S)
    owned = sorted((span, place) for place, spans in enumerate(flights.values()) for span in spans.found)
    return MeasuredSpan(
        Shares(*(part / _PER_S for part in parts)),
        tuple(times),
        tuple(map(from_begin, computing.found)),
        tuple((from_begin(span), place) for span, place in owned),
        tuple(map(from_begin, exposed.found)),
    )


class _Spans:
    """Spans of time that come in order: what touches the last one is part of it."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def add(self, begin: int, end: int) -> None:
        if self.found and self.found[-1][1] == begin:
            begin = self.found.pop()[0]
        self.found.append((begin, end))


def _moments(
    events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int
) -> Iterator[tuple[int, int, tuple[Op | None, ...]]]:
    """The time between two changes, and what goes on in it: collectives, and None for computation."""
    edges: list[tuple[int, int, Op | None]] = []  # time, 1 where something begins and -1 where it ends
    for event in events:
        begin, end = max(event.begin_ps, begin_ps), min(event.end_ps, end_ps)
        if begin < end:
            op = ops.of(event)
            if op.kind or not op.contains:
                edges += [(begin, 1, op if op.kind else None), (end, -1, op if op.kind else None)]
    going: collections.Counter[Op | None] = collections.Counter()
    since = begin_ps
    for time, change, op in sorted(edges, key=lambda edge: edge[0]):
        if time > since and going:
            yield since, time, tuple(going)
        since = time
        going[op] += change
        if not going[op]:
            del going[op]
