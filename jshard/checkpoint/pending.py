"""A save that is written in the background, and what happens to it when the program ends."""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Callable

from jshard._compat import before_threads_end
from jshard._processes import show_threads
from jshard.checkpoint.errors import reason
from jshard.errors import FourPartError, RunError

_END_S = 2400.0  # the longest wait at program exit by default

LOOK_S = 0.2
"""Interval at which a wait for a save checks for other events."""

_unreported: set[Pending] = set()  # running, or failed without a caller that knows


class Pending:
    """A pending save.

    A program that exits earlier, even with an error, waits until it is complete, and reports a failure on stderr.
    """

    def __init__(self, name: str, work: Callable[[], object], *, timeout_s: float = _END_S) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._result: object = None
        self._error: BaseException | None = None
        # Set as the last thing here. A thread that is started runs at once, and Python lets it run for 5 ms before the
        # thread that started it, which is that of training.
        self._may_begin = threading.Event()
        # A daemon: at exit Python would wait for any other thread for ever, and `_finish_all` waits for a limited time.
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {name}", daemon=True)
        _wait_at_exit()
        # Before it begins: it takes itself out of the set when it succeeds.
        _unreported.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can start, for example because the program is about to exit
            self._may_begin.set()
            self._run(work)
        finally:
            self._may_begin.set()

    def is_done(self) -> bool:
        """Returns whether it has ended, successfully or not."""
        return not self._thread.is_alive()

    def ends_within(self, timeout_s: float) -> bool:
        """Waits for its end, up to a time; returns whether it has ended, successfully or not."""
        if not self.is_done():
            self._thread.join(timeout_s)
        return self.is_done()

    def give_up(self) -> None:
        """Stops the program's exit from waiting for it; the caller handles it."""
        _unreported.discard(self)

    def wait(self, timeout_s: float | None = None, *, look: Callable[[], object] = lambda: None) -> object:
        """Waits for its end.

        Args:
            timeout_s: how long; None for ever.
            look: called from time to time; what it raises ends the wait.

        Raises:
            FourPartError: the save failed, or does not end in time.
        """
        deadline_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            if self.ends_within(min(LOOK_S, left_s)) or time.monotonic() >= deadline_s:
                break
            look()
        self.give_up()
        if self._thread.is_alive():
            show_threads()
            raise RunError(
                "A save does not end.",
                where=self.name,
                why=f"it is still running after {timeout_s:.0f} s; the threads of this process are above.",
                do="check the disk, and the last output of the other processes.",
            )
        if self._error is None:
            return self._result
        if isinstance(self._error, FourPartError):
            raise self._error
        raise RunError(
            "A save failed with an unexpected error.",
            where=self.name,
            why=reason(self._error),
            do="fix the cause, which is the error above this one; then save again.",
        ) from self._error

    def _run(self, work: Callable[[], object]) -> None:
        self._may_begin.wait()
        try:
            self._result = work()
        # Also `SystemExit`: a thread would end without a trace.
        except BaseException as error:
            self._error = error
        else:
            _unreported.discard(self)


@functools.cache
def _wait_at_exit() -> None:
    before_threads_end(_finish_all)


def _finish_all() -> None:
    """Waits for pending saves while their threads can still run, and reports failures that were not seen."""
    # A copy: each `wait` removes an element.
    for pending in list(_unreported):
        try:
            pending.wait(pending.timeout_s)
        except FourPartError as error:
            print(f"the program ends with an incomplete save of a checkpoint.\n{error}", file=sys.stderr, flush=True)
