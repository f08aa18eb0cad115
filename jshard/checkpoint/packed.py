"""A state as packed parts, one of each process: a checkpoint in a place that is no folder, such as another's memory.

A part is the length of its index, the index (JSON: a manifest of the whole state with the sums of this part, values of
Python, and where each piece is), and the bytes of the pieces, which are boxes of arrays. The pieces of all parts make
up every array once. So a part is about the bytes of the state over the number of processes, and any mesh can read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.balance import balanced
from jshard.checkpoint.formats.source import Box, bounds, whole
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.matching import own_mesh
from jshard.checkpoint.readers import Opened, boxes_bytes, padded, unreadable
from jshard.checkpoint.sums import LeafSums, add

Read = Callable[[int, int], bytes | bytearray]
"""Some bytes of a part: from where, and how many."""

_HEAD_BYTES = 8
_NEVER = 1 << 62  # bytes from which on a copy is cut among processes: leaves are dealt to them whole


class Packing:
    """What this process packs of a state. The values are copied, or held, when it is made: the step may go on.

    Args:
        state: what `save` takes; every process packs it.
        step: of the state.
    """

    def __init__(self, state: Any, *, step: int) -> None:
        found = _leaves.flatten(state)
        logical = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(state).items()}
        leaves = balanced(_leaves.storable(found), least_slice_bytes=_NEVER)
        self._step = step
        self._stored = {key: _manifest.describe(leaf, logical.get(key)) for key, leaf in leaves.items()}
        self._values = {key: leaves[key] for key, stored in self._stored.items() if not stored.is_array}
        arrays = {key: leaves[key] for key, stored in self._stored.items() if stored.is_array}
        on_device = {key: _own_pieces(leaf, self._stored[key].shape) for key, leaf in arrays.items()}
        for pieces in on_device.values():
            for _, values in pieces:
                if isinstance(values, jax.Array):
                    values.copy_to_host_async()
        self._sums = {key: LeafSums(leaf, logical.get(key)) for key, leaf in arrays.items()}
        self._pieces = [(key, box, np.asarray(values)) for key, pieces in on_device.items() for box, values in pieces]

    def finish(self) -> list[memoryview]:
        """The part, in pieces that are to be written one after another."""
        stored = {key: dataclasses.replace(leaf, sums=self._total(key)) for key, leaf in self._stored.items()}
        places, offset = [], 0
        for key, box, values in self._pieces:
            places.append([key, box, offset])
            offset += values.nbytes
        described = _manifest.to_json(Manifest(leaves=stored, files={}, step=self._step))
        index = json.dumps({"manifest": described, "values": self._values, "pieces": places}).encode()
        head = len(index).to_bytes(_HEAD_BYTES, "little")
        data = [np.ascontiguousarray(values).reshape(-1).view(np.uint8).data for *_, values in self._pieces]
        return [memoryview(head + index), *data]

    def _total(self, key: str) -> tuple[int, int] | None:
        return self._sums[key].total() if key in self._sums else None


class PackedCheckpoint(Opened):
    """Packed parts, opened: their indexes are read.

    Args:
        name: what messages call it.
        parts: the readers of all parts.

    Raises:
        RunError: something of them is damaged.
    """

    def __init__(self, name: Path, parts: Sequence[Read]) -> None:
        self.path = name
        indexes = [(read, *self._index(read)) for read in parts]
        manifests = [_manifest.from_json(index["manifest"]) for _, index, _ in indexes]
        sums = {key: add(m.leaves[key].sums or (0, 0) for m in manifests) for key in manifests[0].leaves}
        one = {
            key: dataclasses.replace(leaf, sums=sums[key], chunk=(1,) * len(leaf.shape)) if leaf.is_array else leaf
            for key, leaf in manifests[0].leaves.items()
        }
        self.manifest = dataclasses.replace(manifests[0], leaves=one)
        self.leaves = one
        self._values = indexes[0][1]["values"]
        self._pieces: dict[str, list[tuple[Read, int, tuple[tuple[int, int], ...]]]] = {key: [] for key in one}
        for read, index, begin in indexes:
            for key, box, offset in index["pieces"]:
                self._pieces[key].append((read, begin + int(offset), tuple((int(a), int(b)) for a, b in box)))

    def leaves_for(self, asked: Any) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`."""
        return self.leaves

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """See `Opened.in_flight_bytes`: the boxes of one leaf for all devices here."""
        return max(map(boxes_bytes, reads.values()), default=0)

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.load`; host memory holds the boxes of one leaf."""
        return {name: self._load(name, like) for name, like in wanted.items()}

    def values(self) -> dict[str, Any]:
        """See `Opened.values`."""
        return dict(self._values)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        leaf = self.leaves[name]
        wanted = bounds(box, leaf.shape)
        found = np.empty([stop - start for start, stop in wanted], leaf.dtype)
        left = found.size
        for read, offset, piece in self._pieces[name]:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, piece, strict=True)]
            if left and all(start < stop for start, stop in common):
                inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, wanted, strict=True))
                found[inside] = self._part_of(read, offset, piece, common, found.dtype)
                left -= math.prod(stop - start for start, stop in common)
        if left:
            raise unreadable(self.path, f"{name}: {left} of {found.size} elements are in none of the parts.")
        return found

    def _part_of(self, read: Read, offset: int, piece: Any, common: Any, dtype: np.dtype) -> np.ndarray:
        """What a read wants of a piece: the rows of its first dim are read, and the others cut afterwards."""
        sizes = [stop - start for start, stop in piece]
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        first, last = (common[0][0] - piece[0][0], common[0][1] - piece[0][0]) if sizes else (0, 1)
        try:
            rows = read(offset + first * row_bytes, (last - first) * row_bytes)
        except OSError as error:
            raise unreadable(self.path, str(error)) from error
        values = np.frombuffer(rows, dtype).reshape([last - first, *sizes[1:]] if sizes else [])
        rest = zip(common[1:], piece[1:], strict=True)
        return values[(..., *(slice(a - start, b - start) for (a, b), (start, _) in rest))]

    def _load(self, name: str, like: Any) -> Any:
        stored = self.leaves[name]
        if not stored.is_array:
            return self._values[name]
        if not isinstance(like, jax.ShapeDtypeStruct):
            return self.read(name, whole(stored))
        is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
        numbers = jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=like.sharding) if is_key else like
        assert numbers.sharding is not None
        leaf = jax.make_array_from_callback(
            numbers.shape,
            numbers.sharding,
            lambda box: padded(lambda inside: self.read(name, inside), box or (), numbers, stored.shape),
        )
        with own_mesh(like):
            leaf = jax.random.wrap_key_data(leaf, impl=like.dtype) if is_key else leaf
        return jax.block_until_ready(leaf)  # before the next one is read

    def _index(self, read: Read) -> tuple[dict[str, Any], int]:
        """The index of a part, and where its pieces begin."""
        try:
            size = int.from_bytes(read(0, _HEAD_BYTES), "little")
            return json.loads(read(_HEAD_BYTES, size)), _HEAD_BYTES + size
        except (OSError, ValueError) as error:
            raise unreadable(self.path, str(error)) from error


def _own_pieces(leaf: Any, shape: tuple[int, ...]) -> list[tuple[list[tuple[int, int]], Any]]:
    """The boxes of an array that this process packs, without padding, and their values."""
    if not isinstance(leaf, jax.Array):
        return [([(0, size) for size in shape], leaf)] if jax.process_index() == 0 else []
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    found = []
    for shard in leaf.addressable_shards:
        limits = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
        box = [(min(start, size), min(stop, size)) for (start, stop), size in zip(limits, shape, strict=True)]
        if shard.replica_id == 0 and all(start < stop for start, stop in box):
            is_cut = box != [tuple(limit) for limit in limits]
            found.append((box, shard.data[tuple(slice(0, b - a) for a, b in box)] if is_cut else shard.data))
    return found
