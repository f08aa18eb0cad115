"""The signals that a supervisor passes on."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from jshard.train.launch.deadlines import REPEAT_S


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP while it is entered, instead of what they do otherwise.

    `first` is the number of the first one; `repeated` whether another came `REPEAT_S` or more after it.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.repeated = False
        self._first_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # Python handles signals in the main thread only; elsewhere they stay with whoever has them.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is signal.SIG_IGN:  # as SIGHUP under nohup
                    continue
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, _: object) -> None:
        if self.first is None:
            self.first, self._first_at = signum, time.monotonic()
        elif time.monotonic() - self._first_at >= REPEAT_S:
            self.repeated = True
