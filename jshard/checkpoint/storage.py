"""The only module that calls Orbax: it saves the folder of a checkpoint, and reads the arrays that Orbax wrote."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import logging
import math
import re
import sys
import traceback
import warnings
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from jshard._compat import set_orbax_deadline
from jshard._types import PyTree
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.converting import Leaf, Target
from jshard.checkpoint.manifest import FOLDER, MARK
from jshard.checkpoint.manifest import NAME as MANIFEST
from jshard.checkpoint.packed.file_io import flush
from jshard.checkpoint.state.leaves import flat, nested
from jshard.errors import causes

COMMIT_MARK = "commit_success.txt"  # Orbax adds it last, then renames the folder
ITEM = "state"

DESCRIPTION = "_METADATA"  # metadata of one tree's arrays, in its folder
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"  # Orbax's, in the folder of a checkpoint

_IN_FLIGHT_BYTES = 128 << 20  # of reads: memory in addition to the state
_AUTO = "AUTO"  # Orbax finds the only tree
_WIDEST_BYTES = 8  # of an element

_OrbaxObject: TypeAlias = Any
"""An object of Orbax, whose classes are not imported here: that takes long, and few programs need it."""


# ---- writing


@dataclasses.dataclass(frozen=True)
class Write:
    """A process's work in a folder made by Orbax, in the form that Orbax expects."""

    work: Callable[[Path], None]


class WriteHandler:
    """Runs a `Write` in a thread; Orbax gives the folder its final name when its own process is done."""

    def is_handleable(self, checkpointable: object) -> bool:
        """See Orbax."""
        return isinstance(checkpointable, Write)

    def is_abstract_handleable(self, abstract_checkpointable: object) -> bool:
        """Returns whether it can load something: no, jshard does that itself."""
        return False

    async def save(self, directory: _OrbaxObject, checkpointable: Write) -> Awaitable[None]:
        """Starts writing; see Orbax."""

        async def work() -> None:
            folder = await directory.await_creation()
            await asyncio.to_thread(checkpointable.work, Path(folder).parent)

        return work()

    async def load(self, directory: _OrbaxObject, abstract_checkpointable: object = None) -> Awaitable[Write]:
        """Refuses; see `is_abstract_handleable`."""
        raise NotImplementedError("jshard.checkpoint.restore reads these files")

    async def metadata(self, directory: _OrbaxObject) -> None:
        """Returns nothing; the manifest has the metadata."""


def save_async(
    path: Path, work: Callable[[Path], None], *, leaves: Mapping[str, object] | None = None, timeout_s: float
) -> Callable[[], None]:
    """Starts writing a checkpoint; every process calls it.

    Orbax makes a folder, and gives it its name when the work in it is done.

    Args:
        path: of the checkpoint.
        work: writes jshard's files into the folder; called in another thread.
        leaves: what Orbax itself writes, by path; None for nothing.
        timeout_s: how long any wait for other processes may take.

    Returns:
        A function that waits for the end.
    """
    from orbax.checkpoint import v1 as ocp  # slow to import, and few programs need it

    # Both: the setting of the context does not reach all of its barriers.
    set_orbax_deadline(timeout_s)
    context = ocp.Context()
    context.asynchronous.timeout_secs = max(1, int(timeout_s))
    # The global registry has the handlers of arrays, which only Orbax's own form of a state needs.
    context.checkpointables.registry = ocp.handlers.local_registry(include_global_registry=leaves is not None)
    context.checkpointables.registry.add(WriteHandler, checkpointable_name=FOLDER)
    checkpointables: dict[str, object] = {FOLDER: Write(work)}
    if leaves is not None:
        checkpointables[ITEM] = nested(leaves)
    with quiet(), context:
        response = ocp.save_checkpointables_async(str(path), checkpointables, custom_metadata=dict(MARK))

    def wait() -> None:
        with quiet():
            try:
                response.result(timeout_s)
            except TimeoutError as error:  # Orbax's own deadlines do not cover all its waits
                raise TimeoutError(f"not all processes have written their part after {timeout_s:.0f} s.") from error

    return wait


def name_draft(draft: Path, path: Path) -> None:
    """Gives a folder whose files are all on disk its mark and its final name, as Orbax does for those that it makes.

    On return the named folder would survive a power cut.
    """
    (draft / COMMIT_MARK).touch()
    flush(draft / COMMIT_MARK)
    # Before the name: a folder that has it is complete, also after a power cut.
    flush(draft)
    draft.rename(path)
    flush(path.parent)


def keep_on_disk(path: Path) -> None:
    """Waits until a checkpoint that Orbax named would survive a power cut; jshard's files are already on disk."""
    flush(path)
    # The name of the folder is in its parent: without this, a power cut could undo the renaming.
    flush(path.parent)


# ---- reading


def load(path: Path, targets: Mapping[str, Target], *, plain: bool = False) -> dict[str, Leaf]:
    """Reads some leaves, by path.

    Args:
        path: of the checkpoint.
        targets: what to read each leaf into, by path.
        plain: whether another program wrote the checkpoint; its trees may have lists.
    """
    from orbax.checkpoint import v1 as ocp

    leaves: dict[str, Leaf] = {}
    with quiet(), _reading_context(targets):
        for name, tree in _trees(path).items():
            tree_targets = _targets_below(targets, name)
            if not tree_targets:
                continue
            if plain:
                stored = ocp.metadata(tree.checkpoint, checkpointable_name=tree.item).metadata
                request = _as_stored(stored, tree_targets)
            else:
                request = nested(tree_targets)
            leaves |= flat(ocp.load(tree.checkpoint, request, checkpointable_name=tree.item), name)
    # A list was read whole: what was not requested of it is dropped here, see `_as_stored`.
    return {key: leaf for key, leaf in leaves.items() if key in targets}


def _reading_context(targets: Mapping[str, Target]) -> _OrbaxObject:
    """Returns Orbax's settings for reading some leaves."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Each process reads by itself, and they synchronize afterwards: Orbax's barriers always time out after 300 s.
    context.multiprocessing.active_processes = {jax.process_index()}
    context.multiprocessing.primary_host = jax.process_index()
    context.pytree.loading.partial_load = True  # only some of the stored leaves
    most_bytes = _IN_FLIGHT_BYTES
    for target in targets.values():
        if hasattr(target, "shape"):
            most_bytes = max(most_bytes, _WIDEST_BYTES * math.prod(target.shape))
    context.memory.read_concurrent_bytes = most_bytes  # Orbax refuses a larger leaf
    context.array.loading.enable_padding_and_truncation = True  # shapes were compared: only padding can differ
    return context


def _targets_below(targets: Mapping[str, Target], name: str) -> dict[str, Target]:
    """Returns the targets at or below a path, by their paths relative to it."""
    if not name:
        return dict(targets)
    below = {}
    for path, target in targets.items():
        if path == name:
            below[""] = target
        elif path.startswith(f"{name}/"):
            below[path.removeprefix(f"{name}/")] = target
    return below


def _as_stored(stored: PyTree, targets: Mapping[str, Target], path: str = "") -> PyTree:
    """Returns the targets as a tree with the stored node types, as Orbax reads lists whole or not at all.

    Args:
        stored: the metadata of a stored tree, or of a node in it.
        targets: by path in the tree.
        path: of the node.
    """
    if isinstance(stored, Mapping):
        return _dict_as_stored(stored, targets, path)
    if isinstance(stored, list | tuple):
        return [_as_stored(node, targets, _join(path, number)) for number, node in enumerate(stored)]
    if path in targets or stored is None:
        return targets.get(path)
    if hasattr(stored, "shape"):
        return np.empty(stored.shape, stored.dtype)  # an element of a list that is needed for another element
    return stored


def _dict_as_stored(
    stored: Mapping[Hashable, PyTree], targets: Mapping[str, Target], path: str
) -> dict[Hashable, PyTree]:
    tree = {}
    for key, node in stored.items():
        node_path = _join(path, key)
        if not any(f"{target}/".startswith(f"{node_path}/") for target in targets):
            continue
        subtree = _as_stored(node, targets, node_path)
        is_empty = isinstance(subtree, dict) and not subtree
        if not is_empty:
            tree[key] = subtree
    return tree


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def metadata(path: Path) -> tuple[dict[str, object], Mapping[str, object]]:
    """Returns Orbax's metadata of a checkpoint, by path, and its custom metadata; no array is read.

    Raises `FileNotFoundError` if there is no checkpoint.
    """
    from orbax.checkpoint import v1 as ocp

    by_path: dict[str, object] = {}
    custom: object = None
    for name, tree in _trees(path).items():
        try:
            with quiet():
                described = ocp.metadata(tree.checkpoint, checkpointable_name=tree.item)
        except ocp.errors.InvalidLayoutError as error:
            raise FileNotFoundError(str(error)) from error
        if described.metadata is None:
            raise ValueError("a file that describes its arrays is missing or damaged")
        by_path |= flat(described.metadata, name)
        custom = described.custom_metadata
    return by_path, custom if isinstance(custom, Mapping) else {}


# ---- the trees in a folder


@dataclasses.dataclass(frozen=True)
class _Tree:
    """A stored tree, as Orbax addresses it."""

    checkpoint: str  # a folder
    item: str | None  # the tree's name in the checkpoint; None if the folder is the tree itself


def _trees(path: Path) -> dict[str, _Tree]:
    """Returns the trees of a checkpoint by name; the only tree of one has no name."""
    names = items(path)
    if names:
        return {name: _tree_of(path, name) for name in names}
    if is_item(path):
        return {"": _Tree(str(path.parent), path.name)}
    return {"": _Tree(str(path), _AUTO)}


def _tree_of(path: Path, name: str) -> _Tree:
    if "/" in name:  # in a nested composite, Orbax treats the items as checkpoints
        return _Tree(str(path / name), None)
    return _Tree(str(path), name)


def only_item(path: Path, requested: Collection[str]) -> str | None:
    """Returns the name of the only stored tree, if all requested paths start with it and its own paths do not."""
    if (path / DESCRIPTION).is_file():
        return None
    names = [file.parent.name for file in path.glob(f"*/{DESCRIPTION}")]
    if len(names) != 1 or not requested:
        return None
    (name,) = names
    if not all(path_requested.startswith(f"{name}/") for path_requested in requested):
        return None
    described, _ = metadata(path)
    if any(stored_path.split("/")[0] == name for stored_path in described):
        return None
    return name


def items(path: Path) -> tuple[str, ...]:
    """Returns the names of the trees in a checkpoint that holds several; none for one of a single tree.

    Orbax writes several for `Composite(params=..., ema_params=...)` and `save_checkpointables`, and one may itself be a
    composite. By default, Orbax reads only one of them.
    """
    if (path / DESCRIPTION).is_file():
        return ()
    names = []
    folders = collections.deque([path])
    while folders:
        folder = folders.popleft()
        if not folder.is_dir():
            continue
        for below in folder.iterdir():
            if (below / DESCRIPTION).is_file():
                names.append(below.relative_to(path).as_posix())
            # Deeper folders only if they have trees themselves: the data of a tree may have thousands of folders.
            elif below.is_dir() and (folder == path or any(below.glob(f"*/{DESCRIPTION}"))):
                folders.append(below)
    # A single tree is found by Orbax itself (`_AUTO`), and its leaves have no name before them.
    if len(names) < 2:
        return ()
    return tuple(sorted(names))


def is_item(path: Place) -> bool:
    """Returns whether a folder is one tree of a checkpoint by another program."""
    if isinstance(path, BucketPath):
        return False
    is_tree = (path / DESCRIPTION).is_file() and not (path / CHECKPOINT_METADATA).is_file()
    is_in_checkpoint = (path.parent / CHECKPOINT_METADATA).is_file()
    return is_tree and is_in_checkpoint and not (path.parent / MANIFEST).is_file()


def is_committed(path: Place) -> bool:
    """Returns whether a save was completed there; incomplete folders and other programs' folders have no mark."""
    mark = MANIFEST if isinstance(path, BucketPath) else COMMIT_MARK
    return (path / mark).is_file()


# ---- logs

_OF_ORBAX = re.compile(r"[/\\](orbax|asyncio|tensorstore)[/\\]")  # in the path of the file that logs something


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops Orbax's logs: a failed write would print its traceback once per thread, and is raised anyway."""
    if not isinstance(sys.unraisablehook, _LateErrorFilter):  # before the work, as some threads end before it fails
        sys.unraisablehook = _LateErrorFilter(sys.unraisablehook)

    def is_of_user(record: logging.LogRecord) -> bool:
        # A function for each block: blocks in several threads overlap, and a logger takes a filter only once.
        return not _OF_ORBAX.search(record.pathname)

    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]  # the user may also log with absl
    for logger in loggers:
        logger.addFilter(is_of_user)
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
            logger.removeFilter(is_of_user)


class _LateErrorFilter:
    """A hook for unraisable errors that ignores those of coroutines that end after a related failure."""

    def __init__(self, previous_hook: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._previous_hook = previous_hook

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        is_abandoned = code is not None and any(name in code.co_filename for name in ("orbax", "asyncio"))
        if not is_abandoned and "Event loop is closed" not in str(unraisable.exc_value):
            self._previous_hook(unraisable)
