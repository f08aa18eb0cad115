"""Reads ranges of packed files: exactly the bytes that are wanted, merged, each block of the file checked.

Ranges that are near each other are one read, into all their buffers at once; what is between them, and what is left of
a block at the ends, is read beside and dropped.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jshard.checkpoint.files.layout import BLOCK_BYTES, block_sum, cut_views
from jshard.checkpoint.files.memory import HOST_MEMORY
from jshard.checkpoint.files.places import FileSource

READ_BYTES = 4 << 20
_counting = threading.Lock()


class Range:
    """Some bytes of a file that are wanted in one buffer.

    Args:
        offset: in the file.
        num_bytes: how many.
        view: the buffer; None for one that is there from the first read until `then` is done.
        then: called with the buffer when they are all there, in any thread.
    """

    __slots__ = ("_left", "_then", "_view", "end", "offset")

    def __init__(
        self,
        offset: int,
        num_bytes: int,
        view: memoryview | None = None,
        then: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.offset, self.end, self._view, self._then, self._left = offset, offset + num_bytes, view, then, 0

    def part(self, start: int, stop: int) -> memoryview:
        """The buffer for some bytes of the file."""
        with _counting:
            if self._view is None:
                self._view = HOST_MEMORY.take(self.end - self.offset).data
        return self._view[start - self.offset : stop - self.offset]

    def expect(self) -> None:
        """One more read has a part of it."""
        self._left += 1

    def came(self) -> None:
        """One of these is done."""
        with _counting:
            self._left -= 1
            if self._left:
                return
        if self._then is not None and self._view is not None:
            self._then(self._view)
        self._view = None


class ChangedError(ValueError):
    """Bytes of a file are not those that were written.

    Attributes:
        start: where the block begins that they are in.
        stop: where it ends.
    """

    def __init__(self, name: str, start: int, stop: int) -> None:
        self.name, self.start, self.stop = name, start, stop
        super().__init__(f"{name}: bytes {start} to {stop} are not those that were written")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """Some bytes of a file that are read at a time, and the ranges that have a part of them; any thread may do it.

    Attributes:
        source: where the file is.
        name: of the file.
        start: the first byte.
        stop: the one behind the last.
        ranges: what is wanted of it, in the order of the file.
        sums: of the blocks of the file; None to check nothing.
        mapped: the file in memory, where it is to be checked alone.
    """

    source: FileSource
    name: str
    start: int
    stop: int
    ranges: Sequence[Range]
    sums: np.ndarray | None
    mapped: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.stop - self.start

    def __call__(self, given: Iterable[memoryview] | None = None) -> None:
        """Reads, or takes what was read, and checks it; a `ChangedError` if it is not what was written."""
        taken = None if given is None else collections.deque(given)
        start = self.start
        views = self._views() if self.mapped is None else [self.mapped[start : self.stop].data]
        for some in cut_views(views, self.source.read_bytes):
            if self.mapped is not None:
                pass
            elif taken is None:
                self.source.read(self.name, start, some)
            else:
                _fill(some, taken)
            if self.sums is not None:
                for begin, end in changed(start, some, self.sums):
                    raise ChangedError(self.name, begin, end)
            start += self.source.read_bytes
        for each in self.ranges if self.mapped is None else ():
            each.came()

    def _views(self) -> Iterator[memoryview]:
        """The buffers for all of it; what nobody wants goes into some that are dropped."""
        place = self.start
        for each in self.ranges:
            if each.offset > place:
                yield HOST_MEMORY.take(each.offset - place).data
                place = each.offset
            until = min(self.stop, each.end)
            yield each.part(place, until)
            place = until
        if self.stop > place:
            yield HOST_MEMORY.take(self.stop - place).data


def _fill(views: Iterable[memoryview], given: collections.deque[memoryview]) -> None:
    for view in views:
        for some in take_bytes(given, view.nbytes):
            view[: some.nbytes] = some
            view = view[some.nbytes :]


def take_bytes(given: collections.deque[memoryview], num_bytes: int) -> list[memoryview]:
    """Takes so many bytes off the beginning of some buffers."""
    found: list[memoryview] = []
    while num_bytes:
        view = given.popleft()
        if view.nbytes > num_bytes:
            given.appendleft(view[num_bytes:])
        found.append(view[:num_bytes])
        num_bytes -= found[-1].nbytes
    return found


def reads(
    source: FileSource,
    name: str,
    ranges: Iterable[Range],
    *,
    sums: np.ndarray | None,
    end: int,
    mapped: np.ndarray | None = None,
) -> Iterator[Read]:
    """The reads that some ranges of a file come to.

    Args:
        source: where the file is.
        name: of the file.
        ranges: what is wanted; they do not overlap.
        sums: of the blocks of the file; None to check nothing.
        end: where the blocks end.
        mapped: the file in memory, where it is to be checked alone.
    """
    unit = 1 if sums is None else BLOCK_BYTES
    run: list[Range] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if run and each.offset // unit * unit - _up(run[-1].end, unit) > source.gap_bytes:
            yield from (dataclasses.replace(read, mapped=mapped) for read in _run(source, name, run, sums, end))
            run = []
        run.append(each)
    if run:
        yield from (dataclasses.replace(read, mapped=mapped) for read in _run(source, name, run, sums, end))


def _run(source: FileSource, name: str, run: Sequence[Range], sums: np.ndarray | None, end: int) -> list[Read]:
    """Cuts ranges near each other into reads of some MiB: between blocks, where they are checked."""
    unit = 1 if sums is None else BLOCK_BYTES
    cuts = [*range(run[0].offset // unit * unit, run[-1].end, READ_BYTES), min(_up(run[-1].end, unit), end)]
    found: list[Read] = []
    first = 0
    for start, stop in itertools.pairwise(cuts):
        while run[first].end <= start:
            first += 1
        here = list(itertools.takewhile(lambda each: each.offset < stop, itertools.islice(run, first, None)))  # noqa: B023
        for each in here:
            each.expect()
        found.append(Read(source=source, name=name, start=start, stop=stop, ranges=here, sums=sums))
    return found


def changed(start: int, views: Sequence[memoryview], sums: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where blocks of a file begin and end that are not as they were written.

    Args:
        start: where the first block begins in the file.
        views: the buffers with the bytes of whole blocks, one after the other.
        sums: of all blocks of the file.
    """
    for number, block in enumerate(cut_views(views, BLOCK_BYTES), start // BLOCK_BYTES):
        if block_sum(block) != int(sums[number]):
            yield number * BLOCK_BYTES, number * BLOCK_BYTES + sum(view.nbytes for view in block)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
