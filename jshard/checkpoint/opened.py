"""What a checkpoint is to whoever reads one: its leaves by path, read whole onto devices, or box by box."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jshard.checkpoint.buckets import Place
from jshard.checkpoint.files.dealing import limits
from jshard.checkpoint.files.layout import Limits
from jshard.checkpoint.formats.source import Box
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.errors import RunError

BOX_BYTES = 64 << 20


class Opened:
    """A checkpoint that is opened.

    Attributes:
        path: where it is.
        manifest: what it says of itself; None if jshard did not write it.
        leaves: what it holds, by path; a random key is its numbers.
        items: the names that all paths begin with, where it holds several trees that were saved side by side.
    """

    path: Place
    manifest: Manifest | None = None
    leaves: Mapping[str, StoredLeaf]
    items: tuple[str, ...] = ()

    @property
    def arrays(self) -> dict[str, StoredLeaf]:
        """The leaves that are no values of Python."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.is_array}

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """The leaves, with the kinds of the values that these stored paths ask for; others of them may be unread."""
        raise NotImplementedError

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """The most that a read of some leaves has in host memory beside them."""
        raise NotImplementedError

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Reads some leaves whole; a `RunError` if something of it is damaged or cannot be read.

        Args:
            wanted: by stored path: arrays without values (`jax.ShapeDtypeStruct` with shardings), numpy arrays, or
                values of Python, in the shapes and dtypes that are stored.
        """
        raise NotImplementedError

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, as a new array; threads may call it at the same time. It raises as `load` does."""
        raise NotImplementedError

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """How many elements are read of an array for some boxes, each of which reads the chunks whole that it is in."""
        return sum(_touched(box, leaf.chunk or leaf.shape, leaf.shape) for box in boxes)

    def values(self) -> dict[str, Any]:
        """The leaves that are numbers or texts of Python, by path."""
        raise NotImplementedError

    def boxes(self, name: str, budget_bytes: int = BOX_BYTES) -> Iterator[Box]:
        """Boxes that make up an array, of at most so many bytes, unless it is stored in larger ones."""
        leaf = self.leaves[name]
        return cut(leaf.shape, np.dtype(leaf.dtype).itemsize, (1,) * len(leaf.shape), budget_bytes)


@functools.lru_cache(maxsize=4096)
def held_boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Limits, ...]:
    """The boxes of an array that this process holds, each once."""
    found = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(limits(index or (), shape) for index in found))


def _touched(box: Limits, chunk: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Elements of the chunks that a box is in."""
    count = int(all(start < stop for start, stop in box))
    for (start, stop), step, size in itertools.zip_longest(box, chunk, shape):
        step = max(step, 1)
        count *= min(-(-stop // step) * step, size) - start // step * step
    return count


def unreadable(path: Place, why: str) -> RunError:
    """The error for a checkpoint that is damaged."""
    return RunError("The checkpoint cannot be read.", where=str(path), why=why, do="restore another one.")


def cut(shape: Sequence[int], itemsize: int, chunk: Sequence[int], budget_bytes: int) -> Iterator[Box]:
    """Cuts an array that is stored in chunks into boxes of whole ones: the first dim as far as it goes, then the next.

    Each has at most so many bytes, unless a chunk has more.
    """
    if math.prod(shape) * itemsize <= max(budget_bytes, itemsize):
        yield tuple(slice(0, size) for size in shape)
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    step = chunk[0] * max(1, budget_bytes // (chunk[0] * row_bytes))
    for start in range(0, shape[0], step):
        rows = min(step, shape[0] - start)
        for rest in cut(shape[1:], itemsize * rows, chunk[1:], budget_bytes):
            yield slice(start, start + rows), *rest


def boxes_bytes(like: Any) -> int:
    """Bytes of the boxes that the devices of this process are to hold of a leaf."""
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None:
        return getattr(like, "nbytes", 0)
    shard = math.prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize
    return shard * len(like.sharding.addressable_devices)


def padded(
    read: Callable[[Box], np.ndarray], box: Box, like: jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> np.ndarray:
    """A box of a stored array, with zeros where it reaches beyond its shape."""
    if like.shape == shape:
        return read(box)
    limits = [part.indices(size)[:2] for part, size in zip(box, like.shape, strict=True)]
    inside = tuple(slice(min(start, n), min(stop, n)) for (start, stop), n in zip(limits, shape, strict=True))
    beyond = [(0, stop - start - (i.stop - i.start)) for (start, stop), i in zip(limits, inside, strict=True)]
    return np.pad(read(inside), beyond)
