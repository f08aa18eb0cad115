"""`save` and `save_async`: a state written by all processes, complete once its manifest exists."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jshard._compat import before_threads_end, orbax_operations, versions
from jshard._processes import all_or_none, failures, is_primary, publish_failure, show_threads, withdraw
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import storage
from jshard.checkpoint.buckets import BucketFolder, BucketPath, Place
from jshard.checkpoint.dealing import HeldState, write_files
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, in_four_parts, reason, write_failed
from jshard.checkpoint.file_io import LocalFolder, flush
from jshard.checkpoint.leaves import check_equal, local_copies
from jshard.checkpoint.lookup import place_of
from jshard.checkpoint.manifest import FOLDER, Manifest, StoredLeaf, add, held_parts, sums_of
from jshard.checkpoint.matching import own_mesh
from jshard.checkpoint.storage import Owner, keep_on_disk, remove_draft
from jshard.checkpoint.timeline import Phases, mesh_layout
from jshard.errors import FourPartError, RunError, causes

TIMEOUT_S = 1200.0


def save(path: str | os.PathLike[str], state: Any, *, format: Format = "packed", timeout_s: float = TIMEOUT_S) -> None:
    """Saves a state; every process calls it, and each writes the values on its devices.

    It returns when the checkpoint is complete, on the disk, and under its final name.

    Args:
        path: a folder that does not exist yet.
        state: a dict from names to objects, or a single object: nnx modules, nnx optimizers, pytrees of
            arrays (including random keys), numbers and strings, and objects with `get_state()` and `set_state()`.
        format: "packed", a few large files; or "orbax", Orbax's own format, for other programs to read.
        timeout_s: how long to wait for other processes.

    Raises:
        CheckpointError: `path` already exists, or some leaves are not data.
        RunError: writing failed, for example on a full disk, or a process did not respond. The files left at
            `path` are not a checkpoint.

    Example:
        >>> js.checkpoint.save("run/100", {"model": model, "optimizer": optimizer, "step": 100})
    """
    Saving(place_of(path), state, format=format, timeout_s=timeout_s).finish()


def save_async(
    path: str | os.PathLike[str], state: Any, *, format: Format = "packed", timeout_s: float = TIMEOUT_S
) -> Pending:
    """`save` that returns when the devices' values are copied, so that the next step may overwrite them.

    Arguments and errors are those of `save`, except for later failures.

    Returns:
        The pending save. Its `wait()` raises later failures; on exit a program waits for it where Python can.

    Example:
        >>> pending = js.checkpoint.save_async("run/200", {"model": model, "step": 200})
        >>> pending.wait()
    """
    path = place_of(path)
    return Pending(str(path), Saving(path, state, format=format, timeout_s=timeout_s).finish, timeout_s=2 * timeout_s)


Format = Literal["packed", "orbax"]

_numbers = itertools.count()  # all processes make their saves in the same order
_END_S = 2400.0  # the longest wait at program exit by default


class Saving:
    """A save whose values are copied; `finish` completes it, in the same thread or another."""

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
        self._failures = f"save {next(_numbers)}"
        self._left: list[str] = []  # at the last exchange of all processes
        self._held = contextlib.ExitStack()  # resources released with the save
        self._totals: dict[str, list[Any]] = {}  # this process's parts of each leaf, to be checksummed
        self._owner: Owner | None = None
        self._heard: list[dict[str, Any]] = []  # the reports of all processes
        self._saved_at = self.phases.began_at
        self._agreed: Exception | None = None  # why no process could write, once all know it
        try:
            (leaves, held), heard = self._together("begin", lambda: self._checked_and_held(state, prepare))
            copies = [other["copies"] for other in heard]
            try:
                check_equal(copies)
            except CheckpointError:  # on all processes, so nothing is left to exchange
                self._together("not equal", lambda: (check_equal(copies), None))
            if held is None:
                held, _ = self._together("all here", lambda: (self._hold(leaves), None))
            # A late process that the others gave up on has not started the operation that Orbax counts.
            orbax_operations(max(other["operations"] for other in heard))
            with self._errors_named():
                # With several processes Orbax uses the devices, which belong to the step once this returns.
                can_wait = jax.process_count() == 1 and not isinstance(held, dict)
                begun = functools.cache(lambda: self._begun(held))
                self._wait = lambda: begun()()
                if not can_wait:
                    begun()
        except BaseException as error:
            if isinstance(error, Exception):
                publish_failure(self._failures, error)
            self._held.close()
            raise
        self.blocked_s = self.phases.now_s()
        begin = {"began_at": self.phases.began_at, "error": None, "blocked_s": self.blocked_s, "mesh": self._mesh}
        self.record: dict[str, Any] = begin

    def failure(self) -> FourPartError | None:
        """A write failure of any process, while others may still wait for it in Orbax."""
        found = failures(self._failures)
        return self._others_failed(found) if found else None

    def finish(self) -> None:
        """Waits until the checkpoint is complete and on disk, on all processes."""

        def commit() -> tuple[None, None]:
            self._wait()
            if is_primary() and isinstance(self.path, Path):
                keep_on_disk(self.path)
            return None, None

        with self._held, self._errors_named():
            self._together("complete", commit, is_last=True)
            del self._wait, self._totals  # and the parts of the state that they hold
            give_memory_back()
            reports = [other["report"] for other in self._heard]
            written_s = max(report["phases"][-1][2] for report in reports)
            for report in reports:  # until it is complete: part of the save's time
                report["phases"].append(["finish", written_s, round(self.phases.now_s(), 6)])
            self.record |= {"processes": reports}

    def _write(self, write: Callable[[], dict[str, tuple[int, int]]], folder: Place) -> None:
        """Writes the copied values, on all processes or none; then the first process completes the checkpoint.

        Orbax waits for this, and gives the folder its final name when its own process is done.
        """

        def work() -> tuple[None, dict[str, Any]]:
            with self.phases("write"):
                files = write()
                sums = {key: sums_of(parts, self._described[key].shape) for key, parts in self._totals.items()}
            num_bytes = sum(size for size, _ in files.values()) or self._num_bytes
            return None, {"files": files, "sums": sums, "report": self.phases.report(num_bytes=num_bytes)}

        try:
            _, self._heard = self._together("written", work)
            self._together("sealed", lambda: (self._seal(folder) if is_primary() else None, None))
        except Exception as error:
            self._agreed = error
            raise

    def _checked_and_held(self, state: Any, prepare: Callable[[], None]) -> tuple[tuple[dict[str, Any], Any], Any]:
        """The leaves, and the result of `_hold` if it runs no program that all processes must run."""
        with self.phases("plan"):
            leaves, copies = self._checked(state, prepare)
        held = self._hold(leaves) if self._format == "packed" else None
        return (leaves, held), {"copies": copies, "operations": orbax_operations()}

    def _checked(self, state: Any, prepare: Callable[[], None]) -> tuple[dict[str, Any], Any]:
        """Checks everything; returns the leaves that have a value, and the data that the processes compare."""
        found = _leaves.flatten(state)
        leaves = _leaves.storable(found)
        if self._format == "orbax":
            _leaves.check_paths(leaves)
        if not any(getattr(leaf, "size", 1) for leaf in leaves.values()):
            raise CheckpointError(
                "There is nothing to save.",
                where=str(self.path),
                why="the state has no leaf with a value.",
                do='save(path, {"model": model, "optimizer": optimizer, "step": step})',
            )
        logical = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(state).items()}
        self._described = {key: _described(leaf, logical.get(key)) for key, leaf in leaves.items()}
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
            full = {key: _without_padding(leaf, self._described[key]) for key, leaf in arrays.items()}
            self._totals = {key: held_parts(leaf) for key, leaf in full.items()}
            return {key: leaf for key, leaf in {**leaves, **full}.items() if getattr(leaf, "size", 1)}  # Orbax's rule

    def _begun(self, held: HeldState | dict[str, Any]) -> Callable[[], None]:
        """Starts writing the copied values; returns a function that waits for the checkpoint's final name."""
        self._num_bytes = sum(values.nbytes for parts in self._totals.values() for values, _ in parts)  # of Orbax
        if isinstance(self.path, BucketPath):
            assert not isinstance(held, dict)
            sink, begin = BucketFolder(self.path / FOLDER), f"{secrets.token_hex(4)}-"  # unique per save
            return lambda: self._write(lambda: write_files(sink, held.files, held.values, begin=begin), self.path)
        if isinstance(held, dict):
            work = lambda folder: self._write(dict, folder)
            return storage.save_async(self.path, work, leaves=held, timeout_s=self._timeout_s)
        write = lambda folder: write_files(LocalFolder(folder / FOLDER), held.files, held.values)
        work = lambda folder: self._write(lambda: write(folder), folder)
        return storage.save_async(self.path, work, timeout_s=self._timeout_s)

    def _prepare(self, before: Callable[[], None]) -> None:
        before()
        if storage.is_committed(self.path) if isinstance(self.path, BucketPath) else self.path.exists():
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(self.path),
                why="that path already exists.",
                do="choose another path, for example with the step in it; nothing is ever overwritten.",
            )
        if isinstance(self.path, BucketPath):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self.path)
        self._held.callback(self._owner.release)
        if remove_draft(self.path):
            message = f"the remains of an interrupted save of {self.path} were removed."
            warnings.warn(message, CheckpointWarning, stacklevel=7)

    def _seal(self, folder: Place) -> None:
        """The work of the first process after all have written."""
        if self._owner is not None:
            self._owner.check()
        self._check()
        packed, leaves = {}, self._described
        for other in self._heard:
            packed |= {name: tuple(found) for name, found in other["files"].items()}
        if self._format == "orbax":
            sums = {key: [other["sums"][key] for other in self._heard] for key in self._totals}
            leaves |= {key: dataclasses.replace(leaves[key], sums=add(found)) for key, found in sums.items()}
        self.manifest = Manifest(
            leaves=leaves,
            packed=packed,
            values=self._values,
            step=self._step,
            saved_at=self._saved_at,
            mesh=self._mesh["axes"],
            processes=len(self._heard),
            metrics=self._metrics,
        )
        seal(folder, self.path, self.manifest)

    def _together(
        self, topic: str, work: Callable[[], tuple[Any, Any]], *, is_last: bool = False
    ) -> tuple[Any, list[Any]]:
        """Runs work that all processes finish, or none; it returns a local result, and one for the others."""
        kept, given, error = None, None, None
        try:
            kept, given = work()
        except Exception as caught:
            if self._agreed is not None:  # all processes know, and none waits
                raise self._agreed from (None if self._agreed in causes(caught) else caught)
            error = caught
        # A process whose wait for the others failed has used up the timeout, and so have they.
        timeout_s = self._timeout_s / 4 if isinstance(error, TimeoutError) else self._timeout_s
        own = None if error is None else in_four_parts(self.path, error)
        if own is not None:
            own.__cause__ = error if own is not error else own.__cause__
            publish_failure(self._failures, own)
        left = None if is_last else self._left
        asked: Any = {"failed": self._others_failed, "timeout_s": timeout_s, "left": left}
        heard = all_or_none(f"{topic} {self.path}", given, own, **asked)
        if is_last:
            withdraw(self._left)
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


def seal(folder: Place, path: Place, manifest: Manifest) -> None:
    """Writes the manifest of a checkpoint whose files all exist; in a bucket this completes it."""
    files = {f"{FOLDER}/{name}": (size, None) for name, (size, _) in manifest.packed.items()}
    manifest = dataclasses.replace(manifest, files=files, versions=versions(_manifest.PACKAGES))
    bad, count = _manifest.damage(folder, manifest), len(manifest.packed)
    why = f"{len(bad)} of {count} files are missing or incomplete after everything was written." if bad else None
    if isinstance(folder, Path):
        _manifest.write(folder, manifest)
        flush(folder / FOLDER)
    elif why is None:
        (folder / storage.COMMIT_MARK).write(b"")  # for copies to a disk
        if not (folder / _manifest.NAME).create(_manifest.to_text(manifest).encode()):
            why = "another program completed a checkpoint there during this save."
    if why is not None:
        do = "find the other program that writes or deletes there, let only one save to an address, and save again."
        raise RunError("The checkpoint could not be written.", where=[str(path), *bad], why=why, do=do)


def checked_format(format: str, path: Place) -> Format:
    """Returns a valid format, or raises `CheckpointError`."""
    if format not in get_args(Format) or (format == "orbax" and isinstance(path, BucketPath)):
        raise CheckpointError(
            "The state cannot be saved in this format.",
            where=f"format={format!r}, {path}",
            why=f"there are {' and '.join(get_args(Format))}; Orbax renames complete checkpoints; buckets cannot.",
            do='format="packed", the default; or, in a folder, format="orbax", which plain Orbax reads.',
        )
    return format  # type: ignore[return-value]


def give_memory_back() -> None:
    """Returns freed memory to the system: with many threads, glibc otherwise keeps several times the state."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _described(leaf: Any, shape: tuple[int, ...] | None) -> StoredLeaf:
    """A leaf as it will be stored, with the shape of most of its pieces."""
    stored = _manifest.describe(leaf, shape)
    is_cut = isinstance(leaf, jax.Array) and stored.key is None
    return dataclasses.replace(stored, chunk=leaf.sharding.shard_shape(leaf.shape)) if is_cut else stored


def _without_padding(leaf: Any, stored: StoredLeaf) -> Any:
    """The stored form of an array; one without its padding may not divide over its mesh, and is then replicated."""
    if not isinstance(leaf, jax.Array) or stored.key is not None or leaf.shape == stored.shape:
        return leaf
    assert isinstance(leaf.sharding, NamedSharding)
    inside = tuple(slice(size) for size in stored.shape)
    with own_mesh(leaf):
        return jax.jit(lambda x: x[inside], out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)


# Work in the background.

LOOK_S = 0.2
"""Interval at which a wait for a save checks for other events."""

_unheard: set[Pending] = set()  # running, or failed without being reported


class Pending:
    """A pending save.

    A program that exits earlier, even with an error, waits until it is complete, and reports a failure on stderr.
    """

    def __init__(self, name: str, work: Callable[[], Any], *, timeout_s: float = _END_S) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {name}", daemon=True)
        _wait_at_the_end()
        try:
            self._thread.start()
        except RuntimeError:  # for example, the program is about to exit
            self._run(work)
        _unheard.add(self)
        if self.is_done() and self._error is None:
            _unheard.discard(self)

    def is_done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return not self._thread.is_alive()

    def ends_within(self, timeout_s: float) -> bool:
        """Waits for its end, up to a time; returns whether it has ended, successfully or not."""
        if not self.is_done():
            self._thread.join(timeout_s)
        return self.is_done()

    def give_up(self) -> None:
        """Stops the program's exit from waiting for it; the caller handles it."""
        _unheard.discard(self)

    def wait(self, timeout_s: float | None = None, *, look: Callable[[], object] = lambda: None) -> Any:
        """Waits for its end."""
        until_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while not self.ends_within(min(LOOK_S, max(0.0, until_s - time.monotonic()))) and time.monotonic() < until_s:
            look()
        self.give_up()
        if self._thread.is_alive():
            show_threads()
            raise RunError(
                "A save does not end.",
                where=self.name,
                why=f"it is still running after {timeout_s:.0f} s; the threads of this process are above.",
                do="check the disk, and the last output of the other processes.",
            )
        if self._error is None:
            return self._result
        if isinstance(self._error, FourPartError):
            raise self._error
        raise RunError(
            "A save failed with an unexpected error.",
            where=self.name,
            why=reason(self._error),
            do="fix the cause, which is the error above this one; then save again.",
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
    """Waits for pending saves while their threads can still run, and reports failures that were not seen."""
    for pending in list(_unheard):
        try:
            pending.wait(pending.timeout_s)
        except FourPartError as error:
            print(f"the program ends with an incomplete save of a checkpoint.\n{error}", file=sys.stderr, flush=True)
