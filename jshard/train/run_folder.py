"""The folder of a run: which process may write into it, and whether a run may continue there.

run.json          the request, and every start
metrics.jsonl     a line per step and evaluation
checkpoints/      STEP/, and earlier ones
loss.png, sample.txt, tensorboard/
.lock             held while the run lives
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import jax
from jax.sharding import Mesh

from jshard import _processes, launch
from jshard._files import check_may_write, is_draft, read_json, write_text
from jshard._paths import expanded
from jshard._types import Json
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.lookup import place_of
from jshard.errors import FourPartError, RunError, ShardingError, UnsafeFileError
from jshard.plans.mesh import num_processes
from jshard.recipes.recipe import versions
from jshard.train.attempts import (
    Attempt,
    attempt_ready,
    begin_attempt,
    describe_losses,
    end_attempt,
    ettr,
    paused_s,
)
from jshard.train.run_json import StoredRecord, checked_record
from jshard.train.run_lock import RunLock
from jshard.train.run_record import RunRecord, check_agree

_RECORD = "run.json"
_LOCK = ".lock"
_BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_LOCK_RELEASE_S = 120.0  # for the holder of a lock that was lost, see `_continue`
_VISIBLE_S = 30.0  # network file systems show the writes of other processes late
_LOOK_S = 0.1


Failures = Mapping[int, Mapping[str, Json]]
"""The parts of the errors of other processes, by process; see `_processes.all_or_none`."""


class _BatchSize(NamedTuple):
    """The batch size of a run from a step on."""

    first_step: int
    size: int


class _FolderReport(TypedDict):
    """What a process says when all open the folder.

    Attributes:
        token: the word in the lock file, if it is the first process.
        notices: see `RunFolder`.
        batch_sizes: those of the run so far.
        request: the parts of the request that must be equal in all processes.
        host: the machine of the process.
    """

    token: str
    notices: list[str]
    batch_sizes: list[tuple[int, int]]
    request: dict[str, object]
    host: str


class RunFolder:
    """The folder of a run, held until `close`.

    Only the first process writes; all processes open it together, and an error of one stops all.

    Attributes:
        path: the folder.
        is_primary: whether this process writes.
        is_resumed: whether the run was begun before.
        notices: what a resumed run does differently, and other remarks for the user; a line each.
        config: the recipe as JSON values.

    Examples:
        >>> with RunFolder.open("runs/gpt", record, resume=False) as folder:
        ...     folder.started(step=0, mesh=mesh)
    """

    def __init__(self, path: Path, record: RunRecord, *, resume: bool) -> None:
        self.path = path
        self.is_primary = _processes.is_primary()
        self.is_resumed = resume
        self.config = record.recipe
        self.notices: list[str] = []
        self._record = record
        self._batch_sizes: list[_BatchSize] = []
        self._lock: RunLock | None = None
        self._attempts: list[Attempt] = []

    @classmethod
    def open(cls, path: str | Path, record: RunRecord, *, resume: bool = False) -> RunFolder:
        """Creates the folder, or with `resume` opens that of an existing run. All processes call it.

        Args:
            path: absent or empty; with `resume` the folder of a run.
            record: the request.
            resume: whether to continue.

        Raises:
            ShardingError: the folder cannot be used for this run; nothing in it was changed.
            RunError: a live run holds it, or the disk failed.
        """
        folder = cls(expanded(path), record, resume=resume)
        with contextlib.ExitStack() as undo:
            # The callbacks run in reverse: run.json is removed before the lock is released.
            undo.callback(folder.close)
            reports = folder._open_in_first_process()
            if folder.is_primary and not resume:
                # The run has not begun: a refusal from here on leaves a folder with only its lock.
                undo.callback((folder.path / _RECORD).unlink, missing_ok=True)
            hosts = [report["host"] for report in reports]
            # Now, and not by the first process alone: each has read its own model file and data.
            check_agree([report["request"] for report in reports], hosts)
            first = reports[0]
            folder.notices = first["notices"]
            folder._batch_sizes = [_BatchSize(*each) for each in first["batch_sizes"]]
            # The word in the lock is new in each start: an older file of the same name is not mistaken for it.
            sees = _processes.exchange("sight of the folder", folder._sees(first["token"]))
            _check_shared(sees, hosts, folder.path)
            undo.pop_all()
        return folder

    def _open_in_first_process(self) -> list[_FolderReport]:
        """Locks the folder in the first process; returns the reports of all, or raises its error in all."""
        # Made in every process; the reports say which one is that of the first.
        token = secrets.token_hex(8)
        error = None
        if self.is_primary:
            try:
                if self.is_resumed:
                    self._continue(token)
                else:
                    self._create(token)
            except FourPartError as caught:
                error = caught
        report: _FolderReport = {
            "token": token,
            "notices": self.notices,
            "batch_sizes": list(self._batch_sizes),
            "request": {"resume": self.is_resumed, **self._record.common()},
            "host": socket.gethostname(),
        }
        return _processes.all_or_none("folder of the run", report, error, failed=first_failure)

    @property
    def metrics(self) -> Path:
        """Returns the file with a line of JSON per step and evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Place:
        """Returns the folder for a `Checkpointer`, or its address in a bucket."""
        place = self._record.options.get("checkpoints")
        if place is None:
            return self.path / "checkpoints"
        return place_of(place)

    def samples_before(self, step: int) -> int:
        """Returns the samples used by so many steps; the batch size of a resumed run may have changed."""
        # A new run has no starts yet.
        sizes = self._batch_sizes or [_BatchSize(0, self.config["batch_size"])]
        # Each size applies up to the next one, and the last up to this step.
        ends = [size.first_step for size in sizes[1:]] + [step]
        samples = 0
        for batch_size, end in zip(sizes, ends, strict=True):
            num_steps = max(0, min(end, step) - batch_size.first_step)
            samples += num_steps * batch_size.size
        return samples

    def started(self, *, step: int, mesh: Mesh | Mapping[str, int]) -> None:
        """Records in run.json that the run continues from a step, on which devices and with which versions.

        The settings there become those of this start: a run that is resumed again continues with them.
        """
        # One writer: the others have no attempts, and `trains` and `ended` do nothing there.
        if not self.is_primary:
            return
        if isinstance(mesh, Mesh):
            degrees = dict(mesh.shape)
            processes = num_processes(mesh)
        else:
            degrees = dict(mesh)
            processes = 1
        start = {
            "step": step,
            "batch_size": self.config["batch_size"],
            "mesh": degrees,
            "processes": processes,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "compile_cache": jax.config.values["jax_compilation_cache_dir"],
            "changes": self.notices,
        }
        # Read again: a start adds to what the file has now, with keys that this version does not know.
        stored = _read(self.path)
        with _writing(self.path):
            _write(self.path, stored | self._record.as_json() | {"starts": [*stored["starts"], start]})
        known = launch.previous_attempt()
        self._record_attempts(begin_attempt(stored.get("attempts", ()), self.metrics, step=step, known=known))

    def trains(self) -> None:
        """Records in run.json that the first step of this start may begin."""
        if self._attempts:
            self._record_attempts(attempt_ready(self._attempts))

    def ended(self, cause: str, *, on_request: bool = False) -> None:
        """Records in run.json how this start ended, and whether that was asked for."""
        if self._attempts:
            self._record_attempts(end_attempt(self._attempts, self.metrics, cause=cause, on_request=on_request))

    def attempts_summary(self) -> str | None:
        """Returns a summary of the attempts of the run, in a line; None if none of them has failed."""
        return describe_losses(self._attempts)

    def _record_attempts(self, attempts: list[Attempt]) -> None:
        self._attempts = attempts
        with _writing(self.path):
            # The two figures are for readers of the file: jshard computes them from the attempts each time.
            changes = {"attempts": attempts, "ettr": ettr(attempts), "paused_s": paused_s(attempts)}
            _write(self.path, _read(self.path) | changes)

    def close(self) -> None:
        """Releases the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def record(path: str | Path) -> dict[str, Json]:
        """Returns the contents of run.json in a folder."""
        return cast(dict[str, Json], _read(expanded(path)))

    @staticmethod
    def options(path: str | Path) -> dict[str, Json]:
        """Returns the options of the last start of the run in a folder."""
        return cast(dict[str, Json], _read(expanded(path))["options"])

    @staticmethod
    def last_mesh(path: str | Path) -> dict[str, int]:
        """Returns the mesh degrees of the last start of the run in a folder; empty without a start."""
        starts = _read(expanded(path))["starts"]
        if not starts:
            return {}
        return dict(starts[-1]["mesh"])

    @staticmethod
    def holds_run(path: str | Path) -> bool:
        """Returns whether a run was started in a folder."""
        return os.path.lexists(expanded(path) / _RECORD)

    @staticmethod
    def check_vacant(path: str | Path) -> None:
        """Checks that a new run may use a folder: that it is absent or empty, and can be written.

        Raises:
            ShardingError: it has a run or other files, or may not be written.
            RunError: a live run holds it.
        """
        path = expanded(path)
        # First: a folder in which a run is live is not just "not empty".
        RunLock.check_free(path / _LOCK)
        _check_empty(path)
        with _writing(path):
            check_may_write(path)

    @staticmethod
    def free_name(parent: str | Path, stem: str) -> Path:
        """Returns `parent/stem`, or the first of `stem-2`, `stem-3` and so on that does not exist."""
        parent = expanded(parent)
        path = parent / stem
        number = 1
        while os.path.lexists(path):  # a link that leads nowhere takes the name, too
            number += 1
            path = parent / f"{stem}-{number}"
        return path

    @staticmethod
    def newest(parent: str | Path, stem: str) -> Path | None:
        """Returns the run of that name with the highest number; None if there is none."""
        name = re.compile(re.escape(stem) + r"(?:-([1-9][0-9]*))?")
        runs: list[tuple[int, Path]] = []
        for path in expanded(parent).glob(f"*/{_RECORD}"):
            match = name.fullmatch(path.parent.name)
            if match is not None:
                runs.append((int(match[1] or 1), path.parent))
        if not runs:
            return None
        _, newest = max(runs)
        return newest

    def _create(self, token: str) -> None:
        """Creates the folder of a new run."""
        self.check_vacant(self.path)
        # The lock is a file in it.
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.path / _LOCK, token)
        _check_empty(self.path)  # another run may have written here before this one had the lock
        with _writing(self.path):
            _write(self.path, self._record.as_json() | {"versions": versions(), "starts": []})
        self._notice_missing_lock()

    def _continue(self, token: str) -> None:
        """Opens the folder of an existing run, if this one may continue it."""
        wait_s = 0.0
        if launch.previous_attempt():
            # The process that held the lock may be frozen, or on a disconnected machine, and not ended yet.
            wait_s = _LOCK_RELEASE_S
        # Before anything is read: the live run may still write.
        # Checked, not taken yet: taking it writes to its file, and a refused request changes nothing.
        RunLock.check_free(self.path / _LOCK, wait_s=wait_s)
        stored = _read(self.path)
        self.notices += self._record.check_continues(stored, where=str(self.path / _RECORD))
        self._batch_sizes = _batch_sizes(stored)
        with _writing(self.path):
            self._lock = RunLock(self.path / _LOCK, token)
        self._notice_other_versions(stored)
        self._notice_missing_lock()

    def _notice_other_versions(self, stored: StoredRecord) -> None:
        before = stored["versions"]
        if stored["starts"]:
            before = stored["starts"][-1]["versions"]
        changes = []
        for package, version in versions().items():
            if version != before.get(package):
                changes.append(f"{package} {version} (was {before.get(package)})")
        if changes:
            self.notices.append(f"other versions: {', '.join(changes)}: the last bits of the numbers may differ")

    def _notice_missing_lock(self) -> None:
        if self._lock is not None and not self._lock.is_held:
            self.notices.append(f"{self.path}: the file system has no locks; see that no other run writes here")

    def _sees(self, token: str) -> bool:
        """Returns whether this process sees the files of the first one."""
        until_s = time.monotonic() + _VISIBLE_S
        while RunLock.token(self.path / _LOCK) != token:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return True


def first_failure(failures: Failures) -> FourPartError:
    """Creates the error of this process from that of the first one: it stops all, with the same text."""
    parts = failures[min(failures)]
    kind = ShardingError if parts["is_request"] else RunError
    return kind(parts["what"], where=parts["where"], why=parts["why"], do=parts["do"])


def _check_empty(path: Path) -> None:
    """Refuses a folder with anything in it but a lock, and the drafts of a run that was killed while it began."""
    if not os.path.lexists(path):
        return
    with _writing(path):
        names = sorted(name for name in os.listdir(path) if name != _LOCK and not is_draft(name, _RECORD))
    # Before the other error: its advice continues that run.
    if _RECORD in names:
        raise ShardingError(
            "The folder holds another run.",
            where=f"--out {path}",
            why="its run.json is there, and a new run would overwrite it.",
            do=f"{shlex.join(['--out', str(path)])} --resume  # continues that run; without --out a free name is used",
        )
    if names:
        raise ShardingError(
            "The folder is not empty.",
            where=[f"--out {path}", *names],
            why="it does not hold a run, and its files may still be needed.",
            do="name a folder that is empty or does not exist; without --out a free name under runs/ is used.",
        )


def _check_shared(sees: list[bool], hosts: list[str], path: Path) -> None:
    """Refuses a folder that is another one on some hosts, as with a path on a local disk."""
    # Such hosts would write their parts of a checkpoint where no other host sees them.
    without = [f"process {number} on {hosts[number]}" for number, seen in enumerate(sees) if not seen]
    if without:
        raise ShardingError(
            "The folder of the run is not shared between the hosts.",
            where=[f"--out {path}", *without],
            why=f"they do not see the files that process 0 on {hosts[0]} wrote there.",
            do="name a folder on a file system that every host mounts under the same path: --out FOLDER",
        )


def _read(path: Path) -> StoredRecord:
    """Returns the contents of run.json."""
    file = path / _RECORD
    try:
        return checked_record(read_json(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ShardingError(
            "There is no run to resume.",
            where=f"--out {path}",
            why="it has no run.json." if path.is_dir() else "no such folder.",
            do="name the folder of a run, or leave out --resume to start one.",
        ) from error
    except UnsafeFileError:
        raise
    except (OSError, ValueError) as error:
        raise ShardingError(
            "The record of the run cannot be read.",
            where=str(file),
            why=f"{error}.",
            do="restore that file from a copy; the checkpoints are intact, and a new run can start in another --out.",
        ) from error


def _batch_sizes(stored: StoredRecord) -> list[_BatchSize]:
    """Returns the batch sizes of a run; a start at an earlier step undoes later ones."""
    sizes: list[_BatchSize] = []
    for start in stored["starts"]:
        # Steps from here on are done again, with the size of this start.
        sizes = [size for size in sizes if size.first_step < start["step"]]
        sizes.append(_BatchSize(start["step"], start["batch_size"]))
    return sizes


def _write(path: Path, record: Mapping[str, object]) -> None:
    """Writes run.json atomically."""
    text = json.dumps(record, indent=2, allow_nan=False)
    write_text(path / _RECORD, f"{text}\n")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises an error of the operating system in four parts: an unsuitable folder, or a failed disk."""
    try:
        yield
    except UnsafeFileError:
        raise
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, error.errno)
        why = f"{error.strerror} ({name}): {error.filename or path}."
        if error.errno in _BROKEN_DISK:
            # A failed disk is no fault of the request, so the run can be resumed: a RunError.
            do = "repair the disk." if error.errno == errno.EIO else "make room."
            raise RunError("The folder of the run could not be written.", where=str(path), why=why, do=do) from error
        raise ShardingError(
            "The folder of the run cannot be written.",
            where=f"--out {path}",
            why=why,
            do="name a folder that you may write: --out FOLDER",
        ) from error
