"""Work that goes on in a thread of its own while training does, and that a program that ends waits for."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from jshard._compat import before_threads_end
from jshard.checkpoint.barrier import show_threads
from jshard.checkpoint.errors import reason
from jshard.errors import FourPartError, RunError

_END_S = 2400.0  # the longest that the end of a program waits by default

_unheard: set[Pending] = set()  # at work, or failed with nobody told


class Pending:
    """A save at work.

    A program that ends before it, also by an error, waits until it is complete, and says so on stderr if it fails.

    Args:
        name: what it is, for messages.
        work: does it, in a new thread.
        timeout_s: how long the end of the program waits for it.
    """

    def __init__(self, name: str, work: Callable[[], Any], *, timeout_s: float = _END_S) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {name}", daemon=True)
        _wait_at_the_end()
        self._thread.start()
        _unheard.add(self)
        if self.is_done() and self._error is None:
            _unheard.discard(self)

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for its end.

        Args:
            timeout_s: how long; for ever by default.

        Returns:
            What the work returned.

        Raises:
            RunError: it failed, or did not end in time.
        """
        self._thread.join(timeout_s)
        _unheard.discard(self)  # whoever waits hears of it now, or has given it up
        if self._thread.is_alive():
            show_threads()
            raise RunError(
                "A save does not come to an end.",
                where=self.name,
                why=f"it is still at work after {timeout_s:.0f} s; the threads of this process are above.",
                do="look at the disk, and at what the other processes wrote last.",
            )
        if self._error is None:
            return self._result
        if isinstance(self._error, FourPartError):
            raise self._error
        raise RunError(
            "A save ended with an error that was not foreseen.",
            where=self.name,
            why=reason(self._error),
            do="look at the error above this one, which is its cause; then save again.",
        ) from self._error

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
        else:
            _unheard.discard(self)


@functools.cache
def _wait_at_the_end() -> None:
    before_threads_end(_finish_all)


def _finish_all() -> None:
    """Waits for what is at work while its threads can still do it, and tells what nobody has heard of."""
    for pending in list(_unheard):
        try:
            pending.wait(pending.timeout_s)
        except FourPartError as error:
            print(f"the program ends without a checkpoint that it began to save.\n{error}", file=sys.stderr, flush=True)
