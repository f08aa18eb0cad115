"""Checks that all processes see one folder, and waits for what a network file system shows late."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

import jax

from jshard._processes import exchange, is_primary
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.errors import RunError

SHOWN_S = 60.0
"""By then a network file system shows a new file to all processes."""


def check_shared(folder: Place, *, timeout_s: float) -> None:
    """Raises an error if not all processes see a file that the first one writes there; every process calls it."""
    if jax.process_count() == 1:
        return
    # Not a number, so no step; and new, as a file of an earlier check would prove nothing.
    name = f".shared-{secrets.token_hex(8)}"
    error = _write_file(folder, name) if is_primary() else ""
    # Every process has drawn a name: that of the first one is the file's.
    name, error = exchange("folder", [name, error], timeout_s=timeout_s)[0]
    if error:
        raise RunError(
            "The folder for checkpoints cannot be written.", where=str(folder), why=error, do="choose another."
        )
    reply = [is_shown((folder / name).exists), socket.gethostname(), str(folder)]
    replies = exchange("folder seen", reply, timeout_s=timeout_s + SHOWN_S)  # others may still be looking
    if is_primary():
        # Only after the exchange: all processes have looked by now.
        _remove_file(folder, name)
    not_seen = []
    for process, (is_seen, host, path) in enumerate(replies):
        if not is_seen:
            not_seen.append(f"process {process} on {host}: {path}")
    if not_seen:
        _, first_host, first_path = replies[0]
        raise CheckpointError(
            "The folder for checkpoints is not shared between the processes.",
            where=not_seen,
            why=f"process 0 on {first_host} wrote a file into {first_path}, and these did not see it within "
            f"{SHOWN_S:.0f} s.",
            do="choose a folder on a file system that all hosts share under the same path.",
        )


def _write_file(folder: Place, name: str) -> str:
    """Writes an empty file; returns why it could not, or "".

    The reason is returned and not raised, as the other processes wait for it.
    """
    try:
        if isinstance(folder, BucketPath):
            (folder / name).write(b"")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    except OSError as error:
        return reason(error)
    return ""


def _remove_file(folder: Place, name: str) -> None:
    if isinstance(folder, BucketPath):
        folder.delete([name])
    else:
        (folder / name).unlink(missing_ok=True)


def is_shown(condition: Callable[[], bool]) -> bool:
    """Waits for a file that another process wrote; returns whether the file system shows it to this one in time."""
    deadline_s = time.monotonic() + SHOWN_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True
