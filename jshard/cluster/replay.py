"""Plays a schedule on two streams, one that computes and one that communicates, under stated assumptions."""

import dataclasses
from collections.abc import Sequence

from jshard.inspect.hlo.collectives import ring_bytes
from jshard.inspect.hlo.module import item_bytes
from jshard.inspect.hlo.schedule import Blocking, Compute, Loop, Schedule, Start, Step, Wait, Window
from jshard.inspect.hlo.work import OpWork

# Every device of a host brings its own link to other hosts, and these kinds use all of them together.
_SHARED_LINKS = ("all-gather", "reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """A device and its links, for `estimate`.

    Args:
        name: of the device, to be shown.
        flops_per_s: peak of dense matrix products of 16-bit numbers.
        memory_bytes_per_s: peak of the device memory.
        fast_bytes_per_s: what a collective reaches within a host, each way (NVLink, ICI).
        fast_group: devices that those links join: consecutive ones in the order of the mesh.
        slow_bytes_per_s: what a device's link to other hosts reaches (NIC).
        latency_s: of one collective.
        matmul_efficiency: part of `flops_per_s` that matrix products reach.
        memory_efficiency: part of `memory_bytes_per_s` that other operations reach.
        host_bytes_per_s: what copies from the host's memory or to it reach, each way; None if it is not known.
        flops_per_s_of: peaks of other dtypes, by HLO name; those not named go by their width (TF32 half, FP8 twice).

    Example:
        >>> h100 = Assumptions(
        ...     name="H100", flops_per_s=989e12, memory_bytes_per_s=3.35e12,
        ...     fast_bytes_per_s=370e9, fast_group=8, slow_bytes_per_s=42e9,
        ... )
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    fast_bytes_per_s: float
    fast_group: int
    slow_bytes_per_s: float
    latency_s: float = 15e-6
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    host_bytes_per_s: float | None = None
    flops_per_s_of: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops_per_s / 1e12:g} TFLOP/s x {self.matmul_efficiency:.0%},"
            f" memory {self.memory_bytes_per_s / 1e12:g} TB/s x {self.memory_efficiency:.0%},"
            f" {self.fast_bytes_per_s / 1e9:g} GB/s among {self.fast_group},"
            f" {self.slow_bytes_per_s / 1e9:g} GB/s beyond, {self.latency_s * 1e6:g} us a collective"
        )

    def compute_s(self, work: OpWork) -> float:
        """Time of an operation: bound by its products or by its memory traffic, whichever takes longer."""
        products = sum(flops / self._peak(dtype) for dtype, flops in work.flops) / self.matmul_efficiency
        return max(products, work.memory_bytes / (self.memory_bytes_per_s * self.memory_efficiency))

    def _peak(self, dtype: str) -> float:
        named = dict(self.flops_per_s_of)
        return named[dtype] if dtype in named else self.flops_per_s * 2 / max(item_bytes(dtype), 0.5)

    def collective_s(self, window: Window) -> float:
        """Time of one execution of a compiled collective, alone on the links."""
        return self.transfer_s(window.kind, window.full_bytes, window.group)

    def transfer_s(self, kind: str, full_bytes: float, group: Sequence[int]) -> float:
        """Time of a collective, alone on the links.

        Between hosts the slower of two rings counts: the one over all devices by the fast links, and the one over
        hosts, in which each device of the group carries its share by its own link.

        Args:
            kind: such as `all-gather`.
            full_bytes: of the whole array.
            group: positions of its devices in the mesh.
        """
        sent = ring_bytes(kind, full_bytes, len(group))
        hosts = len({position // self.fast_group for position in group})
        fast = sent / self.fast_bytes_per_s
        if hosts == 1:
            return fast + self.latency_s
        links = len(group) / hosts if kind in _SHARED_LINKS else 1
        return max(fast, sent / (self.slow_bytes_per_s * links)) + self.latency_s


_SAME = 1e-9  # of a round's time: two rounds that begin so alike go alike


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that takes time.

    Args:
        lane: `matmul` or `other` of the computing stream; `exposed` where it stands still; `communication`.
        begin_s: since the replay began.
        end_s: when it ends.
        name: of the instruction.
        window: place of the collective in `Schedule.windows`; None if it computes.
    """

    lane: str
    begin_s: float
    end_s: float
    name: str
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of the replay that stands for `rounds` such parts of the step: the steady round of a loop.

    Args:
        begin_s: since the replay began.
        end_s: when it ends.
        rounds: 1 outside loops.
        loop: name of the innermost loop; empty outside loops.
    """

    begin_s: float
    end_s: float
    rounds: int = 1
    loop: str = ""


class Replay:
    """One run of a schedule.

    Args:
        schedule: the program.
        assumptions: the machine.

    Attributes:
        clock_s: when the step ended.
        compute_s: time that the computing stream worked.
        communication_s: time that each collective took, over all its executions, by its place in the schedule.
        exposed_s: by the same place, time that the computing stream stood still for it.
        spans: what ran when. Of a loop, a few rounds.
        segments: the parts of `spans` that are to be looked at, in order.
    """

    def __init__(self, schedule: Schedule, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._windows = schedule.windows
        self._takes = [assumptions.collective_s(w) for w in schedule.windows]
        self._links_free_s = 0.0
        self._under_way: dict[str, tuple[float, int]] = {}  # by token: when it ends, which one
        self._segment = Segment(0.0, 0.0)  # the one that is being made
        self.clock_s = self.compute_s = 0.0
        self.communication_s = [0.0] * len(schedule.windows)
        self.exposed_s = [0.0] * len(schedule.windows)
        self.spans: list[Span] = []
        self.segments: list[Segment] = []
        self._run(schedule.steps)
        self.clock_s = max(self.clock_s, self._links_free_s)
        self._cut()

    def _run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Compute():
                    lane = "matmul" if step.work.matmuls else "other"
                    self._compute(lane, step.name, self._assumptions.compute_s(step.work))
                case Start():
                    self._under_way[step.token] = self._send(step.window), step.window
                case Blocking():
                    self._stand_still(self._send(step.window), step.window)
                case Wait():
                    if step.token in self._under_way:
                        self._stand_still(*self._under_way.pop(step.token))
                case Loop():
                    self._loop(step)

    def _compute(self, lane: str, name: str, seconds: float) -> None:
        self.spans.append(Span(lane, self.clock_s, self.clock_s + seconds, name))
        self.clock_s += seconds
        self.compute_s += seconds

    def _send(self, window: int) -> float:
        """Queues a collective; when it will be through."""
        begin = max(self.clock_s, self._links_free_s)
        self._links_free_s = begin + self._takes[window]
        self.communication_s[window] += self._takes[window]
        name = self._windows[window].name
        self.spans.append(Span("communication", begin, self._links_free_s, name, window))
        return self._links_free_s

    def _stand_still(self, until_s: float, window: int) -> None:
        if until_s > self.clock_s:
            self.exposed_s[window] += until_s - self.clock_s
            self.spans.append(Span("exposed", self.clock_s, until_s, self._windows[window].name, window))
            self.clock_s = until_s

    def _loop(self, loop: Loop) -> None:
        if not _communicates(loop.steps):
            self._compute("matmul", loop.name, loop.rounds * self._computing_s(loop.steps))
            return
        outside = self._segment
        self._cut()
        self._rename(loop.enters)
        num_segments = len(self.segments)
        for done in range(1, loop.rounds + 1):
            del self.segments[num_segments:]
            self._segment = Segment(self.clock_s, 0.0, outside.rounds * loop.rounds, loop.name)
            begin_s, sums, state = self.clock_s, self._sums(), self._state()
            self._run(loop.steps)
            self._rename(loop.turns)
            self._cut()
            period_s = self.clock_s - begin_s
            if _alike(state, self._state(), period_s):
                self._repeat(loop.rounds - done, period_s, sums)
                break
        self._rename(loop.leaves)
        self._segment = dataclasses.replace(outside, begin_s=self.clock_s)

    def _computing_s(self, steps: Sequence[Step]) -> float:
        total = 0.0
        for step in steps:
            if isinstance(step, Compute):
                total += self._assumptions.compute_s(step.work)
            elif isinstance(step, Loop):
                total += step.rounds * self._computing_s(step.steps)
        return total

    def _repeat(self, rounds: int, period_s: float, before: list[float]) -> None:
        """Adds rounds that go like the last one, of which the sums before it are given."""
        now = self._sums()
        added = [rounds * (a - b) for a, b in zip(now, before, strict=True)]
        n = len(self._windows)
        self.communication_s = [x + y for x, y in zip(now[:n], added[:n], strict=True)]
        self.exposed_s = [x + y for x, y in zip(now[n : 2 * n], added[n : 2 * n], strict=True)]
        self.compute_s += added[-1]
        later = rounds * period_s
        self.clock_s += later
        self._links_free_s += later
        for token, (end_s, window) in self._under_way.items():
            self._under_way[token] = end_s + later, window
            begin_s = end_s + later - self._takes[window]
            self.spans.append(Span("communication", begin_s, end_s + later, self._windows[window].name, window))

    def _sums(self) -> list[float]:
        return [*self.communication_s, *self.exposed_s, self.compute_s]

    def _state(self) -> dict[str, float]:
        """What is still to come of the collectives under way, by token; that of the links under no name."""
        ends = {token: end_s for token, (end_s, _) in self._under_way.items()} | {"": self._links_free_s}
        return {token: max(0.0, end_s - self.clock_s) for token, end_s in ends.items()}

    def _rename(self, tokens: Sequence[tuple[str, str]]) -> None:
        moved = {new: self._under_way.pop(old) for old, new in tokens if old in self._under_way}
        self._under_way |= moved

    def _cut(self) -> None:
        """Ends the segment that is being made."""
        if self.clock_s > self._segment.begin_s:
            self.segments.append(dataclasses.replace(self._segment, end_s=self.clock_s))
        self._segment = dataclasses.replace(self._segment, begin_s=self.clock_s)


def _communicates(steps: Sequence[Step]) -> bool:
    return any(_communicates(step.steps) if isinstance(step, Loop) else not isinstance(step, Compute) for step in steps)


def _alike(before: dict[str, float], after: dict[str, float], period_s: float) -> bool:
    if before.keys() != after.keys():
        return False
    return all(abs(before[token] - after[token]) <= _SAME * period_s for token in before)
