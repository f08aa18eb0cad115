"""Files of `torch.save` of which each rank has written its own: their tensors, put together.

FSDP2's and FSDP1's own sharded state dicts are such files, as are those of trainers that call `torch.save` in each
process. A tensor in shards is read box by box from the files that hold it. What each rank holds whole is read if all
ranks have the same: otherwise nothing says how their values belong together.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.boxes import StoredBoxes
from jshard.checkpoint.formats.source import Box, FileRegion, bounds, damaged, read_region, stored_array
from jshard.checkpoint.formats.torch_pickle import Unpickled
from jshard.checkpoint.formats.torch_shards import FilePart, Sharded, StoredBox, part_of
from jshard.errors import printable

_RANK = re.compile(r"(?P<before>(?:.*[^A-Za-z])?)rank[_-]?(?P<rank>[0-9]{1,9})(?P<after>.*)")


class _Group(NamedTuple):
    """What the files of all ranks have in common: their names around the number."""

    before: str
    after: str


def rank_groups(folder: Path, names: Iterable[str]) -> dict[_Group, dict[int, Path]]:
    """Returns the files of ranks among some names in a folder, by what their names have in common, and by rank."""
    groups: dict[_Group, dict[int, Path]] = {}
    for name in sorted(names):
        match = _RANK.fullmatch(name)
        if match is None:
            continue
        files = groups.setdefault(_Group(match["before"], match["after"]), {})
        rank = int(match["rank"])
        if rank in files:
            raise damaged(folder, f"{files[rank].name} and {name} are both of rank {rank}.")
        files[rank] = folder / name
    return groups


def files_of_group(path: Path, files: Mapping[int, Path]) -> list[Path]:
    """Returns the files of all ranks in order; raises `RunError` if one is missing in between."""
    missing = [rank for rank in range(len(files)) if rank not in files]
    if missing:
        raise damaged(path, f"there are files of the ranks {sorted(files)[:8]}, and none of rank {missing[0]}.")
    return [files[rank] for rank in range(len(files))]


class _ShardedArray:
    """A tensor in boxes, which make it up: none is missing, and no two have a number in common."""

    def __init__(self, name: str, folder: Path, parts: Sequence[FilePart]) -> None:
        shape = parts[0].shape
        self.leaf = stored_array(shape, parts[0].dtype)
        pieces = _without_replicas(parts)
        self._regions = [piece.region for piece in pieces]
        starts = [piece.start for piece in pieces]
        sizes = [region.shape for region in self._regions]
        self._boxes = StoredBoxes(len(shape), starts, sizes)
        num_stored = sum(map(math.prod, sizes))
        if num_stored != math.prod(shape) or self._boxes.has_overlap:
            raise _incomplete(name, folder, shape, num_stored, len(parts))

    def read(self, box: Box) -> np.ndarray:
        """Reads a box of the tensor, as a new array."""
        limits = bounds(box, self.leaf.shape)
        parts = self._boxes.within(limits)
        regions = [self._regions[number] for number in parts.numbers]
        return parts.read(regions, self.leaf.dtype)


def _without_replicas(parts: Iterable[FilePart]) -> list[StoredBox]:
    """Returns the boxes of a tensor, each once: replicas are alike by definition, and the first one is read."""
    by_place: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredBox] = {}
    for part in parts:
        for piece in part.pieces:
            by_place.setdefault((piece.start, piece.region.shape), piece)
    return list(by_place.values())


class _ReplicatedArray:
    """A tensor that each rank holds whole."""

    def __init__(self, name: str, regions: Sequence[FileRegion]) -> None:
        self.leaf = stored_array(regions[0].shape, regions[0].dtype)
        self._name = name
        self._regions = regions

    def read(self, box: Box) -> np.ndarray:
        """Reads a box of the tensor, as a new array; raises `CheckpointError` if the ranks have different numbers."""
        first, *others = self._regions
        values = read_region(first, box)
        for region in others:
            # As bytes: NaNs are equal.
            if read_region(region, box).tobytes() != values.tobytes():
                raise _different(self._name, first.path, region.path)
        return values


RankArray: TypeAlias = _ShardedArray | _ReplicatedArray


@dataclasses.dataclass(frozen=True)
class Joined:
    """What the files of all ranks hold together."""

    arrays: Mapping[str, RankArray]
    values: Mapping[str, Unpickled]
    notes: Sequence[str]


def joined(files: Sequence[Path], contents: Sequence[Mapping[str, Unpickled]]) -> Joined:
    """Puts together what the files of ranks hold, by name: tensors in shards, whole ones, and other values."""
    arrays: dict[str, RankArray] = {}
    values: dict[str, Unpickled] = {}
    different: list[str] = []
    shards = _Shards(files, contents)
    names = dict.fromkeys(name for content in contents for name in content)
    for name in names:
        items = [content[name] for content in contents if name in content]
        if any(isinstance(item, Sharded) for item in items):
            arrays[name] = shards.array(name)
        elif not _are_alike(items):
            different.append(name)
        elif isinstance(items[0], FileRegion):
            arrays[name] = _ReplicatedArray(name, items)
        else:
            values[name] = items[0]
    return Joined(arrays, values, _notes(different, len(files)))


class _Shards:
    """The tensors in shards of all files."""

    def __init__(self, files: Sequence[Path], contents: Sequence[Mapping[str, Unpickled]]) -> None:
        self._files = files
        self._contents = contents
        # Few bytes of a pickle can describe a tensor in a thousand pieces, and in many places.
        self._work_left = _MAX_WORK + _MAX_WORK_EACH * sum(map(len, contents))

    def array(self, name: str) -> _ShardedArray:
        """Returns a tensor that has a shard in some of the files."""
        parts = []
        for file, content in zip(self._files, self._contents, strict=True):
            item = content.get(name)
            if item is None:
                continue
            if not isinstance(item, Sharded):
                raise damaged(file, f"{printable(name)} is in shards in other files, and not in this one.")
            part = part_of(file, name, item)
            if parts and (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
                is_other = f"{part.shape} {part.dtype}, and {parts[0].shape} {parts[0].dtype} in another file"
                raise damaged(file, f"{printable(name)} is {is_other}.")
            self._work_left -= part.work
            if self._work_left < 0:
                raise damaged(file, "it describes more shards than a file of its size can hold.")
            parts.append(part)
        return _ShardedArray(name, self._files[0].parent, parts)


_MAX_WORK = 1_000_000
_MAX_WORK_EACH = 256


def _are_alike(items: Sequence[Unpickled]) -> bool:
    """Returns whether all ranks have the same plain value, or a tensor of the same shape and dtype.

    The numbers of tensors are compared when they are read. Other values are never read, and count as alike.
    """
    if len({type(item) for item in items}) > 1:
        return False
    first = items[0]
    if isinstance(first, FileRegion):
        return all((region.shape, region.dtype) == (first.shape, first.dtype) for region in items)
    if isinstance(first, int | float | str | bytes):
        is_nan = first != first
        return all(item == first or (is_nan and item != item) for item in items)
    return True


def _notes(different: Sequence[str], num_ranks: int) -> list[str]:
    if not different:
        return []
    note = f"not read, as the {num_ranks} ranks have different values: "
    note += ", ".join(map(printable, different[:3]))
    if len(different) > 3:
        note += f" and {len(different) - 3} more"
    return [note]


def _incomplete(name: str, folder: Path, shape: tuple[int, ...], num_stored: int, num_files: int) -> CheckpointError:
    have = counted(num_files, "file has", "files have")
    return CheckpointError(
        "The files of some ranks are missing.",
        where=[str(folder), f"{printable(name)}  {shape}"],
        why=f"of its {math.prod(shape)} numbers, {have} {num_stored}, or some of them twice.",
        do="copy the files of all ranks of one save into one folder: rank_0.pt, rank_1.pt, ...",
    )


def _different(name: str, first: Path, other: Path) -> CheckpointError:
    return CheckpointError(
        "The ranks have different values of a tensor.",
        where=[printable(name), str(first), str(other)],
        why="it is no DTensor, so nothing says whether they are parts of one, or belong to their ranks.",
        do=f"read one of the files, if it has all that is needed: restore({str(first)!r}, like=...)",
    )
