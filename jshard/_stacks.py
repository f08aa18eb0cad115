"""The stacks of a process's threads, read from outside, even if it is in native code or stopped.

A process that has called `ready` answers SIGUSR2 with the Python stacks of its threads, written in C to an in-memory
file, which another process of the same user finds in /proc. Nothing is written to disk unless requested.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import re
import signal
import threading
import time
from pathlib import Path

_SIGNAL = signal.SIGUSR2
_MEMORY = "jshard-stacks"
_ANSWER_S = 1.0  # how long a process has to answer
_LOOK_S = 0.02
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting in the kernel", "Z": "dead (a zombie)"}
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x0*([0-9a-f]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacks:
    """The stacks of a process.

    Attributes:
        name: of the process.
        text: as faulthandler writes them; empty if the process did not answer.
        main: the main thread's frames, innermost first, as "FILE:LINE in FUNCTION".
        others: the frames of the other threads.
    """

    name: str
    text: str = ""
    main: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()


def ready(name: str) -> None:
    """Makes this process answer with its stacks from now on. An existing SIGUSR2 handler of the user is kept."""
    has_memory = hasattr(os, "memfd_create")
    is_signal_free = signal.getsignal(_SIGNAL) == signal.SIG_DFL
    if _memory(os.getpid()) or not has_memory or not is_signal_free:
        return
    memory = os.memfd_create(_MEMORY)
    # Two lines, which `stacks` reads first; the answers to signals follow.
    os.write(memory, f"{name}\n{threading.main_thread().ident:x}\n".encode())
    faulthandler.register(_SIGNAL, file=memory, all_threads=True)


def stacks(pid: int) -> Stacks | None:
    """Returns the current stacks of a process; None if it is not `ready` or is gone."""
    memory = _memory(pid)
    if memory is None:
        return None
    try:
        # Answers are appended: only what comes after this text is the answer to the signal below.
        before = memory.read_text(errors="replace")
        name, main_ident, _ = before.split("\n", 2)
        # A stopped process would answer only when it continues.
        if not _handles_signal(pid) or state(pid) == _state_text("T"):
            return Stacks(name=name)
        os.kill(pid, _SIGNAL)
        text = _answer(memory, before)
    except OSError:  # it is gone
        return None
    threads = _threads(text)
    main = threads.pop(main_ident.lstrip("0"), ())
    return Stacks(name=name, text=text, main=main, others=tuple(threads.values()))


def state(pid: int) -> str:
    """Returns the system's state of a process that does not run, such as "T (stopped)"; empty if it runs."""
    try:
        # The command's name, in brackets before the state, may itself have brackets and blanks.
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return _state_text(fields.split()[0])
    except (OSError, IndexError):
        return ""


def _state_text(letter: str) -> str:
    if letter not in _STATES:
        return ""
    return f"{letter} ({_STATES[letter]})"


def children(pid: int) -> list[int]:
    """Returns the child processes of a process."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                pids += map(int, (task / "children").read_text().split())
    return sorted(pids)


def _memory(pid: int) -> Path | None:
    """Returns the in-memory file of a process, as others can open it; None if it has none, or is gone."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # a file that was closed meanwhile
                if os.readlink(descriptor).startswith(f"/memfd:{_MEMORY}"):
                    return descriptor
    return None


def _handles_signal(pid: int) -> bool:
    """Returns whether the process catches the signal, which would otherwise end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    if caught is None:
        return False
    mask = int(caught[1], 16)
    return bool(mask >> (_SIGNAL - 1) & 1)  # signals are counted from 1


def _answer(memory: Path, before: str) -> str:
    """Returns the added text, once it stops growing: nothing in it says where it ends."""
    text = before
    end_s = time.monotonic() + _ANSWER_S
    while time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        previous = text
        text = memory.read_text(errors="replace")
        if text == previous and text != before:
            break
    return text[len(before) :]


def _threads(text: str) -> dict[str, tuple[str, ...]]:
    """Returns the frames of each thread, by its ident."""
    threads: dict[str, tuple[str, ...]] = {}
    for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", text):
        head = _THREAD.match(block)
        if head is not None:
            frames = _FRAME.findall(block)
            threads[head[1]] = tuple(f"{file}:{line} in {function}" for file, line, function in frames)
    return threads
