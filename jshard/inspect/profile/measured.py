"""Measures one step on one device: when it computes, communicates, does both, or neither."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jshard.inspect.profile.events import Event
from jshard.inspect.profile.operations import Op, Ops

_PS_PER_S = 10**12
# Where several operations compute at one time, the first of these is shown. Empty: which one is not known.
_WORKS = ("products", "attention", "elementwise", "")


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
        if not total_s:
            return None
        return self.both_s / total_s

    @classmethod
    def mean(cls, shares: Iterable["Shares"]) -> "Shares":
        """Returns the mean of each part."""
        rows = [dataclasses.astuple(row) for row in shares]
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        return cls(*means)


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """The time of one collective of the program, on one device in one step."""

    op: Op  # the operation
    runs: int  # how often it ran
    in_flight_s: float  # from its begin to its end
    # The part in which nothing computed; where several are exposed at one time, each has an equal part.
    exposed_s: float


class TimeSpan(NamedTuple):
    """A span of time, in seconds from the start of the step."""

    begin_s: float
    end_s: float


class Computing(NamedTuple):
    """A time in which something computes."""

    span: TimeSpan
    work: str  # `products`, `attention` or `elementwise`; empty if it is not known


class Flight(NamedTuple):
    """The time from the begin of a collective to its end."""

    span: TimeSpan
    collective: int  # its index in `DeviceStep.collectives`


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """One step on one device."""

    device: str  # such as `gpu:3`, or `process 1 gpu:3`
    shares: Shares  # how it spent the step
    collectives: tuple[MeasuredCollective, ...]  # those that it took part in, in the order in which they begin
    since_last_s: float | None  # from the end of the step before; None if that is not in the profile
    computing: tuple[Computing, ...] = ()  # when something computed, by their begin
    exposed: tuple[TimeSpan, ...] = ()  # when something communicated, and nothing computed
    flights: tuple[Flight, ...] = ()  # by their begin


def mean_shares(steps: Iterable[DeviceStep]) -> Shares:
    """Returns the mean of each part over some steps on some devices."""
    return Shares.mean(step.shares for step in steps)


def measure(
    device: str, events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int, *, since_last_s: float | None = None
) -> DeviceStep:
    """Measures a span of time of one device; the events are sorted by begin, and may include others."""
    computing = {work: _MergedSpans(begin_ps) for work in _WORKS}
    exposed = _MergedSpans(begin_ps)
    hidden_ps = 0
    busy_ps = 0
    flights: dict[Op, _MergedSpans] = {}
    exposed_ps: dict[Op, float] = {}
    for moment in _moments(events, ops, begin_ps, end_ps):
        busy_ps += moment.length_ps
        if moment.work is not None:
            computing[moment.work].add(moment)
            if moment.in_flight:
                hidden_ps += moment.length_ps
        elif moment.in_flight:
            exposed.add(moment)
        for op in moment.in_flight:
            flights.setdefault(op, _MergedSpans(begin_ps)).add(moment)
            exposed_ps.setdefault(op, 0)
            if moment.work is None:
                exposed_ps[op] += moment.length_ps / len(moment.in_flight)  # several at one time take equal parts

    computing_ps = sum(spans.total_ps for spans in computing.values())
    shares = Shares(
        computing_s=(computing_ps - hidden_ps) / _PS_PER_S,
        communicating_s=exposed.total_ps / _PS_PER_S,
        both_s=hidden_ps / _PS_PER_S,
        idle_s=(end_ps - begin_ps - busy_ps) / _PS_PER_S,
    )
    collectives = []
    flight_spans = []
    for index, (op, spans) in enumerate(flights.items()):
        in_flight_s = spans.total_ps / _PS_PER_S
        collectives.append(MeasuredCollective(op, len(spans.merged), in_flight_s, exposed_ps[op] / _PS_PER_S))
        flight_spans += [Flight(span, index) for span in spans.in_seconds()]
    return DeviceStep(
        device,
        shares,
        tuple(collectives),
        since_last_s,
        _computing_in_seconds(computing),
        exposed.in_seconds(),
        tuple(sorted(flight_spans)),
    )


def _computing_in_seconds(computing: Mapping[str, "_MergedSpans"]) -> tuple[Computing, ...]:
    """Returns the spans of each work, by their begin."""
    in_seconds = []
    for work, spans in computing.items():
        in_seconds += [Computing(span, work) for span in spans.in_seconds()]
    return tuple(sorted(in_seconds))


@dataclasses.dataclass(frozen=True)
class _Moment:
    """The time between two changes of what a device does."""

    begin_ps: int
    end_ps: int
    work: str | None  # what computes, one of `_WORKS`; None if nothing does
    in_flight: list[Op]  # collectives

    @property
    def length_ps(self) -> int:
        return self.end_ps - self.begin_ps


class _MergedSpans:
    """Merges moments that are added in order: one that touches the last one becomes part of it."""

    def __init__(self, step_begin_ps: int) -> None:
        self.merged: list[tuple[int, int]] = []  # begin and end, in picoseconds
        self._step_begin_ps = step_begin_ps

    def add(self, moment: _Moment) -> None:
        begin_ps = moment.begin_ps
        if self.merged and self.merged[-1][1] == begin_ps:
            begin_ps, _ = self.merged.pop()
        self.merged.append((begin_ps, moment.end_ps))

    @property
    def total_ps(self) -> int:
        return sum(end_ps - begin_ps for begin_ps, end_ps in self.merged)

    def in_seconds(self) -> tuple[TimeSpan, ...]:
        """Returns the spans from the start of the step."""
        spans = []
        for begin_ps, end_ps in self.merged:
            begin_s = (begin_ps - self._step_begin_ps) / _PS_PER_S
            spans.append(TimeSpan(begin_s, (end_ps - self._step_begin_ps) / _PS_PER_S))
        return tuple(spans)


class _Edge(NamedTuple):
    """The begin or the end of an operation."""

    time_ps: int
    change: int  # of the number of operations that run: 1 at a begin, -1 at an end
    runs: Op | str  # the collective, or the work of one that computes


def _edges(events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int) -> list[_Edge]:
    """Returns the edges of the operations of a span of time, in order."""
    edges: list[_Edge] = []
    for event in events:
        event_begin_ps = max(event.begin_ps, begin_ps)
        event_end_ps = min(event.end_ps, end_ps)
        if event_begin_ps >= event_end_ps:
            continue
        op = ops.of(event)
        if op.contains and not op.kind:
            continue  # a loop or a call: it would count the gaps between the operations inside as computation
        runs = op if op.kind else op.work
        edges += [_Edge(event_begin_ps, 1, runs), _Edge(event_end_ps, -1, runs)]
    return sorted(edges, key=lambda edge: edge.time_ps)


def _moments(events: Iterable[Event], ops: Ops, begin_ps: int, end_ps: int) -> Iterator[_Moment]:
    """Yields the time between two changes of what a device does; without those in which it does nothing."""
    num_running: collections.Counter[Op | str] = collections.Counter()  # events of one operation may overlap
    since_ps = begin_ps
    for edge in _edges(events, ops, begin_ps, end_ps):
        if edge.time_ps > since_ps and num_running:
            in_flight = [op for op in num_running if isinstance(op, Op)]
            work = next((work for work in _WORKS if work in num_running), None)
            yield _Moment(since_ps, edge.time_ps, work, in_flight)
        since_ps = edge.time_ps
        num_running[edge.runs] += edge.change
        if not num_running[edge.runs]:
            del num_running[edge.runs]
