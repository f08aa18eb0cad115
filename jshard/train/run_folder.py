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
from typing import Any

import jax
from jax.sharding import Mesh

from jshard import _processes, launch
from jshard._files import check_may_write, is_draft, read_json, write_text
from jshard._paths import expanded
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.lookup import place_of
from jshard.errors import FourPartError, RunError, ShardingError, UnsafeFileError
from jshard.plans.mesh import num_processes
from jshard.recipes.recipe import versions
from jshard.train.run_record import (
    Attempt,
    RunLock,
    RunRecord,
    attempt_ready,
    begin_attempt,
    check_agree,
    checked_record,
    describe_attempts,
    end_attempt,
    ettr,
    paused_s,
)

_RECORD, _LOCK = "run.json", ".lock"
_BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_LETS_GO_S = 120.0
_SHOWN_S = 30.0  # network file systems show the writes of other processes late


class RunFolder:
    """The folder of a run, held until `close`.

    Only the first process writes; all processes open it together, and an error of one stops all.

    Attributes:
        path: the folder.
        is_primary: whether this process writes.
        is_resumed: whether the run was begun before.
        notices: what a resumed run does differently, and other remarks for the user; a line each.
        config: the recipe as JSON values.

    Example:
        >>> with RunFolder.open("runs/gpt", record, resume=False) as folder:
        ...     folder.started(step=0, mesh=mesh)
    """

    def __init__(self, path: Path, record: RunRecord, *, resume: bool) -> None:
        self.path, self.is_primary, self.is_resumed = path, _processes.is_primary(), resume
        self.config, self._record = record.recipe, record
        self.notices, self._batch_sizes = list[str](), list[tuple[int, int]]()
        self._lock: RunLock | None = None
        self._attempts = list[Attempt]()

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
        token = secrets.token_hex(8)
        with contextlib.ExitStack() as undo:
            undo.callback(folder.close)
            error = None
            if folder.is_primary:
                try:
                    folder._take_up(record, token) if resume else folder._make(record, token)
                except FourPartError as caught:
                    error = caught
            report = {"token": token, "notices": folder.notices, "batch_sizes": folder._batch_sizes}
            report |= {"asked": {"resume": resume, **record.said()}, "host": socket.gethostname()}
            reports = _processes.all_or_none("folder of the run", report, error, failed=first_failure)
            if folder.is_primary and not resume:
                undo.callback((folder.path / _RECORD).unlink, missing_ok=True)
            hosts = [report["host"] for report in reports]
            check_agree([report["asked"] for report in reports], hosts)
            folder.notices, folder._batch_sizes = reports[0]["notices"], reports[0]["batch_sizes"]
            sees = _processes.exchange("sight of the folder", folder._sees(reports[0]["token"]))
            _check_shared(sees, hosts, folder.path)
            undo.pop_all()
        return folder

    @property
    def metrics(self) -> Path:
        """A line of JSON per step and evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Place:
        """The folder for a `Checkpointer`, or its address in a bucket."""
        place = self._record.options.get("checkpoints")
        return self.path / "checkpoints" if place is None else place_of(place)

    def samples_before(self, step: int) -> int:
        """Samples used by so many steps; the batch size of a resumed run may have changed."""
        sizes = self._batch_sizes or [(0, self.config["batch_size"])]
        ends = [*(begin for begin, _ in sizes[1:]), step]
        return sum(max(0, min(end, step) - begin) * size for (begin, size), end in zip(sizes, ends, strict=True))

    def started(self, *, step: int, mesh: Mesh | Mapping[str, int]) -> None:
        """Records in run.json that the run continues from a step, on which devices and with which versions.

        The settings there become those of this start: a run that is resumed again continues with them.
        """
        if not self.is_primary:
            return
        start = {
            "step": step,
            "batch_size": self.config["batch_size"],
            "mesh": dict(mesh.shape if isinstance(mesh, Mesh) else mesh),
            "processes": num_processes(mesh) if isinstance(mesh, Mesh) else 1,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "compile_cache": jax.config.values["jax_compilation_cache_dir"],
            "changes": self.notices,
        }
        stored = _read(self.path)
        with _writing(self.path):
            _write(self.path, stored | self._record.as_json() | {"starts": [*stored["starts"], start]})
        known = launch.previous_attempt()
        self._note(begin_attempt(stored.get("attempts", ()), self.metrics, step=step, known=known))

    def trains(self) -> None:
        """Records in run.json that the first step of this start may begin."""
        if self._attempts:
            self._note(attempt_ready(self._attempts))

    def ended(self, cause: str, *, on_request: bool = False) -> None:
        """Records in run.json how this start ended, and whether that was asked for."""
        if self._attempts:
            self._note(end_attempt(self._attempts, self.metrics, cause=cause, on_request=on_request))

    def attempts_summary(self) -> str | None:
        """A summary of the attempts of the run, in a line; None for a single one."""
        return describe_attempts(self._attempts) if len(self._attempts) > 1 else None

    def _note(self, found: list[Attempt]) -> None:
        self._attempts = found
        with _writing(self.path):
            ratio = {"ettr": ettr(found), "paused_s": paused_s(found)}
            _write(self.path, _read(self.path) | {"attempts": found} | ratio)

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
    def record(path: str | Path) -> dict[str, Any]:
        """The contents of run.json in a folder."""
        return _read(expanded(path))

    @staticmethod
    def options(path: str | Path) -> dict[str, Any]:
        """The options of the last start of the run in a folder."""
        return _read(expanded(path))["options"]

    @staticmethod
    def last_mesh(path: str | Path) -> dict[str, int]:
        """The mesh degrees of the last start of the run in a folder; empty without a start."""
        starts = _read(expanded(path))["starts"]
        return dict(starts[-1]["mesh"]) if starts else {}

    @staticmethod
    def holds_run(path: str | Path) -> bool:
        """Whether a run was started in a folder."""
        return os.path.lexists(expanded(path) / _RECORD)

    @staticmethod
    def check_vacant(path: str | Path) -> None:
        """Checks that a new run may use a folder: that it is absent or empty, and can be written.

        Raises:
            ShardingError: it has a run or other files, or may not be written.
            RunError: a live run holds it.
        """
        path = expanded(path)
        RunLock.check_free(path / _LOCK)
        _check_empty(path)
        with _writing(path):
            check_may_write(path)

    @staticmethod
    def free_name(parent: str | Path, stem: str) -> Path:
        """`parent/stem`, or the first of `stem-2`, `stem-3` and so on that does not exist."""
        path, number = expanded(parent) / stem, 2
        while os.path.lexists(path):
            path, number = expanded(parent) / f"{stem}-{number}", number + 1
        return path

    @staticmethod
    def newest(parent: str | Path, stem: str) -> Path | None:
        """The run of that name with the highest number; None if there is none."""
        found = [
            (int(match[1] or 1), path.parent)
            for path in expanded(parent).glob(f"*/{_RECORD}")
            if (match := re.fullmatch(re.escape(stem) + r"(?:-([1-9][0-9]*))?", path.parent.name))
        ]
        return max(found)[1] if found else None

    def _make(self, record: RunRecord, token: str) -> None:
        self.check_vacant(self.path)
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.path / _LOCK, token)
        _check_empty(self.path)  # another run may have written here before this one had the lock
        with _writing(self.path):
            _write(self.path, record.as_json() | {"versions": versions(), "starts": []})
        self._note_lock()

    def _take_up(self, record: RunRecord, token: str) -> None:
        where = str(self.path / _RECORD)
        # After a loss the process that held it may be frozen, or on a disconnected machine, and not ended yet.
        RunLock.check_free(self.path / _LOCK, wait_s=_LETS_GO_S if launch.previous_attempt() else 0.0)
        stored = _read(self.path)
        self.notices += record.check_continues(stored, where=where)
        self._batch_sizes = _batch_sizes(stored)
        with _writing(self.path):
            self._lock = RunLock(self.path / _LOCK, token)
        before = stored["starts"][-1]["versions"] if stored["starts"] else stored["versions"]
        changed = [f"{k} {now} (was {before.get(k)})" for k, now in versions().items() if now != before.get(k)]
        if changed:
            self.notices.append(f"other versions: {', '.join(changed)}: the last bits of the numbers may differ")
        self._note_lock()

    def _note_lock(self) -> None:
        if self._lock is not None and not self._lock.is_held:
            self.notices.append(f"{self.path}: the file system has no locks; see that no other run writes here")

    def _sees(self, token: str) -> bool:
        """Whether this process sees the files of the first one."""
        until = time.monotonic() + _SHOWN_S
        while not (sees := RunLock.token(self.path / _LOCK) == token) and time.monotonic() < until:
            time.sleep(0.1)
        return sees


def first_failure(failures: Mapping[int, Mapping[str, Any]]) -> FourPartError:
    """An error of the first process stops all, with the same text."""
    parts = failures[min(failures)]
    kind = ShardingError if parts["is_request"] else RunError
    return kind(parts["what"], where=parts["where"], why=parts["why"], do=parts["do"])


def _check_empty(path: Path) -> None:
    if not os.path.lexists(path):
        return
    with _writing(path):
        names = sorted(name for name in os.listdir(path) if name != _LOCK and not is_draft(name, _RECORD))
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
    blind = [f"process {number} on {hosts[number]}" for number, seen in enumerate(sees) if not seen]
    if blind:
        raise ShardingError(
            "The folder of the run is not shared between the hosts.",
            where=[f"--out {path}", *blind],
            why=f"they do not see the files that process 0 on {hosts[0]} wrote there.",
            do="name a folder on a file system that every host mounts under the same path: --out FOLDER",
        )


def _read(path: Path) -> dict[str, Any]:
    """The contents of run.json."""
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


def _batch_sizes(stored: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The batch sizes of a run, by the step from which they applied; a start at an earlier step undoes later ones."""
    found: list[tuple[int, int]] = []
    for start in stored["starts"]:
        kept = [(begin, size) for begin, size in found if begin < start["step"]]
        found = [*kept, (start["step"], start["batch_size"])]
    return found


def _write(path: Path, record: Mapping[str, Any]) -> None:
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
        why = f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)}): {error.filename or path}."
        if error.errno in _BROKEN_DISK:
            do = "repair the disk." if error.errno == errno.EIO else "make room."
            raise RunError("The folder of the run could not be written.", where=str(path), why=why, do=do) from error
        raise ShardingError(
            "The folder of the run cannot be written.",
            where=f"--out {path}",
            why=why,
            do="name a folder that you may write: --out FOLDER",
        ) from error
