"""One live run per folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from jshard._errors import RunError

# Network file systems that are mounted without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """An exclusive lock on a file; it makes the file, and writes into it who holds it.

    The kernel takes the lock back when the process ends in whatever way, so a killed run never blocks another. A
    forked child, such as a data worker, does not hold on to it.

    Args:
        path: the file.
        token: a further word in it.

    Attributes:
        is_held: False where the file system knows no locks.

    Raises:
        RunError: a live process holds it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.is_held = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, 1000).decode(errors="replace").split("\n")[0]
            self.is_held = False
            if isinstance(error, BlockingIOError):
                self.release()
                raise _taken(path, holder) from error
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n{token}\n".encode(), 0)
        except OSError:
            self.release()
            raise
        os.register_at_fork(after_in_child=self.release)  # closes the child's copy, which alone would keep it locked

    def release(self) -> None:
        """Gives the lock back; the file stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @staticmethod
    def token(path: Path) -> str | None:
        """The word that the holder wrote; None if there is none to read."""
        try:
            lines = path.read_text().split("\n")
        except OSError:
            return None
        return lines[1] if len(lines) > 1 else None

    @staticmethod
    def check_free(path: Path) -> None:
        """Looks whether a live process holds it, and changes nothing.

        Raises:
            RunError: one does.
        """
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return  # not there, or not ours to read: what comes next will tell
        try:
            # Shared: the processes of one run look at the same time, and NFS refuses the other kind to a reader.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(path, os.read(file, 1000).decode(errors="replace").split("\n")[0]) from error
        except OSError:
            return
        finally:
            os.close(file)


def _taken(path: Path, holder: str) -> RunError:
    return RunError(
        "The folder is in use by a live run.",
        where=str(path.parent),
        why=f"{holder or 'another process'} holds the lock.",
        do=f"let that run end or stop it, or name another folder: --out {path.parent}-2",
    )
