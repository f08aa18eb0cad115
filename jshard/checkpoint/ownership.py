"""The folder of a save until its checkpoint is complete, and who may write there.

No two saves write into one folder, and none removes the files of another: the first process locks the file `NAME.owner`
during the save, and the system releases the lock if the process dies. On file systems without locks, the later save
takes the folder; the earlier one finds another token in the file, and fails before it completes a folder that it no
longer owns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
from pathlib import Path

from jshard._files import open_in_place, read_bytes, read_json
from jshard.checkpoint.errors import CheckpointError
from jshard.errors import RunError, UnsafeFileError

DRAFT_SUFFIX = ".orbax-checkpoint-tmp"
"""Of the folder's name until the checkpoint is complete: Orbax writes beside the final path, then renames."""

_OWNER_BYTES = 4096
_locked_files: set[int] = set()  # descriptors of this process; see `_close_in_child`


class Owner:
    """A claim to write a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._checkpoint = path
        self._file_path = _owner_file(path)
        self._file = _open_and_lock(self._file_path, create=True)
        if self._file is None:
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(path),
                why=f"another save is writing it: {_owner_text(self._file_path)}.",
                do="let only one program save into a folder, or save under another name.",
            )
        claim = {"host": socket.gethostname(), "process_id": os.getpid(), "token": secrets.token_hex(8)}
        self._text = json.dumps(claim)
        _locked_files.add(self._file)
        try:
            # The file may have the claim of a save that was killed.
            os.truncate(self._file, 0)
            os.pwrite(self._file, self._text.encode(), 0)
        except OSError:  # a full disk must not lock the step for good
            self._file_path.unlink(missing_ok=True)
            self._close()
            raise

    def check(self) -> None:
        """Raises a `RunError` if another save took the folder."""
        if self._current_text() != self._text:
            raise RunError(
                "The checkpoint could not be written.",
                where=str(self._checkpoint),
                why=f"another save took the folder during this one: {_owner_text(self._file_path)}.",
                do="let only one program save into a folder.",
            )

    def release(self) -> None:
        """Ends the claim."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            # Otherwise it is the claim of another save, on a file system without locks.
            if self._current_text() == self._text:
                # Removed while it is locked: see `_open_and_lock`, which checks that it has locked the current file.
                self._file_path.unlink()
        self._close()

    def _current_text(self) -> str | None:
        """Returns the text that the file has by now; None if it is gone, or is no longer a file."""
        try:
            return read_bytes(self._file_path, _OWNER_BYTES).decode(errors="replace")
        except (FileNotFoundError, UnsafeFileError):
            return None

    def _close(self) -> None:
        if self._file is not None:
            _locked_files.discard(self._file)
            os.close(self._file)
            self._file = None


def is_owned(path: Path) -> bool:
    """Returns whether a save of a checkpoint appears to be running."""
    try:
        file = _open_and_lock(_owner_file(path), create=False)
    except OSError:
        return False
    if file is None:
        return True
    os.close(file)
    return False


def _owner_file(path: Path) -> Path:
    return path.with_name(path.name + ".owner")


def _open_and_lock(path: Path, *, create: bool) -> int | None:
    """Opens a file, and locks it if the file system supports it; returns None if another process has the lock."""
    flags = os.O_RDWR
    if create:
        flags |= os.O_CREAT
    while True:
        file = open_in_place(path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:
            return file  # no locks there
        # The owner may have removed the file between the two calls: no other process could find the one locked here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)


def _close_in_child() -> None:
    """Closes locked files in a forked child, which would otherwise keep the locks when its parent has died."""
    for file in _locked_files:
        with contextlib.suppress(OSError):
            os.close(file)
    _locked_files.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _owner_text(path: Path) -> str:
    try:
        claim = read_json(path, _OWNER_BYTES)
        return f"process {claim['process_id']} on {claim['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"


# ---- the folder


def draft_of(path: Path) -> Path:
    """Returns the name of a checkpoint's folder until it is complete."""
    return path.with_name(path.name + DRAFT_SUFFIX)


def discard_draft(path: Path) -> None:
    """Removes the remains of an interrupted save, unless it is still running."""
    if is_owned(path):
        return
    with contextlib.suppress(OSError):
        _owner_file(path).unlink()
    remove_draft(path)


def remove_draft(path: Path) -> bool:
    """Removes the remains of an interrupted save, for the owner of the checkpoint; returns whether there were any."""
    draft = draft_of(path)
    if draft.is_symlink():  # what it points to is not removed, and nothing is written there
        draft.unlink()
        return True
    exists = draft.exists()
    shutil.rmtree(draft, ignore_errors=True)
    return exists
