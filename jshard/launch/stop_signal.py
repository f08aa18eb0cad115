"""The signals that end a run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from jshard.launch.cluster import is_worker

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: the terminal was closed
_REPEAT_S = 1.0


def unsaved_text(number: int, describe_saved: Callable[[], str] | None = None) -> str:
    """Returns the last words of a run that a second signal ends."""
    text = f"\n{signal.Signals(number).name} again: the run ends now, unsaved.\n"
    if describe_saved is not None:
        text += f"{describe_saved()}\n"
    return text


class Signals:
    """Records SIGINT, SIGTERM and SIGHUP inside the context, instead of their usual effects.

    Python delivers signals to the main thread only; in another thread this records nothing.

    Attributes:
        received: the first one.
        repeated: whether another came a second or more after it. Closer ones are treated as one: a launcher and a
            terminal may each send it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.repeated = False
        self._received_s = 0.0
        self._handlers_before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # An ignored signal stays ignored, as SIGHUP under nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers_before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self.received is None:
            self.received = signal.Signals(number)
            self._received_s = time.monotonic()
        elif time.monotonic() - self._received_s >= _REPEAT_S:
            self.repeated = True


class StopSignal(Signals):
    """Catches SIGTERM, SIGINT and SIGHUP while the context is open; ignored ones stay ignored, as under `nohup`.

    A second one, at least a second later, ends the program. A worker of several processes only records them, however
    many: its supervisor decides when to end it. Python delivers signals to the main thread only; in another thread
    this catches nothing.

    Examples:
        >>> with StopSignal() as stop:
        ...     while stop.received is None:
        ...         step()

    Attributes:
        requested_by: the first signal, known to `stop_requested_at_s` before the main thread handles it.
        is_insisted: whether another came a second or more after it, in the same way.
        ends_at_once: returns whether the run has nothing to save yet: a watch then ends it, and says so. Without a
            watch it waits for the step.
        describe_saved: describes what remains of a run that a second signal ends; None if it is not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requested_by: signal.Signals | None = None
        self.is_insisted = False
        self.ends_at_once: Callable[[], bool] = lambda: False
        self.describe_saved: Callable[[], str] | None = None
        self._requested_at_s: float | None = None
        self._first_signal_s = 0.0
        # The ends of a pipe into which Python writes the number of a signal at once, from its C handler. So another
        # thread knows of it even while the main thread is in native code, where no Python handler runs.
        self._wakeup: tuple[int, int] | None = None
        self._wakeup_before = -1
        self._lock = threading.Lock()  # for the pipe: a thread may still read it while it is closed

    def report(self) -> None:
        """Records that any process requested a stop: the deadline runs from the first request."""
        if self._requested_at_s is None:
            self._requested_at_s = time.monotonic()

    def stop_requested_at_s(self) -> float | None:
        """Returns when a stop was first requested, by `time.monotonic`; None if it was not. Any thread may call it.

        This includes a signal not yet delivered to the main thread, which may be deep in native code.
        """
        with self._lock, contextlib.suppress(OSError):  # the pipe is empty
            if self._wakeup is not None:
                for number in os.read(self._wakeup[0], 4096):
                    self._hear(number)
        return self._requested_at_s

    def __enter__(self) -> Self:
        super().__enter__()
        if self._handlers_before:
            self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            # No warning when it is full: the signals that are in it already say enough.
            self._wakeup_before = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._wakeup is not None:
            # First: Python would write the next signal to a closed pipe, or to what then has its number.
            signal.set_wakeup_fd(self._wakeup_before)
            with self._lock:
                for fd in self._wakeup:
                    os.close(fd)
                self._wakeup = None
        super().__exit__(*error)

    def _hear(self, number: int) -> None:
        """Records a signal that the pipe has received."""
        if number not in self._handlers_before:
            return
        if self.requested_by is None:
            self.requested_by = signal.Signals(number)
            self._first_signal_s = time.monotonic()
            self.report()
        elif time.monotonic() - self._first_signal_s >= _REPEAT_S:
            self.is_insisted = True

    def _record(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        super()._record(number, frame)
        if is_first:
            self.report()
            if self.ends_at_once():
                return
            name = signal.Signals(number).name
            _write(f"\n{name}: the run saves after this step and stops; a second one ends it unsaved.\n")
        elif self.repeated and not is_worker():
            _write(unsaved_text(number, self.describe_saved))
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _write(text: str) -> None:
    # Not print: the signal may have interrupted one.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
