"""Assigns writes to processes: every box of every leaf is written once, balanced by bytes over its holders.

Every process computes the same result from the shardings alone. A box held by several processes is written by the one
with the least to write; a large box is cut, and each holder writes a part. If several processes read the same box,
each can read a part, and they exchange the parts (`Together`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jshard._processes import exchange
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.file_io import HOST_MEMORY, Parts, Read, Sink, take_bytes
from jshard.checkpoint.layout import (
    BLOCK_BYTES,
    FILE_BYTES,
    FileLayout,
    Limits,
    Piece,
    block_sum,
    cut_views,
    device_boxes,
    laid_out,
    limits,
    num_blocks,
    size_of,
    up,
)
from jshard.checkpoint.leaves import first_devices
from jshard.checkpoint.manifest import Manifest, StoredLeaf

_LEAST_BYTES = 256 << 10  # of a part of a box that is split


@dataclasses.dataclass(frozen=True)
class LeafFacts:
    """Describes how a leaf is written; equal on all processes."""

    number: int  # the leaf's index in the checkpoint
    path: str  # of the leaf
    shape: tuple[int, ...]  # the written shape, without padding
    dtype: str  # the name of the elements' dtype
    # of an array on devices, with its shape there; None for one on the host, whose copy on the first process is
    # written
    sharding: tuple[Sharding, tuple[int, ...]] | None


@functools.lru_cache(maxsize=8)
def plan(
    leaves: tuple[LeafFacts, ...], process: int, processes: int, most_bytes: int
) -> tuple[tuple[FileLayout, ...], tuple[tuple[tuple[int, Limits, tuple[slice, ...] | None], ...], ...]]:
    """What a process writes for some leaves: the layout of each file, and the source of its pieces.

    The source of a piece is the number of the leaf, the box of the shard that contains it, and its part of that box.
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
            load[0] += size_of(box) * itemsize
            if process == 0:
                take(facts, box, box)
            continue
        alone, several, sizes = _holders(*facts.sharding, facts.shape, processes)
        load += sizes * itemsize
        for box, held in alone.get(process, ()):
            take(facts, box, held)
        shared += [(-size_of(box) * itemsize, place, box, held, owners) for box, held, owners in several]
    for least, place, box, held, owners in sorted(shared, key=lambda each: each[:3]):
        for part in _cut(box, min(len(owners), -least // _LEAST_BYTES)):
            owner = min(owners, key=lambda owner: load[owner])
            load[owner] += size_of(part) * jnp.dtype(leaves[place].dtype).itemsize
            if owner == process:
                take(leaves[place], part, held)
    files = laid_out(sorted(pieces, key=lambda piece: (piece.leaf, piece.box)), most_bytes=most_bytes)
    parts = tuple(tuple((piece.leaf, *mine[piece.leaf, piece.box]) for piece in file.pieces) for file in files)
    return tuple(files), parts


@functools.lru_cache(maxsize=4096)
def _holders(
    sharding: Sharding, held_shape: tuple[int, ...], shape: tuple[int, ...], processes: int
) -> tuple[Mapping[int, Sequence[tuple[Limits, Limits]]], Sequence[tuple[Limits, Limits, tuple[int, ...]]], np.ndarray]:
    """The boxes of an array without its padding, each with the box of its shard.

    First the boxes held by one process, by process; then the boxes held by several, with the processes; and the number
    of elements of the first kind on each process.
    """
    holders: dict[Limits, set[int]] = collections.defaultdict(set)
    for device, held in device_boxes(sharding, held_shape).items():
        holders[held].add(device.process_index)
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
            sizes[owner] += size_of(box)
    return alone, several, sizes


def _cut(box: Limits, count: int) -> list[Limits]:
    """Splits a box into at most this many parts, each contiguous in it."""
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if dim is None or count < 2:
        return [box]
    start, stop = box[dim]
    count = min(count, stop - start)
    ends = [start + (stop - start) * number // count for number in range(count + 1)]
    return [(*box[:dim], (a, b), *box[dim + 1 :]) for a, b in itertools.pairwise(ends)]


class HeldState:
    """Host copies of the values that this process writes; the arrays may then be overwritten or deleted."""

    def __init__(
        self, leaves: Mapping[str, Any], stored: Mapping[str, StoredLeaf], *, most_bytes: int = FILE_BYTES
    ) -> None:
        numbers = {path: number for number, path in enumerate(leaves)}
        full = {path: _numbers(leaf) for path, leaf in leaves.items() if stored[path].nbytes}
        layout = lambda leaf: (leaf.sharding, tuple(leaf.shape)) if isinstance(leaf, jax.Array) else None
        facts = tuple(
            LeafFacts(numbers[path], path, stored[path].shape, stored[path].dtype, layout(leaf))
            for path, leaf in full.items()
        )
        self.files, self._parts = plan(facts, jax.process_index(), jax.process_count(), most_bytes)
        used = {(number, box) for file in self._parts for number, box, _ in file}
        self._arrays: dict[tuple[int, Limits], Any] = {}
        for path, leaf in full.items():
            number = numbers[path]
            if not isinstance(leaf, jax.Array):
                held = [(tuple((0, size) for size in leaf.shape), leaf)]
            else:
                boxes = device_boxes(leaf.sharding, leaf.shape)
                held = [(boxes[shard.device], shard) for shard in leaf.addressable_shards]
            for box, values in held:
                if (number, box) in used and (number, box) not in self._arrays:
                    self._arrays[number, box] = values if values is leaf else values.data
        for values in self._arrays.values() if jax.default_backend() != "cpu" else ():
            if isinstance(values, jax.Array):
                values.copy_to_host_async()
        # On a CPU these are not copies, but they keep the values when the array is donated.
        self._arrays = {place: np.asarray(values) for place, values in self._arrays.items()}

    def values(self, file: int, number: int) -> np.ndarray:
        """The values of a piece."""
        leaf, box, part = self._parts[file][number]
        values = self._arrays[leaf, box]
        return np.ascontiguousarray(values if part is None else values[part])


def _numbers(leaf: Any) -> Any:
    """An array as numbers; a random key becomes its key data."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


_ZEROS = memoryview(bytes(8 << 10))  # padding is shorter than a page


def write_files(
    sink: Sink, layouts: Sequence[FileLayout], values: Callable[[int, int], np.ndarray], *, begin: str = ""
) -> dict[str, tuple[int, int]]:
    """Writes the files of this process, and returns when they are on disk."""
    found = {}
    for number, layout in enumerate(layouts):
        name = f"{begin}{jax.process_index():05d}-{number:03d}.safetensors"
        found[name] = layout.num_bytes, write_file(sink, name, layout, lambda piece, n=number: values(n, piece))
    return found


def write_file(sink: Sink, name: str, layout: FileLayout, values: Callable[[int], np.ndarray]) -> int:
    """Writes a file, and returns when it is on disk."""
    index = bytearray()
    sink.write(name, layout.num_bytes, _parts(layout, values, sink.part_bytes, index))
    return int.from_bytes(index[-16:-8], "little")


def _parts(layout: FileLayout, values: Callable[[int], np.ndarray], part_bytes: int, index: bytearray) -> Parts:
    """The content of a file, in parts; the index at its end is also written into a buffer."""
    sums = np.zeros(num_blocks(layout.index_begin), np.uint64)
    summed = threading.Semaphore(0)

    def part(number: int, views: list[memoryview]) -> list[memoryview]:
        for block, parts in enumerate(cut_views(views, BLOCK_BYTES), number * (part_bytes // BLOCK_BYTES)):
            sums[block] = block_sum(parts)
        summed.release()
        return views

    rest: list[memoryview] = []
    for number, views in enumerate(cut_views(_extents(layout, values), part_bytes)):
        if (number + 1) * part_bytes <= layout.index_begin:
            yield functools.partial(part, number, views)  # checksummed on the core that writes it next
        else:
            rest = part(number, views)
    for _ in range(-(-layout.index_begin // part_bytes)):
        summed.acquire()
    index += layout.index(sums.tolist())
    for views in cut_views([*rest, memoryview(bytes(index))], part_bytes):
        yield lambda views=views: views


def _extents(layout: FileLayout, values: Callable[[int], np.ndarray]) -> Iterator[memoryview]:
    yield memoryview(layout.header)
    end = len(layout.header)
    for number, offset in enumerate(layout.offsets):
        if offset > end:
            yield _ZEROS[: offset - end]
        view = values(number).reshape(-1).view(np.uint8).data
        yield view
        end = offset + view.nbytes
    if layout.index_begin > end:
        yield _ZEROS[: layout.index_begin - end]


_PADDED_BYTES = 4 << 20  # parts are multiples of this, so that one program moves most of them


def sharers(wanted: Iterable[Any]) -> tuple[int, ...]:
    """The processes that need the same boxes of every array as this one, including itself."""
    found = frozenset(range(jax.process_count()))
    for like in wanted:
        if getattr(like, "sharding", None) is not None:
            found &= _alike(like.sharding, tuple(like.shape))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)
def _alike(sharding: Sharding, shape: tuple[int, ...]) -> frozenset[int]:
    held: dict[int, set[Limits]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map(shape).items():
        held[device.process_index].add(limits(index or (), shape))
    return frozenset(process for process, boxes in held.items() if boxes == held[jax.process_index()])


class OtherFailedError(Exception):
    """Another process could not read its part; that process reports why."""


class Together:
    """Processes that need the same bytes of files: each reads a part of every batch, and they exchange the parts.

    Other groups of processes read other bytes. All processes synchronize before each exchange, so that all learn of one
    that fails or is absent.
    """

    def __init__(self, members: Sequence[int], *, timeout_s: float) -> None:
        self._members, self._timeout_s = members, timeout_s
        self._here, self.count = members.index(jax.process_index()), len(members)
        self._left: int | None = None
        self._mesh = Mesh(np.array([first_devices()[process] for process in members]), "member")

    def start(self, num_batches: int, wanted: str) -> None:
        """All processes announce how many batches they will read, and of which leaves."""
        heard = exchange("batches to read once", [num_batches, wanted], timeout_s=self._timeout_s)
        self._left = max(count for count, _ in heard)
        if any(count < 0 for count, _ in heard):
            self._left = 0
            raise OtherFailedError
        if others := [process for process in self._members if heard[process][1] != wanted]:
            raise CheckpointError(
                "The processes do not request the same leaves.",
                where=f"process {jax.process_index()}, and process {', '.join(map(str, others))}",
                why="reading once needs the same `like`, `only` and `rename` on every process.",
                do="restore with the same arguments on every process, or with read_once=False.",
            )

    def begin(self, work: Sequence[Read], pool: Executor) -> tuple[np.ndarray, list[Future[None]]]:
        """Reads the part of this process: a buffer, and a future for its completion."""
        share = self._share(work)
        part, found = HOST_MEMORY.take(min(up(share, _PADDED_BYTES), 1 << share.bit_length())), []
        begin, place = self._here * share, 0
        for read in work:
            first, last = max(place, begin), min(place + read.num_bytes, begin + share)
            if first < last:
                view = part[first - begin : last - begin].data
                found.append(pool.submit(read.source.read, read.name, read.start + first - place, [view]))
            place += read.num_bytes
        return part, found

    def end(self, work: Sequence[Read], part: np.ndarray, reads: Iterable[Future[None]]) -> Iterator[list[memoryview]]:
        """The bytes read for each piece of work, by any process."""
        for read in reads:
            read.result()
        self._meet(True)
        with jax.set_mesh(self._mesh):
            sharding = NamedSharding(self._mesh, PartitionSpec("member"))
            parts = jax.make_array_from_callback((part.size * self.count,), sharding, lambda _: part)
            whole = np.asarray(_gather(self._mesh)(parts).addressable_shards[0].data)
        views = collections.deque(each[: self._share(work)].data for each in np.split(whole, self.count))
        for read in work:
            yield take_bytes(views, read.num_bytes)

    def _share(self, work: Sequence[Read]) -> int:
        """The byte range of a process's part."""
        return max(1, -(-sum(read.num_bytes for read in work) // self.count))

    def close(self) -> None:
        """This process has no more batches; the others may."""
        while self._left:
            self._meet(True)

    def fail(self) -> None:
        """This process cannot continue: notifies the others where they wait for it."""
        if self._left is None:
            exchange("batches to read once", [-1, ""], timeout_s=self._timeout_s)
        elif self._left:
            self._meet(False)

    def _meet(self, is_good: bool) -> None:
        assert self._left
        self._left -= 1
        if not all(exchange("a batch to read once", is_good, timeout_s=self._timeout_s)):
            self._left = 0
            if is_good:
                raise OtherFailedError


@functools.lru_cache(maxsize=8)
def _gather(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda parts: parts, out_shardings=NamedSharding(mesh, PartitionSpec()))


HEAD_BYTES = 8
_ONE_FILE = 1 << 62  # bytes of a part, at most


# A state as packed parts, one per process: a checkpoint outside a folder, such as in another host's memory. A part is
# the length of a manifest, the manifest, and a packed file.


class Packing:
    """This process's part of a state. The values are copied or held at construction, so the next step may run."""

    def __init__(self, state: Any, *, step: int) -> None:
        leaves = _leaves.storable(_leaves.flatten(state))
        shapes = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(state).items()}
        stored = {key: _manifest.describe(leaf, shapes.get(key)) for key, leaf in leaves.items()}
        values = {key: leaves[key] for key, leaf in stored.items() if not leaf.is_array}
        self._manifest = Manifest(leaves=stored, step=step, values=values)
        self._held = HeldState(leaves, stored, most_bytes=_ONE_FILE)

    def finish(self) -> list[memoryview]:
        """The part as buffers to be written in order."""
        views = _Views()
        (layout,) = self._held.files
        checksum = write_file(views, "", layout, lambda number: self._held.values(0, number))
        described = dataclasses.replace(self._manifest, packed={"": (layout.num_bytes, checksum)})
        index = json.dumps(_manifest.to_json(described)).encode()
        return [memoryview(len(index).to_bytes(HEAD_BYTES, "little") + index), *views.found]


class _Views:
    """A `Sink` that keeps the buffers passed to it, without a copy."""

    part_bytes = 4 << 20

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        self.found = [view for part in parts for view in part()]
