"""The stderr of a worker, passed on or kept until it is known whether it explains a failure."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import IO, NamedTuple

HOLD_S = 1.0
"""The delay before stderr of process 0 is passed on, as it may turn out to be the consequence of a lost peer."""

_LINES = 400  # of a worker whose output is not passed on
_LINE_BYTES = 4096  # a longer line arrives in pieces
# "[Gloo] Rank 0 is connected to 1 peer ranks. Expected ...": several threads print it in pieces, and lines get mixed.
_NOISE = (b"[Gloo]", b"peer ranks")


class _Line(NamedTuple):
    """A line, and when it arrived."""

    arrived_s: float
    text: bytes


class WorkerOutput:
    """The stderr of one worker, read by its own thread.

    Args:
        stream: the output of the worker.
        live: pass each line on, `HOLD_S` late; otherwise keep the last ones.

    Attributes:
        shown: the last lines that were written.
    """

    def __init__(self, stream: IO[bytes], *, live: bool) -> None:
        self.shown: collections.deque[bytes] = collections.deque(maxlen=_LINES)
        self._stream = stream
        self._is_passing = live
        # Of a live output none may be lost before it is passed on.
        self._waiting: collections.deque[_Line] = collections.deque(maxlen=None if live else _LINES)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._stopped = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True, name="jshard-output")
        self._reader.start()

    def pause(self) -> None:
        """Passes nothing on until it is known whether the output is a consequence of a lost peer."""
        self._is_passing = False

    def pass_on(self) -> None:
        """Writes the lines that have waited long enough; the supervisor calls it repeatedly."""
        # Without the lock: only this thread takes lines out, and a deque's methods are atomic.
        while self._is_passing and self._waiting:
            if self._waiting[0].arrived_s > time.monotonic() - HOLD_S:
                return
            self._show([self._waiting.popleft().text])

    def show(self, *, prefix: str = "", known: Collection[bytes] = ()) -> None:
        """Writes the lines held back, except those that are `known` to the reader."""
        self._ended.wait(1.0)  # the worker has ended; its last lines may still arrive
        with self._lock:  # the reader may still add lines
            lines = [line.text for line in self._waiting if line.text not in known]
            self._waiting.clear()
        self._show(lines, prefix=prefix.encode())

    def stop(self) -> None:
        """Releases the stream: nothing is written after that."""
        self._stopped.set()
        self._reader.join(1.0)
        if self._ended.is_set():
            self._stream.close()

    def _read(self) -> None:
        # A child of the worker may keep the stream open longer: this thread is not joined.
        with contextlib.suppress(OSError, ValueError):
            while not self._stopped.is_set() and (line := self._stream.readline(_LINE_BYTES)):
                if any(words in line for words in _NOISE):
                    continue
                with self._lock:
                    self._waiting.append(_Line(time.monotonic(), line))
        self._ended.set()

    def _show(self, lines: Sequence[bytes], *, prefix: bytes = b"") -> None:
        self.shown.extend(lines)
        text = b"".join(prefix + line for line in lines).decode(errors="replace")
        # A closed reader (`2>&1 | head`) must not end the run.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
