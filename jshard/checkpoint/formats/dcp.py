"""PyTorch's distributed checkpoints (FSDP2, torchtitan), read box by box and without PyTorch.

A folder contains `.metadata`, a pickle with the chunks of each tensor and their locations, and files
`__RANK_N.distcp`, in which every chunk is a complete `torch.save` archive: an uncompressed zip, so the numbers of a
chunk are contiguous bytes.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np

from jshard._files import is_inside, read_bytes
from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import boxes, torch_pickle
from jshard.checkpoint.formats.source import (
    Box,
    FileRegion,
    are_sizes,
    bounds,
    damaged,
    existing,
    leaves_of,
    stored_array,
)
from jshard.checkpoint.formats.torch_archive import Archive
from jshard.checkpoint.formats.torch_pickle import DTYPES, MOST_PICKLE_BYTES, Record, Unpickled, records, short
from jshard.checkpoint.manifest import StoredLeaf, is_shape
from jshard.checkpoint.packed.layout import shape_of

METADATA = ".metadata"

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # location of some of them in torch 2.2 and older
_ALLOWED = {
    **torch_pickle.PLAIN,
    **records(METADATA_MODULE, "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
    **records(METADATA_MODULE, "ChunkStorageMetadata", "TensorProperties", "StorageMeta"),
    **records("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **records(_SHARDED, "TensorProperties"),
    **records("torch.serialization", "_get_layout"),
    **torch_pickle.PATHS,
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): torch_pickle.MEMORY_FORMAT,
    (_SHARDED, "MEM_FORMAT_ENCODING"): torch_pickle.MEMORY_FORMAT,
}
_METADATA_CLASS = _ALLOWED[METADATA_MODULE, "Metadata"]
_TENSOR_CLASS = _ALLOWED[METADATA_MODULE, "TensorStorageMetadata"]
_BYTES_CLASS = _ALLOWED[METADATA_MODULE, "BytesStorageMetadata"]


def is_dcp_folder(path: Path) -> bool:
    """Returns whether a path is the folder of such a checkpoint."""
    # PyTorch writes it last, and renames it: a folder without it is an unfinished save.
    return (path / METADATA).is_file()


class DcpSource:
    """The tensors and values of a PyTorch distributed checkpoint."""

    notes: Sequence[str] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "PyTorch distributed")
        metadata = _Metadata.read(self.path)
        places = metadata.places
        self._tensors: dict[str, _Tensor] = {}
        values: list[str] = []
        items: set[_Item] = set()
        for name, record in metadata.records.items():
            if isinstance(record, _TENSOR_CLASS):
                tensor = _tensor(self.path, name, record, places)
                self._tensors[name] = tensor
                items.update(tensor.items)
            elif isinstance(record, _BYTES_CLASS):
                values.append(name)
                items.add(_Item(name, None))
        # Before anything is offered: what only one of the two tables names would be dropped without an error.
        _check_items(self.path / METADATA, metadata, items)
        self.leaves: Mapping[str, StoredLeaf] = leaves_of(self._tensors)
        self.values = {name: places[_Item(name, None)] for name in values}

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of a tensor, as a new array, assembled from its chunks; thread-safe."""
        return self._tensors[name].read(box)


class _Item(NamedTuple):
    """What one archive holds: a value, or a chunk of a tensor."""

    name: str
    start: tuple[int, ...] | None  # of the chunk; None for a value


_Places = Mapping[_Item, Archive]


class _Chunk(NamedTuple):
    """The box of a chunk in its tensor. Until it is checked, a pickle may have put any values here."""

    start: tuple[int, ...]
    size: tuple[int, ...]


class _Tensor:
    """A tensor and its chunks, which have been checked: they are inside of it, and have as many numbers."""

    def __init__(self, path: Path, name: str, leaf: StoredLeaf, chunks: Sequence[_Chunk], places: _Places) -> None:
        self.leaf = leaf
        self._path = path
        self._name = name
        self.items: list[_Item] = []
        self._places: list[Archive] = []
        starts: list[tuple[int, ...]] = []
        sizes: list[tuple[int, ...]] = []
        for chunk in chunks:
            item = _Item(name, chunk.start)
            self.items.append(item)
            self._places.append(places[item])
            starts.append(chunk.start)
            sizes.append(chunk.size)
        self._boxes = boxes.StoredBoxes(len(leaf.shape), starts, sizes)
        self._regions: dict[int, FileRegion] = {}

    def read(self, box: Box) -> np.ndarray:
        limits = bounds(box, self.leaf.shape)
        parts = self._boxes.within(limits)
        # For each box: the numbers of all chunks together may add up with a gap and an overlap, see `_tensor`.
        self._check_cover(parts, math.prod(shape_of(limits)))
        # Before memory is taken: the metadata may state any shape.
        regions = [self._region(chunk) for chunk in parts.numbers]
        return parts.read(regions, self.leaf.dtype)

    def _region(self, chunk: int) -> FileRegion:
        # Without a lock: several threads may read the same archive, with the same result.
        # An archive has a pickle of its own, which is read when its chunk is needed: a process needs few of thousands.
        if chunk in self._regions:
            return self._regions[chunk]
        place = self._places[chunk]
        region = place.tensor()
        size = self._boxes.size(chunk)
        if region.shape != size or region.dtype != self.leaf.dtype:
            is_stored = f"a chunk is {region.shape} {region.dtype}"
            is_described = f"{METADATA} says {size} {self.leaf.dtype}"
            raise damaged(place.path, f"{self._name}: {is_stored}; {is_described}.")
        self._regions[chunk] = region
        return region

    def _check_cover(self, parts: boxes.PartsOfBoxes, size: int) -> None:
        """Checks that every number of a box, of which there are `size`, is in exactly one chunk."""
        if parts.num_elements == size and not parts.has_overlap:
            return
        why = f"{self._name}: of the {size} requested numbers, the chunks hold {parts.num_elements}"
        if parts.has_overlap:
            why += ", some twice."
        raise damaged(self._path / METADATA, why)


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """What `.metadata` says."""

    records: dict[str, Unpickled]  # the description of every tensor and value, by name
    places: _Places

    @classmethod
    def read(cls, path: Path) -> _Metadata:
        file = path / METADATA
        if not file.is_file():
            raise CheckpointError(
                "There is no PyTorch distributed checkpoint to read.",
                where=str(path),
                why=f"the folder has no {METADATA}, which is written last.",
                do="give the folder passed to torch.distributed.checkpoint.save.",
            )
        metadata = torch_pickle.load(read_bytes(file, MOST_PICKLE_BYTES), _ALLOWED, file)
        if not _describes_checkpoint(metadata):
            raise damaged(file, "it does not describe a checkpoint.")
        return cls(metadata.get("state_dict_metadata"), _places(path, metadata.get("storage_data")))


def _describes_checkpoint(metadata: Unpickled) -> bool:
    """Returns whether a pickle's value has a description of items by name, and locations."""
    if not isinstance(metadata, _METADATA_CLASS):
        return False
    records = metadata.get("state_dict_metadata")
    if not isinstance(records, dict) or not isinstance(metadata.get("storage_data"), dict):
        return False
    return all(isinstance(name, str) for name in records)


def _places(path: Path, stored: Mapping[object, object]) -> _Places:
    """Returns the location of every item; the files are there, and long enough."""
    file = path / METADATA
    sizes: dict[str, int] = {}  # of the files
    places: dict[_Item, Archive] = {}
    for index, info in stored.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise damaged(file, "its storage_data is not a table of locations.")
        location = _location(file, index, info)
        data_file = path / location.relative
        # Once for each file: thousands of items are in few files, and a look at a network file system takes long.
        if location.relative not in sizes:
            if not os.path.isfile(data_file):
                raise damaged(file, f"a file that it names is missing: {data_file.name}")
            sizes[location.relative] = data_file.stat().st_size
        size = sizes[location.relative]
        # Before anything is mapped: beyond the end of a file, a mapping ends the program with SIGBUS.
        if location.offset + location.length > size:
            has_bytes = f"{location.item.name} has {location.length} bytes from {location.offset}"
            raise damaged(data_file, f"it ends at byte {size}; {has_bytes}.")
        places[location.item] = Archive(data_file, location.offset, location.length)
    return places


class _Location(NamedTuple):
    """Where an item is stored, as `.metadata` has it."""

    item: _Item
    relative: str  # the path of the file in the folder
    offset: int
    length: int


def _location(file: Path, index: Record, info: Record) -> _Location:
    """Returns the location of an item, whose file need not exist."""
    name = index.get("fqn")
    transforms = info.get("transform_descriptors")
    # Such as compression: the bytes in the file are then not those of a plain archive.
    if transforms:
        raise CheckpointError(
            "The checkpoint was written with extensions that cannot be read.",
            where=str(file),
            why=f"{short(name)} was transformed by {short(transforms)}.",
            do="load it with PyTorch, and save it without extensions.",
        )
    start = index.get("offset")
    relative = info.get("relative_path")
    limits = (info.get("offset"), info.get("length"))
    is_item = isinstance(name, str) and (start is None or _are_sizes(start))
    if not is_item or not _names_file(relative) or not _are_sizes(limits):
        raise damaged(file, f"it places {short(name)} in {short(relative)}, at {short(limits)}.")
    return _Location(_Item(name, start), relative, *limits)


def _check_items(file: Path, metadata: _Metadata, items: Collection[_Item]) -> None:
    """Raises `RunError` unless every item has a location and every location an item: otherwise data would be lost."""
    # A record of a later version is refused by name: left out, its values would be missing in the restored state.
    known = (_TENSOR_CLASS, _BYTES_CLASS)
    unknown = []
    for name, record in metadata.records.items():
        if not isinstance(record, known):
            unknown.append(name)
    if unknown:
        raise damaged(file, f"it does not say what {_first(unknown)} is.")
    nowhere = [item.name for item in items if item not in metadata.places]
    if nowhere:
        raise damaged(file, f"it has no location for {_first(nowhere)}.")
    surplus = []
    for item, place in metadata.places.items():
        if item not in items:
            surplus.append(f"{item.name} in {place.path.name}")
    if surplus:
        raise damaged(file, f"it has a location, and no description, for {_first(surplus)}.")


def _first(names: Iterable[str], count: int = 3) -> str:
    unique = sorted(set(names))
    text = ", ".join(unique[:count])
    if len(unique) > count:
        text += f" and {len(unique) - count} more"
    return text


def _names_file(relative: object) -> TypeGuard[str]:
    return is_inside(relative) and "\\" not in relative  # a path of Windows could lead outside


def _are_sizes(numbers: object) -> TypeGuard[tuple[int, ...]]:
    # A tuple, as PyTorch writes them: the start of a chunk is a part of a key.
    return isinstance(numbers, tuple) and are_sizes(numbers)


def _tensor(path: Path, name: str, record: Record, places: _Places) -> _Tensor:
    """Returns a tensor, if its description makes sense."""
    file = path / METADATA
    shape = record.get("size")
    dtype = _dtype(record.get("properties"))
    chunks = _chunks_of(record)
    if dtype is None or not _contains(shape, chunks):
        corners = [tuple(chunk) for chunk in chunks]
        raise damaged(file, f"it describes {name} as shape {short(shape)} in chunks {short(corners)}.")
    starts: set[tuple[int, ...]] = set()
    nowhere = []
    num_stored = 0
    for chunk in chunks:
        starts.add(chunk.start)
        num_stored += math.prod(chunk.size)
        if _Item(name, chunk.start) not in places:
            nowhere.append(chunk.start)
    if nowhere:
        raise damaged(file, f"it has no location for the chunks {nowhere[:3]} of {name}.")
    # Equal numbers do not exclude a gap beside an overlap: `read` checks each box, before it reads.
    if len(starts) < len(chunks) or num_stored != math.prod(shape):
        do_not = counted(len(chunks), "chunk does", "chunks do")
        raise damaged(file, f"{do_not} not make up {name} of shape {shape}.")
    return _Tensor(path, name, stored_array(shape, dtype), chunks, places)


def _dtype(properties: object) -> np.dtype | None:
    """Returns the dtype in a tensor's properties; None if they have none that is known."""
    if not isinstance(properties, Record):
        return None
    # `TensorProperties` pickles itself as a tuple, whose first item is the dtype.
    state = properties.state
    if not isinstance(state, tuple) or not state:
        return None
    name = state[0]
    return DTYPES.get(name) if isinstance(name, str) else None


def _chunks_of(record: Record) -> list[_Chunk]:
    """Returns the chunks of a tensor, unchecked."""
    chunks = record.get("chunks")
    if not isinstance(chunks, list):
        return []
    return [_Chunk(chunk.get("offsets"), chunk.get("sizes")) for chunk in chunks if isinstance(chunk, Record)]


def _contains(shape: object, chunks: Iterable[_Chunk]) -> bool:
    """Returns whether this is the shape of an array, and all chunks are inside of it."""
    return is_shape(shape) and all(_is_in(shape, chunk) for chunk in chunks)


def _is_in(shape: tuple[int, ...], chunk: _Chunk) -> bool:
    if not _are_sizes(chunk.start) or not _are_sizes(chunk.size):
        return False
    return boxes.is_inside(chunk.start, chunk.size, shape)
