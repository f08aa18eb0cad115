"""A series in a bucket: whose it is, which checkpoints are there, and which are kept; see `SeriesFolder`.

A run holds its series by the object `owner.json`, and writes it anew every quarter of a minute. Nobody else may take it
while that goes on; who finds it still for a minute, or knows that its process is gone, may, and then the one before
cannot complete a checkpoint any more.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketPath, Tag
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.series_folder import LEDGER, SeriesFiles, warn
from jshard.checkpoint.storage import is_committed
from jshard.checkpoint.timeline import NAME as HISTORY
from jshard.errors import RunError

OWNER = "owner.json"
RENEWED_S = 15.0
LEASE_S = 60.0


class SeriesLease:
    """The claim of this process to a series, kept up in a thread from `take` on, until `release` or its end.

    Args:
        series: what the names of its objects begin with.
    """

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
        """Takes the series, or finds that it still has it.

        Raises:
            CheckpointError: another process has it, and lives.
            RunError: it had the series, and another one has taken it.
        """
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
                    "The series of checkpoints is another run's.",
                    where=str(self._series),
                    why=f"{_who(other)} writes it, and has just renewed its claim, {OWNER}.",
                    do="give each run an address of its own; or end that one first.",
                )
            if _is_gone(other) or time.monotonic() - since_s > LEASE_S:
                if self._owner.replace(text := self._text(), tag) is not None:
                    break
                continue
            if time.monotonic() - since_s < 1:
                warn(f"{self._series}: {_who(other)} may still write it; waiting for a sign, up to {LEASE_S:.0f} s.")
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
                self._lost_to = _who(_found(self._owner))
        raise RunError(
            "The checkpoint could not be written.",
            where=str(self._series),
            why=f"another run took the series while this one did not answer: {self._lost_to}.",
            do="give each run an address of its own.",
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
            except RunError:
                return
            except OSError:
                continue  # the bucket cannot be reached: nobody else can take it there

    def _text(self) -> bytes:
        self._beats += 1
        return json.dumps(self._mine | {"beat": self._beats}).encode()


def _found(owner: BucketPath) -> Mapping[str, Any]:
    try:
        return _parsed(owner.read_bytes())
    except OSError:
        return {}


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _who(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('process_id', '?')} on {owner.get('host', '?')}"


def _is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether a process was on this machine, where its number can be looked up, and is not any more."""
    number = owner.get("process_id")
    if not isinstance(number, int) or owner.get("machine") is None or owner["machine"] != _machine():
        return False
    return _began(number) != owner.get("began")


def _machine() -> str | None:
    """This start of this machine, and the space in which its processes are numbered; None if that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _began(number: int) -> str | None:
    """When a process of this machine began, in its own count; None if there is none."""
    try:
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]


class SeriesBucket(SeriesFiles):
    """The objects of a series, as one process sees them. What only one may do, the first process is to call.

    Args:
        series: what their names begin with.
    """

    folder: BucketPath

    def __init__(self, series: BucketPath) -> None:
        self.folder = series
        self._lease = SeriesLease(series)
        self._history: bytes | None = None

    def begin(self, step: int, *, is_damaged: bool) -> None:
        """See `SeriesFolder.begin`.

        Raises:
            CheckpointError: another run has the series, or something is there that was never completed.
        """
        self._lease.take()
        here = self.folder.objects()
        begun = self._begun()
        for old in begun:
            self._delete_uncommitted(old, here)
        path = self.path(step)
        if is_committed(path) and (is_damaged or self.damage(step) is not None):
            self.set_aside(step)
        if not is_committed(path):  # else the save refuses
            if step not in begun and any(name.startswith(f"{step}/") for name in here):
                raise CheckpointError(
                    "The checkpoint cannot be written.",
                    where=str(path),
                    why=f"there is something at that address already, without a {_manifest.NAME}.",
                    do=f"look at it, and move it away: {_move(path, f'{path}.incomplete')}",
                )
            ours = [old for old in begun if old != step and any(name.startswith(f"{old}/") for name in here)]
            (self.folder / LEDGER).write(json.dumps({"begun": [*ours, step]}).encode())

    def check(self) -> None:
        """Raises a `RunError` if another run has taken the series."""
        self._lease.check()

    def discard(self, step: int) -> None:
        """See `SeriesFolder.discard`."""
        with contextlib.suppress(OSError):  # the next save tries again
            if step in self._begun():
                self._delete_uncommitted(step, self.folder.objects())

    def set_aside(self, step: int) -> None:
        """Takes the manifest of a damaged checkpoint out of the way, so that the step can be saved again."""
        path = self.path(step)
        aside = f"{_manifest.NAME}.damaged-{secrets.token_hex(4)}"
        (path / aside).write((path / _manifest.NAME).read_bytes())
        path.delete([_manifest.NAME])
        warn(f"the damaged checkpoint {path} does not count any more: its manifest is now called {aside}.")

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, its manifest first: it is never there by half."""
        self.path(step).delete([_manifest.NAME])
        self._delete_uncommitted(step, self.folder.objects())

    def release(self) -> None:
        """Lets others have the series."""
        self._lease.release()

    def note(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the history: an object cannot be added to, so it is written anew."""
        path = self.folder / HISTORY
        with contextlib.suppress(OSError):
            if self._history is None:
                self._history = path.read_bytes() if path.is_file() else b""
            self._history += json.dumps(record).encode() + b"\n"
            path.write(self._history)

    def _delete_uncommitted(self, step: int, here: Mapping[str, int]) -> None:
        """Deletes what there is of a step without a manifest, but for one that was set aside."""
        mine = [name for name in here if name.startswith(f"{step}/")]
        if mine and not any(name.startswith(f"{step}/{_manifest.NAME}") for name in mine):
            self.folder.delete(mine)


def _move(path: BucketPath, to: str) -> str:
    tool = "gcloud storage mv" if path.scheme == "gs" else "aws s3 mv --recursive"
    return f"{tool} {path} {to}"
