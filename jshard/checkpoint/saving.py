"""A save, from the arrays on the devices to a sealed folder under its final name.

    begin    everything is checked, and the devices' values are copied or held: the step may go on when it returns
    finish   in any thread: the data are written, the sums exchanged, the seal is written, the folder gets its name

A folder under its final name is complete: until then it is called `NAME.saving`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jshard._compat import orbax_operations, versions
from jshard._processes import is_primary
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _seal
from jshard.checkpoint import storage
from jshard.checkpoint.balance import balanced
from jshard.checkpoint.barrier import agree, in_four_parts, write_failed
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, reason
from jshard.checkpoint.leaves import check_equal, told
from jshard.checkpoint.owner import Owner, is_owned, owner_file
from jshard.checkpoint.pending import Pending
from jshard.checkpoint.sums import LeafSums, add
from jshard.checkpoint.timeline import Phases, mesh_layout
from jshard.errors import FourPartError

SAVING_SUFFIX = ".saving"

_SUMMING_THREADS = 2
_ARRAY = "zarr.json"  # describes an array, in its folder


class Saving:
    """A save whose values are held: `finish` does the rest, in the same thread or another.

    Args:
        path: a folder that does not exist yet.
        state: what `save` takes.
        step: number of steps that are done, for the seal.
        metrics: what the state is worth, for the seal.
        timeout_s: how long any one wait may take.
        prepare: done first, by the first process.

    Raises:
        CheckpointError: there is something at `path` already, or some leaves cannot be saved.
        RunError: the values could not be copied, or another process did not come.
    """

    def __init__(
        self,
        path: Path,
        state: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        timeout_s: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self._step, self._timeout_s = path, step, timeout_s
        self._metrics = {name: float(value) for name, value in (metrics or {}).items()}
        self.phases = Phases()
        self._wrote_until_s = 0.0
        self._held = contextlib.ExitStack()  # what ends with the save
        self._owner: Owner | None = None
        try:
            with self.phases("plan"):
                leaves = self._begin(state, prepare)
                sums = self._begin_sums(leaves)
            with self.phases("device_to_host"), self._errors_named():
                self._wait = storage.save_async(
                    self.unnamed, leaves, on_written=self._note_written, timeout_s=timeout_s
                )
            self._finish_sums(sums)
        except BaseException:
            self._held.close()
            raise
        self.blocked_s = self.phases.now_s()
        self.record: dict[str, Any] = {
            "began_at": self.phases.began_at,
            "error": None,
            "blocked_s": self.blocked_s,
            "mesh": self._mesh,
        }

    @property
    def unnamed(self) -> Path:
        """Where the checkpoint lies until it is complete."""
        return unnamed(self.path)

    def in_background(self, work: Callable[[], None], *, timeout_s: float) -> Pending:
        """Does the rest in a thread of its own.

        Args:
            work: it; calls `finish`.
            timeout_s: how long the end of the program waits for it.

        Raises:
            RunError: no thread can be started, as where the program is about to end.
        """
        try:
            return Pending(str(self.path), work, timeout_s=timeout_s)
        except RuntimeError as error:
            with contextlib.suppress(Exception):
                self._wait()  # what is written already would stand in the way of another save
            self._held.close()
            raise write_failed(self.path, reason(error)) from error

    def finish(self) -> None:
        """Waits until the checkpoint is complete and on the disk, in all processes.

        Raises:
            RunError: some process could not write its part; the folder is not a checkpoint.
        """
        with self._held, self._errors_named():
            self._finish()

    def _finish(self) -> None:
        totals: dict[str, Any] = {}
        error: Exception | None = None
        try:
            self._wait()
            written_s = max(self._wrote_until_s, self.blocked_s)
            self.phases.add("write", self.blocked_s, written_s)
            self.phases.add("commit", written_s, self.phases.now_s())
            with self.phases("sums"):
                totals = {key: total.result() for key, total in self._totals.items()}
        except Exception as caught:
            error = caught
        del self._totals, self._wait  # with all that they hold of the state: it may be long until a collection
        told = {"sums": totals, "report": self.phases.report(num_bytes=self.num_bytes)}
        heard = self._agree("written", told, error)
        if is_primary():
            try:
                self._complete(heard)
            except Exception as caught:
                error = caught
        self._agree("sealed", None, error)
        give_memory_back()
        self.record |= {"processes": [other["report"] for other in heard]}

    def _begin(self, state: Any, prepare: Callable[[], None]) -> dict[str, Any]:
        """Checks everything, in all processes, and returns the leaves that have a value."""
        full: dict[str, Any] = {}
        copies: dict[str, Any] = {}
        error: Exception | None = None
        try:
            found = _leaves.flatten(state)
            leaves = _leaves.storable(found)
            _leaves.check_paths(leaves)
            _refuse_nothing(self.path, leaves)
            self._logical = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(state).items()}
            self._described = {key: _seal.describe(leaf, self._logical.get(key)) for key, leaf in leaves.items()}
            by_text = {_leaves.text(path): leaf for path, leaf in found.items()}
            self._mesh, copies = mesh_layout(by_text), told(by_text)
            full = {key: leaf for key, leaf in leaves.items() if getattr(leaf, "size", 1)}  # Orbax refuses empty ones
            full = balanced(full, least_slice_bytes=storage.LEAST_SLICE_BYTES)
            if is_primary():
                self._prepare(prepare)
        except Exception as caught:
            error = caught
        check_equal(self._agree("begin", copies, error))
        self.num_bytes = sum(map(storage.local_bytes, full.values()))
        return full

    def _begin_sums(self, leaves: Mapping[str, Any]) -> dict[str, LeafSums]:
        """Begun before anything can overwrite the values, on the devices where they lie there."""
        sums: dict[str, LeafSums] = {}
        error: Exception | None = None
        try:
            described = self._described
            sums = {
                key: LeafSums(leaf, self._logical.get(key)) for key, leaf in leaves.items() if described[key].is_array
            }
        except Exception as caught:
            error = caught
        # A process that came late, and was given up by the others, must not begin what Orbax counts.
        orbax_operations(max(self._agree("all here", orbax_operations(), error)))
        return sums

    def _finish_sums(self, sums: Mapping[str, LeafSums]) -> None:
        """In threads of their own, once the values are copied: before, they would take the cores from the copy."""
        pool = concurrent.futures.ThreadPoolExecutor(_SUMMING_THREADS, "jshard-sums")
        self._held.callback(pool.shutdown, cancel_futures=True)
        self._totals = {key: pool.submit(each.total) for key, each in sums.items()}

    def _prepare(self, before: Callable[[], None]) -> None:
        before()
        if self.path.exists():
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(self.path),
                why="there is something at that path already.",
                do="save under another name, for example with the step in it.",
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self.unnamed)
        self._held.callback(self._owner.release)
        if remove_unnamed(self.path):
            message = f"what an interrupted save left of {self.path} was removed."
            warnings.warn(message, CheckpointWarning, stacklevel=5)

    def _complete(self, heard: list[dict[str, Any]]) -> None:
        """Seals the folder, and gives it its name once it would survive a power cut."""
        assert self._owner is not None
        self._owner.check()
        storage.cut_padding(self.unnamed, self._logical)
        files = _seal.files_of(self.unnamed)
        storage.check_whole(self.unnamed, self._described, files)
        chunks = _seal.chunks_of(self.unnamed)
        leaves = {}
        for key, described in self._described.items():
            sums = [other["sums"][key] for other in heard if key in other["sums"]]
            total = add(sums) if sums else None
            leaves[key] = _seal.with_facts(described, sums=total, chunk=chunks.get(key))
        seal = _seal.Seal(
            leaves=leaves,
            files=files,
            step=self._step,
            saved_at=self.phases.began_at,
            mesh=self._mesh["axes"],
            processes=len(heard),
            metrics=self._metrics,
            versions=versions(_seal.PACKAGES),
        )
        _seal.write(self.unnamed, seal)
        keep_on_disk(self.unnamed)
        self.unnamed.rename(self.path)
        flush(str(self.path.parent))

    def _note_written(self) -> None:
        self._wrote_until_s = self.phases.now_s()

    def _agree(self, topic: str, told: Any, error: Exception | None) -> list[Any]:
        return agree(topic, self.path, told, error, timeout_s=self._timeout_s)

    @contextlib.contextmanager
    def _errors_named(self) -> Any:
        try:
            yield
        except FourPartError:
            raise
        except Exception as error:
            raise in_four_parts(self.path, error) from error


def unnamed(path: Path) -> Path:
    """What a checkpoint is called until it is complete."""
    return path.with_name(path.name + SAVING_SUFFIX)


def discard_unnamed(path: Path) -> bool:
    """Removes what an interrupted save left of a checkpoint, and says whether there was any; not of one at work."""
    if is_owned(unnamed(path)):
        return False
    with contextlib.suppress(OSError):
        owner_file(unnamed(path)).unlink()
    return remove_unnamed(path)


def remove_unnamed(path: Path) -> bool:
    """`discard_unnamed` for whoever owns the folder."""
    left = unnamed(path)
    found = [folder for folder in (left, left.with_name(left.name + storage.UNCOMMITTED_SUFFIX)) if folder.exists()]
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(found)


def keep_on_disk(folder: Path) -> None:
    """Waits until everything in a folder would survive a power cut.

    What TensorStore wrote, the files of arrays and the names beside them, is on the disk already.
    """
    arrays: set[str] = set()
    for inner, folders, names in os.walk(folder):
        if _ARRAY in names or os.path.dirname(inner) in arrays:
            arrays.add(inner)
        else:
            for name in names:
                flush(os.path.join(inner, name))
        if folders or inner not in arrays:
            flush(inner)


def flush(path: str) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to flush for a folder
            raise
    finally:
        os.close(number)


def give_memory_back() -> None:
    """Hands freed memory back to the system: with many threads, glibc keeps several times the state otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _refuse_nothing(path: Path, leaves: Mapping[str, Any]) -> None:
    if not any(getattr(leaf, "size", 1) for leaf in leaves.values()):
        raise CheckpointError(
            "There is nothing to save.",
            where=str(path),
            why="the state has no leaf with a value in it.",
            do='save(path, {"model": model, "optimizer": optimizer, "step": step})',
        )
