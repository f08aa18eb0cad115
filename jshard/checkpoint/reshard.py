"""Rewrites checkpoints with pieces that suit another mesh, and imports those of other libraries; part by part."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._compat import versions
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _seal
from jshard.checkpoint import storage
from jshard.checkpoint.barrier import write_failed
from jshard.checkpoint.boxes import CheckpointSource
from jshard.checkpoint.errors import CheckpointError, quiet, reason
from jshard.checkpoint.formats.source import Box, Source, bounds
from jshard.checkpoint.manifest import Seal, StoredLeaf
from jshard.checkpoint.owner import Owner
from jshard.checkpoint.saving import flush, give_memory_back, keep_on_disk, remove_unnamed, unnamed
from jshard.checkpoint.sums import LeafSums, Sums
from jshard.errors import RunError

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


# Rewrites checkpoints with pieces that suit another mesh, and imports those of other libraries; leaf by leaf.

_PART_BYTES = 256 << 20
_KEY_KINDS = ("threefry2x32", "rbg", "unsafe_rbg")

Specs = Mapping[str, PartitionSpec]
OnWritten = Callable[[int], object]


def reshard(
    path: Path, out: Path, mesh: Mesh, *, specs: Specs | None = None, on_written: OnWritten = lambda num_bytes: None
) -> Seal:
    """Writes a checkpoint anew, cut as a mesh would save it.

    Memory holds 256 MiB of it at a time, or its largest leaf, two to three times over.

    Args:
        path: a checkpoint.
        out: a folder that does not exist yet.
        mesh: of as many devices as are to read it; those of a CPU will do.
        specs: how leaves are to be sharded, by path; others are as they were saved, as far as the mesh allows.
        on_written: called with the bytes of each part that was written.

    Returns:
        What the new checkpoint says of itself.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or there is something at `out`.
        RunError: the checkpoint is damaged, or writing failed; nothing is left at `out`.
    """
    source = CheckpointSource(path)
    _leaves.check_paths(source.opened.leaves)
    seal = source.seal or Seal(leaves={}, files={})
    stored = source.opened.leaves
    layout = {name: (specs or {}).get(name, spec_for(stored[name], mesh)) for name in source.leaves}
    keys = {name: leaf.key for name, leaf in stored.items() if leaf.key is not None}
    return save_parts(
        out,
        _parts(source, source.values(), layout, mesh, keys),
        like=dataclasses.replace(seal, mesh=dict(mesh.shape)),
        sums={name: leaf.sums for name, leaf in stored.items() if leaf.sums is not None},
        on_written=on_written,
    )


def import_leaves(
    source: Source,
    out: Path,
    mesh: Mesh,
    *,
    paths: Mapping[str, str],
    values: Mapping[str, Any] | None = None,
    step: int | None = None,
    on_written: OnWritten = lambda num_bytes: None,
) -> Seal:
    """Writes the arrays of a source as a checkpoint of ours; memory as of `reshard`.

    Args:
        source: what is imported.
        out: a folder that does not exist yet.
        mesh: as of `reshard`.
        paths: the names of its arrays, by the paths that they get.
        values: numbers and texts to write beside them, by path.
        step: number of steps that are done.
        on_written: called with the bytes of each part that was written.

    Returns:
        What the new checkpoint says of itself.

    Raises:
        CheckpointError: there is something at `out`, or some paths cannot be stored.
        RunError: reading or writing failed; nothing is left at `out`.
    """
    _leaves.check_paths([*paths, *(values or {})])
    renamed = _Renamed(source, paths)
    layout = {
        path: spec_for(StoredLeaf(shape=leaf.shape, dtype=leaf.dtype.name), mesh)
        for path, leaf in renamed.leaves.items()
    }
    seal = Seal(leaves={}, files={}, step=step, saved_at=time.time(), mesh=dict(mesh.shape))
    return save_parts(out, _parts(renamed, values or {}, layout, mesh, {}), like=seal, on_written=on_written)


def spec_for(leaf: StoredLeaf, mesh: Mesh) -> PartitionSpec:
    """How a leaf is to be sharded: as it was saved if the mesh can, else its first dim that divides, over `fsdp`."""
    sizes = dict(mesh.shape)
    stored = (
        [tuple(axis for axis in dim.split("*") if axis != "-") for dim in leaf.spec.split(", ")] if leaf.spec else []
    )
    if stored and all(axis in sizes for axes in stored for axis in axes):
        pieces = [math.prod(sizes[axis] for axis in axes) for axes in stored]
        if all(size % count == 0 for size, count in zip(leaf.shape, pieces, strict=False)):
            return PartitionSpec(*(axes or None for axes in stored))
    degree = sizes.get("fsdp", 1)
    dim = next((dim for dim, size in enumerate(leaf.shape) if size and size % degree == 0), None)
    if dim is None or leaf.key is not None or (leaf.spec is not None and not any(stored)):
        return PartitionSpec()  # it was replicated
    return PartitionSpec(*(None,) * dim, "fsdp")


class _Renamed:
    """Arrays of others under our paths."""

    def __init__(self, source: Source, paths: Mapping[str, str]) -> None:
        self._source, self._paths = source, paths
        self.leaves = {path: source.leaves[name] for path, name in paths.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        return self._source.read(self._paths[name], box)


def _parts(
    source: Source, values: Mapping[str, Any], layout: Specs, mesh: Mesh, keys: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The leaves in parts of some hundred MiB: values first, then the arrays, each on devices as its spec says."""
    part, part_bytes = dict(values), 0
    for name, leaf in source.leaves.items():
        if part_bytes + leaf.nbytes > _PART_BYTES and part_bytes:
            yield part
            part, part_bytes = {}, 0
        part[name] = _array(source, name, NamedSharding(_part_of(mesh, layout[name]), layout[name]))
        part_bytes += leaf.nbytes
        if name in keys:
            part[name] = _as_key(part[name], keys[name])
    yield part


def _array(source: Source, name: str, sharding: NamedSharding) -> jax.Array | np.ndarray:
    leaf = source.leaves[name]
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:  # 64 bits, which jax would cut
        return source.read(name, tuple(slice(0, size) for size in leaf.shape))

    def read(index: Box | None) -> np.ndarray:
        return source.read(name, tuple(slice(*limit) for limit in bounds(index or (), leaf.shape)))

    return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=leaf.dtype)


def _part_of(mesh: Mesh, spec: PartitionSpec) -> Mesh:
    """The devices that hold different pieces of a leaf: copies of pieces need not be held."""
    used = {axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,))}
    corner = tuple(slice(None) if axis in used else slice(0, 1) for axis in mesh.axis_names)
    return Mesh(mesh.devices[corner], mesh.axis_names)


def _as_key(numbers: jax.Array, kind: str) -> jax.Array:
    """The random key that some numbers are."""
    for implementation in _KEY_KINDS:
        key = jax.random.wrap_key_data(jnp.asarray(numbers), impl=implementation)
        if str(key.dtype) == f"key<{kind}>":
            return key
    raise RunError(
        "A random key of the checkpoint is of an unknown kind.",
        where=f"key<{kind}>",
        why=f"known are {', '.join(_KEY_KINDS)}.",
        do="rewrite the checkpoint by the program that saved it.",
    )
