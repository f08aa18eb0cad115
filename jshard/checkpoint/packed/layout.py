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
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
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

# At the end of each file: another safetensors file does not have it.
_MAGIC = b"jshard\0\1"
_TAIL = struct.Struct("<8s6Q8x")  # the fields of `_Tail`, and 8 unused bytes
TAIL_BYTES = _TAIL.size
_CACHE_LINE_BYTES = 64
_PAGE_BYTES = 4096
_LARGE_BYTES = 64 << 10  # pieces of at least this size are page-aligned
_PADDING_NAME = "jshard.padding"
_INDEX_NAME = "jshard.index"
_SAFETENSORS_DTYPES = {  # safetensors' names of dtypes; others are stored as bytes
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
        return shape_of(self.box)

    @functools.cached_property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Tail(NamedTuple):
    """The last bytes of a file, with which a reader begins: they say where the index is."""

    magic: bytes
    num_pieces: int
    num_limits: int  # of all boxes
    num_sums: int
    block_bytes: int
    index_begin: int
    checksum: int  # of the index, and of the tail with 0 in this place

    @property
    def column_sizes(self) -> tuple[int, ...]:
        """The sizes in bytes of the index's columns, in the order of `_COLUMN_DTYPES`."""
        return (
            4 * self.num_pieces,
            4 * self.num_pieces,
            8 * self.num_pieces,
            8 * self.num_limits,
            8 * self.num_limits,
            8 * self.num_sums,
        )

    def pack(self) -> bytes:
        """Returns the bytes of the tail."""
        return _TAIL.pack(*self)


# The columns of an index: leaves, numbers of dims, offsets; starts and stops of the boxes; checksums.
_COLUMN_DTYPES = ("<u4", "<u4", "<i8", "<i8", "<i8", "<u8")


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
        leaves: list[int] = []
        num_dims: list[int] = []
        all_limits: list[tuple[int, int]] = []
        for piece in self.pieces:
            leaves.append(piece.leaf)
            num_dims.append(len(piece.box))
            all_limits += piece.box
        # Of scalars alone there are no limits, and an empty list has no second dim.
        limits_array = np.array(all_limits, "<i8").reshape(-1, 2)
        columns = (
            np.array(leaves, "<u4"),
            np.array(num_dims, "<u4"),
            np.array(self.offsets, "<i8"),
            limits_array[:, 0],
            limits_array[:, 1],
        )
        return b"".join(column.tobytes() for column in columns)

    def index(self, sums: Sequence[int]) -> bytes:
        """Returns the index and the tail as bytes.

        Args:
            sums: the checksums of all blocks before the index.
        """
        body = self.columns + np.array(sums, "<u8").tobytes()
        tail = _Tail(
            _MAGIC,
            num_pieces=len(self.pieces),
            num_limits=_num_limits(self.pieces),
            num_sums=len(sums),
            block_bytes=BLOCK_BYTES,
            index_begin=self.index_begin,
            checksum=0,
        )
        checksum = xxhash.xxh3_64_intdigest(body + tail.pack())
        return body + tail._replace(checksum=checksum).pack()


def index_checksum(index: bytes) -> int:
    """Returns the checksum that an index with its tail contains."""
    return _Tail(*_TAIL.unpack(index[-TAIL_BYTES:])).checksum


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


# ---- layout of files that are to be written


def lay_out_files(pieces: Iterable[Piece], *, most_bytes: int = FILE_BYTES) -> list[FileLayout]:
    """Distributes pieces to files in order, and lays each file out."""
    files: list[list[Piece]] = [[]]
    file_bytes = 0
    header_bytes = 0
    for piece in pieces:
        is_full = file_bytes + piece.nbytes > most_bytes or header_bytes > _HEADER_BYTES
        # Each file has a piece, even if that alone is larger than the limit.
        if is_full and file_bytes:
            files.append([])
            file_bytes = 0
            header_bytes = 0
        files[-1].append(piece)
        file_bytes += piece.nbytes
        # A generous estimate of its entry and of the one for the padding before it.
        header_bytes += 2 * len(piece.path) + 40 * len(piece.box) + 100
    return [_lay_out_file(file_pieces) for file_pieces in files]


def _num_limits(pieces: Sequence[Piece]) -> int:
    """Returns the number of limits of all boxes: an index has one for each dim of each piece."""
    return sum(len(piece.box) for piece in pieces)


class _HeaderEntry(NamedTuple):
    """An entry of a safetensors header; positions are those after the header."""

    dtype: str  # in safetensors' terms
    shape: Sequence[int]
    begin: int
    end: int


def _lay_out_file(pieces: Sequence[Piece]) -> FileLayout:
    # Of an array without elements, the shape in the manifest is all there is.
    pieces = [piece for piece in pieces if piece.nbytes]
    pieces.sort(key=lambda piece: piece.nbytes < _LARGE_BYTES)  # large ones first, otherwise in the order given
    entries, starts, data_bytes = _data_entries(pieces)

    # See `_COLUMN_DTYPES`: of a piece the leaf, the number of dims and the offset, of a limit start and stop.
    columns_bytes = 16 * len(pieces) + 16 * _num_limits(pieces)
    # The header's entry for the index contains the number of checksums, and these cover the header: the length of the
    # header is computed first, with room for the digits.
    begin_of_header = _header_without_index(entries)
    longest_header = _header(begin_of_header, data_bytes, data_bytes + columns_bytes + 8 * (1 << 32))
    header_bytes = up(8 + len(longest_header), _PAGE_BYTES)
    index_begin = header_bytes + data_bytes
    index_bytes = columns_bytes + 8 * num_blocks(index_begin) + TAIL_BYTES
    header = _header(begin_of_header, data_bytes, data_bytes + index_bytes).ljust(header_bytes - 8)
    return FileLayout(
        header=len(header).to_bytes(8, "little") + header,
        pieces=tuple(pieces),
        offsets=tuple(header_bytes + start for start in starts),
        index_begin=index_begin,
        num_bytes=index_begin + index_bytes,
    )


def _data_entries(pieces: Sequence[Piece]) -> tuple[dict[str, _HeaderEntry], list[int], int]:
    """Places pieces one after the other, aligned.

    Returns:
        The header's entries, by name; where each piece begins, after the header; and the size of all in bytes.
    """
    entries: dict[str, _HeaderEntry] = {}
    starts: list[int] = []
    end = 0
    for piece in pieces:
        start = up(end, _alignment(piece.nbytes))
        if start > end:  # libraries refuse files with bytes that no entry covers
            entries[f"{_PADDING_NAME}.{len(starts)}"] = _HeaderEntry("U8", (start - end,), end, start)
        end = start + piece.nbytes
        dtype, shape = _safetensors_type(piece)
        entries[entry_name(piece.path, piece.box)] = _HeaderEntry(dtype, shape, start, end)
        starts.append(start)
    # The index follows, whose widest columns are of 8 bytes.
    data_bytes = up(end, 8)
    if data_bytes > end:
        entries[f"{_PADDING_NAME}.{len(starts)}"] = _HeaderEntry("U8", (data_bytes - end,), end, data_bytes)
    return entries, starts, data_bytes


def spaced(num_bytes: int) -> int:
    """Returns the distance from the start of a piece of this size to the start of the next."""
    return up(num_bytes, _alignment(num_bytes))


def _alignment(num_bytes: int) -> int:
    """Returns the alignment of a piece of this size."""
    return _PAGE_BYTES if num_bytes >= _LARGE_BYTES else _CACHE_LINE_BYTES


def num_blocks(num_bytes: int) -> int:
    """Returns the number of checksums over this many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def entry_name(path: str, box: Limits) -> str:
    """Returns the name of a piece in the file."""
    dims = [f"{start}:{stop}" for start, stop in box]
    return f"{path}[{','.join(dims)}]"


def _safetensors_type(piece: Piece) -> tuple[str, Sequence[int]]:
    """Returns the dtype and shape of a piece in safetensors' terms; bytes if it has no name for the dtype."""
    name = _SAFETENSORS_DTYPES.get(piece.dtype.name)
    if name is not None:
        return name, piece.shape
    if piece.dtype.itemsize == 1:
        return "U8", piece.shape
    return "U8", (*piece.shape, piece.dtype.itemsize)


def _header_without_index(entries: Mapping[str, _HeaderEntry]) -> str:
    """Returns the header up to the entry of the index, which comes last."""
    # Hugging Face libraries only open files that name the framework of their arrays.
    fields: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    for name, entry in entries.items():
        fields[name] = _json_entry(entry)
    return json.dumps(fields, separators=(",", ":"))[:-1]


def _header(begin_of_header: str, index_begin: int, index_end: int) -> bytes:
    entry = _HeaderEntry("U8", (index_end - index_begin,), index_begin, index_end)
    text = json.dumps({_INDEX_NAME: _json_entry(entry)}, separators=(",", ":"))
    return f"{begin_of_header},{text[1:]}".encode()


def _json_entry(entry: _HeaderEntry) -> Mapping[str, object]:
    return {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}


# ---- the index of a file that is read


def parse_tail(tail: bytes, num_bytes: int) -> int:
    """Returns the size of the index and the tail of a file of this size; raises `ValueError` if it has none."""
    if len(tail) != TAIL_BYTES:
        raise ValueError("it has no index")
    fields = _Tail(*_TAIL.unpack(tail))
    # The index is not read yet, so its checksum cannot show that the tail is damaged: the fields must fit the size.
    size = sum(fields.column_sizes) + TAIL_BYTES
    is_ours = fields.magic == _MAGIC and fields.block_bytes == BLOCK_BYTES
    # A truncated file, or one that continues after its tail, is not as it was written.
    is_of_this_size = fields.index_begin + size == num_bytes and fields.num_sums == num_blocks(fields.index_begin)
    if not is_ours or not is_of_this_size:
        raise ValueError("its index is damaged")
    return size


def parse_index(index: bytes | bytearray | memoryview) -> FileIndex:
    """Parses an index with its tail; raises `ValueError` if any bit of it has changed."""
    body = memoryview(index)[:-TAIL_BYTES]
    tail_bytes = bytes(index[-TAIL_BYTES:])
    tail = _Tail(*_TAIL.unpack(tail_bytes))
    expected = xxhash.xxh3_64(body)
    expected.update(tail._replace(checksum=0).pack())
    # The checksum does not cover the unused bytes at the end, as unpacking loses them.
    has_unused_bytes = any(tail_bytes[-8:])
    if tail.magic != _MAGIC or tail.checksum != expected.intdigest() or has_unused_bytes:
        raise ValueError("its index is damaged")

    columns = []
    start = 0
    for size, dtype in zip(tail.column_sizes, _COLUMN_DTYPES, strict=True):
        columns.append(np.frombuffer(body[start : start + size], dtype))
        start += size
    leaves, num_dims, offsets, starts, stops, sums = columns
    return FileIndex(
        leaves=leaves,
        offsets=offsets,
        starts=starts,
        stops=stops,
        begins=np.cumsum(num_dims, dtype=np.int64) - num_dims,
        sums=sums,
        index_begin=tail.index_begin,
        checksum=tail.checksum,
    )


# ---- buffers and boxes


def block_sum(views: Sequence[memoryview]) -> int:
    """Returns the checksum of a block that is spread over some buffers."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    # As if the buffers were one: the same bytes have the same checksum, however they were read.
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def cut_views(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Yields the bytes of some buffers in runs of this many bytes; the last run may be shorter."""
    run: list[memoryview] = []
    room = size
    for view in views:
        while view.nbytes >= room:
            run.append(view[:room])
            view = view[room:]
            yield run
            run = []
            room = size
        if view.nbytes:
            run.append(view)
            room -= view.nbytes
    if run:
        yield run


def up(value: int, multiple: int) -> int:
    """Returns the next multiple, or the value itself if it is one."""
    return -(-value // multiple) * multiple


@functools.lru_cache(maxsize=4096)
def device_boxes(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[jax.Device, Limits]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the box of an array that each device holds."""
    indices = sharding.devices_indices_map(tuple(shape))
    # JAX has no index for an array of no dims.
    return {device: limits(index or (), shape) for device, index in indices.items()}


def limits(index: Sequence[slice], shape: Sequence[int]) -> Limits:
    """Returns an array index as its start and stop along each dim."""
    box = []
    for part, size in zip(index, shape, strict=True):
        stop = size if part.stop is None else part.stop
        box.append((part.start or 0, stop))
    return tuple(box)


def whole_box(shape: Sequence[int]) -> Limits:
    """Returns the box that covers an array of this shape."""
    return tuple((0, size) for size in shape)


def shape_of(box: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(stop - start for start, stop in box)


def slices_of(box: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """Returns a box as an index of the array."""
    return tuple(slice(start, stop) for start, stop in box)


def size_of(box: Limits) -> int:
    """Returns the number of elements of a box."""
    return math.prod(shape_of(box))


def has_overlap(starts: np.ndarray, stops: np.ndarray) -> bool:
    """Returns whether any two boxes have an element in common; the limits have a row for each box.

    Whoever adds up the sizes of boxes to see whether they fill another has to ask this, too: in a sum, a gap and an
    overlap of equal size cancel each other.
    """
    num_boxes, ndim = starts.shape
    if not ndim:
        return num_boxes > 1
    # Along the dim in which most boxes start elsewhere, a box can only overlap those that start before it ends. So the
    # usual cut, along one dim, needs no comparison of all pairs.
    num_starts = [len(np.unique(starts[:, dim])) for dim in range(ndim)]
    sweep_dim = int(np.argmax(num_starts))
    order = np.argsort(starts[:, sweep_dim], kind="stable")
    starts = starts[order]
    stops = stops[order]
    ends = np.searchsorted(starts[:, sweep_dim], stops[:, sweep_dim], "left")
    # Boxes of the usual cut have no others to be compared with, and of those there may be thousands.
    with_others = np.flatnonzero(ends > np.arange(1, num_boxes + 1))
    for number in with_others.tolist():
        others = slice(number + 1, ends[number])
        is_common = (starts[number] < stops[others]) & (starts[others] < stops[number])
        if is_common.all(axis=1).any():
            return True
    return False
