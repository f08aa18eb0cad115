"""Writes packed files: header, pieces and index, with the checksums computed by the threads that write."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

from jshard.checkpoint.packed.file_io import Parts, Sink
from jshard.checkpoint.packed.layout import BLOCK_BYTES, FileLayout, block_sum, cut_views, index_checksum, num_blocks

_ZEROS = memoryview(bytes(8 << 10))  # padding is shorter than a page


class FilesToWrite(Protocol):
    """The files that this process writes."""

    @property
    def files(self) -> Sequence[FileLayout]:
        """The layout of each."""
        ...

    def values(self, file: int, number: int) -> np.ndarray:
        """Returns the values of a piece, by the numbers of its file and of the piece; each is needed once, in order."""
        ...


def write_files(sink: Sink, content: FilesToWrite, *, prefix: str = "") -> dict[str, tuple[int, int]]:
    """Writes the files of this process, which are on disk on return.

    Args:
        sink: where they are written.
        content: the files.
        prefix: of the files' names.

    Returns:
        The size of each in bytes, and the checksum of its index, by name.
    """
    written = {}
    for number, layout in enumerate(content.files):
        name = f"{prefix}{jax.process_index():05d}-{number:03d}.safetensors"
        checksum = write_file(sink, name, layout, functools.partial(content.values, number))
        written[name] = layout.num_bytes, checksum
    return written


def write_file(sink: Sink, name: str, layout: FileLayout, values: Callable[[int], np.ndarray]) -> int:
    """Writes a file, which is on disk on return; returns the checksum of its index, which covers everything in it."""
    content = _FileContent(layout, values, sink.part_bytes)
    sink.write(name, layout.num_bytes, content.parts())
    return index_checksum(content.index)


class _FileContent:
    """The content of a file, in parts for a sink.

    Attributes:
        index: the file's index with its tail; known when all parts are made.
    """

    def __init__(self, layout: FileLayout, values: Callable[[int], np.ndarray], part_bytes: int) -> None:
        self._layout = layout
        self._values = values
        self._part_bytes = part_bytes
        self._sums = np.zeros(num_blocks(layout.index_begin), np.uint64)
        self._num_summed = threading.Semaphore(0)  # counts the parts that have their checksums
        self.index = b""

    def parts(self) -> Parts:
        """Yields the parts.

        The index at the end waits for the checksums of all parts before it. So a sink must call each part without
        waiting for a later one.
        """
        begin_of_last: list[memoryview] = []  # the part in which the index begins, up to the index
        for number, views in enumerate(cut_views(self._views(), self._part_bytes)):
            if (number + 1) * self._part_bytes <= self._layout.index_begin:
                # Not yet checksummed: the thread that writes it does that, and has it in its core's cache then.
                yield functools.partial(self._with_sums, number, views)
            else:
                # The index follows in the same part, and needs these checksums first.
                begin_of_last = self._with_sums(number, views)
        num_parts = -(-self._layout.index_begin // self._part_bytes)
        for _ in range(num_parts):
            self._num_summed.acquire()
        self.index = self._layout.index(self._sums.tolist())
        for views in cut_views([*begin_of_last, memoryview(self.index)], self._part_bytes):
            yield functools.partial(list, views)

    def _with_sums(self, number: int, views: list[memoryview]) -> list[memoryview]:
        """Computes the checksums of a part, which is a whole number of blocks; returns its buffers."""
        first_block = number * (self._part_bytes // BLOCK_BYTES)
        for block, block_views in enumerate(cut_views(views, BLOCK_BYTES), first_block):
            self._sums[block] = block_sum(block_views)
        # Before the part is written: `parts` waits for this, and must not wait for a write that failed.
        self._num_summed.release()
        return views

    def _views(self) -> Iterator[memoryview]:
        """Yields everything before the index, as buffers in order: the header, and the pieces with their padding."""
        layout = self._layout
        yield memoryview(layout.header)
        end = len(layout.header)
        for number, offset in enumerate(layout.offsets):
            if offset > end:
                yield _ZEROS[: offset - end]
            # As bytes: some dtypes, such as bfloat16, have no buffers.
            view = self._values(number).reshape(-1).view(np.uint8).data
            yield view
            end = offset + view.nbytes
        if layout.index_begin > end:
            yield _ZEROS[: layout.index_begin - end]
