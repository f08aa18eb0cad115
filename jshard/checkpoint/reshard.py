"""Rewrites checkpoints with pieces that suit another mesh, and imports those of other libraries; leaf by leaf.

What is on disk is logical, and any mesh restores it. What differs is how much is read: a device that wants some rows
reads the whole pieces (chunks) they lie in, and pieces are cut along the dims that were sharded when it was saved.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._errors import RunError
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.boxes import CheckpointSource
from jshard.checkpoint.formats.source import Box, Source, bounds
from jshard.checkpoint.parts import save_parts
from jshard.checkpoint.seal import Seal, StoredLeaf

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
