"""Which checkpoint a path means: one, the newest of a series, or the newest of a run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jshard.checkpoint import history as _history
from jshard.checkpoint import seal as _seal
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.paths import local_path, refuse_buckets
from jshard.checkpoint.series_folder import SeriesFolder
from jshard.checkpoint.storage import CHECKPOINT_METADATA, is_committed, is_item
from jshard.checkpoint.whereabouts import OF_A_RUN

_OF_A_SERIES = (_history.NAME, "series.json")


def series_at(path: Path) -> SeriesFolder | None:
    """The series at a path: its folder, or the run that holds it; None if there is none.

    It is looked at, by this process alone: nothing is written, and no other process is asked.
    """
    refuse_buckets(path)
    for folder in (path / OF_A_RUN, path):
        series = SeriesFolder(folder)
        if not is_checkpoint(folder) and (series.steps() or _holds(folder, _OF_A_SERIES)):
            return series
    return None


def checkpoint_at(path: Path, step: int | None = None) -> Path:
    """The checkpoint that a path means, whether it is damaged or not.

    Args:
        path: a checkpoint, a series, or a run.
        step: which one of a series; the newest by default.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path = local_path(path)
    series = None if is_checkpoint(path) else series_at(path)
    if series is None:
        if step is not None:
            raise CheckpointError(
                "There is no series of checkpoints.",
                where=str(path),
                why=f"a step, {step}, was asked for, and the path is none of a series or a run.",
                do="leave the step away, or give the folder that holds the checkpoints.",
            )
        return path
    steps = series.steps()
    if not steps or step not in (None, *steps):
        raise CheckpointError(
            "There is no such checkpoint.",
            where=str(series.folder if step is None else series.path(step)),
            why=f"complete checkpoints there: {', '.join(map(str, steps)) or 'none'}.",
            do=f"take step {steps[-1]}." if steps else "wait for the first save to complete.",
        )
    return series.path(steps[-1] if step is None else step)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder looks like one checkpoint, or like one tree of one, by whomever it was written."""
    return is_committed(path) or is_item(path) or _holds(path, (_seal.NAME, CHECKPOINT_METADATA))


def _holds(folder: Path, names: Collection[str]) -> bool:
    return any((folder / name).is_file() for name in names)
