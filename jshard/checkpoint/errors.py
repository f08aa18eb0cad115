"""Errors of checkpoints, as shown to users."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

from jshard.errors import FourPartError, RunError, ShardingError, causes


class CheckpointError(ShardingError):
    """A checkpoint cannot be written there, or does not match the state to restore into."""


class CheckpointWarning(UserWarning):
    """A requested operation on a checkpoint has an effect that may be unexpected."""


_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def reason(error: BaseException) -> str:
    """The cause in one line; for an error of the operating system, its own message."""
    chain = list(causes(error, context=True))
    for found in chain:
        match = _OS_ERROR.search(str(found))  # the storage library knows errors by their text alone
        number = int(match[1]) if match else getattr(found, "errno", None)
        if number:
            return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})."
    text = next((str(found) for found in reversed(chain) if str(found)), "no reason given")
    return f"{type(chain[-1]).__name__}: {text.splitlines()[0][:300]}"


_MENDS = {  # by the names of errors, as `reason` has them
    ("ENOSPC", "EDQUOT"): "make room, or name a folder on another disk.",
    ("EFBIG",): "allow larger files, as by ulimit -f unlimited, or name a folder on another disk.",
    ("EIO",): "mend the disk, or name a folder on another one.",
    ("EROFS", "EACCES", "EPERM"): "give write access there, or name another folder.",
    ("ENAMETOOLONG",): "give a shorter path.",
    ("ENOTDIR", "EEXIST", "ENOENT"): "name a path whose parents are folders, or can be made.",
}


def in_four_parts(path: object, error: Exception) -> FourPartError:
    """Any error of a checkpoint that could not be written, in the form shown to users."""
    return error if isinstance(error, FourPartError) else write_failed(path, reason(error))


def write_failed(path: object, why: str) -> RunError:
    """The error for a checkpoint that could not be written."""
    return RunError("The checkpoint could not be written.", where=str(path), why=why, do=mend(why))


def mend(why: str) -> str:
    """What to do about a write that failed, by the operating system's name for the cause, as `reason` has it."""
    for names, do in _MENDS.items():
        if any(f"({name})" in why for name in names):
            return do
    return "remove that cause, and write it again."


def unreadable(path: object, why: str) -> RunError:
    """The error for a checkpoint that cannot be read, whatever of it is damaged."""
    return RunError("The checkpoint cannot be read.", where=str(path), why=why, do="restore another one.")


def damaged(path: object, where: Sequence[str], why: str) -> RunError:
    """The error for a checkpoint of which some files or leaves have changed since it was saved."""
    do = "copy it again from where it is whole, or restore another one."
    return RunError("The checkpoint cannot be read.", where=[str(path), *where], why=why, do=do)
