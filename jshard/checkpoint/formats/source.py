"""What every foreign format looks like from here: named leaves, of which any box can be read by itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.errors import RunError, printable

Box = tuple[slice, ...]
"""A part of an array, a slice per dim: what `jax.make_array_from_callback` asks for."""


@dataclass(frozen=True)
class StoredArray:
    """An array as it is stored.

    Args:
        shape: of the whole array.
        dtype: numpy's, with those of ml_dtypes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """A checkpoint that can be read. Nothing is read before `read` is called, and never more than it asks for."""

    @property
    def leaves(self) -> Mapping[str, StoredArray]:
        """Every array by its name."""
        ...

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a leaf, as a new array. Threads may call it at the same time.

        Args:
            name: of the leaf.
            box: a slice without step for each dim; `slice(None)` for all of it.
        """
        ...


WholeLeaf = tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]
"""Name, shape, dtype, and a function that gets the whole array: what a writer takes."""


def whole_leaves(source: Source) -> Iterator[WholeLeaf]:
    """The leaves of a source for a writer, which gets one after another.

    Example:
        >>> write_safetensors("out", whole_leaves(source))
    """
    for name, leaf in source.leaves.items():
        box = tuple(slice(0, size) for size in leaf.shape)
        yield name, leaf.shape, leaf.dtype, functools.partial(source.read, name, box)


def bounds(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where a box begins and ends in each dim of a leaf of this shape."""
    if len(box) != len(shape) or any(part.step not in (None, 1) for part in box):
        raise ValueError(f"{box} is no box of an array of shape {tuple(shape)}")
    return tuple(part.indices(size)[:2] for part, size in zip(box, shape, strict=True))


class Region(NamedTuple):
    """An array inside a file. A tuple, so that nothing can change it behind a check.

    Args:
        path: the file.
        offset: of its first element, in bytes.
        shape: its dims.
        dtype: of its elements, little-endian.
        strides: bytes from one element to the next in each dim; none is negative.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        return sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of an array whose last dim is contiguous."""
    return tuple(itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def read_region(region: Region, box: Box, out: np.ndarray | None = None) -> np.ndarray:
    """A box of an array inside a file, as a new array or into `out`.

    The file is mapped for as long as the copy takes: pages that were read do not stay in this process's memory.
    """
    limits = bounds(box, region.shape)
    shape = tuple(max(stop - start, 0) for start, stop in limits)
    out = np.empty(shape, region.dtype) if out is None else out
    if 0 in shape:
        return out
    first = sum(start * step for (start, _), step in zip(limits, region.strides, strict=True))
    part = region._replace(offset=region.offset + first, shape=shape)
    try:
        mapped = np.memmap(part.path, np.uint8, mode="r", offset=part.offset, shape=(part.span_bytes,))
    except (OSError, ValueError) as error:  # numpy's words for a file that has become too short
        raise damaged(part.path, str(error)) from error
    np.copyto(out, np.ndarray(part.shape, part.dtype, buffer=mapped, strides=part.strides))
    return out


def local_path(path: str | Path, kind: str) -> Path:
    """The path of a checkpoint on this machine.

    Raises:
        CheckpointError: there is nothing, or it lies in a bucket.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"{kind} cannot be read from a bucket.",
            where=str(path),
            why="boxes of it are mapped from files.",
            do="copy it to a local disk first.",
        )
    path = Path(path).absolute()
    if not path.exists():
        raise CheckpointError(
            f"There is no {kind} checkpoint to read.",
            where=str(path),
            why="no such file or folder.",
            do="give the path of a checkpoint.",
        )
    return path


def damaged(path: Path, why: str) -> RunError:
    """The error for a file that is not what its format says."""
    return RunError(
        "A file of the checkpoint is damaged.", where=str(path), why=printable(why), do="fetch or copy it again."
    )
