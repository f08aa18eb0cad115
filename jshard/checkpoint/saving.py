"""A save, from the arrays on the devices to a complete folder under its final name.

    begin    everything is checked, and the devices' values are copied or held: the step may go on when it returns
    finish   in any thread: the data are written, the sums exchanged, the manifest is written, the folder gets its name

A folder under its final name is complete: until then it is called `NAME.saving`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax

from jshard._compat import before_threads_end, orbax_operations, versions
from jshard._processes import all_or_none, failures, is_primary, publish_failure, show_threads
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import storage
from jshard.checkpoint.balance import check_equal, local_copies
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.draft import Owner, flush, in_four_parts, keep_on_disk, remove_unnamed, unnamed, write_failed
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, reason
from jshard.checkpoint.files.dealing import HeldState
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.sums import LeafSums, add
from jshard.checkpoint.timeline import Phases, mesh_layout
from jshard.errors import FourPartError, RunError, causes

Format = Literal["packed", "orbax"]

_numbers = itertools.count()  # the saves of a program come in the same order in all its processes
_END_S = 2400.0  # the longest that the end of a program waits by default


class Saving:
    """A save whose values are held: `finish` does the rest, in the same thread or another.

    Args:
        path: a folder that does not exist yet.
        state: what `save` takes.
        step: number of steps that are done, for the manifest.
        metrics: what the state is worth, for the manifest.
        timeout_s: how long any one wait may take.
        format: "packed", or "orbax" for folders of zarr, which plain Orbax reads.
        prepare: done first, by the first process.
        check: done by it just before the checkpoint counts; an error stops that.

    Raises:
        CheckpointError: there is something at `path` already, or some leaves cannot be saved.
        RunError: the values could not be copied, or another process did not come.
    """

    def __init__(
        self,
        path: Place,
        state: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        timeout_s: float,
        format: Format = "packed",
        prepare: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._format = checked_format(format, path)
        self.path, self._step, self._timeout_s, self._check = path, step, timeout_s, check
        self._metrics = {name: float(value) for name, value in (metrics or {}).items()}
        self.phases = Phases()
        self._wrote_until_s = 0.0
        self._failures = f"save {next(_numbers)}"
        self._held = contextlib.ExitStack()  # what ends with the save
        self._part: storage.PackedPart | None = None
        self._totals: dict[str, LeafSums] = {}
        self._owner: Owner | None = None
        self._agreed: Exception | None = None  # why no process could write, where all have heard of it
        try:
            with self.phases("plan"):
                leaves, copies = self._together("begin", lambda: self._checked(state, prepare))
                check_equal(copies)
                # A process that came late, and was given up by the others, must not begin what Orbax counts.
            held, counts = self._together("all here", lambda: (self._hold(leaves), orbax_operations()))
            orbax_operations(max(counts))
            with self._errors_named():
                self._begin(held)
        except BaseException as error:
            if isinstance(error, Exception):
                publish_failure(self._failures, error)
            self._held.close()
            raise
        self.blocked_s = self.phases.now_s()
        self.record: dict[str, Any] = {
            "began_at": self.phases.began_at,
            "error": None,
            "blocked_s": self.blocked_s,
            "mesh": self._mesh,
        }

    def in_background(self, work: Callable[[], None], *, timeout_s: float) -> Pending:
        """Does the rest, which calls `finish`, in a thread of its own; the end of the program waits for it.

        Raises a `RunError` if no thread can be started, as where the program is about to end.
        """
        try:
            return Pending(str(self.path), work, timeout_s=timeout_s)
        except RuntimeError as error:
            with contextlib.suppress(Exception):
                self._wait()  # what is written already would stand in the way of another save
            self._held.close()
            raise write_failed(self.path, reason(error)) from error

    def failure(self) -> FourPartError | None:
        """What another process, or this one, could not write, while the rest may still wait for it in Orbax."""
        found = failures(self._failures)
        return self._others_failed(found) if found else None

    def finish(self) -> None:
        """Waits until the checkpoint is complete and on the disk, in all processes.

        Raises:
            RunError: some process could not write its part; the folder is not a checkpoint.
        """
        with self._held, self._errors_named():
            self._finish()

    def _finish(self) -> None:
        _, heard = self._together("written", lambda: (None, self._written()))
        del self._part, self._totals, self._wait  # with all that they hold of the state
        self._together("complete", lambda: (self._complete(heard) if is_primary() else None, None))
        give_memory_back()
        reports = [other["report"] for other in heard]
        written_s = max(report["phases"][-1][2] for report in reports)
        for report in reports:  # until it counts: a part of what a save takes
            report["phases"].append(["finish", written_s, round(self.phases.now_s(), 6)])
        self.record |= {"processes": reports}

    def _written(self) -> dict[str, Any]:
        """Waits until the data are written, and reports to the other processes."""
        self._wait()
        written_s = max(self._wrote_until_s, self.blocked_s)
        self.phases.add("write", self.blocked_s, written_s)
        self.phases.add("commit", written_s, self.phases.now_s())
        files = {} if self._part is None else self._part.files
        totals = {key: sums.total() for key, sums in self._totals.items()}
        return {"sums": totals, "files": files, "report": self.phases.report(num_bytes=self.num_bytes)}

    def _checked(self, state: Any, prepare: Callable[[], None]) -> tuple[dict[str, Any], Any]:
        """Checks everything; the leaves that have a value, and what the processes are to compare."""
        found = _leaves.flatten(state)
        leaves = _leaves.storable(found)
        if self._format == "orbax":
            _leaves.check_paths(leaves)
        _refuse_nothing(self.path, leaves)
        self._logical = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(state).items()}
        self._described = {key: _described(leaf, self._logical.get(key)) for key, leaf in leaves.items()}
        by_text = {_leaves.text(path): leaf for path, leaf in found.items()}
        self._mesh, copies = mesh_layout(by_text), local_copies(by_text)
        if is_primary():
            self._prepare(prepare)
        return leaves, copies

    def _hold(self, leaves: dict[str, Any]) -> HeldState | dict[str, Any]:
        """The values, copied or held."""
        with self.phases("device_to_host"):
            self._values = {key: leaves[key] for key, stored in self._described.items() if not stored.is_array}
            if self._format == "packed":
                return HeldState(leaves, self._described)
            arrays = {key: leaf for key, leaf in leaves.items() if key not in self._values}
            self._totals = {key: LeafSums(leaf, self._logical.get(key)) for key, leaf in arrays.items()}
            return {key: leaf for key, leaf in leaves.items() if getattr(leaf, "size", 1)}  # Orbax refuses empty ones

    def _begin(self, held: HeldState | dict[str, Any]) -> None:
        """Begins to write what is held."""
        if isinstance(held, HeldState):
            self.num_bytes = held.num_bytes
            self._part = storage.PackedPart(held, self._note_written, together=self._all_write)
            if isinstance(self.path, BucketPath):
                self._wait = storage.upload_packed(self.path, self._part, timeout_s=self._timeout_s)
            else:
                self._wait = storage.save_async(unnamed(self.path), self._part, timeout_s=self._timeout_s)
        else:
            self.num_bytes = sum(map(storage.local_bytes, held.values()))
            written = self._note_written
            self._wait = storage.save_zarr(self._draft(), held, on_written=written, timeout_s=self._timeout_s)

    def _all_write(self, write: Callable[[], None]) -> None:
        """Writes, and waits for the others: Orbax commits what its handlers say is written in all processes."""
        try:
            self._together("all wrote", lambda: (write(), None))
        except Exception as error:
            self._agreed = error
            raise

    def _prepare(self, before: Callable[[], None]) -> None:
        before()
        if storage.is_committed(self.path) if isinstance(self.path, BucketPath) else self.path.exists():
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(self.path),
                why="there is something at that path already.",
                do="save under another name, for example with the step in it.",
            )
        if isinstance(self.path, BucketPath):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._owner = Owner(unnamed(self.path))
        self._held.callback(self._owner.release)
        if remove_unnamed(self.path):
            message = f"what an interrupted save left of {self.path} was removed."
            warnings.warn(message, CheckpointWarning, stacklevel=7)

    def _complete(self, heard: list[dict[str, Any]]) -> None:
        """What the first process does at the end."""
        if self._owner is not None:
            self._owner.check()
        self._check()
        facts = {"step": self._step, "saved_at": self.phases.began_at, "mesh": self._mesh["axes"]}
        facts |= {"processes": len(heard), "metrics": self._metrics}
        if self._format == "packed":
            packed = {name: tuple(found) for other in heard for name, found in other["files"].items()}
            complete(self.path, self._described, packed=packed, values=self._values, **facts)
            return
        storage.cut_padding(self._draft(), self._logical)
        leaves = {}
        for key, described in self._described.items():
            sums = [other["sums"][key] for other in heard if key in other["sums"]]
            leaves[key] = dataclasses.replace(described, sums=add(sums) if sums else None)
        complete(self.path, leaves, **facts)

    def _draft(self) -> Path:
        assert isinstance(self.path, Path)
        return unnamed(self.path)

    def _note_written(self) -> None:
        self._wrote_until_s = self.phases.now_s()

    def _together(self, topic: str, work: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
        """Does work that all processes come to the end of, or none; it gives what stays here, and what others hear."""
        kept, given, error = None, None, None
        try:
            kept, given = work()
        except Exception as caught:
            if self._agreed is not None:  # all processes know, and nobody waits
                raise self._agreed from (None if self._agreed in causes(caught) else caught)
            error = caught
        own = None if error is None else in_four_parts(self.path, error)
        # Whoever waited for the others in vain has had its time, and so had they.
        timeout_s = self._timeout_s / 4 if isinstance(error, TimeoutError) else self._timeout_s
        if own is not None and own is not error:
            own.__cause__ = error
        if own is not None:
            publish_failure(self._failures, own)
        heard = all_or_none(f"{topic} {self.path}", given, own, failed=self._others_failed, timeout_s=timeout_s)
        return kept, heard

    def _others_failed(self, failures: Mapping[int, Mapping[str, Any]]) -> FourPartError:
        for number, parts in failures.items():
            if parts["is_request"]:
                where = [*parts["where"], f"process {number}"]
                return CheckpointError(parts["what"], where=where, why=parts["why"], do=parts["do"])
        return write_failed(self.path, "\n".join(f"process {n}: {parts['why']}" for n, parts in failures.items()))

    @contextlib.contextmanager
    def _errors_named(self) -> Any:
        try:
            yield
        except FourPartError:
            raise
        except Exception as error:
            raise in_four_parts(self.path, error) from error


def complete(path: Place, leaves: Mapping[str, StoredLeaf], **facts: Any) -> Manifest:
    """Writes the manifest of a draft, and gives it its name once it would survive a power cut."""
    if isinstance(path, BucketPath):
        return _complete_in_bucket(path, leaves, **facts)
    draft = unnamed(path)
    files = _manifest.files_of(draft)
    manifest = Manifest(leaves=leaves, files=files, versions=versions(_manifest.PACKAGES), **facts)
    if manifest.packed:
        storage.check_packed(draft, manifest)
    else:
        storage.check_whole(draft, leaves, files)
        chunks = _manifest.chunks_of(draft)
        leaves = {key: dataclasses.replace(leaf, chunk=chunks.get(key)) for key, leaf in leaves.items()}
        manifest = dataclasses.replace(manifest, leaves=leaves)
    _manifest.write(draft, manifest)
    keep_on_disk(draft)
    draft.rename(path)
    flush(path.parent)
    return manifest


def _complete_in_bucket(path: BucketPath, leaves: Mapping[str, StoredLeaf], **facts: Any) -> Manifest:
    """Writes the manifest of files that are uploaded, if there is none yet: from then on they are a checkpoint."""
    (path / storage.COMMIT_MARK).write(b"")  # for whoever copies it to a disk
    files = {f"{storage.FOLDER}/{name}": (size, None) for name, (size, _) in facts["packed"].items()}
    manifest = Manifest(leaves=leaves, files=files, versions=versions(_manifest.PACKAGES), **facts)
    why = "\n".join(_manifest.damage(path, manifest))
    if not why and not (path / _manifest.NAME).create(_manifest.to_text(manifest).encode()):
        why = "another program completed a checkpoint there while this one wrote."
    if why:
        raise RunError(
            "The checkpoint could not be written.", where=str(path), why=why, do="let one program save to an address."
        )
    return manifest


def checked_format(format: str, path: Place) -> Format:
    """A format that there is, or a `CheckpointError`."""
    if format == "orbax" and isinstance(path, BucketPath):
        raise CheckpointError(
            "The state cannot be saved so.",
            where=f'format="orbax", {path}',
            why="Orbax gives a folder its name by a rename when it is complete, and buckets have none.",
            do='format="packed", the default',
        )
    if format not in get_args(Format):
        raise CheckpointError(
            "The state cannot be saved so.",
            where=f"format={format!r}",
            why=f"there are {' and '.join(get_args(Format))}.",
            do='format="packed", the default; or format="orbax", which plain Orbax reads.',
        )
    return format  # type: ignore[return-value]


def give_memory_back() -> None:
    """Hands freed memory back to the system: with many threads, glibc keeps several times the state otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _described(leaf: Any, shape: tuple[int, ...] | None) -> StoredLeaf:
    """A leaf as it will be stored, with the shape of most of its pieces."""
    stored = _manifest.describe(leaf, shape)
    is_cut = isinstance(leaf, jax.Array) and stored.key is None
    return dataclasses.replace(stored, chunk=leaf.sharding.shard_shape(leaf.shape)) if is_cut else stored


def _refuse_nothing(path: Place, leaves: Mapping[str, Any]) -> None:
    if not any(getattr(leaf, "size", 1) for leaf in leaves.values()):
        raise CheckpointError(
            "There is nothing to save.",
            where=str(path),
            why="the state has no leaf with a value in it.",
            do='save(path, {"model": model, "optimizer": optimizer, "step": step})',
        )


# Work in the background.

LOOK_S = 0.2
"""Whoever waits for a save looks this often for what else has happened."""

_unheard: set[Pending] = set()  # at work, or failed with nobody informed


class Pending:
    """A save at work.

    A program that ends before it, also by an error, waits until it is complete, and says so on stderr if it fails.

    Args:
        name: what it is, for messages.
        work: does it, in a new thread.
        timeout_s: how long the end of the program waits for it.
    """

    def __init__(self, name: str, work: Callable[[], Any], *, timeout_s: float = _END_S) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {name}", daemon=True)
        _wait_at_the_end()
        self._thread.start()
        _unheard.add(self)
        if self.is_done() and self._error is None:
            _unheard.discard(self)

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def ends_within(self, timeout_s: float) -> bool:
        """Waits for its end, for so long; whether it has ended, well or not."""
        self._thread.join(timeout_s)
        return self.is_done()

    def give_up(self) -> None:
        """The end of the program does not wait for it any more: whoever calls this has heard of it."""
        _unheard.discard(self)

    def wait(self, timeout_s: float | None = None, *, look: Callable[[], object] = lambda: None) -> Any:
        """Waits for its end.

        Args:
            timeout_s: how long; for ever by default.
            look: called now and then meanwhile; what it raises ends the wait.

        Returns:
            What the work returned.

        Raises:
            RunError: it failed, or did not end in time.
        """
        until_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while not self.ends_within(min(LOOK_S, max(0.0, until_s - time.monotonic()))) and time.monotonic() < until_s:
            look()
        self.give_up()
        if self._thread.is_alive():
            show_threads()
            raise RunError(
                "A save does not come to an end.",
                where=self.name,
                why=f"it is still at work after {timeout_s:.0f} s; the threads of this process are above.",
                do="look at the disk, and at what the other processes wrote last.",
            )
        if self._error is None:
            return self._result
        if isinstance(self._error, FourPartError):
            raise self._error
        raise RunError(
            "A save ended with an error that was not foreseen.",
            where=self.name,
            why=reason(self._error),
            do="look at the error above this one, which is its cause; then save again.",
        ) from self._error

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
        else:
            _unheard.discard(self)


@functools.cache
def _wait_at_the_end() -> None:
    before_threads_end(_finish_all)


def _finish_all() -> None:
    """Waits for what is at work while its threads can still do it, and reports failures that nobody has seen."""
    for pending in list(_unheard):
        try:
            pending.wait(pending.timeout_s)
        except FourPartError as error:
            print(f"the program ends without a checkpoint that it began to save.\n{error}", file=sys.stderr, flush=True)
