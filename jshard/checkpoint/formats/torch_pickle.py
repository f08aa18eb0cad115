"""Reads `torch.save` archives, anywhere inside a file, without PyTorch and without running anything they name.

An archive is a zip of a pickle and the bytes of its tensors. A pickle is a program that can call anything importable.
Here names are only looked up in a table, which contains nothing but records, tuples and strings. Any other name stops
the reading.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import FileRegion, damaged, read_region
from jshard.errors import FourPartError

Allowed = Mapping[tuple[str, str], Any]

DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()},
    **{name: np.dtype(name) for name in "float16 float32 float64 complex64 complex128".split()},
    **{name: jnp.dtype(name) for name in "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2".split()},
    **{name: jnp.dtype(name) for name in "float8_e5m2fnuz float8_e8m0fnu".split()},
}
"""PyTorch's names of dtypes. A pickle gets the name, not the dtype: a pickle could set the state of numpy's."""


class Sealed(type):
    """Metaclass of the classes that a pickle sees: it can create instances, but not modify the classes."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a pickle tried to set {cls.__name__}.{name}")


class Record(metaclass=Sealed):
    """Stands in for a PyTorch class: records the arguments and the state from the pickle."""

    args: tuple
    state: Any

    def __new__(cls, *args: Any) -> Record:
        """Keeps the arguments for the class."""
        record = super().__new__(cls)
        record.args, record.state = args, {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """A field of the dataclass it stands for; None if there is no such field."""
        return self.state.get(field) if isinstance(self.state, dict) else None


class _Ordered(dict, metaclass=Sealed):
    """`collections.OrderedDict`; the module versions that PyTorch attaches to a state dict are dropped."""

    def __setstate__(self, state: Any) -> None:
        pass


class _NotAllowed(Exception):
    """A name that no table contains."""


def _sealed(call: Callable[..., Any]) -> Any:
    """A class that a pickle may call in place of a function; returns the function's result."""
    return Sealed(call.__name__, (), {"__new__": lambda cls, *args: call(*args)})


@_sealed
def _size(dims: Any = ()) -> Any:
    """`torch.Size`: a tuple."""
    return tuple(dims)


@_sealed
def _attribute(owner: Any, name: Any) -> Any:
    """`getattr`, as early versions of Python 3.11 pickle an enum member; refuses anything else."""
    if owner is not MEMORY_FORMAT:
        raise _NotAllowed("builtins", "getattr")
    return str(name)


@_sealed
def _encoded_bytes(text: Any = "", codec: Any = "latin1") -> Any:
    """`_codecs.encode`, with which older protocols write bytes; only with that codec."""
    if not isinstance(text, str) or codec != "latin1":
        raise _NotAllowed("_codecs", "encode")
    return text.encode("latin1")


@_sealed
def _no_bytes() -> Any:
    """`bytes`, with which older protocols write empty bytes; takes no size, which would allocate memory."""
    return b""


@_sealed
def MEMORY_FORMAT(value: Any) -> Any:
    """Stands in for the enum of memory formats, which nothing here needs."""
    return value


def records(module: str, *names: str) -> dict[tuple[str, str], Any]:
    """A table with a record for each of these classes."""
    return {(module, name): Sealed.__new__(Sealed, name, (Record,), {}) for name in names}


PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Ordered,
    ("torch", "Size"): _size,
    **{("torch", name): name for name in DTYPES},
    ("_codecs", "encode"): _encoded_bytes,
    ("builtins", "getattr"): _attribute,
    **{(module, "bytes"): _no_bytes for module in ("builtins", "__builtin__")},
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    **{(module, "complex"): complex for module in ("builtins", "__builtin__")},
    **records("torch", "device"),
}
"""The names in pickles of plain Python values and small PyTorch ones."""


def load(file: IO[bytes], allowed: Allowed, path: Path, *, storage: Callable[..., Any] | None = None) -> Any:
    """The content of a pickle, if every name in it is allowed."""
    try:
        return _PickleReader(file, allowed, storage).load()
    except FourPartError:
        raise
    except _NotAllowed as error:
        raise CheckpointError(
            "The checkpoint was not read: its pickle names something that may run code.",
            where=str(path),
            why=f"{'.'.join(map(str, error.args))} is not among the classes allowed in a PyTorch checkpoint "
            "here. Nothing of it has run.",
            do="do not load it with PyTorch unless you trust its author;\n"
            "if you do, save only its tensors, with torch.distributed.checkpoint or safetensors.",
        ) from None
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(path, f"its pickle cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


class _PickleReader(pickle.Unpickler):
    """Looks names up only in the table."""

    def __init__(self, file: IO[bytes], allowed: Allowed, storage: Callable[..., Any] | None) -> None:
        super().__init__(file)
        self._allowed, self._storage = allowed, storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise _NotAllowed(module, name)
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None or not isinstance(pid, tuple):
            raise pickle.UnpicklingError("an unexpected persistent object")
        return self._storage(*pid)


# Archives.

_MOST_PICKLE_BYTES = 1 << 30
_LOCAL_HEADER_BYTES = 30
STORAGES = {
    **{"BoolStorage": "bool", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32"},
    **{"LongStorage": "int64", "ByteStorage": "uint8", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"FloatStorage": "float32", "DoubleStorage": "float64"},
    **{"ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128"},
}
"""PyTorch's storage classes, and the dtypes of their elements; other dtypes are read as bytes."""


class _Storage(NamedTuple):
    """The bytes of a tensor: a contiguous range of a file."""

    path: Path
    offset: int
    nbytes: int
    dtype: str


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> FileRegion:
    """`torch._utils._rebuild_tensor_v2`: a view of a storage, which has the dtype."""
    return _region(storage, offset, size, stride, storage.dtype)


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, _: Any, hooks: Any, dtype: Any, *__: Any) -> Any:
    """`torch._utils._rebuild_tensor_v3`: the same, over untyped bytes."""
    return _region(storage, offset, size, stride, dtype)


def _subclass(rebuild: Any, _: Any, args: Any, __: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a tensor with attributes, or of a subclass."""
    if not isinstance(rebuild, Sealed):
        raise _NotAllowed("torch._tensor", "_rebuild_from_type_v2")
    return rebuild(*args)


def _parameter(data: Any, *_: Any) -> Any:
    """`torch._utils._rebuild_parameter`: returns its tensor."""
    return data


def _read(region: FileRegion) -> np.ndarray:
    return read_region(region, tuple(slice(0, n) for n in region.shape))


_PICKLED = {
    **PLAIN,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
}
_TENSOR = {
    **_PICKLED,
    ("torch._utils", "_rebuild_tensor_v2"): _sealed(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _sealed(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _sealed(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _sealed(_subclass),
    **records("torch", "Tensor"),
    **records("torch.nn.parameter", "Parameter"),
}
_VALUE = {  # the tensors themselves, among other values
    **_PICKLED,
    ("torch._utils", "_rebuild_tensor_v2"): _sealed(lambda *args: _read(_tensor_v2(*args))),
    ("torch._utils", "_rebuild_tensor_v3"): _sealed(lambda *args: _read(_tensor_v3(*args))),
}


class Archive(NamedTuple):
    """A `torch.save` archive: a contiguous range of a file."""

    path: Path
    offset: int
    length: int

    def tensor(self) -> FileRegion:
        """The archived tensor as the location of its numbers, which are not read."""
        region = self._load(_TENSOR)
        if not isinstance(region, FileRegion):
            raise damaged(self.path, f"the archive at byte {self.offset} is not a tensor.")
        return region

    def value(self) -> Any:
        """The archived value: plain Python, with tensors as numpy arrays; raises as `tensor`."""
        return self._load(_VALUE)

    def regions(self, allowed: Allowed) -> Any:
        """The value, with an unread `FileRegion` for each tensor; the given names are also allowed."""
        return self._load({**_TENSOR, **allowed})

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[zipfile.ZipFile, _ArchiveWindow]]:
        with self.path.open("rb", buffering=0) as file:
            window = _ArchiveWindow(file, self.offset, self.length)
            with zipfile.ZipFile(window) as archive:
                yield archive, window

    def _load(self, allowed: Allowed) -> Any:
        try:
            with self._opened() as (archive, window):
                return self._unpickled(archive, window, allowed)
        except FourPartError:
            raise
        except Exception as error:  # a damaged zip may raise anything
            why = f"the archive at byte {self.offset} cannot be read: {type(error).__name__}: {error}"
            raise damaged(self.path, why) from error

    def _unpickled(self, archive: zipfile.ZipFile, window: _ArchiveWindow, allowed: Allowed) -> Any:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        self._check_members(members)
        if "byteorder" in members and archive.read(members["byteorder"]).strip() != b"little":
            raise damaged(self.path, f"the archive at byte {self.offset} is not little-endian.")

        def storage(kind: Any, dtype: Any, key: Any, location: Any, numel: Any, *_: Any) -> _Storage:
            member = members[f"data/{key}"]
            if kind != "storage" or dtype not in DTYPES or numel * DTYPES[dtype].itemsize > member.file_size:
                raise ValueError(f"its storage {key} has {member.file_size} bytes but should hold {numel} {dtype}")
            begin = self.offset + _data_offset(window, member)
            if begin + member.file_size > self.offset + self.length:
                raise ValueError(f"its storage {key} reaches past its end")
            return _Storage(self.path, begin, member.file_size, dtype)

        with archive.open(members["data.pkl"]) as file:
            return load(io.BytesIO(file.read()), allowed, self.path, storage=storage)

    def _check_members(self, members: dict[str, zipfile.ZipInfo]) -> None:
        if "data.pkl" not in members or members["data.pkl"].file_size > _MOST_PICKLE_BYTES:
            raise damaged(self.path, f"the archive at byte {self.offset} has no pickle, or one that is too large.")
        packed = [m.filename for m in members.values() if m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1]
        if packed:
            raise CheckpointError(
                "The checkpoint holds compressed or encrypted tensors.",
                where=str(self.path),
                why=f"{packed[0]} of the archive at byte {self.offset}; PyTorch writes them plain.",
                do="save the checkpoint again with torch.distributed.checkpoint.save.",
            )


class _ArchiveWindow(io.RawIOBase):
    """A range of a file as a file object."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("an offset before the start")
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


def _data_offset(window: _ArchiveWindow, member: zipfile.ZipInfo) -> int:
    """The offset of a member's bytes; the local header before them has padding that the central directory lacks."""
    window.seek(member.header_offset)
    header = window.read(_LOCAL_HEADER_BYTES) or b""
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{member.filename} has no header")
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    return member.header_offset + _LOCAL_HEADER_BYTES + name + extra


def _region(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> FileRegion:
    if not isinstance(storage, _Storage) or not isinstance(dtype, str):
        raise ValueError("a tensor without a storage")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(f"a tensor of size {size}, stride {stride} at {offset}")
    itemsize = DTYPES[dtype].itemsize
    strides = tuple(n * itemsize for n in stride)
    region = FileRegion(storage.path, storage.offset + offset * itemsize, tuple(size), DTYPES[dtype], strides)
    # The second check also stops a stride of 0 from expanding few bytes to a large array.
    if offset * itemsize + max(region.span_bytes, math.prod(region.shape) * itemsize) > storage.nbytes:
        raise ValueError(f"a tensor of size {size}, stride {stride} at {offset} in {storage.nbytes} bytes")
    return region
