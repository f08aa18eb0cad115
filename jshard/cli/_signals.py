"""Signals that come before a run handles them itself, or to a command that is not a run: it ends soon, and says so.

Python calls a handler only between two of its own instructions, and compiling a model is one instruction of minutes. So
a thread learns of each signal at once, and ends the process if the main thread cannot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType

from jshard.launch import is_worker, stopped_code

_PATIENCE_S = 1.0
_ENDING_S = 10.0  # from an exception in the main thread to the end of the process
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)

_reacted = threading.Event()


def end_promptly() -> None:
    """Handles the signals that would end this process by default. Call it once, in the main thread.

    One that is ignored stays so: `nohup` ignores SIGHUP, and a shell ignores SIGINT for what it starts with `&`.
    """
    numbers = [signal.SIGINT]
    if not is_worker():  # its supervisor knows what a worker means that died by SIGTERM
        numbers += [signal.SIGTERM, signal.SIGHUP]
    heard = [number for number in numbers if signal.getsignal(number) in _DEFAULT]
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in heard:
        signal.signal(number, _react)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="jshard-signals").start()


def _react(number: int, frame: FrameType | None) -> None:
    _reacted.set()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    _say_stopped(number)
    raise SystemExit(_code(number))


def _watch(reader: int) -> None:
    while True:
        for number in os.read(reader, 64):
            # A run, or a supervisor, may have a handler of its own for now.
            if signal.getsignal(number) is _react:
                _end_if_needed(number)


def _end_if_needed(number: int) -> None:
    has_reacted = _reacted.wait(_PATIENCE_S)
    _reacted.clear()
    if not has_reacted:
        _say_stopped(number)
        os._exit(_code(number))
    if number != signal.SIGINT:  # after Ctrl-C somebody is there, who can press it again
        time.sleep(_ENDING_S)
        os._exit(_code(number))


def _say_stopped(number: int) -> None:
    name = signal.Signals(number).name
    command = " ".join(["jshard", *sys.argv[1:2]])
    text = "\ninterrupted\n" if number == signal.SIGINT else f"\n{name}: {command} is stopped.\n"
    with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
        os.write(2, text.encode())


def _code(number: int) -> int:
    is_run = sys.argv[1:2] == ["train"]
    return stopped_code(number) if is_run else 128 + number
