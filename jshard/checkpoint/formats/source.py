"""The common interface to other libraries' checkpoints: named arrays, any box of which can be read by itself.

Also what their readers and writers share: arrays in ranges of files, errors, and files that are finished together.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from jshard._files import open_regular
from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError, DamagedError, mend, reason
from jshard.checkpoint.lookup import local_path
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.packed.file_io import flush
from jshard.checkpoint.packed.layout import shape_of, slices_of, whole_box
from jshard.errors import RunError, printable

Limits = Sequence[tuple[int, int]]
"""The start and stop of a box in each dim."""

Box = tuple[slice, ...]
"""A part of an array, a slice per dim, as `jax.make_array_from_callback` passes it."""


class ArraySource(Protocol):
    """A readable checkpoint. Only `read` reads data, and only what is requested."""

    @property
    def leaves(self) -> Mapping[str, StoredLeaf]:
        """Every array by its name."""
        ...

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of an array, a slice without step for each dim, as a new array. Thread-safe."""
        ...


class ReadableValue(Protocol):
    """A stored value that is no array; it may be a pickle, so it is read on request only."""

    def value(self) -> object:
        """Reads the value."""
        ...


class FormatSource(ArraySource, Protocol):
    """An open checkpoint of another library: its arrays, and what is beside them."""

    @property
    def values(self) -> Mapping[str, ReadableValue]:
        """Everything that is no array, by its name."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What a reader should know, a line each, such as files that are not read."""
        ...


def stored_array(shape: Sequence[int], dtype: npt.DTypeLike) -> StoredLeaf:
    """Describes an array of which any box can be read by itself.

    Args:
        shape: of the whole array; () for a number.
        dtype: of NumPy or JAX, or its name, such as "bfloat16".
    """
    # A chunk of one element: a box costs its own bytes, whatever else is in the array.
    return StoredLeaf(shape=tuple(shape), dtype=np.dtype(dtype).name, chunk=(1,) * len(shape))


def stored_arrays(regions: Mapping[str, FileRegion]) -> dict[str, StoredLeaf]:
    """Describes arrays in files, by name."""
    return {name: stored_array(region.shape, region.dtype) for name, region in regions.items()}


class ReadableTensor(Protocol):
    """An array of which any box can be read, wherever its numbers are."""

    @property
    def leaf(self) -> StoredLeaf:
        """The array's description."""
        ...

    def read(self, box: Box) -> np.ndarray:
        """Reads a box, as a new array."""
        ...


def leaves_of(tensors: Mapping[str, ReadableTensor]) -> dict[str, StoredLeaf]:
    """Returns the descriptions of some arrays, by name."""
    return {name: tensor.leaf for name, tensor in tensors.items()}


def are_sizes(numbers: object) -> TypeGuard[Sequence[int]]:
    """Returns whether an item of somebody else's file is a list or tuple of sizes, which can be computed with.

    A file may hold anything in their place. Below 2**62, the sum of two of them is in 64 bits.
    """
    if not isinstance(numbers, tuple | list):
        return False
    return all(is_size(number) for number in numbers)


def is_size(number: object) -> TypeGuard[int]:
    """Returns whether an item of somebody else's file is a size; see `are_sizes`."""
    # No `isinstance`: True would be a size of 1.
    return type(number) is int and 0 <= number < 1 << 62


def whole(leaf: StoredLeaf) -> Box:
    """Returns the box that covers a whole leaf."""
    return slices_of(whole_box(leaf.shape))


def bounds(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the start and stop of a box in each dim of a leaf of this shape; no dim stops before it starts."""
    if len(box) != len(shape):
        raise _no_box(box, shape)
    limits = []
    for part, size in zip(box, shape, strict=True):
        start, stop, step = part.indices(size)
        if step != 1:
            raise _no_box(box, shape)
        # NumPy takes x[5:2] as empty; sizes are computed from the limits, and none may be negative.
        limits.append((start, max(start, stop)))
    return tuple(limits)


def _no_box(box: Box, shape: Sequence[int]) -> ValueError:
    return ValueError(f"{box} is not a box of an array of shape {tuple(shape)}")


class FileRegion(NamedTuple):
    """An array inside a file, little-endian, without negative strides. A tuple, so it cannot change once checked."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        # Without elements there is no last one, and the sum below could be negative.
        if 0 in self.shape:
            return 0
        last_offset = 0
        for size, stride in zip(self.shape, self.strides, strict=True):
            last_offset += (size - 1) * stride
        return last_offset + self.dtype.itemsize


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the strides, in bytes, of an array whose last dim is contiguous."""
    strides = []
    stride = itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def read_region(region: FileRegion, box: Box, out: np.ndarray | None = None) -> np.ndarray:
    """Reads a box of an array inside a file, as a new array or into `out`.

    The file is mapped only during the copy, so that its pages do not stay in this process's memory.
    """
    limits = bounds(box, region.shape)
    shape = shape_of(limits)
    if out is None:
        out = np.empty(shape, region.dtype)
    if 0 in shape:
        return out  # an empty range cannot be mapped
    offset = region.offset
    for (start, _), stride in zip(limits, region.strides, strict=True):
        offset += start * stride
    part = region._replace(offset=offset, shape=shape)
    try:
        with open_regular(part.path) as file:
            mapped = np.memmap(file, np.uint8, mode="r", offset=part.offset, shape=(part.span_bytes,))
    except (OSError, ValueError) as error:  # numpy's errors for a file that has become too short
        raise damaged(part.path, str(error)) from error
    # The mapping begins at the first element of the box, and has the strides of the whole array.
    np.copyto(out, np.ndarray(part.shape, part.dtype, buffer=mapped, strides=part.strides))
    return out


def existing(path: str | Path, kind: str) -> Path:
    """Returns the local path of another library's checkpoint; raises `CheckpointError` if it does not exist."""
    # Other libraries' files are mapped, so they must be on this machine: an address in a bucket is an error.
    path = local_path(path)
    if not path.exists():
        raise CheckpointError(
            f"There is no {kind} checkpoint to read.",
            where=str(path),
            why="no such file or folder.",
            do="give the path of a checkpoint.",
        )
    return path


def damaged(path: Path, why: str) -> DamagedError:
    """Makes the error for a file that violates its format."""
    return DamagedError(
        "A file of the checkpoint is damaged.", where=str(path), why=printable(why), do="download or copy it again."
    )


def check_export(
    kind: str, files: Iterable[Path], source: ArraySource, names: Sequence[str], known: Collection[np.dtype]
) -> None:
    """Raises `CheckpointError` if files already exist, or these names or dtypes cannot be written."""
    # Before the first byte is written: nothing is left of an export that cannot succeed.
    existing_files = [str(file) for file in files if file.exists()]
    if existing_files:
        raise CheckpointError(
            f"The {kind} checkpoint cannot be written.",
            where=existing_files,
            why="such files already exist.",
            do="choose a new folder.",
        )
    unknown = []
    for name, leaf in source.leaves.items():
        if np.dtype(leaf.dtype) not in known:
            unknown.append(f"{name}  {leaf.dtype}")
    if unknown:
        raise CheckpointError(
            f"{kind} does not support the dtypes of {counted(len(unknown), 'array')}.",
            where=unknown,
            why=f"it supports {', '.join(map(str, known))}.",
            do="leave them out, or cast them to one of these.",
        )
    duplicates = [name for name, count in collections.Counter(names).items() if count > 1]
    if duplicates:
        raise CheckpointError(
            "Several arrays or values would have the same name.",
            where=duplicates,
            why="names must be unique.",
            do="rename one of them.",
        )


@contextlib.contextmanager
def finished_together(kind: str, folder: Path, names: Sequence[str]) -> Iterator[list[Path]]:
    """Yields paths of temporary files; once all are written and on disk, they get their own names, in this order.

    The order counts: a file that describes the others, such as an index, comes after them.

    Raises `RunError` if that fails; no file is then left, except those that were renamed before a renaming failed.
    """
    token = secrets.token_hex(4)  # nothing that is in the folder already has these names
    drafts = [folder / f".{name}.{token}.unfinished" for name in names]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield drafts
        for draft in drafts:
            # Contents before names: a power cut must not leave a file that has its name, and not its bytes.
            flush(draft)
        for draft, name in zip(drafts, names, strict=True):
            draft.rename(folder / name)
        # The new names are entries of the folder, which is written to the disk apart from the files.
        flush(folder)
    except OSError as error:
        why = reason(error)
        raise RunError(
            f"The {kind} checkpoint could not be written.", where=str(folder), why=why, do=mend(why)
        ) from error
    finally:
        for draft in drafts:
            # Drafts that got their names are gone; after an error, the others are removed.
            draft.unlink(missing_ok=True)
