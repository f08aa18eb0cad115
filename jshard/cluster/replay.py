"""Simulates a schedule on two streams, one for computation and one for communication, under stated assumptions."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from jshard.inspect.hlo import Blocking, Compute, Loop, Schedule, Start, Step, Wait
from jshard.inspect.hlo.collectives import ring_bytes
from jshard.inspect.hlo.module import item_bytes
from jshard.inspect.hlo.work import EqualProducts, OpWork

# Every device of a host has its own link to other hosts; these kinds use all of them together.
_SHARED_LINKS = ("all-gather", "reduce-scatter", "all-reduce")


# Output tiles of one multiprocessor, as in cuBLAS and CUTLASS; a product takes whole waves of them.
_TILES, _SPLITS = ((128, 256), (256, 128), (128, 128)), (1, 2, 4, 8)
# Overhead of a tile for filling its pipeline and writing its result, in contracted elements: two of its steps.
_FILL = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """A device and its links, for `estimate`."""

    name: str
    flops_per_s: float  # peak of dense matrix products of 16-bit numbers
    memory_bytes_per_s: float  # peak of the device memory
    fast_bytes_per_s: float  # rate of a collective within a host, each way (NVLink, ICI)
    fast_group: int  # number of devices joined by those links, consecutive in mesh order
    slow_bytes_per_s: float  # rate of a device's link to other hosts (NIC)
    latency_s: float = 15e-6  # of one collective
    fast_hop_s: float = 0.0  # added by each ring step to a neighbour
    slow_hop_s: float = 0.0  # added by each step to another host
    matmul_efficiency: float = 0.7  # share of the peak that large products reach, before tiles and waves
    attention_efficiency: float = 0.45  # share of the peak that attention in one kernel reaches
    memory_efficiency: float = 0.8  # share of the memory's peak that other operations reach
    multiprocessors: int = 0  # over which tiles are distributed; 0 to ignore tiles and waves
    launch_s: float = 0.0  # gap between the end of a kernel and the start of the next
    contention: float = 0.0  # slowdown of computation beside a collective
    straggling: float = 0.0  # slowdown of the slowest device, for which all wait
    host_bytes_per_s: float | None = None  # rate of copies from or to the host, each way; None if unknown
    # Peaks of other dtypes, by HLO name; the others follow from their width (TF32 half, FP8 twice).
    flops_per_s_of: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops_per_s / 1e12:g} TFLOP/s x {self.matmul_efficiency:.0%}"
            f" (attention {self.attention_efficiency:.0%}),"
            f" memory {self.memory_bytes_per_s / 1e12:g} TB/s x {self.memory_efficiency:.0%},"
            f" {self.fast_bytes_per_s / 1e9:g} GB/s among {self.fast_group},"
            f" {self.slow_bytes_per_s / 1e9:g} GB/s beyond, {self.latency_s * 1e6:g} us per collective,"
            f" computation {self.contention:.0%} longer beside one and {self.straggling:.0%} on the slowest device"
        )

    def compute_s(self, work: OpWork) -> float:
        """Time of an operation, bound by its products or by its memory traffic."""
        products_s = sum(one.flops / self._reached(one) for one in work.products)
        traffic_s = work.memory_bytes / (self.memory_bytes_per_s * self.memory_efficiency)
        return self.launch_s + max(products_s, traffic_s) * (1 + self.straggling)

    def _reached(self, product: EqualProducts) -> float:
        """Operations per second."""
        peaks = dict(self.flops_per_s_of)
        by_width = self.flops_per_s * 2 / max(item_bytes(product.dtype), 0.5)
        peak = peaks.get(product.dtype, by_width)
        if product.is_attention:
            return peak * self.attention_efficiency
        return peak * self.matmul_efficiency * _shape_part(product.sizes, self.multiprocessors)

    def transfer_s(self, kind: str, full_bytes: float, group: Sequence[int]) -> float:
        """Time of a collective of a group, given its devices' positions in the mesh, alone on the links.

        Between hosts, the slower of two rings determines it: the ring over all devices on the fast links, and the
        ring over hosts, in which each device of the group carries its share over its own link.
        """
        sent = ring_bytes(kind, full_bytes, len(group))
        hosts = len({position // self.fast_group for position in group})
        rounds = 2 if kind == "all-reduce" else 1
        hops_s = rounds * ((len(group) - hosts) * self.fast_hop_s + (hosts - 1) * self.slow_hop_s)
        fast = sent / self.fast_bytes_per_s
        if hosts == 1:
            return fast + self.latency_s + hops_s
        links = len(group) / hosts if kind in _SHARED_LINKS else 1
        return max(fast, sent / (self.slow_bytes_per_s * links)) + self.latency_s + hops_s


@functools.cache
def _shape_part(sizes: tuple[float, ...], multiprocessors: int) -> float:
    """The efficiency of a product of these sizes relative to a large one, with the best tile and split along K."""
    if not sizes or not multiprocessors:
        return 1.0
    batch, rows, columns, contracted = sizes
    best = 0.0
    for (high, wide), split in itertools.product(_TILES, _SPLITS):
        tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
        if split > 1 and tiles > multiprocessors:
            continue
        computed = math.ceil(tiles * split / multiprocessors) * multiprocessors * high * wide / split
        best = max(best, batch * rows * columns / computed * contracted / (contracted + _FILL * split))
    return best


WORKS: tuple[str, ...] = ("products", "attention", "elementwise", "update")  # `update`: after the last product
_SAME = 1e-9  # of a round's time: rounds that start this similarly are equal


@dataclasses.dataclass(frozen=True)
class Span:
    """A time span of one operation."""

    lane: str  # `matmul` or `other` of the computing stream; `exposed` if it waits; `communication`
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


class Replay:
    """One run of a schedule on a machine."""

    def __init__(self, schedule: Schedule, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._windows = schedule.windows
        self._takes = [assumptions.transfer_s(w.kind, w.full_bytes, w.group) for w in schedule.windows]
        self._links_free_s = 0.0
        self._under_way: dict[str, tuple[float, int]] = {}  # by token: end time and index
        self._segment = Segment(0.0, 0.0)  # the current segment
        self.clock_s = 0.0  # when the step ended
        self.split_s = dict.fromkeys(WORKS, 0.0)  # time that the computing stream worked
        # Time of each collective over all its executions, and time that the computing stream stood still for it.
        self.communication_s = [0.0] * len(schedule.windows)
        self.exposed_s = [0.0] * len(schedule.windows)
        self.spans: list[Span] = []  # what ran when; only a few rounds of a loop
        self.segments: list[Segment] = []  # the parts of `spans` to show, in order
        products = [place for place, step in enumerate(schedule.steps) if _multiplies(step)]
        update = products[-1] + 1 if products else 0
        self._other = "elementwise"
        self._run(schedule.steps[:update])
        self._other = "update"
        self._run(schedule.steps[update:])
        self.clock_s = max(self.clock_s, self._links_free_s)
        self._cut()

    def _run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Compute():
                    self._compute(self._work_of(step), step.name, self._assumptions.compute_s(step.work))
                case Start():
                    self._under_way[step.token] = self._send(step.window), step.window
                case Blocking():
                    self._stand_still(self._send(step.window), step.window)
                case Wait():
                    if step.token in self._under_way:
                        self._stand_still(*self._under_way.pop(step.token))
                case Loop():
                    self._loop(step)

    @property
    def compute_s(self) -> float:
        """Time that the computing stream worked."""
        return sum(self.split_s.values())

    def _work_of(self, step: Compute) -> str:
        """The entry of `WORKS` that an operation belongs to."""
        if not step.work.products:
            return self._other
        return "attention" if any(one.is_attention for one in step.work.products) else "products"

    def _compute(self, work: str, name: str, alone_s: float) -> None:
        beside_s = min(max(0.0, self._links_free_s - self.clock_s), alone_s * (1 + self._assumptions.contention))
        seconds = alone_s + beside_s * self._assumptions.contention / (1 + self._assumptions.contention)
        lane = "other" if work == self._other else "matmul"
        self.spans.append(Span(lane, self.clock_s, self.clock_s + seconds, name))
        self.clock_s += seconds
        self.split_s[work] += seconds

    def _send(self, window: int) -> float:
        """Queues a collective; returns its end time."""
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
            for work, seconds in self._computing_s(loop.steps).items():
                self._compute(work, loop.name, loop.rounds * seconds)
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

    def _computing_s(self, steps: Sequence[Step]) -> Mapping[str, float]:
        """Time of each of `WORKS` in steps that only compute."""
        found = collections.defaultdict[str, float](float)
        for step in steps:
            if isinstance(step, Compute):
                found[self._work_of(step)] += self._assumptions.compute_s(step.work)
            elif isinstance(step, Loop):
                for work, seconds in self._computing_s(step.steps).items():
                    found[work] += step.rounds * seconds
        return found

    def _repeat(self, rounds: int, period_s: float, before: list[float]) -> None:
        """Adds rounds equal to the last one, given the sums before it."""
        now = self._sums()
        added = [rounds * (a - b) for a, b in zip(now, before, strict=True)]
        n = len(self._windows)
        self.communication_s = [x + y for x, y in zip(now[:n], added[:n], strict=True)]
        self.exposed_s = [x + y for x, y in zip(now[n : 2 * n], added[n : 2 * n], strict=True)]
        self.split_s = dict(zip(WORKS, (x + y for x, y in zip(now[2 * n :], added[2 * n :], strict=True)), strict=True))
        later = rounds * period_s
        self.clock_s += later
        self._links_free_s += later
        for token, (end_s, window) in self._under_way.items():
            self._under_way[token] = end_s + later, window
            begin_s = end_s + later - self._takes[window]
            self.spans.append(Span("communication", begin_s, end_s + later, self._windows[window].name, window))

    def _sums(self) -> list[float]:
        return [*self.communication_s, *self.exposed_s, *self.split_s.values()]

    def _state(self) -> dict[str, float]:
        """The remaining time of the collectives in flight, by token; that of the links under ""."""
        ends = {token: end_s for token, (end_s, _) in self._under_way.items()} | {"": self._links_free_s}
        return {token: max(0.0, end_s - self.clock_s) for token, end_s in ends.items()}

    def _rename(self, tokens: Sequence[tuple[str, str]]) -> None:
        moved = {new: self._under_way.pop(old) for old, new in tokens if old in self._under_way}
        self._under_way |= moved

    def _cut(self) -> None:
        """Ends the current segment."""
        if self.clock_s > self._segment.begin_s:
            self.segments.append(dataclasses.replace(self._segment, end_s=self.clock_s))
        self._segment = dataclasses.replace(self._segment, begin_s=self.clock_s)


def _communicates(steps: Sequence[Step]) -> bool:
    return any(_communicates(step.steps) if isinstance(step, Loop) else not isinstance(step, Compute) for step in steps)


def _multiplies(step: Step) -> bool:
    if isinstance(step, Loop):
        return any(map(_multiplies, step.steps))
    return isinstance(step, Compute) and bool(step.work.products)


def _alike(before: dict[str, float], after: dict[str, float], period_s: float) -> bool:
    same = lambda token: abs(before[token] - after[token]) <= _SAME * period_s
    return before.keys() == after.keys() and all(map(same, before))
