"""Whether everything that was saved is still there: every file, and the values of every leaf by their sums."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from jshard.checkpoint import manifest as _seal
from jshard.checkpoint.boxes import CheckpointSource
from jshard.checkpoint.manifest import Seal
from jshard.checkpoint.sums import add, box_sums
from jshard.errors import RunError, printable

_THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it was saved.

    Attributes:
        leaf: the path of the leaf that is damaged; None where a file belongs to no leaf alone.
        file: the file, or the folder with the leaf's files where it cannot be told which; None if leaves share them.
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

    path: Path
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
    path = Path(path).absolute()
    try:
        source = CheckpointSource(path)
    except RunError as error:
        return _unreadable(path, error)
    seal = source.seal
    findings = [] if seal is None else _in_files(source, seal)
    damaged = {finding.leaf for finding in findings}
    whole = [name for name in source.leaves if name not in damaged]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda name: _in_leaf(source, name, on_read), whole))
    findings += [finding for finding in found if finding is not None]
    findings += _in_values(source)
    return Verdict(
        path=path,
        findings=tuple(findings),
        num_leaves=len(source.opened.leaves),
        num_bytes=sum(source.leaves[name].nbytes for name in whole),
        num_files=0 if seal is None else len(seal.files),
        unsummed=sum(
            1 for name, leaf in source.leaves.items() if leaf.nbytes and source.opened.leaves[name].sums is None
        ),
    )


def _unreadable(path: Path, error: RunError) -> Verdict:
    """What describes the checkpoint is damaged: nothing else of it can be told."""
    file = error.where[0].removeprefix(f"{path}/")
    finding = Finding(leaf=None, file=None if file == str(path) else file, why=error.why)
    return Verdict(path=path, findings=(finding,), num_leaves=0, num_bytes=0, num_files=0)


def _in_files(source: CheckpointSource, seal: Seal) -> list[Finding]:
    """Files that are missing, cut off, or small and changed."""
    owners = _owners(source)
    found = []
    for line in _seal.damage(source.path, seal):
        file, _, why = line.partition("  ")
        found.append(Finding(leaf=_owner(file, owners), file=file, why=why))
    return found


def _owners(source: CheckpointSource) -> Mapping[str, str]:
    folders = {source.folder(name): name for name in source.opened.leaves}
    return {folder: name for folder, name in folders.items() if folder is not None}


def _owner(file: str, owners: Mapping[str, str]) -> str | None:
    """The leaf that a file holds a part of."""
    return next((owners[folder.as_posix()] for folder in Path(file).parents if folder.as_posix() in owners), None)


def _in_leaf(source: CheckpointSource, name: str, on_read: Callable[[int], object]) -> Finding | None:
    """What is wrong with the values of an array."""
    stored = source.opened.leaves[name]
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


def _in_values(source: CheckpointSource) -> list[Finding]:
    try:
        source.values()
    except RunError as error:
        return [Finding(leaf=None, file=None, why=f"numbers and texts: {error.why}")]
    return []


def _place(source: CheckpointSource, name: str) -> str | None:
    """The file of a leaf, or their folder if it has several."""
    folder = source.folder(name)
    if folder is None or source.seal is None:
        return folder
    files = [file for file in source.seal.files if file.startswith(f"{folder}/") and not file.endswith("zarr.json")]
    return files[0] if len(files) == 1 else f"{folder}/ ({len(files)} files)"
