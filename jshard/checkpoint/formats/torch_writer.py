"""Writes the format of `torch.save` without PyTorch.

The pickles name PyTorch's classes and functions, which need not be installed. The classes here stand for such names,
and for the calls that rebuild objects.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from jshard.checkpoint.formats.torch_archive import STORAGES
from jshard.checkpoint.formats.torch_pickle import DTYPES

TORCH_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STORAGE_NAMES = {name: storage for storage, name in STORAGES.items()}
_ALIGNMENT = 64
_ZIP_HEADER_BYTES = 30  # of a member, before its name
_EXTRA_HEADER_BYTES = 4  # of the extra field that pads it


def write_archive(stream: BinaryIO, value: object, arrays: tuple[np.ndarray, ...]) -> int:
    """Writes a zip of a pickle and its tensors' bytes, aligned to 64; returns its length."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in _members(value, arrays).items():
            info = zipfile.ZipInfo(f"archive/{name}")
            header_bytes = _ZIP_HEADER_BYTES + len(info.filename) + _EXTRA_HEADER_BYTES
            padding = -(buffer.tell() + header_bytes) % _ALIGNMENT
            # The field with which PyTorch pads, too.
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            archive.writestr(info, content)
            info.extra = b""  # the central directory does not include the padding
    return stream.write(buffer.getbuffer())


def _members(value: object, arrays: tuple[np.ndarray, ...]) -> dict[str, bytes | memoryview]:
    """Returns the files of an archive by name, in PyTorch's order."""
    # The protocol of the pickle is that of `torch.save`.
    members: dict[str, bytes | memoryview] = {
        "data.pkl": pickled(value, protocol=2),
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": b"little",
    }
    for key, array in enumerate(arrays):
        members[f"data/{key}"] = array.reshape(-1).view(np.uint8).data
    members["version"] = b"3\n"
    members[".data/serialization_id"] = b"0" * 40
    return members


def rebuilt(array: np.ndarray) -> PickledCall:
    """Returns a tensor whose numbers are the first storage of the archive."""
    dtype = TORCH_NAMES[array.dtype]
    strides = tuple(step // array.itemsize for step in array.strides)
    settings = (0, array.shape, strides, False, collections.OrderedDict())  # offset, ..., requires_grad, hooks
    if dtype in _STORAGE_NAMES:
        storage = _storage(PickledGlobal("torch", _STORAGE_NAMES[dtype]), array.size)
        return PickledCall(PickledGlobal("torch._utils", "_rebuild_tensor_v2"), (storage, *settings))
    # For other dtypes, such as float8, PyTorch has no class of storage: they are bytes, with the dtype beside them.
    storage = _storage(PickledGlobal("torch.storage", "UntypedStorage"), array.nbytes)
    return PickledCall(
        PickledGlobal("torch._utils", "_rebuild_tensor_v3"), (storage, *settings, PickledGlobal("torch", dtype))
    )


def _storage(kind: PickledGlobal, size: int) -> PickledStorage:
    """Returns the first storage of the archive; its size is in elements, or in bytes if it is untyped."""
    return PickledStorage(("storage", kind, "0", "cpu", size))


class PickledGlobal(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str


class PickledCall(NamedTuple):
    """The result of calling a function or class with these arguments."""

    function: PickledGlobal
    args: tuple


@dataclasses.dataclass(eq=False)  # a key of a dict
class PickledObject:
    """An object created without arguments, whose state is then set."""

    kind: PickledGlobal
    state: object


class PickledStorage(NamedTuple):
    """An object stored beside the pickle."""

    key: tuple


_Pickler: Any = pickle._Pickler  # type: ignore[attr-defined]  # the Python one: the C one imports each name's object


class _Writer(_Pickler):
    """Writes the classes above as the objects they stand for."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(_Pickler.dispatch)

    def persistent_id(self, obj: object) -> object:
        """Returns the key of an object stored beside the pickle."""
        return obj.key if isinstance(obj, PickledStorage) else None

    def _global(self, reference: PickledGlobal) -> None:
        self.write(pickle.GLOBAL + f"{reference.module}\n{reference.name}\n".encode())

    def _call(self, call: PickledCall) -> None:
        self.save(call.function)
        self.save(call.args)
        self.write(pickle.REDUCE)

    def _object(self, instance: PickledObject) -> None:
        self.save(instance.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(instance.state)
        self.write(pickle.BUILD)

    dispatch |= {PickledGlobal: _global, PickledCall: _call, PickledObject: _object}


def pickled(value: object, *, protocol: int) -> bytes:
    """Returns the pickle of a value, in which the classes above stand for others."""
    file = io.BytesIO()
    _Writer(file, protocol).dump(value)
    return file.getvalue()
