"""An open checkpoint: its leaves by path, read whole onto devices, or box by box. Here is the packed format."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import Sharding

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketError, BucketFolder, BucketPath, Place
from jshard.checkpoint.dealing import HEAD_BYTES, Together
from jshard.checkpoint.errors import DamagedError, damaged, reason, unreadable
from jshard.checkpoint.file_io import HOST_MEMORY, ChangedError, FileSource, LocalFolder, MappedBoxes, Read, Slab
from jshard.checkpoint.formats.source import Box, bounds
from jshard.checkpoint.layout import Limits, limits, size_of
from jshard.checkpoint.manifest import FOLDER, Manifest, StoredLeaf
from jshard.checkpoint.matching import own_mesh
from jshard.checkpoint.pieces import PackedFile, Pieces, Want, check_pieces
from jshard.errors import printable


class Opened:
    """An open checkpoint."""

    path: Place  # its location
    manifest: Manifest | None = None  # its manifest; None if jshard did not write it
    leaves: Mapping[str, StoredLeaf]  # its leaves by path; a random key is its numbers
    notes: Sequence[str] = ()  # remarks for the reader
    # By path, the names of another library's arrays that a leaf would be made of, and that are not there.
    absent: Mapping[str, Sequence[str]] = types.MappingProxyType({})

    @property
    def arrays(self) -> dict[str, StoredLeaf]:
        """The leaves that are arrays."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.is_array}

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """The leaves, with the types of the values at these stored paths; other values may be unread."""
        raise NotImplementedError

    def described(self) -> Mapping[str, StoredLeaf]:
        """The leaves, with the types of all values, which may have to be read."""
        return self.leaves

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Reads some leaves whole; raises `RunError` if one is damaged or cannot be read."""
        raise NotImplementedError

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, as a new array; thread-safe. It raises as `load` does."""
        raise NotImplementedError

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """The number of elements read for some boxes of an array; whole chunks are read for each box."""
        chunk, count = leaf.chunk or leaf.shape, 0
        for box in boxes:
            read = [
                (start // max(step, 1) * step, min(-(-stop // max(step, 1)) * step, size))
                for (start, stop), step, size in zip(box, chunk, leaf.shape, strict=True)
            ]
            count += size_of(tuple(read)) if size_of(box) else 0
        return count

    def values(self) -> dict[str, Any]:
        """The leaves that are Python numbers or strings, by path."""
        raise NotImplementedError

    def boxes(self, name: str, budget_bytes: int) -> Iterator[Box]:
        """Boxes of at most this many bytes that make up an array."""
        leaf = self.leaves[name]
        return cut(leaf.shape, np.dtype(leaf.dtype).itemsize, budget_bytes)


@functools.lru_cache(maxsize=4096)
def held_boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Limits, ...]:
    """The boxes of an array that this process holds, each once."""
    found = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(limits(index or (), shape) for index in found))


def boxes_of(leaf: StoredLeaf, like: Any) -> tuple[Limits, ...]:
    """The boxes of a leaf that this process will hold; a random key is read whole."""
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None or len(like.shape) != len(leaf.shape):
        return (tuple((0, size) for size in leaf.shape),)
    return held_boxes(like.sharding, tuple(like.shape))


def held_bytes(like: Any) -> int:
    """Bytes of the boxes of a leaf that this process will hold, each counted once."""
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None:
        return getattr(like, "nbytes", 0)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return 0
    shard = math.prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize
    return shard * len(held_boxes(like.sharding, tuple(like.shape)))


def cut(shape: Sequence[int], itemsize: int, budget_bytes: int) -> Iterator[Box]:
    """Cuts an array into boxes of at most this many bytes, along the first dim as far as possible, then the next."""
    if math.prod(shape) * itemsize <= max(budget_bytes, itemsize):
        yield tuple(slice(0, size) for size in shape)
        return
    step = max(1, budget_bytes // (math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], step):
        rows = min(step, shape[0] - start)
        for rest in cut(shape[1:], itemsize * rows, budget_bytes):
            yield slice(start, start + rows), *rest


BATCH_BYTES = 64 << 20  # of arrays that are read at a time


class PackedCheckpoint(Opened):
    """A packed checkpoint."""

    manifest: Manifest  # its manifest

    def __init__(self, path: Place, manifest: Manifest, source: FileSource, *, verify: bool = True) -> None:
        self.path, self.manifest, self.leaves, self._verify = path, manifest, manifest.leaves, verify
        self._source = source
        self._numbers = {name: number for number, name in enumerate(manifest.leaves)}

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The pieces of all leaves, by the number of the leaf in the manifest."""
        files = []
        leaves = self.leaves.values()
        shapes = [leaf.shape for leaf in leaves]
        itemsizes = [np.dtype(leaf.dtype).itemsize if leaf.is_array else 1 for leaf in leaves]
        for name, (size, checksum) in self.manifest.packed.items():
            place = self.path / FOLDER / name
            try:
                file = PackedFile.open(self._source, name, size)
                check_pieces(file.index, shapes, itemsizes)
            except (BucketError, DamagedError):  # `DamagedError` is a `ValueError`, too
                raise
            except (OSError, ValueError) as error:
                raise unreadable(place, reason(error)) from error
            if file.index.checksum != checksum:
                raise unreadable(place, "it belongs to another checkpoint than the manifest.")
            files.append(file)
        return Pieces(files, len(self._numbers))

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`."""
        return self.leaves

    def values(self) -> dict[str, Any]:
        """See `Opened.values`."""
        return dict(self.manifest.values)

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """See `Opened.touched`."""
        with self._named_errors():
            return self.pieces.touched(self._numbers[name], boxes, leaf.shape, np.dtype(leaf.dtype).itemsize)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        leaf, limits_ = self.leaves[name], bounds(box, self.leaves[name].shape)
        with self._named_errors():
            slab = Slab(1, [stop - start for start, stop in limits_], np.dtype(leaf.dtype))
            for each in self.pieces.reads(_wants(self._numbers[name], leaf, (limits_,), slab), verify=self._verify):
                each()
        return slab.boxes[0]

    def load(
        self, wanted: Mapping[str, Any], together: Together | None = None, *, mmap: bool = False
    ) -> dict[str, Any]:
        """See `Opened.load`; one batch is read while the previous one is copied to the devices."""
        arrays = self._in_order(wanted)
        found = {name: self.manifest.values[name] for name in wanted if name not in arrays}
        batches, pieces = list(_batches(arrays)), self.pieces if mmap else None
        load = lambda name: _Loading(arrays[name], self.leaves[name], self._numbers[name], pieces)
        if together is not None:
            facts = [(name, arrays[name].shape) for name in arrays]
            together.start(len(batches), xxhash.xxh3_64_hexdigest(repr((facts, self._verify)).encode()))
        with self._named_errors(), _Pipeline(self._source.threads, together) as pipeline:
            for names in batches:
                pipeline.make_room()
                batch = {name: load(name) for name in names}
                wants = [want for each in batch.values() for want in each.wants]
                found |= pipeline.put(batch, list(self.pieces.reads(wants, verify=self._verify)))
            found |= pipeline.put({}, [])
        if together is not None:
            together.close()
        return {name: found[name] for name in wanted}

    @property
    def can_be_mapped(self) -> bool:
        """Whether its files can be memory-mapped."""
        with self._named_errors():
            return all(file.mapped is not None for file in self.pieces.files)

    def _in_order(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays among some leaves, as stored in the files."""
        return {
            name: wanted[name] for name in sorted(wanted, key=self._numbers.__getitem__) if self.leaves[name].is_array
        }

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Adds the checkpoint and the leaves to an error about a file."""
        try:
            yield
        except ChangedError as error:
            leaves = {name: self.leaves[name] for name in self.leaves_in(error.name, error.start, error.stop)}
            lines = [f"{printable(name)}  {leaf.shape} {leaf.dtype}" for name, leaf in leaves.items()]
            raise damaged(
                self.path,
                [f"{FOLDER}/{error.name}", *lines],
                f"the values read differ from the saved ones: bytes {error.start} to {error.stop} of the "
                "file do not match their checksum.",
            ) from error
        except (BucketError, DamagedError):  # `DamagedError` is a `ValueError`, too
            raise
        except (OSError, ValueError, MemoryError) as error:  # a manifest may state any shape
            raise unreadable(self.path, reason(error)) from error

    def changed(self, on_read: Callable[[int], object]) -> Iterator[tuple[str | None, str, str]]:
        """Reads everything; yields the leaf, the file and the reason for everything that has changed."""
        for file in self.pieces.files:
            place = f"{FOLDER}/{file.name}"
            for start, stop in file.changed(on_read):
                why = f"bytes {start} to {stop} differ from the saved ones."
                yield from ((name, place, why) for name in self.leaves_in(file.name, start, stop) or [None])
        for name, number in self._numbers.items():
            leaf = self.leaves[name]
            if leaf.is_array and (count := self.pieces.num_missing(number, leaf.shape)):
                yield name, FOLDER, f"{count} of {math.prod(leaf.shape)} elements are missing from the files."

    def leaves_in(self, file: str, start: int, stop: int) -> list[str]:
        """The leaves that share a range of a file's bytes."""
        index, names = next(each.index for each in self.pieces.files if each.name == file), list(self._numbers)
        found = {}
        ends = [*index.begins[1:], len(index.starts)]
        for number, offset, first, last in zip(index.leaves, index.offsets, index.begins, ends, strict=True):
            name = names[int(number)]
            size = int(np.prod(index.stops[first:last] - index.starts[first:last]))
            if offset < stop and offset + size * np.dtype(self.leaves[name].dtype).itemsize > start:
                found[name] = None
        return list(found)


class _Pipeline:
    """Two batches of leaves in flight: one is being read, the other copied to the devices."""

    def __init__(self, threads: int, together: Together | None) -> None:
        self._pool = ThreadPoolExecutor(threads, "jshard-read")
        self._together = together if together is not None and together.count > 1 else None
        self._batch: tuple[dict[str, _Loading], list[Read], np.ndarray, list[Future[None]]] | None = None
        self._sent: dict[str, Any] = {}

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)

    def make_room(self) -> None:
        """Waits until the last batch is on the devices."""
        jax.block_until_ready(self._sent)

    def put(self, batch: dict[str, _Loading], work: list[Read]) -> dict[str, Any]:
        """Starts reading a batch, and returns the leaves of the previous one."""
        before, part = self._batch, np.empty(0, np.uint8)
        if self._together is not None and batch:
            part, reads = self._together.begin(work, self._pool)
        else:
            reads = [self._pool.submit(each) for each in work]
        self._batch = (batch, work, part, reads) if batch else None
        self._sent = {} if before is None else self._done(*before)
        return self._sent

    def _done(
        self, batch: dict[str, _Loading], work: list[Read], part: np.ndarray, reads: list[Future[None]]
    ) -> dict[str, Any]:
        if self._together is not None:
            given = self._together.end(work, part, reads)
            reads = [self._pool.submit(each, views) for each, views in zip(work, given, strict=True)]
        for read in reads:
            read.result()
        return {name: each.done() for name, each in batch.items()}


class _Loading:
    """A leaf in flight: this process's boxes of it, on the host until all are read."""

    def __init__(self, like: Any, stored: StoredLeaf, number: int, pieces: Pieces | None) -> None:
        self._like, dtype = like, np.dtype(stored.dtype)
        self._on_device = isinstance(like, jax.ShapeDtypeStruct)
        if not self._on_device:
            self._shape, self._boxes = stored.shape, (tuple((0, size) for size in stored.shape),)
        else:
            self._is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
            self._shape = stored.shape if self._is_key else tuple(like.shape)
            self._boxes = held_boxes(like.sharding, self._shape)
        self._out: Slab | MappedBoxes | None = None
        if pieces is not None and self._on_device and is_on_cpu(like) and self._shape == stored.shape and stored.nbytes:
            self._out = pieces.mapped(number, self._boxes, stored.shape, dtype)
        if self._out is None:
            box_shape = [stop - start for start, stop in self._boxes[0]]
            self._out = Slab(len(self._boxes), box_shape, dtype, HOST_MEMORY if self._on_device else None)
            if self._shape != stored.shape:
                self._out.bytes[:] = 0
        self.wants = _wants(number, stored, self._boxes, self._out)

    def done(self) -> Any:
        """The leaf, once all of it is read."""
        assert self._out is not None
        held = self._out.boxes
        del self._out, self.wants
        if not self._on_device:
            return held[0]
        numbers = _order(self._boxes)
        leaf = jax.make_array_from_callback(
            self._shape, self._like.sharding, lambda index: held[numbers[limits(index or (), self._shape)]]
        )
        with own_mesh(self._like):
            return jax.random.wrap_key_data(leaf, impl=self._like.dtype) if self._is_key else leaf


def _wants(number: int, leaf: StoredLeaf, boxes: tuple[Limits, ...], out: Slab | MappedBoxes) -> list[Want]:
    return [Want(number, leaf.shape, boxes, out)] if out.boxes[0].size else []


def is_on_cpu(like: Any) -> bool:
    """Whether an array will be on devices that share the process's memory."""
    return all(device.platform == "cpu" for device in like.sharding.device_set)


@functools.lru_cache(maxsize=4096)
def _order(boxes: tuple[Limits, ...]) -> Mapping[Limits, int]:
    return {box: number for number, box in enumerate(boxes)}


def _batches(wanted: Mapping[str, Any]) -> Iterator[list[str]]:
    """The wanted boxes in parts of some MiB."""
    batch: list[str] = []
    held = 0
    for name, like in wanted.items():
        batch.append(name)
        held += held_bytes(like)
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def is_packed(path: Path) -> bool:
    """Whether a folder is a packed checkpoint, even if parts of it are lost."""
    return any((path / FOLDER).glob("*.safetensors"))


def packed_source(path: Place) -> FileSource:
    """The files of a checkpoint in a folder."""
    return BucketFolder(path / FOLDER) if isinstance(path, BucketPath) else LocalFolder(path / FOLDER)


ReadPart = Callable[[int, int], bytes | bytearray]
"""Reads bytes of a part, by offset and count."""


class _Parts:
    """A `FileSource` of parts, each of which contains a packed file at some offset."""

    gap_bytes = 1 << 20
    read_bytes = 4 << 20
    threads = 2

    def __init__(self, parts: dict[str, tuple[ReadPart, int]]) -> None:
        self._parts = parts

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        read, begin = self._parts[name]
        found = memoryview(read(begin + offset, sum(view.nbytes for view in views)))
        for view in views:
            view[:] = found[: view.nbytes]
            found = found[view.nbytes :]

    def mapped(self, name: str) -> None:
        return None


def opened_parts(name: Path, parts: Sequence[ReadPart]) -> PackedCheckpoint:
    """Packed parts as a checkpoint; reads their manifests."""
    manifests, places = [], {}
    for number, read in enumerate(parts):
        try:
            size = int.from_bytes(read(0, HEAD_BYTES), "little")
            manifest = _manifest.from_json(json.loads(bytes(read(HEAD_BYTES, size))))
        except (OSError, ValueError) as error:
            raise unreadable(name, reason(error)) from error
        manifests.append(dataclasses.replace(manifest, packed={f"part {number}": manifest.packed[""]}))
        places[f"part {number}"] = read, HEAD_BYTES + size
    packed = {file: facts for manifest in manifests for file, facts in manifest.packed.items()}
    return PackedCheckpoint(name, dataclasses.replace(manifests[0], packed=packed), _Parts(places))
