"""The storage of a series, a folder or a bucket: its complete checkpoints, its own ones, and its owner.

In a folder, each save has its own owner (`storage.Owner`). In a bucket, a run claims the whole series with the object
`owner.json`, which it rewrites every 15 seconds. No other run can take it meanwhile. A run that sees no rewrite for a
minute, or knows that the owner's process is gone, may take it; the previous owner can then no longer complete a
checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jshard._files import METADATA_BYTES, write_text
from jshard._parsing import parse_json
from jshard._processes import exchange, is_primary
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import timeline as _history
from jshard.checkpoint.buckets import BucketError, BucketPath, Place, Tag, contents
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, reason
from jshard.checkpoint.lookup import LEDGER
from jshard.checkpoint.ownership import discard_draft, draft_of, is_owned
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.storage import COMMIT_MARK, is_committed
from jshard.errors import RunError

OWNER = "owner.json"
RENEWED_S = 15.0
LEASE_S = 60.0
SHOWN_S = 60.0  # by then a network file system shows a new file to all processes


class SeriesStore:
    """The contents of a series in a folder, as one process sees them; only the first process changes them."""

    mark, move = COMMIT_MARK, "mv"  # the mark of a complete checkpoint; the command that renames one

    def __init__(self, place: Any) -> None:
        self.place = place

    def path(self, step: int) -> Any:
        """The path of the checkpoint of a step, existing or not."""
        return self.place / str(step)

    def damage(self, step: int) -> str | None:
        """A summary of damaged files of a complete checkpoint; None if there are none."""
        try:
            manifest = own_checkpoint(self.path(step)).manifest
        except BucketError:
            raise  # nothing is known about the checkpoint
        except RunError as error:
            return error.why
        except CheckpointError:
            return None  # from a newer jshard: a restore reports it
        found = [] if manifest is None else _manifest.damage(self.path(step), manifest)
        return None if not found else found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else "")

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics of a checkpoint; empty if unknown."""
        try:
            manifest = _manifest.read(self.path(step))
        except BucketError:
            raise
        except (RunError, CheckpointError):
            manifest = None
        return {} if manifest is None else manifest.metrics

    def begin(self, step: int, *, is_damaged: bool) -> None:
        """Removes the remains of interrupted saves, and records the step as this series' own before it is written.

        A damaged checkpoint of the step is set aside. Raises `CheckpointError` if another run owns the series, or
        something incomplete is in the way.
        """
        self.take()
        here, begun = self.listed(), self.begun()
        for old in begun:
            self.discard(old, here)
        path = self.path(step)
        if is_committed(path) and (is_damaged or self.damage(step) is not None):
            self.set_aside(step)
        if is_committed(path):
            return  # the save refuses, and this checkpoint belongs to another program
        if self.in_the_way(step, begun, here):
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(path),
                why=f"that path already exists, without {self.mark}: an incomplete copy, an "
                "unfinished save, or not a checkpoint.",
                do=f"check it, and move it away: {self.move} {path} {path}.incomplete",
            )
        ours = [*(old for old in begun if old != step and self.has(old, here)), step]
        self.write(LEDGER, json.dumps({"begun": ours}))

    def abandon(self, step: int) -> None:
        """Removes the remains of this series' failed save; if that fails, the next save tries again."""
        with contextlib.suppress(OSError):
            if step in self.begun():
                self.discard(step, self.listed())

    def begun(self) -> list[int]:
        """The steps whose checkpoints the series wrote or started to write; empty if the ledger cannot be read."""
        try:
            return [int(step) for step in parse_json(contents(self.place / LEDGER, METADATA_BYTES))["begun"]]
        except BucketError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            return []

    # Overridden for buckets.

    def take(self) -> None:
        """Takes the series, if only one run may own it."""
        self.place.mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        """Raises a `RunError` if another run has taken the series."""

    def release(self) -> None:
        """Releases the series."""

    def listed(self) -> Mapping[str, int]:
        """Everything below the place, if one request lists it."""
        return {}

    def discard(self, step: int, here: Mapping[str, int]) -> None:
        """Removes the remains of this series' unfinished save."""
        discard_draft(self.path(step))

    def set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint aside so that the step can be saved again, with a warning."""
        path = self.path(step)
        names = (f"{step}.damaged" + (f"-{number}" if number else "") for number in itertools.count())
        aside = path.rename(next(there for name in names if not (there := path.with_name(name)).exists()))
        warn(f"the damaged checkpoint {path} is now named {aside.name}.")

    def delete(self, step: int) -> None:
        """Deletes a checkpoint such that a partial one never counts as complete."""
        try:
            self.path(step).rename(draft_of(self.path(step)))
        finally:
            discard_draft(self.path(step))

    def in_the_way(self, step: int, begun: Collection[int], here: Mapping[str, int]) -> bool:
        """Whether another program left something incomplete there."""
        return self.path(step).exists()

    def has(self, step: int, here: Mapping[str, int]) -> bool:
        """Whether anything of a step exists or is being written, by any program."""
        return self.path(step).exists() or is_owned(self.path(step))

    def write(self, name: str, text: str) -> None:
        """Writes a file beside the checkpoints."""
        write_text(self.place / name, text)

    def note(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the history."""
        _history.append(self.place, record)


class _Bucket(SeriesStore):
    """The same, in a bucket."""

    mark = _manifest.NAME

    def __init__(self, series: BucketPath) -> None:
        super().__init__(series)
        self._lease = SeriesLease(series)
        self.take, self.check, self.release = self._lease.take, self._lease.check, self._lease.release
        self.move = "gcloud storage mv" if series.scheme == "gs" else "aws s3 mv --recursive"
        self._history: bytes | None = None

    def listed(self) -> Mapping[str, int]:
        return self.place.objects()

    def discard(self, step: int, here: Mapping[str, int]) -> None:
        mine = [name for name in here if name.startswith(f"{step}/")]
        if mine and not any(name.startswith(f"{step}/{_manifest.NAME}") for name in mine):  # nor one that was set aside
            self.place.delete(mine)

    def set_aside(self, step: int) -> None:
        path = self.path(step)
        if not is_committed(path):
            return  # the next save removes this series' files
        aside = f"{_manifest.NAME}.damaged-{secrets.token_hex(4)}"
        (path / aside).write((path / _manifest.NAME).read_bytes())
        path.delete([_manifest.NAME])
        warn(f"the damaged checkpoint {path} is now ignored: its manifest is now named {aside}.")

    def delete(self, step: int) -> None:
        self.path(step).delete([_manifest.NAME])  # first
        self.discard(step, self.listed())

    def in_the_way(self, step: int, begun: Collection[int], here: Mapping[str, int]) -> bool:
        return step not in begun and self.has(step, here)

    def has(self, step: int, here: Mapping[str, int]) -> bool:
        return any(name.startswith(f"{step}/") for name in here)

    def write(self, name: str, text: str) -> None:
        (self.place / name).write(text.encode())

    def note(self, record: Mapping[str, Any]) -> None:
        path = self.place / _history.NAME
        with contextlib.suppress(OSError):
            before = self._history if self._history is not None else path.read_bytes() if path.is_file() else b""
            self._history = before + json.dumps(record).encode() + b"\n"
            path.write(self._history)  # rewritten whole: objects cannot be appended to


def store_of(place: Place) -> SeriesStore:
    """The store of the series at a place."""
    return _Bucket(place) if isinstance(place, BucketPath) else SeriesStore(place)


class SeriesLease:
    """This process's claim to a series, renewed in a thread from `take` until `release` or the process's end."""

    def __init__(self, series: BucketPath) -> None:
        self._series, self._owner = series, series / OWNER
        self._mine = {"host": socket.gethostname(), "process_id": os.getpid(), "token": secrets.token_hex(8)}
        self._mine["machine"], self._mine["began"] = _machine(), _began(os.getpid())
        self._beats = 0
        self._tag: Tag | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost_to: str | None = None

    def take(self) -> None:
        """Takes the series, or confirms that it still has it; raises if a live process has it."""
        if self._tag is not None or self._lost_to is not None:
            return self.check()
        seen, since_s, changes = {}, time.monotonic(), -1
        while not self._owner.create(text := self._text()):
            try:
                found, tag = self._owner.read()
            except FileNotFoundError:
                continue
            if tag != seen:
                seen, since_s, changes = tag, time.monotonic(), changes + 1
            other = _parsed(found)
            if changes:
                raise CheckpointError(
                    "The series of checkpoints belongs to another run.",
                    where=str(self._series),
                    why=f"{_who(other)} writes to it, and has just renewed its claim, {OWNER}.",
                    do="give each run its own address, or end the other run first.",
                )
            if _is_gone(other) or time.monotonic() - since_s > LEASE_S:
                if self._owner.replace(text := self._text(), tag) is not None:
                    break
                continue
            if time.monotonic() - since_s < 1:
                warn(f"{self._series}: {_who(other)} may still write to it; waiting up to {LEASE_S:.0f} s to see.")
            time.sleep(min(1.0, LEASE_S / 10))
        found, self._tag = self._owner.read()
        if found != text:
            self._tag = None
            return self.take()
        threading.Thread(target=self._keep, name=f"owner of {self._series}", daemon=True).start()
        atexit.register(self.release)

    def check(self) -> None:
        """Raises a `RunError` if another process has taken the series."""
        with self._lock:
            if self._tag is not None:
                self._tag = self._owner.replace(self._text(), self._tag)
                if self._tag is not None:
                    return
            if self._lost_to is None:
                try:
                    self._lost_to = _who(_parsed(self._owner.read_bytes()))
                except OSError:
                    self._lost_to = _who({})
        raise RunError(
            "The checkpoint could not be written.",
            where=str(self._series),
            why=f"another run took the series while this one did not renew its claim: {self._lost_to}.",
            do="give each run its own address.",
        )

    def release(self) -> None:
        """Ends the claim."""
        self._ended.set()
        atexit.unregister(self.release)
        with self._lock, contextlib.suppress(OSError):
            if self._tag is not None and self._owner.replace(self._text(), self._tag) is not None:
                self._series.delete([OWNER])
            self._tag = None

    def _keep(self) -> None:
        while not self._ended.wait(RENEWED_S):
            try:
                self.check()
            except RunError as error:
                if not isinstance(error, BucketError):  # an unreachable bucket: no other run can take it
                    return

    def _text(self) -> bytes:
        self._beats += 1
        return json.dumps(self._mine | {"beat": self._beats}).encode()


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _who(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('process_id', '?')} on {owner.get('host', '?')}"


def _is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether a process of this machine, whose id can be looked up here, has ended."""
    number = owner.get("process_id")
    if not isinstance(number, int) or owner.get("machine") is None or owner["machine"] != _machine():
        return False
    return _began(number) != owner.get("began")


def _machine() -> str | None:
    """The boot id of this machine and its process-id namespace; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _began(number: int) -> str | None:
    """The start time of a process of this machine, in the system's ticks; None if it does not exist."""
    try:
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]


def check_shared(folder: Place, *, timeout_s: float) -> None:
    """Raises an error if not all processes see a file that the first one writes there; every process calls it."""
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
            "The folder for checkpoints cannot be written.", where=str(folder), why=error, do="choose another."
        )
    here = [is_shown((folder / name).exists), socket.gethostname(), str(folder)]
    heard = exchange("folder seen", here, timeout_s=timeout_s + SHOWN_S)  # others may still be looking
    if is_primary():
        folder.delete([name]) if isinstance(folder, BucketPath) else (folder / name).unlink(missing_ok=True)
    blind = [f"process {number} on {host}: {path}" for number, (sees, host, path) in enumerate(heard) if not sees]
    if blind:
        raise CheckpointError(
            "The folder for checkpoints is not shared between the processes.",
            where=blind,
            why=f"process 0 on {heard[0][1]} wrote a file into {heard[0][2]}, and these did not see it within "
            f"{SHOWN_S:.0f} s.",
            do="choose a folder on a file system that all hosts share under the same path.",
        )


def is_shown(condition: Callable[[], bool]) -> bool:
    """Whether the file system eventually shows this process a file that another one wrote."""
    until = time.monotonic() + SHOWN_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def warn(message: str) -> None:
    """Issues a warning about a checkpoint to the caller of the series."""
    warnings.warn(message, CheckpointWarning, stacklevel=3)
