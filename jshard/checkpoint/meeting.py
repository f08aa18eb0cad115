"""What the processes of a run tell one another while their devices are busy, and not for ever.

A meeting has a token that the first process draws once all others have come. So who comes late, or came to a meeting
that failed, finds nothing there that was meant for another one, and nothing is counted that could come apart.

    jshard/TOPIC/here/PROCESS    who waits for the meeting to begin, and what it is called
    jshard/TOPIC/NAME            the token, for one that waits
    jshard/TOPIC/TOKEN/PROCESS   what a process says; whoever reads last removes it all
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
import traceback
from typing import Any

import jax

from jshard._compat import coordinator
from jshard._errors import RunError
from jshard._processes import gather_texts, is_primary
from jshard.checkpoint.failures import reason


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
