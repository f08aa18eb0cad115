"""An archive as `torch.save` writes it, anywhere inside a file: a zip of a pickle and the bytes of its tensors."""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import inert_pickle
from jshard.checkpoint.formats.inert_pickle import DTYPES, Sealed
from jshard.checkpoint.formats.source import Region, damaged, read_region
from jshard.errors import FourPartError

_MOST_PICKLE_BYTES = 1 << 30
_LOCAL_HEADER_BYTES = 30
_STORAGES = {
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


class _Storage(NamedTuple):
    """The bytes of a tensor: a run of them in a file."""

    path: Path
    offset: int
    nbytes: int
    dtype: str


class _TensorV2(metaclass=Sealed):
    """`torch._utils._rebuild_tensor_v2`: a view of a storage, which has the dtype."""

    def __new__(cls, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Any:
        return _region(storage, offset, size, stride, storage.dtype)


class _TensorV3(metaclass=Sealed):
    """`torch._utils._rebuild_tensor_v3`: the same over plain bytes."""

    def __new__(
        cls, storage: Any, offset: Any, size: Any, stride: Any, _: Any, hooks: Any, dtype: Any, *__: Any
    ) -> Any:
        return _region(storage, offset, size, stride, dtype)


class _ArrayV2(metaclass=Sealed):
    """The tensor itself, among other values."""

    def __new__(cls, *args: Any) -> Any:
        return _read(_TensorV2(*args))


class _ArrayV3(metaclass=Sealed):
    def __new__(cls, *args: Any) -> Any:
        return _read(_TensorV3(*args))


_PICKLED = {
    **inert_pickle.PLAIN,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
}
_TENSOR = {
    **_PICKLED,
    ("torch._utils", "_rebuild_tensor_v2"): _TensorV2,
    ("torch._utils", "_rebuild_tensor_v3"): _TensorV3,
}
_VALUE = {
    **_PICKLED,
    ("torch._utils", "_rebuild_tensor_v2"): _ArrayV2,
    ("torch._utils", "_rebuild_tensor_v3"): _ArrayV3,
}


class Archive:
    """A `torch.save` archive.

    Args:
        path: the file it is in.
        offset: where it begins there.
        length: its bytes.
    """

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._path, self._offset, self._length = path, offset, length

    def tensor(self) -> Region:
        """The tensor that it is an archive of: where its numbers lie; they are not read.

        Raises:
            CheckpointError: its pickle names something that is not allowed.
            RunError: it is damaged, or holds no tensor.
        """
        region = self._load(_TENSOR)
        if not isinstance(region, Region):
            raise damaged(self._path, f"the archive at byte {self._offset} holds no tensor.")
        return region

    def value(self) -> Any:
        """The value that it is an archive of: plain Python, with tensors as numpy arrays.

        Raises:
            CheckpointError: its pickle names something that is not allowed.
            RunError: it is damaged.
        """
        return self._load(_VALUE)

    def is_whole(self) -> bool:
        """Whether the sums (CRC-32) that the archive holds of its members are theirs; reads all of it, part by part."""
        try:
            with self._opened() as (archive, _):
                return archive.testzip() is None
        except Exception:  # a damaged zip may raise anything
            return False

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[zipfile.ZipFile, _Window]]:
        with self._path.open("rb", buffering=0) as file:
            window = _Window(file, self._offset, self._length)
            with zipfile.ZipFile(window) as archive:
                yield archive, window

    def _load(self, allowed: inert_pickle.Allowed) -> Any:
        try:
            with self._opened() as (archive, window):
                return self._unpickled(archive, window, allowed)
        except FourPartError:
            raise
        except Exception as error:  # a damaged zip may raise anything
            why = f"the archive at byte {self._offset} cannot be read: {type(error).__name__}: {error}"
            raise damaged(self._path, why) from error

    def _unpickled(self, archive: zipfile.ZipFile, window: _Window, allowed: inert_pickle.Allowed) -> Any:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        self._check_members(members)
        if "byteorder" in members and archive.read(members["byteorder"]).strip() != b"little":
            raise damaged(self._path, f"the archive at byte {self._offset} is not little-endian.")

        def storage(kind: Any, dtype: Any, key: Any, location: Any, numel: Any, *_: Any) -> _Storage:
            member = members[f"data/{key}"]
            if kind != "storage" or dtype not in DTYPES or numel * DTYPES[dtype].itemsize > member.file_size:
                raise ValueError(f"its storage {key} has {member.file_size} bytes and is said to hold {numel} {dtype}")
            begin = self._offset + _data_offset(window, member)
            if begin + member.file_size > self._offset + self._length:
                raise ValueError(f"its storage {key} reaches past its end")
            return _Storage(self._path, begin, member.file_size, dtype)

        with archive.open(members["data.pkl"]) as file:
            return inert_pickle.load(io.BytesIO(file.read()), allowed, self._path, storage=storage)

    def _check_members(self, members: dict[str, zipfile.ZipInfo]) -> None:
        if "data.pkl" not in members or members["data.pkl"].file_size > _MOST_PICKLE_BYTES:
            raise damaged(self._path, f"the archive at byte {self._offset} holds no pickle, or one that is too large.")
        packed = [m.filename for m in members.values() if m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1]
        if packed:
            raise CheckpointError(
                "The checkpoint holds compressed or encrypted tensors.",
                where=str(self._path),
                why=f"{packed[0]} of the archive at byte {self._offset}; PyTorch writes them plain.",
                do="write the checkpoint anew with torch.distributed.checkpoint.save.",
            )


class _Window(io.RawIOBase):
    """A run of bytes of a file, as a file of its own."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._length - self._at), 0)
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(memoryview(buffer)[:count])
        self._at += count
        return count


def _data_offset(window: _Window, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin; the header before them has a padding that the zip's table does not tell."""
    window.seek(member.header_offset)
    header = window.read(_LOCAL_HEADER_BYTES) or b""
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{member.filename} has no header")
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    return member.header_offset + _LOCAL_HEADER_BYTES + name + extra


def _region(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> Region:
    if not isinstance(storage, _Storage) or not isinstance(dtype, str):
        raise ValueError("a tensor without a storage")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(f"a tensor of size {size}, stride {stride} at {offset}")
    itemsize = DTYPES[dtype].itemsize
    strides = tuple(n * itemsize for n in stride)
    region = Region(storage.path, storage.offset + offset * itemsize, tuple(size), DTYPES[dtype], strides)
    # The second also keeps a stride of 0 from making much of little.
    if offset * itemsize + max(region.span_bytes, math.prod(region.shape) * itemsize) > storage.nbytes:
        raise ValueError(f"a tensor of size {size}, stride {stride} at {offset} in {storage.nbytes} bytes")
    return region


def _read(region: Region) -> Any:
    return read_region(region, tuple(slice(0, n) for n in region.shape))
