"""What the processes of a run tell one another while their devices are busy, and not for ever."""

from __future__ import annotations

import collections
import socket
import sys
import threading
import time
import traceback

import jax

from jshard._compat import coordinator
from jshard._errors import RunError
from jshard._processes import gather_texts

_counts: collections.Counter[str] = collections.Counter()


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
    """
    count, here = jax.process_count(), jax.process_index()
    if count == 1:
        return [text]
    client = coordinator()
    if client is None:
        return gather_texts(text)
    _counts[topic] += 1
    keys = [f"jshard/{topic}/{_counts[topic]}/{process}" for process in range(count)]
    client.key_value_set(keys[here], "=" + text)  # an empty value would be none
    until, texts, missing = time.monotonic() + timeout_s, [text] * count, []
    for process in range(count):
        if process == here:
            continue
        left_ms = max(1, int(1000 * (until - time.monotonic())))
        try:
            value = client.blocking_key_value_get(keys[process], left_ms)
        except Exception as error:  # the client's errors have one type, and their kind is in the text
            if "DEADLINE_EXCEEDED" not in str(error) and "timed out" not in str(error).lower():
                raise
            missing.append(process)
        else:
            texts[process] = value[1:]
    if missing:
        show_threads()
        raise RunError(
            f"{len(missing)} of {count} processes did not come to a meeting.",
            where=[f"process {process}" for process in missing],
            why=f"process {here} on {socket.gethostname()} waited {timeout_s:.0f} s for them: {topic}.",
            do="look at what those processes wrote last; the threads of this one are above.",
        )
    if _counts[topic] > 1:  # whoever came to this meeting has read what was said in the one before
        client.key_value_delete(f"jshard/{topic}/{_counts[topic] - 1}/{here}")
    return texts


def show_threads() -> None:
    """Prints where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        where = "".join(traceback.format_stack(frame))
        print(f"thread {names.get(number, number)}:\n{where}", file=sys.stderr, flush=True)
