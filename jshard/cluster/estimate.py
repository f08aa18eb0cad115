"""How long a step would take, and how much of its communication is hidden: an estimate under stated assumptions.

Never a measurement, and never one number: `estimate_range` is what to show. It leaves out what nobody knows before
the program has run: contention of kernels and collectives for the device, slow links, stragglers.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from jshard._errors import ShardingError
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.replay import Replay
from jshard.inspect.schedule import Schedule
from jshard.inspect.steps import Window

# Links between hosts from congested to new ones, and what good kernels reach of a device's peak.
RANGES: Mapping[str, tuple[float, float]] = {"slow_bytes_per_s": (15e9, 50e9), "matmul_efficiency": (0.60, 0.75)}


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """A collective of the schedule, in an estimate.

    Args:
        window: the collective.
        communication_s: what it takes, over all executions.
        exposed_s: what of it the computation waits for.
    """

    window: Window
    communication_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step on a machine as assumed.

    Args:
        assumptions: the machine.
        step_s: the step.
        compute_s: what of it computes.
        flops: of one device, with those computed again for backward.
        collectives: the collectives, in the order of the schedule.
    """

    assumptions: Assumptions
    step_s: float
    compute_s: float
    flops: float
    collectives: tuple[CollectiveTime, ...]

    @property
    def communication_s(self) -> float:
        """What the collectives take, one after another."""
        return sum(c.communication_s for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """What of it the computation waits for."""
        return sum(c.exposed_s for c in self.collectives)

    @property
    def hidden(self) -> float:
        """Part of the communication that runs beside computation, from 0 to 1."""
        return _hidden(self.collectives)

    @property
    def hidden_in_loops(self) -> float:
        """Likewise, of the collectives inside loops."""
        return _hidden(c for c in self.collectives if c.window.loop)

    @property
    def flops_per_s(self) -> float:
        """Operations in a second on one device."""
        return self.flops / self.step_s if self.step_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The totals, for JSON."""
        names = "step_s", "compute_s", "communication_s", "exposed_s", "hidden", "hidden_in_loops", "flops_per_s"
        return {name: getattr(self, name) for name in names} | {"assumptions": dataclasses.asdict(self.assumptions)}


@dataclasses.dataclass(frozen=True)
class EstimateRange:
    """Estimates over ranges of assumptions.

    Args:
        stated: the estimate under the assumptions as given.
        cases: those at the corners of the ranges, and `stated`.
    """

    stated: Estimate
    cases: tuple[Estimate, ...]

    @property
    def fastest(self) -> Estimate:
        """The case with the shortest step."""
        return min(self.cases, key=lambda e: e.step_s)

    @property
    def slowest(self) -> Estimate:
        """The case with the longest step."""
        return max(self.cases, key=lambda e: e.step_s)

    @property
    def step_s(self) -> tuple[float, float]:
        """Shortest and longest step."""
        return self._range("step_s")

    @property
    def exposed_s(self) -> tuple[float, float]:
        """Least and most time that the computation waits for communication."""
        return self._range("exposed_s")

    @property
    def hidden(self) -> tuple[float, float]:
        """Smallest and largest hidden part of the communication."""
        return self._range("hidden")

    @property
    def hidden_in_loops(self) -> tuple[float, float]:
        """Likewise, of the collectives inside loops."""
        return self._range("hidden_in_loops")

    def _range(self, name: str) -> tuple[float, float]:
        values = [getattr(case, name) for case in self.cases]
        return min(values), max(values)

    def to_dict(self) -> dict[str, Any]:
        """Ranges, the stated case and all cases, for JSON."""
        names = "step_s", "exposed_s", "hidden", "hidden_in_loops"
        ranges = {name: list(self._range(name)) for name in names}
        return ranges | {"stated": self.stated.to_dict(), "cases": [case.to_dict() for case in self.cases]}


def estimate(schedule: Schedule, assumptions: Assumptions) -> Estimate:
    """Plays a schedule under assumptions.

    Args:
        schedule: what `jshard.inspect.schedule.read_schedule` read.
        assumptions: the machine.

    Raises:
        ShardingError: an assumption that is no positive number.

    Example:
        >>> estimate(read_schedule(compiled), h100).hidden
        0.98
    """
    _refuse_nonsense(assumptions)
    replay = Replay(schedule, assumptions)
    times = zip(schedule.windows, replay.communication_s, replay.exposed_s, strict=True)
    collectives = tuple(CollectiveTime(*each) for each in times)
    return Estimate(assumptions, replay.clock_s, replay.compute_s, schedule.flops, collectives)


def estimate_range(
    schedule: Schedule, assumptions: Assumptions, *, ranges: Mapping[str, tuple[float, float]] = RANGES
) -> EstimateRange:
    """Estimates over ranges of what is least known.

    Args:
        schedule: what `jshard.inspect.schedule.read_schedule` read.
        assumptions: the machine; what is not varied stays as it says.
        ranges: lowest and highest value of some of its numbers; all corners of them are looked at.

    Raises:
        ShardingError: an assumption that is no positive number.

    Example:
        >>> estimate_range(schedule, h100, ranges={"slow_bytes_per_s": (15e9, 50e9)}).hidden
        (0.63, 0.99)
    """
    corners = [
        estimate(schedule, dataclasses.replace(assumptions, **dict(zip(ranges, values, strict=True))))
        for values in itertools.product(*ranges.values())
    ]
    stated = estimate(schedule, assumptions)
    return EstimateRange(stated, (stated, *corners))


def _hidden(collectives: Iterable[CollectiveTime]) -> float:
    found = list(collectives)
    total = sum(c.communication_s for c in found)
    return 1.0 - sum(c.exposed_s for c in found) / total if total else 1.0


def _refuse_nonsense(assumptions: Assumptions) -> None:
    numbers = {k: v for k, v in dataclasses.asdict(assumptions).items() if isinstance(v, int | float)}
    bad = {k: v for k, v in numbers.items() if not (v >= 0 if k == "latency_s" else v > 0)}
    bad |= {k: numbers[k] for k in ("matmul_efficiency", "memory_efficiency") if numbers[k] > 1}
    if bad:
        raise ShardingError(
            "An estimate cannot be made from these assumptions.",
            where=[f"{k} = {v!r}" for k, v in bad.items()],
            why="rates and sizes are positive, efficiencies between 0 and 1.",
            do="dataclasses.replace(assumptions, matmul_efficiency=0.6)",
        )
