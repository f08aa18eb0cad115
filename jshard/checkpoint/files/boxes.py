"""Boxes of leaves out of the pieces that packed files hold: which bytes are read, and where they go."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from jshard.checkpoint.files.layout import TAIL_BYTES, FileIndex, Limits, parse_index, parse_tail
from jshard.checkpoint.files.places import FileSource
from jshard.checkpoint.files.reading import READ_BYTES, Range, changed, reads


@dataclasses.dataclass(frozen=True)
class PackedFile:
    """A packed file whose index was read."""

    source: FileSource
    name: str
    index: FileIndex

    @classmethod
    def open(cls, source: FileSource, name: str, size: int) -> PackedFile:
        """Reads the index of a file of so many bytes; an `OSError` or a `ValueError` if that cannot be."""
        guess = min(size, 64 << 10)
        found = bytearray(guess)
        source.read(name, size - guess, [memoryview(found)])
        length = parse_tail(bytes(found[-TAIL_BYTES:]), size)
        view = memoryview(found)[max(0, guess - length) :]
        if length > guess:
            view = np.empty(length, np.uint8).data  # not zeros: of many files this is a lot of memory
            view[length - guess :] = found
            source.read(name, size - length, [view[: length - guess]])
        return cls(source, name, parse_index(view))

    def changed(self, on_read: Callable[[int], object]) -> Iterator[tuple[int, int]]:
        """Reads all of the file but its index; where blocks begin and end that are not as they were written."""
        buffer = memoryview(bytearray(READ_BYTES))
        for start in range(0, self.index.index_begin, READ_BYTES):
            view = buffer[: min(READ_BYTES, self.index.index_begin - start)]
            self.source.read(self.name, start, [view])
            on_read(view.nbytes)
            yield from changed(start, [view], self.index.sums)


@dataclasses.dataclass(frozen=True)
class Want:
    """A box of a leaf, and the array that it goes into, which is contiguous.

    Args:
        leaf: the number of the leaf.
        shape: of the leaf.
        box: of it.
        out: the array.
    """

    leaf: int
    shape: tuple[int, ...]
    box: Limits
    out: np.ndarray


class Pieces:
    """The pieces of all files of a checkpoint, by leaf."""

    def __init__(self, files: Sequence[PackedFile], num_leaves: int) -> None:
        self.files = files
        self._num_leaves = num_leaves

    def of(self, leaf: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of a leaf: the number of the file, the offset there, and where the box begins and ends."""
        begins, order = self._by_leaf
        chosen = order[begins[leaf] : begins[leaf + 1]]
        ends, offset, first, starts, stops = self._columns
        file = np.searchsorted(ends, chosen, "right")
        if not len(chosen):
            return file, offset[chosen], np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64)
        at = first[chosen]
        ndim = self._ndim(int(chosen[0]))
        places = at[:, None] + np.arange(ndim)
        return file, offset[chosen], starts[places], stops[places]

    def num_missing(self, leaf: int, shape: Sequence[int]) -> int:
        """How many elements of a leaf are in no piece."""
        _, _, starts, stops = self.of(leaf)
        return math.prod(shape) - int(np.prod(stops - starts, axis=1).sum()) if len(starts) else math.prod(shape)

    def touched(self, leaf: int, boxes: Collection[Limits]) -> int:
        """How many elements are read for some boxes of a leaf."""
        _, _, starts, stops = self.of(leaf)
        pieces = [tuple(zip(a, b, strict=True)) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        total = 0
        for box in boxes:
            for piece in pieces if box not in pieces else [box]:
                if (common := _common(piece, box)) is not None:
                    tiles = [common] if None not in (_run(piece, common), _run(box, common)) else None
                    total += sum(map(_size, tiles or _cut_rows(piece, common, 1)))
        return total

    def _ndim(self, piece: int) -> int:
        first = self._columns[2]
        return int((first[piece + 1] if piece + 1 < len(first) else len(self._columns[3])) - first[piece])

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        indexes = [file.index for file in self.files]
        limits = np.cumsum([0, *(len(index.starts) for index in indexes)])
        return (
            np.cumsum([len(index.leaves) for index in indexes]),
            np.concatenate([index.offsets for index in indexes]),
            np.concatenate([index.begins + before for index, before in zip(indexes, limits, strict=False)]),
            np.concatenate([index.starts for index in indexes]),
            np.concatenate([index.stops for index in indexes]),
        )

    @functools.cached_property
    def _by_leaf(self) -> tuple[np.ndarray, np.ndarray]:
        dtype = np.uint16 if self._num_leaves <= 1 << 16 else np.uint32  # short ones are sorted in a sixth of the time
        leaves = np.concatenate([file.index.leaves for file in self.files], dtype=dtype, casting="unsafe")
        order = np.argsort(leaves, kind="stable")
        return np.searchsorted(leaves[order], np.arange(self._num_leaves + 1)), order

    def reads(self, wants: Iterable[Want], *, verify: bool) -> Iterator[Callable[[], None]]:
        """The reads that fill some arrays, each to be done in any thread.

        What no piece holds is left as it is.
        """
        ranges: dict[int, list[Range]] = {}
        by_leaf: dict[int, list[Want]] = {}
        for want in wants:
            by_leaf.setdefault(want.leaf, []).append(want)
        for leaf, wanted in by_leaf.items():
            for file, found in self._ranges(leaf, wanted):
                ranges.setdefault(file, []).append(found)
        for number, found in sorted(ranges.items()):
            file = self.files[number]
            sums = file.index.sums if verify else None
            yield from reads(file.source, file.name, found, sums=sums, end=file.index.index_begin)

    def _ranges(self, leaf: int, wants: Sequence[Want]) -> Iterator[tuple[int, Range]]:
        files, offsets, starts, stops = self.of(leaf)
        boxes = [tuple(zip(a, b, strict=True)) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        exact = dict(zip(boxes, range(len(boxes)), strict=True))
        if all(want.box in exact for want in wants) and len({want.box for want in wants}) == len(wants):
            for want in wants:
                piece = exact[want.box]
                yield int(files[piece]), Range(int(offsets[piece]), want.out.nbytes, _bytes(want.out))
            return
        hits: dict[int, list[tuple[Want, Limits]]] = {}
        for want in wants:
            left = math.prod(min(b, size) - a for (a, b), size in zip(want.box, want.shape, strict=True))
            box = np.array(want.box, np.int64).reshape(-1, 2)
            low, high = np.maximum(starts, box[:, 0]), np.minimum(stops, box[:, 1])
            for piece in np.flatnonzero((low < high).all(axis=1)).tolist():
                common = tuple(zip(low[piece].tolist(), high[piece].tolist(), strict=True))
                hits.setdefault(piece, []).append((want, common))
                left -= _size(common)
            if left:
                raise ValueError(f"{left} elements of leaf {leaf} are in none of the files")
        for piece, found in hits.items():
            file, offset, box = int(files[piece]), int(offsets[piece]), boxes[piece]
            itemsize = found[0][0].out.itemsize
            runs = [(_run(box, common), _run(want.box, common)) for want, common in found]
            direct = [
                Range(
                    offset + there * itemsize,
                    size := _size(common) * itemsize,
                    _bytes(want.out)[here * itemsize : here * itemsize + size],
                )
                for (want, common), (there, here) in zip(found, runs, strict=True)
                if there is not None and here is not None
            ]
            direct.sort(key=lambda each: each.offset)
            overlap = any(a.end > b.offset for a, b in itertools.pairwise(direct))
            is_direct = len(direct) == len(found) and not overlap
            yield from ((file, each) for each in (direct if is_direct else _tiles(box, offset, found)))


def _tiles(box: Limits, offset: int, found: Sequence[tuple[Want, Limits]]) -> Iterator[Range]:
    """Reads what some arrays want of a piece in contiguous parts of it, out of which their boxes are copied."""
    dtype = found[0][0].out.dtype
    union = tuple(
        (min(common[dim][0] for _, common in found), max(common[dim][1] for _, common in found))
        for dim in range(len(box))
    )
    # Of the dims behind the first that is not read whole, all is read.
    for tile in _cut_rows(box, union, dtype.itemsize):
        there = _run(box, tile)
        assert there is not None
        shape = tuple(b - a for a, b in tile)

        def scatter(view: memoryview, tile: Limits = tile, shape: tuple[int, ...] = shape) -> None:
            values = np.frombuffer(view, dtype).reshape(shape)
            for want, common in found:
                inside = _common(tile, common)
                if inside is not None:
                    want.out[_within(want.box, inside)] = values[_within(tile, inside)]

        yield Range(offset + there * dtype.itemsize, math.prod(shape) * dtype.itemsize, then=scatter)


def _cut_rows(box: Limits, wanted: Limits, itemsize: int) -> Iterator[Limits]:
    """Contiguous parts of a piece that hold a box of it, of some MiB each, unless a row of the last dim has more."""
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
    """Where a part of a box begins among its elements, if it is contiguous there."""
    begin, stride, is_cut = 0, 1, False
    for (start, stop), (a, b) in zip(reversed(box), reversed(part), strict=True):
        if is_cut and b - a > 1:
            return None
        is_cut |= b - a != stop - start
        begin += (a - start) * stride
        stride *= stop - start
    return begin


def _size(box: Limits) -> int:
    return math.prod(b - a for a, b in box)


def _common(a: Limits, b: Limits) -> Limits | None:
    found = tuple((max(c[0], d[0]), min(c[1], d[1])) for c, d in zip(a, b, strict=True))
    return found if all(start < stop for start, stop in found) else None


def _within(box: Limits, part: Limits) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (start, _), (a, b) in zip(box, part, strict=True))


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
