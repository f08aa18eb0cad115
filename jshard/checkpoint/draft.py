"""The folder of a save until it is complete, `NAME.saving`: whose it is, what becomes of it, what is on the disk.

No two saves write into one, and none removes what another is writing: the first process holds a lock on the file
`NAME.saving.owner` as long as it saves; the system lets go of it when the process dies. Some file systems have no
locks: there the later save takes the folder, and the earlier one finds another token in the file, and fails before it
completes what is not its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from pathlib import Path

from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.errors import FourPartError, RunError

SAVING_SUFFIX = ".saving"
UNCOMMITTED_SUFFIX = ".orbax-checkpoint-tmp"  # Orbax writes beside the final path, and renames

_MENDS = {  # by the names of errors, as `reason` has them
    ("ENOSPC", "EDQUOT"): "make room, or name a folder on another disk.",
    ("EFBIG",): "allow larger files, as by ulimit -f unlimited, or name a folder on another disk.",
    ("EIO",): "mend the disk, or name a folder on another one.",
    ("EROFS", "EACCES", "EPERM"): "give write access there, or name another folder.",
    ("ENAMETOOLONG",): "give a shorter path.",
    ("ENOTDIR", "EEXIST", "ENOENT"): "name a path whose parents are folders, or can be made.",
}
_ARRAY = "zarr.json"  # describes an array, in its folder
_held: set[int] = set()  # files that are locked


class Owner:
    """A claim to the folder of a save, `NAME.saving`.

    Raises:
        CheckpointError: another save that is at work has it.
    """

    def __init__(self, draft: Path) -> None:
        self._draft, self._path = draft, _owner_file(draft)
        self._number = _locked(self._path, create=True)
        if self._number is None:
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(draft),
                why=f"another save is writing it: {_owner_text(self._path)}.",
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
        """Raises a `RunError` if another save took the folder."""
        if not self._path.exists() or self._path.read_text() != self._text:
            raise RunError(
                "The checkpoint could not be written.",
                where=str(self._draft),
                why=f"another save took the folder while this one wrote: {_owner_text(self._path)}.",
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


def is_owned(draft: Path) -> bool:
    """Whether a save is at work in a folder, as far as can be seen."""
    try:
        number = _locked(_owner_file(draft), create=False)
    except OSError:
        return False
    if number is not None:
        os.close(number)
    return number is None


def _owner_file(draft: Path) -> Path:
    return draft.with_name(draft.name + ".owner")


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


def _owner_text(path: Path) -> str:
    try:
        mine = json.loads(path.read_text())
        return f"process {mine['process_id']} on {mine['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it does not say which"


def unnamed(path: Path) -> Path:
    """What a checkpoint is called until it is complete."""
    return path.with_name(path.name + SAVING_SUFFIX)


def discard_unnamed(path: Path) -> None:
    """Removes what an interrupted save left of a checkpoint; not of one at work."""
    if is_owned(unnamed(path)):
        return
    with contextlib.suppress(OSError):
        _owner_file(unnamed(path)).unlink()
    remove_unnamed(path)


def remove_unnamed(path: Path) -> bool:
    """`discard_unnamed` for whoever owns the folder; says whether there was any."""
    left = unnamed(path)
    found = [folder for folder in (left, left.with_name(left.name + UNCOMMITTED_SUFFIX)) if folder.exists()]
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(found)


def in_four_parts(path: Place, error: Exception) -> FourPartError:
    """An error of whatever kind, of a checkpoint that could not be written, as a user meets it."""
    return error if isinstance(error, FourPartError) else write_failed(path, reason(error))


def write_failed(path: Place, why: str) -> RunError:
    """The error for a checkpoint that could not be written."""
    return RunError("The checkpoint could not be written.", where=str(path), why=why, do=mend(why))


def mend(why: str) -> str:
    """What to do about a write that failed, by the operating system's name for the cause, as `reason` has it."""
    for names, do in _MENDS.items():
        if any(f"({name})" in why for name in names):
            return do
    return "remove that cause, and write it again."


# What would survive a power cut.


def keep_on_disk(folder: Path) -> None:
    """Waits until everything in a folder would survive a power cut.

    What TensorStore wrote, the files of arrays and the names beside them, is on the disk already.
    """
    arrays: set[str] = set()
    for inner, folders, names in os.walk(folder):
        if _ARRAY in names or os.path.dirname(inner) in arrays:
            arrays.add(inner)
        else:
            for name in names:
                if not name.endswith(".safetensors"):  # flushed by whoever wrote it
                    flush(os.path.join(inner, name))
        if folders or inner not in arrays:
            flush(inner)


def flush(path: str | Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to flush for a folder
            raise
    finally:
        os.close(number)


def write_text(path: Path, text: str) -> None:
    """Writes a file that is on the disk, and whole, before it has its name."""
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
