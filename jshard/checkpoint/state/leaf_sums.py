"""Checksums of a leaf that are independent of the mesh it was saved from or is restored onto.

They are for data written by Orbax; packed files have their own checksums.

A leaf is seen as a matrix of unsigned words of 8, 16 or 32 bits; wider dtypes are several words. Its last dim is the
columns, all others the rows. Each row is cut into segments of 512 words, or of one in small leaves, and the segments
are numbered consecutively. Two sums are kept, modulo 2**64: of all words, and of all words weighted by 2 segment + 1.

A change of a single word is always detected, and the second sum detects swapped segments, rows and boxes. Changes that
cancel within a segment are not detected. Sums over disjoint boxes add up, so totals do not depend on the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Sums = tuple[int, int]
"""The sum of all words, and the weighted one."""

Box = tuple[slice, ...]

_MODULUS = 1 << 64
_SEGMENT_WORDS = 512  # as fast as whole rows
_SMALL_WORDS = 1 << 16  # leaves up to this size have one-word segments


def add(parts: Iterable[Sequence[int]]) -> Sums:
    """Returns the sums over a leaf from those over its disjoint boxes."""
    total = 0
    weighted = 0
    for part_total, part_weighted in parts:
        total += part_total
        weighted += part_weighted
    return total % _MODULUS, weighted % _MODULUS


def held_parts(leaf: jax.Array | np.ndarray, *, first: int = 0) -> list[tuple[np.ndarray, Box]]:
    """Returns this process's parts of a leaf, with their boxes.

    Of several copies of a box, one process has it; of local arrays, the first process of those that save or restore.
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    # Every process has all of a local array, and its sums must be counted once.
    is_local = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if is_local and jax.process_index() != first:
        return []
    if isinstance(leaf, jax.Array):
        parts: list[tuple[np.ndarray, Box]] = []
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                parts.append((np.asarray(shard.data), tuple(shard.index)))
        return parts
    return [(leaf, (slice(None),) * leaf.ndim)]


def sums_of(parts: Iterable[tuple[np.ndarray, Box]], shape: Sequence[int]) -> Sums:
    """Returns the sums over some boxes of a leaf; elements beyond its shape are padding."""
    sums = []
    for values, box in parts:
        in_leaf = values[_without_padding(box, shape)]
        sums.append(box_sums(in_leaf, box, shape))
    return add(sums)


def _without_padding(box: Box, shape: Sequence[int]) -> Box:
    """Returns the part of a box that is in the leaf, as an index of the box's values."""
    parts = []
    for part, size in zip(box, shape, strict=True):
        start = part.start or 0
        parts.append(slice(max(0, size - start)))
    return tuple(parts)


def box_sums(values: np.ndarray, box: Box, shape: Sequence[int]) -> Sums:
    """Returns the sums of one box of a leaf."""
    words = _words(values)
    # An array of no dims is a matrix of one element.
    box_shape = values.shape or (1,)
    leaf_shape = shape or (1,)
    starts = [part.start or 0 for part in box] or [0]
    num_columns = words.shape[-1]
    words_per_element = num_columns // max(box_shape[-1], 1)
    width, segments_per_row = _segments(tuple(shape), words_per_element)
    # An empty array may have no columns to infer the rows from.
    num_rows = words.size // max(num_columns, 1)
    rows = words.reshape(num_rows, num_columns)
    row_numbers = _row_numbers(num_rows, box_shape, starts, leaf_shape)
    first_segments = row_numbers * np.uint64(segments_per_row)  # of each row

    first_column = starts[-1] * words_per_element
    last_column = first_column + num_columns
    sums = []
    for start, stop in _runs_of_segments(first_column, last_column, width):
        columns = rows[:, start - first_column : stop - first_column]
        segment_sums = _segment_sums(columns, width)
        sums.append(_weighted(segment_sums, first_segments + np.uint64(start // width)))
    return add(sums)


def _weighted(segment_sums: np.ndarray, first_segments: np.ndarray) -> Sums:
    """Returns the sums over a matrix of segments; the numbers of those in a row follow that of its first one."""
    _, num_segments = segment_sums.shape
    segment_numbers = first_segments[:, None] + np.arange(num_segments, dtype=np.uint64)
    weights = 2 * segment_numbers + 1
    # These wrap at 2**64, which is the modulus.
    total = np.sum(segment_sums)
    weighted = np.sum(segment_sums * weights)
    return int(total), int(weighted)


def _segments(shape: tuple[int, ...], words_per_element: int) -> tuple[int, int]:
    """Returns the width of a leaf's segments in words, and their number per row."""
    num_columns = words_per_element
    if shape:
        num_columns *= shape[-1]
    num_words = math.prod(shape) * words_per_element
    width = 1 if num_words <= _SMALL_WORDS else _SEGMENT_WORDS
    num_segments = -(-num_columns // width)
    return width, num_segments


def _words(values: np.ndarray) -> np.ndarray:
    if values.dtype.name == "float4_e2m1fn":
        values = values.view(np.uint8) & np.uint8(15)  # the upper bits are not part of the value
    elif values.dtype.name in ("int2", "uint2", "int4", "uint4"):
        values = values.astype(np.int8)
    if values.ndim == 0:
        values = values.reshape(1)
    values = np.ascontiguousarray(values)
    word_bytes = min(values.dtype.itemsize, 4)
    return values.view(f"uint{8 * word_bytes}")


def _runs_of_segments(first: int, last: int, width: int) -> list[tuple[int, int]]:
    """Splits columns into up to three runs: a partial segment, whole segments, and the rest."""
    first_whole = -(-first // width) * width
    last_whole = last // width * width
    first_boundary = min(first_whole, last)
    last_boundary = max(last_whole, first_boundary)
    boundaries = (first, first_boundary, last_boundary, last)
    return [(start, stop) for start, stop in itertools.pairwise(boundaries) if start < stop]


def _segment_sums(columns: np.ndarray, width: int) -> np.ndarray:
    """Returns the sums of each segment of each row, for whole segments or for a part of one."""
    num_rows, num_columns = columns.shape
    if num_columns % width == 0:
        segments = columns.reshape(num_rows, num_columns // width, width)
    else:
        segments = columns.reshape(num_rows, 1, num_columns)
    exact = np.uint32 if columns.itemsize <= 2 else np.uint64  # the narrower one is faster and wide enough
    return segments.sum(axis=2, dtype=exact).astype(np.uint64, copy=False)


def _row_numbers(count: int, box_shape: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Returns the numbers of the rows of a box among the rows of the leaf."""
    row_in_box = np.arange(count, dtype=np.uint64)
    numbers = np.zeros(count, np.uint64)
    rows_per_index = 1
    # The last dim is the columns.
    dims = list(zip(box_shape[:-1], starts[:-1], shape[:-1], strict=True))
    # Of the others, the last index changes from row to row, so they are taken in reverse.
    for box_size, start, size in reversed(dims):
        index = row_in_box % np.uint64(box_size) + np.uint64(start)
        numbers += index * np.uint64(rows_per_index)
        row_in_box //= np.uint64(box_size)
        rows_per_index *= size
    return numbers
