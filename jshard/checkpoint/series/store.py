"""The storage of a series, a folder or a bucket: its complete checkpoints, and which of them it wrote itself.

In a folder, each save has its own owner (`ownership.Owner`). In a bucket, a run claims the whole series
(`lease.SeriesLease`).
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import secrets
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from jshard._files import METADATA_BYTES, is_draft, write_text
from jshard._parsing import parse_json
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketError, BucketPath, Place, contents
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning
from jshard.checkpoint.lookup import LEDGER
from jshard.checkpoint.ownership import discard_draft, draft_of, is_owned
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.series import history
from jshard.checkpoint.series.lease import SeriesLease
from jshard.checkpoint.storage import COMMIT_MARK, is_committed
from jshard.errors import RunError

P = TypeVar("P", Path, BucketPath)

Listing = Mapping[str, int]
"""Everything below a bucket address, by name, with sizes in bytes; empty for a folder, which is looked at instead."""


class SeriesStore(abc.ABC, Generic[P]):
    """The contents of a series, as one process sees them; only the first process changes them."""

    mark: str  # the file that marks a complete checkpoint
    move_command: str  # the command that renames one

    def __init__(self, place: P) -> None:
        self.place = place

    def path(self, step: int) -> P:
        """Returns the path of the checkpoint of a step, existing or not."""
        return self.place / str(step)

    def damage(self, step: int) -> str | None:
        """Returns a summary of damaged files of a complete checkpoint; None if there are none."""
        try:
            manifest = own_checkpoint(self.path(step)).manifest
        except BucketError:
            raise  # nothing is known about the checkpoint
        except RunError as error:
            return error.why
        except CheckpointError:
            return None  # from a newer jshard: intact, and a restore reports it
        if manifest is None:
            return None
        faults = _manifest.damage(self.path(step), manifest)
        if not faults:
            return None
        if len(faults) == 1:
            return faults[0]
        return f"{faults[0]}, and {len(faults) - 1} more"

    def metrics(self, step: int) -> Mapping[str, float]:
        """Returns the metrics of a checkpoint; empty if unknown."""
        try:
            manifest = _manifest.read(self.path(step))
        except BucketError:
            raise
        except (RunError, CheckpointError):
            return {}
        return {} if manifest is None else manifest.metrics

    def begin(self, step: int, *, is_damaged: bool) -> None:
        """Removes the remains of interrupted saves, and records the step as this series' own before it is written.

        A damaged checkpoint of the step is set aside. Raises `CheckpointError` if another run owns the series, or
        something incomplete is in the way.
        """
        self.take()
        listing = self.listing()
        begun = self.begun()
        # Of a complete checkpoint nothing is removed: in a folder it has no draft, and in a bucket it has a manifest.
        for old in begun:
            self.discard(old, listing)
        path = self.path(step)
        if is_committed(path) and (is_damaged or self.damage(step) is not None):
            self.set_aside(step)
        if is_committed(path):
            return  # the save refuses, and this checkpoint belongs to another program
        if self.is_in_the_way(step, begun, listing):
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(path),
                why=f"that path already exists, without {self.mark}: an incomplete copy, an "
                "unfinished save, or not a checkpoint.",
                do=f"check it, and move it away: {self.move_command} {path} {path}.incomplete",
            )
        # Before the save: if it is interrupted, the next one knows that the remains are this series' own.
        existing = [old for old in begun if old != step and self.has(old, listing)]
        self.write(LEDGER, json.dumps({"begun": [*existing, step]}))

    def abandon(self, step: int) -> None:
        """Removes the remains of this series' failed save; if that fails, the next save tries again."""
        with contextlib.suppress(OSError):
            if step in self.begun():
                self.discard(step, self.listing())

    def begun(self) -> list[int]:
        """Returns the steps whose checkpoints the series wrote or began to write; none if the ledger is unreadable."""
        try:
            ledger = parse_json(contents(self.place / LEDGER, METADATA_BYTES))
            return [int(step) for step in ledger["begun"]]
        except BucketError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            return []

    @abc.abstractmethod
    def take(self) -> None:
        """Takes the series, if only one run may own it."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises a `RunError` if another run has taken the series."""

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the series."""

    @abc.abstractmethod
    def listing(self) -> Listing:
        """Returns everything below the place, if one request lists it."""

    @abc.abstractmethod
    def discard(self, step: int, listing: Listing) -> None:
        """Removes the remains of this series' unfinished save."""

    @abc.abstractmethod
    def set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint aside so that the step can be saved again, with a warning."""

    @abc.abstractmethod
    def delete(self, step: int) -> None:
        """Deletes a checkpoint such that a partial one never counts as complete."""

    @abc.abstractmethod
    def is_in_the_way(self, step: int, begun: Collection[int], listing: Listing) -> bool:
        """Returns whether another program left something incomplete there."""

    @abc.abstractmethod
    def has(self, step: int, listing: Listing) -> bool:
        """Returns whether anything of a step exists or is being written, by any program."""

    @abc.abstractmethod
    def write(self, name: str, text: str) -> None:
        """Writes a file beside the checkpoints."""

    @abc.abstractmethod
    def add_to_history(self, record: Mapping[str, object]) -> None:
        """Adds a line to the history."""


class FolderStore(SeriesStore[Path]):
    """A series in a folder."""

    mark = COMMIT_MARK
    move_command = "mv"

    def take(self) -> None:
        """See `SeriesStore`: each save has its own owner."""
        self.place.mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        """See `SeriesStore`: each save has its own owner."""

    def release(self) -> None:
        """See `SeriesStore`: each save has its own owner."""

    def listing(self) -> Listing:
        """See `SeriesStore`."""
        return {}

    def discard(self, step: int, listing: Listing) -> None:
        """See `SeriesStore`."""
        discard_draft(self.path(step))

    def set_aside(self, step: int) -> None:
        """See `SeriesStore`."""
        path = self.path(step)
        # A step may be damaged more than once, and no file is ever overwritten.
        for number in itertools.count():
            suffix = f"-{number}" if number else ""
            aside = path.with_name(f"{step}.damaged{suffix}")
            if not aside.exists():
                break
        # The name is no number, so it is no step of the series, and is neither restored nor deleted.
        path.rename(aside)
        warn(f"the damaged checkpoint {path} is now named {aside.name}.")

    def delete(self, step: int) -> None:
        """See `SeriesStore`."""
        # Renamed first, in one step: a crash while files are removed leaves a draft, which never counts as complete.
        try:
            self.path(step).rename(draft_of(self.path(step)))
        finally:
            discard_draft(self.path(step))

    def is_in_the_way(self, step: int, begun: Collection[int], listing: Listing) -> bool:
        """See `SeriesStore`."""
        return self.path(step).exists()

    def has(self, step: int, listing: Listing) -> bool:
        """See `SeriesStore`."""
        return self.path(step).exists() or is_owned(self.path(step))

    def write(self, name: str, text: str) -> None:
        """See `SeriesStore`; what a killed process has left of such a write is removed."""
        # Looked for before: a series has one writer, so a draft that is there already is of a process that is gone.
        drafts = [path for path in self.place.iterdir() if is_draft(path.name, name)]
        write_text(self.place / name, text)
        for draft in drafts:
            draft.unlink(missing_ok=True)

    def add_to_history(self, record: Mapping[str, object]) -> None:
        """See `SeriesStore`."""
        history.append(self.place, record)


class BucketStore(SeriesStore[BucketPath]):
    """A series in a bucket."""

    mark = _manifest.NAME

    def __init__(self, place: BucketPath) -> None:
        super().__init__(place)
        self.move_command = "gcloud storage mv" if place.scheme == "gs" else "aws s3 mv --recursive"
        self._lease = SeriesLease(place)
        self._history: bytes | None = None  # as this process wrote it last

    def take(self) -> None:
        """See `SeriesStore`."""
        self._lease.take()

    def check(self) -> None:
        """See `SeriesStore`."""
        self._lease.check()

    def release(self) -> None:
        """See `SeriesStore`."""
        self._lease.release()

    def listing(self) -> Listing:
        """See `SeriesStore`."""
        return self.place.objects()

    def discard(self, step: int, listing: Listing) -> None:
        """See `SeriesStore`."""
        names = [name for name in listing if name.startswith(f"{step}/")]
        # The name of a manifest that was set aside begins with that of a manifest.
        has_manifest = any(name.startswith(f"{step}/{_manifest.NAME}") for name in names)
        # With a manifest it is complete, or was: a damaged checkpoint keeps its files.
        if names and not has_manifest:
            self.place.delete(names)

    def set_aside(self, step: int) -> None:
        """See `SeriesStore`; a bucket has no rename, so the checkpoint only loses its manifest."""
        path = self.path(step)
        if not is_committed(path):
            return  # the next save removes this series' files
        aside = f"{_manifest.NAME}.damaged-{secrets.token_hex(4)}"
        # Written before the other is deleted: a crash in between leaves both, and the checkpoint as it was.
        (path / aside).write((path / _manifest.NAME).read_bytes())
        path.delete([_manifest.NAME])
        warn(f"the damaged checkpoint {path} is now ignored: its manifest is now named {aside}.")

    def delete(self, step: int) -> None:
        """See `SeriesStore`."""
        self.path(step).delete([_manifest.NAME])  # first: without it, the checkpoint is incomplete
        self.discard(step, self.listing())

    def is_in_the_way(self, step: int, begun: Collection[int], listing: Listing) -> bool:
        """See `SeriesStore`."""
        return step not in begun and self.has(step, listing)

    def has(self, step: int, listing: Listing) -> bool:
        """See `SeriesStore`."""
        return any(name.startswith(f"{step}/") for name in listing)

    def write(self, name: str, text: str) -> None:
        """See `SeriesStore`."""
        (self.place / name).write(text.encode())

    def add_to_history(self, record: Mapping[str, object]) -> None:
        """See `SeriesStore`; all lines are written again, as objects cannot be appended to."""
        path = self.place / history.NAME
        with contextlib.suppress(OSError):
            if self._history is None:
                # Read once: no other run writes to the series, see `take`.
                self._history = path.read_bytes() if path.is_file() else b""
            self._history += json.dumps(record).encode() + b"\n"
            path.write(self._history)


def store_of(place: Place) -> SeriesStore:
    """Returns the store of the series at a place."""
    if isinstance(place, BucketPath):
        return BucketStore(place)
    return FolderStore(place)


def warn(message: str) -> None:
    """Issues a warning about a checkpoint to the caller of the series."""
    warnings.warn(message, CheckpointWarning, stacklevel=3)
