"""Files of token ids, which stay on the disk: `.npy`, and `.bin` without a header."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from jshard import _files
from jshard._parsing import shown
from jshard.data.loader import DataError
from jshard.errors import FourPartError

Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]

_SUFFIXES = (".bin", ".npy")
_INT32_IDS = 2**31
_PIECE = 1 << 16  # tokens of a file read at a time
_MOST_PIECES = 256  # evenly spread pieces of a large file that stand for it in a fingerprint
_NUM_HEAD = 4096  # ids at the start of a file by which its dtype is checked
_FEWEST_TO_CHECK = 64  # ids; in a smaller file zeros say nothing
_MOST_DIMS = 64  # of numpy's arrays
_SAVE_IDS = "numpy.save(path, ids)"


def is_tokens(path: Path) -> bool:
    """Returns whether a file contains token ids, by its name."""
    return path.suffix.lower() in _SUFFIXES and not path.is_dir()


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """The ids `start` to `stop` of a file, which stay on disk; ids beyond `vocab_size` are an error when read."""

    path: Path
    dtype: np.dtype
    start: int
    stop: int
    header_bytes: int = 0
    vocab_size: int | None = None

    @property
    def size(self) -> int:
        """The number of ids."""
        return self.stop - self.start

    def __getitem__(self, where: slice) -> np.ndarray:
        first, stop, _ = where.indices(self.size)
        start = self.start + first
        ids = self._mapped[start : self.start + stop]
        # Windows are int32: without this limit a larger id would become another one, or negative.
        limit = _INT32_IDS
        if self.vocab_size is not None:
            limit = min(self.vocab_size, limit)
        if ids.size and (ids.min() < 0 or ids.max() >= limit):
            raise self._beyond(ids, start, limit)
        return ids

    def _beyond(self, ids: np.ndarray, start: int, limit: int) -> DataError:
        """Returns the error for ids, of which the first is number `start` of the file."""
        offset = int(np.argmax((ids < 0) | (ids >= limit)))
        do = "another --dtype, or the --tokenizer that made the file, if text is read beside it."
        largest = int(ids.max())
        if self.vocab_size is not None and ids.min() >= 0 and largest < _INT32_IDS:
            do = f"--set model.vocab_size={largest + 1}\nor {do}"
        return DataError(
            "A token id is beyond the vocabulary.",
            where=f"{self.path}: token {start + offset}",
            why=f"read as {self.dtype} it is {ids[offset]}; the vocabulary has ids 0 to {limit - 1}.",
            do=do,
        )

    def part(self, start: int, stop: int) -> TokenFile:
        """Returns a slice of the ids."""
        return dataclasses.replace(self, start=self.start + start, stop=self.start + stop)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields all ids of a small file; a quickly readable sample of a large one, spread evenly."""
        stride = max(_PIECE, -(-self.size // _MOST_PIECES))  # rounded up: at most so many pieces
        for start in range(0, self.size, stride):
            yield self[start : start + _PIECE]

    @functools.cached_property
    def _mapped(self) -> np.ndarray:
        # Up to the last id: what follows in the file need not be whole ids.
        return np.memmap(self.path, self.dtype, mode="r", offset=self.header_bytes, shape=(self.stop,))

    def __getstate__(self) -> dict[str, object]:
        state = dict(vars(self))
        state.pop("_mapped", None)  # a worker maps the file itself
        return state


def token_file(path: Path, dtype: Dtype | None, vocab_size: int | None) -> TokenFile:
    """Returns the ids in a `.npy` file, or in a `.bin` file of that dtype without a header."""
    try:
        os.close(_files.open_number(path))  # a FIFO would wait for ever
        if path.suffix.lower() == ".npy":
            return _npy(path, vocab_size)
        ids = _bin(path, dtype, vocab_size)
    except FourPartError:
        raise
    except OSError as error:
        why = f"{(error.strerror or repr(error)).lower()}; seen from {Path.cwd()}."
        raise _no_tokens(str(path), why, "ls -l *.bin *.npy  # shows those that are here") from error
    _check_dtype(ids)
    return ids


def _check_dtype(ids: TokenFile) -> None:
    """Raises if the ids of a file without a header seem to have twice the bits."""
    # Read as 16 bits, half of the ids of 32 bits are zeros: a model would learn them without an error.
    head = ids._mapped[:_NUM_HEAD]
    every_second_is_0 = not head[1::2].any() and head[0::2].any()
    if ids.size > _FEWEST_TO_CHECK and every_second_is_0:
        wide = f"uint{ids.dtype.itemsize * 16}"  # twice 8 bits for each byte
        why = f"read as {ids.dtype}, every second of its first {head.size} ids is 0: it looks like {wide}."
        raise _no_tokens(str(ids.path), why, f"--dtype {wide}")


def _bin(path: Path, dtype: Dtype | None, vocab_size: int | None) -> TokenFile:
    num_bytes = path.stat().st_size
    if dtype is None:
        why = f"a .bin file, here of {num_bytes} bytes, does not record the dtype of its ids."
        raise _no_tokens(str(path), why, "--dtype uint16  # as nanoGPT writes it; or uint8, uint32, int32, int64")
    itemsize = np.dtype(dtype).itemsize
    count, rest = divmod(num_bytes, itemsize)
    if rest or not count:
        why = f"{num_bytes} bytes are not one or more ids of {itemsize} bytes each."
        raise _no_tokens(f"{path} --dtype {dtype}", why, "--dtype uint8  # or the dtype that the file was written in")
    return TokenFile(path, np.dtype(dtype), 0, count, vocab_size=vocab_size)


def _npy(path: Path, vocab_size: int | None) -> TokenFile:
    with path.open("rb") as file:
        try:
            shape, dtype = _npy_header(file)
        except Exception as error:  # numpy evaluates the header as Python: whatever its parser raises
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise _no_tokens(str(path), f"it is not a .npy file of numbers: {first_line}.", _SAVE_IDS) from error
        header_bytes = file.tell()
        num_bytes = os.fstat(file.fileno()).st_size
    # A header may hold anything that can be written in Python, such as a bool in place of a length.
    is_one_dim = len(shape) == 1 and type(shape[0]) is int and shape[0] >= 1
    if not is_one_dim or dtype.kind not in "iu":
        why = f"it has the shape {_shown_shape(shape)} and the dtype {dtype}; ids are integers in one dim."
        raise _no_tokens(str(path), why, 'numpy.save(path, ids.ravel().astype("uint16"))')
    (count,) = shape
    num_ids = (num_bytes - header_bytes) // dtype.itemsize
    if count > num_ids:
        why = f"it is cut off: its header promises {shown(count)} ids, and it has {num_ids}."
        raise _no_tokens(str(path), why, _SAVE_IDS)
    return TokenFile(path, dtype, 0, count, header_bytes, vocab_size)


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and dtype of an array, and leaves the file at its first element."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    shape, _, dtype = readers[version](file)
    return shape, dtype


def _shown_shape(shape: tuple[object, ...]) -> str:
    """Returns a shape as text, which is cut short if a header made it very long."""
    is_plausible = len(shape) < _MOST_DIMS and all(type(n) is int and n.bit_length() < 64 for n in shape)
    return str(shape) if is_plausible else shown(list(shape))


def _no_tokens(where: str, why: str, do: str) -> DataError:
    return DataError("The token ids cannot be read.", where=where, why=why, do=do)
