"""Work that goes on in a thread of its own while training does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jshard._errors import RunError
from jshard.checkpoint.meeting import show_threads


class Pending:
    """A save at work.

    Args:
        name: what it is, for messages.
        work: does it, in a new thread.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self._work, self._result, self._error = work, None, None
        self._thread = threading.Thread(target=self._run, name=f"save {name}", daemon=True)
        self._thread.start()

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
        if self._thread.is_alive():
            show_threads()
            raise RunError(
                "A save does not come to an end.",
                where=self.name,
                why=f"it is still at work after {timeout_s:.0f} s; the threads of this process are above.",
                do="look at the disk, and at what the other processes wrote last.",
            )
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
