"""Estimates, with ranges, the time of a step on a cluster and how much communication is hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard._types import Json
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.replay import Replay
from jshard.inspect.hlo import Schedule


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step under given assumptions about the machine."""

    assumptions: Assumptions
    step_s: float
    compute_s: float  # time of computation
    split_s: Mapping[str, float]  # the same, by `jshard.cluster.replay.WORKS`
    communication_s: float  # time of the collectives, run one after another
    exposed_s: float  # the part that the computation waits for
    exposed_by_kind_s: Mapping[str, float]
    hidden: float  # share of the communication that overlaps with computation, from 0 to 1
    hidden_in_loops: float  # the same, for the collectives inside loops
    flops: float  # of one device, including recomputation for backward

    def to_dict(self) -> dict[str, Json]:
        """Returns the totals, for JSON."""
        record = dataclasses.asdict(self)
        flops = record.pop("flops")
        record["computed_flops_per_s"] = flops / self.step_s if self.step_s else 0.0
        return record


@dataclasses.dataclass(frozen=True)
class EstimateRange:
    """Estimates over ranges of assumptions: as stated, and with all unknowns at their best or worst."""

    stated: Estimate
    fastest: Estimate
    slowest: Estimate

    @property
    def cases(self) -> tuple[Estimate, ...]:
        """Returns all three."""
        return self.stated, self.fastest, self.slowest

    def span(self, name: str) -> tuple[float, float]:
        """Returns the smallest and largest value of a quantity over the cases."""
        values = [getattr(case, name) for case in self.cases]
        return min(values), max(values)


@dataclasses.dataclass(frozen=True)
class _CollectiveTime:
    """A collective, over all its executions."""

    kind: str
    is_in_loop: bool
    communication_s: float
    exposed_s: float


def estimate(schedule: Schedule, assumptions: Assumptions) -> Estimate:
    """Replays a schedule (`jshard.inspect.hlo.walk.read_schedule`) under assumptions."""
    replay = Replay(schedule, assumptions)
    times = []
    for window, communication_s, exposed_s in zip(
        schedule.windows, replay.communication_s, replay.exposed_s, strict=True
    ):
        times.append(_CollectiveTime(window.kind, bool(window.loop), communication_s, exposed_s))
    exposed_by_kind_s: dict[str, float] = {}
    for time in times:
        exposed_by_kind_s[time.kind] = exposed_by_kind_s.get(time.kind, 0.0) + time.exposed_s
    return Estimate(
        assumptions,
        step_s=replay.clock_s,
        compute_s=replay.compute_s,
        split_s=replay.split_s,
        communication_s=sum(replay.communication_s),
        exposed_s=sum(replay.exposed_s),
        exposed_by_kind_s=exposed_by_kind_s,
        hidden=_hidden_share(times),
        hidden_in_loops=_hidden_share([time for time in times if time.is_in_loop]),
        flops=schedule.flops,
    )


def _hidden_share(times: Sequence[_CollectiveTime]) -> float:
    """Returns the share of communication that overlaps with computation; 1 if there is none."""
    total_s = sum(time.communication_s for time in times)
    if not total_s:
        return 1.0
    return 1.0 - sum(time.exposed_s for time in times) / total_s


# Assumptions with which a step is slower the larger they are; with all others it is faster.
_DELAYS = ("contention", "straggling", "latency_s", "launch_s", "fast_hop_s", "slow_hop_s")


def best_and_worst(ranges: Mapping[str, tuple[float, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the ends of ranges of assumptions with which a step is fastest, and those with which it is slowest."""
    best: dict[str, float] = {}
    worst: dict[str, float] = {}
    for name, ends in ranges.items():
        if name in _DELAYS:
            best[name] = min(ends)
            worst[name] = max(ends)
        else:
            best[name] = max(ends)
            worst[name] = min(ends)
    return best, worst


def estimate_range(
    schedule: Schedule, assumptions: Assumptions, ranges: Mapping[str, tuple[float, float]]
) -> EstimateRange:
    """Estimates a step over ranges of the least certain assumptions.

    Args:
        schedule: the compiled schedule.
        assumptions: the stated ones.
        ranges: lowest and highest value of assumptions, by name.
    """
    best, worst = best_and_worst(ranges)
    return EstimateRange(
        stated=estimate(schedule, assumptions),
        fastest=estimate(schedule, dataclasses.replace(assumptions, **best)),
        slowest=estimate(schedule, dataclasses.replace(assumptions, **worst)),
    )
