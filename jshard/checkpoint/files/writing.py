"""Writes packed files: parts are put together, summed and written, each in a thread, while the next values come."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jshard.checkpoint.files.layout import BLOCK_BYTES, FileLayout, block_sum, cut_views, num_blocks
from jshard.checkpoint.files.places import Sink, SinkFile

Values = Callable[[int], np.ndarray]
"""The values of a piece of a file, by its number there: an array in the order of C."""

_ZEROS = memoryview(bytes(8 << 10))  # padding is shorter than a page


def write_file(
    sink: Sink, name: str, layout: FileLayout, values: Values, on_part: Callable[[], object] = lambda: None
) -> int:
    """Writes a file, and returns when it is on the disk.

    Args:
        sink: where to.
        name: of the file.
        layout: what is in it.
        values: asked for each piece once, in the order of the file.
        on_part: called when a part was written, in other threads.

    Returns:
        The sum of its index, which stands for everything in the file.
    """
    file = sink.create(name, layout.num_bytes)
    try:
        sums = np.zeros(num_blocks(layout.index_begin), np.uint64)
        whole = layout.index_begin // sink.part_bytes  # parts without any of the index
        parts = _parts(layout, values, sink.part_bytes)
        with _Workers(sink.threads) as workers:
            for number in range(whole):
                workers.do(_write, file, number, next(parts), sums, sink.part_bytes, on_part)
        rest = next(parts, [])
        _sum(rest, sums[whole * sink.part_bytes // BLOCK_BYTES :])
        index = layout.index(sums.tolist())
        left = [*rest, memoryview(index)]
        for number, views in enumerate(cut_views(left, sink.part_bytes), whole):
            file.write(number, views)
        on_part()
        file.finish()
    except BaseException:
        file.abort()
        raise
    return int.from_bytes(index[-16:-8], "little")


def _write(
    file: SinkFile,
    number: int,
    views: Sequence[memoryview],
    sums: np.ndarray,
    part_bytes: int,
    on_part: Callable[[], object],
) -> None:
    first = number * (part_bytes // BLOCK_BYTES)
    _sum(views, sums[first : first + part_bytes // BLOCK_BYTES])
    file.write(number, views)
    on_part()


def _sum(views: Sequence[memoryview], sums: np.ndarray) -> None:
    """The sums of the blocks that some buffers make up, one after the other."""
    for number, block in enumerate(cut_views(views, BLOCK_BYTES)):
        sums[number] = block_sum(block)


def _parts(layout: FileLayout, values: Values, part_bytes: int) -> Iterator[list[memoryview]]:
    """What is before the index, in parts: buffers, one after the other."""
    return cut_views(_extents(layout, values), part_bytes)


def _extents(layout: FileLayout, values: Values) -> Iterator[memoryview]:
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


class _Workers:
    """Threads that work on a few things at a time: whoever has more for them waits. The first error ends it."""

    def __init__(self, threads: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "jshard-write")
        self._free = threading.Semaphore(2 * threads)
        self._at_work: list[concurrent.futures.Future[None]] = []

    def do(self, work: Callable[..., None], *args: object) -> None:
        """Hands it to a thread."""
        self._free.acquire()
        done = [each for each in self._at_work if each.done()]
        self._at_work = [each for each in self._at_work if not each.done()]
        for each in done:
            each.result()
        future = self._pool.submit(work, *args)
        future.add_done_callback(lambda _: self._free.release())
        self._at_work.append(future)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        for each in self._at_work if kind is None else ():
            each.result()
