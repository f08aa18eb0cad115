"""The phases of a save or a restore in one process, and how long each took."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax


class Phases:
    """A clock that names what it measures; phases may overlap, and several threads may report.

    The names are those of the field: plan, device_to_host, write, commit; read, verify, finish.
    """

    def __init__(self) -> None:
        self.began_at = time.time()
        self._start_s = time.perf_counter()
        self._found: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures the block; one that fails counts too."""
        begin = self.now_s()
        try:
            yield
        finally:
            self.add(name, begin, self.now_s())

    def add(self, name: str, begin_s: float, end_s: float) -> None:
        """Notes a phase that somebody else measured."""
        self._found.append((name, begin_s, end_s))

    def now_s(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start_s

    def report(self, *, num_bytes: int) -> dict[str, Any]:
        """What this process tells of itself: `{"process", "host", "began_at", "bytes", "phases": [[name, from, to]]}`.

        Args:
            num_bytes: what it wrote or read.
        """
        phases = [[name, round(begin, 6), round(end, 6)] for name, begin, end in self._found]
        return {
            "process": jax.process_index(),
            "host": socket.gethostname(),
            "began_at": self.began_at,
            "bytes": num_bytes,
            "phases": phases,
        }
