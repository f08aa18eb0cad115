"""Ends processes with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its descendants, and waits for it.

    Those in sessions of their own are found by their parents, and those whose parent has ended by the process group.
    """
    victims = [process.pid, *_descendants(process.pid)] if process.poll() is None else []
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the group of a process that led one; its number is not used again while any is there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that these have; none where there is no /proc."""
    descendants = []
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                descendants += [child, *_descendants(child)]
    return descendants
