"""Which checkpoints of a series stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from jshard.checkpoint.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints of a series stay; one that any rule keeps stays, and the newest always does.

    Args:
        last: the newest so many.
        every: those of steps that it divides; None for none.
        best: so many of the best.
        metric: the name in `save(metrics=...)` that says which are best; steps without it are not among them.
        higher_is_better: whether a larger value of it is better.

    Raises:
        CheckpointError: a count makes no sense.

    Example:
        >>> js.checkpoint.Checkpointer("run", keep=js.checkpoint.Keep(last=2, every=10_000, best=1))
    """

    last: int = 3
    every: int | None = None
    best: int = 0
    metric: str = "val_loss"
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        if self.last < 1:
            raise CheckpointError(
                f"{self.last} checkpoints cannot be kept.",
                where=f"keep={self.last}",
                why="the last good checkpoint always stays.",
                do="keep=1, or more.",
            )
        if self.best < 0 or (self.every is not None and self.every < 1):
            raise CheckpointError(
                "The rule for old checkpoints cannot be followed.",
                where=f"Keep(every={self.every}, best={self.best})",
                why="every counts steps, from 1; best counts checkpoints, from 0.",
                do="Keep(last=3, every=1000, best=1)",
            )

    def stay(self, steps: Collection[int], metrics: Mapping[int, Mapping[str, float]], *, written: int) -> set[int]:
        """The steps that stay.

        Args:
            steps: those that are there.
            metrics: what each was worth, where that is known.
            written: the one that was written last; it stays, whatever its number.
        """
        newest = [*sorted(step for step in steps if step != written)[max(0, len(steps) - self.last) :], written]
        regular = {step for step in steps if self.every is not None and step % self.every == 0}
        known = [step for step in steps if math.isfinite(self._worth(metrics.get(step, {})))]
        best = sorted(known, key=lambda step: (self._worth(metrics[step]), step), reverse=True)[: self.best]
        return {*newest, *regular, *best}

    def _worth(self, metrics: Mapping[str, float]) -> float:
        value = metrics.get(self.metric, math.nan)
        return value if self.higher_is_better else -value
