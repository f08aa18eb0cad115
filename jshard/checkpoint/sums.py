"""Sums over a leaf that tell whether a bit of it has changed, whatever mesh it was saved from or is restored onto.

A leaf is seen as a matrix of unsigned words of its dtype's size: its last dim are the columns, all others the rows.
Three sums are kept, modulo the size of a word: of all words, of the rows weighted by 2 row + 1, and of the columns
weighted by 2 column + 1. So

- a change of a single word always shows, as it changes the first sum;
- words, rows, columns or whole boxes that changed places show in the others;
- any other change is missed with a chance of about one in the product of the three moduli.

Sums over disjoint boxes add up: every process sums the shards it holds, and what is stored are the totals. They run
at the speed of memory (a CRC of the standard library takes four times as long), and no mesh shows in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sums = tuple[int, int, int]
Box = tuple[slice, ...]

_BLOCK_WORDS = 1 << 18  # small enough to stay in a core's cache between its two sums


def word_bits(dtype: Any) -> int:
    """Bits of the words that a dtype is summed in."""
    return 8 * min(_bytes_of(dtype), 8)


def add(first: Sums, second: Sums, bits: int) -> Sums:
    """The sums over two disjoint parts of a leaf."""
    a, b, c = ((x + y) % (1 << bits) for x, y in zip(first, second, strict=True))
    return a, b, c


class LeafSums:
    """The sums over what this process holds of a leaf; on an accelerator they are on their way when it is made.

    Args:
        leaf: an array; of copies of a shard one counts, and of what each process has for itself that of the first.
    """

    def __init__(self, leaf: jax.Array | np.ndarray) -> None:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        self.bits = word_bits(leaf.dtype)
        self._shape = tuple(leaf.shape)
        if jax.process_index() != 0 and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable):
            self._parts = []
        elif isinstance(leaf, jax.Array):
            self._parts = [_part(shard, self._shape) for shard in leaf.addressable_shards if shard.replica_id == 0]
        else:
            self._parts = [(leaf, tuple(slice(None) for _ in self._shape))]

    def total(self) -> Sums:
        """The sums; waits for the devices."""
        total: Sums = (0, 0, 0)
        for part, box in self._parts:
            if box is not None:
                sums = box_sums(part, box, self._shape)
            else:
                all_words, by_row, by_column = map(int, part)
                sums = all_words, by_row, by_column
            total = add(total, sums, self.bits)
        return total


def box_sums(values: np.ndarray, box: Box, shape: Sequence[int]) -> Sums:
    """The sums of one box of a leaf.

    Args:
        values: what the box holds.
        box: where it lies in the leaf.
        shape: of the leaf.

    Returns:
        Three numbers, modulo the size of a word.
    """
    words = _words(values)
    starts = [part.start or 0 for part in box]
    num_columns = words.shape[-1] if words.ndim else 1
    # A dtype of 16 bytes is two words, side by side.
    per_element = num_columns // max(values.shape[-1], 1) if values.ndim else num_columns
    columns = np.arange(num_columns, dtype=np.uint64) + np.uint64((starts[-1] if starts else 0) * per_element)
    matrix = words.reshape(-1, num_columns)
    by_row, by_column = _margins(matrix)
    bits = word_bits(values.dtype)
    return (
        int(np.sum(by_column, dtype=np.uint64)) % (1 << bits),
        _weighted(by_row, _rows(values.shape, starts, shape), bits),
        _weighted(by_column, columns, bits),
    )


def _part(shard: Any, shape: tuple[int, ...]) -> tuple[Any, Box | None]:
    """A shard to sum up later, on a host; or the sums that its device has begun to compute."""
    box = tuple(shard.index)
    if shard.device.platform == "cpu":
        return np.asarray(shard.data), box  # no copy, and it keeps the values when the array is donated
    starts = jnp.array([part.start or 0 for part in box], jnp.uint32)
    return device_sums(shard.data, starts, shape=shape), None


@jax.jit(static_argnames=("shape",))
def device_sums(values: jax.Array, starts: jax.Array, *, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """`box_sums` where the values are: the twin for accelerators.

    Args:
        values: what the box holds.
        starts: where it begins in each dim of the leaf.
        shape: of the leaf.
    """
    bits = word_bits(values.dtype)
    wide = jnp.uint64 if bits == 64 else jnp.uint32
    words = _device_words(values, bits).astype(wide)
    row = jnp.zeros(words.shape, wide)
    for dim in range(values.ndim - 1):
        index = jax.lax.broadcasted_iota(wide, words.shape, dim) + starts[dim].astype(wide)
        row = row * wide(shape[dim] % (1 << 32)) + index
    column = jnp.zeros(words.shape, wide)
    if words.ndim:
        per_element = words.shape[-1] // max(values.shape[-1], 1) if values.ndim else 1
        start = starts[-1].astype(wide) * wide(per_element) if values.ndim else wide(0)
        column = jax.lax.broadcasted_iota(wide, words.shape, words.ndim - 1) + start
    mask = wide((1 << bits) - 1)
    sums = (words, words * (2 * row + wide(1)), words * (2 * column + wide(1)))
    return tuple(jnp.sum(x, dtype=wide) & mask for x in sums)


def _device_words(values: jax.Array, bits: int) -> jax.Array:
    if values.dtype == jnp.bool_:
        return values.astype(jnp.uint8)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        parts = jnp.stack([values.real, values.imag], axis=-1)
        if values.dtype == jnp.complex64:  # one word of eight bytes
            low, high = (jax.lax.bitcast_convert_type(parts[..., i], jnp.uint32).astype(jnp.uint64) for i in (0, 1))
            return low | (high << 32)
        parts = parts.reshape(*values.shape[:-1], -1)
        return jax.lax.bitcast_convert_type(parts, jnp.uint64)
    if jnp.dtype(values.dtype).itemsize == 1:
        wide = jax.lax.convert_element_type
        narrow = _sub_byte(values.dtype)
        return wide(values, jnp.int8).astype(jnp.uint8) if narrow else jax.lax.bitcast_convert_type(values, jnp.uint8)
    return jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{bits}"))


def _sub_byte(dtype: Any) -> bool:
    return dtype in (jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4))


def _words(values: np.ndarray) -> np.ndarray:
    if _sub_byte(values.dtype):
        values = values.astype(np.int8)  # the four bits above are no part of the value
    values = np.ascontiguousarray(values)
    word = np.dtype(f"uint{word_bits(values.dtype)}")
    if values.ndim == 0:
        return values.reshape(1).view(word)
    return values.view(word)


def _bytes_of(dtype: Any) -> int:
    return np.dtype(dtype).itemsize


def _margins(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums of each row and of each column, modulo the size of a word."""
    num_rows, num_columns = matrix.shape
    by_row, by_column = np.zeros(num_rows, matrix.dtype), np.zeros(num_columns, matrix.dtype)
    step = max(1, _BLOCK_WORDS // max(num_columns, 1))
    for first in range(0, num_rows, step):
        block = matrix[first : first + step]
        by_row[first : first + step] = block.sum(axis=1, dtype=matrix.dtype)
        by_column += block.sum(axis=0, dtype=matrix.dtype)
    return by_row, by_column


def _rows(box_shape: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """The number of each row of a box among the rows of the leaf."""
    rows = np.zeros(1, np.uint64)
    for size, start, whole in zip(box_shape[:-1], starts, shape, strict=False):
        index = np.arange(start, start + size, dtype=np.uint64)
        rows = (rows[:, None] * np.uint64(whole) + index).reshape(-1)
    return rows


def _weighted(values: np.ndarray, numbers: np.ndarray, bits: int) -> int:
    weights = numbers * np.uint64(2) + np.uint64(1)
    return int(np.sum(values.astype(np.uint64) * weights, dtype=np.uint64)) % (1 << bits)
