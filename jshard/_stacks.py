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
_ANSWER_S, _LOOK_S = 1.0, 0.02
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
    """From now on, this process answers with its stacks. An existing SIGUSR2 handler of the user is kept."""
    if _memory(os.getpid()) or not hasattr(os, "memfd_create") or signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        return
    memory = os.memfd_create(_MEMORY)
    os.write(memory, f"{name}\n{threading.main_thread().ident:x}\n".encode())
    faulthandler.register(_SIGNAL, file=memory, all_threads=True)


def stacks(pid: int) -> Stacks | None:
    """The current stacks of a process; None if it is not `ready` or is gone."""
    memory = _memory(pid)
    if memory is None:
        return None
    with contextlib.suppress(OSError):
        before = memory.read_text(errors="replace")
        name, ident, _ = before.split("\n", 2)
        if _listens(pid) and state(pid) != _described("T"):
            os.kill(pid, _SIGNAL)
            text = _answer(memory, before)
            threads = _threads(text)
            main = threads.pop(ident.lstrip("0"), ())
            return Stacks(name=name, text=text, main=main, others=tuple(threads.values()))
        return Stacks(name=name)
    return None


def state(pid: int) -> str:
    """The system's state of a process that does not run, such as "T (stopped)"; empty if it runs."""
    with contextlib.suppress(OSError, IndexError):
        return _described(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return ""


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return sorted(found)


def _described(letter: str) -> str:
    return f"{letter} ({_STATES[letter]})" if letter in _STATES else ""


def _memory(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith(f"/memfd:{_MEMORY}"):
                    return fd
    return None


def _listens(pid: int) -> bool:
    """Whether the process catches the signal, which would otherwise end it."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def _answer(memory: Path, before: str) -> str:
    """The added text, once it stops growing."""
    text, until_s = before, time.monotonic() + _ANSWER_S
    while time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        last, text = text, memory.read_text(errors="replace")
        if text == last != before:
            break
    return text[len(before) :]


def _threads(text: str) -> dict[str, tuple[str, ...]]:
    """The frames of each thread, by its ident."""
    blocks = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text)
    heads = {block: found[1] for block in blocks if (found := _THREAD.match(block))}
    of = lambda block: tuple(f"{file}:{line} in {name}" for file, line, name in _FRAME.findall(block))
    return {ident: of(block) for block, ident in heads.items()}
