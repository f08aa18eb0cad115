"""Reads ranges of files: only the needed bytes, and every block that they touch is checked.

Ranges that are close together are merged into one read, which fills all their buffers at once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jshard.checkpoint.packed.file_io import FileSource
from jshard.checkpoint.packed.host_memory import HOST_MEMORY
from jshard.checkpoint.packed.layout import BLOCK_BYTES, block_sum, cut_views, up

READ_BYTES = 4 << 20
"""A longer run of ranges is cut into several reads, which may run at the same time."""

_counting = threading.Lock()  # one for all ranges, of which there are many


class Range:
    """A range of a file to be read into one buffer.

    Several reads may each cover a part of it.

    Args:
        offset: its first byte.
        num_bytes: its size.
        view: the buffer; by default one from the pool when the first read needs it.
        then: called with the filled buffer when the last of its reads is done, by the thread of that read.
    """

    __slots__ = ("_num_reads_left", "_then", "_view", "end", "offset")

    def __init__(
        self,
        offset: int,
        num_bytes: int,
        view: memoryview | None = None,
        then: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.offset = offset
        self.end = offset + num_bytes
        self._view = view
        self._then = then
        self._num_reads_left = 0

    def buffer(self, start: int, stop: int) -> memoryview:
        """Returns the buffer for some bytes of the file."""
        with _counting:
            if self._view is None:
                self._view = HOST_MEMORY.take(self.end - self.offset).data
        return self._view[start - self.offset : stop - self.offset]

    def expect_read(self) -> None:
        """Counts one more read that covers a part of the range."""
        self._num_reads_left += 1

    def end_read(self) -> None:
        """Counts one such read as done."""
        with _counting:
            self._num_reads_left -= 1
            if self._num_reads_left:
                return
        if self._then is not None and self._view is not None:
            self._then(self._view)
        # The last reference here: a buffer from the pool returns to it.
        self._view = None


class ChangedError(ValueError):
    """Bytes of a file have changed since they were written."""

    def __init__(self, name: str, start: int, stop: int) -> None:
        self.name = name
        self.start = start
        self.stop = stop
        super().__init__(f"{name}: bytes {start} to {stop} have changed since they were written")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """One read of a file, and the ranges that it covers in part; any thread may run it."""

    source: FileSource  # the folder or bucket of the file
    name: str  # the file's name
    start: int  # the first byte
    stop: int  # one past the last byte
    ranges: Sequence[Range]  # those that it covers in part, in file order
    sums: np.ndarray | None  # checksums of the file's blocks; None to check nothing
    mapped: np.ndarray | None = None  # the mapped file, if it is only checked

    @property
    def num_bytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start

    def __call__(self, content: Iterable[memoryview] | None = None) -> None:
        """Reads, or takes bytes already read, and checks them; raises `ChangedError` if they have changed."""
        unread = None if content is None else collections.deque(content)
        start = self.start
        # Step by step, so that bytes are still in the processor's cache when their checksums are computed.
        for views in cut_views(self._views(), self.source.read_bytes):
            if self.mapped is None:
                self._fill(views, start, unread)
            if self.sums is not None:
                for changed_start, changed_stop in changed(start, views, self.sums):
                    raise ChangedError(self.name, changed_start, changed_stop)
            start += self.source.read_bytes
        if self.mapped is None:
            for file_range in self.ranges:
                file_range.end_read()

    def _fill(self, views: Sequence[memoryview], start: int, unread: collections.deque[memoryview] | None) -> None:
        """Fills buffers with the bytes from a position on: from the file, or with those already read."""
        if unread is None:
            self.source.read(self.name, start, views)
            return
        for view in views:
            for part in take_bytes(unread, view.nbytes):
                view[: part.nbytes] = part
                view = view[part.nbytes :]

    def _views(self) -> Iterator[memoryview]:
        """Yields the buffers for all its bytes; bytes between the ranges go into scratch buffers."""
        if self.mapped is not None:
            yield self.mapped[self.start : self.stop].data
            return
        position = self.start
        for file_range in self.ranges:
            if file_range.offset > position:
                yield HOST_MEMORY.take(file_range.offset - position).data
                position = file_range.offset
            end = min(self.stop, file_range.end)
            yield file_range.buffer(position, end)
            position = end
        if self.stop > position:
            yield HOST_MEMORY.take(self.stop - position).data


def take_bytes(views: collections.deque[memoryview], num_bytes: int) -> list[memoryview]:
    """Takes this many bytes off the start of some buffers."""
    taken: list[memoryview] = []
    while num_bytes:
        view = views.popleft()
        if view.nbytes > num_bytes:
            views.appendleft(view[num_bytes:])
            view = view[:num_bytes]
        taken.append(view)
        num_bytes -= view.nbytes
    return taken


def reads(
    source: FileSource,
    name: str,
    ranges: Iterable[Range],
    *,
    sums: np.ndarray | None,
    end: int,
    mapped: np.ndarray | None = None,
) -> Iterator[Read]:
    """Yields the reads that cover some ranges of a file.

    Args:
        source: the folder or bucket of the file.
        name: the file's name.
        ranges: in any order; they do not overlap.
        sums: checksums of the file's blocks; None to check nothing.
        end: where the file's blocks end.
        mapped: the mapped file, if it is only checked.
    """
    make_read = functools.partial(Read, source=source, name=name, sums=sums, mapped=mapped)
    unit = 1 if sums is None else BLOCK_BYTES  # a block can only be checked if all of it is read
    run: list[Range] = []
    for file_range in sorted(ranges, key=lambda file_range: file_range.offset):
        if run:
            start = file_range.offset // unit * unit
            gap_bytes = start - up(run[-1].end, unit)
            if gap_bytes > source.gap_bytes:
                yield from _reads_of_run(make_read, run, unit, end)
                run = []
        run.append(file_range)
    if run:
        yield from _reads_of_run(make_read, run, unit, end)


def _reads_of_run(make_read: Callable[..., Read], run: Sequence[Range], unit: int, end: int) -> list[Read]:
    """Cuts nearby ranges into reads of some MiB, at multiples of a unit, the blocks if they are checked."""
    first_byte = run[0].offset // unit * unit
    # The last block before the index may be shorter than a block.
    last_end = min(up(run[-1].end, unit), end)
    cuts = [*range(first_byte, run[-1].end, READ_BYTES), last_end]
    # All reads are counted before the first one runs: a range must not seem complete with its first read.
    run_reads = []
    first = 0
    for start, stop in itertools.pairwise(cuts):
        while run[first].end <= start:
            first += 1
        covered = []
        for file_range in itertools.islice(run, first, None):
            if file_range.offset >= stop:
                break
            file_range.expect_read()
            covered.append(file_range)
        run_reads.append(make_read(start=start, stop=stop, ranges=covered))
    return run_reads


def changed(start: int, views: Sequence[memoryview], sums: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the ranges of blocks of a file that have changed.

    Args:
        start: the position of the buffers in the file, where a block begins.
        views: the bytes.
        sums: checksums of the file's blocks.
    """
    for number, block in enumerate(cut_views(views, BLOCK_BYTES), start // BLOCK_BYTES):
        if block_sum(block) != int(sums[number]):
            block_start = number * BLOCK_BYTES
            yield block_start, block_start + sum(view.nbytes for view in block)
