"""The layout of a packed file, which is a valid safetensors file, and of the index at its end.

A file holds *pieces*: boxes of leaves, each contiguous. As a safetensors file it has an entry for each piece,
`PATH[START:STOP,START:STOP]`, and some for the padding between them and for the index.

    length of the header, header       JSON, padded with spaces
    pieces                             large ones first, aligned to 4 KiB pages; the others to 64 bytes
    index                              columns of numbers: leaf, offset and box of each piece; the checksums
    tail                               64 bytes: lengths of the columns, offset of the index, and its checksum

The checksums are xxh3 of every 256 KiB block before the index, header and padding included, so that a change of any bit
is detected; partial reads cover whole blocks. The size of a file, and the offset of everything in it, are known before
any value is.
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
"""Bytes of a file that share one checksum."""

FILE_BYTES = 4 << 30
"""A process starts another file when one has this many bytes."""

_HEADER_BYTES = 50_000_000
"""Limit on the entries in a header; another file starts then. Libraries refuse headers over 100 MB."""

Limits = tuple[tuple[int, int], ...]
"""A box: its start and stop along each dim."""

_MAGIC = b"jshard\0\1"
_TAIL = struct.Struct("<8s6Q8x")
TAIL_BYTES = _TAIL.size
_SMALL, _PAGE = 64, 4096
_LARGE_BYTES = 64 << 10  # pieces of at least this size are page-aligned
_PADDING = "jshard.padding"
_INDEX = "jshard.index"
_ENTRY = {  # safetensors' names of dtypes; others are stored as bytes
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

    leaf: int  # the leaf's index in the checkpoint
    path: str  # of the leaf
    dtype: np.dtype  # of the elements
    box: Limits  # its position in the leaf

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @functools.cached_property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileLayout:
    """The positions of everything in a file, without the checksums."""

    header: bytes  # the first bytes, up to the first piece
    pieces: tuple[Piece, ...]  # in file order; `offsets` has the offset of each in the file
    offsets: tuple[int, ...]
    index_begin: int  # where the index begins
    num_bytes: int  # of the file

    @functools.cached_property
    def columns(self) -> bytes:
        """The index without the checksums."""
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
        """The index and the tail as bytes."""
        body = self.columns + np.array(sums, "<u8").tobytes()
        num_limits = sum(len(piece.box) for piece in self.pieces)
        counts = len(self.pieces), num_limits, len(sums), BLOCK_BYTES, self.index_begin
        own = xxhash.xxh3_64_intdigest(body + _TAIL.pack(_MAGIC, *counts, 0))
        return body + _TAIL.pack(_MAGIC, *counts, own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileIndex:
    """The contents of a file's index."""

    leaves: np.ndarray  # the leaf of each piece
    offsets: np.ndarray  # the offset of each in the file
    starts: np.ndarray  # starts of the boxes, concatenated; `stops` has the ends
    stops: np.ndarray
    begins: np.ndarray  # the position of each piece's box in `starts`
    sums: np.ndarray  # of the blocks
    index_begin: int  # bytes before the index; the checksums cover these
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
    # The header's entry for the index contains the number of checksums, and these cover the header: the length of the
    # header is computed first, with room for the digits.
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
    """Distance from the start of a piece of this size to the start of the next."""
    return up(num_bytes, _unit(num_bytes))


def _unit(num_bytes: int) -> int:
    """The alignment of a piece of this size."""
    return _PAGE if num_bytes >= _LARGE_BYTES else _SMALL


def num_blocks(num_bytes: int) -> int:
    """The number of checksums over this many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def entry_name(path: str, box: Limits) -> str:
    """The name of a piece in the file."""
    return f"{path}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def _entry_of(piece: Piece) -> tuple[str, Sequence[int]]:
    """The dtype and shape of a piece in safetensors' terms; bytes if it has no name for the dtype."""
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
    # Hugging Face libraries only open files that name the framework of their arrays.
    return json.dumps({"__metadata__": {"format": "pt"}, **listed}, separators=(",", ":"))[:-1]


def _header(listed: str, begin: int, end: int) -> bytes:
    index = {_INDEX: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}}
    return f"{listed},{json.dumps(index, separators=(',', ':'))[1:]}".encode()


def parse_tail(tail: bytes, num_bytes: int) -> int:
    """Size of the index and the tail of a file of this size; raises `ValueError` if it has none."""
    if len(tail) != TAIL_BYTES:
        raise ValueError("it has no index")
    magic, num_pieces, num_limits, num_sums, block_bytes, begin, _ = _TAIL.unpack(tail)
    size = 16 * num_pieces + 16 * num_limits + 8 * num_sums + TAIL_BYTES
    if magic != _MAGIC or block_bytes != BLOCK_BYTES or begin + size != num_bytes or num_sums != num_blocks(begin):
        raise ValueError("its index is damaged")
    return size


def parse_index(found: bytes | bytearray | memoryview) -> FileIndex:
    """Parses an index with its tail; raises `ValueError` if any bit of it has changed."""
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
    """The checksum of a block that is spread over some buffers."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    found = xxhash.xxh3_64()
    for view in views:
        found.update(view)
    return found.intdigest()


def cut_views(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Concatenated buffers, cut into runs of this many bytes; the last one may be shorter."""
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
    """An array index as its start and stop along each dim."""
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
    )


def size_of(box: Limits) -> int:
    """The number of elements of a box."""
    return math.prod(stop - start for start, stop in box)
