"""The request of a run, in run.json, compared with that of a resumed run; its lock; its attempts.

For each attempt run.json has its begin and end, the cause, what it lost, and the ETTR: the effective training time
ratio of Kokolis et al. 2024, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
(arXiv:2410.21680), productive time over the wall-clock time since the run began. An attempt is productive from the
moment its first step may begin (parameters exist, the step is compiled) to the record of the last step that the run has
kept; evaluations and saves between steps are included. Start-up, repeated steps, and the time from a failure to the
next attempt are not: that time is lost, however late somebody resumed the run.

A pause is no lost time: the time from an attempt that ended on request (all its steps are done, or a signal stopped it
and it saved) to the next one. It is left out of the wall-clock time and recorded beside the ratio.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import itertools
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from jshard._files import open_in_place, read_text
from jshard._parsing import FormError, check_writable_values, checked, is_number, shown
from jshard._text import clock_text, counted, duration
from jshard.errors import RunError, ShardingError
from jshard.recipes.recipe import tree
from jshard.train.records import iterate_metrics
from jshard.train.trust import SEAL, sealed

_FIXED = ("model", "sequence_length", "seed")  # with other values it would be another run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The request of a run, as JSON values.

    Attributes:
        name: of the recipe.
        recipe: every field, with those of the model's config under "model".
        model_file: its path, or its name if it is included in jshard.
        data: "description" and "fingerprint" of the data.
        options: the command-line options, which a resumed run inherits.
    """

    name: str
    recipe: Mapping[str, Any]
    model_file: str
    data: Mapping[str, str]
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls, recipe: Any, *, name: str, model_file: str | Path, data: Any, options: Mapping[str, Any] | None = None
    ) -> RunRecord:
        """The record of a recipe (a dataclass) on data with a description and a fingerprint."""
        return cls(
            name=name,
            recipe=tree(recipe),
            model_file=str(model_file),
            data={"description": data.description, "fingerprint": data.fingerprint},
            options=tree(options or {}),
        )

    def as_json(self) -> dict[str, Any]:
        """The record in the form of the file."""
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return record | {SEAL: sealed(self.model_file)}

    def check_continues(self, stored: Mapping[str, Any], *, where: str) -> list[str]:
        """Checks that this run may continue from the checkpoints of a stored one; returns allowed differences as lines.

        Raises:
            ShardingError: the model, the samples or the seed differ; one error lists all.
        """
        found = list(differences(stored["recipe"], self.recipe))
        fixed = [(key, *values) for key, *values in found if key.split(".")[0] in _FIXED]
        bad = [f"{key}  stored {_text(before)}  wanted {_text(now)}" for key, before, now in fixed]
        if stored["data"]["fingerprint"] != self.data["fingerprint"]:
            bad.append(f"data  stored {_data_text(stored['data'])}")
        if bad:
            more = [f"      wanted {_data_text(self.data)}"] if bad[-1].startswith("data  ") else []
            raise ShardingError(
                f"The run cannot be resumed: {len(bad)} of its settings would change.",
                where=[where, *bad, *more],
                why="the checkpoints were made with the stored model and the stored order of samples.",
                do="resume with the stored values; or begin a new run: without --resume, in another --out.",
            )
        free = [line for line in found if line[0].split(".")[0] not in _FIXED]
        own = {key: stored.get(key) for key in ("name", "model_file")}
        free += differences(own, {"name": self.name, "model_file": self.model_file})
        return [f"{key} is {_text(now)}, was {_text(before)}" for key, before, now in free]

    def said(self) -> dict[str, Any]:
        """The parts of the request that must be equal in all processes; paths may differ between hosts."""
        return {"recipe": self.recipe, "data": self.data["fingerprint"]}


def check_agree(said: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Checks that all processes of a run have the same request: else each would compute a part of another model."""
    bad = [
        f"{key}  process {process} on {hosts[process]} {_text(theirs)}  process 0 on {hosts[0]} {_text(ours)}"
        for process, one in enumerate(said)
        for key, ours, theirs in differences(said[0], one)
    ]
    if bad:
        raise ShardingError(
            "The processes of the run do not agree on what to train.",
            where=bad,
            why="they train one model together, from the same recipe and the same data.",
            do="give every process the same command, the same model file and the same data.",
        )


# The form of run.json, which is checked when it is read: the folder may come from elsewhere, or be edited by hand.


class StoredData(TypedDict):
    """What `RunRecord.of` says of the data."""

    description: str
    fingerprint: str


class StoredOptions(TypedDict, total=False):
    """The options that a resumed run inherits."""

    recipe: str | None
    set: list[str]
    unit: list[str]
    steps: int | None
    seed: int | None
    data: list[str]
    held_out: list[str]
    text_key: str | None
    dtype: str | None
    tokenizer: str | None
    init_from: str | None
    checkpoints: str | None


class StoredStart(TypedDict):
    """A start of the run."""

    step: int
    batch_size: int
    mesh: dict[str, int]
    versions: dict[str, str | None]


class _BegunAttempt(TypedDict):
    begin: str
    ready: str | None
    end: str | None
    first_step: int
    last_step: int


class StoredAttempt(_BegunAttempt, total=False):
    """An attempt; the further keys are those of one that has ended."""

    cause: str
    productive_s: float
    steps_lost: int
    seconds_lost: float


class _BegunRun(TypedDict):
    name: str
    model_file: str
    recipe: dict[str, Any]
    data: StoredData
    options: StoredOptions
    versions: dict[str, str | None]
    starts: list[StoredStart]


class StoredRecord(_BegunRun, total=False):
    """The whole of run.json."""

    attempts: list[StoredAttempt]


_OF_AN_END = ("cause", "productive_s", "steps_lost", "seconds_lost")


def checked_record(value: Any) -> dict[str, Any]:
    """The contents of run.json, if they have its form.

    Raises:
        FormError: they have not.
    """
    record = checked(value, StoredRecord)
    check_writable_values(value, finite=True)
    for number, attempt in enumerate(record.get("attempts", [])):
        missing = [key for key in _OF_AN_END if key not in attempt and attempt["end"] is not None]
        if missing:
            raise FormError(f"attempts[{number}] has ended, and lacks {', '.join(missing)}")
        for key in ("begin", "ready", "end"):
            _check_moment(attempt[key], f"attempts[{number}].{key}")
    return value


def _check_moment(text: str | None, where: str) -> None:
    if text is None:
        return
    try:
        _seconds(text)
    except (ValueError, OverflowError) as error:
        raise FormError(f"{where} is {shown(text)}, not a time") from error


NOTHING = object()  # for a missing setting


def differences(stored: Any, wanted: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, stored and wanted value of each setting that differs; NOTHING for a missing value."""
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*stored, *wanted]):
            below = f"{path}.{key}" if path else key
            yield from differences(stored.get(key, NOTHING), wanted.get(key, NOTHING), below)
    elif stored != wanted or isinstance(stored, bool) != isinstance(wanted, bool):
        yield path, stored, wanted


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "nothing" if value is NOTHING else repr(value)


def _data_text(data: Mapping[str, str]) -> str:
    return f"{data['description']} ({data['fingerprint']})"


# One live run per folder: a lock that ends with the process that holds it.

_LOCK_BYTES = 4096  # more than the file holds: a host name has at most 255
# Errors of network file systems mounted without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """An exclusive lock on a file, which it creates, and which names the holder.

    The kernel releases the lock however the process ends, so a killed run never blocks another. A
    forked child, such as a data worker, does not keep it.

    Args:
        path: the file.
        token: a further word in it.

    Attributes:
        is_held: False if the file system has no locks.

    Raises:
        RunError: a live process holds it.
        OSError: the file cannot be written, or is a link: the lock is written in place.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self._file: int | None = open_in_place(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _close_to_others(self._file, path)
            self.is_held = _locked(self._file, fcntl.LOCK_EX, path)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n{token}\n".encode(), 0)
        except (OSError, RunError):
            self.release()
            raise
        os.register_at_fork(after_in_child=self.release)  # closes the child's copy, which would keep it locked

    def release(self) -> None:
        """Releases the lock; the file stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @staticmethod
    def token(path: Path) -> str | None:
        """The word that the holder wrote; None if it cannot be read."""
        try:
            lines = read_text(path, _LOCK_BYTES).split("\n")
        except (OSError, ValueError):
            return None
        return lines[1] if len(lines) > 1 else None

    @staticmethod
    def check_free(path: Path, *, wait_s: float = 0.0) -> None:
        """Raises a RunError if a live process holds it and does not release it in that time; changes nothing."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                file = open_in_place(path, os.O_RDONLY)
            except OSError:
                return  # missing, or not readable: a later step reports it
            try:
                # Shared: the processes of one run check at the same time; NFS refuses an exclusive lock to a reader.
                _locked(file, fcntl.LOCK_SH, path)
                return
            except OSError:
                return
            except RunError:
                if time.monotonic() >= until_s:
                    raise
            finally:
                os.close(file)
            time.sleep(0.2)


def _close_to_others(file: int, path: Path) -> None:
    """Lets only those open a lock file who may write into its folder: a reader of a file can hold its lock."""
    folder = path.parent.stat().st_mode
    mode = 0o600
    if folder & stat.S_IWGRP:
        mode |= 0o060
    if folder & stat.S_IWOTH:
        mode |= 0o006
    with contextlib.suppress(PermissionError):  # it is a colleague's
        os.fchmod(file, mode)


def _locked(file: int, kind: int, path: Path) -> bool:
    """Locks a file; False if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, 1000).decode(errors="replace").split("\n")[0]
        raise RunError(
            "The folder is in use by a live run.",
            where=str(path.parent),
            why=f"{holder or 'another process'} holds the lock.",
            do=f"let that run end or stop it, or name another folder: --out {path.parent}-2",
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


# The attempts of a run.

Attempt = dict[str, Any]
_Lines = Sequence[tuple[float, int]]  # time and step


def begin_attempt(attempts: Sequence[Attempt], metrics: Path, *, step: int, known: Mapping[str, Any]) -> list[Attempt]:
    """Adds an attempt that continues from a step, and records the losses of those before it.

    Args:
        attempts: the earlier attempts.
        metrics: the record of their steps, not yet cut back.
        step: the number of completed steps.
        known: what the supervisor knows of the last attempt: "cause" and "ended_at".
    """
    lines = _lines(metrics)
    before = [dict(attempt) for attempt in attempts]
    if before and before[-1].get("end") is None:
        _close_lost(before[-1], lines, known)
    for attempt in before:
        if attempt["last_step"] > step:
            _give_back(attempt, lines, step)
    return [*before, {"begin": _moment(_began_s()), "ready": None, "end": None, "first_step": step, "last_step": step}]


def end_attempt(attempts: Sequence[Attempt], metrics: Path, *, cause: str, on_request: bool = False) -> list[Attempt]:
    """Records that the last attempt ended by itself.

    Args:
        attempts: all attempts.
        metrics: the record of their steps.
        cause: why it ended.
        on_request: whether that was asked for. The time until the next attempt is then a pause.
    """
    *before, last = [dict(attempt) for attempt in attempts]
    _close(last, _lines(metrics), time.time(), cause)
    return [*before, last | {"on_request": on_request}]


def attempt_ready(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Records that the first step of the last attempt may begin."""
    return [*attempts[:-1], {**attempts[-1], "ready": _moment(time.time())}]


def ettr(attempts: Sequence[Attempt]) -> float | None:
    """Productive time over the time since the first start, to now or to the end of the last attempt, without pauses."""
    if not attempts:
        return None
    running_s = _wall_s(attempts) - paused_s(attempts)
    return _all_productive_s(attempts) / running_s if running_s > 0 else None


def paused_s(attempts: Sequence[Attempt]) -> float:
    """The time between attempts that ended on request and the next ones."""
    total_s = 0.0
    for attempt, following in itertools.pairwise(attempts):
        if attempt.get("on_request"):
            # Clocks of two machines differ.
            total_s += max(_seconds(following["begin"]) - _seconds(attempt["end"]), 0.0)
    return round(total_s, 3)


def describe_attempts(attempts: Sequence[Attempt]) -> str:
    """One line for a run of several attempts."""
    lost = sum(attempt.get("steps_lost", 0) for attempt in attempts)
    lost_s = sum(attempt.get("seconds_lost", 0.0) for attempt in attempts)
    wall_s, pause_s = _wall_s(attempts), paused_s(attempts)
    attempts_text = counted(len(attempts), "attempt")
    lost_steps = counted(lost, f"step ({duration(lost_s)}) was lost", f"steps ({duration(lost_s)}) were lost")
    line = (
        f"ETTR {ettr(attempts) or 0:.1%}: {duration(_all_productive_s(attempts))} of steps that count in "
        f"{duration(wall_s - pause_s)}, {attempts_text}; {lost_steps}"
    )
    if pause_s == 0:
        return line
    return f"{line}; {clock_text(pause_s)} between stops on request and the next start are not counted"


def _wall_s(attempts: Sequence[Attempt]) -> float:
    end = attempts[-1]["end"]
    end_s = time.time() if end is None else _seconds(end)
    return end_s - _seconds(attempts[0]["begin"])


def _all_productive_s(attempts: Sequence[Attempt]) -> float:
    return sum(attempt.get("productive_s", 0.0) for attempt in attempts)


def _close_lost(attempt: Attempt, lines: _Lines, known: Mapping[str, Any]) -> None:
    """Closes an attempt that did not record its end: the supervisor knows it, or it is that of the last line."""
    own = _own(attempt, lines)
    last_s = own[-1][0] if own else _seconds(attempt["ready"] or attempt["begin"])
    _close(attempt, lines, max(last_s, float(known.get("ended_at", 0.0))), known.get("cause", "not known"))


def _close(attempt: Attempt, lines: _Lines, end_s: float, cause: str) -> None:
    own = _own(attempt, lines)
    attempt |= {"end": _moment(end_s), "cause": cause, "last_step": own[-1][1] if own else attempt["first_step"]}
    attempt |= {"productive_s": _productive_s(attempt, own), "steps_lost": 0, "seconds_lost": 0.0}


def _give_back(attempt: Attempt, lines: _Lines, step: int) -> None:
    """Drops the later steps of the attempt, as the run continues from an earlier one."""
    own = _own(attempt, lines)
    kept = [line for line in own if line[1] <= step]
    productive_s = _productive_s(attempt, kept)
    attempt["seconds_lost"] = round(attempt["seconds_lost"] + attempt["productive_s"] - productive_s, 3)
    attempt["steps_lost"] += attempt["last_step"] - max(step, attempt["first_step"])
    attempt |= {"productive_s": productive_s, "last_step": max(step, attempt["first_step"])}


def _productive_s(attempt: Attempt, own: _Lines) -> float:
    return round(own[-1][0] - _seconds(attempt["ready"]), 3) if own and attempt["ready"] is not None else 0.0


def _own(attempt: Attempt, lines: _Lines) -> _Lines:
    """The lines written by an attempt."""
    since_s = _seconds(attempt["begin"])
    until_s = float("inf") if attempt["end"] is None else _seconds(attempt["end"])
    return [line for line in lines if since_s <= line[0] <= until_s + 1e-3 and line[1] >= attempt["first_step"]]


def _lines(metrics: Path) -> _Lines:
    try:
        return [(line["time"], line["step"]) for line in iterate_metrics(metrics) if is_number(line.get("time"))]
    except (OSError, RunError):  # the next reader of the file reports the error
        return []


def _began_s() -> float:
    """When this process was started."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot_s + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):  # not on Linux
        return time.time()


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
