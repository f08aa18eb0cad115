"""One live run per folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from jshard._files import open_in_place, read_text
from jshard.errors import RunError

_LOCK_BYTES = 4096  # more than the file holds: a host name has at most 255
_RETRY_S = 0.2
# Errors of network file systems mounted without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """An exclusive lock on a file, which it creates, and which names the holder.

    The kernel releases the lock however the process ends, so a killed run never blocks another. A
    forked child, such as a data worker, does not keep it.

    Args:
        path: the file.
        token: a further word in it.

    Attributes:
        is_held: False if the file system has no locks.

    Raises:
        RunError: a live process holds it.
        OSError: the file cannot be written, or is a link: the lock is written in place.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self._file: int | None = open_in_place(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _close_to_others(self._file, path)
            self.is_held = _lock(self._file, fcntl.LOCK_EX, path)
            # Only now: before, the file may be that of a live run.
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n{token}\n".encode(), 0)
        except (OSError, RunError):
            self.release()
            raise
        os.register_at_fork(after_in_child=self.release)  # closes the child's copy, which would keep it locked

    def release(self) -> None:
        """Releases the lock; the file stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @staticmethod
    def token(path: Path) -> str | None:
        """Returns the word that the holder wrote; None if it cannot be read."""
        try:
            lines = read_text(path, _LOCK_BYTES).split("\n")
        except (OSError, ValueError):
            return None
        if len(lines) < 2:
            return None
        return lines[1]

    @staticmethod
    def check_free(path: Path, *, wait_s: float = 0.0) -> None:
        """Raises a RunError if a live process holds it and does not release it in that time; changes nothing."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                _check_free_now(path)
                return
            except RunError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(_RETRY_S)


def _check_free_now(path: Path) -> None:
    try:
        file = open_in_place(path, os.O_RDONLY)
    except OSError:
        return  # missing, or not readable: a later step reports it
    try:
        # Shared: the processes of one run check at the same time; NFS refuses an exclusive lock to a reader.
        with contextlib.suppress(OSError):
            _lock(file, fcntl.LOCK_SH, path)
    finally:
        os.close(file)


def _close_to_others(file: int, path: Path) -> None:
    """Lets only those open a lock file who may write into its folder: a reader of a file can hold its lock."""
    folder = path.parent.stat().st_mode
    mode = 0o600
    if folder & stat.S_IWGRP:
        mode |= 0o060
    if folder & stat.S_IWOTH:
        mode |= 0o006
    with contextlib.suppress(PermissionError):  # it is a colleague's
        os.fchmod(file, mode)


def _lock(file: int, kind: int, path: Path) -> bool:
    """Locks a file; returns False if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, 1000).decode(errors="replace").split("\n")[0]
        raise RunError(
            "The folder is in use by a live run.",
            where=str(path.parent),
            why=f"{holder or 'another process'} holds the lock.",
            do=f"let that run end or stop it, or name another folder: --out {path.parent}-2",
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
