"""What a run was asked to do, as run.json has it, compared with what a resumed run is asked; and its lock."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.errors import RunError, ShardingError
from jshard.recipes.recipe import tree

_FIXED = ("model", "sequence_length", "seed")  # with other values it would be another run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run was asked to do, in values of JSON.

    Attributes:
        name: of the recipe.
        recipe: every field, with those of the model's config under "model".
        model_file: its path, or its name if it comes with jshard.
        data: "description" and "fingerprint" of the data.
        options: what the command line was given, for a resumed run to take over.
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
        """As it is written."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check_continues(self, stored: Mapping[str, Any], *, where: str) -> list[str]:
        """Checks that this run may go on from the checkpoints of a stored one; what differs and may, a line each.

        Raises:
            ShardingError: the model, the samples or the seed differ: all of it in one error.
        """
        found = list(_differences(stored["recipe"], self.recipe))
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
        free += _differences(own, {"name": self.name, "model_file": self.model_file})
        return [f"{key} is {_text(now)}, was {_text(before)}" for key, before, now in free]

    def said(self) -> dict[str, Any]:
        """What every process of a run has to be asked for in the same words; paths may differ from host to host."""
        return {"recipe": self.recipe, "data": self.data["fingerprint"]}


def check_agree(said: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Checks that all processes of a run are asked for the same: else each would compute a part of another model."""
    bad = [
        f"{key}  process {process} on {hosts[process]} {_text(theirs)}  process 0 on {hosts[0]} {_text(ours)}"
        for process, one in enumerate(said)
        for key, ours, theirs in _differences(said[0], one)
    ]
    if bad:
        raise ShardingError(
            "The processes of the run do not agree on what to train.",
            where=bad,
            why="they train one model together, from the same recipe and the same data.",
            do="give every process the same command, the same model file and the same data.",
        )


_NOTHING = object()  # where a setting is not there


def _differences(stored: Any, wanted: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, stored and wanted value of each setting that differs."""
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*stored, *wanted]):
            below = f"{path}.{key}" if path else key
            yield from _differences(stored.get(key, _NOTHING), wanted.get(key, _NOTHING), below)
    elif stored != wanted or isinstance(stored, bool) != isinstance(wanted, bool):
        yield path, stored, wanted


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "nothing" if value is _NOTHING else repr(value)


def _data_text(data: Mapping[str, str]) -> str:
    return f"{data['description']} ({data['fingerprint']})"


# One live run per folder: a lock that ends with the process that holds it.

# Network file systems that are mounted without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """An exclusive lock on a file; it makes the file, and writes into it who holds it.

    The kernel takes the lock back however the process ends, so a killed run never blocks another. A
    forked child, such as a data worker, does not hold on to it.

    Args:
        path: the file.
        token: a further word in it.

    Attributes:
        is_held: False where the file system knows no locks.

    Raises:
        RunError: a live process holds it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self.is_held = _locked(self._file, fcntl.LOCK_EX, path)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n{token}\n".encode(), 0)
        except (OSError, RunError):
            self.release()
            raise
        os.register_at_fork(after_in_child=self.release)  # closes the child's copy, which alone would keep it locked

    def release(self) -> None:
        """Gives the lock back; the file stays."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @staticmethod
    def token(path: Path) -> str | None:
        """The word that the holder wrote; None if there is none to read."""
        try:
            lines = path.read_text().split("\n")
        except OSError:
            return None
        return lines[1] if len(lines) > 1 else None

    @staticmethod
    def check_free(path: Path, *, wait_s: float = 0.0) -> None:
        """Raises a RunError if a live process holds it, and does not let go in that time; changes nothing."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                file = os.open(path, os.O_RDONLY)
            except OSError:
                return  # not there, or not ours to read: what comes next will show it
            try:
                # Shared: the processes of one run look at the same time, and NFS refuses the other kind to a reader.
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


def _locked(file: int, kind: int, path: Path) -> bool:
    """Locks a file; False where the file system knows no locks."""
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
