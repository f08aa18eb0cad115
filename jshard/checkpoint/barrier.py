"""What processes exchange while their devices are busy: values, agreement to go on, and one shared folder."""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import jax

from jshard._compat import coordinator
from jshard._processes import gather_texts, is_primary
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.errors import FourPartError, RunError


def exchange(topic: str, text: str, *, timeout_s: float) -> list[str]:
    """`gather_texts` with a time limit and without the devices, so that any thread may call it.

    Args:
        topic: what it is about; the calls of one topic come in the same order in every process.
        text: what this process says.
        timeout_s: how long to wait for the others.

    Returns:
        The texts of all, by process.

    Raises:
        RunError: some processes said nothing in time; they are named, and this one's threads are shown on stderr.
            Or the service through which they speak is gone.
    """
    if jax.process_count() == 1:
        return [text]
    client = coordinator()
    if client is None:
        return gather_texts(text)
    meeting = _Meeting(client, topic, timeout_s)
    try:
        return meeting.hold(text)
    except RunError:
        raise
    except Exception as error:
        raise RunError(
            "The processes of the run cannot speak to one another.",
            where=f"process {jax.process_index()} on {socket.gethostname()}: {topic}",
            why=reason(error),
            do="look at what process 0 wrote last: the service they speak through is a part of it.",
        ) from error


class _Meeting:
    """One call of `exchange` in one process."""

    def __init__(self, client: Any, topic: str, timeout_s: float) -> None:
        self._client, self._topic, self._timeout_s = client, topic, timeout_s
        self._until = time.monotonic() + timeout_s
        self._count, self._here = jax.process_count(), jax.process_index()
        self._root = f"jshard/{topic}"

    def hold(self, text: str) -> list[str]:
        """Says a text, and hears those of all."""
        room = f"{self._root}/{self._begin()}"
        self._client.key_value_set(f"{room}/{self._here}", "=" + text)  # an empty value would be none
        texts = [self._get(f"{room}/{process}") for process in range(self._count)]
        missing = [process for process, found in enumerate(texts) if found is None]
        if missing:
            raise self._not_come(missing)
        if self._client.key_value_increment(f"{room}/readers", 1) == self._count:
            self._client.key_value_delete(room)  # with all below it
        return [found[1:] for found in texts if found is not None]

    def _begin(self) -> str:
        """Waits until all are there, and returns the meeting's token."""
        name, mine = secrets.token_hex(8), f"{self._root}/here/{self._here}"
        self._client.key_value_set(mine, name, allow_overwrite=True)
        token = None
        try:
            token = self._call_all() if is_primary() else self._get(f"{self._root}/{name}")
            if token is None:
                there = {key.rsplit("/", 1)[-1] for key, _ in self._client.key_value_dir_get(f"{self._root}/here/")}
                raise self._not_come([n for n in range(self._count) if str(n) not in there] or [0])
            return token
        finally:
            # Whoever leaves is not there any more; of a meeting that begins, the first process has removed it.
            self._client.key_value_delete(mine if token is None else f"{self._root}/{name}")

    def _call_all(self) -> str | None:
        """Draws the token and tells it to the others, once all have come."""
        names = [self._get(f"{self._root}/here/{process}") for process in range(1, self._count)]
        if None in names:
            return None
        self._client.key_value_delete(f"{self._root}/here")
        token = secrets.token_hex(8)
        for name in names:
            self._client.key_value_set(f"{self._root}/{name}", token)
        return token

    def _get(self, key: str) -> str | None:
        """The value of a key as soon as it has one; None if that is not in time."""
        left_ms = max(1, int(1000 * (self._until - time.monotonic())))
        try:
            return self._client.blocking_key_value_get(key, left_ms)
        except Exception as error:  # the client's errors have one type, and their kind is in the text
            if "DEADLINE_EXCEEDED" not in str(error) and "timed out" not in str(error).lower():
                raise
            return None

    def _not_come(self, missing: list[int]) -> RunError:
        show_threads()
        return RunError(
            f"{len(missing)} of {self._count} processes did not come to a meeting.",
            where=[f"process {process}" for process in missing],
            why=f"process {self._here} on {socket.gethostname()} waited {self._timeout_s:.0f} s for them: "
            f"{self._topic}.",
            do="look at what those processes wrote last; the threads of this one are above.",
        )


def show_threads() -> None:
    """Prints where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        where = "".join(traceback.format_stack(frame))
        print(f"thread {names.get(number, number)}:\n{where}", file=sys.stderr, flush=True)


# What all processes do, or none: whoever cannot go on says so, and all of them raise.

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


# Whether all processes see one and the same folder: found out before the first save, and not by it.

_SHOWN_S = 60.0  # within it a network file system shows all processes what one of them wrote


def check_shared(folder: Path, *, timeout_s: float) -> None:
    """The first process writes a file, and the others look for it; every process calls it.

    Args:
        folder: made if it is not there.
        timeout_s: how long to wait for the other processes.

    Raises:
        CheckpointError: some process does not see the file.
        RunError: it cannot be written, or a process did not come.
    """
    if jax.process_count() == 1:
        return
    name, error = f".shared-{secrets.token_hex(8)}", ""
    if is_primary():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as caught:
            error = reason(caught)
    name, error = json.loads(exchange("folder", json.dumps([name, error]), timeout_s=timeout_s)[0])
    if error:
        raise RunError(
            "The folder for checkpoints cannot be written.", where=str(folder), why=error, do="name another."
        )
    sees = _sees(folder / name)
    here = json.dumps([sees, socket.gethostname(), str(folder)])
    told = exchange("folder seen", here, timeout_s=timeout_s + _SHOWN_S)  # others may be looking still
    if is_primary():
        (folder / name).unlink(missing_ok=True)
    heard = [json.loads(text) for text in told]
    blind = [f"process {number} on {host}: {path}" for number, (seen, host, path) in enumerate(heard) if not seen]
    if blind:
        raise CheckpointError(
            "The folder for checkpoints is not shared between the processes.",
            where=blind,
            why=f"process 0 on {heard[0][1]} wrote a file into {heard[0][2]}, and these did not see it in "
            f"{_SHOWN_S:.0f} s.",
            do="name a folder on a file system that all hosts have, by the same path.",
        )


def _sees(path: Path) -> bool:
    until = time.monotonic() + _SHOWN_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
