"""The layout of a packed file, which is a valid safetensors file, and of the index at its end.

A file holds *pieces*: boxes of leaves, each contiguous. To whoever knows safetensors it has an entry for each piece,
`PATH[START:STOP,START:STOP]`, and some for the padding between them and for the index.

    length of the header, header       JSON, filled up with spaces
    pieces                             large ones first, on pages of 4 KiB; the others on 64 bytes
    index                              columns of numbers: leaf, place and box of each piece; the sums
    tail                               64 bytes: how long the columns are, where the index begins, and its own sum

The sums are xxh3 of every 256 KiB of all that is before the index, header and padding included, so that no bit of a
file can change unseen; what is read of it in part is read in whole blocks of these. The size of a file, and the place
of everything in it, are known before any value is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from jax.sharding import Sharding

BLOCK_BYTES = 256 << 10
"""Bytes of a file that have one sum."""

FILE_BYTES = 4 << 30
"""A process begins another file when one has so many."""

_HEADER_BYTES = 50_000_000
"""When the entries in a header have so many, at most, another file begins: libraries open none with over 100 MB."""

Limits = tuple[tuple[int, int], ...]
"""A box: where it begins and ends along each dim."""

_MAGIC = b"jshard\0\1"
_TAIL = struct.Struct("<8s6Q8x")
TAIL_BYTES = _TAIL.size
_SMALL, _PAGE = 64, 4096
_LARGE_BYTES = 64 << 10  # a piece of so many is on pages
_PADDING = "jshard.padding"
_INDEX = "jshard.index"
_ENTRY = {  # what safetensors calls dtypes; others are bytes there
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a leaf."""

    leaf: int  # the number of the leaf among those of the checkpoint
    path: str  # of the leaf
    dtype: np.dtype  # of its elements
    box: Limits  # where it is in the leaf

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(stop - start for start, stop in self.box)

    @functools.cached_property
    def nbytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileLayout:
    """Where everything of a file is, but the sums."""

    header: bytes  # the first bytes, up to the first piece
    pieces: tuple[Piece, ...]  # in the order of the file; `offsets` says where each begins, in the file
    offsets: tuple[int, ...]
    index_begin: int  # where the index begins
    num_bytes: int  # of the file

    @functools.cached_property
    def columns(self) -> bytes:
        """The index without the sums."""
        boxes = np.array([limit for piece in self.pieces for limit in piece.box], "<i8").reshape(-1, 2)
        return b"".join(
            (
                np.array([piece.leaf for piece in self.pieces], "<u4").tobytes(),
                np.array([len(piece.box) for piece in self.pieces], "<u4").tobytes(),
                np.array(self.offsets, "<i8").tobytes(),
                boxes[:, 0].tobytes(),
                boxes[:, 1].tobytes(),
            )
        )

    def index(self, sums: Sequence[int]) -> bytes:
        """The bytes of the index and the tail."""
        body = self.columns + np.array(sums, "<u8").tobytes()
        num_limits = sum(len(piece.box) for piece in self.pieces)
        counts = len(self.pieces), num_limits, len(sums), BLOCK_BYTES, self.index_begin
        own = xxhash.xxh3_64_intdigest(body + _TAIL.pack(_MAGIC, *counts, 0))
        return body + _TAIL.pack(_MAGIC, *counts, own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileIndex:
    """What the index of a file says."""

    leaves: np.ndarray  # the leaf of each piece
    offsets: np.ndarray  # where each begins in the file
    starts: np.ndarray  # where the boxes begin, one after the other; `stops` says where they end
    stops: np.ndarray
    begins: np.ndarray  # where the box of each piece begins in `starts`
    sums: np.ndarray  # of the blocks
    index_begin: int  # bytes before the index, which the sums are over
    checksum: int  # of the index itself


def laid_out(pieces: Iterable[Piece], *, most_bytes: int = FILE_BYTES) -> list[FileLayout]:
    """Deals pieces to files, and lays each of them out."""
    files: list[list[Piece]] = [[]]
    held = listed = 0
    for piece in pieces:
        if held and (held + piece.nbytes > most_bytes or listed > _HEADER_BYTES):
            files.append([])
            held = listed = 0
        files[-1].append(piece)
        held += piece.nbytes
        listed += 2 * len(piece.path) + 40 * len(piece.box) + 100  # with its padding
    return [_laid_out(found) for found in files]


def _laid_out(pieces: Sequence[Piece]) -> FileLayout:
    pieces = sorted((piece for piece in pieces if piece.nbytes), key=lambda piece: piece.nbytes < _LARGE_BYTES)
    entries: dict[str, tuple[str, Sequence[int], int, int]] = {}
    places, end = [], 0
    for piece in pieces:
        begin = up(end, _unit(piece.nbytes))
        if begin > end:
            entries[f"{_PADDING}.{len(places)}"] = "U8", (begin - end,), end, begin
        end = begin + piece.nbytes
        entries[entry_name(piece.path, piece.box)] = (*_entry_of(piece), begin, end)
        places.append(begin)
    data_bytes = up(end, 8)
    if data_bytes > end:
        entries[f"{_PADDING}.{len(places)}"] = "U8", (data_bytes - end,), end, data_bytes
    columns = len(pieces) * 16 + sum(len(piece.box) for piece in pieces) * 16
    # The number of the sums is in the header's entry for the index, and the header is among what they are over: the
    # length of the header is found first, with room for the digits.
    header = functools.partial(_header, _listed(entries), data_bytes)
    guess = len(header(data_bytes + columns + 8 * (1 << 32)))
    head_bytes = up(8 + guess, _PAGE)
    index_begin = head_bytes + data_bytes
    index_bytes = columns + 8 * num_blocks(index_begin) + TAIL_BYTES
    text = header(data_bytes + index_bytes).ljust(head_bytes - 8)
    return FileLayout(
        header=len(text).to_bytes(8, "little") + text,
        pieces=tuple(pieces),
        offsets=tuple(head_bytes + begin for begin in places),
        index_begin=index_begin,
        num_bytes=index_begin + index_bytes,
    )


def spaced(num_bytes: int) -> int:
    """From the beginning of a piece of so many bytes to that of another one behind it."""
    return up(num_bytes, _unit(num_bytes))


def _unit(num_bytes: int) -> int:
    """What a piece of so many bytes begins on."""
    return _PAGE if num_bytes >= _LARGE_BYTES else _SMALL


def num_blocks(num_bytes: int) -> int:
    """How many sums there are over so many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def entry_name(path: str, box: Limits) -> str:
    """What a piece is called in the file."""
    return f"{path}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def _entry_of(piece: Piece) -> tuple[str, Sequence[int]]:
    """The dtype and shape of a piece as safetensors knows them: bytes, where it has no name for the dtype."""
    known = _ENTRY.get(piece.dtype.name)
    if known is not None:
        return known, piece.shape
    return "U8", piece.shape if piece.dtype.itemsize == 1 else (*piece.shape, piece.dtype.itemsize)


def _listed(entries: Mapping[str, tuple[str, Sequence[int], int, int]]) -> str:
    """The header up to the entry of the index, which comes last."""
    listed = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, stop]}
        for name, (dtype, shape, begin, stop) in entries.items()
    }
    # Libraries of Hugging Face open no file that does not say whose arrays it holds.
    return json.dumps({"__metadata__": {"format": "pt"}, **listed}, separators=(",", ":"))[:-1]


def _header(listed: str, begin: int, end: int) -> bytes:
    index = {_INDEX: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}}
    return f"{listed},{json.dumps(index, separators=(',', ':'))[1:]}".encode()


def parse_tail(tail: bytes, num_bytes: int) -> int:
    """How many bytes the index and the tail have, of a file of so many bytes; a `ValueError` if it has none."""
    if len(tail) != TAIL_BYTES:
        raise ValueError("it has no index")
    magic, num_pieces, num_limits, num_sums, block_bytes, begin, _ = _TAIL.unpack(tail)
    size = 16 * num_pieces + 16 * num_limits + 8 * num_sums + TAIL_BYTES
    if magic != _MAGIC or block_bytes != BLOCK_BYTES or begin + size != num_bytes or num_sums != num_blocks(begin):
        raise ValueError("its index is damaged")
    return size


def parse_index(found: bytes | bytearray | memoryview) -> FileIndex:
    """What an index says, tail and all; a `ValueError` if any bit of it has changed."""
    body, tail = memoryview(found)[:-TAIL_BYTES], bytes(found[-TAIL_BYTES:])
    magic, *counts, own = _TAIL.unpack(tail)
    check = xxhash.xxh3_64(body)
    check.update(_TAIL.pack(magic, *counts, 0))
    if magic != _MAGIC or check.intdigest() != own or any(tail[-8:]):
        raise ValueError("its index is damaged")
    num_pieces, num_limits, num_sums, _, index_begin = counts
    sizes = [4 * num_pieces, 4 * num_pieces, 8 * num_pieces, 8 * num_limits, 8 * num_limits, 8 * num_sums]
    ends = list(itertools.accumulate(sizes))
    dtypes = ("<u4", "<u4", "<i8", "<i8", "<i8", "<u8")
    columns = [
        np.frombuffer(body[end - size : end], dtype) for end, size, dtype in zip(ends, sizes, dtypes, strict=True)
    ]
    leaves, ndims, offsets, starts, stops, sums = columns
    return FileIndex(
        leaves=leaves,
        offsets=offsets,
        starts=starts,
        stops=stops,
        begins=np.cumsum(ndims, dtype=np.int64) - ndims,
        sums=sums,
        index_begin=index_begin,
        checksum=own,
    )


def block_sum(views: Sequence[memoryview]) -> int:
    """The sum of a block that is in some buffers."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    found = xxhash.xxh3_64()
    for view in views:
        found.update(view)
    return found.intdigest()


def cut_views(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Buffers, one after the other, cut into runs of so many bytes; the last one may be shorter."""
    found: list[memoryview] = []
    room = size
    for view in views:
        while view.nbytes >= room:
            found.append(view[:room])
            view = view[room:]
            yield found
            found, room = [], size
        if view.nbytes:
            found.append(view)
            room -= view.nbytes
    if found:
        yield found


def up(value: int, multiple: int) -> int:
    """The next multiple, or the value itself."""
    return -(-value // multiple) * multiple


@functools.lru_cache(maxsize=4096)
def device_boxes(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[Any, Limits]:
    """The box of an array that each device holds."""
    return {device: limits(index or (), shape) for device, index in sharding.devices_indices_map(tuple(shape)).items()}


def limits(index: Sequence[slice], shape: Sequence[int]) -> Limits:
    """An index of an array, as where it begins and ends along each dim."""
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
    )


def size_of(box: Limits) -> int:
    """How many elements a box has."""
    return math.prod(stop - start for start, stop in box)
