"""Lists the checkpoints in a folder without reading values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.lookup import INCOMPLETE, incomplete_in, is_checkpoint, place_of, series_at, steps_in
from jshard.checkpoint.ownership import DRAFT_SUFFIX
from jshard.checkpoint.readers import own_checkpoint
from jshard.errors import FourPartError


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
    """Lists what is at a path: a checkpoint, a series, or a run."""
    path = place_of(path)
    series = None if is_checkpoint(path) else series_at(path)
    if series is None:
        if not is_checkpoint(path):
            own_checkpoint(path)  # raises, and reports what is there
        return Listing(path=path, entries=(_entry(path, step=None),))
    by_step: dict[int, ListedCheckpoint] = {}
    for step in steps_in(series):
        by_step[step] = _entry(series / str(step), step=step)
    # A run continues from the newest that it can read: a damaged one is passed over.
    latest = max((step for step, entry in by_step.items() if not entry.damage), default=None)
    if latest is not None:
        by_step[latest] = dataclasses.replace(by_step[latest], is_latest=True)
    for step in incomplete_in(series):
        by_step[step] = _incomplete_entry(series / str(step), step)
    return Listing(
        path=series,
        entries=tuple(by_step[step] for step in sorted(by_step)),
        unfinished=tuple(_drafts_in(series)),
    )


def _drafts_in(series: Place) -> list[str]:
    """Returns the folders of saves that have not completed."""
    drafts = []
    for item in series.iterdir():
        if item.name.endswith(DRAFT_SUFFIX) and item.is_dir():
            drafts.append(item.name)
    return sorted(drafts)


def _incomplete_entry(path: Place, step: int) -> ListedCheckpoint:
    return ListedCheckpoint(path=path, step=step, is_complete=False, damage=(f"{INCOMPLETE}.",))


def _entry(path: Place, *, step: int | None) -> ListedCheckpoint:
    try:
        opened = own_checkpoint(path)
    except FourPartError as error:  # the others are still listed
        return ListedCheckpoint(path=path, step=step, damage=(f"{error.what} {error.why}",))
    num_leaves = len(opened.leaves)
    num_bytes = sum(leaf.nbytes for leaf in opened.leaves.values())
    manifest = opened.manifest
    if manifest is None:
        return ListedCheckpoint(path=path, step=step, num_leaves=num_leaves, num_bytes=num_bytes)
    return ListedCheckpoint(
        path=path,
        step=manifest.step if step is None else step,
        damage=tuple(_manifest.damage(path, manifest)),
        num_leaves=num_leaves,
        num_bytes=num_bytes,
        saved_at=manifest.saved_at,
        mesh=manifest.mesh,
        processes=manifest.processes,
        version=manifest.versions.get("jshard"),
        metrics=manifest.metrics,
    )
