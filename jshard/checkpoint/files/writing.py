"""Writes packed files: parts are put together and summed, each just before it is written."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jshard.checkpoint.files.layout import BLOCK_BYTES, FileLayout, block_sum, cut_views, num_blocks
from jshard.checkpoint.files.places import Parts, Sink

Values = Callable[[int], np.ndarray]
"""The values of a piece of a file, by its number there: an array in the order of C."""

_ZEROS = memoryview(bytes(8 << 10))  # padding is shorter than a page


def write_files(
    sink: Sink, layouts: Sequence[FileLayout], values: Callable[[int, int], np.ndarray], *, begin: str = ""
) -> dict[str, tuple[int, int]]:
    """Writes the files of this process, and returns when they are on the disk.

    Args:
        sink: where to.
        layouts: what is in them.
        values: the values of a piece, by the number of the file and its own there; asked for once, in this order.
        begin: of the names.

    Returns:
        Of each file its size, and the sum of its index.
    """
    found = {}
    for number, layout in enumerate(layouts):
        name = f"{begin}{jax.process_index():05d}-{number:03d}.safetensors"
        found[name] = layout.num_bytes, write_file(sink, name, layout, lambda piece, n=number: values(n, piece))
    return found


def write_file(sink: Sink, name: str, layout: FileLayout, values: Values) -> int:
    """Writes a file, and returns when it is on the disk.

    Args:
        sink: where to.
        name: of the file.
        layout: what is in it.
        values: asked for each piece once, in the order of the file.

    Returns:
        The sum of its index, which stands for everything in the file.
    """
    index = bytearray()
    sink.write(name, layout.num_bytes, _parts(layout, values, sink.part_bytes, index))
    return int.from_bytes(index[-16:-8], "little")


def _parts(layout: FileLayout, values: Values, part_bytes: int, index: bytearray) -> Parts:
    """What is in a file, in parts; the index, which is the last of it, is also put into a buffer."""
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
            yield functools.partial(part, number, views)  # summed by the core that writes it next
        else:
            rest = part(number, views)
    for _ in range(-(-layout.index_begin // part_bytes)):
        summed.acquire()
    index += layout.index(sums.tolist())
    for views in cut_views([*rest, memoryview(bytes(index))], part_bytes):
        yield lambda views=views: views


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
