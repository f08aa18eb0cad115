"""PyTorch's distributed checkpoints (FSDP2, torchtitan), read box by box and without PyTorch.

A folder contains `.metadata`, a pickle with the chunks of each tensor and their locations, and files
`__RANK_N.distcp`, in which every chunk is a complete `torch.save` archive: an uncompressed zip, so the numbers of a
chunk are contiguous bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from jshard._files import is_inside, open_new, read_bytes
from jshard._paths import expanded
from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import torch_pickle
from jshard.checkpoint.formats.source import (
    ArraySource,
    Box,
    FileRegion,
    bounds,
    check_export,
    damaged,
    existing,
    finished_together,
    read_region,
    stored_array,
)
from jshard.checkpoint.formats.torch_pickle import DTYPES, MOST_PICKLE_BYTES, STORAGES, Archive, Record, records, short
from jshard.checkpoint.manifest import StoredLeaf, is_shape

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # location of some of them in torch 2.2 and older
_ALLOWED = {
    **torch_pickle.PLAIN,
    **records(_DCP, "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
    **records(_DCP, "ChunkStorageMetadata", "TensorProperties", "StorageMeta"),
    **records("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **records(_SHARDED, "TensorProperties"),
    **records("torch.serialization", "_get_layout"),
    **records("pathlib", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    **records("pathlib._local", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),  # Python 3.13
    (_DCP, "_MEM_FORMAT_ENCODING"): torch_pickle.MEMORY_FORMAT,
    (_SHARDED, "MEM_FORMAT_ENCODING"): torch_pickle.MEMORY_FORMAT,
}
_METADATA_CLASS = _ALLOWED[_DCP, "Metadata"]
_TENSOR_CLASS = _ALLOWED[_DCP, "TensorStorageMetadata"]
_BYTES_CLASS = _ALLOWED[_DCP, "BytesStorageMetadata"]


def is_dcp_folder(path: Path) -> bool:
    """Returns whether a path is the folder of such a checkpoint."""
    return (path / METADATA).is_file()


class DcpSource:
    """The tensors and values of a PyTorch distributed checkpoint."""

    notes: Sequence[str] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "PyTorch distributed")
        metadata = _Metadata.read(self.path)
        places = metadata.places
        self._tensors: dict[str, _Tensor] = {}
        items: set[_Item] = set()
        for name, record in metadata.records.items():
            if isinstance(record, _TENSOR_CLASS):
                tensor = _tensor(self.path, name, record, places)
                self._tensors[name] = tensor
                items.update(_Item(name, start) for start in tensor.starts)
        self.leaves: Mapping[str, StoredLeaf] = {name: tensor.leaf for name, tensor in self._tensors.items()}

        values = [name for name, record in metadata.records.items() if isinstance(record, _BYTES_CLASS)]
        items.update(_Item(name, None) for name in values)
        _check_items(self.path / METADATA, metadata, items)
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
        self.starts = [chunk.start for chunk in chunks]
        self._places = [places[_Item(name, start)] for start in self.starts]
        by_chunk_and_dim = (len(chunks), len(leaf.shape))
        sizes = np.array([chunk.size for chunk in chunks], np.int64).reshape(by_chunk_and_dim)
        self._start_rows = np.array(self.starts, np.int64).reshape(by_chunk_and_dim)
        self._stop_rows = self._start_rows + sizes
        self._regions: dict[int, FileRegion] = {}

    def read(self, box: Box) -> np.ndarray:
        limits = bounds(box, self.leaf.shape)
        low = np.array([start for start, _ in limits], np.int64)
        high = np.array([stop for _, stop in limits], np.int64)
        shape = np.maximum(high - low, 0).tolist()
        size = math.prod(shape)

        # What each chunk has in common with the box.
        starts = np.maximum(self._start_rows, low)
        stops = np.minimum(self._stop_rows, high)
        touched: list[int] = []
        if size:
            touched = np.flatnonzero((starts < stops).all(axis=1)).tolist()
        self._check_cover(starts[touched], stops[touched], size)
        for chunk in touched:
            self._region(chunk)  # before memory is taken: the metadata may state any shape

        values = np.empty(shape, self.leaf.dtype)
        for chunk in touched:
            source = _slices(starts[chunk], stops[chunk], self._start_rows[chunk])
            target = _slices(starts[chunk], stops[chunk], low)
            out = values
            if target:  # indexing an array of no dims would copy its number
                out = values[target]
            read_region(self._region(chunk), source, out)
        return values

    def _region(self, chunk: int) -> FileRegion:
        if chunk in self._regions:
            return self._regions[chunk]
        place = self._places[chunk]
        region = place.tensor()
        size = tuple((self._stop_rows[chunk] - self._start_rows[chunk]).tolist())
        if region.shape != size or region.dtype != self.leaf.dtype:
            is_stored = f"a chunk is {region.shape} {region.dtype}"
            is_described = f"{METADATA} says {size} {self.leaf.dtype}"
            raise damaged(place.path, f"{self._name}: {is_stored}; {is_described}.")
        self._regions[chunk] = region
        return region

    def _check_cover(self, starts: np.ndarray, stops: np.ndarray, size: int) -> None:
        """Checks that every number of a box is in exactly one chunk."""
        num_covered = int((stops - starts).prod(axis=1).sum())
        has_overlap = _has_overlap(starts, stops)
        if num_covered == size and not has_overlap:
            return
        why = f"{self._name}: of the {size} requested numbers, the chunks hold {num_covered}"
        if has_overlap:
            why += ", some twice."
        raise damaged(self._path / METADATA, why)


def _slices(start: np.ndarray, stop: np.ndarray, origin: np.ndarray) -> Box:
    """Returns a box of a tensor as slices of an array that starts at `origin` in it."""
    return tuple(slice(first, last) for first, last in zip(start - origin, stop - origin, strict=True))


def _has_overlap(starts: np.ndarray, stops: np.ndarray) -> bool:
    """Returns whether any two boxes have a number in common."""
    for i in range(len(starts) - 1):
        is_common = (starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])
        if is_common.all(axis=1).any():
            return True
    return False


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """What `.metadata` says."""

    records: dict[str, Any]  # the description of every tensor and value, by name
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


def _describes_checkpoint(metadata: Any) -> bool:
    """Returns whether a pickle's value has a description of items by name, and locations."""
    if not isinstance(metadata, _METADATA_CLASS):
        return False
    records = metadata.get("state_dict_metadata")
    if not isinstance(records, dict) or not isinstance(metadata.get("storage_data"), dict):
        return False
    return all(isinstance(name, str) for name in records)


def _places(path: Path, stored: Mapping[Any, Any]) -> _Places:
    """Returns the location of every item; the files are there, and long enough."""
    file = path / METADATA
    sizes: dict[str, int] = {}  # of the files
    places: dict[_Item, Archive] = {}
    for index, info in stored.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise damaged(file, "its storage_data is not a table of locations.")
        location = _location(file, index, info)
        data_file = path / location.relative
        if location.relative not in sizes:
            if not os.path.isfile(data_file):
                raise damaged(file, f"a file that it names is missing: {data_file.name}")
            sizes[location.relative] = data_file.stat().st_size
        size = sizes[location.relative]
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
    known = (_TENSOR_CLASS, _BYTES_CLASS)
    unknown = [name for name, record in metadata.records.items() if not isinstance(record, known)]
    if unknown:
        raise damaged(file, f"it does not say what {_first(unknown)} is.")
    nowhere = [item.name for item in items if item not in metadata.places]
    if nowhere:
        raise damaged(file, f"it has no location for {_first(nowhere)}.")
    surplus = [f"{item.name} in {place.path.name}" for item, place in metadata.places.items() if item not in items]
    if surplus:
        raise damaged(file, f"it has a location, and no description, for {_first(surplus)}.")


def _first(names: Iterable[str], count: int = 3) -> str:
    unique = sorted(set(names))
    text = ", ".join(unique[:count])
    if len(unique) > count:
        text += f" and {len(unique) - count} more"
    return text


def _names_file(relative: Any) -> bool:
    return is_inside(relative) and "\\" not in relative  # a path of Windows could lead outside


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)


def _tensor(path: Path, name: str, record: Record, places: _Places) -> _Tensor:
    """Returns a tensor, if its description makes sense."""
    file = path / METADATA
    shape = record.get("size")
    dtype = _dtype(record.get("properties"))
    chunks = _chunks_of(record)
    if dtype is None or not _contains(shape, chunks):
        corners = [tuple(chunk) for chunk in chunks]
        raise damaged(file, f"it describes {name} as shape {short(shape)} in chunks {short(corners)}.")
    starts = [chunk.start for chunk in chunks]
    nowhere = [start for start in starts if _Item(name, start) not in places]
    if nowhere:
        raise damaged(file, f"it has no location for the chunks {nowhere[:3]} of {name}.")
    # Equal numbers do not exclude a gap beside an overlap: `read` checks each box, before it reads.
    num_stored = sum(math.prod(chunk.size) for chunk in chunks)
    if len(set(starts)) < len(starts) or num_stored != math.prod(shape):
        do_not = counted(len(starts), "chunk does", "chunks do")
        raise damaged(file, f"{do_not} not make up {name} of shape {shape}.")
    return _Tensor(path, name, stored_array(shape, dtype), chunks, places)


def _dtype(properties: Any) -> np.dtype | None:
    """Returns the dtype in a tensor's properties; None if they have none that is known."""
    if not isinstance(properties, Record):
        return None
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


def _contains(shape: Any, chunks: Iterable[_Chunk]) -> bool:
    """Returns whether this is the shape of an array, and all chunks are inside of it."""
    return is_shape(shape) and all(_is_in(shape, chunk) for chunk in chunks)


def _is_in(shape: tuple[int, ...], chunk: _Chunk) -> bool:
    if not _are_sizes(chunk.start) or not _are_sizes(chunk.size):
        return False
    if not len(chunk.start) == len(chunk.size) == len(shape):
        return False
    dims = zip(chunk.start, chunk.size, shape, strict=True)
    return all(start + size <= dim_size for start, size, dim_size in dims)


# Writes them without PyTorch: the pickles name PyTorch classes, which need not be installed. Names, and the calls that
# rebuild objects, are written literally by `_Global`, `_Call` and `_Object`.

_FILE = "__0_0.distcp"
_CHUNK_BYTES = 64 << 20  # PyTorch reads whole chunks
_ALIGNMENT = 64
_TORCH_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STORAGE_NAMES = {name: storage for storage, name in STORAGES.items()}


def write_dcp(
    folder: str | Path,
    source: ArraySource,
    *,
    values: Mapping[str, int | float | str] | None = None,
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> list[Path]:
    """Writes arrays and values as a checkpoint of one rank, which any number of ranks can load.

    Slashes in names become dots. One chunk of 64 MiB is in memory at a time, twice. `.metadata` is written last:
    without it there is no checkpoint.
    """
    folder = expanded(folder).absolute()
    values = values or {}
    names = [_dotted(name) for name in (*source.leaves, *values)]
    check_export("PyTorch", [folder / METADATA, folder / _FILE], source, names, _TORCH_NAMES)
    with finished_together("PyTorch", folder, [_FILE, METADATA]) as (data, metadata):
        with open_new(data) as stream:
            items = _write_items(stream, source, values, on_written)
        with open_new(metadata) as stream:
            stream.write(_pickled(_description(folder, source.leaves, items), protocol=4))
    return [folder / _FILE, folder / METADATA]


def _dotted(name: str) -> str:
    return name.replace("/", ".")


class _StoredItem(NamedTuple):
    """The location of an item, or of a chunk of it, in the file."""

    name: str
    start: tuple[int, ...] | None
    shape: tuple[int, ...]
    offset: int
    length: int


def _write_items(
    stream: BinaryIO, source: ArraySource, values: Mapping[str, Any], on_written: Callable[[int], object]
) -> list[_StoredItem]:
    items = []
    for name, value in values.items():
        offset = stream.tell()
        length = _write_archive(stream, value, ())
        items.append(_StoredItem(_dotted(name), None, (), offset, length))
    for name, leaf in source.leaves.items():
        for box in _chunks(leaf):
            array = np.asarray(source.read(name, box), order="C")
            start = tuple(part.start for part in box)
            offset = stream.tell()
            length = _write_archive(stream, _rebuilt(array), (array,))
            items.append(_StoredItem(_dotted(name), start, array.shape, offset, length))
            on_written(array.nbytes)
    return items


def _chunks(leaf: StoredLeaf) -> Iterator[Box]:
    """Yields boxes of some 64 MiB that make up an array, cut along the first dims."""
    shape = leaf.shape
    room = max(1, _CHUNK_BYTES // np.dtype(leaf.dtype).itemsize)  # in elements
    steps = []
    for dim, size in enumerate(shape):
        row_size = math.prod(shape[dim + 1 :])
        step = max(1, min(size, room // max(1, row_size)))
        steps.append(step)
        if step > 1:
            room = row_size  # several rows fit, and so the dims after this one are not cut
    # An array without elements has one chunk, without elements.
    starts = [range(0, max(size, 1), step) for size, step in zip(shape, steps, strict=True)]
    for corner in itertools.product(*starts):
        dims = zip(corner, steps, shape, strict=True)
        yield tuple(slice(start, min(start + step, size)) for start, step, size in dims)


# The format of `torch.save`.

_ZIP_HEADER_BYTES = 30  # of a member, before its name
_EXTRA_HEADER_BYTES = 4  # of the extra field that pads it


def _write_archive(stream: BinaryIO, value: Any, arrays: tuple[np.ndarray, ...]) -> int:
    """Writes a zip of a pickle and its tensors' bytes, aligned to 64; returns its length."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in _members(value, arrays).items():
            info = zipfile.ZipInfo(f"archive/{name}")
            header_bytes = _ZIP_HEADER_BYTES + len(info.filename) + _EXTRA_HEADER_BYTES
            padding = -(buffer.tell() + header_bytes) % _ALIGNMENT
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            archive.writestr(info, content)
            info.extra = b""  # the central directory does not include the padding
    return stream.write(buffer.getbuffer())


def _members(value: Any, arrays: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """Returns the files of an archive by name, in PyTorch's order."""
    members: dict[str, Any] = {
        "data.pkl": _pickled(value, protocol=2),
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": b"little",
    }
    for key, array in enumerate(arrays):
        members[f"data/{key}"] = array.reshape(-1).view(np.uint8).data
    members["version"] = b"3\n"
    members[".data/serialization_id"] = b"0" * 40
    return members


def _rebuilt(array: np.ndarray) -> Any:
    """Returns a tensor whose numbers are the first storage of the archive."""
    dtype = _TORCH_NAMES[array.dtype]
    strides = tuple(step // array.itemsize for step in array.strides)
    settings = (0, array.shape, strides, False, collections.OrderedDict())  # offset, ..., requires_grad, hooks
    if dtype in _STORAGE_NAMES:
        storage = _storage(_Global("torch", _STORAGE_NAMES[dtype]), array.size)
        return _Call(_Global("torch._utils", "_rebuild_tensor_v2"), (storage, *settings))
    storage = _storage(_Global("torch.storage", "UntypedStorage"), array.nbytes)
    return _Call(_Global("torch._utils", "_rebuild_tensor_v3"), (storage, *settings, _Global("torch", dtype)))


def _storage(kind: _Global, size: int) -> _Persistent:
    """Returns the first storage of the archive; its size is in elements, or in bytes if it is untyped."""
    return _Persistent(("storage", kind, "0", "cpu", size))


# `.metadata`.


def _description(folder: Path, leaves: Mapping[str, StoredLeaf], items: list[_StoredItem]) -> Any:
    described = _tensor_records(leaves, items)
    for item in items:
        if item.start is None:
            described[item.name] = _record("BytesStorageMetadata", {})
    meta = {"checkpoint_id": str(folder), "save_id": "jshard", "load_id": None, "modules": []}
    return _record(
        "Metadata",
        {
            "state_dict_metadata": described,
            "planner_data": {name: (name,) for name in described},
            "storage_data": _storage_data(items),
            "storage_meta": _record("StorageMeta", meta),
            "version": "1.0.0",
        },
    )


def _tensor_records(leaves: Mapping[str, StoredLeaf], items: Iterable[_StoredItem]) -> dict[str, Any]:
    """Returns the description of each tensor."""
    chunks = collections.defaultdict(list)
    for item in items:
        if item.start is not None:
            corners = {"offsets": _size(item.start), "sizes": _size(item.shape)}
            chunks[item.name].append(_record("ChunkStorageMetadata", corners))
    layout = _Call(_Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = _Call(_Global(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    described = {}
    for name, leaf in leaves.items():
        dtype = _Global("torch", _TORCH_NAMES[np.dtype(leaf.dtype)])
        properties = _record("TensorProperties", (dtype, layout, False, contiguous, False))
        dotted = _dotted(name)
        fields = {"properties": properties, "size": _size(leaf.shape), "chunks": chunks[dotted]}
        described[dotted] = _record("TensorStorageMetadata", fields)
    return described


def _storage_data(items: Iterable[_StoredItem]) -> dict[Any, Any]:
    """Returns the location of each item."""
    info = _Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    stored = {}
    for item in items:
        start = None
        if item.start is not None:
            start = _size(item.start)
        index = _record("MetadataIndex", {"fqn": item.name, "offset": start, "index": None})
        stored[index] = _Object(info, {"relative_path": _FILE, "offset": item.offset, "length": item.length})
    return stored


def _record(name: str, state: Any) -> Any:
    return _Object(_Global(_DCP, name), state)


def _size(shape: tuple[int, ...]) -> Any:
    return _Call(_Global("torch", "Size"), (tuple(shape),))


# Pickles of objects whose classes are not installed.


class _Global(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str


class _Call(NamedTuple):
    """The result of calling a function or class with these arguments."""

    function: _Global
    args: tuple


@dataclasses.dataclass(eq=False)  # a key of a dict
class _Object:
    """An object created without arguments, whose state is then set."""

    kind: _Global
    state: Any


class _Persistent(NamedTuple):
    """An object stored beside the pickle."""

    key: tuple


_Pickler: Any = pickle._Pickler  # type: ignore[attr-defined]  # the Python one: the C one imports each name's object


class _Writer(_Pickler):
    """Writes the classes above as the objects they stand for."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def persistent_id(self, obj: Any) -> Any:
        """Returns the key of an object stored beside the pickle."""
        return obj.key if isinstance(obj, _Persistent) else None

    def _global(self, reference: _Global) -> None:
        self.write(pickle.GLOBAL + f"{reference.module}\n{reference.name}\n".encode())

    def _call(self, call: _Call) -> None:
        self.save(call.function)
        self.save(call.args)
        self.write(pickle.REDUCE)

    def _object(self, instance: _Object) -> None:
        self.save(instance.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(instance.state)
        self.write(pickle.BUILD)

    dispatch |= {_Global: _global, _Call: _call, _Object: _object}


def _pickled(value: Any, *, protocol: int) -> bytes:
    file = io.BytesIO()
    _Writer(file, protocol).dump(value)
    return file.getvalue()
