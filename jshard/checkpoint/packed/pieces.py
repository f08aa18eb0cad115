"""Assembles boxes of leaves from the pieces in packed files: which bytes are read, and where they go.

A piece is read in parts. A part that is contiguous both in its piece and in a box is read straight into the box.
Others are read into scratch memory, and copied from there. Which parts they are depends on the boxes alone: leaves that
are cut alike, such as the layers of a model, share the computation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.packed.file_io import FileSource
from jshard.checkpoint.packed.file_reads import READ_BYTES, Range, Read, changed, reads
from jshard.checkpoint.packed.host_memory import MappedBoxes, Slab
from jshard.checkpoint.packed.layout import (
    TAIL_BYTES,
    FileIndex,
    Limits,
    has_overlap,
    parse_index,
    parse_tail,
    shape_of,
    size_of,
)

_MOST_INDEX_BYTES = 1 << 30  # checksums of 32 TiB, or 20 million pieces
_GUESSED_INDEX_BYTES = 64 << 10  # most indexes are shorter, and come with the first read


@dataclasses.dataclass(frozen=True)
class PackedFile:
    """A packed file with its parsed index."""

    source: FileSource
    name: str
    index: FileIndex

    @classmethod
    def open(cls, source: FileSource, name: str, size: int) -> PackedFile:
        """Reads the index of a file of this size; raises `OSError` or `ValueError` if that fails."""
        guess = min(size, _GUESSED_INDEX_BYTES)
        end_of_file = bytearray(guess)
        source.read(name, size - guess, [memoryview(end_of_file)])
        # The tail is the one place at a fixed distance from the end, and says where the index begins.
        length = parse_tail(bytes(end_of_file[-TAIL_BYTES:]), size)
        if length > _MOST_INDEX_BYTES:
            raise ValueError(f"its index would have {length} bytes")
        if length <= guess:
            return cls(source, name, parse_index(memoryview(end_of_file)[guess - length :]))
        index = np.empty(length, np.uint8).data  # not zeros: with many files this is a lot of memory
        num_missing = length - guess
        index[num_missing:] = end_of_file
        source.read(name, size - length, [index[:num_missing]])
        return cls(source, name, parse_index(index))

    @functools.cached_property
    def mapped(self) -> np.ndarray | None:
        """The memory-mapped file; None if it cannot be mapped."""
        return self.source.mapped(self.name)

    def changed(self, on_read: Callable[[int], object]) -> Iterator[tuple[int, int]]:
        """Reads the whole file except its index; yields the ranges of changed blocks."""
        # One buffer for all reads: the first touch of fresh memory takes longer than the read.
        buffer = memoryview(bytearray(READ_BYTES))
        num_bytes = self.index.index_begin
        for start in range(0, num_bytes, READ_BYTES):
            view = buffer[: min(READ_BYTES, num_bytes - start)]
            self.source.read(self.name, start, [view])
            on_read(view.nbytes)
            yield from changed(start, [view], self.index.sums)


@dataclasses.dataclass(frozen=True)
class LeafColumns:
    """The shapes and itemsizes of all leaves of a checkpoint, as columns of numbers."""

    ndims: np.ndarray
    sizes: np.ndarray  # of all dims of the first leaf, then of the second, and so on
    itemsizes: np.ndarray

    @classmethod
    def of(cls, leaves: Iterable[StoredLeaf]) -> LeafColumns:
        """Returns the columns of leaves in the order of their numbers."""
        ndims: list[int] = []
        sizes: list[int] = []
        itemsizes: list[int] = []
        for leaf in leaves:
            ndims.append(len(leaf.shape))
            sizes += leaf.shape
            # Python values are in the manifest and have no pieces, but they have numbers: 1 keeps the place of each.
            itemsizes.append(np.dtype(leaf.dtype).itemsize if leaf.is_array else 1)
        return cls(np.array(ndims, np.int64), np.array(sizes, np.int64), np.array(itemsizes, np.int64))


def check_pieces(index: FileIndex, columns: LeafColumns) -> None:
    """Raises `ValueError` unless every piece is a box of its leaf, and inside the file.

    Checksums show changes, and not that a file was written by this program: they can be computed by anyone.
    """
    leaves = index.leaves.astype(np.int64)
    if (leaves >= len(columns.ndims)).any():
        raise ValueError("its index has a piece of a leaf that is not in the manifest")
    ndims = np.diff(index.begins, append=len(index.starts))
    if (ndims != columns.ndims[leaves]).any():
        raise ValueError("its index has a piece with other dims than its leaf")

    # For each limit: the size of its dim, from the concatenated shapes of all leaves.
    first_dims = np.cumsum(columns.ndims) - columns.ndims
    dims = np.arange(len(index.starts)) + np.repeat(first_dims[leaves] - index.begins, ndims)
    is_outside_leaf = (index.starts < 0) | (index.starts > index.stops) | (index.stops > columns.sizes[dims])
    if is_outside_leaf.any():
        raise ValueError("its index has a piece that is not inside of its leaf")

    # Without overflow: a box is inside of its leaf, whose size the manifest limits (`manifest.is_shape`).
    counts = np.ones(len(leaves), np.int64)
    piece_of_limit = np.repeat(np.arange(len(leaves)), ndims)
    np.multiply.at(counts, piece_of_limit, index.stops - index.starts)
    stops = index.offsets + counts * columns.itemsizes[leaves]
    is_outside_file = (index.offsets < 0) | (stops > index.index_begin)
    if is_outside_file.any():
        raise ValueError("its index has a piece that is not inside of the file")


@dataclasses.dataclass(frozen=True)
class Want:
    """Boxes of a leaf, and where they go."""

    leaf: int  # the leaf's number
    shape: tuple[int, ...]  # of the leaf
    boxes: tuple[Limits, ...]  # of the leaf, each once
    out: Slab | MappedBoxes  # the destination; or mapped boxes, which are only checked


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The boxes of a leaf's pieces; hashable, because it is a key of the cache of `_cut_parts`."""

    shape: tuple[int, ...]  # number of pieces, number of dims
    start_bytes: bytes
    stop_bytes: bytes

    @property
    def starts(self) -> np.ndarray:
        return np.frombuffer(self.start_bytes, np.int64).reshape(self.shape)

    @property
    def stops(self) -> np.ndarray:
        return np.frombuffer(self.stop_bytes, np.int64).reshape(self.shape)

    def boxes(self) -> list[Limits]:
        boxes: list[Limits] = []
        # As lists: numpy's own integers are slow to compute with one by one.
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            boxes.append(tuple(zip(start, stop, strict=True)))
        return boxes


@dataclasses.dataclass(frozen=True)
class LeafPieces:
    """The pieces of a leaf, in the order of the files: each array has a row for each piece."""

    files: np.ndarray  # the number of the file
    offsets: np.ndarray  # in the file, in bytes
    starts: np.ndarray  # of the box, by dim
    stops: np.ndarray

    @property
    def cut(self) -> _Cut:
        """How the leaf is cut into pieces, without where they are."""
        return _Cut(self.starts.shape, self.starts.tobytes(), self.stops.tobytes())


@dataclasses.dataclass(frozen=True)
class _PieceColumns:
    """The pieces of all files, in the order of the files. `starts` and `stops` have the limits of all dims in a row."""

    offsets: np.ndarray
    begins: np.ndarray  # the position of each piece's box in `starts`
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, indexes: Sequence[FileIndex]) -> _PieceColumns:
        offsets: list[np.ndarray] = []
        begins: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        stops: list[np.ndarray] = []
        num_limits = 0  # in the files before
        for index in indexes:
            offsets.append(index.offsets)
            # In its own file a piece counts the limits from 0.
            begins.append(index.begins + num_limits)
            starts.append(index.starts)
            stops.append(index.stops)
            num_limits += len(index.starts)
        return cls(np.concatenate(offsets), np.concatenate(begins), np.concatenate(starts), np.concatenate(stops))

    def ndim(self, piece: int) -> int:
        first_limit = self.begins[piece]
        if piece + 1 < len(self.begins):
            return int(self.begins[piece + 1] - first_limit)
        return int(len(self.starts) - first_limit)


@dataclasses.dataclass(frozen=True)
class _LeafOrder:
    """The pieces of all files, sorted by leaf."""

    pieces: np.ndarray  # their positions in the order of the files
    begins: np.ndarray  # by leaf, the first of its pieces in `pieces`; one more for the end of the last leaf

    def of(self, leaf: int) -> np.ndarray:
        return self.pieces[self.begins[leaf] : self.begins[leaf + 1]]


@dataclasses.dataclass(frozen=True)
class _FileRange:
    """A range of one of the files."""

    file: int
    range: Range


class Pieces:
    """The pieces of all files of a checkpoint, by leaf."""

    def __init__(self, files: Sequence[PackedFile], num_leaves: int) -> None:
        self.files = files
        self._indexes = [file.index for file in files]
        self._num_leaves = num_leaves

    def of(self, leaf: int) -> LeafPieces:
        """Returns the pieces of a leaf."""
        pieces = self._leaf_order.of(leaf)
        columns = self._columns
        # "right", as a piece whose number is the end of one file is the first of the next.
        files = np.searchsorted(self._file_ends, pieces, "right")
        offsets = columns.offsets[pieces]
        if not len(pieces):
            no_limits = np.zeros((0, 0), np.int64)
            return LeafPieces(files, offsets, no_limits, no_limits)
        ndim = columns.ndim(int(pieces[0]))
        positions = columns.begins[pieces][:, None] + np.arange(ndim)
        return LeafPieces(files, offsets, columns.starts[positions], columns.stops[positions])

    def index_of(self, file_name: str) -> FileIndex:
        """Returns the index of the file with this name."""
        for file in self.files:
            if file.name == file_name:
                return file.index
        raise KeyError(file_name)

    def num_missing(self, leaf: int, shape: Sequence[int]) -> int:
        """Returns the number of elements of a leaf that no piece contains."""
        pieces = self.of(leaf)
        if not len(pieces.starts):
            return math.prod(shape)
        # What is stored twice is counted twice: see `has_overlap`.
        counts = np.prod(pieces.stops - pieces.starts, axis=1)
        return math.prod(shape) - int(counts.sum())

    def has_overlap(self, leaf: int) -> bool:
        """Returns whether two pieces of a leaf have an element in common."""
        pieces = self.of(leaf)
        return has_overlap(pieces.starts, pieces.stops)

    def touched(self, leaf: int, boxes: Collection[Limits], shape: tuple[int, ...], itemsize: int) -> int:
        """Returns the number of elements read for some boxes of a leaf."""
        cut_parts = _cut_parts(tuple(boxes), self.of(leaf).cut, shape, itemsize)
        return sum(part.count for part in cut_parts.parts)

    @functools.cached_property
    def _file_ends(self) -> np.ndarray:
        """The cumulative number of pieces by file."""
        return np.cumsum([len(index.leaves) for index in self._indexes])

    @functools.cached_property
    def _columns(self) -> _PieceColumns:
        return _PieceColumns.of(self._indexes)

    @functools.cached_property
    def _leaf_order(self) -> _LeafOrder:
        dtype = np.uint32
        if self._num_leaves <= 1 << 16:
            dtype = np.uint16  # it sorts in a sixth of the time
        # Unsafe only by its types: `check_pieces` has refused larger numbers.
        leaves_by_file = [index.leaves for index in self._indexes]
        leaves = np.concatenate(leaves_by_file, dtype=dtype, casting="unsafe")
        # Stable: the pieces of a leaf stay in the order of the files.
        order = np.argsort(leaves, kind="stable")
        begins = np.searchsorted(leaves[order], np.arange(self._num_leaves + 1))
        return _LeafOrder(order, begins)

    def reads(self, wants: Iterable[Want], *, verify: bool) -> Iterator[Read]:
        """Yields the reads that fill some arrays; each can run in any thread.

        Elements that no piece contains are not written.
        """
        read_ranges: dict[int, list[Range]] = {}
        mapped_ranges: dict[int, list[Range]] = {}
        for want in wants:
            ranges = mapped_ranges if isinstance(want.out, MappedBoxes) else read_ranges
            for file_range in self._ranges(want):
                ranges.setdefault(file_range.file, []).append(file_range.range)
        for number in sorted(read_ranges.keys() | mapped_ranges.keys()):
            file = self.files[number]
            index = file.index
            sums = index.sums if verify else None
            if number in read_ranges:
                yield from reads(file.source, file.name, read_ranges[number], sums=sums, end=index.index_begin)
            if number in mapped_ranges and verify:  # mapped bytes are only checked
                mapped = file.mapped
                yield from reads(
                    file.source, file.name, mapped_ranges[number], sums=sums, end=index.index_begin, mapped=mapped
                )

    def mapped(
        self, leaf: int, boxes: tuple[Limits, ...], shape: tuple[int, ...], dtype: np.dtype
    ) -> MappedBoxes | None:
        """Returns mapped boxes of a leaf; None if they do not match pieces, or the files cannot be mapped."""
        pieces = self.of(leaf)
        cut_parts = _cut_parts(boxes, pieces.cut, shape, dtype.itemsize)
        if not cut_parts.parts or not cut_parts.are_whole:
            return None
        arrays = []
        for part, box in zip(cut_parts.parts, boxes, strict=True):
            file = self.files[int(pieces.files[part.piece])].mapped
            if file is None:
                return None
            values = np.frombuffer(file, dtype, part.count, int(pieces.offsets[part.piece]))
            arrays.append(values.reshape(shape_of(box)))
        return MappedBoxes(arrays)

    def _ranges(self, want: Want) -> Iterator[_FileRange]:
        """Yields the ranges of the files that fill the boxes of a leaf."""
        pieces = self.of(want.leaf)
        itemsize = want.out.boxes[0].itemsize
        cut_parts = _cut_parts(want.boxes, pieces.cut, want.shape, itemsize)
        if isinstance(want.out, Slab) and _is_one_range(want.out, pieces, cut_parts):
            first = cut_parts.parts[0].piece
            slab_range = Range(int(pieces.offsets[first]), want.out.bytes.nbytes, want.out.bytes.data)
            yield _FileRange(int(pieces.files[first]), slab_range)
            return
        for part in cut_parts.parts:
            offset = int(pieces.offsets[part.piece]) + part.start * itemsize
            yield _FileRange(int(pieces.files[part.piece]), _range(part, offset, itemsize, want.out))


def _is_one_range(slab: Slab, pieces: LeafPieces, cut_parts: _CutParts) -> bool:
    """Returns whether one range of a file fills a slab: the parts have the same spacing there as the boxes."""
    # A single part is one range in any case.
    if len(cut_parts.parts) < 2 or not cut_parts.are_whole:
        return False
    rows = [part.piece for part in cut_parts.parts]
    has_equal_spacing = (np.diff(pieces.offsets[rows]) == slab.stride).all()
    is_one_file = (pieces.files[rows] == pieces.files[rows[0]]).all()
    return bool(has_equal_spacing and is_one_file)


def _range(part: _PiecePart, offset: int, itemsize: int, out: Slab | MappedBoxes) -> Range:
    """Returns the range of a part, which begins at an offset in its file, with its destination."""
    num_bytes = part.count * itemsize
    if isinstance(out, MappedBoxes):
        return Range(offset, num_bytes)
    if part.target is None:
        return Range(offset, num_bytes, then=functools.partial(_scatter, part, out.boxes))
    start = part.target.start * itemsize
    box = _bytes(out.boxes[part.target.box])
    return Range(offset, num_bytes, box[start : start + num_bytes])


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where a part goes that is contiguous in its box."""

    box: int  # the number of the box
    start: int  # the first element in the box


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A copy of some elements of a part into a box."""

    box: int  # the number of the box
    target: tuple[slice, ...]  # in the box
    source: tuple[slice, ...]  # in the part


@dataclasses.dataclass(frozen=True)
class _PiecePart:
    """A contiguous run of elements of a piece, and its destination."""

    piece: int  # its index among the leaf's pieces
    start: int  # the first element in the piece
    count: int  # number of elements
    target: _Target | None = None  # of a direct read; None if the elements are copied
    shape: tuple[int, ...] = ()  # of the elements, if they are copied
    copies: tuple[_Copy, ...] = ()


@dataclasses.dataclass(frozen=True)
class _CutParts:
    """The parts of a leaf's pieces that are read for some boxes."""

    parts: tuple[_PiecePart, ...]
    are_whole: bool  # whether each is a whole piece that is a whole box, in the order of the boxes


@dataclasses.dataclass(frozen=True)
class _Overlap:
    """What a piece and a box have in common."""

    box: int  # the number of the box
    limits: Limits  # in the leaf


def _scatter(part: _PiecePart, boxes: Sequence[np.ndarray], view: memoryview) -> None:
    values = np.frombuffer(view, boxes[0].dtype).reshape(part.shape)
    for copy in part.copies:
        boxes[copy.box][copy.target] = values[copy.source]


@functools.lru_cache(maxsize=256)
def _cut_parts(boxes: tuple[Limits, ...], cut: _Cut, shape: tuple[int, ...], itemsize: int) -> _CutParts:
    """Returns the parts of a leaf's pieces that are read for some boxes; equal for all leaves that are cut alike."""
    pieces = cut.boxes()
    parts: list[_PiecePart] = []
    for piece, overlaps in _overlaps_by_piece(boxes, cut, pieces, shape).items():
        parts += _of_piece(piece, pieces[piece], boxes, overlaps, itemsize)
    return _CutParts(tuple(parts), _are_whole(parts, pieces, boxes))


def _overlaps_by_piece(
    boxes: Sequence[Limits], cut: _Cut, pieces: Sequence[Limits], shape: tuple[int, ...]
) -> Mapping[int, list[_Overlap]]:
    """Returns the overlaps of each piece with the boxes; raises `ValueError` if pieces do not fill a box once."""
    starts = cut.starts
    stops = cut.stops
    overlaps: dict[int, list[_Overlap]] = {}
    for number, box in enumerate(boxes):
        # What is beyond the leaf is padding, which no piece has.
        num_missing = _size_inside(box, shape)
        near = _near(box, starts, stops)
        if _overlap_within(box, starts[near], stops[near]):
            raise ValueError(f"elements of a leaf of shape {shape} are in the files twice")
        for piece in near:
            common = _common(pieces[piece], box)
            assert common is not None
            overlaps.setdefault(piece, []).append(_Overlap(number, common))
            num_missing -= size_of(common)
        if num_missing:
            raise ValueError(f"{num_missing} elements of a leaf of shape {shape} are missing from the files")
    return overlaps


def _size_inside(box: Limits, shape: tuple[int, ...]) -> int:
    """Returns the number of elements of a box that are inside of the leaf."""
    count = 1
    for (start, stop), size in zip(box, shape, strict=True):
        count *= max(0, min(stop, size) - start)
    return count


def _overlap_within(box: Limits, starts: np.ndarray, stops: np.ndarray) -> bool:
    """Returns whether some pieces, each of which overlaps a box, have an element of it in common.

    Only inside of the box: a restore refuses what it would read wrongly, as it does for missing elements.
    """
    if len(starts) < 2:
        return False
    limits = np.array(box, np.int64).reshape(-1, 2)
    return has_overlap(np.maximum(starts, limits[:, 0]), np.minimum(stops, limits[:, 1]))


def _near(box: Limits, starts: np.ndarray, stops: np.ndarray) -> list[int]:
    """Returns the pieces that overlap a box. In numpy, since a leaf may have thousands of pieces."""
    if not len(starts):
        return []
    limits = np.array(box, np.int64).reshape(-1, 2)
    overlaps = np.maximum(starts, limits[:, 0]) < np.minimum(stops, limits[:, 1])
    return np.flatnonzero(overlaps.all(axis=1)).tolist()


def _are_whole(parts: Sequence[_PiecePart], pieces: Sequence[Limits], boxes: Sequence[Limits]) -> bool:
    """Returns whether every part is a whole piece that is a whole box, in the order of the boxes."""
    if len(parts) != len(boxes):
        return False
    numbers = []
    for part in parts:
        if part.target is None or boxes[part.target.box] != pieces[part.piece]:
            return False
        numbers.append(part.target.box)
    return numbers == sorted(numbers)


def _of_piece(
    piece: int, box: Limits, boxes: Sequence[Limits], overlaps: Sequence[_Overlap], itemsize: int
) -> list[_PiecePart]:
    """Returns the parts read of one piece; direct if each box's part is contiguous in both the piece and the box."""
    parts = _direct_parts(piece, box, boxes, overlaps)
    # A range of a file has one destination, so elements that several boxes need are read once and copied.
    if len(parts) == len(overlaps) and not _share_elements(parts):
        return parts
    return _copied_parts(piece, box, boxes, overlaps, itemsize)


def _share_elements(parts: Sequence[_PiecePart]) -> bool:
    """Returns whether any two parts of a piece, in its order, have an element in common."""
    for part, following in itertools.pairwise(parts):
        end = part.start + part.count
        if end > following.start:
            return True
    return False


def _direct_parts(piece: int, box: Limits, boxes: Sequence[Limits], overlaps: Sequence[_Overlap]) -> list[_PiecePart]:
    """Returns the overlaps of a piece that can be read straight into their boxes, in the order of the piece."""
    parts = []
    for overlap in overlaps:
        start = _offset_in(box, overlap.limits)
        target_start = _offset_in(boxes[overlap.box], overlap.limits)
        if start is not None and target_start is not None:
            target = _Target(overlap.box, target_start)
            parts.append(_PiecePart(piece, start, size_of(overlap.limits), target))
    return sorted(parts, key=lambda part: part.start)


def _copied_parts(
    piece: int, box: Limits, boxes: Sequence[Limits], overlaps: Sequence[_Overlap], itemsize: int
) -> list[_PiecePart]:
    """Returns contiguous parts of a piece that contain all overlaps, with the copies that take these out of them."""
    parts = []
    hull = _hull([overlap.limits for overlap in overlaps])
    for tile in _tiles(box, hull, itemsize):
        start = _offset_in(box, tile)
        assert start is not None
        copies = []
        for overlap in overlaps:
            common = _common(tile, overlap.limits)
            if common is not None:
                copies.append(_Copy(overlap.box, _within(boxes[overlap.box], common), _within(tile, common)))
        parts.append(_PiecePart(piece, start, size_of(tile), shape=shape_of(tile), copies=tuple(copies)))
    return parts


def _hull(boxes: Sequence[Limits]) -> Limits:
    """Returns the smallest box that contains some boxes."""
    hull = []
    for limits in zip(*boxes, strict=True):  # of all boxes along one dim
        starts, stops = zip(*limits, strict=True)
        hull.append((min(starts), max(stops)))
    return tuple(hull)


def _tiles(box: Limits, hull: Limits, itemsize: int) -> Iterator[Limits]:
    """Yields contiguous parts of a piece that contain a box of it.

    A part has some MiB, unless a row of the last dim is larger. Only the first dim that is not of size 1 can be read in
    part without a gap; the dims after it are read whole. If that is too much at once, each of its rows is cut in turn.
    """
    if not box:
        yield box
        return
    dim = 0
    while dim < len(box) - 1 and _size_of_dim(box, dim) <= 1 and _row_bytes(box, dim, itemsize) > READ_BYTES:
        dim += 1
    row_bytes = _row_bytes(box, dim, itemsize)
    has_whole_rows = dim == len(box) - 1 or row_bytes <= READ_BYTES
    step = max(1, READ_BYTES // row_bytes)
    start, stop = hull[dim]
    for first in range(start, stop, step):
        rows = (first, min(first + step, stop))
        if has_whole_rows:
            yield (*hull[:dim], rows, *box[dim + 1 :])
        else:
            for rest in _tiles(box[dim + 1 :], hull[dim + 1 :], itemsize):
                yield (*hull[:dim], rows, *rest)


def _size_of_dim(box: Limits, dim: int) -> int:
    start, stop = box[dim]
    return stop - start


def _row_bytes(box: Limits, dim: int, itemsize: int) -> int:
    """Returns the size in bytes of one row along a dim."""
    return size_of(box[dim + 1 :]) * itemsize


def _offset_in(box: Limits, part: Limits) -> int | None:
    """Returns the element offset of a part of a box; None if the part is not contiguous there."""
    offset = 0
    stride = 1
    is_cut = False
    for (box_start, box_stop), (start, stop) in zip(reversed(box), reversed(part), strict=True):
        if is_cut and stop - start > 1:
            return None  # several rows, and not all of each
        if stop - start != box_stop - box_start:
            is_cut = True
        offset += (start - box_start) * stride
        stride *= box_stop - box_start
    return offset


def _common(a: Limits, b: Limits) -> Limits | None:
    """Returns what two boxes have in common; None if that is nothing."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start = max(a_start, b_start)
        stop = min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def _within(box: Limits, part: Limits) -> tuple[slice, ...]:
    """Returns a part of the leaf as slices of a box that contains it."""
    index = []
    for (box_start, _), (start, stop) in zip(box, part, strict=True):
        index.append(slice(start - box_start, stop - box_start))
    return tuple(index)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
