"""Assembles boxes of leaves from the pieces in packed files: which bytes are read, and where they go."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from jshard.checkpoint.file_io import READ_BYTES, FileSource, MappedBoxes, Range, Read, Slab, changed, reads
from jshard.checkpoint.layout import TAIL_BYTES, FileIndex, Limits, parse_index, parse_tail, size_of

_MOST_INDEX_BYTES = 1 << 30  # checksums of 32 TiB, or 20 million pieces


@dataclasses.dataclass(frozen=True)
class PackedFile:
    """A packed file with its parsed index."""

    source: FileSource
    name: str
    index: FileIndex

    @classmethod
    def open(cls, source: FileSource, name: str, size: int) -> PackedFile:
        """Reads the index of a file of this size; raises `OSError` or `ValueError` if that fails."""
        guess = min(size, 64 << 10)
        found = bytearray(guess)
        source.read(name, size - guess, [memoryview(found)])
        length = parse_tail(bytes(found[-TAIL_BYTES:]), size)
        if length > _MOST_INDEX_BYTES:
            raise ValueError(f"its index would have {length} bytes")
        view = memoryview(found)[max(0, guess - length) :]
        if length > guess:
            view = np.empty(length, np.uint8).data  # not zeros: with many files this is a lot of memory
            view[length - guess :] = found
            source.read(name, size - length, [view[: length - guess]])
        return cls(source, name, parse_index(view))

    @functools.cached_property
    def mapped(self) -> np.ndarray | None:
        """The memory-mapped file; None if it cannot be mapped."""
        return self.source.mapped(self.name)

    def changed(self, on_read: Callable[[int], object]) -> Iterator[tuple[int, int]]:
        """Reads the whole file except its index; returns the ranges of changed blocks."""
        buffer = memoryview(bytearray(READ_BYTES))
        for start in range(0, self.index.index_begin, READ_BYTES):
            view = buffer[: min(READ_BYTES, self.index.index_begin - start)]
            self.source.read(self.name, start, [view])
            on_read(view.nbytes)
            yield from changed(start, [view], self.index.sums)


def check_pieces(index: FileIndex, shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int]) -> None:
    """Raises `ValueError` unless every piece is a box of its leaf, and inside the file.

    Checksums show changes, and not that a file was written by this program: they can be computed by anyone.
    """
    leaves = index.leaves.astype(np.int64)
    if (leaves >= len(shapes)).any():
        raise ValueError("its index has a piece of a leaf that is not in the manifest")
    ndims = np.diff(index.begins, append=len(index.starts))
    leaf_ndims = np.array([len(shape) for shape in shapes], np.int64)
    if (ndims != leaf_ndims[leaves]).any():
        raise ValueError("its index has a piece with other dims than its leaf")
    # For each limit: the size of its dim, from the concatenated shapes of all leaves.
    sizes = np.array([size for shape in shapes for size in shape], np.int64)
    first_dims = np.cumsum(leaf_ndims) - leaf_ndims
    dims = np.arange(len(index.starts)) + np.repeat(first_dims[leaves] - index.begins, ndims)
    if ((index.starts < 0) | (index.starts > index.stops) | (index.stops > sizes[dims])).any():
        raise ValueError("its index has a piece that is not inside of its leaf")
    counts = np.ones(len(leaves), np.int64)
    np.multiply.at(counts, np.repeat(np.arange(len(leaves)), ndims), index.stops - index.starts)
    ends = index.offsets + counts * np.array(itemsizes, np.int64)[leaves]
    if ((index.offsets < 0) | (ends > index.index_begin)).any():
        raise ValueError("its index has a piece that is not inside of the file")


@dataclasses.dataclass(frozen=True)
class Want:
    """Boxes of a leaf, and where they go."""

    leaf: int  # the leaf's number
    shape: tuple[int, ...]  # of the leaf
    boxes: tuple[Limits, ...]  # of the leaf, each once
    out: Slab | MappedBoxes  # the destination; or mapped boxes, which are only checked


class Pieces:
    """The pieces of all files of a checkpoint, by leaf."""

    def __init__(self, files: Sequence[PackedFile], num_leaves: int) -> None:
        self.files = files
        self._num_leaves = num_leaves

    def of(self, leaf: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of a leaf: the number of the file, the offset in it, and the start and stop of the box."""
        begins, order = self._by_leaf
        chosen = order[begins[leaf] : begins[leaf + 1]]
        offset, first, starts, stops = self._columns
        file = np.searchsorted(self._file_ends, chosen, "right")
        if not len(chosen):
            return file, offset[chosen], np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)
        at = first[chosen]
        ndim = self._ndim(int(chosen[0]))
        places = at[:, None] + np.arange(ndim)
        return file, offset[chosen], starts[places], stops[places]

    def num_missing(self, leaf: int, shape: Sequence[int]) -> int:
        """The number of elements of a leaf that no piece contains."""
        _, _, starts, stops = self.of(leaf)
        return math.prod(shape) - int(np.prod(stops - starts, axis=1).sum()) if len(starts) else math.prod(shape)

    def touched(self, leaf: int, boxes: Collection[Limits], shape: tuple[int, ...], itemsize: int) -> int:
        """The number of elements read for some boxes of a leaf."""
        _, _, starts, stops = self.of(leaf)
        return sum(part.count for part in _parts(tuple(boxes), *_key(starts, stops), shape, itemsize))

    def _ndim(self, piece: int) -> int:
        first = self._columns[1]
        return int((first[piece + 1] if piece + 1 < len(first) else len(self._columns[2])) - first[piece])

    @functools.cached_property
    def _file_ends(self) -> np.ndarray:
        """The cumulative number of pieces by file."""
        return np.cumsum([len(file.index.leaves) for file in self.files])

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        indexes = [file.index for file in self.files]
        limits = np.cumsum([0, *(len(index.starts) for index in indexes)])
        return (
            np.concatenate([index.offsets for index in indexes]),
            np.concatenate([index.begins + before for index, before in zip(indexes, limits, strict=False)]),
            np.concatenate([index.starts for index in indexes]),
            np.concatenate([index.stops for index in indexes]),
        )

    @functools.cached_property
    def _by_leaf(self) -> tuple[np.ndarray, np.ndarray]:
        dtype = np.uint16 if self._num_leaves <= 1 << 16 else np.uint32  # the shorter type sorts in a sixth of the time
        leaves = np.concatenate([file.index.leaves for file in self.files], dtype=dtype, casting="unsafe")
        order = np.argsort(leaves, kind="stable")
        return np.searchsorted(leaves[order], np.arange(self._num_leaves + 1)), order

    def reads(self, wants: Iterable[Want], *, verify: bool) -> Iterator[Read]:
        """The reads that fill some arrays; each can run in any thread.

        Elements that no piece contains are not written.
        """
        ranges: dict[tuple[int, bool], list[Range]] = {}
        for want in wants:
            for file, found in self._ranges(want):
                ranges.setdefault((file, isinstance(want.out, MappedBoxes)), []).append(found)
        for (number, is_mapped), found in sorted(ranges.items()):
            file = self.files[number]
            sums, mapped = file.index.sums if verify else None, file.mapped if is_mapped else None
            if verify or not is_mapped:
                yield from reads(file.source, file.name, found, sums=sums, end=file.index.index_begin, mapped=mapped)

    def mapped(
        self, leaf: int, boxes: tuple[Limits, ...], shape: tuple[int, ...], dtype: np.dtype
    ) -> MappedBoxes | None:
        """Mapped boxes of a leaf; None if they do not match pieces, or the files cannot be mapped."""
        files, offsets, starts, stops = self.of(leaf)
        parts = _parts(boxes, *_key(starts, stops), shape, dtype.itemsize)
        held = [self.files[int(files[part.piece])].mapped for part in parts if part.is_whole]
        if not parts or len(held) < len(parts):
            return None
        found = []
        for part, file, box in zip(parts, held, boxes, strict=True):
            if file is None:
                return None
            values = np.frombuffer(file, dtype, part.count, int(offsets[part.piece]))
            found.append(values.reshape([b - a for a, b in box]))
        return MappedBoxes(found)

    def _ranges(self, want: Want) -> Iterator[tuple[int, Range]]:
        files, offsets, starts, stops = self.of(want.leaf)
        out, itemsize = want.out, want.out.boxes[0].itemsize
        parts = _parts(want.boxes, *_key(starts, stops), want.shape, itemsize)
        if isinstance(out, Slab) and len(parts) > 1 and all(part.is_whole for part in parts):
            pieces = [part.piece for part in parts]
            if (np.diff(offsets[pieces]) == out.stride).all() and (files[pieces] == files[pieces[0]]).all():
                yield int(files[pieces[0]]), Range(int(offsets[pieces[0]]), out.bytes.nbytes, out.bytes.data)
                return
        for part in parts:
            offset, num_bytes = int(offsets[part.piece]) + part.begin * itemsize, part.count * itemsize
            if isinstance(out, MappedBoxes):
                found = Range(offset, num_bytes)
            elif part.place is None:
                found = Range(offset, num_bytes, then=functools.partial(_scatter, part, out.boxes))
            else:
                number, begin = part.place
                begin *= itemsize
                found = Range(offset, num_bytes, _bytes(out.boxes[number])[begin : begin + num_bytes])
            yield int(files[part.piece]), found


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """A contiguous run of elements of a piece, and its destination."""

    piece: int  # its index among the leaf's pieces
    begin: int  # the first element in the piece
    count: int  # number of elements
    # the destination box and element offset for a direct read; None if they are copied
    place: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()  # of the elements, if they are copied
    # the box, the position in it, and the part of the elements that goes there
    copies: tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...] = ()
    is_whole: bool = False  # whether the part is a whole piece and box, and parts are in box order


def _scatter(part: _Stretch, boxes: Sequence[np.ndarray], view: memoryview) -> None:
    values = np.frombuffer(view, boxes[0].dtype).reshape(part.shape)
    for number, to, of in part.copies:
        boxes[number][to] = values[of]


def _key(starts: np.ndarray, stops: np.ndarray) -> tuple[tuple[int, ...], bytes, bytes]:
    """Boxes of pieces as a lookup key."""
    return starts.shape, starts.tobytes(), stops.tobytes()


@functools.lru_cache(maxsize=256)
def _parts(
    boxes: tuple[Limits, ...], num: tuple[int, ...], starts: bytes, stops: bytes, shape: tuple[int, ...], itemsize: int
) -> tuple[_Stretch, ...]:
    """The parts of a leaf's pieces read for some boxes; equal for all leaves that are cut alike."""
    low, high = (np.frombuffer(each, np.int64).reshape(num) for each in (starts, stops))
    pieces = [tuple(zip(a, b, strict=True)) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    hits: dict[int, list[tuple[int, Limits]]] = {}
    for number, wanted in enumerate(boxes):
        left = math.prod(max(0, min(b, size) - a) for (a, b), size in zip(wanted, shape, strict=True))
        box = np.array(wanted, np.int64).reshape(-1, 2)
        near = pieces and (np.maximum(low, box[:, 0]) < np.minimum(high, box[:, 1])).all(axis=1)
        for piece in np.flatnonzero(near).tolist():
            common = _common(pieces[piece], wanted)
            assert common is not None
            hits.setdefault(piece, []).append((number, common))
            left -= size_of(common)
        if left:
            raise ValueError(f"{left} elements of a leaf of shape {shape} are missing from the files")
    found: list[_Stretch] = []
    for piece, common in hits.items():
        found += _of_piece(piece, pieces[piece], boxes, common, itemsize)
    whole = [boxes[part.place[0]] == pieces[part.piece] for part in found if part.place is not None]
    if len(whole) == len(found) == len(boxes) and all(whole):
        places = [part.place[0] for part in found if part.place is not None]
        if places == sorted(places):
            return tuple(dataclasses.replace(part, is_whole=True) for part in found)
    return tuple(found)


def _of_piece(
    piece: int, box: Limits, boxes: Sequence[Limits], hits: Sequence[tuple[int, Limits]], itemsize: int
) -> list[_Stretch]:
    """The parts read of one piece; direct if each box's part is contiguous in both the piece and the box."""
    direct: list[_Stretch] = []
    for number, common in hits:
        there, here = _run(box, common), _run(boxes[number], common)
        if there is not None and here is not None:
            direct.append(_Stretch(piece, there, size_of(common), place=(number, here)))
    direct.sort(key=lambda part: part.begin)
    overlap = any(a.begin + a.count > b.begin for a, b in itertools.pairwise(direct))
    if len(direct) == len(hits) and not overlap:
        return direct
    # Contiguous parts of the piece: dims after the first partly read one are read whole.
    union = tuple(
        (min(common[dim][0] for _, common in hits), max(common[dim][1] for _, common in hits))
        for dim in range(len(box))
    )
    tiles = []
    for tile in _cut_rows(box, union, itemsize):
        there = _run(box, tile)
        assert there is not None
        inside = [(number, both) for number, common in hits if (both := _common(tile, common)) is not None]
        copies = tuple((number, _within(boxes[number], both), _within(tile, both)) for number, both in inside)
        tiles.append(_Stretch(piece, there, size_of(tile), shape=tuple(b - a for a, b in tile), copies=copies))
    return tiles


def _cut_rows(box: Limits, wanted: Limits, itemsize: int) -> Iterator[Limits]:
    """Contiguous parts of a piece that contain a box of it, of some MiB each unless a row of the last dim is larger."""
    for dim in range(len(box)):
        row_bytes = math.prod(b - a for a, b in box[dim + 1 :]) * itemsize
        is_last = dim == len(box) - 1 or row_bytes <= READ_BYTES
        if box[dim][1] - box[dim][0] > 1 or is_last:
            break
    else:
        yield box
        return
    step = max(1, READ_BYTES // row_bytes)
    start, stop = wanted[dim]
    for first in range(start, stop, step):
        last = min(first + step, stop)
        if is_last:
            yield *((a, b) for a, b in wanted[:dim]), (first, last), *box[dim + 1 :]
        else:
            rest = _cut_rows(box[dim + 1 :], wanted[dim + 1 :], itemsize)
            yield from ((*wanted[:dim], (first, last), *tile) for tile in rest)


def _run(box: Limits, part: Limits) -> int | None:
    """The element offset of a part of a box, if the part is contiguous there."""
    begin, stride, is_cut = 0, 1, False
    for (start, stop), (a, b) in zip(reversed(box), reversed(part), strict=True):
        if is_cut and b - a > 1:
            return None
        is_cut |= b - a != stop - start
        begin += (a - start) * stride
        stride *= stop - start
    return begin


def _common(a: Limits, b: Limits) -> Limits | None:
    found = tuple((max(c[0], d[0]), min(c[1], d[1])) for c, d in zip(a, b, strict=True))
    return found if all(start < stop for start, stop in found) else None


def _within(box: Limits, part: Limits) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (start, _), (a, b) in zip(box, part, strict=True))


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
