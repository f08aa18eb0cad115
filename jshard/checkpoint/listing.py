"""What is in a folder of checkpoints, and which checkpoint a path means."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.draft import SAVING_SUFFIX
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.lookup import (
    INCOMPLETE,
    OF_A_RUN,
    incomplete_in,
    local_path,
    no_such_step,
    refuse_buckets,
    steps_in,
)
from jshard.checkpoint.readers import OrbaxCheckpoint
from jshard.checkpoint.series_folder import LEDGER
from jshard.checkpoint.storage import CHECKPOINT_METADATA, is_committed, is_item
from jshard.checkpoint.timeline import NAME as HISTORY
from jshard.errors import FourPartError


def series_at(path: Path) -> Path | None:
    """The folder of the series at a path, that of a run or itself; None if there is none.

    It is looked at, by this process alone: nothing is written, and no other process is asked.
    """
    refuse_buckets(path)
    for folder in (path / OF_A_RUN, path):
        if not is_checkpoint(folder) and (steps_in(folder) or _holds(folder, (HISTORY, LEDGER))):
            return folder
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
    steps = steps_in(series)
    if not steps or step not in (None, *steps):
        raise no_such_step(series, step)
    return series / str(steps[-1] if step is None else step)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder looks like one checkpoint, or like one tree of one, by whomever it was written."""
    return is_committed(path) or is_item(path) or _holds(path, (_manifest.NAME, CHECKPOINT_METADATA))


def _holds(folder: Path, names: Collection[str]) -> bool:
    return any((folder / name).is_file() for name in names)


# What is in a folder of checkpoints.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint, as it is listed.

    Attributes:
        path: where it is.
        step: number of steps that were done; None where nobody said.
        is_latest: whether it is the one that a run would go on from.
        is_complete: whether it was completed; else it is no checkpoint, and `damage` says what it may be.
        damage: what is wrong with its files, a line each; of large ones the sizes are looked at, and no values.
        num_leaves: leaves that it holds.
        num_bytes: of their values.
        saved_at: seconds since 1970; None if jshard did not write it, as for those below.
        mesh: axes and their degrees when it was saved.
        processes: how many saved it.
        version: of the jshard that wrote it.
        metrics: what the state was worth.
    """

    path: Path
    step: int | None
    is_latest: bool = False
    is_complete: bool = True
    damage: tuple[str, ...] = ()
    num_leaves: int = 0
    num_bytes: int = 0
    saved_at: float | None = None
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    processes: int | None = None
    version: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """What is at a path.

    Attributes:
        path: the checkpoint, or the folder of the series.
        entries: checkpoints, and folders by step that are not complete, oldest first.
        unfinished: names of what saves have left that were interrupted, or are writing now.
    """

    path: Path
    entries: tuple[ListedCheckpoint, ...]
    unfinished: tuple[str, ...] = ()


def listing(path: Path) -> Listing:
    """What is at a path: a checkpoint, a series, or a run.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    path = local_path(path)
    series = None if is_checkpoint(path) else series_at(path)
    if series is None:
        if not is_checkpoint(path):
            OrbaxCheckpoint(path)  # raises, and says what is there
        return Listing(path=path, entries=(_entry(path, step=None),))
    entries = [_entry(series / str(step), step=step) for step in steps_in(series)]
    for step in incomplete_in(series):
        entries.append(
            ListedCheckpoint(path=series / str(step), step=step, is_complete=False, damage=(f"{INCOMPLETE}.",))
        )
    entries.sort(key=lambda entry: entry.step or 0)
    latest = max((entry.step for entry in entries if entry.step is not None and not entry.damage), default=None)
    entries = [dataclasses.replace(entry, is_latest=entry.step == latest) for entry in entries]
    left = sorted(item.name for item in series.iterdir() if SAVING_SUFFIX in item.name and item.is_dir())
    return Listing(path=series, entries=tuple(entries), unfinished=tuple(left))


def _entry(path: Path, *, step: int | None) -> ListedCheckpoint:
    try:
        opened = OrbaxCheckpoint(path)
    except FourPartError as error:  # the others are listed all the same
        return ListedCheckpoint(path=path, step=step, damage=(f"{error.what} {error.why}",))
    manifest, leaves = opened.manifest, opened.leaves.values()
    entry = ListedCheckpoint(
        path=path, step=step, num_leaves=len(leaves), num_bytes=sum(leaf.nbytes for leaf in leaves)
    )
    if manifest is None:
        return entry
    return dataclasses.replace(
        entry,
        step=step if step is not None else manifest.step,
        damage=tuple(_manifest.damage(path, manifest)),
        saved_at=manifest.saved_at,
        mesh=manifest.mesh,
        processes=manifest.processes,
        version=manifest.versions.get("jshard"),
        metrics=manifest.metrics,
    )
