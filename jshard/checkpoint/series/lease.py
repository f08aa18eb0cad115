"""A run's claim to a series in a bucket: no two runs write checkpoints into one series.

A bucket has no lock that ends with its process. So a run claims the whole series with the object `owner.json`, which it
rewrites every 15 seconds. No other run can take it meanwhile. A run that sees no rewrite for a minute, or knows that
the owner's process is gone, may take it; the previous owner can then no longer complete a checkpoint.

    first run     take  rewrite  rewrite  (hangs)  .  .  .  .  .  check: the version is another one, an error
    second run               waits, sees a rewrite: an error
    third run                                 waits a minute  take  rewrite  rewrite
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
import warnings
from collections.abc import Mapping
from pathlib import Path

from jshard._parsing import parse_json
from jshard._types import Json
from jshard.checkpoint.buckets import BucketError, BucketPath, Tag
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning
from jshard.errors import RunError

OWNER = "owner.json"
RENEWED_S = 15.0  # a quarter of `LEASE_S`: some renewals may be late, or fail
LEASE_S = 60.0


class SeriesLease:
    """This process's claim to a series, renewed in a thread from `take` until `release` or the process's end."""

    def __init__(self, series: BucketPath) -> None:
        self._series = series
        self._owner = series / OWNER
        self._identity = {
            "host": socket.gethostname(),
            "process_id": os.getpid(),
            "token": secrets.token_hex(8),
            "machine": _machine(),
            "began": _start_time(os.getpid()),
        }
        self._beats = 0
        self._tag: Tag | None = None  # the version of the object that this process wrote; None without a claim
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost_to: str | None = None

    def take(self) -> None:
        """Takes the series, or confirms that it still has it; raises if a live process has it."""
        if self._tag is not None or self._lost_to is not None:
            self.check()
            return
        text = self._claim()
        found_text, tag = self._owner.read()
        if found_text != text:  # another run took it in between
            self.take()
            return
        # The tag comes from this read: `create` returns none.
        self._tag = tag
        threading.Thread(target=self._renew_until_ended, name=f"owner of {self._series}", daemon=True).start()
        atexit.register(self.release)

    def _claim(self) -> bytes:
        """Waits until no live process has the series, and writes this one's claim; returns its text."""
        first_tag: Tag | None = None  # of the other run's claim
        first_seen_s = time.monotonic()
        while True:
            text = self._text()
            if self._owner.create(text):
                return text
            try:
                found_text, tag = self._owner.read()
            except FileNotFoundError:  # released in between
                continue
            owner = _parsed(found_text)
            if first_tag is None:
                first_tag = tag
                first_seen_s = time.monotonic()
            elif tag != first_tag:
                raise CheckpointError(
                    "The series of checkpoints belongs to another run.",
                    where=str(self._series),
                    why=f"{_name_of(owner)} writes to it, and has just renewed its claim, {OWNER}.",
                    do="give each run its own address, or end the other run first.",
                )
            # By this process's clock from its first look, as the clocks of two hosts may differ.
            waited_s = time.monotonic() - first_seen_s
            if _has_ended(owner) or waited_s > LEASE_S:
                text = self._text()
                # Only if it is still the version that was seen: of several runs that wait, one succeeds.
                if self._owner.replace(text, tag) is not None:
                    return text
                continue
            if waited_s < 1:
                message = (
                    f"{self._series}: {_name_of(owner)} may still write to it; waiting up to {LEASE_S:.0f} s to see."
                )
                warnings.warn(message, CheckpointWarning, stacklevel=4)
            time.sleep(min(1.0, LEASE_S / 10))

    def check(self) -> None:
        """Raises a `RunError` if another process has taken the series."""
        with self._lock:
            if self._renew():
                return
            # Once: the new owner may end, and its name would be lost.
            if self._lost_to is None:
                self._lost_to = self._name_of_owner()
        raise RunError(
            "The checkpoint could not be written.",
            where=str(self._series),
            why=f"another run took the series while this one did not renew its claim: {self._lost_to}.",
            do="give each run its own address.",
        )

    def _renew(self) -> bool:
        """Rewrites the claim, if it is still the version that this process wrote; returns whether it was."""
        if self._tag is not None:
            # None if another run has replaced the object: from then on this one has no claim, and never takes it back.
            self._tag = self._owner.replace(self._text(), self._tag)
        return self._tag is not None

    def _name_of_owner(self) -> str:
        try:
            return _name_of(_parsed(self._owner.read_bytes()))
        except OSError:
            return _name_of({})

    def release(self) -> None:
        """Ends the claim."""
        self._ended.set()
        atexit.unregister(self.release)
        with self._lock, contextlib.suppress(OSError):
            if self._renew():  # otherwise it is another run's object
                # A deletion cannot be conditional. So the claim is renewed just before, and no other run can take it
                # for a minute.
                self._series.delete([OWNER])
            self._tag = None

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(RENEWED_S):
            try:
                self.check()
            except RunError as error:
                if not isinstance(error, BucketError):  # an unreachable bucket: no other run can take it
                    return

    def _text(self) -> bytes:
        """Returns a claim that differs from all before, so that others see that it was renewed."""
        self._beats += 1
        return json.dumps(self._identity | {"beat": self._beats}).encode()


def _parsed(text: bytes) -> Mapping[str, Json]:
    """Returns the fields of a claim; none if it is damaged."""
    try:
        fields = parse_json(text)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _name_of(owner: Mapping[str, Json]) -> str:
    return f"process {owner.get('process_id', '?')} on {owner.get('host', '?')}"


def _has_ended(owner: Mapping[str, Json]) -> bool:
    """Returns whether a process of this machine, whose id can be looked up here, has ended."""
    process_id = owner.get("process_id")
    machine = owner.get("machine")
    if not isinstance(process_id, int) or machine is None or machine != _machine():
        return False
    return _start_time(process_id) != owner.get("began")  # the id may be another process's by now


def _machine() -> str | None:
    """Returns the boot id of this machine and its process-id namespace; None if unknown."""
    try:
        # In another container the same process id is another process; after a restart of the machine it is, too.
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _start_time(process_id: int) -> str | None:
    """Returns the start time of a process of this machine, in the system's ticks; None if it does not exist."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may contain spaces and parentheses.
    state, *fields = status.rpartition(")")[2].split()
    if state in "ZX":  # a zombie, or dead
        return None
    return fields[18]  # `starttime`, field 22 of proc(5); the first of `fields` is number 4
