"""The terminal line that is rewritten while work is in progress, and messages about long work.

It only imports the standard library, so that it is available before jax.
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

from jshard.errors import printable

_EVERY_S, _FIRST_S = 1.0, 0.3
_PLAIN_FIRST_S = 30.0  # in a log file; the time to the next line doubles, so that a long wait does not fill it


class LiveLine:
    """The last line of a stream, rewritten in place on a terminal. Threads may share it.

    Once the reader is gone (a closed pipe or terminal), nothing more is written.

    Args:
        stream: where to write; None writes nowhere.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.is_live = is_terminal(stream)
        self._width = 0  # width of the text on the terminal
        self._lock = threading.Lock()

    @property
    def columns(self) -> int:
        """The available width; the last column stays free, as filling it starts a new line."""
        return max(shutil.get_terminal_size().columns - 1, 1)

    def rewrite(self, line: str) -> None:
        """Replaces the live text; only on a terminal."""
        columns = self.columns
        line = printable(line)
        with self._lock:
            self._write("\r" + line[:columns].ljust(min(self._width, columns)))
            self._width = min(len(line), columns)

    def leave(self, line: str = "") -> None:
        """Writes a permanent line in place of the live one."""
        line = printable(line, keep="\n\t")
        with self._lock:
            blank, self._width = " " * min(self._width, self.columns), 0
            self._write((f"\r{blank}\r" if blank else "") + (f"{line}\n" if line else ""))

    def end(self) -> None:
        """Keeps the live line, and starts another."""
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
            # Python flushes standard output at exit, and would exit with code 120.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
        self._stream = None


class Work:
    """The text that `at_work` shows; the result may be added once it is known.

    Args:
        what: is done.
    """

    def __init__(self, what: str) -> None:
        self.what, self.result = what, ""


@contextlib.contextmanager
def at_work(
    what: str,
    *,
    say: Callable[[str], object],
    stream: TextIO | None,
    every_s: float = _EVERY_S,
    plain_first_s: float = _PLAIN_FIRST_S,
    quiet_s: float = 0.0,
) -> Iterator[Work]:
    """Shows the work of a block and its elapsed time, and the total time at the end.

    On a terminal a line is rewritten each second. Elsewhere a line is printed at the start, after half a minute, after
    one, two, four minutes and so on, and at the end.

    Args:
        what: the work in progress, such as "compiling the step".
        say: prints a permanent line.
        stream: where `say` prints; None in a process that prints nothing.
        every_s: seconds between two lines on a terminal.
        plain_first_s: seconds to the first line of work in progress elsewhere.
        quiet_s: work that ends sooner is never mentioned in a permanent line.

    Yields:
        The work, whose `what` and `result` may be changed by the block.
    """
    work, line, start_s, over = Work(what), LiveLine(stream), time.perf_counter(), threading.Event()

    def rewrite_line() -> None:
        wait_s = min(_FIRST_S, every_s)  # instant work is not shown
        while not over.wait(wait_s):
            so_far = f" ... {took(int(time.perf_counter() - start_s))}"
            line.rewrite(_cut(work.what, line.columns - len(so_far)) + so_far)
            wait_s = every_s

    def print_lines() -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed; the work continues
            print_each()

    def print_each() -> None:
        if quiet_s:
            if over.wait(quiet_s):
                return
            say(f"{work.what} ...")
        next_s = plain_first_s
        while not over.wait(max(next_s - (time.perf_counter() - start_s), 0)):
            say(f"{work.what} ... {took(round(next_s))} so far")
            next_s *= 2

    if not (line.is_live or quiet_s):
        say(f"{what} ...")
    ticking = threading.Thread(target=rewrite_line if line.is_live else print_lines, name="jshard-at-work", daemon=True)
    ticking.start()
    how = "stopped after "
    try:
        yield work
        how = ""
    finally:
        over.set()
        ticking.join()
        if line.is_live:
            line.leave()
        result = f", {work.result}" if work.result and not how else ""
        took_s = time.perf_counter() - start_s
        if took_s >= quiet_s:
            say(f"{work.what}: {how}{took(took_s)}{result}")


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 1, 0)]}…"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether lines of a stream can be rewritten: on a terminal, or in a notebook."""
    if stream is None or stream.closed:
        return False
    is_notebook = type(stream).__module__.startswith("ipykernel.")
    return is_notebook or (stream.isatty() and os.environ.get("TERM") != "dumb")


def fitted(text: str, stream: TextIO | None, *, indent: str = "") -> str:
    """Wraps a text between words on a terminal; elsewhere it is unchanged.

    Args:
        text: one line.
        stream: where it goes.
        indent: of the lines after the first.
    """
    if not is_terminal(stream):
        return text
    columns = LiveLine(stream).columns
    whole = textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(whole)


def took(seconds: float) -> str:
    """A time as text: 1.5 s, 12 s, 3 min 05 s; integers stay integers."""
    if seconds < 9.95 and isinstance(seconds, float):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
