"""Where two checkpoints differ: by path, shape, dtype and value, with no more than some boxes of each in memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jshard.checkpoint.boxes import CheckpointSource
from jshard.checkpoint.manifest import StoredLeaf

_THREADS = 2
_BOX_BYTES = 8 << 20  # they are widened to float64

Kind = Literal["only in a", "only in b", "shape", "dtype", "values", "equal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norms:
    """How far two leaves of a shape are apart; in float64, NaN where one of them holds NaN.

    Attributes:
        a: the 2-norm of one.
        b: of the other.
        relative: of their difference, divided by the first; infinite where only that is zero.
        most: the largest difference of two elements.
    """

    a: float
    b: float
    relative: float
    most: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafDiff:
    """A leaf, and how it differs.

    Attributes:
        path: of the leaf.
        kind: the first of: it is in one only, its shapes differ, its dtypes, its values; or it is equal bit for bit.
        a: as the first holds it.
        b: as the second does.
        norms: where values were read and shapes are equal; None for values of Python.
    """

    path: str
    kind: Kind
    a: StoredLeaf | None
    b: StoredLeaf | None
    norms: Norms | None = None


def diff(
    a: Path, b: Path, *, values: bool = True, on_read: Callable[[int], object] = lambda num_bytes: None
) -> list[LeafDiff]:
    """Compares two checkpoints leaf by leaf.

    Args:
        a: one.
        b: the other; meshes, chunks and the programs that wrote them may differ.
        values: whether values are read. Without it leaves are taken to be equal whose sums are (`sums.py`), and those
            that have none if their shapes are.
        on_read: called with the bytes of each box that was read, of one of the two.

    Returns:
        Every leaf of either, sorted by path.

    Raises:
        CheckpointError: there is no checkpoint at one of the paths.
        RunError: one of them is damaged.

    Example:
        >>> [leaf.path for leaf in diff(Path("run/100"), Path("run/200")) if leaf.kind != "equal"]
    """
    sources = CheckpointSource(a), CheckpointSource(b)
    held = [source.opened.leaves for source in sources]
    python = [source.values() for source in sources] if values else [{}, {}]

    def one(path: str) -> LeafDiff:
        first, second = (leaves.get(path) for leaves in held)
        kind, norms = _described(first, second), None
        if first is not None and second is not None and first.shape == second.shape and values:
            if first.is_array and second.is_array:
                is_equal, norms = _compared(sources, path, on_read)
                kind = "values" if kind == "equal" and not is_equal else kind
            elif not _same(python[0].get(path), python[1].get(path)):
                kind = "values" if kind == "equal" else kind
        return LeafDiff(path=path, kind=kind, a=first, b=second, norms=norms)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, sorted({*held[0], *held[1]})))


def _described(a: StoredLeaf | None, b: StoredLeaf | None) -> Kind:
    """What is known without values."""
    if a is None or b is None:
        return "only in b" if a is None else "only in a"
    if a.shape != b.shape:
        return "shape"
    if (a.dtype, a.key) != (b.dtype, b.key):
        return "dtype"
    return "values" if None not in (a.sums, b.sums) and a.sums != b.sums else "equal"


def _compared(
    sources: tuple[CheckpointSource, CheckpointSource], path: str, on_read: Callable[[int], object]
) -> tuple[bool, Norms]:
    """Whether an array is equal bit for bit, and its norms."""
    sums, most, is_equal = np.zeros(3), 0.0, True
    for box in sources[0].boxes(path, _BOX_BYTES) if sources[0].leaves[path].nbytes else ():
        a, b = (source.read(path, box) for source in sources)
        on_read(a.nbytes + b.nbytes)
        is_equal &= a.dtype == b.dtype and a.tobytes() == b.tobytes()
        wide = [_wide(values) for values in (a, b)]
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(wide[0] - wide[1])
            sums += [np.sum(np.abs(values) ** 2) for values in (*wide, apart)]
            most = float(np.maximum(most, apart.max()))
    first, second, apart = map(float, np.sqrt(sums))
    relative = apart / first if first else math.inf if apart else 0.0
    return is_equal, Norms(a=first, b=second, relative=relative, most=most)


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def _same(a: Any, b: Any) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))
