"""Who writes what: every box of every leaf once, dealt to the processes that hold it by bytes.

All processes come to the same result, each from the shardings alone. A box that several hold is written by the one
with the least to write; a large one is cut, and each of them writes a part.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jshard.checkpoint.files.layout import FILE_BYTES, FileLayout, Limits, Piece, laid_out
from jshard.checkpoint.manifest import StoredLeaf

_LEAST_BYTES = 256 << 10  # of a part of a box that is cut


@dataclasses.dataclass(frozen=True)
class LeafFacts:
    """What says how a leaf is written: all processes have the same.

    Attributes:
        number: of the leaf among those of the checkpoint.
        path: of the leaf.
        shape: of what is written, without padding.
        dtype: the name of that of its elements.
        sharding: of an array on devices, with the shape that it has there; None for one that is on the host, of which
            the first process writes its own.
    """

    number: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    sharding: tuple[Sharding, tuple[int, ...]] | None


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """What one process writes.

    Attributes:
        files: the layout of each file.
        parts: by file, for each of its pieces in the order there: the number of the leaf, the box of the shard that it
            is in, and which part of that shard it is.
    """

    files: tuple[FileLayout, ...]
    parts: tuple[tuple[tuple[int, Limits, tuple[slice, ...] | None], ...], ...]

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return sum(piece.nbytes for file in self.files for piece in file.pieces)


@functools.lru_cache(maxsize=8)
def plan(leaves: tuple[LeafFacts, ...], process: int, processes: int, most_bytes: int) -> WritePlan:
    """What a process writes of some leaves.

    Args:
        leaves: those of the state, arrays with elements; the same in all processes.
        process: which process.
        processes: how many there are.
        most_bytes: of a file.
    """
    load = np.zeros(processes, np.int64)
    mine: dict[tuple[int, Limits], tuple[Limits, tuple[slice, ...] | None]] = {}
    pieces: list[Piece] = []

    def take(facts: LeafFacts, box: Limits, held: Limits) -> None:
        pieces.append(Piece(facts.number, facts.path, jnp.dtype(facts.dtype), box))
        inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, held, strict=True))
        mine[facts.number, box] = held, None if box == held else inside

    shared = []
    for place, facts in enumerate(leaves):
        itemsize = jnp.dtype(facts.dtype).itemsize
        if facts.sharding is None:
            box = tuple((0, size) for size in facts.shape)
            load[0] += _size(box) * itemsize
            if process == 0:
                take(facts, box, box)
            continue
        alone, several, sizes = _holders(*facts.sharding, facts.shape, processes)
        load += sizes * itemsize
        for box, held in alone.get(process, ()):
            take(facts, box, held)
        shared += [(-_size(box) * itemsize, place, box, held, owners) for box, held, owners in several]
    for least, place, box, held, owners in sorted(shared, key=lambda each: each[:3]):
        for part in _cut(box, min(len(owners), -least // _LEAST_BYTES)):
            owner = min(owners, key=lambda owner: load[owner])
            load[owner] += _size(part) * jnp.dtype(leaves[place].dtype).itemsize
            if owner == process:
                take(leaves[place], part, held)
    files = laid_out(sorted(pieces, key=lambda piece: (piece.leaf, piece.box)), most_bytes=most_bytes)
    parts = tuple(tuple((piece.leaf, *mine[piece.leaf, piece.box]) for piece in file.pieces) for file in files)
    return WritePlan(tuple(files), parts)


@functools.lru_cache(maxsize=4096)
def _holders(
    sharding: Sharding, held_shape: tuple[int, ...], shape: tuple[int, ...], processes: int
) -> tuple[Mapping[int, Sequence[tuple[Limits, Limits]]], Sequence[tuple[Limits, Limits, tuple[int, ...]]], np.ndarray]:
    """The boxes of an array without its padding, each with that of its shard.

    First those that one process holds, by process; then those of several, with the processes; and how many elements
    each process has of the first kind.
    """
    holders: dict[Limits, set[int]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map(held_shape).items():
        holders[limits(index, held_shape)].add(device.process_index)
    alone: dict[int, list[tuple[Limits, Limits]]] = collections.defaultdict(list)
    several, sizes = [], np.zeros(processes, np.int64)
    for held, owners in holders.items():
        box = tuple((start, min(stop, size)) for (start, stop), size in zip(held, shape, strict=True))
        if any(start >= stop for start, stop in box):
            continue  # padding
        if len(owners) > 1:
            several.append((box, held, tuple(sorted(owners))))
        else:
            (owner,) = owners
            alone[owner].append((box, held))
            sizes[owner] += _size(box)
    return alone, several, sizes


def limits(index: Sequence[slice], shape: Sequence[int]) -> Limits:
    """An index of an array, as where it begins and ends along each dim."""
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
    )


def _size(box: Limits) -> int:
    return math.prod(stop - start for start, stop in box)


def _cut(box: Limits, count: int) -> list[Limits]:
    """A box in so many parts, or fewer, that are contiguous in it."""
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if dim is None or count < 2:
        return [box]
    start, stop = box[dim]
    count = min(count, stop - start)
    ends = [start + (stop - start) * number // count for number in range(count + 1)]
    return [(*box[:dim], (a, b), *box[dim + 1 :]) for a, b in itertools.pairwise(ends)]


class HeldState:
    """The values that this process writes of some leaves, on the host: the arrays may be overwritten or deleted.

    Args:
        leaves: arrays and values of Python by path, as they are numbered.
        stored: what each of them is in the checkpoint.
        most_bytes: of a file.
    """

    def __init__(
        self, leaves: Mapping[str, Any], stored: Mapping[str, StoredLeaf], *, most_bytes: int = FILE_BYTES
    ) -> None:
        numbers = {path: number for number, path in enumerate(leaves)}
        full = {path: _numbers(leaf) for path, leaf in leaves.items() if stored[path].nbytes}
        facts = tuple(_facts(numbers[path], path, leaf, stored[path]) for path, leaf in full.items())
        self._plan = plan(facts, jax.process_index(), jax.process_count(), most_bytes)
        needed = {number for file in self._plan.parts for number, *_ in file}
        self._arrays: dict[tuple[int, Limits], Any] = {}
        for path, leaf in full.items():
            if (number := numbers[path]) not in needed:
                continue
            if not isinstance(leaf, jax.Array):
                self._arrays[number, tuple((0, size) for size in leaf.shape)] = leaf
                continue
            for shard in leaf.addressable_shards:
                self._arrays.setdefault((number, limits(shard.index, leaf.shape)), shard.data)
        used = {(number, box) for file in self._plan.parts for number, box, _ in file}
        self._arrays = {place: values for place, values in self._arrays.items() if place in used}
        for values in self._arrays.values():
            if isinstance(values, jax.Array):
                values.copy_to_host_async()
        # On a CPU these are no copies, and keep the values when the array is donated.
        self._arrays = {place: np.asarray(values) for place, values in self._arrays.items()}

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """The layouts of the files that this process writes."""
        return self._plan.files

    @property
    def num_bytes(self) -> int:
        """Bytes of the values that this process writes."""
        return self._plan.num_bytes

    def values(self, file: int, number: int) -> np.ndarray:
        """The values of a piece."""
        leaf, box, part = self._plan.parts[file][number]
        values = self._arrays[leaf, box]
        return np.ascontiguousarray(values if part is None else values[part])


def _numbers(leaf: Any) -> Any:
    """An array as numbers: a random key is its own."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _facts(number: int, path: str, leaf: Any, stored: StoredLeaf) -> LeafFacts:
    sharding = (leaf.sharding, tuple(leaf.shape)) if isinstance(leaf, jax.Array) else None
    return LeafFacts(number, path, stored.shape, stored.dtype, sharding)
