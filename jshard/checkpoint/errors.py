"""Errors of checkpoints, as shown to users."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence

from jshard._types import Json
from jshard.errors import FourPartError, RunError, ShardingError, UnsafeFileError, causes, printable


class CheckpointError(ShardingError):
    """A checkpoint cannot be written to a path, or does not match the state to restore into."""


class SurplusError(CheckpointError):
    """A checkpoint has leaves that the state to restore into has no place for, and otherwise fits it."""


class DamagedError(RunError, CheckpointError):
    """A checkpoint is damaged, or cannot be read. The request may be right: exit code 1."""


class CheckpointWarning(UserWarning):
    """A requested operation on a checkpoint has an effect that may be unexpected."""


_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def reason(error: BaseException) -> str:
    """Returns the cause in one line; for an operating-system error, the system's message."""
    chain = list(causes(error, context=True))
    # Libraries raise their own errors from that of the system: it may be anywhere in the chain.
    for cause in chain:
        if isinstance(cause, UnsafeFileError):
            return f"{printable(cause.where[0])}: {cause.why}"
        number = _os_error_number(cause)
        if number:
            return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})."
    text = "no reason given"
    for cause in chain:
        text = str(cause) or text  # the last that says something: it was the first to be raised
    return f"{type(chain[-1]).__name__}: {text.splitlines()[0][:300]}"


def _os_error_number(error: BaseException) -> int | None:
    match = _OS_ERROR.search(str(error))  # the storage library reports errors only as text
    if match:
        return int(match[1])
    return getattr(error, "errno", None)


_MENDS = {  # by error names, as `reason` writes them
    ("ENOSPC", "EDQUOT"): "free some space, or choose a folder on another disk.",
    ("EFBIG",): "allow larger files, for example with ulimit -f unlimited, or choose a folder on another disk.",
    ("EIO",): "repair the disk, or choose a folder on another one.",
    ("EROFS", "EACCES", "EPERM"): "grant write access there, or choose another folder.",
    ("ENAMETOOLONG",): "use a shorter path.",
    ("ENOTDIR", "EEXIST", "ENOENT"): "choose a path whose parents are folders or can be created.",
}


def reasons_of(failures: Mapping[int, Mapping[str, Json]]) -> str:
    """Returns why some processes have failed, a line each."""
    return "\n".join(f"process {process}: {parts['why']}" for process, parts in failures.items())


def in_four_parts(path: object, error: Exception) -> FourPartError:
    """Returns any error from writing a checkpoint in the form shown to users."""
    if isinstance(error, FourPartError):
        return error
    return write_failed(path, reason(error))


def write_failed(path: object, why: str) -> RunError:
    """Makes the error for a checkpoint that could not be written."""
    return RunError("The checkpoint could not be written.", where=str(path), why=why, do=mend(why))


def mend(why: str) -> str:
    """Returns what to do about a failed write, by the system's error name, as `reason` writes it."""
    for names, do in _MENDS.items():
        if any(f"({name})" in why for name in names):
            return do
    return "fix that, then write it again."


def unreadable(path: object, why: str) -> DamagedError:
    """Makes the error for a checkpoint that cannot be read."""
    return DamagedError("The checkpoint cannot be read.", where=str(path), why=why, do="restore another checkpoint.")


def damaged(path: object, where: Sequence[str], why: str) -> DamagedError:
    """Makes the error for a checkpoint whose files or leaves have changed since it was saved."""
    do = "copy it again from an intact copy, or restore another checkpoint."
    return DamagedError("The checkpoint cannot be read.", where=[str(path), *where], why=why, do=do)
