"""Stopping between two steps: SIGTERM, Ctrl-C and SIGHUP end a run after it has saved."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from types import FrameType
from typing import Self

from jax.sharding import Mesh

from jshard._processes import exchange
from jshard.launch.cluster import Signals
from jshard.launch.worker import is_worker
from jshard.plans.mesh import num_processes

_EVERY_S, _SHARE = 0.1, 0.1


class StopSignal(Signals):
    """Catches SIGTERM, SIGINT and SIGHUP while the context is open.

    A second one, a second later or more, ends the program. A worker of several processes only notes them, however
    many: its supervisor decides when to end it. Python hands signals to the main thread only; used in another one this
    catches nothing.

    Example:
        >>> with StopSignal() as stop:
        ...     while stop.received is None:
        ...         step()
    """

    _asked_s: float | None = None
    _wakeup: tuple[int, int] | None = None  # the ends of a pipe, which gets the number of a signal at once
    _old_wakeup: int = -1
    _lock = threading.Lock()  # for the pipe: the thread that asks may still do so when it is closed

    def report(self) -> None:
        """Notes that the run is asked to stop, by whichever process: its deadline counts from the first time."""
        self._asked_s = self._asked_s or time.monotonic()

    def asked_s(self) -> float | None:
        """When the run was first asked to stop, of `time.monotonic`; None if it was not. Any thread may ask.

        Also of a signal that Python has not handed to the main thread yet, which may be deep in native code.
        """
        with self._lock, contextlib.suppress(OSError):  # there is none
            if self._wakeup is not None and set(os.read(self._wakeup[0], 4096)) & set(self._before):
                self.report()
        return self._asked_s

    def __enter__(self) -> Self:
        super().__enter__()
        if self._before:
            self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._old_wakeup = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            with self._lock:
                wakeup, self._wakeup = self._wakeup, None
                for fd in wakeup:
                    os.close(fd)
        super().__exit__(*error)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        super()._note(number, frame)
        if is_first:
            self.report()
            name = signal.Signals(number).name
            text = f"\n{name}: the run saves after this step and stops; a second one ends it unsaved.\n"
            with contextlib.suppress(OSError):  # not print: the signal may have come in the middle of one
                os.write(2, text.encode())
        elif self.repeated and not is_worker():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class Agreement:
    """Whether any process was asked to stop, known to all after the same step: the save is the work of all.

    A signal reaches the processes at different times, or only one of them. So they ask one another, every 0.1 s or as
    seldom as keeps it below a tenth of the time, and wherever the devices are idle anyway. After how many steps follows
    from what all of them said the last time, and is the same for all.

    Args:
        mesh: the devices of all processes.

    Attributes:
        alone: whether there is one process, which has nobody to ask.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.alone = num_processes(mesh) == 1
        self._last: tuple[int, float] | None = None  # step and time
        self._took_s = 0.0
        self._due = 0

    def begin(self) -> None:
        """Waits for all before the first step: they may still compile, and gloo's first meeting fails after 30 s."""
        if not self.alone:
            exchange("first step", None)

    def asked(self, received: signal.Signals | None, step: int, *, is_idle: bool = False) -> signal.Signals | None:
        """The signal that ends the run after a step. All processes call it after each step."""
        if self.alone or (step < self._due and not is_idle):
            return received if self.alone else None
        begin_s, step_s = time.monotonic(), math.inf
        if self._last is not None and step > self._last[0]:
            step_s = max(1e-6, begin_s - self._last[1]) / (step - self._last[0])
        numbers, steps_s, took_s = zip(*exchange("stop", [received or 0, step_s, self._took_s]), strict=True)
        self._last, self._took_s = (step, time.monotonic()), time.monotonic() - begin_s
        # Who came last to the meeting has waited least: that time is what it costs.
        self._due = step + max(1, int(max(_EVERY_S, min(took_s) / _SHARE) / max(steps_s)))
        return signal.Signals(max(numbers)) if any(numbers) else None
