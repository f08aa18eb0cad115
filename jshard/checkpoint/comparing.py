"""Compares two checkpoints leaf by leaf, by path, shape, dtype and value, with only a few boxes of each in memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from jshard.checkpoint.buckets import Place
from jshard.checkpoint.manifest import StoredLeaf, Value
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import own_checkpoint

_THREADS = 2
_WIDENED_BYTES = 8 << 20  # of a box, which is converted to float64

Kind = Literal["only in a", "only in b", "shape", "dtype", "values", "equal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norms:
    """The distance between two leaves of the same shape, in float64; NaN if either contains NaN."""

    a: float  # the 2-norm of the first leaf
    b: float
    relative: float  # the 2-norm of their difference, divided by `a`; infinite if only `a` is zero
    most: float  # the largest difference of two elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafDiff:
    """A leaf, and the first kind of difference found, or that it is bitwise equal."""

    path: str
    kind: Kind
    a: StoredLeaf | None
    b: StoredLeaf | None
    norms: Norms | None = None  # if values were read and shapes are equal; None for Python values


@dataclasses.dataclass(frozen=True)
class _CheckpointPair:
    """Two open checkpoints."""

    a: Opened
    b: Opened
    values_a: dict[str, Value]  # the Python values, by path
    values_b: dict[str, Value]

    @classmethod
    def open(cls, a: Place, b: Place) -> _CheckpointPair:
        """Opens them, and reads their Python values."""
        opened_a = own_checkpoint(a)
        opened_b = own_checkpoint(b)
        return cls(opened_a, opened_b, opened_a.values(), opened_b.values())

    def has_equal_values(self, path: str) -> bool:
        """Returns whether a Python value is equal in both."""
        return np.array_equal(np.asarray(self.values_a.get(path)), np.asarray(self.values_b.get(path)))


def diff(
    a: Place, b: Place, *, values: bool = True, on_read: Callable[[int], object] = lambda num_bytes: None
) -> list[LeafDiff]:
    """Compares two checkpoints leaf by leaf; meshes, chunks and the programs that wrote them may differ.

    Args:
        a: a checkpoint.
        b: another one.
        values: whether values are read for norms. Without, they are read only where no checksums compare them.
        on_read: called, from any thread, with the bytes of each box that was read.

    Returns:
        What is said of each leaf, in the order of paths.
    """
    pair = _CheckpointPair.open(a, b)
    compare = functools.partial(_compare_leaf, pair, with_norms=values, on_read=on_read)
    paths = sorted({*pair.a.leaves, *pair.b.leaves})
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(compare, paths))


def _compare_leaf(pair: _CheckpointPair, path: str, *, with_norms: bool, on_read: Callable[[int], object]) -> LeafDiff:
    a = pair.a.leaves.get(path)
    b = pair.b.leaves.get(path)
    kind = _kind_without_values(a, b)
    norms = None
    if a is not None and b is not None and a.shape == b.shape:
        has_sums = a.sums is not None and b.sums is not None
        # Equal checksums stand for equal values. Packed files have none by leaf: their values must be read.
        must_read = with_norms or (kind == "equal" and not has_sums)
        is_equal = True
        if not a.is_array:
            is_equal = pair.has_equal_values(path)
        elif b.is_array and must_read:
            is_equal, norms = _compare_arrays(pair, path, on_read, with_norms=with_norms)
        if kind == "equal" and not is_equal:
            kind = "values"
    return LeafDiff(path=path, kind=kind, a=a, b=b, norms=norms)


def _kind_without_values(a: StoredLeaf | None, b: StoredLeaf | None) -> Kind:
    """Returns the kind of difference that shows without reading values."""
    if a is None:
        return "only in b"
    if b is None:
        return "only in a"
    if a.shape != b.shape:
        return "shape"
    if (a.dtype, a.key) != (b.dtype, b.key):
        return "dtype"
    if a.sums is not None and b.sums is not None and a.sums != b.sums:
        return "values"
    return "equal"


def _compare_arrays(
    pair: _CheckpointPair, path: str, on_read: Callable[[int], object], *, with_norms: bool
) -> tuple[bool, Norms | None]:
    """Reads an array box by box; returns whether it is bitwise equal, and its norms if requested."""
    is_equal = True
    sums = _NormSums()
    if pair.a.leaves[path].nbytes:
        for box in pair.a.boxes(path, _WIDENED_BYTES):
            a = pair.a.read(path, box)
            b = pair.b.read(path, box)
            on_read(a.nbytes + b.nbytes)
            # By bytes, and not `==`: a NaN is equal to itself, and 0.0 is not -0.0.
            is_equal &= a.dtype == b.dtype and a.tobytes() == b.tobytes()
            if with_norms:
                sums.add(a, b)
    return is_equal, sums.norms() if with_norms else None


class _NormSums:
    """The norms of two arrays, as their boxes are added."""

    def __init__(self) -> None:
        self._squares_a = 0.0
        self._squares_b = 0.0
        self._squares_of_difference = 0.0
        self._largest_difference = 0.0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Adds a box of each."""
        wide_a = _widened(a)
        wide_b = _widened(b)
        # Infinite values have a difference of NaN, and large ones a square of infinity: both belong into the result.
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(wide_a - wide_b)
            self._squares_a += np.sum(np.abs(wide_a) ** 2)
            self._squares_b += np.sum(np.abs(wide_b) ** 2)
            self._squares_of_difference += np.sum(difference**2)
            # `max` of Python would drop a NaN.
            self._largest_difference = float(np.maximum(self._largest_difference, difference.max()))

    def norms(self) -> Norms:
        """Returns the norms of all that was added."""
        norm_a = math.sqrt(self._squares_a)
        norm_of_difference = math.sqrt(self._squares_of_difference)
        relative = 0.0
        if norm_a:
            relative = norm_of_difference / norm_a
        elif norm_of_difference:
            relative = math.inf
        return Norms(a=norm_a, b=math.sqrt(self._squares_b), relative=relative, most=self._largest_difference)


def _widened(values: np.ndarray) -> np.ndarray:
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
