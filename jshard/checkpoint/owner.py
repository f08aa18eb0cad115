"""Whose save a folder `NAME.saving` is: no two write into one, and none removes what another is writing.

The first process holds a lock on the file `NAME.saving.owner` as long as it saves; the system lets go of it when the
process dies. Some file systems have no locks: there the later save takes the folder, and the earlier one finds another
token in the file, and fails before it seals what is not its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from pathlib import Path

from jshard.checkpoint.errors import CheckpointError
from jshard.errors import RunError

_SUFFIX = ".owner"
_held: set[int] = set()  # files that are locked


class Owner:
    """A claim to the folder of a save.

    Args:
        draft: the folder, `NAME.saving`.

    Raises:
        CheckpointError: another save that is at work has it.
    """

    def __init__(self, draft: Path) -> None:
        self._draft, self._path = draft, owner_file(draft)
        self._number = _locked(self._path, create=True)
        if self._number is None:
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(draft),
                why=f"another save is writing it: {_told(self._path)}.",
                do="let one program save into a folder; or save under another name.",
            )
        mine = {"host": socket.gethostname(), "process_id": os.getpid(), "token": secrets.token_hex(8)}
        self._text = json.dumps(mine)
        _held.add(self._number)
        try:
            os.truncate(self._number, 0)
            os.pwrite(self._number, self._text.encode(), 0)
        except OSError:  # a full disk must not lock the step for good
            self._path.unlink(missing_ok=True)
            self._close()
            raise

    def check(self) -> None:
        """Whether the folder is ours still.

        Raises:
            RunError: another save took it.
        """
        if not self._path.exists() or self._path.read_text() != self._text:
            raise RunError(
                "The checkpoint could not be written.",
                where=str(self._draft),
                why=f"another save took the folder while this one wrote: {_told(self._path)}.",
                do="let one program save into a folder.",
            )

    def release(self) -> None:
        """Ends the claim."""
        if self._number is None:
            return
        with contextlib.suppress(OSError):
            if self._path.read_text() == self._text:
                self._path.unlink()
        self._close()

    def _close(self) -> None:
        if self._number is not None:
            _held.discard(self._number)
            os.close(self._number)
            self._number = None


def owner_file(draft: Path) -> Path:
    """The file that says whose the folder of a save is."""
    return draft.with_name(draft.name + _SUFFIX)


def is_owned(draft: Path) -> bool:
    """Whether a save is at work in a folder, as far as can be seen."""
    try:
        number = _locked(owner_file(draft), create=False)
    except OSError:
        return False
    if number is not None:
        os.close(number)
    return number is None


def _locked(path: Path, *, create: bool) -> int | None:
    """An open file that is locked, if the file system can; None if another one holds it."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(number)
            return None
        except OSError:
            return number  # no locks there
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(number), os.stat(path)):
                return number
        os.close(number)  # whoever had it removed it meanwhile


def _let_go_in_a_child() -> None:
    """A lock outlives its process while a fork of it has the file open."""
    for number in _held:
        with contextlib.suppress(OSError):
            os.close(number)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_a_child)


def _told(path: Path) -> str:
    try:
        mine = json.loads(path.read_text())
        return f"process {mine['process_id']} on {mine['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it does not say which"
