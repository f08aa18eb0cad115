"""Reads bytes once for several processes: if they need the same boxes, each reads a part, and they exchange them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jshard._processes import exchange
from jshard.checkpoint.converting import Target
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.packed.file_reads import Read, take_bytes
from jshard.checkpoint.packed.host_memory import HOST_MEMORY
from jshard.checkpoint.packed.layout import Limits, limits, up
from jshard.checkpoint.state.local_arrays import first_devices

_PADDED_BYTES = 4 << 20  # shares are padded to multiples of this, so that one program moves most of them


def read_group(targets: Iterable[Target]) -> tuple[int, ...]:
    """Returns the processes that need the same boxes of every array as this one, including itself."""
    group = frozenset(range(jax.process_count()))
    for target in targets:
        if getattr(target, "sharding", None) is not None:
            group &= _processes_with_same_boxes(target.sharding, tuple(target.shape))
    return tuple(sorted(group))


@functools.lru_cache(maxsize=4096)
def _processes_with_same_boxes(sharding: Sharding, shape: tuple[int, ...]) -> frozenset[int]:
    boxes: dict[int, set[Limits]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map(shape).items():
        boxes[device.process_index].add(limits(index or (), shape))
    own_boxes = boxes[jax.process_index()]
    return frozenset(process for process, process_boxes in boxes.items() if process_boxes == own_boxes)


class OtherFailedError(Exception):
    """Another process could not read its part; that process reports why."""


class SharedReads:
    """The reads of a group of processes that need the same bytes of files.

    Of every batch, each process of the group reads a part, its share, and they exchange the shares. Other groups read
    other bytes. Yet all processes synchronize before each exchange, and so learn of one that fails or is absent: none
    may enter a collective that another one of its group will never enter.

    Attributes:
        count: the number of processes in the group.
    """

    def __init__(self, members: Sequence[int], *, timeout_s: float) -> None:
        self._members = members
        self._timeout_s = timeout_s
        self._member = members.index(jax.process_index())
        self.count = len(members)
        # All processes meet as often as the group with the most batches; None before that number is known.
        self._meetings_left: int | None = None
        # One device of each process exchanges the bytes for all of them: they go to the host in any case.
        self._mesh = Mesh(np.array([first_devices()[process] for process in members]), "member")

    def start(self, num_batches: int, requested: str) -> None:
        """Announces to all processes how many batches this one will read, and of which leaves (a digest)."""
        replies = exchange("batches to read once", [num_batches, requested], timeout_s=self._timeout_s)
        self._meetings_left = max(count for count, _ in replies)
        if any(count < 0 for count, _ in replies):  # see `fail`
            self._meetings_left = 0
            raise OtherFailedError
        differing = [process for process in self._members if replies[process][1] != requested]
        if differing:
            raise CheckpointError(
                "The processes do not request the same leaves.",
                where=f"process {jax.process_index()}, and process {', '.join(map(str, differing))}",
                why="reading once needs the same `like`, `only` and `rename` on every process.",
                do="restore with the same arguments on every process, or with read_once=False.",
            )

    def begin(self, work: Sequence[Read], pool: Executor) -> tuple[np.ndarray, list[Future[None]]]:
        """Starts to read this process's share of a batch; returns its buffer, and the reads that fill it."""
        share_bytes = self._share_bytes(work)
        # Small shares are padded to a power of two: up to `_PADDED_BYTES`, they would be mostly padding.
        num_bytes = min(up(share_bytes, _PADDED_BYTES), 1 << share_bytes.bit_length())
        share = HOST_MEMORY.take(num_bytes)
        share_start = self._member * share_bytes
        share_stop = share_start + share_bytes

        reads = []
        read_start = 0  # positions are those in the batch, where reads follow each other
        for read in work:
            read_stop = read_start + read.num_bytes
            start = max(read_start, share_start)
            stop = min(read_stop, share_stop)
            if start < stop:
                view = share[start - share_start : stop - share_start].data
                offset = read.start + start - read_start
                reads.append(pool.submit(read.source.read, read.name, offset, [view]))
            read_start = read_stop
        return share, reads

    def end(self, work: Sequence[Read], share: np.ndarray, reads: Iterable[Future[None]]) -> Iterator[list[memoryview]]:
        """Waits for this process's reads, exchanges the shares, and yields the bytes of each read of the batch."""
        for read in reads:
            read.result()
        self._meet(is_good=True)
        # A mesh of the caller may be active, under which jax would refuse this program.
        with jax.set_mesh(self._mesh):
            sharding = NamedSharding(self._mesh, PartitionSpec("member"))
            shares = jax.make_array_from_callback((share.size * self.count,), sharding, lambda _: share)
            gathered = np.asarray(_all_gather(self._mesh)(shares).addressable_shards[0].data)
        share_bytes = self._share_bytes(work)
        views = collections.deque(padded[:share_bytes].data for padded in np.split(gathered, self.count))
        for read in work:
            yield take_bytes(views, read.num_bytes)

    def _share_bytes(self, work: Sequence[Read]) -> int:
        """Returns the size of a member's share of a batch; the last member's may hold less."""
        batch_bytes = sum(read.num_bytes for read in work)
        # At least 1: a batch of arrays without elements has an exchange like any other.
        return max(1, -(-batch_bytes // self.count))

    def close(self) -> None:
        """Meets the others for as long as they read: this process has no more batches."""
        while self._meetings_left:
            self._meet(is_good=True)

    def fail(self) -> None:
        """Notifies the others, where they wait for it, that this process cannot continue."""
        if self._meetings_left is None:
            exchange("batches to read once", [-1, ""], timeout_s=self._timeout_s)
        elif self._meetings_left:
            self._meet(is_good=False)

    def _meet(self, *, is_good: bool) -> None:
        """Synchronizes all processes; raises `OtherFailedError` if another one has failed."""
        assert self._meetings_left
        self._meetings_left -= 1
        if not all(exchange("a batch to read once", is_good, timeout_s=self._timeout_s)):
            self._meetings_left = 0  # the process that failed takes part in no further one
            if is_good:
                raise OtherFailedError


@functools.lru_cache(maxsize=8)
def _all_gather(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    # The identity: a replicated result makes it an all-gather.
    return jax.jit(lambda shares: shares, out_shardings=NamedSharding(mesh, PartitionSpec()))
