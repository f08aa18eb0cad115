"""What the workers write to stderr: passed on, held back, or told only if it explains something."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Collection
from typing import IO

from jshard.train.launch.deadlines import HOLD_S, TICK_S

_LINES = 400
_LINE_BYTES = 4096
# "[Gloo] Rank 0 is connected to 1 peer ranks. Expected ...": several threads print it in pieces, and lines get mixed.
_NOISE = b"[Gloo]", b"peer ranks"


class Output:
    """The stderr of one worker, read by a thread of its own.

    Args:
        stream: what the worker writes.
        live: pass each line on, `HOLD_S` late; otherwise keep the last ones.
    """

    def __init__(self, stream: IO[bytes], *, live: bool) -> None:
        self._stream = stream
        self._held: collections.deque[tuple[float, bytes]] = collections.deque(maxlen=None if live else _LINES)
        self._lock = threading.Lock()
        self._passing = live
        self._ended = threading.Event()
        self.shown: collections.deque[bytes] = collections.deque(maxlen=_LINES)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._read, daemon=True, name="jshard-output")]
        if live:
            self._threads.append(threading.Thread(target=self._pass_on, daemon=True, name="jshard-output"))
        for thread in self._threads:
            thread.start()

    def pause(self) -> None:
        """Passes nothing on from now, until it is known whether it is an echo."""
        self._passing = False

    def show(self, *, prefix: str = "", known: Collection[bytes] = ()) -> None:
        """Writes what is held back, less the lines that are `known` to the reader."""
        self._ended.wait(1.0)  # the worker has ended; its last lines are on their way
        with self._lock:
            lines = [line for _, line in self._held if line not in known]
            self._held.clear()
            self.shown.extend(lines)
        _write(b"".join(prefix.encode() + line for line in lines))

    def stop(self) -> None:
        """Lets go of the stream: nothing is written after that."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(1.0)
        if self._ended.is_set():
            self._stream.close()

    def _read(self) -> None:
        # A process that the worker started may keep the stream open after it: nobody waits for this thread.
        with contextlib.suppress(OSError, ValueError):
            while not self._stopped.is_set() and (line := self._stream.readline(_LINE_BYTES)):
                if not any(words in line for words in _NOISE):
                    with self._lock:
                        self._held.append((time.monotonic(), line))
        self._ended.set()

    def _pass_on(self) -> None:
        while not self._stopped.wait(TICK_S):
            with self._lock:
                lines = []
                while self._passing and self._held and self._held[0][0] <= time.monotonic() - HOLD_S:
                    lines.append(self._held.popleft()[1])
                self.shown.extend(lines)
            _write(b"".join(lines))


def _write(text: bytes) -> None:
    # A reader that has gone (`2>&1 | head`) is no reason to end the run.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()
