"""The signals that ask a process to stop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: the terminal is gone
_REPEAT_S = 1.0


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered, instead of what they do otherwise.

    Python hands signals to the main thread only; entered in another one this notes nothing.

    Attributes:
        received: the first one.
        repeated: whether another came a second or more after it. Closer together they are one: a launcher and a
            terminal may each send it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.repeated = False
        self._since_s = 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays so, as SIGHUP under nohup.
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since_s = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since_s >= _REPEAT_S:
            self.repeated = True
