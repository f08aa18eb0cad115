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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
_METADATA_CLASS, _TENSOR_CLASS, _BYTES_CLASS = (
    _ALLOWED[_DCP, name] for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")
)


class DcpSource:
    """The tensors and values of a PyTorch distributed checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "PyTorch distributed")
        described, places = _metadata(self.path)
        self._tensors = {
            name: _tensor(self.path, name, record, places)
            for name, record in described.items()
            if isinstance(record, _TENSOR_CLASS)
        }
        self.leaves: Mapping[str, StoredLeaf] = {name: tensor.leaf for name, tensor in self._tensors.items()}
        others = [name for name, record in described.items() if isinstance(record, _BYTES_CLASS)]
        chunks = {(name, begin) for name, tensor in self._tensors.items() for begin in tensor.begins}
        _check_items(self.path / METADATA, described, places, chunks | {(name, None) for name in others})
        self.values = {name: places[name, None] for name in others}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a tensor, as a new array, assembled from its chunks; thread-safe."""
        return self._tensors[name].read(box)


_Item = tuple[str, tuple[int, ...] | None]  # a name and, for a chunk, its start
_Places = Mapping[_Item, Archive]


class _Tensor:
    """A tensor and its chunks."""

    def __init__(self, path: Path, name: str, leaf: StoredLeaf, chunks: Mapping[tuple[int, ...], Archive], sizes: Any):
        self.leaf = leaf
        self._path, self._name = path, name
        self.begins = list(chunks)
        self._places = list(chunks.values())
        self._begin = np.array(list(chunks), np.int64).reshape(len(chunks), len(leaf.shape))
        self._end = self._begin + np.array(sizes, np.int64).reshape(self._begin.shape)
        self._regions: dict[int, FileRegion] = {}

    def read(self, box: Box) -> np.ndarray:
        limits = bounds(box, self.leaf.shape)
        low, high = np.array(limits, np.int64).reshape(-1, 2).T
        size = math.prod(np.maximum(high - low, 0).tolist())
        begin, end = np.maximum(self._begin, low), np.minimum(self._end, high)
        touched = np.flatnonzero((begin < end).all(axis=1)) if size else np.array([], np.int64)
        self._check_cover(begin[touched], end[touched], size)
        for i in touched:
            self._region(int(i))  # before memory is taken: the metadata may state any shape
        values = np.empty(np.maximum(high - low, 0), self.leaf.dtype)
        for i in touched:
            part = tuple(slice(a, b) for a, b in zip(begin[i] - self._begin[i], end[i] - self._begin[i], strict=True))
            inside = tuple(slice(a, b) for a, b in zip(begin[i] - low, end[i] - low, strict=True))
            read_region(self._region(int(i)), part, values[inside] if inside else values)
        return values

    def _region(self, chunk: int) -> FileRegion:
        if chunk not in self._regions:
            place = self._places[chunk]
            region = place.tensor()
            size = tuple((self._end - self._begin)[chunk].tolist())
            if (region.shape, region.dtype) != (size, self.leaf.dtype):
                why = (
                    f"{self._name}: a chunk is {region.shape} {region.dtype}; {METADATA} says {size} {self.leaf.dtype}."
                )
                raise damaged(place.path, why)
            self._regions[chunk] = region
        return self._regions[chunk]

    def _check_cover(self, begin: np.ndarray, end: np.ndarray, size: int) -> None:
        """Checks that every number of a box is in exactly one chunk."""
        covered = int((end - begin).prod(axis=1).sum())
        overlap = any(
            ((begin[i] < end[i + 1 :]) & (begin[i + 1 :] < end[i])).all(axis=1).any() for i in range(len(begin) - 1)
        )
        if covered != size or overlap:
            why = (
                f"{self._name}: of the {size} requested numbers, the chunks hold {covered}" + ", some twice." * overlap
            )
            raise damaged(self._path / METADATA, why)


def _metadata(path: Path) -> tuple[dict[str, Any], _Places]:
    """The metadata of every item in `.metadata`, and the location of each item or chunk."""
    file = path / METADATA
    if not file.is_file():
        raise CheckpointError(
            "There is no PyTorch distributed checkpoint to read.",
            where=str(path),
            why=f"the folder has no {METADATA}, which is written last.",
            do="give the folder passed to torch.distributed.checkpoint.save.",
        )
    metadata = torch_pickle.load(read_bytes(file, MOST_PICKLE_BYTES), _ALLOWED, file)
    described = metadata.get("state_dict_metadata") if isinstance(metadata, _METADATA_CLASS) else None
    stored = metadata.get("storage_data") if described is not None else None
    if (
        not isinstance(described, dict)
        or not isinstance(stored, dict)
        or not all(isinstance(n, str) for n in described)
    ):
        raise damaged(file, "it does not describe a checkpoint.")
    return described, _places(path, stored)


def _places(path: Path, stored: Mapping[Any, Any]) -> _Places:
    file, sizes = path / METADATA, {}
    places = {}
    for index, info in stored.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise damaged(file, "its storage_data is not a table of locations.")
        name, relative = index.get("fqn"), info.get("relative_path")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                "The checkpoint was written with extensions that cannot be read.",
                where=str(file),
                why=f"{short(name)} was transformed by {short(info.get('transform_descriptors'))}.",
                do="load it with PyTorch, and save it without extensions.",
            )
        chunk = index.get("offset")
        numbers = (info.get("offset"), info.get("length"))
        known = isinstance(name, str) and (chunk is None or _are_sizes(chunk))
        if not known or not _names_file(relative) or not _are_sizes(numbers):
            raise damaged(file, f"it places {short(name)} in {short(relative)}, at {short(numbers)}.")
        if relative not in sizes:
            if not os.path.isfile(path / relative):
                raise damaged(file, f"a file that it names is missing: {(path / relative).name}")
            sizes[relative] = (path / relative).stat().st_size
        if sum(numbers) > sizes[relative]:
            raise damaged(
                path / relative, f"it ends at byte {sizes[relative]}; {name} has {numbers[1]} bytes from {numbers[0]}."
            )
        places[name, chunk] = Archive(path / relative, *numbers)
    return places


def _check_items(file: Path, described: Mapping[str, Any], places: _Places, items: Collection[_Item]) -> None:
    """Raises `RunError` unless every item has a location and every location an item: otherwise data would be lost."""
    names = {name for name, _ in items}
    unknown = [name for name, record in described.items() if not (name in names or isinstance(record, _TENSOR_CLASS))]
    if unknown:
        raise damaged(file, f"it does not say what {_first(unknown)} is.")
    if nowhere := [name for name, begin in items if (name, begin) not in places]:
        raise damaged(file, f"it has no location for {_first(nowhere)}.")
    surplus = [f"{name} in {place.path.name}" for (name, begin), place in places.items() if (name, begin) not in items]
    if surplus:
        raise damaged(file, f"it has a location, and no description, for {_first(surplus)}.")


def _first(names: Iterable[str], count: int = 3) -> str:
    unique = sorted(set(names))
    rest = f" and {len(unique) - count} more" if len(unique) > count else ""
    return ", ".join(unique[:count]) + rest


def _names_file(relative: Any) -> bool:
    return is_inside(relative) and "\\" not in relative  # a path of Windows could lead outside


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)


def _tensor(path: Path, name: str, record: Record, places: _Places) -> _Tensor:
    properties, shape, chunks = record.get("properties"), record.get("size"), record.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = DTYPES.get(state[0]) if isinstance(state, tuple) and state and isinstance(state[0], str) else None
    chunks = chunks if isinstance(chunks, list) else []
    corners = [(chunk.get("offsets"), chunk.get("sizes")) for chunk in chunks if isinstance(chunk, Record)]
    if dtype is None or not is_shape(shape) or any(not _lies_in(shape, *corner) for corner in corners):
        raise damaged(path / METADATA, f"it describes {name} as shape {short(shape)} in chunks {short(corners)}.")
    begins = [begin for begin, _ in corners]
    if gone := [begin for begin in begins if (name, begin) not in places]:
        raise damaged(path / METADATA, f"it has no location for the chunks {gone[:3]} of {name}.")
    if len(set(begins)) < len(begins) or sum(math.prod(size) for _, size in corners) != math.prod(shape):
        raise damaged(
            path / METADATA, f"{counted(len(begins), 'chunk does', 'chunks do')} not make up {name} of shape {shape}."
        )
    leaf = stored_array(shape, dtype)
    return _Tensor(path, name, leaf, {b: places[name, b] for b in begins}, [size for _, size in corners])


def _lies_in(shape: tuple[int, ...], begin: Any, size: Any) -> bool:
    if not _are_sizes(begin) or not _are_sizes(size) or not len(begin) == len(size) == len(shape):
        return False
    return all(a + b <= whole for a, b, whole in zip(begin, size, shape, strict=True))


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
    folder, values = expanded(folder).absolute(), values or {}
    names = [name.replace("/", ".") for name in (*source.leaves, *values)]
    check_export("PyTorch", [folder / METADATA, folder / _FILE], source, names, _TORCH_NAMES)
    with finished_together("PyTorch", folder, [_FILE, METADATA]) as (data, metadata):
        with open_new(data) as stream:
            places = _write_items(stream, source, values, on_written)
        with open_new(metadata) as stream:
            stream.write(_pickled(_description(folder, source.leaves, places), protocol=4))
    return [folder / _FILE, folder / METADATA]


def _dotted(name: str) -> str:
    return name.replace("/", ".")


class _StoredItem(NamedTuple):
    """The location of an item, or of a chunk of it, in the file."""

    name: str
    begin: tuple[int, ...] | None
    shape: tuple[int, ...]
    offset: int
    length: int


def _write_items(
    stream: BinaryIO, source: ArraySource, values: Mapping[str, Any], on_written: Callable[[int], object]
) -> list[_StoredItem]:
    places = []
    for name, value in values.items():
        offset = stream.tell()
        places.append(_StoredItem(_dotted(name), None, (), offset, _write_archive(stream, value, ())))
    for name, leaf in source.leaves.items():
        for box in _chunks(leaf):
            array, offset = np.asarray(source.read(name, box), order="C"), stream.tell()
            length = _write_archive(stream, _rebuilt(array), (array,))
            places.append(_StoredItem(_dotted(name), tuple(part.start for part in box), array.shape, offset, length))
            on_written(array.nbytes)
    return places


def _chunks(leaf: StoredLeaf) -> Iterator[Box]:
    """Boxes of some 64 MiB that make up an array, cut along the first dims."""
    shape, left = leaf.shape, max(1, _CHUNK_BYTES // np.dtype(leaf.dtype).itemsize)
    steps = []
    for dim, size in enumerate(shape):
        steps.append(max(1, min(size, left // max(1, math.prod(shape[dim + 1 :])))))
        left = left if steps[-1] == 1 else math.prod(shape[dim + 1 :])
    starts = [range(0, max(size, 1), step) for size, step in zip(shape, steps, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(a, min(a + step, n)) for a, step, n in zip(corner, steps, shape, strict=True))


# The format of `torch.save`.


def _write_archive(stream: BinaryIO, value: Any, arrays: tuple[np.ndarray, ...]) -> int:
    """Writes a zip of a pickle and its tensors' bytes, aligned to 64; returns its length."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_STORED) as archive:
        members: dict[str, Any] = {"data.pkl": _pickled(value, protocol=2)}
        members |= {".format_version": b"1", ".storage_alignment": str(_ALIGNMENT).encode(), "byteorder": b"little"}
        members |= {f"data/{key}": array.reshape(-1).view(np.uint8).data for key, array in enumerate(arrays)}
        members |= {"version": b"3\n", ".data/serialization_id": b"0" * 40}
        for name, raw in members.items():
            info = zipfile.ZipInfo(f"archive/{name}")
            padding = -(held.tell() + 30 + len(info.filename) + 4) % _ALIGNMENT
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            archive.writestr(info, raw)
            info.extra = b""  # the central directory does not include the padding
    return stream.write(held.getbuffer())


def _rebuilt(array: np.ndarray) -> Any:
    """A tensor whose numbers are the first storage of the archive."""
    dtype, strides = _TORCH_NAMES[array.dtype], tuple(step // array.itemsize for step in array.strides)
    typed = dtype in _STORAGE_NAMES
    kind = _Global("torch", _STORAGE_NAMES[dtype]) if typed else _Global("torch.storage", "UntypedStorage")
    storage = _Persistent(("storage", kind, "0", "cpu", array.size if typed else array.nbytes))
    args = (storage, 0, array.shape, strides, False, collections.OrderedDict())
    if typed:
        return _Call(_Global("torch._utils", "_rebuild_tensor_v2"), args)
    return _Call(_Global("torch._utils", "_rebuild_tensor_v3"), (*args, _Global("torch", dtype)))


# `.metadata`.


def _description(folder: Path, leaves: Mapping[str, StoredLeaf], places: list[_StoredItem]) -> Any:
    chunks = collections.defaultdict(list)
    for place in places:
        if place.begin is not None:
            corners = {"offsets": _size(place.begin), "sizes": _size(place.shape)}
            chunks[place.name].append(_record("ChunkStorageMetadata", corners))
    described = {}
    layout = _Call(_Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = _Call(_Global(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    for name, leaf in leaves.items():
        state = (_Global("torch", _TORCH_NAMES[np.dtype(leaf.dtype)]), layout, False, contiguous, False)
        fields = {"properties": _record("TensorProperties", state), "size": _size(leaf.shape)}
        described[_dotted(name)] = _record("TensorStorageMetadata", fields | {"chunks": chunks[_dotted(name)]})
    described |= {place.name: _record("BytesStorageMetadata", {}) for place in places if place.begin is None}
    info = _Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    stored = {}
    for place in places:
        begin = None if place.begin is None else _size(place.begin)
        index = _record("MetadataIndex", {"fqn": place.name, "offset": begin, "index": None})
        stored[index] = _Object(info, {"relative_path": _FILE, "offset": place.offset, "length": place.length})
    meta = {"checkpoint_id": str(folder), "save_id": "jshard", "load_id": None, "modules": []}
    return _record(
        "Metadata",
        {
            "state_dict_metadata": described,
            "planner_data": {name: (name,) for name in described},
            "storage_data": stored,
            "storage_meta": _record("StorageMeta", meta),
            "version": "1.0.0",
        },
    )


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
        """The key of an object stored beside the pickle."""
        return obj.key if isinstance(obj, _Persistent) else None

    def _global(self, found: _Global) -> None:
        self.write(pickle.GLOBAL + f"{found.module}\n{found.name}\n".encode())

    def _call(self, found: _Call) -> None:
        self.save(found.function)
        self.save(found.args)
        self.write(pickle.REDUCE)

    def _object(self, found: _Object) -> None:
        self.save(found.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(found.state)
        self.write(pickle.BUILD)

    dispatch |= {_Global: _global, _Call: _call, _Object: _object}


def _pickled(value: Any, *, protocol: int) -> bytes:
    file = io.BytesIO()
    _Writer(file, protocol).dump(value)
    return file.getvalue()
