"""What was measured, as a value that goes into a file and comes back from it: a run is continued where it ended."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.overlap.grid import Setting
from jshard.errors import RunError, ShardingError
from jshard.kernels.backend import Occupancy

_FORMAT = 2
_STEM = "overlap"


class BenchmarkError(ShardingError):
    """A request that the benchmark cannot meet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Setting):
    """One setting beside one load, at one priority."""

    group: str  # what it was measured with, side by side
    load: str  # e.g. "copies half": as much as takes half as long as XLA's dot; or "full": 896 MB
    load_bytes: int  # that it moves
    # "sequential", "baseline", "shaped"; with a higher priority for the load "baseline + priority", "shaped + priority"
    mode: str
    comp_ms: float  # the product alone
    comm_ms: float  # the load alone
    both_ms: float  # until both have ended
    least_ms: float  # the quickest of the rounds
    most_ms: float  # the slowest
    relative_error: float  # of the kernel's result beside that of XLA's dot
    waited_ms: float | None = None  # from the load's launch until its first block began; None if not recorded
    span_ms: float | None = None  # from its first block's begin to its last one's
    comm_sms: int | None = None  # multiprocessors that its blocks ran on

    @property
    def ratio(self) -> float:
        """Time of both over the sum of their times alone: 1 is one after the other."""
        return self.both_ms / (self.comp_ms + self.comm_ms)

    @property
    def perfect(self) -> float:
        """The least that the ratio can be: the longer of them alone."""
        return max(self.comp_ms, self.comm_ms) / (self.comp_ms + self.comm_ms)

    @property
    def size(self) -> str:
        """Of the product."""
        return self.group.partition("/")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTime:
    """A kernel of jshard beside the same as XLA compiles it."""

    kernel: str  # its name
    shape: str  # of what it computes
    direction: str  # "forward", or "both" with its gradients
    ours_ms: float  # of one call
    plain_ms: float  # of one call of its twin; of `matmul` of XLA's dot
    relative_error: float  # of ours beside the twin

    @property
    def ratio(self) -> float:
        """Ours over the twin's."""
        return self.ours_ms / self.plain_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Which blocks began beside a long one of 544 threads and 96 registers on every multiprocessor.

    Attributes:
        began: by registers of a thread, whether blocks of 128 threads began before the long ones ended.
        long_sms: multiprocessors that the long blocks ran on.
        long_ms: how long those ran.
    """

    began: Mapping[int, bool]
    long_sms: int
    long_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """All that was measured on one machine under the same conditions.

    Attributes:
        date: when it was begun, UTC.
        conditions: device, versions, settings: what must be the same to go on.
        placement: None as long as it is not measured.
        kernels: by the name of the task.
        rows: by the name of the group.
        failed: by the name of the task or the setting why it could not run.
    """

    date: str
    conditions: Mapping[str, Any]
    placement: Placement | None = None
    kernels: Mapping[str, tuple[KernelTime, ...]] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, tuple[Row, ...]] = dataclasses.field(default_factory=dict)
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """Of all groups."""
        return tuple(row for rows in self.rows.values() for row in rows)

    @property
    def all_kernels(self) -> tuple[KernelTime, ...]:
        """Of all tasks."""
        return tuple(each for times in self.kernels.values() for each in times)

    def has(self, task: str) -> bool:
        """Whether a task is done, or was tried and could not be."""
        done = task in self.kernels or task in self.rows or task in self.failed
        return done or (task == "placement" and self.placement is not None)


def path_of(record: Record, folder: Path) -> Path:
    """Where its figures go."""
    return folder / f"{record.date[:10]}_{_STEM}.json"


def save(record: Record, folder: Path) -> Path:
    """Writes the figures; what was there before stays whole until the new ones are."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(record, folder)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(record)}, indent=1, allow_nan=False) + "\n")
    part.replace(path)
    return path


def load(path: Path) -> Record:
    """Reads figures.

    Raises:
        RunError: the file is not this benchmark's.
    """
    try:
        found = json.loads(path.read_text())
        if found.pop("format") != _FORMAT:
            raise ValueError("it was written by another version of the benchmark")
        return parsed(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            "The figures cannot be read.",
            where=path.name,
            why=f"{type(error).__name__}: {error}",
            do="--out with another folder, or take the file away.",
        ) from error


def parsed(fields: Mapping[str, Any]) -> Record:
    """Returns the record of which these are the fields, as JSON has them."""
    placement = fields["placement"]
    if placement:
        began = {int(registers): began for registers, began in placement["began"].items()}
        placement = Placement(**{**placement, "began": began})
    kernels = {name: tuple(KernelTime(**time) for time in times) for name, times in fields["kernels"].items()}
    rows = {name: tuple(map(_row, group)) for name, group in fields["rows"].items()}
    return Record(**{**fields, "placement": placement, "kernels": kernels, "rows": rows})


def _row(fields: Mapping[str, Any]) -> Row:
    knobs = fields["knobs"]
    return Row(**{**fields, "knobs": Occupancy(**knobs) if knobs else None})


def newest(folder: Path) -> Record | None:
    """The figures in a folder that were begun last; None if there are none.

    Raises:
        RunError: they cannot be read.
    """
    found = sorted(folder.glob(f"*_{_STEM}.json"))
    return load(found[-1]) if found else None


def continued(folder: Path, date: str, conditions: Mapping[str, Any]) -> Record:
    """What a run continues with: the newest figures if they were measured under the same conditions, else none.

    Raises:
        BenchmarkError: today's figures are there, and under other conditions: they would be written over.
        RunError: those that are there cannot be read.
    """
    before, now = newest(folder), json.loads(json.dumps(dict(conditions)))
    if before is not None and before.conditions == now:
        return before
    fresh = Record(date=date, conditions=now)
    if before is None or not path_of(fresh, folder).exists():
        return fresh
    names = [name for name in sorted({*now, *before.conditions}) if now.get(name) != before.conditions.get(name)]
    raise BenchmarkError(
        "Today's figures were measured under other conditions.",
        where=path_of(before, folder).name,
        why="\n".join(f"{name}: {before.conditions.get(name)!r} there, {now.get(name)!r} now." for name in names),
        do="--out with another folder, or the options of then.",
    )
