"""Files of `torch.save`: state dicts of PyTorch, read box by box, and without PyTorch.

Read are a single file; in a folder `pytorch_model.bin`, or the files that its index names, as Transformers wrote them
before safetensors; and the files of all ranks, `rank_0.pt` and so on, together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jshard._files import open_regular
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.safetensors import check_index, read_index
from jshard.checkpoint.formats.source import Box, FileRegion, damaged, existing, read_region, stored_array
from jshard.checkpoint.formats.torch_archive import Archive
from jshard.checkpoint.formats.torch_inert import INERT, NoNumbers
from jshard.checkpoint.formats.torch_legacy import MARK, LegacyFile
from jshard.checkpoint.formats.torch_pickle import Unpickled
from jshard.checkpoint.formats.torch_ranks import RankArray, files_of_group, joined, rank_groups
from jshard.checkpoint.formats.torch_shards import SHARDED, Sharded
from jshard.checkpoint.manifest import StoredLeaf
from jshard.errors import printable

NAME = "pytorch_model.bin"
INDEX = f"{NAME}.index.json"
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OF_RANKS = re.compile(r".*_states\.pt")  # of DeepSpeed: parts of arrays
_ZIP = b"PK\x03\x04"
_NAMES = {**INERT, **SHARDED}


def is_torch_file(path: Path) -> bool:
    """Returns whether there is such a file, or a folder with one; the file may be of another program."""
    if not path.is_file():
        return (path / NAME).is_file() or (path / INDEX).is_file() or bool(_rank_files(path))
    if _OF_RANKS.fullmatch(path.name):
        return False
    return path.name == INDEX or path.name.endswith(_SUFFIXES)


@dataclasses.dataclass(frozen=True)
class _Plain:
    """A value in a file that is not an array."""

    content: object

    def value(self) -> object:
        """Returns the value."""
        return self.content


class TorchSource:
    """The tensors of files of `torch.save`, and the numbers and strings beside them.

    The keys of nested dicts and lists are joined by dots: `model.layers.0.weight`.

    Attributes:
        path: as given.
        leaves: every tensor by its name.
        values: everything else by its name.
        notes: what is not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "PyTorch")
        self.values: dict[str, _Plain] = {}
        self.notes: list[str] = []
        self._arrays: dict[str, FileRegion | RankArray] = {}
        file = _first_file(self.path)
        if file.name == INDEX:
            self._add_indexed(file)
        else:
            self._add_with_ranks(file)
        self.notes += _notes(self.values)
        self.leaves: Mapping[str, StoredLeaf] = {name: _leaf(array) for name, array in self._arrays.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of a tensor, as a new array; thread-safe."""
        array = self._arrays[name]
        if isinstance(array, FileRegion):
            return read_region(array, box)
        return array.read(box)

    def _add_indexed(self, file: Path) -> None:
        """Adds what the files of an index hold; the index names the arrays that are read."""
        index = read_index(file)
        # Each file once, though it holds many arrays.
        for name in sorted(set(index.values())):
            self._add(_content(file.parent / name))
        regions = {name: array for name, array in self._arrays.items() if isinstance(array, FileRegion)}
        check_index(file, index, regions)

    def _add_with_ranks(self, file: Path) -> None:
        """Adds what a file holds, and if it is one of several of ranks, what all of them hold together."""
        content = _content(file)
        has_shards = any(isinstance(item, Sharded) for item in content.values())
        if not has_shards and self.path.is_file():
            self._add(content)
            return
        files = [file]
        if _rank_files(file.parent, like=file):
            files = _files_of_ranks(file)
        contents = []
        for rank_file in files:
            contents.append(content if rank_file == file else _content(rank_file))
        both = joined(files, contents)
        self._arrays |= both.arrays
        self.values |= {name: _Plain(value) for name, value in both.values.items()}
        self.notes += both.notes

    def _add(self, content: Mapping[str, Unpickled]) -> None:
        """Adds the tensors and values of a file."""
        for name, item in content.items():
            if isinstance(item, FileRegion):
                self._arrays[name] = item
            else:
                self.values[name] = _Plain(item)


def _leaf(array: FileRegion | RankArray) -> StoredLeaf:
    if isinstance(array, FileRegion):
        return stored_array(array.shape, array.dtype)
    return array.leaf


def _notes(values: Mapping[str, _Plain]) -> list[str]:
    """Returns a line for each reason why tensors are not read."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        if isinstance(value.content, NoNumbers):
            names.setdefault(value.content.why, []).append(name)
    notes = []
    for why, unread in names.items():
        shown = ", ".join(map(printable, unread[:3]))
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        notes.append(f"not read, as {why}: {shown}{more}")
    return notes


# ---- files of ranks


def _first_file(path: Path) -> Path:
    """Returns the file that says what is read: a single file, the index of several, or that of the first rank."""
    if path.is_file():
        return path
    for name in (INDEX, NAME):  # the index decides what is read
        if (path / name).is_file():
            return path / name
    groups = _rank_files(path)
    if len(groups) > 1:
        raise _several_groups(path, groups)
    return files_of_group(path, groups[0])[0]


def _files_of_ranks(file: Path) -> list[Path]:
    """Returns the files of all ranks that are named as this one."""
    (group,) = _rank_files(file.parent, like=file)
    return files_of_group(file.parent, group)


def _rank_files(folder: Path, *, like: Path | None = None) -> list[dict[int, Path]]:
    """Returns the files of ranks in a folder by rank, in groups of equal names; only the group of `like`, if given."""
    if not folder.is_dir():
        return []
    names = [file.name for file in folder.iterdir() if file.name.endswith(_SUFFIXES)]
    groups = rank_groups(folder, (name for name in names if not _OF_RANKS.fullmatch(name)))
    return [files for files in groups.values() if like is None or like in files.values()]


def _several_groups(folder: Path, groups: Sequence[Mapping[int, Path]]) -> CheckpointError:
    firsts = [files[min(files)] for files in groups]
    return CheckpointError(
        "The folder has several sets of files of ranks.",
        where=[str(file) for file in firsts],
        why="nothing says which of them is the model.",
        do="give the path of a file of one set; those of the other ranks are read with it:\n"
        f"restore({str(firsts[0])!r}, like=...)",
    )


# ---- one file


def _content(file: Path) -> dict[str, Unpickled]:
    """Returns the tensors and values of a file, by the keys of its dicts and lists, joined by dots."""
    content = _unpickled(file)
    if not isinstance(content, dict):
        raise CheckpointError(
            "The file holds no parameters by name.",
            where=str(file),
            why=f"it holds a single value, {type(content).__name__}; parameters are in a dict, model.state_dict().",
            do="torch.save(model.state_dict(), path)",
        )
    named: dict[str, Unpickled] = {}
    for name, item in _flat(file, content):
        if name in named:
            raise _two_of_one_name(file, name)
        named[name] = item
    return named


def _two_of_one_name(file: Path, name: str) -> CheckpointError:
    return CheckpointError(
        "Two values of the file have the same name.",
        where=[str(file), printable(name)],
        why="the keys of nested dicts are joined by dots, and so a dict in a dict reads as a key with a dot.",
        do="rename one of them:\nstate['other'] = state.pop('key')",
    )


def _unpickled(file: Path) -> Unpickled:
    """Returns what a file holds, with unread locations of tensors; raises if it is not of `torch.save`."""
    with open_regular(file) as stream:
        head = stream.read(len(_ZIP))
    # No further names are allowed than those of tensors and inert values.
    if head == _ZIP:
        return Archive(file, 0, file.stat().st_size).regions(_NAMES)
    if head.startswith(MARK):
        return LegacyFile(file).regions(_NAMES)
    raise CheckpointError(
        "The file is not one of torch.save.",
        where=str(file),
        why=f"it begins with {head!r}, not with {_ZIP!r} or {MARK!r}: it is of another program, or of PyTorch 0.1.",
        do="give a file that torch.save has written.",
    )


_MAX_LEVELS = 100  # of nested dicts and lists
_MAX_ITEMS = 100_000  # that any file may stand for
_MAX_COPIES = 16  # of an item, on average, that a larger file may stand for


def _flat(file: Path, content: dict[object, Unpickled]) -> Iterator[tuple[str, Unpickled]]:
    """Yields the tensors and values in nested dicts and lists, by their keys.

    A list may contain itself, and a few lists, each twice in the next, stand for more items than any memory holds. So
    the levels are counted, and the items, of which equal ones in many places are in the file only once.
    """
    level = [("", content)]
    num_items = num_stored = 0
    containers: set[int] = set()
    for _ in range(_MAX_LEVELS):
        below: list[tuple[str, Unpickled]] = []
        for name, container in level:
            num_items += len(container)
            if id(container) not in containers:
                containers.add(id(container))
                num_stored += len(container)
            if num_items > max(_MAX_ITEMS, _MAX_COPIES * num_stored):
                raise damaged(file, f"it stands for more than {num_items} values, and holds {num_stored}.")
            for key, item in _items(container):
                path = f"{name}.{key}" if name else str(key)
                if _is_container(item):
                    below.append((path, item))
                else:
                    yield path, item
        level = below
    if level:
        raise damaged(file, f"its values are nested more than {_MAX_LEVELS} levels deep.")


def _is_container(item: object) -> bool:
    # By their exact types: a region is a tuple, too, and so is a storage without a tensor.
    return isinstance(item, dict) or type(item) in (list, tuple)


def _items(container: Unpickled) -> Iterable[tuple[object, Unpickled]]:
    if isinstance(container, dict):
        return container.items()
    return enumerate(container)
