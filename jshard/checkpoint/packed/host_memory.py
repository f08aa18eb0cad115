"""Host memory that files are read into: a pool of buffers, and the boxes of a leaf in one buffer.

Memory is pooled, because touching fresh memory takes several times as long as the read itself. On a CPU, jax uses a
64-byte-aligned array without a copy; such memory belongs to the arrays until the last of them is freed.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from jshard.checkpoint.packed.layout import spaced, up

_ALIGNMENT = 64  # jax copies arrays on a CPU that begin elsewhere
_PAGE_BYTES = 4096
_LEAST_BYTES = 64 << 10  # smaller ones are not worth keeping
_KEPT_BYTES = 256 << 20


class HostMemory:
    """Buffers that are returned when the last view of them is freed, as Python's reference counts show.

    Args:
        kept_bytes: of buffers that are not in use, at most; others are freed.

    Attributes:
        kept_bytes: of buffers that are not in use, by now.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self.kept_bytes = 0
        self._most_kept_bytes = kept_bytes
        self._buffers: dict[int, list[memoryview]] = {}  # by size
        self._lock = threading.RLock()  # a buffer may be returned while this thread holds the lock

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns an uninitialized buffer of this many bytes."""
        if num_bytes < _LEAST_BYTES:
            return np.empty(num_bytes, np.uint8)
        size = up(num_bytes, _PAGE_BYTES)
        with self._lock:
            memory = self._pop(size)
        if memory is None:
            memory = _aligned_memory(size)
        # Every view of this array refers to it, and not to its base, because the base is not an array.
        buffer = np.frombuffer(memory, np.uint8, num_bytes)
        # Not at exit: the memory goes with the process.
        weakref.finalize(buffer, self._put_back, memory).atexit = False
        return buffer

    def _pop(self, size: int) -> memoryview | None:
        """Returns a pooled buffer of this size; if there is none, frees others to make room for a new one."""
        # A buffer is used again for exactly its size: the layers of a model share their sizes.
        buffers = self._buffers.get(size)
        if not buffers:
            self._free(size)
            return None
        self.kept_bytes -= size
        return buffers.pop()

    def _free(self, num_bytes: int) -> None:
        """Frees pooled buffers of at least this many bytes together, or all."""
        freed_bytes = 0
        for size, buffers in list(self._buffers.items()):  # a copy, as this thread may put one back meanwhile
            while buffers and freed_bytes < num_bytes:
                buffers.pop()
                self.kept_bytes -= size
                freed_bytes += size

    def _put_back(self, memory: memoryview) -> None:
        with self._lock:
            if self.kept_bytes + memory.nbytes <= self._most_kept_bytes:
                self.kept_bytes += memory.nbytes
                self._buffers.setdefault(memory.nbytes, []).append(memory)


def _aligned_memory(size: int) -> memoryview:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory.data[start : start + size]


HOST_MEMORY = HostMemory()
"""The pool of the process."""


@dataclasses.dataclass(frozen=True)
class MappedBoxes:
    """Boxes of a leaf that are parts of a memory-mapped file; nothing is copied."""

    boxes: list[np.ndarray]


class Slab:
    """Boxes of a leaf, all of one shape, in one buffer, with the same spacing as in a file.

    So one read of a file can fill several boxes.

    Attributes:
        boxes: the boxes.
        bytes: the buffer.
        stride: the distance from the start of a box to the start of the next, in bytes.
    """

    def __init__(self, count: int, shape: Sequence[int], dtype: np.dtype, memory: HostMemory | None = None) -> None:
        box_bytes = math.prod(shape) * dtype.itemsize
        self.stride = spaced(box_bytes)
        num_bytes = (count - 1) * self.stride + box_bytes
        self.bytes = np.empty(num_bytes, np.uint8) if memory is None else memory.take(num_bytes)
        strides = [dtype.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # With strides: between boxes whose size is not aligned there is a gap, as in a file.
        boxes = np.ndarray((count, *shape), dtype, self.bytes.data, strides=(self.stride, *strides))
        self.boxes = [boxes[number, ...] for number in range(count)]
