"""Analyzes the saves and restores in a series' history: the time of each phase, and which process was slow."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

from jshard._parsing import checked
from jshard._types import Json
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.phases import ProcessReport
from jshard.checkpoint.series import history

SLOWER = 1.5  # a process is named if it takes this many times the median of the others
_LEAST_SHARE = 0.05  # and its excess is this share of the operation's time,
_LEAST_S = 0.01  # and more than the clocks' precision

# "sums" and "commit" are phases of earlier versions, which the history of a run may have.
PHASES = ("plan", "device_to_host", "write", "read", "verify", "sums", "commit", "finish")
WAITING = ("plan", "commit")  # in these a process may wait for a slow one
_LATE = "late"  # stands for the time from the start of the first process to that of another


class PhaseTime(NamedTuple):
    """One run of a phase in one process."""

    name: str
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """A process in a save or a restore."""

    process: int
    host: str
    num_bytes: int  # that it wrote or read
    began_s: float  # after the first process, as all seconds here
    phases: tuple[PhaseTime, ...]

    def phase_s(self, *names: str) -> float:
        """Returns the seconds during which one of these phases ran; phases of the same name may overlap."""
        # The union of the intervals: the sum would count overlapping ones twice.
        total_s = 0.0
        covered_until_s = float("-inf")
        for phase in sorted(self.phases, key=lambda phase: phase.begin_s):
            if phase.name in names:
                total_s += max(0.0, phase.end_s - max(phase.begin_s, covered_until_s))
                covered_until_s = max(covered_until_s, phase.end_s)
        return total_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slowest:
    """The main cause of waiting: a process, and the phase in which it was slow."""

    process: int
    phase: str  # "late" for a process that started after the others
    time_s: float
    median_s: float  # time of the others

    @property
    def excess_s(self) -> float:
        """What it took longer than the others."""
        return self.time_s - self.median_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A save or a restore."""

    kind: Literal["save", "restore"]
    step: int | None
    began_at: float  # seconds since 1970
    error: str | None  # None if completed
    blocked_s: float | None  # how long training waited; None for a restore
    axes: Mapping[str, int]
    devices: tuple[int, ...]  # the process of each, in the order of the mesh
    rows: tuple[ProcessTimes, ...]

    @property
    def total_s(self) -> float:
        """Time from the start of the first process to the end of the last."""
        return max((phase.end_s for phase in self._all_phases()), default=0.0)

    @property
    def num_bytes(self) -> int:
        """Bytes that all processes wrote or read."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of its phases, in the order of `PHASES`, then any others."""
        names = {phase.name for phase in self._all_phases()}
        known = [name for name in PHASES if name in names]
        return (*known, *sorted(names - set(PHASES)))

    def _all_phases(self) -> Iterator[PhaseTime]:
        """Yields the phases of all processes."""
        for row in self.rows:
            yield from row.phases

    @property
    def slowest(self) -> Slowest | None:
        """The process and phase that cost the most time over the median of the others; None if none stands out.

        A process is named if it took `SLOWER` times as long as the others and the excess is 5 % of the whole. Phases
        that include waiting are skipped, except for a process that started late.
        """
        if len(self.rows) < 2:
            return None
        slow: list[Slowest] = []
        for phase in (*self.phases, _LATE):
            if phase not in WAITING:
                slow += self._slow_processes(phase)
        return max(slow, key=lambda outlier: outlier.excess_s, default=None)

    def _slow_processes(self, phase: str) -> Iterator[Slowest]:
        """Yields the processes that were much slower than the others in a phase."""
        least_excess_s = max(_LEAST_S, _LEAST_SHARE * self.total_s)
        times_s = []
        for row in self.rows:
            times_s.append(row.began_s if phase == _LATE else row.phase_s(phase))
        sorted_s = sorted(times_s)
        for row, time_s in zip(self.rows, times_s, strict=True):
            median_s = _median_without(sorted_s, time_s)
            if time_s >= max(SLOWER * median_s, median_s + least_excess_s):
                yield Slowest(process=row.process, phase=phase, time_s=time_s, median_s=median_s)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of the other values, of which there is at least one.

    It sorts nothing: a timeline may have thousands of processes, and each is compared with the others.
    """
    # Leaving out any of several equal values gives the same rest.
    position = bisect.bisect_left(ordered, value)

    def other(number: int) -> float:
        return ordered[number] if number < position else ordered[number + 1]

    middle, is_odd = divmod(len(ordered) - 1, 2)
    if is_odd:
        return other(middle)
    return (other(middle - 1) + other(middle)) / 2


def timelines(folder: Place, say: Callable[[str], object] = history.warn) -> list[Timeline]:
    """Returns every save and restore in the history of a series, oldest first.

    For the arguments and errors, see `history.read`.
    """
    operations = []
    num_others = 0
    for record in history.read(folder, say):
        try:
            operations.append(_timeline(record))
        except ValueError:
            num_others += 1
    if num_others:
        say(f"{folder / history.NAME}: {num_others} lines that are not of a save or a restore are left out")
    return operations


class _StoredLayout(TypedDict, total=False):
    """A `phases.MeshLayout`, of which earlier versions wrote less."""

    axes: dict[str, int]
    processes: list[int]


class _BegunOperation(TypedDict):
    """The fields that every line has."""

    kind: Literal["save", "restore"]
    began_at: float


class _StoredOperation(_BegunOperation, total=False):
    """A line of the history."""

    step: int | None
    error: str | None
    blocked_s: float | None
    mesh: _StoredLayout | None
    processes: list[ProcessReport] | None


# A line may have been written by anyone, and is shown as a table and a picture.
_MOST_PHASES = 100  # of which each is a column; a save has fewer than ten
_MOST_S = 1e11  # seconds, also of a moment: some thousand years; sums of larger ones would not be finite


def _timeline(record: Mapping[str, Json]) -> Timeline:
    """Returns the operation of a line; raises `ValueError` if it is not one."""
    timeline = _timeline_of(checked(record, _StoredOperation))
    for time_s in _times(timeline):
        # Not `>= _MOST_S`, which is False for NaN.
        if not abs(time_s) < _MOST_S:
            raise ValueError("it has a time of thousands of years")
    if len(timeline.phases) > _MOST_PHASES:
        raise ValueError(f"it has {len(timeline.phases)} phases")
    return timeline


def _times(timeline: Timeline) -> Iterator[float]:
    """Yields all times of an operation, in seconds."""
    yield timeline.began_at
    yield timeline.blocked_s or 0.0
    for row in timeline.rows:
        yield row.began_s
        for phase in row.phases:
            yield phase.begin_s
            yield phase.end_s


def _timeline_of(record: _StoredOperation) -> Timeline:
    processes = record.get("processes") or []
    # A failed save has no processes and no mesh: see `Checkpointer._failed`.
    mesh = record.get("mesh") or {}
    # Which process started first depends on the hosts' clocks; each process's phases use its own clock.
    began_at = min((row["began_at"] for row in processes), default=record["began_at"])
    blocked_s = record.get("blocked_s")
    return Timeline(
        kind=record["kind"],
        step=record.get("step"),
        began_at=float(began_at),
        error=record.get("error"),
        blocked_s=None if blocked_s is None else float(blocked_s),
        axes={axis: int(degree) for axis, degree in mesh.get("axes", {}).items()},
        devices=tuple(map(int, mesh.get("processes", ()))),
        rows=tuple(_row(row, row["began_at"] - began_at) for row in processes),
    )


def _row(row: ProcessReport, began_s: float) -> ProcessTimes:
    phases: list[PhaseTime] = []
    for name, begin_s, end_s in row["phases"]:
        # Stored by the process's own start; here all are by that of the first process.
        phases.append(PhaseTime(str(name), began_s + begin_s, began_s + end_s))
    return ProcessTimes(
        process=int(row["process"]),
        host=str(row["host"]),
        num_bytes=int(row["bytes"]),
        began_s=began_s,
        phases=tuple(phases),
    )
