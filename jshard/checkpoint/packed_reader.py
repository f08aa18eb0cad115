"""Reads packed checkpoints: one batch of leaves is read while the one before is copied to the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketError, BucketFolder, BucketPath, Place
from jshard.checkpoint.converting import Leaf, Target, own_mesh
from jshard.checkpoint.errors import DamagedError, damaged, reason, unreadable
from jshard.checkpoint.formats.source import Box, bounds
from jshard.checkpoint.manifest import FOLDER, Manifest, StoredLeaf
from jshard.checkpoint.opened import Opened, held_boxes
from jshard.checkpoint.packed.file_io import FileSource, LocalFolder
from jshard.checkpoint.packed.file_reads import ChangedError, Read
from jshard.checkpoint.packed.host_memory import HOST_MEMORY, MappedBoxes, Slab
from jshard.checkpoint.packed.host_snapshot import HEAD_BYTES
from jshard.checkpoint.packed.layout import Limits, limits, shape_of, whole_box
from jshard.checkpoint.packed.pieces import LeafColumns, PackedFile, Pieces, Want, check_pieces
from jshard.checkpoint.packed.shared_reads import SharedReads
from jshard.errors import printable

BATCH_BYTES = 64 << 20  # of arrays that are read at a time; host memory holds two batches, see `_Pipeline`


@dataclasses.dataclass(frozen=True)
class Change:
    """Something of a checkpoint that is not as it was saved."""

    leaf: str | None  # its path; None for bytes of a file that belong to no leaf
    file: str
    why: str


class PackedCheckpoint(Opened):
    """A packed checkpoint."""

    manifest: Manifest  # its manifest

    def __init__(self, path: Place, manifest: Manifest, source: FileSource, *, verify: bool = True) -> None:
        self.path = path
        self.manifest = manifest
        self.leaves = manifest.leaves
        self._source = source
        self._verify = verify
        # In packed files a leaf is its number in the manifest: the order of the leaves there is part of the format.
        self._numbers = {name: number for number, name in enumerate(manifest.leaves)}

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The pieces of all leaves, by the number of the leaf in the manifest."""
        columns = LeafColumns.of(self.leaves.values())
        files = []
        for name, (size, checksum) in self.manifest.packed.items():
            file_path = self.path / FOLDER / name
            try:
                file = PackedFile.open(self._source, name, size)
                check_pieces(file.index, columns)
            except (BucketError, DamagedError):  # `DamagedError` is a `ValueError`, too
                raise
            except (OSError, ValueError) as error:
                raise unreadable(file_path, reason(error)) from error
            # A file has the checksums of itself: in place of another checkpoint's file, they would agree, too.
            if file.index.checksum != checksum:
                raise unreadable(file_path, "it belongs to another checkpoint than the manifest.")
            files.append(file)
        return Pieces(files, len(self._numbers))

    def leaves_for(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`."""
        return self.leaves

    def values(self) -> dict[str, int | float | str]:
        """See `Opened.values`."""
        return dict(self.manifest.values)

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """See `Opened.touched`."""
        with self._named_errors():
            return self.pieces.touched(self._numbers[name], boxes, leaf.shape, np.dtype(leaf.dtype).itemsize)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        leaf = self.leaves[name]
        box_limits = bounds(box, leaf.shape)
        with self._named_errors():
            slab = Slab(1, shape_of(box_limits), np.dtype(leaf.dtype))
            wants = _wants(self._numbers[name], leaf, (box_limits,), slab)
            for read in self.pieces.reads(wants, verify=self._verify):
                read()
        return slab.boxes[0]

    def load(
        self, targets: Mapping[str, Target], shared_reads: SharedReads | None = None, *, mmap: bool = False
    ) -> dict[str, Leaf]:
        """See `Opened.load`; one batch is read while the previous one is copied to the devices."""
        arrays = self._in_file_order(targets)  # neighbours come in one read
        result = {name: self.manifest.values[name] for name in targets if name not in arrays}
        batches = list(_batches(arrays))
        mapped = self.pieces if mmap else None
        if shared_reads is not None:
            shared_reads.start(len(batches), self._digest(arrays))
        with self._named_errors(), _Pipeline(self._source.threads, shared_reads) as pipeline:
            for names in batches:
                pipeline.wait_for_devices()  # before memory is taken for another batch
                leaves = {}
                for name in names:
                    leaves[name] = _LoadingLeaf(arrays[name], self.leaves[name], self._numbers[name], mapped)
                wants: list[Want] = []
                for leaf in leaves.values():
                    wants += leaf.wants
                reads = list(self.pieces.reads(wants, verify=self._verify))
                result |= pipeline.put(leaves, reads)
            result |= pipeline.finish()
        if shared_reads is not None:
            # Other groups may have more batches, and each of their exchanges waits for this process, too.
            shared_reads.close()
        return {name: result[name] for name in targets}  # in the order of the request, not of the files

    @property
    def can_be_mapped(self) -> bool:
        """Whether its files can be memory-mapped."""
        with self._named_errors():
            return all(file.mapped is not None for file in self.pieces.files)

    def _in_file_order(self, targets: Mapping[str, Target]) -> dict[str, Target]:
        """Returns the targets that are arrays, as their leaves follow each other in the files."""
        names = sorted(targets, key=self._numbers.__getitem__)
        return {name: targets[name] for name in names if self.leaves[name].is_array}

    def _digest(self, arrays: Mapping[str, Target]) -> str:
        """Returns a text that differs between processes that would not read the same."""
        facts = [(name, target.shape) for name, target in arrays.items()]
        return xxhash.xxh3_64_hexdigest(repr((facts, self._verify)).encode())

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Adds the checkpoint and the leaves to an error about a file."""
        try:
            yield
        except ChangedError as error:
            lines = []
            for name in self.leaves_in(error.name, error.start, error.stop):
                leaf = self.leaves[name]
                lines.append(f"{printable(name)}  {leaf.shape} {leaf.dtype}")
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

    def changes(self, on_read: Callable[[int], object]) -> Iterator[Change]:
        """Reads everything; yields what has changed, or is missing."""
        for file in self.pieces.files:
            place = f"{FOLDER}/{file.name}"
            for start, stop in file.changed(on_read):
                why = f"bytes {start} to {stop} differ from the saved ones."
                # Padding, and a header, belong to no leaf; a change there is one of the file.
                leaves: list[str | None] = [*self.leaves_in(file.name, start, stop)]
                for leaf in leaves or [None]:
                    yield Change(leaf, place, why)
        for name, leaf in self.arrays.items():
            count = self.pieces.num_missing(self._numbers[name], leaf.shape)
            if count:
                yield Change(name, FOLDER, f"{count} of {math.prod(leaf.shape)} elements are missing from the files.")
            elif self.pieces.has_overlap(self._numbers[name]):
                # The sizes add up, so as many elements are missing as are stored twice.
                yield Change(name, FOLDER, "some elements are in the files twice, and others are missing.")

    def leaves_in(self, file: str, start: int, stop: int) -> list[str]:
        """Returns the leaves that share a range of a file's bytes."""
        index = self.pieces.index_of(file)
        names = list(self._numbers)
        leaves = {}
        lasts = [*index.begins[1:], len(index.starts)]  # of the limits of each piece
        for number, offset, first, last in zip(index.leaves, index.offsets, index.begins, lasts, strict=True):
            name = names[int(number)]
            size = int(np.prod(index.stops[first:last] - index.starts[first:last]))
            end = offset + size * np.dtype(self.leaves[name].dtype).itemsize
            if offset < stop and end > start:
                leaves[name] = None
        return list(leaves)


def _batches(targets: Mapping[str, Target]) -> Iterator[list[str]]:
    """Yields the names of the targets, in batches of some MiB for this process."""
    batch: list[str] = []
    num_bytes = 0
    for name, target in targets.items():
        batch.append(name)
        num_bytes += _held_bytes(target)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch = []
            num_bytes = 0
    if batch:
        yield batch


def _held_bytes(target: Target) -> int:
    """Returns the bytes of the boxes of a leaf that this process will hold, each counted once."""
    if not isinstance(target, jax.ShapeDtypeStruct) or target.sharding is None:
        return getattr(target, "nbytes", 0)
    # The shape is that of keys, not of their numbers, which are few.
    if jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
        return 0
    shard_bytes = math.prod(target.sharding.shard_shape(target.shape)) * target.dtype.itemsize
    return shard_bytes * len(held_boxes(target.sharding, tuple(target.shape)))


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Some leaves that are being read."""

    leaves: dict[str, _LoadingLeaf]
    work: list[Read]
    share: np.ndarray | None  # what this process reads of it for its group; None if it reads all
    reads: list[Future[None]]  # those that have started


class _Pipeline:
    """Two batches of leaves in flight: one is being read, the other copied to the devices."""

    def __init__(self, threads: int, shared_reads: SharedReads | None) -> None:
        self._pool = ThreadPoolExecutor(threads, "jshard-read")
        is_shared = shared_reads is not None and shared_reads.count > 1
        self._shared_reads = shared_reads if is_shared else None
        self._reading: _Batch | None = None
        self._copying: dict[str, Leaf] = {}

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)  # after an error, reads that have not started do not

    def wait_for_devices(self) -> None:
        """Waits until the last batch is on the devices."""
        jax.block_until_ready(self._copying)

    def put(self, leaves: dict[str, _LoadingLeaf], work: list[Read]) -> dict[str, Leaf]:
        """Starts reading a batch, and returns the leaves of the previous one."""
        if self._shared_reads is None:
            batch = _Batch(leaves, work, None, [self._pool.submit(read) for read in work])
        else:
            share, reads = self._shared_reads.begin(work, self._pool)
            batch = _Batch(leaves, work, share, reads)
        # The new batch has started before the wait for the previous one: the files are read all the time.
        previous = self._reading
        self._reading = batch
        self._copying = {} if previous is None else self._completed(previous)
        return self._copying

    def finish(self) -> dict[str, Leaf]:
        """Returns the leaves of the last batch."""
        last = self._reading
        self._reading = None
        return {} if last is None else self._completed(last)

    def _completed(self, batch: _Batch) -> dict[str, Leaf]:
        """Waits until a batch is read, and starts to copy its leaves to the devices."""
        reads = batch.reads
        if self._shared_reads is not None:
            assert batch.share is not None
            # Until here only this process's share was read. Each read now takes all its bytes from the exchange, checks
            # them, and fills its boxes.
            contents = self._shared_reads.end(batch.work, batch.share, reads)
            reads = [self._pool.submit(read, views) for read, views in zip(batch.work, contents, strict=True)]
        for read in reads:
            read.result()
        return {name: leaf.done() for name, leaf in batch.leaves.items()}


class _LoadingLeaf:
    """A leaf in flight: this process's boxes of it, on the host until all are read.

    Attributes:
        wants: what is to be read, until it is done.
    """

    def __init__(self, target: Target, stored: StoredLeaf, number: int, mapped: Pieces | None) -> None:
        """Takes memory for the boxes.

        Args:
            target: what is loaded.
            stored: the leaf.
            number: its number in the manifest.
            mapped: the pieces of all leaves, if boxes may be mapped files in place of memory.
        """
        self._target = target
        self._is_on_device = isinstance(target, jax.ShapeDtypeStruct)
        self._is_key = self._is_on_device and jnp.issubdtype(target.dtype, jax.dtypes.prng_key)
        self._shape = stored.shape
        self._boxes: tuple[Limits, ...] = (whole_box(stored.shape),)
        if self._is_on_device:
            if not self._is_key:  # of keys, it is the shape of their numbers
                self._shape = tuple(target.shape)  # may be padded
            self._boxes = held_boxes(target.sharding, self._shape)
        # All boxes of a leaf have one shape, by the sharding; so they fit into one slab.
        out = None
        if mapped is not None and self._can_be_mapped(stored):
            out = mapped.mapped(number, self._boxes, stored.shape, np.dtype(stored.dtype))
        self._out: Slab | MappedBoxes | None = out or self._empty_slab(stored)
        self.wants = _wants(number, stored, self._boxes, self._out)

    def _can_be_mapped(self, stored: StoredLeaf) -> bool:
        """Returns whether the boxes could be those of the files: without padding, in the memory of the process."""
        if not self._is_on_device or not is_on_cpu(self._target):
            return False
        return self._shape == stored.shape and stored.nbytes > 0

    def _empty_slab(self, stored: StoredLeaf) -> Slab:
        memory = HOST_MEMORY if self._is_on_device else None
        slab = Slab(len(self._boxes), shape_of(self._boxes[0]), np.dtype(stored.dtype), memory)
        if self._shape != stored.shape:
            slab.bytes[:] = 0  # the padding
        return slab

    def done(self) -> Leaf:
        """Returns the leaf, once all of it is read."""
        assert self._out is not None
        boxes = self._out.boxes
        # The memory returns to the pool with the last reference.
        self._out = None
        self.wants = []
        if not self._is_on_device:
            return boxes[0]
        # JAX calls `read_box` for each device; devices with replicas get the same box, which was read once.
        number_of = _numbers_of(self._boxes)

        def read_box(index: Box | None) -> np.ndarray:
            return boxes[number_of[limits(index or (), self._shape)]]

        leaf = jax.make_array_from_callback(self._shape, self._target.sharding, read_box)
        if not self._is_key:
            return leaf
        with own_mesh(self._target):
            return jax.random.wrap_key_data(leaf, impl=self._target.dtype)


def _wants(number: int, leaf: StoredLeaf, boxes: tuple[Limits, ...], out: Slab | MappedBoxes) -> list[Want]:
    is_empty = out.boxes[0].size == 0
    return [] if is_empty else [Want(number, leaf.shape, boxes, out)]


def is_on_cpu(target: Target) -> bool:
    """Returns whether an array will be on devices that share the process's memory."""
    return all(device.platform == "cpu" for device in target.sharding.device_set)


@functools.lru_cache(maxsize=4096)
def _numbers_of(boxes: tuple[Limits, ...]) -> Mapping[Limits, int]:
    return {box: number for number, box in enumerate(boxes)}


def is_packed(path: Path) -> bool:
    """Returns whether a folder is a packed checkpoint, even if parts of it are lost."""
    return any((path / FOLDER).glob("*.safetensors"))


def packed_source(path: Place) -> FileSource:
    """Returns the files of a checkpoint in a folder."""
    if isinstance(path, BucketPath):
        return BucketFolder(path / FOLDER)
    return LocalFolder(path / FOLDER)


# A checkpoint in parts, outside of a folder: each has the length of a manifest, the manifest, and a packed file.

ReadPart = Callable[[int, int], bytes | bytearray]
"""Reads bytes of a part, by offset and count."""


@dataclasses.dataclass(frozen=True)
class _PackedPart:
    """A part, and where its packed file begins."""

    read: ReadPart
    file_offset: int


class _PackedParts:
    """A `FileSource` of the packed files in some parts."""

    # A part may be in the memory of another host: reads are few and large.
    gap_bytes = 1 << 20
    read_bytes = 4 << 20
    threads = 2

    def __init__(self, parts: Mapping[str, _PackedPart]) -> None:
        self._parts = parts

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """See `FileSource`."""
        part = self._parts[name]
        content = memoryview(part.read(part.file_offset + offset, sum(view.nbytes for view in views)))
        for view in views:
            view[:] = content[: view.nbytes]
            content = content[view.nbytes :]

    def mapped(self, name: str) -> None:
        """See `FileSource`: there is no file."""


def opened_parts(name: Path, parts: Sequence[ReadPart]) -> PackedCheckpoint:
    """Opens packed parts as a checkpoint; reads their manifests."""
    manifests = []
    packed = {}
    files = {}
    for number, read in enumerate(parts):
        try:
            manifest_bytes = int.from_bytes(read(0, HEAD_BYTES), "little")
            manifest = _manifest.from_json(json.loads(bytes(read(HEAD_BYTES, manifest_bytes))))
        except (OSError, ValueError) as error:
            raise unreadable(name, reason(error)) from error
        manifests.append(manifest)
        file = f"part {number}"
        packed[file] = manifest.packed[""]  # as the part calls its only file
        files[file] = _PackedPart(read, HEAD_BYTES + manifest_bytes)
    # The parts are of one state: they describe the same leaves, and differ in their packed files only.
    manifest = dataclasses.replace(manifests[0], packed=packed)
    return PackedCheckpoint(name, manifest, _PackedParts(files))
