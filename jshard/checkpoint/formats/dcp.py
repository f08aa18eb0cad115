"""PyTorch's distributed checkpoints (FSDP2, torchtitan), read box by box and without PyTorch.

A folder holds `.metadata`, a pickle that says which tensor is in which chunks and where each chunk is; and files
`__RANK_N.distcp` in which every chunk is a whole `torch.save` archive: a zip whose members are not compressed, so the
numbers of a chunk are one run of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import torch_pickle
from jshard.checkpoint.formats.source import Box, FileRegion, bounds, damaged, existing, read_region, stored_array
from jshard.checkpoint.formats.torch_pickle import DTYPES, Archive, Record, records
from jshard.checkpoint.manifest import StoredLeaf
from jshard.errors import printable

METADATA = ".metadata"

_MOST_METADATA_BYTES = 1 << 30
_DCP = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where torch 2.2 and older had some of them
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
    """The tensors and values of a PyTorch distributed checkpoint.

    Args:
        path: the folder that holds `.metadata`.

    Attributes:
        leaves: every tensor by the name it has there, such as `model.layers.0.attention.wq.weight`.
        values: everything else (numbers, texts, lists of them), each read when it is asked for.

    Raises:
        CheckpointError: it is no such folder, or was written with extensions; or its pickle names something that is
            not allowed. Nothing that a pickle names is ever run.
        RunError: it is damaged.

    Example:
        >>> source = DcpSource("outputs/checkpoint/step-1000")
        >>> source.read("model.norm.weight", (slice(0, 8),))
        >>> source.values["lr"]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "PyTorch distributed")
        described, places = _metadata(self.path)
        self._places = places
        self._tensors = {
            name: _tensor(self.path, name, record, places)
            for name, record in described.items()
            if isinstance(record, _TENSOR_CLASS)
        }
        self.leaves: Mapping[str, StoredLeaf] = {name: tensor.leaf for name, tensor in self._tensors.items()}
        others = [name for name, record in described.items() if isinstance(record, _BYTES_CLASS)]
        self.values: Mapping[str, Any] = _Values(
            {name: places[name, None] for name in others if (name, None) in places}
        )

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a tensor, as a new array, put together from the chunks it is in; threads may call it."""
        return self._tensors[name].read(box)

    def damaged_names(self) -> list[str]:
        """Tensors and values whose sums, which PyTorch stores beside them, do not fit; reads the whole checkpoint."""
        return sorted({name for (name, _), place in self._places.items() if not place.is_whole()})


_Places = Mapping[tuple[str, tuple[int, ...] | None], Archive]  # by name and, of a chunk, where it begins


class _Values(Mapping[str, Any]):
    """Values by name, each read when it is asked for."""

    def __init__(self, places: Mapping[str, Archive]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        return self._places[name].value()

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Tensor:
    """A tensor and its chunks."""

    def __init__(self, path: Path, name: str, leaf: StoredLeaf, chunks: Mapping[tuple[int, ...], Archive], sizes: Any):
        self.leaf = leaf
        self._path, self._name = path, name
        self._places = list(chunks.values())
        self._begin = np.array(list(chunks), np.int64).reshape(len(chunks), len(leaf.shape))
        self._end = self._begin + np.array(sizes, np.int64).reshape(self._begin.shape)
        self._regions: dict[int, FileRegion] = {}

    def read(self, box: Box) -> np.ndarray:
        limits = bounds(box, self.leaf.shape)
        low, high = np.array(limits, np.int64).reshape(-1, 2).T
        values = np.empty(np.maximum(high - low, 0), self.leaf.dtype)
        begin, end = np.maximum(self._begin, low), np.minimum(self._end, high)
        touched = np.flatnonzero((begin < end).all(axis=1)) if values.size else np.array([], np.int64)
        self._check_cover(begin[touched], end[touched], values.size)
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
        """Every number of a box is in one chunk, and in one only."""
        covered = int((end - begin).prod(axis=1).sum())
        overlap = any(
            ((begin[i] < end[i + 1 :]) & (begin[i + 1 :] < end[i])).all(axis=1).any() for i in range(len(begin) - 1)
        )
        if covered != size or overlap:
            why = (
                f"{self._name}: of the {size} numbers asked for, the chunks hold {covered}" + ", some twice." * overlap
            )
            raise damaged(self._path / METADATA, why)


def _metadata(path: Path) -> tuple[dict[str, Any], _Places]:
    """What `.metadata` says of every item, and where each item, or chunk of it, is."""
    file = path / METADATA
    if not file.is_file():
        raise CheckpointError(
            "There is no PyTorch distributed checkpoint to read.",
            where=str(path),
            why=f"the folder holds no {METADATA}, which is written last." + _hint(path),
            do="give the folder that torch.distributed.checkpoint.save was given.",
        )
    if file.stat().st_size > _MOST_METADATA_BYTES:
        raise damaged(file, f"it has {file.stat().st_size} bytes; more than {_MOST_METADATA_BYTES} are not read.")
    with file.open("rb") as stream:
        metadata = torch_pickle.load(stream, _ALLOWED, file)
    described = metadata.get("state_dict_metadata") if isinstance(metadata, _METADATA_CLASS) else None
    stored = metadata.get("storage_data") if described is not None else None
    if (
        not isinstance(described, dict)
        or not isinstance(stored, dict)
        or not all(isinstance(n, str) for n in described)
    ):
        raise damaged(file, "it holds no description of a checkpoint.")
    return described, _places(path, stored)


def _hint(path: Path) -> str:
    if below := sorted(file.parent.name for file in path.glob(f"*/{METADATA}")):
        return f"\nthese in it do: {', '.join(below[-3:])}."
    alone = sorted(file.name for file in path.glob("__*.metadata"))
    return f"\nit holds {alone[0]}: each process saved for itself, and such files cannot be joined." if alone else ""


def _places(path: Path, stored: Mapping[Any, Any]) -> _Places:
    file, sizes = path / METADATA, {}
    places = {}
    for index, info in stored.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise damaged(file, "its storage_data is no table of places.")
        name, relative = index.get("fqn"), info.get("relative_path")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                "The checkpoint was written with extensions that cannot be read.",
                where=str(file),
                why=f"{printable(str(name))} was transformed by {info.get('transform_descriptors')}.",
                do="load it with PyTorch, and save it without extensions.",
            )
        chunk = index.get("offset")
        numbers = (info.get("offset"), info.get("length"))
        known = isinstance(name, str) and (chunk is None or _are_sizes(chunk))
        if not known or not _is_inside(relative) or not _are_sizes(numbers):
            raise damaged(file, f"{name} is said to be in {relative}, at {numbers}.")
        if relative not in sizes:
            if not (path / relative).is_file():
                raise damaged(file, f"a file that it names is missing: {(path / relative).name}")
            sizes[relative] = (path / relative).stat().st_size
        if sum(numbers) > sizes[relative]:
            raise damaged(
                path / relative, f"it ends at byte {sizes[relative]}; {name} has {numbers[1]} bytes from {numbers[0]}."
            )
        places[name, chunk] = Archive(path / relative, *numbers)
    return places


def _is_inside(relative: Any) -> bool:
    if not isinstance(relative, str) or "\\" in relative or "\0" in relative:
        return False
    parts = PurePosixPath(relative).parts
    return bool(parts) and not relative.startswith("/") and ".." not in parts


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)


def _tensor(path: Path, name: str, record: Record, places: _Places) -> _Tensor:
    properties, shape, chunks = record.get("properties"), record.get("size"), record.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = DTYPES.get(state[0]) if isinstance(state, tuple) and state and isinstance(state[0], str) else None
    chunks = chunks if isinstance(chunks, list) else []
    corners = [(chunk.get("offsets"), chunk.get("sizes")) for chunk in chunks if isinstance(chunk, Record)]
    if dtype is None or not _are_sizes(shape) or any(not _lies_in(shape, *corner) for corner in corners):
        raise damaged(path / METADATA, f"{name} is said to be of shape {shape} in chunks {corners[:3]}.")
    begins = [begin for begin, _ in corners]
    if gone := [begin for begin in begins if (name, begin) not in places]:
        raise damaged(path / METADATA, f"it does not say where the chunks {gone[:3]} of {name} are.")
    if len(set(begins)) < len(begins) or sum(math.prod(size) for _, size in corners) != math.prod(shape):
        raise damaged(path / METADATA, f"{len(begins)} chunks do not make up {name} of shape {shape}.")
    leaf = stored_array(shape, dtype)
    return _Tensor(path, name, leaf, {b: places[name, b] for b in begins}, [size for _, size in corners])


def _lies_in(shape: tuple[int, ...], begin: Any, size: Any) -> bool:
    if not _are_sizes(begin) or not _are_sizes(size) or not len(begin) == len(size) == len(shape):
        return False
    return all(a + b <= whole for a, b, whole in zip(begin, size, shape, strict=True))
