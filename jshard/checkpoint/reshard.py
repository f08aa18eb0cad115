"""Rewrites checkpoints with pieces that match another mesh, and imports those of other libraries, piece by piece."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._types import PyTree
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.ownership import remove_draft
from jshard.checkpoint.packed.layout import FileLayout, Piece, device_boxes, lay_out_files, slices_of
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.saving import TIMEOUT_S, SaveOperation
from jshard.checkpoint.state.leaf_sums import Sums, add, box_sums
from jshard.checkpoint.state.leaf_values import StoredValue
from jshard.checkpoint.state.local_arrays import CopyFacts
from jshard.errors import RunError

Specs = Mapping[str, PartitionSpec]
OnWritten = Callable[[int], object]
"""Called with the bytes of each piece when it is about to be written."""


def reshard(
    path: Place, out: Path, mesh: Mesh, *, specs: Specs | None = None, on_written: OnWritten = lambda num_bytes: None
) -> Manifest:
    """Rewrites a checkpoint, cut as a mesh would save it.

    Memory holds a few of its pieces at a time.
    """
    source = own_checkpoint(path)
    # Of a checkpoint by plain Orbax there is no step, and no time of the save.
    origin = source.manifest or Manifest(leaves={})
    return _RewriteOperation(source, out, mesh, specs or {}, origin=origin, on_written=on_written).run()


def import_leaves(source: Opened, out: Path, mesh: Mesh, *, on_written: OnWritten = lambda num_bytes: None) -> Manifest:
    """Writes a source as a jshard checkpoint; arguments, memory and errors are those of `reshard`."""
    # The source does not say when it was saved.
    origin = Manifest(leaves={}, saved_at=time.time())
    return _RewriteOperation(source, out, mesh, {}, origin=origin, on_written=on_written).run()


def spec_for(leaf: StoredLeaf, mesh: Mesh) -> PartitionSpec:
    """Returns a leaf's sharding: as saved if the mesh allows it, else over `fsdp` on its first dim that divides."""
    saved_axes = _saved_axes(leaf)
    if saved_axes and _is_possible(saved_axes, leaf.shape, mesh):
        return PartitionSpec(*(axes or None for axes in saved_axes))
    was_replicated = leaf.spec is not None and not any(saved_axes)
    if was_replicated or leaf.key is not None:
        return PartitionSpec()
    # No sharding is known, as of another library's arrays, or the mesh does not allow it.
    degree = mesh.shape.get("fsdp", 1)
    for dim, size in enumerate(leaf.shape):
        if size and size % degree == 0:
            return PartitionSpec(*[None] * dim, "fsdp")
    return PartitionSpec()


def _saved_axes(leaf: StoredLeaf) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dim when a leaf was saved, the inverse of `manifest.spec_text`; none if unknown."""
    if not leaf.spec:
        return []
    axes_by_dim: list[tuple[str, ...]] = []
    for dim in leaf.spec.split(", "):
        # A dim that is not sharded, as `spec_text` writes it.
        axes_by_dim.append(() if dim == "-" else tuple(dim.split("*")))
    return axes_by_dim


def _is_possible(axes_by_dim: Sequence[tuple[str, ...]], shape: Sequence[int], mesh: Mesh) -> bool:
    """Returns whether a mesh has these axes, and their degrees divide the dims."""
    for axes in axes_by_dim:
        if not mesh.shape.keys() >= set(axes):
            return False
    # A spec may name fewer dims than the leaf has; the others are not sharded.
    for size, axes in zip(shape, axes_by_dim, strict=False):
        if size % math.prod(mesh.shape[axis] for axis in axes):
            return False
    return True


class _SourcePieces:
    """Pieces of a source that are read when written, and checksummed if the source has checksums to compare with.

    Attributes:
        leaves: the leaves as they are written.
        files: the layouts of the files.
        is_stopped: whether to refuse further reads, so that threads that still write come to an end.
    """

    def __init__(self, source: Opened, specs: Specs, mesh: Mesh, on_written: OnWritten) -> None:
        self._source = source
        self._on_written = on_written
        self._sums: dict[str, list[Sums]] = collections.defaultdict(list)  # of the pieces read, by leaf
        self.is_stopped = False
        self.leaves: dict[str, StoredLeaf] = dict(source.leaves)
        pieces: list[Piece] = []
        for number, (path, leaf) in enumerate(source.leaves.items()):
            if not leaf.is_array:
                continue
            sharding = NamedSharding(mesh, specs[path])
            boxes = dict.fromkeys(device_boxes(sharding, leaf.shape).values())  # without replicas, in order
            for box in boxes:
                pieces.append(Piece(number, path, np.dtype(leaf.dtype), box))
            chunk = sharding.shard_shape(leaf.shape)
            spec = _manifest.spec_text(specs[path])
            # Without sums: packed files have checksums of their own.
            self.leaves[path] = dataclasses.replace(leaf, spec=spec, chunk=chunk, sums=None)
        self.files: Sequence[FileLayout] = tuple(lay_out_files(pieces))

    def values(self, file: int, number: int) -> np.ndarray:
        """Reads the values of a piece."""
        self._raise_if_stopped()
        piece = self.files[file].pieces[number]
        box = slices_of(piece.box)
        values = self._source.read(piece.path, box)
        leaf = self._source.leaves[piece.path]
        if leaf.sums is not None:
            self._sums[piece.path].append(box_sums(values, box, leaf.shape))
        self._on_written(values.nbytes)
        return np.ascontiguousarray(values)

    def check(self, path: Path) -> None:
        """Raises `RunError` if a leaf differs from its checksum, where the source has checksums."""
        self._raise_if_stopped()
        leaves = self._source.leaves
        # The values are written by now, but the manifest is not: with an error, there is no checkpoint.
        bad = []
        for name, sums in self._sums.items():
            if add(sums) != leaves[name].sums:
                bad.append(f"{name}  {leaves[name].shape} {leaves[name].dtype}")
        if bad:
            raise RunError(
                "The checkpoint could not be written.",
                where=[str(path), *bad],
                why="the values read differ from the saved ones: their checksums do not match.",
                do="use another checkpoint; to list the damage in the source: jshard ckpt verify PATH",
            )

    def _raise_if_stopped(self) -> None:
        if self.is_stopped:
            raise InterruptedError("it was stopped")


class _RewriteOperation(SaveOperation):
    """A save of a source whose pieces are read when they are written."""

    def __init__(
        self, source: Opened, path: Path, mesh: Mesh, specs: Specs, *, origin: Manifest, on_written: OnWritten
    ) -> None:
        # The constructor of a save runs the steps below, which use these.
        all_specs = {}
        for name, leaf in source.arrays.items():
            all_specs[name] = specs.get(name, spec_for(leaf, mesh))
        self._pieces = _SourcePieces(source, all_specs, mesh, on_written)
        self._source = source
        self._target_mesh = mesh
        self._out = path
        # Those that this save will make, the nearest first: to be removed if it fails.
        self._new_folders = [folder for folder in path.parents if not folder.exists()]
        super().__init__(
            path,
            None,
            step=origin.step,
            metrics=origin.metrics,
            timeout_s=TIMEOUT_S,
            check=lambda: self._pieces.check(path),
        )
        self._saved_at = origin.saved_at  # when the state was saved, and not this copy of it

    def _checked(
        self, state: PyTree, prepare: Callable[[], None]
    ) -> tuple[dict[str, StoredValue], dict[str, CopyFacts]]:
        self._values = self._source.values()
        # In the order of the source, whatever kind each leaf is: a piece has the number of its leaf in the manifest.
        self._described = {}
        for name, leaf in self._pieces.leaves.items():
            self._described[name] = leaf if leaf.is_array else _manifest.describe(self._values[name])
        self._mesh = {"axes": dict(self._target_mesh.shape), "processes": []}
        self._prepare(prepare)
        return {}, {}

    def _copy(self, leaves: dict[str, StoredValue]) -> _SourcePieces:
        return self._pieces

    def run(self) -> Manifest:
        """Runs the save; if it fails, nothing is left behind."""
        try:
            self.finish()
        except BaseException:  # on an interrupt, threads may still be writing
            self._pieces.is_stopped = True
            # The threads end with the error of `_raise_if_stopped`; only then the draft can be removed for good.
            with contextlib.suppress(Exception):
                self._wait()
            remove_draft(self._out)
            with contextlib.suppress(OSError):  # another program may have put something there
                for folder in self._new_folders:
                    folder.rmdir()
            raise
        return self.manifest
