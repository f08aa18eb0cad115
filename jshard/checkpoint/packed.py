"""Packed checkpoints, opened: few files that hold pieces of leaves (`files/`), and a manifest with what they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jshard.checkpoint.buckets import BucketError, BucketFolder, BucketPath, Place
from jshard.checkpoint.errors import reason
from jshard.checkpoint.files.boxes import PackedFile, Pieces, Want
from jshard.checkpoint.files.dealing import limits
from jshard.checkpoint.files.layout import FileIndex, Limits
from jshard.checkpoint.files.places import FileSource, LocalFolder
from jshard.checkpoint.files.reading import ChangedError, do_all
from jshard.checkpoint.formats.source import Box, bounds, whole
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.matching import own_mesh
from jshard.checkpoint.opened import Opened, unreadable
from jshard.checkpoint.storage import FOLDER
from jshard.errors import RunError, printable

_BATCH_BYTES = 256 << 20  # of arrays that are read at a time


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
        """See `Opened.in_flight_bytes`."""
        return _BATCH_BYTES

    def values(self) -> dict[str, Any]:
        """See `Opened.values`."""
        return dict(self.manifest.values)

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """See `Opened.touched`."""
        return self.pieces.touched(self._numbers[name], boxes)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        leaf = self.leaves[name]
        limits_ = bounds(box, leaf.shape)
        out = np.empty([stop - start for start, stop in limits_], leaf.dtype)
        self._fill([(name, limits_, out)], threads=1)
        return out

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.load`."""
        found: dict[str, Any] = {}
        for batch in _batches(wanted):
            arrays = {name: _Loading(like, self.leaves[name]) for name, like in batch if self.leaves[name].is_array}
            self._fill([(name, box, out) for name, each in arrays.items() for box, out in each.wants()])
            found |= {name: each.done() for name, each in arrays.items()}
        values = {name: self.values()[name] for name in wanted if not self.leaves[name].is_array}
        return {name: values[name] if name in values else found[name] for name in wanted}

    def _fill(self, wants: Iterable[tuple[str, Limits, np.ndarray]], *, threads: int | None = None) -> None:
        """Reads boxes of leaves into arrays."""
        full = [Want(self._numbers[name], self.leaves[name].shape, box, out) for name, box, out in wants if out.size]
        work = self.pieces.reads(full, verify=self._verify)
        try:
            if threads == 1:
                for each in work:
                    each()
            else:
                do_all(work, threads=threads or self._source.threads)
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


class _Loading:
    """A leaf on its way: the boxes that this process holds of it, each an array on the host until all are there.

    Args:
        like: what is asked for, see `Opened.load`.
        stored: the leaf.
    """

    def __init__(self, like: Any, stored: StoredLeaf) -> None:
        self._like, self._stored = like, stored
        dtype = np.dtype(stored.dtype)
        self._on_device = isinstance(like, jax.ShapeDtypeStruct)
        if not self._on_device:
            self._shape, self._boxes = stored.shape, [bounds(whole(stored), stored.shape)]
        else:
            self._is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
            self._shape = stored.shape if self._is_key else tuple(like.shape)
            assert like.sharding is not None
            self._boxes = list(_boxes(like.sharding, self._shape))
        self._held = {box: _empty(box, stored.shape, dtype) for box in self._boxes}

    def wants(self) -> Iterator[tuple[Limits, np.ndarray]]:
        """What is to be read: boxes and arrays for them."""
        for box, out in self._held.items():
            inside = tuple((a, min(b, size)) for (a, b), size in zip(box, self._stored.shape, strict=True))
            if all(a < b for a, b in inside) or not box:
                yield box, out

    def done(self) -> Any:
        """The leaf, once all of it is there."""
        if not self._on_device:
            return self._held[self._boxes[0]]
        leaf = jax.make_array_from_callback(
            self._shape, self._like.sharding, lambda index: self._held[limits(index or (), self._shape)]
        )
        with own_mesh(self._like):
            return jax.random.wrap_key_data(leaf, impl=self._like.dtype) if self._is_key else leaf


@functools.lru_cache(maxsize=4096)
def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Limits, ...]:
    """The boxes of an array that this process holds, each once."""
    found = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(limits(index or (), shape) for index in found))


def _empty(box: Limits, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array for a box; zeros where it reaches beyond what is stored."""
    is_padded = any(stop > size for (_, stop), size in zip(box, shape, strict=True))
    return (np.zeros if is_padded else np.empty)([stop - start for start, stop in box], dtype)


def _batches(wanted: Mapping[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """What is wanted in parts of some hundred MiB."""
    batch: list[tuple[str, Any]] = []
    held = 0
    for name, like in wanted.items():
        batch.append((name, like))
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
