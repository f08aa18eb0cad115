"""A tensor that is stored in boxes, each in a place of its own: which of them a read needs, and their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jshard.checkpoint.formats.source import Box, FileRegion, Limits, read_region
from jshard.checkpoint.packed.layout import has_overlap, shape_of, slices_of


class StoredBoxes:
    """The boxes that a tensor is stored in, by number."""

    def __init__(self, ndim: int, starts: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
        # By box and dim, also for a tensor without boxes or without dims, for which numpy could not infer the shape.
        rows = (len(starts), ndim)
        self._starts = np.array(starts, np.int64).reshape(rows)
        self._sizes = np.array(sizes, np.int64).reshape(rows)

    @property
    def has_overlap(self) -> bool:
        """Whether any two boxes have an element in common."""
        return has_overlap(self._starts, self._starts + self._sizes)

    def size(self, number: int) -> tuple[int, ...]:
        """Returns the size of a box along each dim."""
        return tuple(self._sizes[number].tolist())

    def within(self, limits: Limits) -> PartsOfBoxes:
        """Returns what the boxes have in common with a box of the tensor."""
        low, high = np.array(limits, np.int64).reshape(-1, 2).T
        starts = np.maximum(self._starts, low)
        stops = np.minimum(self._starts + self._sizes, high)
        numbers = np.flatnonzero((starts < stops).all(axis=1))
        return PartsOfBoxes(
            requested=limits,
            numbers=numbers.tolist(),
            origins=self._starts[numbers],
            starts=starts[numbers],
            stops=stops[numbers],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartsOfBoxes:
    """The parts of boxes that are in a requested box; the arrays have a row for each part, with its limits.

    Attributes:
        requested: the start and stop of the requested box in each dim.
        numbers: of the boxes that have a part in it.
        origins: where these boxes start in the tensor.
        starts: where the parts start in the tensor.
        stops: where the parts stop in the tensor.
    """

    requested: Limits
    numbers: list[int]
    origins: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @property
    def has_overlap(self) -> bool:
        """Whether any two parts have an element in common."""
        return has_overlap(self.starts, self.stops)

    @property
    def num_elements(self) -> int:
        """The number of elements in all parts; one that is in several parts counts several times."""
        return int((self.stops - self.starts).prod(axis=1).sum())

    def read(self, regions: Sequence[FileRegion], dtype: npt.DTypeLike) -> np.ndarray:
        """Reads the parts, from the regions of the boxes in `numbers`, as a new array of the requested box."""
        values = np.empty(shape_of(self.requested), dtype)
        low = np.array([start for start, _ in self.requested], np.int64)
        for region, origin, start, stop in zip(regions, self.origins, self.starts, self.stops, strict=True):
            source = _slices(start, stop, origin)
            target = _slices(start, stop, low)
            out = values
            if target:  # indexing an array of no dims would copy its number
                out = values[target]
            read_region(region, source, out)
        return values


def is_inside(start: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether a box is in a tensor of this shape."""
    if not len(start) == len(sizes) == len(shape):
        return False
    for box_start, box_size, dim_size in zip(start, sizes, shape, strict=True):
        stop = box_start + box_size
        if stop > dim_size:
            return False
    return True


def _slices(start: np.ndarray, stop: np.ndarray, origin: np.ndarray) -> Box:
    """Returns a box of a tensor as slices of an array that starts at `origin` in it."""
    # As Python's integers: numpy's own are slow to compute with one by one.
    relative_start = (start - origin).tolist()
    relative_stop = (stop - origin).tolist()
    return slices_of(zip(relative_start, relative_stop, strict=True))
