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

_EVERY_S = 1.0
_FIRST_S = 0.3  # instant work is not shown
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
        """Returns the available width; the last column stays free, as filling it starts a new line."""
        return max(shutil.get_terminal_size().columns - 1, 1)

    def rewrite(self, line: str) -> None:
        """Replaces the live text; only on a terminal."""
        columns = self.columns
        line = printable(line)
        with self._lock:
            # Blanks cover what is longer in the text before.
            self._write("\r" + line[:columns].ljust(min(self._width, columns)))
            # For the blanks of the next one.
            self._width = min(len(line), columns)

    def leave(self, line: str = "") -> None:
        """Writes a permanent line in place of the live one."""
        line = printable(line, keep="\n\t")
        with self._lock:
            text = ""
            width = min(self._width, self.columns)
            if width:
                text = f"\r{' ' * width}\r"
            if line:
                text += f"{line}\n"
            self._width = 0
            self._write(text)

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
        # Python raises it for a closed stream; any other one is a fault of the program.
        except ValueError:
            if not self._stream.closed:
                raise
            self._fall_silent()

    def _fall_silent(self) -> None:
        if self._stream is sys.stdout:
            # Python flushes standard output at exit, and would exit with code 120.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, sys.stdout.fileno())
                os.close(null)
        self._stream = None


class Work:
    """The text that `at_work` shows; the result may be added once it is known.

    Args:
        what: is done.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.result = ""


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
    work = Work(what)
    line = LiveLine(stream)
    clock = _Clock()
    # A thread of its own, as the work may occupy the main thread for minutes.
    if line.is_live:
        ticking = threading.Thread(target=_rewrite_line, args=(line, work, clock, every_s))
    else:
        if not quiet_s:
            say(f"{what} ...")
        ticking = threading.Thread(target=_print_lines, args=(say, work, clock, plain_first_s, quiet_s))
    ticking.name = "jshard-at-work"
    # It may be printing to a terminal that hangs: that must not keep the process alive.
    ticking.daemon = True
    ticking.start()
    is_completed = False
    try:
        yield work
        is_completed = True
    finally:
        clock.is_over.set()
        ticking.join()  # or it could write after the last line
        if line.is_live:
            line.leave()
        elapsed_s = clock.elapsed_s
        if elapsed_s >= quiet_s:
            say(f"{work.what}: {_outcome(work, elapsed_s, is_completed)}")


class _Clock:
    """The time of work in progress, and an event for its end."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self.is_over = threading.Event()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    def is_over_at(self, elapsed_s: float) -> bool:
        """Waits until so much time has passed since the start, or the work is over; returns whether it is."""
        return self.is_over.wait(max(elapsed_s - self.elapsed_s, 0))


def _rewrite_line(line: LiveLine, work: Work, clock: _Clock, every_s: float) -> None:
    """Shows work on a terminal, in one line, until it is over."""
    wait_s = min(_FIRST_S, every_s)
    while not clock.is_over.wait(wait_s):
        suffix = f" ... {took(int(clock.elapsed_s))}"
        line.rewrite(_cut(work.what, line.columns - len(suffix)) + suffix)
        wait_s = every_s


def _print_lines(say: Callable[[str], object], work: Work, clock: _Clock, plain_first_s: float, quiet_s: float) -> None:
    """Shows work in lines, at intervals that double, until it is over."""
    with contextlib.suppress(OSError, ValueError):  # the stream is closed; the work continues
        if quiet_s:
            if clock.is_over.wait(quiet_s):
                return
            say(f"{work.what} ...")
        next_s = plain_first_s
        while not clock.is_over_at(next_s):
            say(f"{work.what} ... {took(round(next_s))} so far")
            next_s *= 2


def _outcome(work: Work, elapsed_s: float, is_completed: bool) -> str:
    if not is_completed:
        return f"stopped after {took(elapsed_s)}"
    if work.result:
        return f"{took(elapsed_s)}, {work.result}"
    return took(elapsed_s)


def _cut(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    return f"{text[: max(room - 1, 0)]}…"


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether lines of a stream can be rewritten: on a terminal, or in a notebook."""
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
    lines = textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def took(seconds: float) -> str:
    """Returns a time as text: 1.5 s, 12 s, 3 min 05 s; integers stay integers."""
    if seconds < 9.95 and isinstance(seconds, float):
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes:
        return f"{minutes} min {seconds:02} s"
    return f"{seconds} s"
