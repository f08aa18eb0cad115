"""Compares a checkpoint with its checksums, or two checkpoints, with only a few boxes of each in memory.

`verify` checks that every file and the values of every leaf are intact; `diff` finds where two checkpoints differ, by
path, shape, dtype and value; `listing` lists a folder of them without reading values.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketError, Place
from jshard.checkpoint.formats.source import whole
from jshard.checkpoint.leaf_sums import box_sums
from jshard.checkpoint.lookup import INCOMPLETE, incomplete_in, is_checkpoint, place_of, series_at, steps_in
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.ownership import DRAFT_SUFFIX
from jshard.checkpoint.readers import OrbaxCheckpoint, own_checkpoint
from jshard.errors import FourPartError, RunError

_THREADS = 2
_BATCH_BYTES = 256 << 20  # of leaves that Orbax reads at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A difference from the saved data."""

    leaf: str | None  # the path of the damaged leaf; None for a file that belongs to no single leaf
    # the file, or the folder of the leaf's files if it is not known which one; None if leaves share them
    file: str | None
    why: str  # what is wrong with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of `verify`."""

    path: Place  # the checkpoint
    findings: tuple[Finding, ...]  # the damage; empty for a good checkpoint
    num_leaves: int  # number of leaves read
    num_bytes: int  # number of bytes read
    num_files: int  # number of files checked

    @property
    def is_good(self) -> bool:
        """Whether no damage was found."""
        return not self.findings


def verify(path: str | os.PathLike[str], *, on_read: Callable[[int], object] = lambda num_bytes: None) -> Verdict:
    """Reads a whole checkpoint, and compares it with the checksums recorded when it was saved.

    It reads in parts of some MiB, or leaf by leaf if Orbax wrote them. One process calls it, on any machine with
    access to the folder; no accelerator is needed.

    Args:
        path: a checkpoint, or one written by plain Orbax, which has no checksums and can only be read.
        on_read: called, from any thread, with the bytes of each box that was read.

    Returns:
        Everything that is missing, truncated or changed.

    Raises:
        CheckpointError: there is no checkpoint, or it was written by a newer jshard.

    Example:
        >>> verdict = js.checkpoint.verify("run/checkpoints/100")
        >>> verdict.is_good, [finding.leaf for finding in verdict.findings]
        (False, ['model/blocks/3/mlp/up/kernel'])
    """
    path = place_of(path)
    try:
        source = own_checkpoint(path)
        manifest = source.manifest
        lines = [] if manifest is None else _manifest.damage(path, manifest)
        found = [Finding(leaf=None, file=file, why=why) for file, _, why in (line.partition("  ") for line in lines)]
        if isinstance(source, OrbaxCheckpoint):
            found += _in_leaves(source, list(source.leaves), on_read)
        elif not found:
            found = [Finding(leaf=leaf, file=file, why=why) for leaf, file, why in source.changed(on_read)]
    except BucketError:
        raise  # nothing is known about the checkpoint
    except RunError as error:
        return _unreadable(path, error)
    return Verdict(
        path=path,
        findings=tuple(found),
        num_leaves=len(source.leaves),
        num_bytes=sum(leaf.nbytes for leaf in source.leaves.values()),
        num_files=0 if manifest is None else len(manifest.files),
    )


def _in_leaves(source: OrbaxCheckpoint, names: list[str], on_read: Callable[[int], object]) -> list[Finding]:
    """The damage in some leaves written by Orbax, which reads many leaves in the time of one."""
    leaves = {name: source.leaves[name] for name in names}
    num_bytes, values = sum(leaf.nbytes for leaf in leaves.values()), None
    if len(names) == 1 or num_bytes <= _BATCH_BYTES:
        try:
            values = source.load({name: leaf.on_host() for name, leaf in leaves.items()})
        except RunError as error:
            if len(names) == 1:
                return [Finding(leaf=names[0], file=None, why=error.why)]
    if values is None:
        half = len(names) // 2
        return _in_leaves(source, names[:half], on_read) + _in_leaves(source, names[half:], on_read)
    on_read(num_bytes)
    why = "its values differ from the saved ones."
    sums = {name: box_sums(values[name], whole(leaf), leaf.shape) for name, leaf in leaves.items() if leaf.sums}
    return [Finding(leaf=name, file=None, why=why) for name, found in sums.items() if found != leaves[name].sums]


def _unreadable(path: Place, error: RunError) -> Verdict:
    """The verdict if the checkpoint's metadata is damaged, so that nothing else is known."""
    file = error.where[0].removeprefix(f"{path}/")
    finding = Finding(leaf=None, file=None if file == str(path) else file, why=error.why)
    return Verdict(path=path, findings=(finding,), num_leaves=0, num_bytes=0, num_files=0)


# Where two checkpoints differ.

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


def diff(
    a: Place, b: Place, *, values: bool = True, on_read: Callable[[int], object] = lambda num_bytes: None
) -> list[LeafDiff]:
    """Compares two checkpoints leaf by leaf; meshes, chunks and the programs that wrote them may differ."""
    sources = own_checkpoint(a), own_checkpoint(b)
    held = [source.leaves for source in sources]
    python = [source.values() for source in sources]

    def one(path: str) -> LeafDiff:
        first, second = (leaves.get(path) for leaves in held)
        kind, norms, is_equal = _known(first, second), None, True
        if first is not None and second is not None and first.shape == second.shape:
            is_noted = None not in (first.sums, second.sums)
            if not first.is_array:
                is_equal = np.array_equal(np.asarray(python[0].get(path)), np.asarray(python[1].get(path)))
            elif second.is_array and (values or (kind == "equal" and not is_noted)):
                is_equal, norms = _compared(sources, path, on_read, norms=values)
        kind = "values" if kind == "equal" and not is_equal else kind
        return LeafDiff(path=path, kind=kind, a=first, b=second, norms=norms)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, sorted({*held[0], *held[1]})))


def _known(a: StoredLeaf | None, b: StoredLeaf | None) -> Kind:
    """The kind of difference that shows without reading values."""
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
    """Whether an array is bitwise equal, and its norms if requested."""
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


# The contents of a folder of checkpoints.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A listed checkpoint; fields from the manifest are empty if jshard did not write it."""

    path: Place
    step: int | None  # number of completed steps; None if not recorded
    is_latest: bool = False  # the one that a run would continue from
    is_complete: bool = True  # if not, `damage` says what it may be
    damage: tuple[str, ...] = ()  # a line each; for large files only the size is checked
    num_leaves: int = 0
    num_bytes: int = 0
    saved_at: float | None = None  # seconds since 1970
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    processes: int | None = None  # number of processes that saved it
    version: str | None = None  # the jshard version that wrote it
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """What is at a path: checkpoints, including incomplete step folders, oldest first."""

    path: Place
    entries: tuple[ListedCheckpoint, ...]
    unfinished: tuple[str, ...] = ()  # names of files of saves that were interrupted or are still running


def listing(path: Place) -> Listing:
    """What is at a path: a checkpoint, a series, or a run."""
    path = place_of(path)
    series = None if is_checkpoint(path) else series_at(path)
    if series is None:
        if not is_checkpoint(path):
            own_checkpoint(path)  # raises, and reports what is there
        return Listing(path=path, entries=(_entry(path, step=None),))
    entries = [_entry(series / str(step), step=step) for step in steps_in(series)]
    for step in incomplete_in(series):
        entries.append(
            ListedCheckpoint(path=series / str(step), step=step, is_complete=False, damage=(f"{INCOMPLETE}.",))
        )
    entries.sort(key=lambda entry: entry.step or 0)
    latest = max((entry.step for entry in entries if entry.step is not None and not entry.damage), default=None)
    entries = [dataclasses.replace(entry, is_latest=entry.step == latest) for entry in entries]
    left = sorted(item.name for item in series.iterdir() if item.name.endswith(DRAFT_SUFFIX) and item.is_dir())
    return Listing(path=series, entries=tuple(entries), unfinished=tuple(left))


def _entry(path: Place, *, step: int | None) -> ListedCheckpoint:
    try:
        opened = own_checkpoint(path)
    except FourPartError as error:  # the others are still listed
        return ListedCheckpoint(path=path, step=step, damage=(f"{error.what} {error.why}",))
    manifest, leaves = opened.manifest, opened.leaves.values()
    entry = ListedCheckpoint(
        path=path, step=step, num_leaves=len(leaves), num_bytes=sum(leaf.nbytes for leaf in leaves)
    )
    if manifest is None:
        return entry
    return dataclasses.replace(
        entry,
        step=step if step is not None else manifest.step,
        damage=tuple(_manifest.damage(path, manifest)),
        saved_at=manifest.saved_at,
        mesh=manifest.mesh,
        processes=manifest.processes,
        version=manifest.versions.get("jshard"),
        metrics=manifest.metrics,
    )
