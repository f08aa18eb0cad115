"""A metric of the evaluations by which a run ends early, and by which it keeps its best checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from jshard._text import counted
from jshard.errors import ShardingError
from jshard.recipes.recipe import Recipe
from jshard.train.records import MetricsLine


class MetricError(ShardingError):
    """No evaluation of the run has the metric that it is to be judged by."""


class Evaluated(NamedTuple):
    """The value of a metric after a step; NaN if it was not a number."""

    step: int
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitor:
    """A metric, and which of its values are better.

    Attributes:
        metric: its name in the record of a run, such as "val_loss".
        mode: "min" if lower values are better, "max" if higher ones are.
        min_delta: by how much a value must be better to count as an improvement.
    """

    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0

    def check(self, names: Collection[str]) -> None:
        """Raises a `MetricError` if the evaluations have no metric of that name."""
        if self.metric in names:
            return
        raise MetricError(
            "The evaluations have no metric of that name.",
            where=f"monitor={self.metric!r}",
            why=f"they return {', '.join(names)}.",
            do=f"--set monitor={next(iter(names))}\nor return it from loss_fn: return loss, {{'accuracy': ...}}",
        )

    def value_in(self, step: int, scalars: Mapping[str, float]) -> Evaluated:
        """Returns the value in the results of an evaluation."""
        self.check(list(scalars))
        return Evaluated(step, float(scalars[self.metric]))

    def best(self, history: Iterable[Evaluated]) -> Evaluated | None:
        """Returns the last evaluation that was an improvement over all before it; None if none was a number."""
        best = None
        for evaluated in history:
            # NaN is no improvement, and infinity is no number to improve on.
            if math.isfinite(evaluated.value) and (best is None or self._gain(evaluated, best) > self.min_delta):
                best = evaluated
        return best

    def is_among_best(self, history: Sequence[Evaluated], count: int) -> bool:
        """Returns whether the last evaluation is one of so many best; of equal ones the later is better."""
        if not history or not math.isfinite(history[-1].value):
            return False
        *earlier, last = history
        better = [other for other in earlier if math.isfinite(other.value) and self._gain(other, last) > 0]
        return len(better) < count

    def _gain(self, evaluated: Evaluated, other: Evaluated) -> float:
        """Returns by how much an evaluation is better than another one."""
        gain = evaluated.value - other.value
        return gain if self.mode == "max" else -gain


class EarlyStopping:
    """Ends a run if a metric has not improved in so many evaluations.

    Args:
        monitor: the metric.
        patience: number of evaluations in a row without an improvement after which the run ends; None for no end.
        history: the evaluations before, of a run that continues.

    Attributes:
        history: all evaluations so far.

    Examples:
        >>> until = train.EarlyStopping(train.Monitor(metric="val_loss"), patience=3)
        >>> train.fit(step, batches, num_steps=1000, hooks=[train.EvaluationHook(every=50, run=evaluate, until=until)])
    """

    def __init__(self, monitor: Monitor, *, patience: int | None, history: Iterable[Evaluated] = ()) -> None:
        self.monitor = monitor
        self.patience = patience
        self.history = list(history)

    def __call__(self, step: int, scalars: Mapping[str, float]) -> str | None:
        """Receives the results of an evaluation; returns why the run ends now, None if it continues."""
        self.history.append(self.monitor.value_in(step, scalars))
        return self.reason()

    def reason(self) -> str | None:
        """Returns why the run ends after the evaluations so far; None if it continues."""
        if self.patience is None:
            return None
        best = self.monitor.best(self.history)
        since_best = [evaluated for evaluated in self.history if best is None or evaluated.step > best.step]
        if len(since_best) < self.patience:
            return None
        metric = self.monitor.metric
        by = f" by more than {self.monitor.min_delta:g}" if self.monitor.min_delta else ""
        evaluations = counted(len(since_best), "evaluation")
        if best is None:
            return f"{metric} was not a number in {evaluations}"
        return f"{metric} has not improved{by} in {evaluations}; its best is {best.value:.6g} after step {best.step}"


def monitor_of(recipe: Recipe) -> Monitor:
    """Returns the metric that a recipe is judged by."""
    return Monitor(metric=recipe.monitor, mode=recipe.monitor_mode, min_delta=recipe.min_delta)


def history_in(lines: Iterable[MetricsLine], metric: str, *, until_step: int) -> list[Evaluated]:
    """Returns the evaluations of a metric in the record of a run, up to a step."""
    history = []
    for line in lines:
        if metric in line and line["step"] <= until_step:
            value = line[metric]
            # The record has null for what was not a number.
            history.append(Evaluated(line["step"], math.nan if value is None else float(value)))
    return history
