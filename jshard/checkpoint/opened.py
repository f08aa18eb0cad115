"""An open checkpoint: its leaves by path, read whole onto devices, or box by box."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from jshard.checkpoint.buckets import Place
from jshard.checkpoint.converting import Leaf, Target
from jshard.checkpoint.formats.source import Box
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.packed.layout import Limits, limits, size_of, slices_of, whole_box


class Opened:
    """An open checkpoint."""

    path: Place  # its location
    manifest: Manifest | None = None  # its manifest; None if jshard did not write it
    leaves: Mapping[str, StoredLeaf]  # its leaves by path; a random key is its numbers
    notes: Sequence[str] = ()  # remarks for the reader
    # By path, the names of another library's arrays that a leaf would be made of, and that are not there.
    absent: Mapping[str, Sequence[str]] = types.MappingProxyType({})
    noun: str = "checkpoint"  # what it is, in messages
    # The call that reads it, in messages, with places for `like` and for further arguments.
    call: str = "restore(path, {like}{options})"

    @property
    def listing(self) -> str:
        """A line that lists its contents, for messages."""
        return f"jshard ckpt inspect {self.path}"

    @property
    def arrays(self) -> dict[str, StoredLeaf]:
        """The leaves that are arrays."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.is_array}

    def leaves_for(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """Returns the leaves, with the types of the values at these stored paths; other values may be unread."""
        raise NotImplementedError

    def described(self) -> Mapping[str, StoredLeaf]:
        """Returns the leaves, with the types of all values, which may have to be read."""
        return self.leaves

    def load(self, targets: Mapping[str, Target]) -> dict[str, Leaf]:
        """Reads some leaves whole; raises `RunError` if one is damaged or cannot be read."""
        raise NotImplementedError

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of an array, as a new array; thread-safe. It raises as `load` does."""
        raise NotImplementedError

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """Returns the number of elements read for some boxes of an array; whole chunks are read for each box."""
        # Without known chunks a leaf is taken as one: the forecast then says too much rather than too little.
        chunk = leaf.chunk or leaf.shape
        count = 0
        for box in boxes:
            # For an empty box no chunk is read, though its limits may be inside of one.
            if size_of(box):
                count += size_of(_in_whole_chunks(box, chunk, leaf.shape))
        return count

    def values(self) -> dict[str, int | float | str]:
        """Returns the leaves that are Python numbers or strings, by path."""
        raise NotImplementedError

    def boxes(self, name: str, budget_bytes: int) -> Iterator[Box]:
        """Yields boxes of at most this many bytes that make up an array."""
        leaf = self.leaves[name]
        return cut(leaf.shape, np.dtype(leaf.dtype).itemsize, budget_bytes)


def _in_whole_chunks(box: Limits, chunk: Sequence[int], shape: Sequence[int]) -> Limits:
    """Returns the box of all chunks that a box touches."""
    chunks = []
    for (start, stop), chunk_size, size in zip(box, chunk, shape, strict=True):
        step = max(chunk_size, 1)  # a dim without elements has chunks of none
        chunks_start = start // step * step
        chunks_stop = -(-stop // step) * step
        chunks.append((chunks_start, min(chunks_stop, size)))
    return tuple(chunks)


# Cached, because the layers of a model have few shardings and shapes.
@functools.lru_cache(maxsize=4096)
def held_boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Limits, ...]:
    """Returns the boxes of an array that this process holds, each once."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(limits(index or (), shape) for index in indices))


def boxes_of(leaf: StoredLeaf, target: Target) -> tuple[Limits, ...]:
    """Returns the boxes of a leaf that this process will hold; a random key is read whole."""
    if isinstance(target, jax.ShapeDtypeStruct) and target.sharding is not None:
        is_key = len(target.shape) != len(leaf.shape)  # stored as numbers, with a dim more
        if not is_key:
            return held_boxes(target.sharding, tuple(target.shape))
    return (whole_box(leaf.shape),)


def cut(shape: Sequence[int], itemsize: int, budget_bytes: int) -> Iterator[Box]:
    """Cuts an array into boxes of at most this many bytes, along the first dim as far as possible, then the next."""
    if math.prod(shape) * itemsize <= max(budget_bytes, itemsize):  # an element is never cut
        yield slices_of(whole_box(shape))
        return
    # A row larger than the budget is cut along the next dim, by the call below.
    step = max(1, budget_bytes // (math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], step):
        num_rows = min(step, shape[0] - start)
        # The bytes of all rows of the box count.
        for box_in_rows in cut(shape[1:], itemsize * num_rows, budget_bytes):
            yield slice(start, start + num_rows), *box_in_rows
