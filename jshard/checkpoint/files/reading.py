"""Reads ranges of packed files: exactly the bytes that are wanted, merged, each block of the file checked.

Ranges that are near each other are one read, into all their buffers at once; what is between them, and what is left of
a block at the ends, is read beside and dropped.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jshard.checkpoint.files.layout import BLOCK_BYTES, block_sum, cut_views
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
                self._view = memoryview(bytearray(self.end - self.offset))
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


def reads(
    source: FileSource, name: str, ranges: Iterable[Range], *, sums: np.ndarray | None, end: int
) -> Iterator[Callable[[], None]]:
    """The reads that some ranges of a file come to, each to be done in any thread.

    Args:
        source: where the file is.
        name: of the file.
        ranges: what is wanted; they do not overlap.
        sums: of the blocks of the file; None to check nothing.
        end: where the blocks end.
    """
    unit = 1 if sums is None else BLOCK_BYTES
    run: list[Range] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if run and each.offset // unit * unit - _up(run[-1].end, unit) > source.gap_bytes:
            yield from _run(source, name, run, sums, end)
            run = []
        run.append(each)
    if run:
        yield from _run(source, name, run, sums, end)


def _run(
    source: FileSource, name: str, run: Sequence[Range], sums: np.ndarray | None, end: int
) -> Iterator[Callable[[], None]]:
    """Cuts ranges near each other into reads of some MiB: between blocks, where they are checked."""
    unit = 1 if sums is None else BLOCK_BYTES
    cuts = [*range(run[0].offset // unit * unit, run[-1].end, READ_BYTES), min(_up(run[-1].end, unit), end)]
    pieces: list[tuple[int, int, list[Range]]] = []
    first = 0
    for start, stop in itertools.pairwise(cuts):
        while run[first].end <= start:
            first += 1
        here = list(itertools.takewhile(lambda each: each.offset < stop, itertools.islice(run, first, None)))  # noqa: B023
        for each in here:
            each.expect()
        pieces.append((start, stop, here))
    for start, stop, here in pieces:
        yield lambda start=start, stop=stop, here=here: _read(source, name, start, stop, here, sums)


def _read(
    source: FileSource, name: str, start: int, stop: int, ranges: Sequence[Range], sums: np.ndarray | None
) -> None:
    views, place = [], start
    for each in ranges:
        if each.offset > place:
            views.append(memoryview(bytearray(each.offset - place)))
            place = each.offset
        until = min(stop, each.end)
        views.append(each.part(place, until))
        place = until
    if stop > place:
        views.append(memoryview(bytearray(stop - place)))
    source.read(name, start, views)
    if sums is not None:
        for begin, end in changed(start, views, sums):
            raise ChangedError(name, begin, end)
    for each in ranges:
        each.came()


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


def do_all(work: Iterable[Callable[[], None]], *, threads: int) -> None:
    """Does the reads, some at a time; the first error ends it."""
    with concurrent.futures.ThreadPoolExecutor(threads, "jshard-read") as pool:
        futures = [pool.submit(each) for each in work]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
