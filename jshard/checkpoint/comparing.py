"""A checkpoint against its sums, and two against each other: with no more than some boxes of each in memory.

`verify` finds whether everything that was saved is still there, every file and the values of every leaf; `diff` where
two checkpoints differ, by path, shape, dtype and value.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketError, Place
from jshard.checkpoint.lookup import place_of
from jshard.checkpoint.manifest import CHANGED, StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.packed import PackedCheckpoint
from jshard.checkpoint.readers import OrbaxCheckpoint, own_checkpoint
from jshard.checkpoint.storage import FOLDER
from jshard.checkpoint.sums import add, box_sums
from jshard.errors import RunError, printable

_THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it was saved.

    Attributes:
        leaf: the path of the leaf that is damaged; None where a file belongs to no leaf alone.
        file: the file, or the folder with the leaf's files where it is not known which; None if leaves share them.
        why: what is wrong with it.
    """

    leaf: str | None
    file: str | None
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `verify` came to.

    Attributes:
        path: the checkpoint.
        findings: what is damaged; none for a good checkpoint.
        num_leaves: that were read.
        num_bytes: of them.
        num_files: that were looked at.
        unsummed: leaves that could be read and have no sums to be compared with, in a checkpoint of others all.
    """

    path: Place
    findings: tuple[Finding, ...]
    num_leaves: int
    num_bytes: int
    num_files: int
    unsummed: int = 0

    @property
    def is_good(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def verify(path: str | os.PathLike[str], *, on_read: Callable[[int], object] = lambda num_bytes: None) -> Verdict:
    """Reads a whole checkpoint, and compares it with what was noted when it was saved.

    It reads box by box, so that it needs about 150 MiB (or memory for two chunks, where they are larger). One process
    calls it, on any machine that sees the folder; no accelerator is needed.

    Args:
        path: a checkpoint, or one that plain Orbax wrote: that has no sums, and can only be read.
        on_read: called with the bytes of each box that was read, by any thread.

    Returns:
        Everything that is missing, cut off or changed.

    Raises:
        CheckpointError: there is no checkpoint, or a newer jshard wrote it.

    Example:
        >>> verdict = js.checkpoint.verify("run/checkpoints/100")
        >>> verdict.is_good, [finding.leaf for finding in verdict.findings]
        (False, ['model/blocks/3/mlp/up/kernel'])
    """
    path = place_of(path)
    try:
        source = own_checkpoint(path)
        if isinstance(source, PackedCheckpoint):
            return _packed(source, on_read)
    except BucketError:
        raise  # nothing is known of the checkpoint
    except RunError as error:
        return _unreadable(path, error)
    manifest, arrays = source.manifest, source.arrays
    findings = [] if manifest is None else _in_files(source, manifest)
    damaged = {finding.leaf for finding in findings}
    whole = [name for name in arrays if name not in damaged]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda name: _in_leaf(source, name, on_read), whole))
    findings += [finding for finding in found if finding is not None]
    findings += _in_values(source)
    return Verdict(
        path=path,
        findings=tuple(findings),
        num_leaves=len(source.leaves),
        num_bytes=sum(arrays[name].nbytes for name in whole),
        num_files=0 if manifest is None else len(manifest.files),
        unsummed=sum(1 for leaf in arrays.values() if leaf.nbytes and leaf.sums is None),
    )


def _packed(source: PackedCheckpoint, on_read: Callable[[int], object]) -> Verdict:
    """The verdict on a packed checkpoint, all of whose bytes have a sum."""
    findings = []
    can_be_read = True
    for line in _manifest.damage(source.path, source.manifest):
        file, _, why = line.partition("  ")
        if not (file.startswith(f"{FOLDER}/") and why == CHANGED):  # of those it is found which leaves they are
            findings.append(Finding(leaf=None, file=file, why=why))
            can_be_read &= not file.startswith(f"{FOLDER}/")
    if can_be_read:
        findings += [Finding(leaf=leaf, file=file, why=why) for leaf, file, why in source.changed(on_read)]
    return Verdict(
        path=source.path,
        findings=tuple(findings),
        num_leaves=len(source.leaves),
        num_bytes=sum(leaf.nbytes for leaf in source.arrays.values()),
        num_files=len(source.manifest.files),
    )


def _unreadable(path: Place, error: RunError) -> Verdict:
    """What describes the checkpoint is damaged: nothing else of it is known."""
    file = error.where[0].removeprefix(f"{path}/")
    finding = Finding(leaf=None, file=None if file == str(path) else file, why=error.why)
    return Verdict(path=path, findings=(finding,), num_leaves=0, num_bytes=0, num_files=0)


def _in_files(source: OrbaxCheckpoint, manifest: _manifest.Manifest) -> list[Finding]:
    """Files that are missing, cut off, or small and changed; each with the leaf that it holds a part of."""
    leaves = {source.folder(name): name for name in source.leaves}
    found = []
    for line in _manifest.damage(source.path, manifest):
        file, _, why = line.partition("  ")
        leaf = next((leaves[str(folder)] for folder in Path(file).parents if str(folder) in leaves), None)
        found.append(Finding(leaf=leaf, file=file, why=why))
    return found


def _in_leaf(source: OrbaxCheckpoint, name: str, on_read: Callable[[int], object]) -> Finding | None:
    """What is wrong with the values of an array."""
    stored = source.leaves[name]
    total = (0, 0)
    try:
        for box in source.boxes(name):
            values = source.read(name, box)
            total = add([total, box_sums(values, box, stored.shape)])
            on_read(values.nbytes)
    except RunError as error:
        return Finding(leaf=name, file=_place(source, name), why=error.why.removeprefix(f"{printable(name)}: "))
    if stored.sums is None or total == stored.sums:
        return None
    return Finding(leaf=name, file=_place(source, name), why="its values are not those that were saved.")


def _in_values(source: OrbaxCheckpoint) -> list[Finding]:
    try:
        source.values()
    except RunError as error:
        return [Finding(leaf=None, file=None, why=f"numbers and texts: {error.why}")]
    return []


def _place(source: OrbaxCheckpoint, name: str) -> str | None:
    """The file of a leaf, or their folder if it has several."""
    folder = source.folder(name)
    if folder is None or source.manifest is None:
        return folder
    files = [file for file in source.manifest.files if file.startswith(f"{folder}/") and not file.endswith("zarr.json")]
    return files[0] if len(files) == 1 else f"{folder}/ ({len(files)} files)"


# Where two checkpoints differ.

_WIDENED_BYTES = 8 << 20  # of a box: it becomes float64

Kind = Literal["only in a", "only in b", "shape", "dtype", "values", "equal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norms:
    """How far two leaves of a shape are apart; in float64, NaN where one of them holds NaN."""

    a: float  # the 2-norm of one
    b: float
    relative: float  # that of their difference, divided by the first; infinite where only that is zero
    most: float  # the largest difference of two elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafDiff:
    """A leaf, and how it differs: the first of its kinds, or it is equal bit for bit."""

    path: str
    kind: Kind
    a: StoredLeaf | None
    b: StoredLeaf | None
    norms: Norms | None = None  # where values were read and shapes are equal; None for values of Python


def diff(
    a: Place, b: Place, *, values: bool = True, on_read: Callable[[int], object] = lambda num_bytes: None
) -> list[LeafDiff]:
    """Compares two checkpoints leaf by leaf; meshes, chunks and the programs that wrote them may differ.

    Args:
        a: one.
        b: the other.
        values: whether norms are computed. Without it, leaves that both have sums of are not read (`sums.py`).
        on_read: called with the bytes of each box that was read, of one of the two.

    Returns:
        Every leaf of either, sorted by path.

    Raises:
        CheckpointError: there is no checkpoint at one of the paths.
        RunError: one of them is damaged.
    """
    sources = own_checkpoint(a), own_checkpoint(b)
    held = [source.leaves for source in sources]
    python = [source.values() for source in sources]

    def one(path: str) -> LeafDiff:
        first, second = (leaves.get(path) for leaves in held)
        kind, norms = _known(first, second), None
        is_noted = first is not None and second is not None and None not in (first.sums, second.sums)
        if first is not None and second is not None and first.shape == second.shape and (values or not is_noted):
            are_arrays = first.is_array and second.is_array
            if are_arrays and (values or kind == "equal"):
                is_equal, norms = _compared(sources, path, on_read, norms=values)
                kind = "values" if kind == "equal" and not is_equal else kind
            elif not first.is_array and not np.array_equal(
                np.asarray(python[0].get(path)), np.asarray(python[1].get(path))
            ):
                kind = "values" if kind == "equal" else kind
        return LeafDiff(path=path, kind=kind, a=first, b=second, norms=norms)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, sorted({*held[0], *held[1]})))


def _known(a: StoredLeaf | None, b: StoredLeaf | None) -> Kind:
    """What is known without values."""
    if a is None or b is None:
        return "only in b" if a is None else "only in a"
    if a.shape != b.shape:
        return "shape"
    if (a.dtype, a.key) != (b.dtype, b.key):
        return "dtype"
    return "values" if None not in (a.sums, b.sums) and a.sums != b.sums else "equal"


def _compared(
    sources: tuple[Opened, Opened], path: str, on_read: Callable[[int], object], *, norms: bool
) -> tuple[bool, Norms | None]:
    """Whether an array is equal bit for bit, and its norms if they are wanted."""
    sums, most, is_equal = np.zeros(3), 0.0, True
    for box in sources[0].boxes(path, _WIDENED_BYTES) if sources[0].leaves[path].nbytes else ():
        a, b = (source.read(path, box) for source in sources)
        on_read(a.nbytes + b.nbytes)
        is_equal &= a.dtype == b.dtype and a.tobytes() == b.tobytes()
        if not norms:
            continue
        wide = [values.astype(np.complex128 if np.iscomplexobj(values) else np.float64) for values in (a, b)]
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(wide[0] - wide[1])
            sums += [np.sum(np.abs(values) ** 2) for values in (*wide, apart)]
            most = float(np.maximum(most, apart.max()))
    if not norms:
        return is_equal, None
    first, second, apart = map(float, np.sqrt(sums))
    relative = apart / first if first else math.inf if apart else 0.0
    return is_equal, Norms(a=first, b=second, relative=relative, most=most)
