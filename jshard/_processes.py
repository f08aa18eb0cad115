"""Messages between the processes of a run: through the service of `jax.distributed`, not the devices.

So any thread may call these while the devices are busy, a wait ends after a time, and whoever is missing is named.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jshard._compat import coordinator
from jshard.errors import FourPartError, RunError, ShardingError

_LONG_S = 86400.0  # where one process works and the others wait for it, as long as it takes


def is_primary() -> bool:
    """Whether this is the process that writes what only one may write."""
    return jax.process_index() == 0


def gather_texts(text: str) -> list[str]:
    """Every process gives a text and receives those of all, by process; for the main thread."""
    return exchange("texts", text)


def exchange(topic: str, value: Any, *, timeout_s: float = _LONG_S, left: list[str] | None = None) -> list[Any]:
    """Every process gives a value and receives those of all; it waits until all have called.

    Args:
        topic: what it is about; the calls of one topic come in the same order in every process.
        value: of this process, of JSON.
        timeout_s: how long to wait for the others.
        left: for meetings that follow one another, each of another topic: what this process has left at the one
            before, which it takes away now, and from now on what it leaves at this one. Without it the processes meet
            once more, so that nothing is left.

    Returns:
        The values of all, by process.

    Raises:
        RunError: some processes said nothing in time; they are named, and this one's threads are shown on stderr.
            Or the service through which they speak is gone.
    """
    if jax.process_count() == 1:
        return [value]
    try:
        texts = _Round(topic, timeout_s).exchange(json.dumps(value), left)
    except RunError:
        raise
    except Exception as error:
        raise RunError(
            "The processes of the run cannot communicate.",
            where=f"process {jax.process_index()} on {socket.gethostname()}: {topic}",
            why=f"{type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0][:300]}",
            do="look at what process 0 wrote last: the service they communicate through is a part of it.",
        ) from error
    return [json.loads(text) for text in texts]


def all_or_none(
    topic: str,
    value: Any,
    error: Exception | None,
    *,
    failed: Callable[[Mapping[int, Mapping[str, Any]]], FourPartError],
    timeout_s: float = _LONG_S,
    left: list[str] | None = None,
) -> list[Any]:
    """All processes go on, or none: whoever cannot says so, and all of them raise. Every process calls it.

    Args:
        topic: a name for the moment; the same in all processes.
        value: for the others, of JSON.
        error: why this process cannot go on; it is raised here.
        failed: makes the error of this process where only others cannot go on: of their numbers, and of what their
            errors say, "what", "where", "why" and "do", with "kind", the class, and "is_request", whether the request
            is at fault.
        timeout_s: how long to wait for the others.
        left: see `exchange`.

    Returns:
        The values of all, by process.

    Raises:
        FourPartError: another process cannot go on, or did not come.
    """
    try:
        heard = exchange(topic, [None if error is None else _described(error), value], timeout_s=timeout_s, left=left)
    except RunError as missing:
        if not isinstance(error, FourPartError):
            raise (error or missing) from missing.__cause__
        where, why = [*error.where, *missing.where], f"{error.why}\n{missing.why}"
        raise type(error)(error.what, where=where, why=why, do=error.do) from missing
    failures = {number: parts for number, (parts, _) in enumerate(heard) if parts is not None}
    if failures and left:  # all have heard it, and none comes to the next meeting
        with contextlib.suppress(RunError):
            exchange(f"{topic}: failed", None, timeout_s=timeout_s)
        withdraw(left)
    if error is not None:
        raise error
    if failures:
        raise failed(failures)
    return [other for _, other in heard]


def withdraw(left: list[str]) -> None:
    """Takes away what this process left at the last of some meetings, see `exchange`; all have read it."""
    while left:
        coordinator().key_value_delete(left.pop())


def publish_failure(topic: str, error: Exception) -> None:
    """Lets the others know at once that this process cannot go on, wherever they wait; see `failures`."""
    if jax.process_count() > 1:
        key = f"jshard/failures/{topic}/{jax.process_index()}"
        with contextlib.suppress(Exception):  # the service is gone, and that is reported elsewhere
            coordinator().key_value_set(key, json.dumps(_described(error)), allow_overwrite=True)


def failures(topic: str) -> dict[int, dict[str, Any]]:
    """What `publish_failure` has published for a topic, by process: the parts of their errors. It does not wait."""
    if jax.process_count() == 1:
        return {}
    try:
        found = coordinator().key_value_dir_get(f"jshard/failures/{topic}/")
    except Exception:  # the service is gone; whoever waits for it says so
        return {}
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}


def show_threads() -> None:
    """Prints where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        where = "".join(traceback.format_stack(frame))
        print(f"thread {names.get(number, number)}:\n{where}", file=sys.stderr, flush=True)


class _Round:
    """One call of `exchange`: all processes leave their values and read those of the others, or all of them fail.

    A barrier of the service is passed by all who come to it or by none; a process that is late for one fails at once.
    Barriers that were passed are used again. One that failed is not, as some may never have come to it: its number is
    noted, and the next round is the one after.
    """

    def __init__(self, topic: str, timeout_s: float) -> None:
        self._topic, self._timeout_s = topic, timeout_s
        self._until = time.monotonic() + timeout_s
        self._client = coordinator()
        self._count, self._here = jax.process_count(), jax.process_index()

    def exchange(self, text: str, left: list[str] | None) -> list[str]:
        """Gives a text, and returns those of all."""
        root = f"jshard/{self._topic}"
        number = len(self._client.key_value_dir_get(f"{root}/failed/"))
        given, read = f"{root}/{number}/given", f"{root}/{number}/read"
        done = [f"{given}/{self._here}"]
        try:
            self._meet(given, text)
            texts = self._texts(given)
            if left is None:
                done.append(f"{read}/{self._here}")
                self._meet(read, "")  # nobody takes a text away, or gives the next one, before all have read it
            else:  # whoever came here has read what was left at the meeting before
                left[:], done = done, left.copy()
        except Exception:
            self._client.key_value_set(f"{root}/failed/{number}", "=", allow_overwrite=True)
            raise
        finally:
            for key in done:
                self._client.key_value_delete(key)
        return [texts[process] for process in range(self._count)]

    def _meet(self, place: str, text: str) -> None:
        """Leaves a text at a place, and returns once all have come there."""
        self._client.key_value_set(f"{place}/{self._here}", "=" + text, allow_overwrite=True)  # empty ones are refused
        try:
            self._client.wait_at_barrier(place, max(1, int(1000 * (self._until - time.monotonic()))))
        except Exception as error:
            there = self._texts(place)
            missing = [process for process in range(self._count) if process not in there]
            if missing:
                raise self._missing(missing) from error
            raise

    def _texts(self, place: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(f"{place}/")
        return {int(key.rpartition("/")[2]): text[1:] for key, text in found}

    def _missing(self, missing: list[int]) -> RunError:
        show_threads()
        return RunError(
            f"{len(missing)} of {self._count} processes did not come to a meeting.",
            where=[f"process {process}" for process in missing],
            why=f"process {self._here} on {socket.gethostname()} waited {self._timeout_s:.0f} s for them: "
            f"{self._topic}.",
            do="look at what those processes wrote last; the threads of this one are above.",
        )


def _described(error: Exception) -> dict[str, Any]:
    """An error as the other processes hear of it."""
    found = {"kind": type(error).__name__, "is_request": isinstance(error, ShardingError)}
    if not isinstance(error, FourPartError):
        return found | {"what": str(error), "where": [], "why": str(error), "do": ""}
    return found | {"what": error.what, "where": list(error.where), "why": error.why, "do": error.do}
