"""From the figures of rounds to medians, ratios and differences; also of figures that several machines have merged."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of rounds, with the smallest and the largest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Of the rounds."""
        return cls(statistics.median(figures), min(figures), max(figures))

    def text(self, form: str, scale: float = 1.0) -> str:
        """E.g. "1.08 (1.05 to 1.12)"."""
        median, least, most = (format(scale * value, form) for value in (self.median, self.least, self.most))
        return f"{median} ({least} to {most})"


def step_s(row: Mapping[str, Any]) -> list[float]:
    """Seconds of a step in each round: of the slowest process that trains with others, else of their mean."""
    rounds = zip(*([one["step_s"] for one in of["rounds"]] for of in row["processes"].values()), strict=True)
    return [max(times) if row["sharded"] else statistics.fmean(times) for times in rounds]


def ratios(above: Mapping[str, Any], below: Mapping[str, Any]) -> Spread:
    """Times of one candidate over another's, round by round: what slows a round down slows both."""
    return Spread.of([a / b for a, b in zip(step_s(above), step_s(below), strict=True)])


def overhead(candidates: Mapping[str, Any], name: str) -> Spread | None:
    """A sharded step over the same framework's unsharded one with the same work per process."""
    alone = candidates[name]["alone"]
    return ratios(candidates[name], candidates[alone]) if alone in candidates else None


def host_s(row: Mapping[str, Any]) -> float:
    """CPU seconds of the thread that starts a step: median over rounds and processes."""
    return statistics.median(one["host_s"] for of in row["processes"].values() for one in of["rounds"])


def peak_bytes(row: Mapping[str, Any]) -> int | None:
    """The most device memory of a process while it trained; None where it has none of its own."""
    found = [one["peak_bytes"] for of in row["processes"].values() for one in of["rounds"]]
    return max(found) if None not in found else None


def rss_bytes(row: Mapping[str, Any]) -> int:
    """The most memory of the host that a process took while it trained."""
    return max(one["rss_bytes"] for of in row["processes"].values() for one in of["rounds"])


def losses(row: Mapping[str, Any]) -> list[float]:
    """Losses of the steps, the first one included: of the global batch, or the mean over models that train alone."""
    return _series(row, "losses")


def grad_norms(row: Mapping[str, Any]) -> list[float]:
    """Gradient norms from the second step on."""
    return _series(row, "grad_norms")[1:]


def difference(candidates: Mapping[str, Any], *, sharded: bool) -> float | None:
    """The largest difference of losses between candidates that train on the same data; None for less than two."""
    series = [losses(row) for row in candidates.values() if row["sharded"] == sharded]
    if len(series) < 2:
        return None
    return max(max(step) - min(step) for step in zip(*series, strict=False))


def _series(row: Mapping[str, Any], name: str) -> list[float]:
    of_processes = []
    for of in row["processes"].values():
        first = [of["first_loss"]]
        rounds = [one[name] for one in of["rounds"]]
        again = rounds[:1] if row["restarted"] else rounds  # started again for each turn, they repeat the same steps
        of_processes.append(first + [value for turn in again for value in turn])
    if row["sharded"]:
        return of_processes[0]
    return [statistics.fmean(values) for values in zip(*of_processes, strict=True)]
