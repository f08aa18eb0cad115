"""The terminal line that is rewritten while work is in progress, and messages about work that takes long.

It imports nothing but Python's own: it is there before jax is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

_EVERY_S, _FIRST_S = 1.0, 0.3


class LiveLine:
    """The last line of a stream, rewritten in place on a terminal. Threads may share it.

    When nobody reads any more (a closed pipe, a terminal that is gone), nothing is written any more.

    Args:
        stream: where to write; None writes nowhere.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.is_live = is_terminal(stream)
        self._width = 0  # of what the terminal shows
        self._lock = threading.Lock()

    @property
    def columns(self) -> int:
        """Characters that there is room for; the last one is left free, as filling it begins a new line."""
        return max(shutil.get_terminal_size().columns - 1, 1)

    def rewrite(self, line: str) -> None:
        """Puts a text in the place of the last one; of a terminal only."""
        columns = self.columns
        with self._lock:
            self._write("\r" + line[:columns].ljust(min(self._width, columns)))
            self._width = min(len(line), columns)

    def leave(self, line: str = "") -> None:
        """Writes a line that stays, in the place of the live one."""
        with self._lock:
            blank, self._width = " " * min(self._width, self.columns), 0
            self._write((f"\r{blank}\r" if blank else "") + (f"{line}\n" if line else ""))

    def end(self) -> None:
        """Leaves the live line as it is, and begins another."""
        with self._lock:
            if self._width:
                self._write("\n")
            self._width = 0

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._fall_silent()
        except ValueError:
            if not self._stream.closed:
                raise
            self._fall_silent()

    def _fall_silent(self) -> None:
        if self._stream is sys.stdout:
            # Python flushes standard output at its end, and would end with exit code 120.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
        self._stream = None


class Work:
    """What `at_work` says of the work; its result may be added when it is known.

    Args:
        what: is done.
    """

    def __init__(self, what: str) -> None:
        self.what, self.result = what, ""


@contextlib.contextmanager
def at_work(
    what: str, *, say: Callable[[str], object], stream: TextIO | None, every_s: float = _EVERY_S
) -> Iterator[Work]:
    """Says while a block works what is done and for how long, and afterwards what it took.

    On a terminal a line is rewritten each second. Elsewhere one line is printed at the start and one at the end.

    Args:
        what: is done: "compiling the step".
        say: prints a line that stays.
        stream: on which `say` prints; None in a process that says nothing.
        every_s: seconds between two lines.

    Yields:
        The work, whose `what` and `result` may be changed by the block.
    """
    work, line, start_s, over = Work(what), LiveLine(stream), time.perf_counter(), threading.Event()

    def tick() -> None:
        wait_s = min(_FIRST_S, every_s)  # what is done at once is not shown
        while not over.wait(wait_s):
            so_far = f" ... {took(int(time.perf_counter() - start_s))}"
            line.rewrite(_cut(work.what, line.columns - len(so_far)) + so_far)
            wait_s = every_s

    ticking = threading.Thread(target=tick, name="jshard-at-work", daemon=True)
    if line.is_live:
        ticking.start()
    else:
        say(f"{what} ...")
    how = "stopped after "
    try:
        yield work
        how = ""
    finally:
        over.set()
        if line.is_live:
            ticking.join()
            line.leave()
        result = f", {work.result}" if work.result and not how else ""
        say(f"{work.what}: {how}{took(time.perf_counter() - start_s)}{result}")


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 1, 0)]}…"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether lines of a stream can be rewritten: on a terminal, or in a notebook."""
    if stream is None or stream.closed:
        return False
    is_notebook = type(stream).__module__.startswith("ipykernel.")
    return is_notebook or (stream.isatty() and os.environ.get("TERM") != "dumb")


def fitted(text: str, stream: TextIO | None, *, indent: str = "") -> str:
    """A text whose lines end between words on a terminal; elsewhere it stays as it is.

    Args:
        text: one line.
        stream: where it goes.
        indent: of what follows the first line.
    """
    if not is_terminal(stream):
        return text
    columns = LiveLine(stream).columns
    whole = textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(whole)


def took(seconds: float) -> str:
    """A time as text: 1.5 s, 12 s, 3 min 05 s; a whole number stays one."""
    if seconds < 9.95 and isinstance(seconds, float):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
