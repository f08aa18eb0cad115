"""Reads `torch.save` archives, anywhere inside a file: a zip of a pickle and the bytes of its tensors."""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshard._files import open_regular
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import FileRegion, are_sizes, damaged, is_size, read_region
from jshard.checkpoint.formats.torch_inert import OTHER_DTYPES, OtherDtype
from jshard.checkpoint.formats.torch_pickle import (
    DTYPES,
    MAX_DIMS,
    MOST_PICKLE_BYTES,
    PLAIN,
    Allowed,
    NotAllowedError,
    Record,
    Sealed,
    Unpickled,
    load,
    records,
    sealed,
    short,
)
from jshard.checkpoint.packed.layout import slices_of, whole_box
from jshard.errors import FourPartError

_MAX_EXPANSION = 64  # of a view, over its storage
_SMALL_BYTES = 1 << 20  # which any view may have
_LOCAL_HEADER_BYTES = 30  # of a member of a zip, before its name and its extra field
STORAGES = {
    "BoolStorage": "bool",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ByteStorage": "uint8",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""PyTorch's storage classes, and the dtypes of their elements; other dtypes are read as bytes."""


class Storage(NamedTuple):
    """The bytes of a tensor: a contiguous range of a file."""

    path: Path
    offset: int
    nbytes: int
    dtype: str


def _tensor_v2(
    storage: Unpickled,
    offset: Unpickled,
    size: object,
    stride: object,
    _: object = None,
    hooks: object = None,
    metadata: object = None,
) -> FileRegion:
    """`torch._utils._rebuild_tensor_v2`: a view of a storage, which has the dtype."""
    _check_plain_view(storage, size, metadata)
    return _region(storage, offset, size, stride, storage.dtype)


def _tensor_v3(
    storage: object,
    offset: Unpickled,
    size: object,
    stride: object,
    _: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> FileRegion | Record:
    """`torch._utils._rebuild_tensor_v3`: the same, over untyped bytes."""
    if dtype in OTHER_DTYPES:
        return OtherDtype()
    _check_plain_view(storage, size, metadata)
    return _region(storage, offset, size, stride, dtype)


def _subclass(rebuild: object, _: object, args: Unpickled, __: object) -> object:
    """`torch._tensor._rebuild_from_type_v2`: a tensor with attributes, or of a subclass."""
    # A pickle may pass anything here: only what the table contains is called.
    if not isinstance(rebuild, Sealed):
        raise NotAllowedError("torch._tensor", "_rebuild_from_type_v2")
    return rebuild(*args)


def _parameter(data: object, *_: object) -> object:
    """`torch._utils._rebuild_parameter`: returns its tensor."""
    return data


_PICKLED = {
    **PLAIN,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
}
TENSOR = {
    **_PICKLED,
    ("torch._utils", "_rebuild_tensor_v2"): sealed(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): sealed(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): sealed(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): sealed(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): sealed(_subclass),
    **records("torch", "Tensor"),
    **records("torch.nn.parameter", "Parameter"),
}


def _value_names(max_bytes: int) -> Allowed:
    """Returns the names of values whose tensors are read: so many bytes of them, as several may share a storage."""
    bytes_left = max_bytes

    def read(region: FileRegion | Record) -> np.ndarray:
        nonlocal bytes_left
        if not isinstance(region, FileRegion):
            raise ValueError("a tensor of a dtype that is not known")
        bytes_left -= math.prod(region.shape) * region.dtype.itemsize
        if bytes_left < 0:
            raise ValueError("its tensors are larger than the archive")
        return read_region(region, slices_of(whole_box(region.shape)))

    @sealed
    def read_tensor_v2(*args: Unpickled) -> np.ndarray:
        return read(_tensor_v2(*args))

    @sealed
    def read_tensor_v3(*args: Unpickled) -> np.ndarray:
        return read(_tensor_v3(*args))

    return {
        **_PICKLED,
        ("torch._utils", "_rebuild_tensor_v2"): read_tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): read_tensor_v3,
    }


class Archive(NamedTuple):
    """A `torch.save` archive: a contiguous range of a file."""

    path: Path
    offset: int
    length: int

    def tensor(self) -> FileRegion:
        """Returns the archived tensor as the location of its numbers, which are not read."""
        region = self._load(TENSOR)
        if not isinstance(region, FileRegion):
            raise damaged(self.path, f"the archive at byte {self.offset} is not a tensor.")
        return region

    def value(self) -> Unpickled:
        """Returns the archived value: plain Python, with tensors as numpy arrays; raises as `tensor`."""
        return self._load(_value_names(self.length))

    def regions(self, allowed: Allowed) -> Unpickled:
        """Returns the value, with an unread `FileRegion` for each tensor; these names are also allowed."""
        return self._load({**TENSOR, **allowed})

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[zipfile.ZipFile, _ArchiveWindow]]:
        with open_regular(self.path) as file:
            window = _ArchiveWindow(file, self.offset, self.length)
            with zipfile.ZipFile(window) as archive:
                yield archive, window

    def _load(self, allowed: Allowed) -> Unpickled:
        try:
            with self._opened() as (archive, window):
                return self._unpickled(archive, window, allowed)
        except FourPartError:
            raise
        except Exception as error:  # a damaged zip may raise anything
            why = f"the archive at byte {self.offset} cannot be read: {type(error).__name__}: {error}"
            raise damaged(self.path, why) from error

    def _unpickled(self, archive: zipfile.ZipFile, window: _ArchiveWindow, allowed: Allowed) -> Unpickled:
        # By name without the folder around them, whose name varies.
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        self._check_members(members)
        # Without this file, as in archives of earlier versions of PyTorch, they are taken as little-endian.
        order = members.get("byteorder")
        # The size first: the member may state, and unpack to, gigabytes.
        if order is not None and (order.file_size > 64 or archive.read(order).strip() != b"little"):
            raise damaged(self.path, f"the archive at byte {self.offset} is not little-endian.")

        def storage(
            kind: object, dtype: Unpickled, key: object, location: object, numel: object, *_: object
        ) -> Storage:
            if not isinstance(key, str | int) or type(numel) is not int:
                raise ValueError(f"a storage has the key {short(key)} and {short(numel)} elements")
            member = members[f"data/{key}"]
            is_known = kind == "storage" and dtype in DTYPES
            if not is_known or numel * DTYPES[dtype].itemsize > member.file_size:
                raise ValueError(f"its storage {key} has {member.file_size} bytes but should hold {numel} {dtype}")
            offset = self.offset + _data_offset(window, member)
            # The file may have other archives after this one.
            if offset + member.file_size > self.offset + self.length:
                raise ValueError(f"its storage {key} reaches past its end")
            return Storage(self.path, offset, member.file_size, dtype)

        with archive.open(members["data.pkl"]) as file:
            return load(file.read(), allowed, self.path, storage=storage)

    def _check_members(self, members: dict[str, zipfile.ZipInfo]) -> None:
        # The pickle is read into memory whole, so its stated size is compared before.
        if "data.pkl" not in members or members["data.pkl"].file_size > MOST_PICKLE_BYTES:
            raise damaged(self.path, f"the archive at byte {self.offset} has no pickle, or one that is too large.")
        for member in members.values():
            if not _is_plain(member):
                raise CheckpointError(
                    "The checkpoint holds compressed or encrypted tensors.",
                    where=str(self.path),
                    why=f"{member.filename} of the archive at byte {self.offset}; PyTorch writes them plain.",
                    do="save the checkpoint again with torch.distributed.checkpoint.save.",
                )


def _is_plain(member: zipfile.ZipInfo) -> bool:
    # Only the bytes of a plain member are those of its tensor: any box of it can be read by itself.
    is_encrypted = member.flag_bits & 1
    return member.compress_type == zipfile.ZIP_STORED and not is_encrypted


class _ArchiveWindow(io.RawIOBase):
    """A range of a file as a file object."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("an offset before the start")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        if len(buffer) > MOST_PICKLE_BYTES:  # a table of contents of that size, in a file with holes
            raise ValueError(f"a part of {len(buffer)} bytes")
        count = max(min(len(buffer), self._length - self._position), 0)
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(memoryview(buffer)[:count])
        self._position += count
        return count


def _data_offset(window: _ArchiveWindow, member: zipfile.ZipInfo) -> int:
    """Returns the offset of a member's bytes: the header before them has padding that the central directory lacks."""
    window.seek(member.header_offset)
    header = window.read(_LOCAL_HEADER_BYTES) or b""
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{member.filename} has no header")
    name_bytes = int.from_bytes(header[26:28], "little")
    extra_bytes = int.from_bytes(header[28:30], "little")
    return member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes


def _check_plain_view(storage: object, size: object, metadata: object) -> None:
    """Raises `CheckpointError` if PyTorch changes the numbers of a view when it reads them.

    Without this, the numbers before the change would be taken for those of the tensor.
    """
    if not metadata:
        return
    where = str(storage.path) if isinstance(storage, Storage) else ""
    raise CheckpointError(
        "A tensor of the file is not stored as the numbers that it has.",
        where=where,
        why=f"the tensor of shape {short(size)} is a view that is conjugated or negated when PyTorch reads it: "
        f"{short(metadata)}.",
        do="save it resolved:\nstate[name] = state[name].resolve_conj().resolve_neg()",
    )


def _region(storage: object, offset: Unpickled, size: object, stride: object, dtype: object) -> FileRegion:
    if not isinstance(storage, Storage) or not isinstance(dtype, str):
        raise ValueError("a tensor without a storage")
    size = _dims(size)
    stride = _dims(stride)
    # A negative offset would lead to bytes before the tensor, which are of another.
    if len(size) != len(stride) or not is_size(offset):
        raise ValueError(f"a tensor of size {size}, stride {stride} at {short(offset)}")
    itemsize = DTYPES[dtype].itemsize
    offset_bytes = offset * itemsize
    strides = tuple(step * itemsize for step in stride)
    region = FileRegion(storage.path, storage.offset + offset_bytes, size, DTYPES[dtype], strides)
    if offset_bytes + region.span_bytes > storage.nbytes:
        raise ValueError(f"a tensor of size {size}, stride {stride} at {offset} in {storage.nbytes} bytes")
    _check_expansion(region, storage)
    return region


def _check_expansion(region: FileRegion, storage: Storage) -> None:
    """Raises `CheckpointError` for a view of few bytes as a much larger tensor, as with a stride of 0."""
    num_bytes = math.prod(region.shape) * region.dtype.itemsize
    if num_bytes <= max(_MAX_EXPANSION * storage.nbytes, _SMALL_BYTES):
        return
    raise CheckpointError(
        "A tensor of the file is expanded from too few numbers.",
        where=str(storage.path),
        why=f"the shape {region.shape} takes {num_bytes} bytes, of which {storage.nbytes} are stored; "
        f"at most {_MAX_EXPANSION} times as many are read.",
        do="save it without expansion, if it is needed:\nstate[name] = state[name].clone()",
    )


def _dims(numbers: object) -> tuple[int, ...]:
    """Returns the sizes or strides of a tensor; raises `ValueError` if these are none."""
    if not isinstance(numbers, tuple | list) or len(numbers) > MAX_DIMS:
        raise ValueError(f"a tensor of size or stride {short(numbers)}")
    if not are_sizes(numbers):
        raise ValueError(f"a tensor of size or stride {short(numbers)}")
    return tuple(numbers)
