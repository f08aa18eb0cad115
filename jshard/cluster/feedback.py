"""Measured steps correct the estimates: a few ways are tried, and the next ones chosen by what was learned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jshard.cluster.costs import Cost
from jshard.cluster.search import Search, is_same

TRIES = 4
"""Ways that are measured at most."""

_PRIOR = 0.05  # how firmly both factors are held to the mean ratio of measured to estimated


@dataclasses.dataclass(frozen=True)
class Measured:
    """A way that was tried.

    Args:
        cost: its estimate.
        step_s: measured seconds of a step; infinite if it did not run.
    """

    cost: Cost
    step_s: float

    @property
    def sequence_s(self) -> float:
        """Seconds for a sequence of the batch."""
        return self.step_s / self.cost.batch_size


@dataclasses.dataclass(frozen=True)
class Factors:
    """What measured steps say of the estimates.

    Args:
        compute: by which the time that computes is multiplied.
        wait: by which the exposed communication is.
    """

    compute: float = 1.0
    wait: float = 1.0

    def sequence_s(self, cost: Cost) -> float:
        """The corrected estimate for a sequence of the batch."""
        return (self.compute * cost.compute_s + self.wait * cost.exposed_s) / cost.batch_size


@dataclasses.dataclass(frozen=True)
class Feedback:
    """What came of measuring.

    Args:
        tried: the ways, in the order they were tried.
        factors: the last correction.
    """

    tried: tuple[Measured, ...]
    factors: Factors

    @property
    def best(self) -> Measured | None:
        """The quickest that ran."""
        ran = [one for one in self.tried if math.isfinite(one.step_s)]
        return min(ran, key=lambda one: one.sequence_s, default=None)


def with_feedback(found: Search, measure: Callable[[Cost], float], *, tries: int = TRIES) -> Feedback:
    """Tries ways until none is left that the corrected estimates hold for quicker than the quickest that ran.

    The first is the best by the estimates, the second what was asked for, which the choice has to beat.

    Args:
        found: the ways, by the estimates; at least one fits.
        measure: seconds of a step of one way; infinite if it does not run.
        tries: ways that are measured at most.
    """
    left = list(found.ranked)
    queue = [left.pop(0)]
    asked = next((cost for cost in left if is_same(cost, found.default)), None)
    if asked is not None:
        left.remove(asked)
        queue.append(asked)
    tried: list[Measured] = []
    while queue and len(tried) < tries:
        cost = queue.pop(0)
        tried.append(Measured(cost, measure(cost)))
        factors = fitted(tried)
        left = [other for other in left if not is_same(other, cost)]  # the same program under another name
        left.sort(key=factors.sequence_s)
        if not queue and left and factors.sequence_s(left[0]) < min(one.sequence_s for one in tried):
            queue.append(left.pop(0))
    return Feedback(tuple(tried), fitted(tried))


def fitted(tried: Sequence[Measured]) -> Factors:
    """Factors that bring the estimates closest to what was measured, by least squares of the relative errors."""
    ran = [one for one in tried if math.isfinite(one.step_s)]
    if not ran:
        return Factors()
    mean = float(np.exp(np.mean([math.log(one.step_s / one.cost.step_s) for one in ran])))
    rows = [[one.cost.compute_s / one.step_s, one.cost.exposed_s / one.step_s] for one in ran]
    held = [[_PRIOR / mean, 0.0], [0.0, _PRIOR / mean]]
    wanted = [1.0] * len(rows) + [_PRIOR, _PRIOR]
    compute, wait = np.linalg.lstsq(np.array(rows + held), np.array(wanted), rcond=None)[0]
    return Factors(max(float(compute), 0.01 * mean), max(float(wait), 0.01 * mean))
