"""Writes PyTorch's distributed checkpoints without PyTorch: what `torch.distributed.checkpoint.load` reads.

The pickles name PyTorch's classes, which need not be there: names and the calls that rebuild its objects are written as
they are, by `_Global`, `_Call` and `_Object`. For the layout of a folder see `dcp`.
"""

from __future__ import annotations

import collections
import io
import itertools
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from jshard.checkpoint.draft import flush, mend
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.checkpoint.formats.dcp import METADATA
from jshard.checkpoint.formats.source import ArraySource, Box
from jshard.checkpoint.formats.torch_pickle import DTYPES, STORAGES
from jshard.checkpoint.manifest import StoredLeaf
from jshard.errors import RunError

_CHUNK_BYTES = 64 << 20  # PyTorch reads whole chunks
_FILE = "__0_0.distcp"
_ALIGNMENT = 64
_DCP = "torch.distributed.checkpoint.metadata"
_TORCH_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STORAGE_NAMES = {name: storage for storage, name in STORAGES.items()}


def write_dcp(
    folder: str | Path,
    source: ArraySource,
    *,
    values: Mapping[str, int | float | str] | None = None,
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> list[Path]:
    """Writes arrays and values as a checkpoint of one rank, which any number of them can load.

    A chunk of 64 MiB is in memory at a time. `.metadata` is written last: without it there is no checkpoint.

    Args:
        folder: where to; it is made if need be.
        source: the arrays, by the names that they get, with dots for slashes.
        values: numbers and texts, by the same kind of names.
        on_written: called with the bytes of each chunk that was written.

    Returns:
        The files.

    Raises:
        CheckpointError: there is such a checkpoint already, or PyTorch lacks the dtype of some arrays.
        RunError: writing failed; what was written is removed.

    Example:
        >>> write_dcp("out", source, values={"step": 100})
        >>> # state = {"model.weight": torch.empty(8, 4), "step": 0}
        >>> # torch.distributed.checkpoint.load(state, checkpoint_id="out")
    """
    folder, values = Path(folder).absolute(), values or {}
    _check(folder, source, values)
    files = [folder / _FILE, folder / METADATA]
    unfinished = [file.with_name(f".{file.name}.unfinished") for file in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished[0].open("wb") as stream:
            places = _write_items(stream, source, values, on_written)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished[1].write_bytes(_pickled(_metadata(folder, source.leaves, places), protocol=4))
        flush(unfinished[1])
        for before, file in zip(unfinished, files, strict=True):
            before.rename(file)
        flush(folder)
    except OSError as error:
        why = reason(error)
        what = "The PyTorch checkpoint could not be written."
        raise RunError(what, where=str(folder), why=why, do=mend(why)) from error
    finally:
        for file in unfinished:
            file.unlink(missing_ok=True)
    return files


def _check(folder: Path, source: ArraySource, values: Mapping[str, Any]) -> None:
    if there := [str(file) for file in (folder / METADATA, folder / _FILE) if file.exists()]:
        what, why = "The PyTorch checkpoint cannot be written.", "there is one already."
        raise CheckpointError(what, where=there, why=why, do="name a new folder.")
    unknown = [
        f"{name}  {leaf.dtype}" for name, leaf in source.leaves.items() if np.dtype(leaf.dtype) not in _TORCH_NAMES
    ]
    if unknown:
        raise CheckpointError(
            f"PyTorch has no such dtype for {len(unknown)} arrays.",
            where=unknown,
            why=f"it has {', '.join(DTYPES)}.",
            do="leave them out, or cast them to one of these.",
        )
    count = collections.Counter(map(_dotted, [*source.leaves, *values]))
    if twice := [name for name in count if count[name] > 1]:
        why, do = "a name stands for one item.", "name one of them differently."
        raise CheckpointError("Two items would have one name.", where=twice, why=why, do=do)


def _dotted(name: str) -> str:
    return name.replace("/", ".")


class _StoredItem(NamedTuple):
    """Where an item, or a chunk of it, is in the file."""

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


# What `torch.save` writes.


def _write_archive(stream: BinaryIO, value: Any, arrays: tuple[np.ndarray, ...]) -> int:
    """A zip of a pickle and of the bytes of its tensors, which begin at multiples of 64; its length."""
    begin = stream.tell()
    with zipfile.ZipFile(_Onwards(stream), "w", zipfile.ZIP_STORED) as archive:
        members: dict[str, Any] = {"data.pkl": _pickled(value, protocol=2)}
        members |= {".format_version": b"1", ".storage_alignment": str(_ALIGNMENT).encode(), "byteorder": b"little"}
        members |= {f"data/{key}": array.reshape(-1).view(np.uint8).data for key, array in enumerate(arrays)}
        members |= {"version": b"3\n", ".data/serialization_id": b"0" * 40}
        for name, raw in members.items():
            info = zipfile.ZipInfo(f"archive/{name}")
            padding = -(stream.tell() - begin + 30 + len(info.filename) + 4) % _ALIGNMENT
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            info.file_size = len(raw)
            with archive.open(info, "w", force_zip64=len(raw) >= 1 << 31) as member:
                member.write(raw)
            info.extra = b""  # the table at the end does not speak of the padding
    return stream.tell() - begin


class _Onwards(io.RawIOBase):
    """The rest of a file from here on, as a file of its own."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._begin = stream, stream.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell() - self._begin

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset + (self._begin if whence == io.SEEK_SET else 0), whence) - self._begin

    def write(self, data: Any) -> int:
        return self._stream.write(data)


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


def _metadata(folder: Path, leaves: Mapping[str, StoredLeaf], places: list[_StoredItem]) -> Any:
    chunks = collections.defaultdict(list)
    for place in places:
        if place.begin is not None:
            corners = {"offsets": _size(place.begin), "sizes": _size(place.shape)}
            chunks[place.name].append(_record("ChunkStorageMetadata", corners))
    described = {_dotted(name): _described(leaf, chunks[_dotted(name)]) for name, leaf in leaves.items()}
    described |= {place.name: _record("BytesStorageMetadata", {}) for place in places if place.begin is None}
    info = _Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    stored = {
        _index(place): _Object(info, {"relative_path": _FILE, "offset": place.offset, "length": place.length})
        for place in places
    }
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


def _described(leaf: StoredLeaf, chunks: list[Any]) -> Any:
    layout = _Call(_Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = _Call(_Global(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    dtype = _Global("torch", _TORCH_NAMES[np.dtype(leaf.dtype)])
    properties = _record("TensorProperties", (dtype, layout, False, contiguous, False))
    return _record("TensorStorageMetadata", {"properties": properties, "size": _size(leaf.shape), "chunks": chunks})


def _index(place: _StoredItem) -> Any:
    begin = None if place.begin is None else _size(place.begin)
    return _record("MetadataIndex", {"fqn": place.name, "offset": begin, "index": None})


def _record(name: str, state: Any) -> Any:
    return _Object(_Global(_DCP, name), state)


def _size(shape: tuple[int, ...]) -> Any:
    return _Call(_Global("torch", "Size"), (tuple(shape),))


# Pickles of objects that are not here.


class _Global:
    """A class or function that a pickle names."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Call:
    """What a function, or a class, gives for these arguments."""

    def __init__(self, function: _Global, args: tuple) -> None:
        self.function, self.args = function, args


class _Object:
    """An object that is made without arguments and is then given its state."""

    def __init__(self, kind: _Global, state: Any) -> None:
        self.kind, self.state = kind, state


class _Persistent:
    """Something that is beside the pickle."""

    def __init__(self, key: tuple) -> None:
        self.key = key


_Pickler: Any = pickle._Pickler  # type: ignore[attr-defined]  # of Python: that of C asks for each name's object


class _Writer(_Pickler):
    """Writes what is above as what it stands for."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def persistent_id(self, obj: Any) -> Any:
        """The key of what is beside the pickle."""
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
