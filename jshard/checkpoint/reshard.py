"""Rewrites checkpoints with pieces that match another mesh, and imports those of other libraries, piece by piece."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import ArraySource, Box
from jshard.checkpoint.layout import Piece, device_boxes, laid_out
from jshard.checkpoint.manifest import Manifest, StoredLeaf, Sums, add, box_sums
from jshard.checkpoint.matching import stacks
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.saving import TIMEOUT_S, SaveOperation
from jshard.checkpoint.storage import remove_draft
from jshard.errors import RunError, printable

Specs = Mapping[str, PartitionSpec]
OnWritten = Callable[[int], object]


def reshard(
    path: Place, out: Path, mesh: Mesh, *, specs: Specs | None = None, on_written: OnWritten = lambda num_bytes: None
) -> Manifest:
    """Rewrites a checkpoint, cut as a mesh would save it.

    Memory holds a few of its pieces at a time.
    """
    source = own_checkpoint(path)
    like = source.manifest or Manifest(leaves={})
    return _Rewriting(source, out, mesh, specs or {}, like=like, on_written=on_written).run()


def import_leaves(source: Opened, out: Path, mesh: Mesh, *, on_written: OnWritten = lambda num_bytes: None) -> Manifest:
    """Writes a source as a jshard checkpoint; arguments, memory and errors are those of `reshard`."""
    like = Manifest(leaves={}, saved_at=time.time())
    return _Rewriting(source, out, mesh, {}, like=like, on_written=on_written).run()


def spec_for(leaf: StoredLeaf, mesh: Mesh) -> PartitionSpec:
    """The sharding of a leaf: as saved if the mesh allows it, else over `fsdp` on its first dim that divides."""
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


class _Boxes:
    """Boxes of a source that are read when written, and checksummed if the source has checksums to compare with."""

    def __init__(self, source: Opened, layout: Specs, mesh: Mesh, on_written: OnWritten) -> None:
        self._source, self._on_written, self.is_stopped = source, on_written, False
        self._sums: dict[str, list[Sums]] = collections.defaultdict(list)
        pieces, self.leaves = [], dict(source.leaves)
        for number, (path, leaf) in enumerate(source.leaves.items()):
            if not leaf.is_array:
                continue
            sharding = NamedSharding(mesh, layout[path])
            boxes = dict.fromkeys(device_boxes(sharding, leaf.shape).values())
            pieces += [Piece(number, path, np.dtype(leaf.dtype), box) for box in boxes]
            chunk = sharding.shard_shape(leaf.shape)
            spec = _manifest.spec_text(layout[path])
            self.leaves[path] = dataclasses.replace(leaf, spec=spec, chunk=chunk, sums=None)
        self.files = tuple(laid_out(pieces))

    def values(self, file: int, number: int) -> np.ndarray:
        """The values of a piece."""
        if self.is_stopped:
            raise InterruptedError("it was stopped")
        piece = self.files[file].pieces[number]
        box = tuple(slice(*limit) for limit in piece.box)
        values = self._source.read(piece.path, box)
        if (leaf := self._source.leaves[piece.path]).sums is not None:
            self._sums[piece.path].append(box_sums(values, box, leaf.shape))
        self._on_written(values.nbytes)
        return np.ascontiguousarray(values)

    def check(self, path: Path) -> None:
        """Raises `RunError` if a leaf differs from its checksum, where the source has checksums."""
        if self.is_stopped:
            raise InterruptedError("it was stopped")
        leaves = self._source.leaves
        bad = [name for name, sums in self._sums.items() if add(sums) != leaves[name].sums]
        if bad:
            raise RunError(
                "The checkpoint could not be written.",
                where=[str(path), *(f"{name}  {leaves[name].shape} {leaves[name].dtype}" for name in bad)],
                why="the values read differ from the saved ones: their checksums do not match.",
                do="use another checkpoint; to list the damage in the source: jshard ckpt verify PATH",
            )


class _Rewriting(SaveOperation):
    """A save of a source whose pieces are read when they are written."""

    def __init__(
        self, source: Opened, path: Path, mesh: Mesh, specs: Specs, *, like: Manifest, on_written: OnWritten
    ) -> None:
        layout = {name: specs.get(name, spec_for(leaf, mesh)) for name, leaf in source.arrays.items()}
        self._boxes, self._source, self._of = _Boxes(source, layout, mesh, on_written), source, mesh
        self._out, self._new_folders = path, [folder for folder in path.parents if not folder.exists()]
        check = lambda: self._boxes.check(path)
        super().__init__(path, None, step=like.step, metrics=like.metrics, timeout_s=TIMEOUT_S, check=check)
        self._saved_at = like.saved_at

    def _checked(self, state: Any, prepare: Callable[[], None]) -> tuple[dict[str, Any], Any]:
        self._values = self._source.values()
        self._described = {name: leaf for name, leaf in self._boxes.leaves.items() if leaf.is_array}
        self._described |= {name: _manifest.describe(value) for name, value in self._values.items()}
        self._mesh = {"axes": dict(self._of.shape), "processes": []}
        self._prepare(prepare)
        return {}, {}

    def _copy(self, leaves: dict[str, Any]) -> Any:
        return self._boxes

    def run(self) -> Manifest:
        """Runs the save; if it fails, nothing is left behind."""
        try:
            self.finish()
        except BaseException:  # on an interrupt, threads may still be writing
            self._boxes.is_stopped = True
            with contextlib.suppress(Exception):
                self._wait()
            remove_draft(self._out)
            with contextlib.suppress(OSError):  # another program may have put something there
                for folder in self._new_folders:
                    folder.rmdir()
            raise
        return self.manifest


# A part of a checkpoint as a source, such as only the model, layer by layer.


class Part(Opened):
    """Arrays of a source under other names; a layer of a stack may be one."""

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
    """The arrays below a path, relative to it; random keys and draw counts are left out."""
    begin, arrays = f"{part.strip('/')}/" if part else "", source.arrays
    stored = {
        path.removeprefix(begin): path
        for path, leaf in arrays.items()
        if path.startswith(begin) and "/rngs/" not in path and leaf.key is None
    }
    if not stored:
        raise CheckpointError(
            "That part of the checkpoint has no arrays.",
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
