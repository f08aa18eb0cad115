"""Writes PyTorch's distributed checkpoints without PyTorch.

The pickles name PyTorch's classes, which need not be installed: see `torch_writer.py`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jshard._files import open_new
from jshard._paths import expanded
from jshard.checkpoint.formats.dcp import METADATA, METADATA_MODULE
from jshard.checkpoint.formats.source import ArraySource, Box, check_export, finished_together
from jshard.checkpoint.formats.torch_writer import (
    TORCH_NAMES,
    PickledCall,
    PickledGlobal,
    PickledObject,
    pickled,
    rebuilt,
    write_archive,
)
from jshard.checkpoint.manifest import StoredLeaf

_FILE = "__0_0.distcp"  # as PyTorch names the first file of rank 0
_CHUNK_BYTES = 64 << 20  # PyTorch reads whole chunks


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
    check_export("PyTorch", [folder / METADATA, folder / _FILE], source, names, TORCH_NAMES)
    # In this order: the metadata make it a checkpoint, and come last.
    with finished_together("PyTorch", folder, [_FILE, METADATA]) as (data, metadata):
        with open_new(data) as stream:
            items = _write_items(stream, source, values, on_written)
        with open_new(metadata) as stream:
            # The protocol in which PyTorch writes it.
            stream.write(pickled(_description(folder, source.leaves, items), protocol=4))
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
    stream: BinaryIO, source: ArraySource, values: Mapping[str, object], on_written: Callable[[int], object]
) -> list[_StoredItem]:
    items = []
    # An item is an archive of its own, as PyTorch writes it: a reader seeks to its offset, and sees nothing else.
    for name, value in values.items():
        offset = stream.tell()
        length = write_archive(stream, value, ())
        items.append(_StoredItem(_dotted(name), None, (), offset, length))
    for name, leaf in source.leaves.items():
        for box in _chunks(leaf):
            array = np.asarray(source.read(name, box), order="C")
            start = tuple(part.start for part in box)
            offset = stream.tell()
            length = write_archive(stream, rebuilt(array), (array,))
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
    parts_by_dim: list[list[slice]] = []
    for size, step in zip(shape, steps, strict=True):
        starts = range(0, max(size, 1), step)
        parts_by_dim.append([slice(start, min(start + step, size)) for start in starts])
    yield from itertools.product(*parts_by_dim)


def _description(folder: Path, leaves: Mapping[str, StoredLeaf], items: list[_StoredItem]) -> PickledObject:
    described = _tensor_records(leaves, items)
    for item in items:
        if item.start is None:
            described[item.name] = _record("BytesStorageMetadata", {})
    meta = {"checkpoint_id": str(folder), "save_id": "jshard", "load_id": None, "modules": []}
    return _record(
        "Metadata",
        {
            "state_dict_metadata": described,
            # The path of each item in the nested state: names are flat here.
            "planner_data": {name: (name,) for name in described},
            "storage_data": _storage_data(items),
            "storage_meta": _record("StorageMeta", meta),
            "version": "1.0.0",
        },
    )


def _tensor_records(leaves: Mapping[str, StoredLeaf], items: Iterable[_StoredItem]) -> dict[str, PickledObject]:
    """Returns the description of each tensor."""
    chunks = collections.defaultdict(list)
    for item in items:
        if item.start is not None:
            corners = {"offsets": _size(item.start), "sizes": _size(item.shape)}
            chunks[item.name].append(_record("ChunkStorageMetadata", corners))
    layout = PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = PickledCall(PickledGlobal(METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    described = {}
    for name, leaf in leaves.items():
        dtype = PickledGlobal("torch", TORCH_NAMES[np.dtype(leaf.dtype)])
        properties = _record("TensorProperties", (dtype, layout, False, contiguous, False))
        dotted = _dotted(name)
        fields = {"properties": properties, "size": _size(leaf.shape), "chunks": chunks[dotted]}
        described[dotted] = _record("TensorStorageMetadata", fields)
    return described


def _storage_data(items: Iterable[_StoredItem]) -> dict[PickledObject, PickledObject]:
    """Returns the location of each item."""
    info = PickledGlobal("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    stored = {}
    for item in items:
        start = None
        if item.start is not None:
            start = _size(item.start)
        index = _record("MetadataIndex", {"fqn": item.name, "offset": start, "index": None})
        stored[index] = PickledObject(info, {"relative_path": _FILE, "offset": item.offset, "length": item.length})
    return stored


def _record(name: str, state: object) -> PickledObject:
    return PickledObject(PickledGlobal(METADATA_MODULE, name), state)


def _size(shape: tuple[int, ...]) -> PickledCall:
    return PickledCall(PickledGlobal("torch", "Size"), (tuple(shape),))
