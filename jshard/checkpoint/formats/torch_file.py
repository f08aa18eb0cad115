"""Files of `torch.save`, as Transformers wrote them before safetensors: read box by box, and without PyTorch.

Read are a single file, and in a folder `pytorch_model.bin` or the files that its index names.
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
from jshard.checkpoint.formats.torch_inert import INERT
from jshard.checkpoint.formats.torch_legacy import MARK, LegacyFile
from jshard.checkpoint.formats.torch_pickle import Unpickled
from jshard.checkpoint.manifest import StoredLeaf

NAME = "pytorch_model.bin"
INDEX = f"{NAME}.index.json"
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OF_RANKS = re.compile(r".*_states\.pt")  # of DeepSpeed: parts of arrays
_ZIP = b"PK\x03\x04"


def is_torch_file(path: Path) -> bool:
    """Returns whether there is such a file, or a folder with one; the file may be of another program."""
    if not path.is_file():
        return (path / NAME).is_file() or (path / INDEX).is_file()
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
    """

    notes: Sequence[str] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "PyTorch")
        self.values: dict[str, _Plain] = {}
        self._regions: dict[str, FileRegion] = {}
        file = self.path
        if not file.is_file():  # of a folder, the index decides what is read
            has_index = (self.path / INDEX).is_file()
            file = self.path / (INDEX if has_index else NAME)
        if file.name == INDEX:
            index = read_index(file)
            # Each file once, though it holds many arrays.
            for name in sorted(set(index.values())):
                self._add(file.parent / name)
            check_index(file, index, self._regions)
        else:
            self._add(file)
        self.leaves: Mapping[str, StoredLeaf] = {
            name: stored_array(region.shape, region.dtype) for name, region in self._regions.items()
        }

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of a tensor, as a new array; thread-safe."""
        return read_region(self._regions[name], box)

    def _add(self, file: Path) -> None:
        """Adds the tensors and values of a file."""
        content = _content(file)
        if not isinstance(content, dict):
            raise CheckpointError(
                "The file holds no parameters by name.",
                where=str(file),
                why=f"it holds a single value, {type(content).__name__}; parameters are in a dict, model.state_dict().",
                do="torch.save(model.state_dict(), path)",
            )
        for name, item in _flat(file, content):
            if isinstance(item, FileRegion):
                self._regions[name] = item
            else:
                self.values[name] = _Plain(item)


def _content(file: Path) -> Unpickled:
    """Returns what a file holds, with unread locations of tensors; raises if it is not of `torch.save`."""
    with open_regular(file) as stream:
        head = stream.read(len(_ZIP))
    # No further names are allowed than those of tensors and inert values.
    if head == _ZIP:
        return Archive(file, 0, file.stat().st_size).regions(INERT)
    if head.startswith(MARK):
        return LegacyFile(file).regions(INERT)
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
