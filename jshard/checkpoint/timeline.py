"""The time of a save or restore by phase and process, and the history of a series, `history.jsonl`."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import jax
import numpy as np
from jax.sharding import NamedSharding

from jshard._files import open_in_place
from jshard._parsing import checked, parse_json
from jshard.checkpoint.buckets import Place, contents
from jshard.checkpoint.errors import CheckpointWarning
from jshard.errors import UnsafeFileError


class Phases:
    """A clock for named phases (`PHASES`), which may overlap; several threads may report."""

    def __init__(self) -> None:
        self.began_at = time.time()
        self._start_s = time.perf_counter()
        self._found: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures the block, including one that fails."""
        begin = self.now_s()
        try:
            yield
        finally:
            self.add(name, begin, self.now_s())

    def add(self, name: str, begin_s: float, end_s: float) -> None:
        """Records a phase that was measured elsewhere."""
        self._found.append((name, begin_s, end_s))

    def now_s(self) -> float:
        """Seconds since its creation."""
        return time.perf_counter() - self._start_s

    def report(self, *, num_bytes: int) -> dict[str, Any]:
        """The report of this process, with the bytes that it wrote or read."""
        phases = [[name, round(begin, 6), round(end, 6)] for name, begin, end in self._found]
        return {
            "process": jax.process_index(),
            "host": socket.gethostname(),
            "began_at": self.began_at,
            "bytes": num_bytes,
            "phases": phases,
        }


# The history of a series: a line per save and restore, `history.jsonl`, written by the first process.

NAME = "history.jsonl"
_MOST_BYTES = 256 << 20
_MOST_LINES = 100_000  # of saves and restores; a file of that size may have a hundred million


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to the history of a series."""
    line = json.dumps(record) + "\n"
    try:
        number = open_in_place(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    except UnsafeFileError as error:
        warnings.warn(
            f"the history has no line for step {record.get('step')}: {error}", CheckpointWarning, stacklevel=2
        )
        return
    except OSError:
        return
    with contextlib.suppress(OSError), os.fdopen(number, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"  # a crash truncated the last line
        file.write(line.encode())


def _warn(text: str) -> None:
    warnings.warn(text, CheckpointWarning, stacklevel=4)


def read(folder: Place, say: Callable[[str], object] = _warn) -> list[dict[str, Any]]:
    """The history of a series, oldest first; damaged lines, as a crash leaves, are left out.

    Args:
        folder: of the series.
        say: called once if lines are left out.

    Raises:
        UnsafeFileError: it is not a regular file, or is too large.
    """
    try:
        content = contents(folder / NAME, _MOST_BYTES)
    except UnsafeFileError:
        raise
    except OSError:
        return []
    lines = content.split(b"\n")
    num_older = max(0, len(lines) - _MOST_LINES)
    if num_older:
        say(f"{folder / NAME}: the oldest {num_older} lines are left out")
    records, damaged = [], []
    for number, line in enumerate(lines[num_older:], num_older + 1):
        if not line.strip():
            continue
        record = _record_of(line)
        if record is None:
            damaged.append(number)
        else:
            records.append(record)
    if damaged:
        shown = ", ".join(map(str, damaged[:3]))
        if len(damaged) > 3:
            shown += f" and {len(damaged) - 3} more"
        say(f"{folder / NAME}: damaged lines are left out: {shown}")
    return records


def _record_of(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def mesh_layout(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The mesh of a state in the form of the history."""
    for leaf in leaves.values():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
            return {
                "axes": dict(mesh.shape),
                "processes": [device.process_index for device in np.asarray(mesh.devices).flat],
            }
    return {"axes": {}, "processes": []}


# Analysis of the history: which process was slow in which phase.

SLOWER = 1.5  # a process is named if it takes this many times the median of the others
_LEAST_SHARE, _LEAST_S = 0.05, 0.01  # and this share of the whole, and more than the clocks' precision

PHASES = ("plan", "device_to_host", "write", "read", "verify", "sums", "commit", "finish")
WAITING = ("plan", "commit")  # in these a process may wait for a slow one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """A process in a save or a restore."""

    process: int
    host: str
    num_bytes: int  # that it wrote or read
    began_s: float  # after the first process, as all seconds here
    phases: tuple[tuple[str, float, float], ...]  # name, begin and end

    def phase_s(self, *names: str) -> float:
        """Seconds during which one of these phases ran; phases of the same name may overlap."""
        total_s, reached = 0.0, float("-inf")
        for begin, end in sorted((begin, end) for name, begin, end in self.phases if name in names):
            total_s += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slowest:
    """The main cause of waiting: a process, and the phase in which it was slow."""

    process: int
    phase: str  # "late" for a process that started after the others
    time_s: float
    median_s: float  # time of the others


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
        return max((end for row in self.rows for _, _, end in row.phases), default=0.0)

    @property
    def num_bytes(self) -> int:
        """Bytes that all processes wrote or read."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of its phases, in the order of `PHASES`, then any others."""
        found = {name for row in self.rows for name, _, _ in row.phases}
        return (*(name for name in PHASES if name in found), *sorted(found - set(PHASES)))

    @property
    def slowest(self) -> Slowest | None:
        """The process and phase that cost the most time over the median of the others; None if none stands out.

        A process is named if it took `SLOWER` times as long as the others and the excess is 5 % of the whole. Phases
        that include waiting are skipped, except for a process that started late.
        """
        found, least_s = [], max(_LEAST_S, _LEAST_SHARE * self.total_s)
        for phase in (*self.phases, "late") if len(self.rows) > 1 else ():
            times_s = [row.began_s if phase == "late" else row.phase_s(phase) for row in self.rows]
            ordered_s = sorted(times_s)
            for row, time_s in zip(self.rows, times_s, strict=True):
                median_s = _median_without(ordered_s, time_s)
                if phase not in WAITING and time_s >= max(SLOWER * median_s, median_s + least_s):
                    found.append(Slowest(process=row.process, phase=phase, time_s=time_s, median_s=median_s))
        return max(found, key=lambda slow: slow.time_s - slow.median_s, default=None)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of the other values, of which there is at least one; without another sort for each of thousands."""
    place = bisect.bisect_left(ordered, value)

    def other(number: int) -> float:
        return ordered[number] if number < place else ordered[number + 1]

    middle, is_odd = divmod(len(ordered) - 1, 2)
    if is_odd:
        return other(middle)
    return (other(middle - 1) + other(middle)) / 2


def timelines(folder: Place, say: Callable[[str], object] = _warn) -> list[Timeline]:
    """Every save and restore in the history of a series, oldest first; for the arguments and errors, see `read`."""
    found, odd = [], 0
    for record in read(folder, say):
        try:
            found.append(_timeline(record))
        except ValueError:
            odd += 1
    if odd:
        say(f"{folder / NAME}: {odd} lines that are not of a save or a restore are left out")
    return found


class _StoredProcess(TypedDict):
    """What `Phases.report` writes."""

    process: int
    host: str
    began_at: float
    bytes: int
    phases: list[tuple[str, float, float]]


class _StoredLayout(TypedDict, total=False):
    axes: dict[str, int]
    processes: list[int]


class _BegunOperation(TypedDict):
    kind: Literal["save", "restore"]
    began_at: float


class _StoredOperation(_BegunOperation, total=False):
    """A line of the history."""

    step: int | None
    error: str | None
    blocked_s: float | None
    mesh: _StoredLayout | None
    processes: list[_StoredProcess] | None


_MOST_PHASES = 100  # of which each is a column; a save has fewer than ten
_MOST_S = 1e11  # seconds, also of a moment: some thousand years; sums of larger ones would not be finite


def _timeline(record: Mapping[str, Any]) -> Timeline:
    """The operation of a line; a ValueError if it is not one."""
    timeline = _timeline_of(checked(record, _StoredOperation))
    times_s = [timeline.began_at, timeline.blocked_s or 0.0]
    for row in timeline.rows:
        times_s += _times(row)
    if not all(abs(time_s) < _MOST_S for time_s in times_s):
        raise ValueError("it has a time of thousands of years")
    if len(timeline.phases) > _MOST_PHASES:
        raise ValueError(f"it has {len(timeline.phases)} phases")
    return timeline


def _times(row: ProcessTimes) -> Iterator[float]:
    yield row.began_s
    for _, begin_s, end_s in row.phases:
        yield begin_s
        yield end_s


def _timeline_of(record: _StoredOperation) -> Timeline:
    processes = record.get("processes") or []
    mesh = record.get("mesh") or {}
    # Which process started first depends on the hosts' clocks; each process's phases use its own clock.
    first = min((row["began_at"] for row in processes), default=record["began_at"])
    blocked_s = record.get("blocked_s")
    return Timeline(
        kind=record["kind"],
        step=record.get("step"),
        began_at=float(first),
        error=record.get("error"),
        blocked_s=None if blocked_s is None else float(blocked_s),
        axes={axis: int(degree) for axis, degree in mesh.get("axes", {}).items()},
        devices=tuple(map(int, mesh.get("processes", ()))),
        rows=tuple(_row(row, row["began_at"] - first) for row in processes),
    )


def _row(row: _StoredProcess, began_s: float) -> ProcessTimes:
    phases = tuple((str(name), began_s + begin, began_s + end) for name, begin, end in row["phases"])
    return ProcessTimes(
        process=int(row["process"]),
        host=str(row["host"]),
        num_bytes=int(row["bytes"]),
        began_s=began_s,
        phases=phases,
    )
