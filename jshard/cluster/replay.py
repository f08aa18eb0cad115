"""Simulates a schedule on two streams, one for computation and one for communication, under stated assumptions.

The computing stream runs the steps in order. A collective that starts is queued on the links, and the computing stream
continues; where it waits for a collective that is not done yet, that one is *exposed*.

A loop is not simulated round by round: once a round begins with the links in the same state as the round before, the
rest are equal to it, and their times are multiplied.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from jshard.cluster.assumptions import Assumptions
from jshard.inspect.hlo import Blocking, Compute, Loop, Schedule, Start, Step, Wait

WORKS: tuple[str, ...] = ("products", "attention", "elementwise", "update")  # `update`: after the last product
_SAME = 1e-9  # of a round's time: rounds that start this similarly are equal


@dataclasses.dataclass(frozen=True)
class Span:
    """A time span of one operation."""

    kind: str  # one of `WORKS` of the computing stream; `exposed` if it waits; `communication`
    begin_s: float  # since the start of the replay
    end_s: float
    name: str  # of the instruction
    window: int | None = None  # index of the collective in `Schedule.windows`; None for computation


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of the replay that represents `rounds` such parts of the step: the steady round of a loop."""

    begin_s: float
    end_s: float
    rounds: int = 1
    loop: str = ""  # name of the innermost loop; empty outside loops


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A collective that has started, and for which the computing stream has not waited yet."""

    window: int
    end_s: float


@dataclasses.dataclass
class _Totals:
    """Times so far, over all executions."""

    split_s: dict[str, float]  # time that the computing stream worked, by `WORKS`
    communication_s: list[float]  # of each collective
    exposed_s: list[float]  # that the computing stream stood still for each collective

    def copy(self) -> _Totals:
        return _Totals(dict(self.split_s), list(self.communication_s), list(self.exposed_s))

    def add_rounds(self, rounds: int, before: _Totals) -> None:
        """Adds rounds equal to the last one, which began at the totals `before`."""
        for work, seconds in self.split_s.items():
            self.split_s[work] = seconds + rounds * (seconds - before.split_s[work])
        for sums, sums_before in (
            (self.communication_s, before.communication_s),
            (self.exposed_s, before.exposed_s),
        ):
            for i, seconds in enumerate(sums):
                sums[i] = seconds + rounds * (seconds - sums_before[i])


class Replay:
    """One run of a schedule on a machine.

    Attributes:
        clock_s: when the step ended.
        spans: what ran when; only a few rounds of a loop.
        segments: the parts of `spans` to show, in order.
    """

    def __init__(self, schedule: Schedule, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._windows = schedule.windows
        self._transfers_s = [assumptions.transfer_s(w.kind, w.full_bytes, w.group, w.links) for w in schedule.windows]
        self._links_free_s = 0.0  # when the links have sent all that is queued
        self._in_flight: dict[str, _InFlight] = {}  # by token
        self._segment = Segment(0.0, 0.0)  # the current segment
        self._totals = _Totals(
            split_s=dict.fromkeys(WORKS, 0.0),
            communication_s=[0.0] * len(schedule.windows),
            exposed_s=[0.0] * len(schedule.windows),
        )
        self.clock_s = 0.0
        self.spans: list[Span] = []
        self.segments: list[Segment] = []

        num_before_update = 0
        for i, step in enumerate(schedule.steps):
            if _multiplies(step):
                num_before_update = i + 1
        self._work_without_products = "elementwise"
        self._run(schedule.steps[:num_before_update])
        self._work_without_products = "update"
        self._run(schedule.steps[num_before_update:])
        # The step ends with its last collective, even if no instruction waits for it.
        self.clock_s = max(self.clock_s, self._links_free_s)
        self._end_segment()

    # ---- results

    @property
    def compute_s(self) -> float:
        """Returns the time that the computing stream worked."""
        return sum(self._totals.split_s.values())

    @property
    def split_s(self) -> dict[str, float]:
        """Returns the same, by `WORKS`."""
        return self._totals.split_s

    @property
    def communication_s(self) -> list[float]:
        """Returns the time of each collective over all its executions."""
        return self._totals.communication_s

    @property
    def exposed_s(self) -> list[float]:
        """Returns the time that the computing stream stood still for each collective."""
        return self._totals.exposed_s

    # ---- steps

    def _run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Compute():
                    self._compute(self._work_of(step), step.name, self._assumptions.compute_s(step.work))
                case Start():
                    self._in_flight[step.token] = self._send(step.window)
                case Blocking():
                    self._wait_for(self._send(step.window))
                case Wait():
                    if step.token in self._in_flight:
                        self._wait_for(self._in_flight.pop(step.token))
                case Loop():
                    if _communicates(step.steps):
                        self._run_loop(step)
                    else:
                        self._compute_loop(step)

    def _work_of(self, step: Compute) -> str:
        """Returns the entry of `WORKS` that an operation belongs to."""
        if not step.work.products:
            return self._work_without_products
        return step.work.kind

    def _compute(self, work: str, name: str, alone_s: float) -> None:
        """Runs an operation that takes `alone_s` without a collective beside it."""
        contention = self._assumptions.contention
        slowed_s = alone_s * (1 + contention)  # if collectives run all the time
        communicating_s = max(0.0, self._links_free_s - self.clock_s)
        beside_s = min(communicating_s, slowed_s)
        # While `beside_s` passes it does what takes `beside_s / (1 + contention)` alone; the rest runs at full speed.
        seconds = alone_s + beside_s * contention / (1 + contention)
        self.spans.append(Span(work, self.clock_s, self.clock_s + seconds, name))
        self.clock_s += seconds
        self._totals.split_s[work] += seconds

    def _send(self, window: int) -> _InFlight:
        """Queues a collective on the links, which run one after another."""
        begin_s = max(self.clock_s, self._links_free_s)
        end_s = begin_s + self._transfers_s[window]
        self._links_free_s = end_s
        self._totals.communication_s[window] += self._transfers_s[window]
        self.spans.append(Span("communication", begin_s, end_s, self._windows[window].name, window))
        return _InFlight(window, end_s)

    def _wait_for(self, collective: _InFlight) -> None:
        if collective.end_s <= self.clock_s:
            return
        window = collective.window
        self._totals.exposed_s[window] += collective.end_s - self.clock_s
        self.spans.append(Span("exposed", self.clock_s, collective.end_s, self._windows[window].name, window))
        self.clock_s = collective.end_s

    # ---- loops

    def _compute_loop(self, loop: Loop) -> None:
        """Runs a loop without collectives: each kind of work of all rounds at once."""
        for work, round_s in self._computing_s(loop.steps).items():
            self._compute(work, loop.name, loop.rounds * round_s)

    def _computing_s(self, steps: Sequence[Step]) -> Mapping[str, float]:
        """Returns the time of each of `WORKS` in steps that only compute."""
        seconds = collections.defaultdict[str, float](float)
        for step in steps:
            if isinstance(step, Compute):
                seconds[self._work_of(step)] += self._assumptions.compute_s(step.work)
            elif isinstance(step, Loop):
                for work, round_s in self._computing_s(step.steps).items():
                    seconds[work] += step.rounds * round_s
        return seconds

    def _run_loop(self, loop: Loop) -> None:
        """Runs the rounds of a loop until two begin alike; the rest are equal to the last of these."""
        outside = self._segment
        self._end_segment()
        self._rename(loop.enters)
        num_segments = len(self.segments)
        for num_done in range(1, loop.rounds + 1):
            # Only the last simulated round is shown: the rounds before it are not yet steady.
            del self.segments[num_segments:]
            self._segment = Segment(self.clock_s, 0.0, outside.rounds * loop.rounds, loop.name)
            begin_s = self.clock_s
            totals = self._totals.copy()
            busy = self._busy_s()
            self._run(loop.steps)
            self._rename(loop.turns)
            self._end_segment()
            round_s = self.clock_s - begin_s
            if _is_alike(busy, self._busy_s(), round_s):
                self._repeat_round(loop.rounds - num_done, round_s, totals)
                break
        self._rename(loop.leaves)
        self._segment = dataclasses.replace(outside, begin_s=self.clock_s)

    def _repeat_round(self, rounds: int, round_s: float, before: _Totals) -> None:
        """Adds rounds equal to the last one, given the totals before it."""
        self._totals.add_rounds(rounds, before)
        later_s = rounds * round_s
        self.clock_s += later_s
        self._links_free_s += later_s
        for token, collective in self._in_flight.items():
            window = collective.window
            end_s = collective.end_s + later_s
            self._in_flight[token] = _InFlight(window, end_s)
            # It is drawn where it now is: a later segment shows what is under way when it begins.
            begin_s = end_s - self._transfers_s[window]
            self.spans.append(Span("communication", begin_s, end_s, self._windows[window].name, window))

    def _busy_s(self) -> dict[str, float]:
        """Returns the remaining time of the collectives in flight, by token; that of the links under ""."""
        ends_s = {token: collective.end_s for token, collective in self._in_flight.items()}
        ends_s[""] = self._links_free_s
        return {token: max(0.0, end_s - self.clock_s) for token, end_s in ends_s.items()}

    def _rename(self, tokens: Sequence[tuple[str, str]]) -> None:
        """Gives collectives in flight the tokens that they have in another computation."""
        renamed = {}
        for old, new in tokens:
            if old in self._in_flight:
                renamed[new] = self._in_flight.pop(old)
        # After all are taken out: two tokens may change places.
        self._in_flight |= renamed

    def _end_segment(self) -> None:
        """Ends the current segment, and begins an equal one."""
        if self.clock_s > self._segment.begin_s:
            self.segments.append(dataclasses.replace(self._segment, end_s=self.clock_s))
        self._segment = dataclasses.replace(self._segment, begin_s=self.clock_s)


def _communicates(steps: Sequence[Step]) -> bool:
    """Returns whether steps contain a collective."""
    for step in steps:
        if isinstance(step, Loop):
            if _communicates(step.steps):
                return True
        elif not isinstance(step, Compute):
            return True
    return False


def _multiplies(step: Step) -> bool:
    """Returns whether a step contains a matrix product."""
    if isinstance(step, Loop):
        return any(_multiplies(inner) for inner in step.steps)
    return isinstance(step, Compute) and bool(step.work.products)


def _is_alike(before: Mapping[str, float], after: Mapping[str, float], round_s: float) -> bool:
    """Returns whether the same collectives are in flight, with as much of their time left."""
    if before.keys() != after.keys():
        return False
    return all(abs(before[token] - after[token]) <= _SAME * round_s for token in before)
