"""Memory of the host that reads go into: it is kept and given out again.

The first touch of fresh memory takes several times as long as the read itself. And jax takes an array on a CPU as it
is, without a copy, where it begins on 64 bytes: such memory belongs to the arrays until the last of them is gone.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from jshard.checkpoint.files.layout import spaced

_ALIGNED, _PAGE = 64, 4096
_LEAST_BYTES = 64 << 10  # smaller ones are not worth keeping
_KEPT_BYTES = 256 << 20


class HostMemory:
    """Buffers that come back when the last view of them is gone, on whatever side: Python's references say when.

    Args:
        kept_bytes: of buffers that nobody uses, at most.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes, self.kept_bytes = kept_bytes, 0
        self._kept: dict[int, list[memoryview]] = {}  # by size
        self._lock = threading.RLock()  # a buffer may come back while this thread is in here

    def take(self, num_bytes: int) -> np.ndarray:
        """A buffer of so many bytes, with anything in it."""
        if num_bytes < _LEAST_BYTES:
            return np.empty(num_bytes, np.uint8)
        size = -(-num_bytes // _PAGE) * _PAGE
        with self._lock:
            memory = self._pop(size)
        if memory is None:
            fresh = np.empty(size + _ALIGNED, np.uint8)
            memory = fresh.data[-fresh.ctypes.data % _ALIGNED :][:size]
        # Whatever is made of this array refers to it, and not to what is below: that is no array.
        given = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(given, self._back, memory).atexit = False
        return given

    def _pop(self, size: int) -> memoryview | None:
        """A kept buffer of a size; where there is none, as many others go as are to be made."""
        if found := self._kept.get(size):
            self.kept_bytes -= size
            return found.pop()
        gone = 0
        while gone < size and (other := next((other for other, kept in self._kept.items() if kept), None)):
            self._kept[other].pop()
            gone, self.kept_bytes = gone + other, self.kept_bytes - other
        return None

    def _back(self, memory: memoryview) -> None:
        with self._lock:
            if self.kept_bytes + memory.nbytes <= self._most_bytes:
                self.kept_bytes += memory.nbytes
                self._kept.setdefault(memory.nbytes, []).append(memory)


HOST_MEMORY = HostMemory()
"""Of the process."""


@dataclasses.dataclass(frozen=True)
class MappedBoxes:
    """Boxes of a leaf that are parts of a file, mapped into memory: nothing is copied."""

    boxes: list[np.ndarray]


class Slab:
    """Boxes of a leaf, all of one shape, in one buffer: as far from each other as a file has them.

    Args:
        count: how many.
        shape: of each.
        dtype: of their elements.
        memory: where the buffer is from; fresh memory, if None.
    """

    def __init__(self, count: int, shape: Sequence[int], dtype: np.dtype, memory: HostMemory | None = None) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.stride = spaced(size)
        num_bytes = (count - 1) * self.stride + size
        self.bytes = np.empty(num_bytes, np.uint8) if memory is None else memory.take(num_bytes)
        strides = [dtype.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        boxes = np.ndarray((count, *shape), dtype, self.bytes.data, strides=(self.stride, *strides))
        self.boxes = [boxes[number, ...] for number in range(count)]
