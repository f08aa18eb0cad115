"""Packed checkpoints, opened: few files that hold pieces of leaves (`files/`), and a manifest with what they are."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jshard.checkpoint.balance import Together
from jshard.checkpoint.buckets import BucketError, BucketFolder, BucketPath, Place
from jshard.checkpoint.errors import reason
from jshard.checkpoint.files.boxes import PackedFile, Pieces, Want
from jshard.checkpoint.files.dealing import limits
from jshard.checkpoint.files.layout import FileIndex, Limits
from jshard.checkpoint.files.memory import HOST_MEMORY, MappedBoxes, Slab
from jshard.checkpoint.files.places import FileSource, LocalFolder
from jshard.checkpoint.files.reading import ChangedError, Read
from jshard.checkpoint.formats.source import Box, bounds
from jshard.checkpoint.manifest import FOLDER, Manifest, StoredLeaf
from jshard.checkpoint.matching import own_mesh
from jshard.checkpoint.opened import Opened, held_boxes, unreadable
from jshard.errors import RunError, printable

_BATCH_BYTES = 64 << 20  # of arrays that are read at a time


class PackedCheckpoint(Opened):
    """A packed checkpoint.

    Args:
        path: what messages call it.
        manifest: its manifest.
        source: its files.
        verify: whether what is read is compared with its sums.

    Raises:
        RunError: the index of some file is damaged.
    """

    manifest: Manifest

    def __init__(self, path: Place, manifest: Manifest, source: FileSource, *, verify: bool = True) -> None:
        self.path, self.manifest, self.leaves, self._verify = path, manifest, manifest.leaves, verify
        self._source = source
        self._numbers = {name: number for number, name in enumerate(name for name in manifest.leaves)}

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The pieces of all leaves, by the number of the leaf in the manifest."""
        files = []
        for name, (size, checksum) in self.manifest.packed.items():
            place = self.path / FOLDER / name
            try:
                file = PackedFile.open(self._source, name, size)
            except BucketError:
                raise
            except (OSError, ValueError) as error:
                raise unreadable(place, reason(error)) from error
            if file.index.checksum != checksum:
                raise unreadable(place, "it is of another checkpoint than the manifest.")
            files.append(file)
        return Pieces(files, len(self._numbers))

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`."""
        return self.leaves

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """See `Opened.in_flight_bytes`: a batch that is read, and one that goes to the devices."""
        held = [sum(_here_bytes(reads[name]) for name in names) for names in _batches(self._in_order(reads))]
        return max(map(sum, itertools.pairwise([0, *held])), default=0)

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
        slab = Slab(1, [stop - start for start, stop in limits_], np.dtype(leaf.dtype))
        with self._named_errors():
            for each in self.pieces.reads(_wants(self._numbers[name], leaf, (limits_,), slab), verify=self._verify):
                each()
        return slab.boxes[0]

    def load(self, wanted: Mapping[str, Any], together: Together | None = None, *, map: bool = False) -> dict[str, Any]:
        """See `Opened.load`: one batch is read while the one before goes to the devices.

        Args:
            wanted: see there.
            together: the processes that share the reads; all of them are here.
            map: whether arrays on CPU devices are parts of the files, where that can be.
        """
        arrays = self._in_order(wanted)
        found = {name: self.manifest.values[name] for name in wanted if name not in arrays}
        batches, pieces = list(_batches(arrays)), self.pieces if map else None
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
        """Whether its files can be memory of this process."""
        with self._named_errors():
            return all(file.mapped is not None for file in self.pieces.files)

    def _in_order(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays among some leaves, as the files have them."""
        names = sorted((name for name in wanted if self.leaves[name].is_array), key=self._numbers.__getitem__)
        return {name: wanted[name] for name in names}

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Says of what goes wrong with a file which checkpoint and which leaves it is."""
        try:
            yield
        except ChangedError as error:
            raise self._changed(error) from error
        except BucketError:
            raise
        except (OSError, ValueError) as error:
            raise unreadable(self.path, reason(error)) from error

    def _changed(self, error: ChangedError) -> RunError:
        """Names the leaves that have a piece in a block that is damaged."""
        leaves = {name: self.leaves[name] for name in self.leaves_in(error.name, error.start, error.stop)}
        lines = [f"{printable(name)}  {leaf.shape} {leaf.dtype}" for name, leaf in leaves.items()]
        where = [f"{FOLDER}/{error.name}", *lines]
        return RunError(
            "The checkpoint cannot be read.",
            where=[str(self.path), *where],
            why=f"the values that were read are not those that were saved: bytes {error.start} to {error.stop} of the "
            "file have another sum.",
            do="copy it again from where it is whole, or restore another one.",
        )

    def changed(self, on_read: Callable[[int], object]) -> Iterator[tuple[str | None, str, str]]:
        """Reads everything; the leaf, the file and what is wrong, of all that is not as it was written."""
        for file in self.pieces.files:
            place = f"{FOLDER}/{file.name}"
            for start, stop in file.changed(on_read):
                why = f"bytes {start} to {stop} are not those that were saved."
                yield from ((name, place, why) for name in self.leaves_in(file.name, start, stop) or [None])
        for name, number in self._numbers.items():
            leaf = self.leaves[name]
            if leaf.is_array and (count := self.pieces.num_missing(number, leaf.shape)):
                yield name, FOLDER, f"{count} of {math.prod(leaf.shape)} elements are in none of the files."

    def leaves_in(self, file: str, start: int, stop: int) -> list[str]:
        """The leaves that have some of the bytes of a file."""
        names = list(self._numbers)
        index = next(each.index for each in self.pieces.files if each.name == file)
        found = _places(index, names, self.leaves)
        return list(dict.fromkeys(leaf for leaf, begin, end in found if begin < stop and end > start))


def _places(index: FileIndex, names: Sequence[str], leaves: Mapping[str, StoredLeaf]) -> Iterator[tuple[str, int, int]]:
    """The leaf of each piece of a file, and where the piece begins and ends there."""
    ends = [*index.begins[1:], len(index.starts)]
    for leaf, offset, first, last in zip(index.leaves, index.offsets, index.begins, ends, strict=True):
        size = int(np.prod(index.stops[first:last] - index.starts[first:last]))
        yield names[int(leaf)], int(offset), int(offset) + size * np.dtype(leaves[names[int(leaf)]].dtype).itemsize


class _Pipeline:
    """Two batches of leaves on their way: one is read, and one goes to the devices.

    Args:
        threads: that read.
        together: the processes that read the same, if they share it.
    """

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
        """Waits until the batch that was given last is on the devices."""
        jax.block_until_ready(self._sent)

    def put(self, batch: dict[str, _Loading], work: list[Read]) -> dict[str, Any]:
        """Begins to read a batch, and gives the leaves of the one before."""
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
    """A leaf on its way: the boxes that this process holds of it, on the host until all are there.

    Args:
        like: what is asked for, see `Opened.load`.
        stored: the leaf.
        number: of the leaf.
        pieces: where it may be mapped.
    """

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
        """The leaf, once all of it is there."""
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
    """Whether an array will be on devices whose memory is that of the process."""
    return all(device.platform == "cpu" for device in like.sharding.device_set)


@functools.lru_cache(maxsize=4096)
def _order(boxes: tuple[Limits, ...]) -> Mapping[Limits, int]:
    return {box: number for number, box in enumerate(boxes)}


def _batches(wanted: Mapping[str, Any]) -> Iterator[list[str]]:
    """What is wanted in parts of some MiB."""
    batch: list[str] = []
    held = 0
    for name, like in wanted.items():
        batch.append(name)
        held += _here_bytes(like)
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _here_bytes(like: Any) -> int:
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None:
        return getattr(like, "nbytes", 0)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return 0
    shard = math.prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize
    return shard * len(like.sharding.addressable_devices)


def is_packed(path: Path) -> bool:
    """Whether a folder is that of a packed checkpoint, whatever else of it is lost."""
    return any((path / FOLDER).glob("*.safetensors"))


def packed_source(path: Place) -> FileSource:
    """The files of a checkpoint in a folder."""
    return BucketFolder(path / FOLDER) if isinstance(path, BucketPath) else LocalFolder(path / FOLDER)
