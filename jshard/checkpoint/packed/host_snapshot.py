"""Copies the values that this process writes to the host, and packs a state into one part per process."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._types import PyTree
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.packed.file_io import Parts
from jshard.checkpoint.packed.layout import FILE_BYTES, Limits, device_boxes, whole_box
from jshard.checkpoint.packed.write_assignment import LeafToWrite, plan_writes
from jshard.checkpoint.packed.writer import write_file
from jshard.checkpoint.state import leaves as _leaves
from jshard.checkpoint.state.leaf_values import storable

_Array = jax.Array | np.ndarray


class HostSnapshot:
    """Host copies of the values that this process writes; the arrays may then be overwritten or deleted.

    Attributes:
        files: the layouts of the files that this process writes.

    Args:
        leaves: the values, by path.
        stored: their descriptions.
        most_bytes: a file that has this many bytes gets no more pieces.
        first: the process that writes the leaves on the host.
    """

    def __init__(
        self,
        leaves: Mapping[str, Any],
        stored: Mapping[str, StoredLeaf],
        *,
        most_bytes: int = FILE_BYTES,
        first: int = 0,
    ) -> None:
        arrays: list[_Array] = []
        to_write: list[LeafToWrite] = []
        # Numbers count all leaves, also those without a piece: a reader counts the leaves of the manifest.
        for number, (path, leaf) in enumerate(leaves.items()):
            if stored[path].nbytes:
                array = _as_numbers(leaf)
                arrays.append(array)
                to_write.append(_leaf_to_write(number, path, array, stored[path]))
        plan = plan_writes(tuple(to_write), jax.process_index(), jax.process_count(), most_bytes, first=first)
        self.files = plan.files
        self._sources = plan.sources

        # Of other shards nothing is written here: no time and memory for their copies.
        needed: set[tuple[int, Limits]] = set()
        for source in itertools.chain.from_iterable(plan.sources):
            needed.add((source.leaf, source.shard_box))
        shards: dict[tuple[int, Limits], _Array] = {}
        for leaf_to_write, array in zip(to_write, arrays, strict=True):
            for box, values in _local_boxes(array):
                place = leaf_to_write.number, box
                if place in needed:
                    shards.setdefault(place, values)  # several devices may hold the same box
        if jax.default_backend() != "cpu":
            _start_copies(shards.values())
        # On a CPU these are not copies, but they keep the values when the array is donated.
        self._values = {place: np.asarray(values) for place, values in shards.items()}

    def values(self, file: int, number: int) -> np.ndarray:
        """Returns the values of a piece."""
        source = self._sources[file][number]
        values = self._values[source.leaf, source.shard_box]
        if source.part is not None:
            values = values[source.part]
        # A piece is written as its bytes in row-major order; a part of a shard may have gaps.
        return np.ascontiguousarray(values)


def _as_numbers(leaf: _Array) -> _Array:
    """Returns an array of numbers; of a random key, its key data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _leaf_to_write(number: int, path: str, array: _Array, stored: StoredLeaf) -> LeafToWrite:
    if not isinstance(array, jax.Array):
        return LeafToWrite(number, path, stored.shape, stored.dtype, sharding=None)
    return LeafToWrite(number, path, stored.shape, stored.dtype, array.sharding, tuple(array.shape))


def _local_boxes(array: _Array) -> Iterator[tuple[Limits, _Array]]:
    """Yields the boxes of an array that are on this process, with their values there."""
    if not isinstance(array, jax.Array):
        yield whole_box(array.shape), array
        return
    boxes = device_boxes(array.sharding, array.shape)
    for shard in array.addressable_shards:
        yield boxes[shard.device], shard.data


def _start_copies(arrays: Iterable[object]) -> None:
    """Starts the copies of all arrays to the host, so that they overlap; each is awaited when it is read."""
    for array in arrays:
        if isinstance(array, jax.Array):
            array.copy_to_host_async()


# ---- a state as packed parts, one per process: a checkpoint outside a folder, such as in another host's memory

HEAD_BYTES = 8
"""A part begins with this many bytes, the length of its manifest; then come the manifest, and a packed file."""

_ONE_FILE_BYTES = 1 << 62  # no part is as large, so all its pieces are in one file


class Packing:
    """This process's part of a state. The values are copied or held at construction, so the next step may run."""

    def __init__(self, state: PyTree, *, step: int) -> None:
        flat = _leaves.flat_state(state)
        leaves = storable(flat.leaves)
        stored = _manifest.describe_all(leaves, _leaves.by_text(flat.logical_shapes))
        self._manifest = Manifest(leaves=stored, step=step, values=_manifest.python_values(leaves))
        self._snapshot = HostSnapshot(leaves, stored, most_bytes=_ONE_FILE_BYTES)

    def finish(self) -> list[memoryview]:
        """Returns the part as buffers to be written in order."""
        sink = _BufferSink()
        (layout,) = self._snapshot.files
        checksum = write_file(sink, "", layout, lambda number: self._snapshot.values(0, number))
        # The manifest comes first and has the file's checksum, which is known last: so the file is a list of buffers.
        manifest = dataclasses.replace(self._manifest, packed={"": (layout.num_bytes, checksum)})
        text = json.dumps(_manifest.to_json(manifest)).encode()
        return [memoryview(len(text).to_bytes(HEAD_BYTES, "little") + text), *sink.buffers]


class _BufferSink:
    """A `Sink` that keeps the buffers passed to it, without a copy."""

    part_bytes = 4 << 20

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        for part in parts:
            self.buffers += part()
