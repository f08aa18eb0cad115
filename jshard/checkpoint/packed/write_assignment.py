"""Assigns writes to processes: every box of every leaf is written once, balanced by bytes over its holders.

Every process computes the same assignment from the shardings alone, so none has to ask the others. A box that only one
process holds is written by that process. A box that several hold is cut into parts if it is large, and each part goes
to the holder that has the least to write so far.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jshard.checkpoint.packed.layout import FileLayout, Limits, Piece, device_boxes, lay_out_files, size_of, whole_box

_LEAST_PART_BYTES = 256 << 10
"""A box that several processes hold is not cut into parts smaller than this."""


@dataclasses.dataclass(frozen=True)
class LeafToWrite:
    """Describes how a leaf is written; equal on all processes.

    Attributes:
        number: the leaf's index in the checkpoint.
        path: its path.
        shape: its written shape, without padding.
        dtype: the name of its elements' dtype.
        sharding: of an array on devices; None for one on the host, of which the first process writes its copy.
        padded_shape: of an array on devices, its shape there, with padding.
    """

    number: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding | None
    padded_shape: tuple[int, ...] = ()

    @functools.cached_property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class PieceSource:
    """Where the values of a piece are on the process that writes it.

    Attributes:
        leaf: the leaf's index in the checkpoint.
        shard_box: the box of the shard that contains the piece, with padding.
        part: the piece in that shard; None if it is all of it.
    """

    leaf: int
    shard_box: Limits
    part: tuple[slice, ...] | None


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """What one process writes.

    Attributes:
        files: the layout of each file.
        sources: for each file, the source of each of its pieces.
    """

    files: tuple[FileLayout, ...]
    sources: tuple[tuple[PieceSource, ...], ...]


@functools.lru_cache(maxsize=8)  # the saves of a run write the same leaves
def plan_writes(
    leaves: tuple[LeafToWrite, ...], process: int, num_processes: int, most_bytes: int, *, first: int = 0
) -> WritePlan:
    """Returns what a process writes of some leaves.

    Args:
        leaves: the same on all processes.
        process: the index of the process.
        num_processes: the number of processes.
        most_bytes: a file that has this many bytes gets no more pieces.
        first: the process that writes the leaves on the host.
    """
    assignment = _Assignment(process, num_processes)
    shared_shards: list[tuple[LeafToWrite, _Shard]] = []
    for leaf in leaves:
        if leaf.sharding is None:
            box = whole_box(leaf.shape)
            assignment.assign(leaf, _Shard(box, box, (first,)), box, writer=first)
            continue
        shards = _shards_of(leaf.sharding, leaf.padded_shape, leaf.shape, num_processes)
        assignment.assign_unshared(leaf, shards)
        for shard in shards.shared:
            shared_shards.append((leaf, shard))
    # Large ones first: the small ones then even out what the large ones left uneven. The order is total, as all
    # processes must assign alike.
    shared_shards.sort(key=lambda pair: (-_num_bytes(*pair), pair[0].number, pair[1].box))
    for leaf, shard in shared_shards:
        assignment.assign_shared(leaf, shard)
    return assignment.plan(most_bytes)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A shard of an array, which several processes may hold.

    Attributes:
        box: its box without padding.
        padded_box: its box with padding, as the shard's array has it.
        holders: the processes that hold it, in ascending order.
    """

    box: Limits
    padded_box: Limits
    holders: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _ShardsOfArray:
    """The shards of an array that are not only padding.

    Attributes:
        by_process: those that only one process holds, by process.
        num_elements: the number of elements in those, of each process.
        shared: those that several processes hold.
    """

    by_process: Mapping[int, Sequence[_Shard]]
    num_elements: np.ndarray
    shared: Sequence[_Shard]


class _Assignment:
    """The load of all processes, and the pieces of one of them."""

    def __init__(self, process: int, num_processes: int) -> None:
        self._process = process
        self._load_bytes = np.zeros(num_processes, np.int64)
        self._pieces: list[Piece] = []
        self._sources: dict[tuple[int, Limits], PieceSource] = {}  # by leaf and box of the piece

    def assign(self, leaf: LeafToWrite, shard: _Shard, box: Limits, *, writer: int) -> None:
        """Lets a process write a box, which is a shard or a part of one."""
        self._load_bytes[writer] += size_of(box) * leaf.itemsize
        if writer == self._process:
            self._add_piece(leaf, shard, box)

    def assign_unshared(self, leaf: LeafToWrite, shards: _ShardsOfArray) -> None:
        """Lets each process write the shards that it alone holds."""
        # The shards of the other processes, of which there may be thousands, are counted and not visited.
        self._load_bytes += shards.num_elements * leaf.itemsize
        for shard in shards.by_process.get(self._process, ()):
            self._add_piece(leaf, shard, shard.box)

    def assign_shared(self, leaf: LeafToWrite, shard: _Shard) -> None:
        """Cuts a shard that several processes hold, and lets the least loaded of them write each part."""
        most_parts = _num_bytes(leaf, shard) // _LEAST_PART_BYTES
        for part in _cut(shard.box, min(len(shard.holders), most_parts)):
            # Of equal loads the first holder, in the order of `holders`: so on every process.
            writer = min(shard.holders, key=lambda holder: self._load_bytes[holder])
            self.assign(leaf, shard, part, writer=writer)

    def _add_piece(self, leaf: LeafToWrite, shard: _Shard, box: Limits) -> None:
        part = None
        if box != shard.padded_box:
            part = _within(shard.padded_box, box)
        self._pieces.append(Piece(leaf.number, leaf.path, jnp.dtype(leaf.dtype), box))
        self._sources[leaf.number, box] = PieceSource(leaf.number, shard.padded_box, part)

    def plan(self, most_bytes: int) -> WritePlan:
        """Lays out the pieces in files."""
        # By leaf and box, as they are read: neighbours come in one read.
        in_order = sorted(self._pieces, key=lambda piece: (piece.leaf, piece.box))
        files = lay_out_files(in_order, most_bytes=most_bytes)
        sources = []
        for file in files:
            # Not `in_order`: a file has its large pieces first.
            sources.append(tuple(self._sources[piece.leaf, piece.box] for piece in file.pieces))
        return WritePlan(tuple(files), tuple(sources))


@functools.lru_cache(maxsize=4096)  # many leaves have the same sharding and shape
def _shards_of(
    sharding: Sharding, padded_shape: tuple[int, ...], shape: tuple[int, ...], num_processes: int
) -> _ShardsOfArray:
    """Finds the shards of an array, and the processes that hold each."""
    processes_by_box: dict[Limits, set[int]] = collections.defaultdict(set)
    for device, padded_box in device_boxes(sharding, padded_shape).items():
        processes_by_box[padded_box].add(device.process_index)

    by_process: dict[int, list[_Shard]] = collections.defaultdict(list)
    num_elements = np.zeros(num_processes, np.int64)
    shared: list[_Shard] = []
    for padded_box, processes in processes_by_box.items():
        box = _without_padding(padded_box, shape)
        if box is None:
            continue
        shard = _Shard(box, padded_box, tuple(sorted(processes)))
        if len(processes) == 1:
            (process,) = processes
            by_process[process].append(shard)
            num_elements[process] += size_of(box)
        else:
            shared.append(shard)
    return _ShardsOfArray(by_process, num_elements, shared)


def _without_padding(padded_box: Limits, shape: Sequence[int]) -> Limits | None:
    """Returns the part of a box that is in an array of this shape; None if all of it is padding."""
    box = []
    for (start, stop), size in zip(padded_box, shape, strict=True):
        if start >= min(stop, size):
            return None
        box.append((start, min(stop, size)))
    return tuple(box)


def _within(padded_box: Limits, box: Limits) -> tuple[slice, ...]:
    """Returns a box as an index of the values of a shard, which begin at the start of its padded box."""
    index = []
    for (shard_start, _), (start, stop) in zip(padded_box, box, strict=True):
        index.append(slice(start - shard_start, stop - shard_start))
    return tuple(index)


def _num_bytes(leaf: LeafToWrite, shard: _Shard) -> int:
    return size_of(shard.box) * leaf.itemsize


def _cut(box: Limits, num_parts: int) -> list[Limits]:
    """Cuts a box into at most this many parts, each contiguous in it."""
    dim = _first_dim_to_cut(box)
    if dim is None or num_parts < 2:
        return [box]
    start, stop = box[dim]
    size = stop - start
    num_parts = min(num_parts, size)
    parts = []
    for number in range(num_parts):
        # The last part ends where the box does: rounding leaves no row out, and takes none twice.
        part_start = start + size * number // num_parts
        part_stop = start + size * (number + 1) // num_parts
        parts.append((*box[:dim], (part_start, part_stop), *box[dim + 1 :]))
    return parts


def _first_dim_to_cut(box: Limits) -> int | None:
    """Returns the first dim with more than one row: a part of it is contiguous, as all dims before it have one row."""
    for dim, (start, stop) in enumerate(box):
        if stop - start > 1:
            return dim
    return None
