"""Compares a checkpoint with the checksums of its save, with only a few boxes of it in memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketError, Place
from jshard.checkpoint.formats.source import whole
from jshard.checkpoint.lookup import place_of
from jshard.checkpoint.packed_reader import PackedCheckpoint
from jshard.checkpoint.readers import OrbaxCheckpoint, own_checkpoint
from jshard.checkpoint.state.leaf_sums import box_sums
from jshard.errors import RunError

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
    num_files: int  # number of files checked; of jshard's `format="orbax"` none, as its leaves have the checksums
    has_sums: bool = True  # whether jshard wrote it; else there is nothing to compare with

    @property
    def is_good(self) -> bool:
        """Whether there is no damage."""
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

    Examples:
        >>> verdict = js.checkpoint.verify("run/checkpoints/100")
        >>> verdict.is_good, [finding.leaf for finding in verdict.findings]
        (False, ['model/blocks/3/mlp/up/kernel'])
    """
    path = place_of(path)
    try:
        source = own_checkpoint(path)
        findings = _damaged_files(source)
        if isinstance(source, OrbaxCheckpoint):
            findings += _damaged_leaves(source, list(source.leaves), on_read)
        elif not findings:  # missing or cut files cannot be read
            for change in source.changes(on_read):
                findings.append(Finding(leaf=change.leaf, file=change.file, why=change.why))
    except BucketError:
        raise  # nothing is known about the checkpoint
    except RunError as error:
        return _unreadable(path, error)
    return Verdict(
        path=path,
        findings=tuple(findings),
        num_leaves=len(source.leaves),
        num_bytes=sum(leaf.nbytes for leaf in source.leaves.values()),
        num_files=0 if source.manifest is None else len(source.manifest.files),
        has_sums=source.manifest is not None,
    )


def _damaged_files(source: OrbaxCheckpoint | PackedCheckpoint) -> list[Finding]:
    """Returns the files that are missing, or of another size or content than the manifest says."""
    if source.manifest is None:
        return []
    findings = []
    for line in _manifest.damage(source.path, source.manifest):
        # As `manifest.damage` writes a line: the name, two spaces, and what is wrong.
        file, _, why = line.partition("  ")
        findings.append(Finding(leaf=None, file=file, why=why))
    return findings


def _damaged_leaves(source: OrbaxCheckpoint, names: Sequence[str], on_read: Callable[[int], object]) -> list[Finding]:
    """Returns the leaves written by Orbax that cannot be read, or whose values have changed.

    Orbax reads many leaves in the time of one. But if one of them cannot be read, none is, and the error does not say
    which it was: then each half is read by itself.
    """
    leaves = {name: source.leaves[name] for name in names}
    num_bytes = sum(leaf.nbytes for leaf in leaves.values())
    is_single = len(names) == 1
    values = None
    if num_bytes <= _BATCH_BYTES or is_single:
        try:
            values = source.load({name: leaf.on_host() for name, leaf in leaves.items()})
        except RunError as error:
            if is_single:
                return [Finding(leaf=names[0], file=None, why=error.why)]
    if values is None:
        # Not while the error is handled: it would be the context of the errors of the halves, and thus their reason.
        half = len(names) // 2
        return _damaged_leaves(source, names[:half], on_read) + _damaged_leaves(source, names[half:], on_read)
    on_read(num_bytes)
    findings = []
    for name, leaf in leaves.items():
        if leaf.sums and box_sums(values[name], whole(leaf), leaf.shape) != leaf.sums:
            findings.append(Finding(leaf=name, file=None, why="its values differ from the saved ones."))
    return findings


def _unreadable(path: Place, error: RunError) -> Verdict:
    """Returns the verdict if the checkpoint's metadata is damaged, so that nothing else is known."""
    place = error.where[0]
    file = None if place == str(path) else place.removeprefix(f"{path}/")
    finding = Finding(leaf=None, file=file, why=error.why)
    return Verdict(path=path, findings=(finding,), num_leaves=0, num_bytes=0, num_files=0)
