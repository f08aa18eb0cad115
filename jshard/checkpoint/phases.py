"""Measures the time of a save or restore, by phase and process."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TypedDict

import jax
import numpy as np
from jax.sharding import NamedSharding


class ProcessReport(TypedDict):
    """What a process reports of a save or restore; a part of a line of the history."""

    process: int
    host: str
    began_at: float  # seconds since 1970
    bytes: int  # that it wrote or read
    phases: list[tuple[str, float, float]]  # name, begin and end, in seconds since `began_at`


class MeshLayout(TypedDict):
    """The mesh of a state, in a line of the history."""

    axes: dict[str, int]  # degrees
    processes: list[int]  # of each device


class Phases:
    """A clock for named phases (`timeline.PHASES`), which may overlap; several threads may report.

    Attributes:
        began_at: when it was created, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.began_at = time.time()
        self._start_s = time.perf_counter()  # a host's clock may be set while a phase runs; this one cannot
        self._phases: list[tuple[str, float, float]] = []  # name, begin and end

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures the block, including one that fails."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.add(name, start_s, self.now_s())

    def add(self, name: str, begin_s: float, end_s: float) -> None:
        """Records a phase that was measured elsewhere."""
        self._phases.append((name, begin_s, end_s))

    def now_s(self) -> float:
        """Returns the seconds since its creation."""
        return time.perf_counter() - self._start_s

    def report(self, *, num_bytes: int) -> ProcessReport:
        """Returns the report of this process, with the bytes that it wrote or read."""
        phases = [(name, round(start, 6), round(end, 6)) for name, start, end in self._phases]
        return {
            "process": jax.process_index(),
            "host": socket.gethostname(),
            "began_at": self.began_at,
            "bytes": num_bytes,
            "phases": phases,
        }


def mesh_layout(leaves: Mapping[str, object]) -> MeshLayout:
    """Returns the mesh of a state in the form of the history: its axes, and the process of each device."""
    for leaf in leaves.values():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            devices = np.asarray(sharding.mesh.devices).flat
            return {
                "axes": dict(sharding.mesh.shape),
                "processes": [device.process_index for device in devices],
            }
    return {"axes": {}, "processes": []}
