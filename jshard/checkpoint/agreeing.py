"""What all processes do, or none: whoever cannot go on says so, and all of them raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jshard._errors import FourPartError, RunError
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.failures import reason
from jshard.checkpoint.meeting import exchange

_OF_DISK = "ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES", "EPERM"  # as `reason` has them


def agree(topic: str, path: Path, told: Any, error: Exception | None, *, timeout_s: float) -> list[Any]:
    """Tells all processes something, or why this one cannot go on; every process calls it.

    Args:
        topic: a name for the moment; the same in all processes.
        path: of the checkpoint that is written.
        told: of JSON.
        error: why this process cannot go on.
        timeout_s: how long to wait for the others.

    Returns:
        What all have told, by process.

    Raises:
        FourPartError: this process cannot go on, or another one cannot, or did not come.
    """
    own = None if error is None else in_four_parts(path, error)
    # Whoever waited for the others in vain has had its time, and so had they.
    timeout_s = timeout_s / 4 if isinstance(error, TimeoutError) else timeout_s
    try:
        texts = exchange(f"{topic} {path}", json.dumps([_parts(own), told]), timeout_s=timeout_s)
    except RunError as missing:
        if own is None:
            raise
        where, why = [*own.where, *missing.where], f"{own.why}\n{missing.why}"
        raise type(own)(own.what, where=where, why=why, do=own.do) from error
    heard = [json.loads(text) for text in texts]
    if own is not None and own is not error:
        raise own from error
    if own is not None:
        raise own
    failed = {number: parts for number, (parts, _) in enumerate(heard) if parts is not None}
    for number, parts in failed.items():
        if parts["is_request"]:
            raise CheckpointError(
                parts["what"], where=[*parts["where"], f"process {number}"], why=parts["why"], do=parts["do"]
            )
    if failed:
        raise write_failed(path, "\n".join(f"process {number}: {parts['why']}" for number, parts in failed.items()))
    return [other for _, other in heard]


def in_four_parts(path: Path, error: Exception) -> FourPartError:
    """An error of whatever kind as a user meets it."""
    return error if isinstance(error, FourPartError) else write_failed(path, reason(error))


def write_failed(path: Path, why: str) -> RunError:
    """The error for a checkpoint that could not be written."""
    is_of_disk = any(f"({name})" in why for name in _OF_DISK)
    return RunError(
        "The checkpoint could not be written.",
        where=str(path),
        why=why,
        do="make room, or name a folder on another disk." if is_of_disk else "remove that cause, and write it again.",
    )


def _parts(error: FourPartError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    is_request = isinstance(error, CheckpointError)
    return {"is_request": is_request, "what": error.what, "where": error.where, "why": error.why, "do": error.do}
