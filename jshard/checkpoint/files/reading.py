"""Reads boxes of leaves out of packed files: exactly the ranges of bytes that are wanted, merged, each block checked.

A *range* is some bytes of a file that go into one buffer. Ranges that are near each other are one read, into all their
buffers at once; what lies between them, and what is left of a block at the ends, is read beside and dropped.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jshard.checkpoint.files.layout import BLOCK_BYTES, block_sum, cut_views
from jshard.checkpoint.files.places import Source

_READ_BYTES = 4 << 20
_counting = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Some bytes of a file, and the buffer that they go into, which is as long.

    Attributes:
        offset: in the file.
        view: the buffer.
        then: called when they are there, in any thread.
    """

    offset: int
    view: memoryview
    then: Callable[[], None]

    @property
    def end(self) -> int:
        """Where they end in the file."""
        return self.offset + self.view.nbytes


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
    source: Source, name: str, ranges: Iterable[Range], *, sums: np.ndarray | None, end: int
) -> Iterable[Callable[[], None]]:
    """The reads that some ranges of a file come to, each to be done in any thread.

    Args:
        source: where the file is.
        name: of the file.
        ranges: what is wanted; they do not overlap.
        sums: of the blocks of the file; None to check nothing.
        end: where the blocks end.
    """
    run: list[Range] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if run and each.offset - run[-1].end > source.gap_bytes + (BLOCK_BYTES if sums is not None else 0):
            yield from _run(source, name, run, sums, end)
            run = []
        run.append(each)
    if run:
        yield from _run(source, name, run, sums, end)


def _run(
    source: Source, name: str, run: Sequence[Range], sums: np.ndarray | None, end: int
) -> Iterable[Callable[[], None]]:
    """Cuts ranges near each other into reads of some MiB: between blocks, where they are checked."""
    unit = 1 if sums is None else BLOCK_BYTES
    begin, stop = run[0].offset // unit * unit, min(-(-run[-1].end // unit) * unit, max(end, run[-1].end))
    left = {id(each): 0 for each in run}
    first = 0
    cuts = [*range(begin, stop, _READ_BYTES), stop]
    pieces: list[tuple[int, int, list[Range]]] = []
    for start, until in zip(cuts, cuts[1:], strict=False):
        while first < len(run) and run[first].end <= start:
            first += 1
        here = []
        for each in run[first:]:
            if each.offset >= until:
                break
            here.append(each)
            left[id(each)] += 1
        pieces.append((start, until, here))
    for start, until, here in pieces:
        yield lambda start=start, until=until, here=here: _read(source, name, start, until, here, sums, left)


def _read(
    source: Source,
    name: str,
    start: int,
    stop: int,
    ranges: Sequence[Range],
    sums: np.ndarray | None,
    left: dict[int, int],
) -> None:
    views, place = [], start
    for each in ranges:
        if each.offset > place:
            views.append(memoryview(bytearray(each.offset - place)))
            place = each.offset
        until = min(stop, each.end)
        views.append(each.view[place - each.offset : until - each.offset])
        place = until
    if stop > place:
        views.append(memoryview(bytearray(stop - place)))
    source.read(name, start, views)
    if sums is not None:
        check(name, start, views, sums)
    for each in ranges:
        with _counting:
            left[id(each)] -= 1
            is_whole = not left[id(each)]
        if is_whole:
            each.then()


def check(name: str, start: int, views: Sequence[memoryview], sums: np.ndarray) -> None:
    """Raises a `ChangedError` if blocks are not as they were written.

    Args:
        name: of the file.
        start: where the first block begins in it.
        views: the buffers with the bytes of whole blocks, one after the other.
        sums: of all blocks of the file.
    """
    for number, block in enumerate(cut_views(views, BLOCK_BYTES), start // BLOCK_BYTES):
        if block_sum(block) != int(sums[number]):
            begin = number * BLOCK_BYTES
            raise ChangedError(name, begin, begin + sum(view.nbytes for view in block))


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
