"""A checkpoint that is written part by part: for tools that hold a few leaves at a time."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jshard._compat import versions
from jshard._errors import RunError
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import seal as _seal
from jshard.checkpoint import storage
from jshard.checkpoint.agreeing import write_failed
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.failures import quiet, reason
from jshard.checkpoint.owner import Owner
from jshard.checkpoint.saving import flush, give_memory_back, keep_on_disk, remove_unnamed, unnamed
from jshard.checkpoint.seal import Seal, StoredLeaf
from jshard.checkpoint.sums import LeafSums, Sums

PARTS_SUFFIX = ".partial_save"  # Orbax's, until the parts are joined
_TIMEOUT_S = 1200.0


def save_parts(
    path: Path,
    parts: Iterable[Mapping[str, Any]],
    *,
    like: Seal,
    sums: Mapping[str, Sums] | None = None,
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> Seal:
    """Writes a checkpoint part by part, in one process; each part is let go before the next is asked for.

    It is complete and under its name when this returns; until then there is none.

    Args:
        path: a folder that does not exist yet.
        parts: leaves by stored path: arrays, the sharded ones cut by their shards; and all values of Python in one of
            the parts.
        like: has the step, the time, the metrics and the mesh for the seal.
        sums: those that leaves must have, by path: a leaf with others was damaged where it came from.
        on_written: called with the bytes of each part that was written.

    Returns:
        The seal that was written.

    Raises:
        CheckpointError: there is something at `path` already.
        RunError: a leaf has other sums, or writing failed; nothing of it is left.
    """
    _check_vacant(path)
    draft = unnamed(path)
    described: dict[str, StoredLeaf] = {}
    owner = None
    new_folders = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        owner = Owner(draft)
        _discard(path)
        for part in parts:
            described |= {name: _described(leaf) for name, leaf in part.items()}
            _check_sums(path, described, part, sums or {})
            num_bytes = _write(draft, {name: leaf for name, leaf in part.items() if getattr(leaf, "size", 1)})
            del part
            give_memory_back()
            on_written(num_bytes)
        owner.check()
        seal = _finish(draft, described, like)
        draft.rename(path)
        flush(str(path.parent))
    except BaseException as error:
        if owner is not None:
            _discard(path)
        if not isinstance(error, Exception) or isinstance(error, CheckpointError | RunError):
            raise
        raise write_failed(path, reason(error)) from error
    finally:
        if owner is not None:
            owner.release()
        if not path.exists():
            _remove_empty(new_folders)
    return seal


def _check_vacant(path: Path) -> None:
    if path.exists():
        raise CheckpointError(
            "The checkpoint cannot be written.",
            where=str(path),
            why="there is something at that path already.",
            do="give another path; nothing is ever overwritten.",
        )


def _discard(path: Path) -> None:
    remove_unnamed(path)
    parts = unnamed(path).name + PARTS_SUFFIX
    for name in (parts, parts + storage.UNCOMMITTED_SUFFIX):
        shutil.rmtree(path.with_name(name), ignore_errors=True)


def _remove_empty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):  # another program has put something there
        for folder in folders:
            folder.rmdir()


def _described(leaf: Any) -> StoredLeaf:
    stored = _seal.describe(leaf)
    sums = LeafSums(leaf).total() if stored.is_array and leaf.size else None
    return _seal.with_facts(stored, sums=sums, chunk=None)


def _check_sums(path: Path, described: Mapping[str, StoredLeaf], part: Mapping[str, Any], sums: Any) -> None:
    bad = [name for name in part if name in sums and described[name].sums not in (None, sums[name])]
    if bad:
        raise RunError(
            "The checkpoint could not be written.",
            where=[str(path), *(f"{name}  {described[name].shape} {described[name].dtype}" for name in bad)],
            why="the values that were read are not those that were saved: their sums differ.",
            do="take another checkpoint; what is damaged in the one that was read: jshard ckpt verify PATH",
        )


def _write(draft: Path, part: Mapping[str, Any]) -> int:
    from orbax.checkpoint import v1 as ocp  # slow to import, and few programs need it

    with quiet(), storage.saving_options(ocp, part, lambda: None, _TIMEOUT_S):
        ocp.partial.save(str(draft), _leaves.nested(part))
    return sum(map(storage.local_bytes, part.values()))


def _finish(draft: Path, described: Mapping[str, StoredLeaf], like: Seal) -> Seal:
    """Joins the parts, and seals what they make up."""
    from orbax.checkpoint import v1 as ocp

    with quiet():
        ocp.partial.finalize(str(draft))
    files = _seal.files_of(draft)
    storage.check_whole(draft, described, files)
    chunks = _seal.chunks_of(draft)
    seal = Seal(
        leaves={
            name: _seal.with_facts(leaf, sums=leaf.sums, chunk=chunks.get(name)) for name, leaf in described.items()
        },
        files=files,
        step=like.step,
        saved_at=like.saved_at,
        mesh=like.mesh,
        metrics=like.metrics,
        versions=versions(_seal.PACKAGES),
    )
    _seal.write(draft, seal)
    keep_on_disk(draft)
    return seal
