"""Sums over a leaf that show whether a bit of it has changed, whatever mesh it was saved from or is restored onto.

A leaf is seen as a matrix of unsigned words of 8, 16 or 32 bits; wider dtypes are several words. Its last dim are the
columns, all others the rows. Each row is cut into segments of 512 words, or of one in small leaves, and the segments
are numbered through. Two sums are kept, modulo 2**64: of all words, and of all words weighted by 2 segment + 1. So

- a change of a single word always shows, as it changes the first sum;
- segments that changed places, and rows and boxes with them, show in the second, as do changes of several words;
- what cancels within one segment does not show, nor that rows or boxes whose sums are equal have changed places.

Sums over disjoint boxes add up: every process sums the shards it holds, and what is stored are the totals. No mesh
shows in them. They are no defence against somebody who changes values on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sums = tuple[int, int]
Box = tuple[slice, ...]

_FLOAT4 = "float4_e2m1fn"
_MODULUS = 1 << 64
_SEGMENT_WORDS = 512  # as quick as whole rows
_SMALL_WORDS = 1 << 16  # a leaf of so many has segments of one word


def add(parts: Iterable[Sequence[int]]) -> Sums:
    """The sums over a leaf, of those over disjoint boxes of it."""
    total = weighted = 0
    for part in parts:
        total, weighted = total + part[0], weighted + part[1]
    return total % _MODULUS, weighted % _MODULUS


class LeafSums:
    """The sums over what this process holds of a leaf.

    Args:
        leaf: an array; of copies of a shard one counts, and of what each process has for itself that of the first.
        shape: of what is summed, where an array has padding at the end of its dims.
    """

    def __init__(self, leaf: jax.Array | np.ndarray, shape: Sequence[int] | None = None) -> None:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        self._shape = tuple(leaf.shape if shape is None else shape)
        if jax.process_index() != 0 and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable):
            self._parts = []
        elif isinstance(leaf, jax.Array):
            shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
            self._parts = [(np.asarray(shard.data), tuple(shard.index)) for shard in shards]
        else:
            self._parts = [(leaf, tuple(slice(None) for _ in self._shape))]

    def total(self) -> Sums:
        """The sums."""
        return add(box_sums(values[_inside(box, self._shape)], box, self._shape) for values, box in self._parts)


def _inside(box: Box, shape: Sequence[int]) -> Box:
    """What of a box is no padding."""
    return tuple(slice(max(0, size - (part.start or 0))) for part, size in zip(box, shape, strict=True))


def box_sums(values: np.ndarray, box: Box, shape: Sequence[int]) -> Sums:
    """The sums of one box of a leaf.

    Args:
        values: what the box holds.
        box: where it is in the leaf.
        shape: of the leaf.
    """
    words = _words(values)
    box_shape = values.shape or (1,)
    starts = [part.start or 0 for part in box] or [0]
    per_element = words.shape[-1] // max(box_shape[-1], 1)
    width, per_row = _segments(tuple(shape), per_element)
    first, num_columns = starts[-1] * per_element, words.shape[-1]
    words = words.reshape(-1, num_columns) if words.size else words.reshape(0, num_columns)
    rows = _rows(len(words), box_shape, starts, shape or (1,))
    total = weighted = 0
    for start, stop in _cuts(first, first + num_columns, width):
        by_segment = _by_segment(words[:, start - first : stop - first], width)
        numbers = np.arange(start // width, start // width + by_segment.shape[1], dtype=np.uint64)
        numbers = rows[:, None] * np.uint64(per_row) + numbers
        total += int(np.sum(by_segment))
        weighted += int(np.sum(by_segment * (2 * numbers + 1)))
    return total % _MODULUS, weighted % _MODULUS


def _segments(shape: tuple[int, ...], per_element: int) -> tuple[int, int]:
    """The width of a leaf's segments in words, and how many a row has."""
    num_columns = (shape[-1] if shape else 1) * per_element
    width = _SEGMENT_WORDS if math.prod(shape) * per_element > _SMALL_WORDS else 1
    return width, -(-num_columns // width)


def _words(values: np.ndarray) -> np.ndarray:
    if values.dtype.name == _FLOAT4:
        values = values.view(np.uint8) & np.uint8(15)  # the bits above are no part of the value
    elif _is_sub_byte(values.dtype):
        values = values.astype(np.int8)
    values = np.ascontiguousarray(values.reshape(1) if values.ndim == 0 else values)
    return values.view(f"uint{8 * min(values.dtype.itemsize, 4)}")


def _is_sub_byte(dtype: Any) -> bool:
    return np.dtype(dtype).name in ("int2", "uint2", "int4", "uint4")


def _cuts(first: int, last: int, width: int) -> list[tuple[int, int]]:
    """Some columns in up to three parts: what is in a segment by itself, whole segments, the rest."""
    whole = min(-(-first // width) * width, last), max(last // width * width, min(-(-first // width) * width, last))
    return [(start, stop) for start, stop in ((first, whole[0]), whole, (whole[1], last)) if start < stop]


def _by_segment(columns: np.ndarray, width: int) -> np.ndarray:
    """The sums of each segment of each row, of columns that begin with one."""
    rows, count = columns.shape
    pieces = columns.reshape(rows, count // width, width) if count % width == 0 else columns.reshape(rows, 1, count)
    exact = np.uint32 if columns.itemsize <= 2 else np.uint64  # the narrower one is quicker, and wide enough
    return pieces.sum(axis=2, dtype=exact).astype(np.uint64, copy=False)


def _rows(count: int, box_shape: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """The numbers of the rows of a box among the rows of the leaf."""
    left = np.arange(count, dtype=np.uint64)
    numbers, scale = np.zeros(count, np.uint64), 1
    for size, start, whole in reversed(list(zip(box_shape[:-1], starts, shape, strict=False))):
        numbers += (left % np.uint64(size) + np.uint64(start)) * np.uint64(scale)
        left //= np.uint64(size)
        scale *= whole
    return numbers
