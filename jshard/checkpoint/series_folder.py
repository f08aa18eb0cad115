"""The folder of a series: which checkpoints are there, which of them are whole, and which are kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jshard._processes import exchange, is_primary
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import timeline as _history
from jshard.checkpoint.buckets import BucketError, BucketPath, Place
from jshard.checkpoint.draft import SAVING_SUFFIX, discard_unnamed, is_owned, unnamed, write_text
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, reason
from jshard.checkpoint.lookup import (
    INCOMPLETE,
    OF_A_RUN,
    incomplete_in,
    no_such_step,
    place_of,
    steps_in,
)
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.storage import CHECKPOINT_METADATA, is_committed, is_item
from jshard.checkpoint.timeline import NAME as HISTORY
from jshard.errors import FourPartError, RunError

LEDGER = "series.json"  # the steps whose checkpoints a series wrote, or began to: nothing else is deleted
SHOWN_S = 60.0  # within it a network file system shows all processes what one of them wrote


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


class SeriesFiles:
    """What a series has in a folder or in a bucket, as one process sees it."""

    folder: Any

    def path(self, step: int) -> Any:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / str(step)

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a complete checkpoint, in short; None if they are all there."""
        try:
            manifest = own_checkpoint(self.path(step)).manifest
        except BucketError:
            raise  # nothing is known of the checkpoint
        except RunError as error:
            return error.why
        except CheckpointError:
            return None  # of a newer jshard: a restore says so
        found = [] if manifest is None else _manifest.damage(self.path(step), manifest)
        return None if not found else found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else "")

    def delete_old(self, keep: Keep, *, written: int) -> None:
        """Deletes what no rule keeps, of what the series wrote."""
        begun = self._begun()
        ours = {written, *(old for old in steps_in(self.folder) if old in begun)}
        stay = keep.stay(ours, self._metrics(ours) if keep.best else {}, written=written)
        for old in ours - stay:
            try:
                self.delete(old)
            except OSError as error:
                warn(f"the old checkpoint {self.path(old)} could not be deleted: {reason(error)}")

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, so that it is never there by half."""
        raise NotImplementedError

    def _begun(self) -> list[int]:
        """The steps in the ledger; one that cannot be read claims nothing."""
        try:
            return [int(step) for step in json.loads((self.folder / LEDGER).read_bytes())["begun"]]
        except BucketError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _metrics(self, steps: set[int]) -> dict[int, Mapping[str, float]]:
        found = {}
        for step in steps:
            try:
                manifest = _manifest.read(self.path(step))
            except BucketError:
                raise
            except (RunError, CheckpointError):
                continue
            if manifest is not None:
                found[step] = manifest.metrics
        return found


class SeriesFolder(SeriesFiles):
    """The files of a series, as one process sees them. What only one may do, the first process is to call.

    Args:
        folder: where the checkpoints are; it need not be there.
    """

    folder: Path

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: int, *, is_damaged: bool) -> None:
        """Removes what interrupted saves left, and notes that this step is ours before it is there.

        Args:
            step: the one that is saved.
            is_damaged: whether what is there of this step is known to be damaged.

        Raises:
            CheckpointError: something is there that was never completed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        begun = self._begun()
        for old in begun:
            discard_unnamed(self.path(old))
        path = self.path(step)
        if is_committed(path) and (is_damaged or self.damage(step) is not None):
            self.set_aside(step)
        if path.is_dir() and not is_committed(path):
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(path),
                why=f"there is something at that path already: {INCOMPLETE}.",
                do=f"look at it, and move it away: mv {path} {path}.incomplete",
            )
        if not path.exists():  # else the save refuses, and this one is not ours
            there = lambda old: self.path(old).exists() or is_owned(unnamed(self.path(old)))  # another may be saving it
            ours = [*(old for old in begun if old != step and there(old)), step]
            write_text(self.folder / LEDGER, json.dumps({"begun": ours}))

    def discard(self, step: int) -> None:
        """Removes what a save of ours that failed has left."""
        if step in self._begun():
            discard_unnamed(self.path(step))

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint to `STEP.damaged`, so that the step can be saved again."""
        path = self.path(step)
        names = (f"{step}.damaged" + (f"-{number}" if number else "") for number in itertools.count())
        aside = path.rename(next(there for name in names if not (there := path.with_name(name)).exists()))
        warn(f"the damaged checkpoint {path} is now called {aside.name}.")

    def delete(self, step: int) -> None:
        """See `SeriesFiles.delete`: the new name makes it one step."""
        try:
            self.path(step).rename(unnamed(self.path(step)))
        finally:
            discard_unnamed(self.path(step))

    def check(self) -> None:
        """Nothing: the folder of each save has an owner."""

    def release(self) -> None:
        """Nothing."""

    def note(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the history."""
        _history.append(self.folder, record)


def check_shared(folder: Place, *, timeout_s: float) -> None:
    """The first process writes a file, and the others look for it; every process calls it.

    Args:
        folder: made if it is not there.
        timeout_s: how long to wait for the other processes.

    Raises:
        CheckpointError: some process does not see the file.
        RunError: it cannot be written, or a process did not come.
    """
    if jax.process_count() == 1:
        return
    name, error = f".shared-{secrets.token_hex(8)}", ""
    if is_primary():
        try:
            if isinstance(folder, BucketPath):
                (folder / name).write(b"")
            else:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
        except OSError as caught:
            error = reason(caught)
    name, error = exchange("folder", [name, error], timeout_s=timeout_s)[0]
    if error:
        raise RunError(
            "The folder for checkpoints cannot be written.", where=str(folder), why=error, do="name another."
        )
    here = [is_shown((folder / name).exists), socket.gethostname(), str(folder)]
    heard = exchange("folder seen", here, timeout_s=timeout_s + SHOWN_S)  # others may be looking still
    if is_primary():
        folder.delete([name]) if isinstance(folder, BucketPath) else (folder / name).unlink(missing_ok=True)
    blind = [f"process {number} on {host}: {path}" for number, (sees, host, path) in enumerate(heard) if not sees]
    if blind:
        raise CheckpointError(
            "The folder for checkpoints is not shared between the processes.",
            where=blind,
            why=f"process 0 on {heard[0][1]} wrote a file into {heard[0][2]}, and these did not see it in "
            f"{SHOWN_S:.0f} s.",
            do="name a folder on a file system that all hosts have, by the same path.",
        )


def is_shown(condition: Callable[[], bool]) -> bool:
    """Whether the file system shows this process, sooner or later, what another one wrote."""
    until = time.monotonic() + SHOWN_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def warn(message: str) -> None:
    """What became of a checkpoint, for whoever called the series."""
    warnings.warn(message, CheckpointWarning, stacklevel=3)


# What is in a folder of checkpoints, and which checkpoint a path means.


def series_at(path: Place) -> Place | None:
    """The folder of the series at a path, that of a run or itself; None if there is none.

    It is looked at, by this process alone: nothing is written, and no other process is asked.
    """
    path = place_of(path)
    for folder in (path / OF_A_RUN, path):
        if not is_checkpoint(folder) and (steps_in(folder) or _holds(folder, (HISTORY, LEDGER))):
            return folder
    return None


def checkpoint_at(path: Place, step: int | None = None) -> Place:
    """The checkpoint that a path means, whether it is damaged or not.

    Args:
        path: a checkpoint, a series, or a run.
        step: which one of a series; the newest by default.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path = place_of(path)
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


def is_checkpoint(path: Place) -> bool:
    """Whether a folder looks like one checkpoint, or like one tree of one, by whomever it was written."""
    return is_committed(path) or is_item(path) or _holds(path, (_manifest.NAME, CHECKPOINT_METADATA))


def _holds(folder: Place, names: Collection[str]) -> bool:
    return any((folder / name).is_file() for name in names)


# What is in a folder of checkpoints.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint, as it is listed; what only its manifest says is empty for one that jshard did not write."""

    path: Place
    step: int | None  # number of steps that were done; None where nobody said
    is_latest: bool = False  # the one that a run would go on from
    is_complete: bool = True  # else it is no checkpoint, and `damage` says what it may be
    damage: tuple[str, ...] = ()  # a line each; of large files the sizes are looked at, and no values
    num_leaves: int = 0
    num_bytes: int = 0
    saved_at: float | None = None  # seconds since 1970
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    processes: int | None = None  # that saved it
    version: str | None = None  # of the jshard that wrote it
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """What is at a path: checkpoints, and folders by step that are not complete, oldest first."""

    path: Place
    entries: tuple[ListedCheckpoint, ...]
    unfinished: tuple[str, ...] = ()  # names of what saves have left that were interrupted, or are writing now


def listing(path: Place) -> Listing:
    """What is at a path: a checkpoint, a series, or a run.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    path = place_of(path)
    series = None if is_checkpoint(path) else series_at(path)
    if series is None:
        if not is_checkpoint(path):
            own_checkpoint(path)  # raises, and says what is there
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


def _entry(path: Place, *, step: int | None) -> ListedCheckpoint:
    try:
        opened = own_checkpoint(path)
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
