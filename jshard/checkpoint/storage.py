"""The only module that calls Orbax; also the ownership of a folder until its checkpoint is complete."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import gc
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard._compat import set_orbax_deadline
from jshard._files import open_in_place, read_bytes, read_json
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.file_io import flush
from jshard.checkpoint.manifest import FOLDER, MARK
from jshard.checkpoint.manifest import NAME as MANIFEST
from jshard.errors import RunError, UnsafeFileError, causes

COMMIT_MARK = "commit_success.txt"  # Orbax adds it last, then renames the folder
ITEM = "state"

_IN_FLIGHT_BYTES = 128 << 20  # of reads: memory in addition to the state
_AUTO = "AUTO"  # Orbax finds the only tree
DESCRIPTION = "_METADATA"  # metadata of one tree's arrays, in its folder
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"  # Orbax's, in the folder of a checkpoint


@dataclasses.dataclass(frozen=True)
class Write:
    """A process's work in a folder made by Orbax, in the form that Orbax expects."""

    work: Callable[[Path], None]


class WriteHandler:
    """Runs it in a thread; Orbax gives the folder its final name when its own process is done."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """See Orbax."""
        return isinstance(checkpointable, Write)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it can load something; no, jshard does that itself."""
        return False

    async def save(self, directory: Any, checkpointable: Write) -> Any:
        """Starts writing; see Orbax."""

        async def work() -> None:
            folder = await directory.await_creation()
            await asyncio.to_thread(checkpointable.work, Path(folder).parent)

        return work()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Nothing: see `is_abstract_handleable`."""
        raise NotImplementedError("jshard.checkpoint.restore reads these files")

    async def metadata(self, directory: Any) -> None:
        """Nothing; the manifest has the metadata."""


def save_async(
    path: Path, work: Callable[[Path], None], *, leaves: Mapping[str, Any] | None = None, timeout_s: float
) -> Callable[[], None]:
    """Starts writing a checkpoint; every process calls it.

    Orbax makes a folder, and gives it its name when the work in it is done.
    """
    from orbax.checkpoint import v1 as ocp  # slow to import, and few programs need it

    set_orbax_deadline(timeout_s)
    context = ocp.Context()
    context.asynchronous.timeout_secs = max(1, int(timeout_s))
    context.checkpointables.registry = ocp.handlers.local_registry(include_global_registry=leaves is not None)
    context.checkpointables.registry.add(WriteHandler, checkpointable_name=FOLDER)
    trees = {} if leaves is None else {ITEM: _leaves.nested(leaves)}
    with quiet(), context:
        response = ocp.save_checkpointables_async(str(path), {FOLDER: Write(work), **trees}, custom_metadata=dict(MARK))

    def wait() -> None:
        with quiet():
            try:
                response.result(timeout_s)
            except TimeoutError as error:  # Orbax's own deadlines do not cover all its waits
                raise TimeoutError(f"not all processes have written their part after {timeout_s:.0f} s.") from error

    return wait


def load(path: Path, wanted: Mapping[str, Any], *, plain: bool = False) -> dict[str, Any]:
    """Reads some leaves, by path."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Each process reads by itself, and they synchronize afterwards: Orbax's barriers always time out after 300 s.
    context.multiprocessing.active_processes = {jax.process_index()}
    context.multiprocessing.primary_host = jax.process_index()
    context.pytree.loading.partial_load = True  # only some of the stored leaves
    largest = max((8 * math.prod(like.shape) for like in wanted.values() if hasattr(like, "shape")), default=0)
    context.memory.read_concurrent_bytes = max(_IN_FLIGHT_BYTES, largest)
    context.array.loading.enable_padding_and_truncation = True  # shapes were compared: only padding can differ
    found: dict[str, Any] = {}
    with quiet(), context:
        for name, (folder, item) in _trees(path).items():
            begin = f"{name}/" if name else ""
            keys = [key for key in wanted if f"{key}/".startswith(begin)]
            here = {f"{key}/".removeprefix(begin)[:-1]: wanted[key] for key in keys}
            if not here:
                continue
            stored = ocp.metadata(folder, checkpointable_name=item).metadata if plain else None
            asked = _as_stored(stored, here) if plain else _leaves.nested(here)
            found |= _leaves.flat(ocp.load(folder, asked, checkpointable_name=item), name)
    return {key: leaf for key, leaf in found.items() if key in wanted}


def only_item(path: Path, asked: Collection[str]) -> str | None:
    """The name of the single stored tree, if all wanted paths start with it and its own paths do not."""
    names = [] if (path / DESCRIPTION).is_file() else [file.parent.name for file in path.glob(f"*/{DESCRIPTION}")]
    if len(names) != 1 or not asked or not all(name.startswith(f"{names[0]}/") for name in asked):
        return None
    described, _ = metadata(path)
    return None if any(name.split("/")[0] == names[0] for name in described) else names[0]


def items(path: Path) -> tuple[str, ...]:
    """The names of the trees in a checkpoint that holds several.

    Orbax writes several for `Composite(params=..., ema_params=...)` and `save_checkpointables`, and one may itself be a
    composite. By default, Orbax reads only one of them.
    """
    folders = [] if (path / DESCRIPTION).is_file() else [path]
    names = []
    for folder in folders:  # grows
        for below in folder.iterdir() if folder.is_dir() else ():
            if (below / DESCRIPTION).is_file():
                names.append(below.relative_to(path).as_posix())
            elif below.is_dir() and (folder == path or any(below.glob(f"*/{DESCRIPTION}"))):
                folders.append(below)
    return tuple(sorted(names)) if len(names) > 1 else ()


def is_item(path: Place) -> bool:
    """Whether a folder is one tree of a checkpoint by another program."""
    if isinstance(path, BucketPath):
        return False
    is_tree = (path / DESCRIPTION).is_file() and not (path / CHECKPOINT_METADATA).is_file()
    return is_tree and (path.parent / CHECKPOINT_METADATA).is_file() and not (path.parent / MANIFEST).is_file()


def _trees(path: Path) -> dict[str, tuple[str, str | None]]:
    """The checkpoint and item (or the checkpoint itself) for Orbax to read, by path prefix."""
    if names := items(path):
        # In a nested composite, Orbax treats the items as checkpoints.
        return {name: (str(path / name), None) if "/" in name else (str(path), name) for name in names}
    if is_item(path):
        return {"": (str(path.parent), path.name)}
    return {"": (str(path), _AUTO)}


def _as_stored(stored: Any, wanted: Mapping[str, Any], path: str = "") -> Any:
    """The wanted leaves as a tree with the stored node types; Orbax reads lists whole or not at all."""
    below = lambda key: f"{path}/{key}" if path else str(key)
    if isinstance(stored, Mapping):
        is_asked = lambda begin: any(f"{path}/".startswith(f"{begin}/") for path in wanted)
        found = {key: _as_stored(node, wanted, below(key)) for key, node in stored.items() if is_asked(below(key))}
        return {key: node for key, node in found.items() if not isinstance(node, dict) or node}
    if isinstance(stored, list | tuple):
        return [_as_stored(node, wanted, below(number)) for number, node in enumerate(stored)]
    if path in wanted or stored is None:
        return wanted.get(path)
    return np.empty(stored.shape, stored.dtype) if hasattr(stored, "shape") else stored


def metadata(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Orbax's metadata of a checkpoint, by path, and its custom metadata; no array is read.

    Raises `FileNotFoundError` if there is no checkpoint.
    """
    from orbax.checkpoint import v1 as ocp

    found: dict[str, Any] = {}
    noted: Any = None
    for name, (folder, item) in _trees(path).items():
        try:
            with quiet():
                described = ocp.metadata(folder, checkpointable_name=item)
        except ocp.errors.InvalidLayoutError as error:
            raise FileNotFoundError(str(error)) from error
        if described.metadata is None:
            raise ValueError("a file that describes its arrays is missing or damaged")
        found |= _leaves.flat(described.metadata, name)
        noted = described.custom_metadata
    return found, noted if isinstance(noted, Mapping) else {}


def is_committed(path: Place) -> bool:
    """Whether a save was completed there; incomplete folders and other programs' folders have no mark."""
    return (path / (MANIFEST if isinstance(path, BucketPath) else COMMIT_MARK)).is_file()


# The folder of a save until it is complete. No two saves write into one folder, and none removes the files of another:
# the first process locks the file `NAME.owner` during the save, and the system releases the lock if the process dies.
# On file systems without locks, the later save takes the folder; the earlier one finds another token in the file, and
# fails before it completes a folder that it no longer owns.

DRAFT_SUFFIX = ".orbax-checkpoint-tmp"  # Orbax writes beside the final path, then renames
_OWNER_BYTES = 4096
_held: set[int] = set()  # files that are locked


class Owner:
    """A claim to write a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._checkpoint, self._path = path, _owner_file(path)
        self._number = _locked(self._path, create=True)
        if self._number is None:
            raise CheckpointError(
                "The checkpoint cannot be written.",
                where=str(path),
                why=f"another save is writing it: {_owner_text(self._path)}.",
                do="let only one program save into a folder, or save under another name.",
            )
        mine = {"host": socket.gethostname(), "process_id": os.getpid(), "token": secrets.token_hex(8)}
        self._text = json.dumps(mine)
        _held.add(self._number)
        try:
            os.truncate(self._number, 0)
            os.pwrite(self._number, self._text.encode(), 0)
        except OSError:  # a full disk must not lock the step for good
            self._path.unlink(missing_ok=True)
            self._close()
            raise

    def check(self) -> None:
        """Raises a `RunError` if another save took the folder."""
        if self._written() != self._text:
            raise RunError(
                "The checkpoint could not be written.",
                where=str(self._checkpoint),
                why=f"another save took the folder during this one: {_owner_text(self._path)}.",
                do="let only one program save into a folder.",
            )

    def release(self) -> None:
        """Ends the claim."""
        if self._number is None:
            return
        with contextlib.suppress(OSError):
            if self._written() == self._text:
                self._path.unlink()
        self._close()

    def _written(self) -> str | None:
        """The text of the file now; None if it is gone, or is no longer a file."""
        try:
            return read_bytes(self._path, _OWNER_BYTES).decode(errors="replace")
        except (FileNotFoundError, UnsafeFileError):
            return None

    def _close(self) -> None:
        if self._number is not None:
            _held.discard(self._number)
            os.close(self._number)
            self._number = None


def is_owned(path: Path) -> bool:
    """Whether a save of a checkpoint appears to be running."""
    try:
        number = _locked(_owner_file(path), create=False)
    except OSError:
        return False
    if number is not None:
        os.close(number)
    return number is None


def _owner_file(path: Path) -> Path:
    return path.with_name(path.name + ".owner")


def _locked(path: Path, *, create: bool) -> int | None:
    """An open file, locked if the file system supports it; None if another process holds the lock."""
    while True:
        number = open_in_place(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(number)
            return None
        except OSError:
            return number  # no locks there
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(number), os.stat(path)):
                return number
        os.close(number)  # its owner has removed it meanwhile


def _let_go_in_a_child() -> None:
    """Closes held locks in a forked child, which would otherwise keep them alive."""
    for number in _held:
        with contextlib.suppress(OSError):
            os.close(number)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_a_child)


def _owner_text(path: Path) -> str:
    try:
        mine = read_json(path, _OWNER_BYTES)
        return f"process {mine['process_id']} on {mine['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"


def draft_of(path: Path) -> Path:
    """The name of a checkpoint's folder until it is complete."""
    return path.with_name(path.name + DRAFT_SUFFIX)


def discard_draft(path: Path) -> None:
    """Removes the remains of an interrupted save, unless it is still running."""
    if is_owned(path):
        return
    with contextlib.suppress(OSError):
        _owner_file(path).unlink()
    remove_draft(path)


def remove_draft(path: Path) -> bool:
    """`discard_draft` for the owner of the checkpoint; returns whether there was a draft."""
    draft = draft_of(path)
    if draft.is_symlink():  # what it points to is not removed, and nothing is written there
        draft.unlink()
        return True
    is_there = draft.exists()
    shutil.rmtree(draft, ignore_errors=True)
    return is_there


def keep_on_disk(path: Path) -> None:
    """Waits until a named checkpoint would survive a power cut; jshard's files are already on disk."""
    flush(path)
    flush(path.parent)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops Orbax's logs: a failed write would print its traceback once per thread, and is raised anyway."""
    if not isinstance(sys.unraisablehook, _NotLate):  # before the work, as some threads end before it fails
        sys.unraisablehook = _NotLate(sys.unraisablehook)
    # The user may also log with absl.
    theirs = lambda record: not re.search(r"[/\\](orbax|asyncio|tensorstore)[/\\]", record.pathname)
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(theirs)
    try:
        yield
    except Exception as error:
        for cause in causes(error, context=True):  # closes suspended coroutines, each of which would print a traceback
            traceback.clear_frames(cause.__traceback__)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(theirs)


class _NotLate:
    """A hook for unraisable errors that ignores those of coroutines that end after a related failure."""

    def __init__(self, before: Callable[[Any], None]) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        abandoned = code is not None and any(name in code.co_filename for name in ("orbax", "asyncio"))
        if not abandoned and "Event loop is closed" not in str(unraisable.exc_value):
            self._before(unraisable)
