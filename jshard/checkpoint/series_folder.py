"""The folder of a series: which checkpoints are there, which of them are whole, and which are kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from jshard.checkpoint import manifest as _seal
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, reason
from jshard.checkpoint.lookup import incomplete, incomplete_in, steps_in
from jshard.checkpoint.opened import OrbaxCheckpoint
from jshard.checkpoint.owner import is_owned
from jshard.checkpoint.saving import discard_unnamed, unnamed
from jshard.checkpoint.storage import is_committed
from jshard.errors import RunError


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


# The ledger of a series, `series.json`: the steps whose checkpoints it wrote, or began to. Nothing else is deleted.

_NAME = "series.json"


def steps_begun(folder: Path) -> list[int]:
    """Steps whose checkpoints a series wrote, or began to; what cannot be read claims nothing."""
    try:
        return [int(step) for step in json.loads((folder / _NAME).read_text())["begun"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write(folder: Path, steps: Iterable[int]) -> None:
    """Writes the ledger of a series, and returns when it is on the disk."""
    draft = folder / f"{_NAME}.tmp"
    with draft.open("w") as file:
        json.dump({"begun": list(steps)}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / _NAME)


# The folder of a series: which checkpoints lie there, which of them are whole, and which may go.


class SeriesFolder:
    """The files of a series, as one process sees them. What only one may do, the first process is to call.

    Args:
        folder: where the checkpoints lie; it need not be there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would lie."""
        return self.folder / str(step)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return steps_in(self.folder)

    def incomplete(self) -> list[int]:
        """Steps whose folder is no complete checkpoint, oldest first."""
        return incomplete_in(self.folder)

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a complete checkpoint, in short; None if they are all there."""
        try:
            seal = OrbaxCheckpoint(self.path(step)).seal
        except RunError as error:
            return error.why
        except CheckpointError:
            return None  # of a newer jshard: whoever restores it is told
        found = [] if seal is None else _seal.damage(self.path(step), seal)
        return None if not found else found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else "")

    def begin(self, step: int, *, is_damaged: bool) -> None:
        """Removes what interrupted saves left, and notes that this step is ours before it is there.

        Args:
            step: the one that is saved.
            is_damaged: whether what lies there of this step is known to be damaged.

        Raises:
            CheckpointError: something lies there that was never completed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        begun = steps_begun(self.folder)
        for old in begun:
            discard_unnamed(self.path(old))
        path = self.path(step)
        if is_committed(path) and (is_damaged or self.damage(step) is not None):
            self.set_aside(step)
        if path.is_dir() and not is_committed(path):
            raise incomplete(path)
        if not path.exists():  # else the save refuses, and this one is not ours
            there = lambda old: self.path(old).exists() or is_owned(unnamed(self.path(old)))  # another may be saving it
            write(self.folder, [*(old for old in begun if old != step and there(old)), step])

    def discard(self, step: int) -> None:
        """Removes what a save of ours that failed has left."""
        if step in steps_begun(self.folder):
            discard_unnamed(self.path(step))

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint to `STEP.damaged`, so that the step can be saved again."""
        path = self.path(step)
        aside = next(p for n in itertools.count() if not (p := _damaged_name(path, n)).exists())
        path.rename(aside)
        warn(f"the damaged checkpoint {path} is now called {aside.name}.")

    def delete_old(self, keep: Keep, *, written: int) -> None:
        """Deletes what no rule keeps, of what the series wrote."""
        begun = steps_begun(self.folder)
        ours = {written, *(old for old in self.steps() if old in begun)}
        stay = keep.stay(ours, self._metrics(ours) if keep.best else {}, written=written)
        for old in ours - stay:
            try:
                # The new name makes it one step: a checkpoint is never there by half.
                self.path(old).rename(unnamed(self.path(old)))
            except OSError as error:
                warn(f"the old checkpoint {self.path(old)} could not be deleted: {reason(error)}")
            discard_unnamed(self.path(old))

    def _metrics(self, steps: set[int]) -> dict[int, Mapping[str, float]]:
        found = {}
        for step in steps:
            try:
                seal = _seal.read(self.path(step))
            except (RunError, CheckpointError):
                continue
            if seal is not None:
                found[step] = seal.metrics
        return found


def warn(message: str) -> None:
    """What became of a checkpoint, for whoever called the series."""
    warnings.warn(message, CheckpointWarning, stacklevel=3)


def _damaged_name(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.damaged" + (f"-{number}" if number else ""))
