"""Rewrites checkpoints with pieces that suit another mesh, and imports those of other libraries; part by part."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import storage
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.draft import (
    UNCOMMITTED_SUFFIX,
    Owner,
    in_four_parts,
    remove_unnamed,
    unnamed,
)
from jshard.checkpoint.errors import CheckpointError, quiet
from jshard.checkpoint.formats.source import ArraySource, Box, bounds, whole
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.matching import stacks
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.saving import complete, give_memory_back
from jshard.checkpoint.sums import LeafSums, Sums
from jshard.errors import RunError, printable

_PARTS_SUFFIX = ".partial_save"  # Orbax's, until the parts are joined
_TIMEOUT_S = 1200.0
_PART_BYTES = 256 << 20
_KEY_KINDS = ("threefry2x32", "rbg", "unsafe_rbg")

Specs = Mapping[str, PartitionSpec]
OnWritten = Callable[[int], object]


def reshard(
    path: Place, out: Path, mesh: Mesh, *, specs: Specs | None = None, on_written: OnWritten = lambda num_bytes: None
) -> Manifest:
    """Writes a checkpoint anew, cut as a mesh would save it.

    Memory holds 256 MiB of it at a time, or its largest leaf, two to three times over.

    Args:
        path: a checkpoint.
        out: a folder that does not exist yet.
        mesh: of as many devices as are to read it; those of a CPU will do.
        specs: how leaves are to be sharded, by path; others are as they were saved, as far as the mesh allows.
        on_written: called with the bytes of each part that was written.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or there is something at `out`.
        RunError: the checkpoint is damaged, or writing failed; nothing is left at `out`.
    """
    source = own_checkpoint(path)
    manifest = source.manifest or Manifest(leaves={}, files={})
    sums = {name: leaf.sums for name, leaf in source.leaves.items() if leaf.sums is not None}
    like = dataclasses.replace(manifest, mesh=dict(mesh.shape))
    return _rewritten(source, out, mesh, specs or {}, like=like, sums=sums, on_written=on_written)


def import_leaves(source: Opened, out: Path, mesh: Mesh, *, on_written: OnWritten = lambda num_bytes: None) -> Manifest:
    """Writes what a source holds as a checkpoint of ours; arguments, memory and errors as of `reshard`."""
    manifest = Manifest(leaves={}, files={}, saved_at=time.time(), mesh=dict(mesh.shape))
    return _rewritten(source, out, mesh, {}, like=manifest, sums={}, on_written=on_written)


def _rewritten(source: Opened, out: Path, mesh: Mesh, specs: Specs, **options: Any) -> Manifest:
    arrays, values = source.arrays, source.values()
    _leaves.check_paths([*arrays, *values])
    layout = {name: specs.get(name, spec_for(leaf, mesh)) for name, leaf in arrays.items()}
    return _save_parts(out, _parts(source, values, layout, mesh), **options)


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


def _parts(source: Opened, values: dict[str, Any], layout: Specs, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """The leaves in parts of some hundred MiB: values first, then the arrays, each on devices as its spec says."""
    part, part_bytes = values, 0
    for name, spec in layout.items():
        leaf = source.leaves[name]
        if part_bytes + leaf.nbytes > _PART_BYTES and part_bytes:
            yield part
            part, part_bytes = {}, 0
        array = _array(source, name, NamedSharding(_part_of_mesh(mesh, spec), spec))
        part[name] = array if leaf.key is None else _as_key(array, leaf.key)
        part_bytes += leaf.nbytes
    yield part


def _array(source: Opened, name: str, sharding: NamedSharding) -> Any:
    leaf = source.leaves[name]
    dtype = np.dtype(leaf.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # 64 bits, which jax would cut
        return source.read(name, whole(leaf))

    def read(index: Box | None) -> np.ndarray:
        return source.read(name, tuple(slice(*limit) for limit in bounds(index or (), leaf.shape)))

    return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=dtype)


def _part_of_mesh(mesh: Mesh, spec: PartitionSpec) -> Mesh:
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


# A checkpoint that one process writes part by part; each part is let go before the next is asked for.


def _save_parts(
    path: Path, parts: Iterable[Mapping[str, Any]], *, like: Manifest, sums: Mapping[str, Sums], on_written: OnWritten
) -> Manifest:
    """Writes leaves by path, all values of Python in one part; it is complete and under its name when this returns.

    `like` has the step, the time, the metrics and the mesh for the manifest; a leaf that does not have its `sums` was
    damaged where it came from.
    """
    if path.exists():
        raise CheckpointError(
            "The checkpoint cannot be written.",
            where=str(path),
            why="there is something at that path already.",
            do="give another path; nothing is ever overwritten.",
        )
    from orbax.checkpoint import v1 as ocp  # slow to import, and few programs need it

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
            _check_sums(path, described, part, sums)
            full = {name: leaf for name, leaf in part.items() if getattr(leaf, "size", 1)}
            with quiet(), storage.saving_options(ocp, full, lambda: None, _TIMEOUT_S):
                ocp.partial.save(str(draft), _leaves.nested(full))
            num_bytes = sum(map(storage.local_bytes, full.values()))
            del part, full
            give_memory_back()
            on_written(num_bytes)
        owner.check()
        with quiet():
            ocp.partial.finalize(str(draft))
        facts = {"step": like.step, "saved_at": like.saved_at, "mesh": like.mesh, "metrics": like.metrics}
        manifest = complete(path, described, **facts)
    except BaseException as error:
        if owner is not None:
            _discard(path)
        if not isinstance(error, Exception) or isinstance(error, CheckpointError | RunError):
            raise
        raise in_four_parts(path, error) from error
    finally:
        if owner is not None:
            owner.release()
        if not path.exists():
            with contextlib.suppress(OSError):  # another program has put something there
                for folder in new_folders:
                    folder.rmdir()
    return manifest


def _discard(path: Path) -> None:
    remove_unnamed(path)
    parts = unnamed(path).name + _PARTS_SUFFIX
    for name in (parts, parts + UNCOMMITTED_SUFFIX):
        shutil.rmtree(path.with_name(name), ignore_errors=True)


def _described(leaf: Any) -> StoredLeaf:
    stored = _manifest.describe(leaf)
    sums = LeafSums(leaf).total() if stored.is_array and leaf.size else None
    return dataclasses.replace(stored, sums=sums)


def _check_sums(path: Path, described: Mapping[str, StoredLeaf], part: Mapping[str, Any], sums: Any) -> None:
    bad = [name for name in part if name in sums and described[name].sums not in (None, sums[name])]
    if bad:
        raise RunError(
            "The checkpoint could not be written.",
            where=[str(path), *(f"{name}  {described[name].shape} {described[name].dtype}" for name in bad)],
            why="the values that were read are not those that were saved: their sums differ.",
            do="take another checkpoint; what is damaged in the one that was read: jshard ckpt verify PATH",
        )


# Some leaves of a checkpoint as a source of their own, such as the model alone, layer by layer.


class Part(Opened):
    """Arrays of a source under other names; a layer of a stack may be one.

    Args:
        source: what they are read from.
        places: the name there, and of one layer its number, by the name here.
        left_over: arrays, and layers of stacks, that are not among them, a line each.
    """

    def __init__(
        self, source: ArraySource, places: Mapping[str, tuple[str, int | None]], left_over: Collection[str] = ()
    ) -> None:
        self._source, self._places, self.left_over = source, places, tuple(left_over)
        self.leaves = {name: self._leaf(*place) for name, place in places.items()}

    def _leaf(self, path: str, layer: int | None) -> StoredLeaf:
        leaf = dataclasses.replace(self._source.leaves[path], spec=None)
        return leaf if layer is None else dataclasses.replace(leaf, shape=leaf.shape[1:])

    def values(self) -> dict[str, Any]:
        """None."""
        return {}

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        path, layer = self._places[name]
        if layer is None:
            return self._source.read(path, box)
        return self._source.read(path, (slice(layer, layer + 1), *box))[0]


def part_of(source: Opened, part: str, *, names: Collection[str] | None = None) -> Part:
    """The arrays below a path, without it; random keys and counts of draws are left out.

    Args:
        source: a checkpoint.
        part: the path, such as "model"; empty for all.
        names: those that are wanted, layer by layer: `blocks/3/mlp/kernel` is then found in a stack
            `blocks/mlp/kernel`, too. Those that are stored nowhere are left out. All by default, as they are stored.

    Raises:
        CheckpointError: there is nothing below it.
    """
    begin, arrays = f"{part.strip('/')}/" if part else "", source.arrays
    stored = {
        path.removeprefix(begin): path
        for path, leaf in arrays.items()
        if path.startswith(begin) and "/rngs/" not in path and leaf.key is None
    }
    if not stored:
        raise CheckpointError(
            "There are no arrays in that part of the checkpoint.",
            where=f"{source.path}: {part}",
            why=f"its parts are {', '.join(sorted({printable(path.split('/')[0]) for path in arrays}))}.",
            do=f"jshard ckpt inspect {source.path} --depth 1",
        )
    if names is None:
        return Part(source, {name: (path, None) for name, path in stored.items()})
    found: dict[str, tuple[str, int | None] | None] = {}
    for name in names:
        layers_of = ((stored[stack], layer) for stack, layer in stacks(name) if stack in stored)
        layer_of = next((place for place in layers_of if place[1] < arrays[place[0]].shape[0]), None)
        found[name] = (stored[name], None) if name in stored else layer_of
    places = {name: place for name, place in found.items() if place is not None}
    layers = collections.defaultdict(set)
    for path, layer in places.values():
        layers[path].add(layer)
    left = [f"{path}  {arrays[path].shape}" for path in stored.values() if path not in layers]
    for path, used in layers.items():
        if None not in used and (gone := sorted(set(range(arrays[path].shape[0])) - used)):
            left.append(f"{path}  {arrays[path].shape}: layers {', '.join(map(str, gone))}")
    return Part(source, places, left)
