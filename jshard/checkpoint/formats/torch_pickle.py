"""Reads `torch.save` archives, anywhere inside a file, without PyTorch and without running anything they name.

An archive is a zip of a pickle and the bytes of its tensors. A pickle is a program that can call anything importable.
Here names are only looked up in a table, which contains nothing but records, tuples and strings. Any other name stops
the reading.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import pickle
import reprlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from jshard._files import open_regular
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import FileRegion, damaged, read_region
from jshard.errors import FourPartError, printable

Allowed = Mapping[tuple[str, str], Any]

_DTYPE_NAMES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 "
    "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, np.dtype] = {name: jnp.dtype(name) for name in _DTYPE_NAMES.split()}
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
        record.args = args
        record.state = {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """Returns a field of the dataclass it stands for; None if there is no such field."""
        if not isinstance(self.state, dict):
            return None
        return self.state.get(field)


class _Ordered(dict, metaclass=Sealed):
    """`collections.OrderedDict`; the module versions that PyTorch attaches to a state dict are dropped."""

    def __init__(self) -> None:  # its items are set afterwards, so that their keys are checked
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


class _NotAllowed(Exception):
    """A name that no table contains."""


def _sealed(call: Callable[..., Any]) -> Any:
    """Makes a class that a pickle may call in place of a function: the call returns the function's result."""

    def new(cls: type, *args: Any) -> Any:
        return call(*args)

    return Sealed(call.__name__, (), {"__new__": new})


@_sealed
def _size(dims: Any = ()) -> Any:
    """`torch.Size`: a tuple."""
    if len(dims) > _MAX_DIMS:
        raise ValueError(f"a size of {len(dims)} dims")
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
    """Makes a table with a record for each of these classes."""
    return {(module, name): Sealed.__new__(Sealed, name, (Record,), {}) for name in names}


PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Ordered,
    ("torch", "Size"): _size,
    **{("torch", name): name for name in DTYPES},
    ("_codecs", "encode"): _encoded_bytes,
    ("builtins", "getattr"): _attribute,
    ("builtins", "bytes"): _no_bytes,
    ("builtins", "set"): set,
    ("builtins", "complex"): complex,
    ("__builtin__", "bytes"): _no_bytes,  # Python 2's name of the module, which older protocols write
    ("__builtin__", "set"): set,
    ("__builtin__", "complex"): complex,
    **records("torch", "device"),
}
"""The names in pickles of plain Python values and small PyTorch ones."""


MOST_PICKLE_BYTES = 1 << 30
_MAX_DIMS = 64


def short(value: Any) -> str:
    """Returns a value of a pickle as a short text. `str` of a few nested tuples can be longer than any memory."""
    if isinstance(value, str):
        return printable(value[:200])
    try:
        return printable(reprlib.repr(value))
    except ValueError:  # an integer of thousands of digits
        return f"a large {type(value).__name__}"


def load(content: bytes, allowed: Allowed, path: Path, *, storage: Callable[..., Any] | None = None) -> Any:
    """Returns the value of a pickle, if every name in it is allowed; memory and time are in proportion to its size."""
    try:
        return _PickleReader(content, allowed, storage).load()
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


_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]  # the Python one, whose steps can be replaced
_COPIED = (tuple, list, dict, set, frozenset, str, bytes, bytearray)
_WORK_PER_BYTE = 16  # of a pickle; real ones need less than 1
# Nothing that PyTorch writes has them. They make calls from the stack, or load what `find_class` does not see.
_REFUSED_STEPS = (
    pickle.INST,
    pickle.OBJ,
    pickle.NEWOBJ_EX,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)


class _PickleReader(_Unpickler):
    """Looks names up only in the table, and does work in proportion to the size of the pickle.

    The reader in C is some times faster, and can be made to do anything: it keeps its memo in an array, of which ten
    bytes can ask for gigabytes, and hashes whatever is a key. The hash of a tuple of a tuple of a tuple, each twice in
    the next, takes 2**n steps; that of a deep one ends the process.

    Here each step takes a time in proportion to the bytes that it reads, but for calls and keys. Those have a budget,
    which the size of the pickle sets.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: step for code, step in _Unpickler.dispatch.items() if bytes([code]) not in _REFUSED_STEPS
    }

    def __init__(self, content: bytes, allowed: Allowed, storage: Callable[..., Any] | None) -> None:
        file = io.BytesIO(content)
        super().__init__(file)
        # Without its checks of frames, which are most of the time. What a step reads may then be too short, and the
        # next step is that of an empty text, which there is not.
        self.read = file.read
        self.readline = file.readline
        self._allowed = allowed
        self._storage = storage
        self._work_left = _WORK_PER_BYTE * (len(content) + 4096)

    def load(self) -> Any:
        """Runs the steps of the pickle, and returns its value."""
        self.metastack = []
        self.stack = []
        self.append = self.stack.append
        self.proto = 0
        read = self.read  # locals: this loop is all of the time
        steps = self.dispatch
        try:
            while True:
                steps[read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        except IndexError:
            raise EOFError("it ends too early, or takes what is not on its stack") from None
        except KeyError as error:
            raise ValueError(f"it has the unknown step or name {short(error.args[0])}") from None

    def find_class(self, module: str, name: str) -> Any:
        """Looks up a name."""
        if (module, name) not in self._allowed:
            raise _NotAllowed(module, name)
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Looks up the bytes of a tensor."""
        if self._storage is None or not isinstance(pid, tuple):
            raise pickle.UnpicklingError("an unexpected persistent object")
        self._spend(len(pid))
        return self._storage(*pid)

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise ValueError("it asks for more work than a pickle of its size can need")

    def _spend_on_call(self, args: Any) -> None:
        """Counts the arguments of a call, and what they contain: a call may copy it."""
        if not isinstance(args, tuple):
            raise TypeError("a call with arguments that are not a tuple")
        work = len(args)
        for arg in args:
            if isinstance(arg, _COPIED):
                work += len(arg)
        self._spend(work)

    def _check_key(self, key: Any) -> None:
        """Raises `ValueError` unless the hash of a key takes little time, and is that of few other keys."""
        if type(key) is str:
            return  # its hash is computed once
        # Of a tuple each element is examined, and none may be a tuple: the hash of nested ones takes 2**depth steps.
        parts = key if isinstance(key, tuple) else (key,)
        self._spend(len(parts))
        for part in parts:
            is_plain = part is None or type(part) in (str, bytes, bool, float, complex) or isinstance(part, Record)
            is_small = type(part) is int and -(1 << 60) < part < 1 << 60  # the hash of a larger one is that of others
            if not is_plain and not is_small:
                raise ValueError(f"a key of a dict or an element of a set is a {type(part).__name__}")

    def _set_items(self, mapping: Any, items: list[Any]) -> None:
        if not isinstance(mapping, dict):
            raise ValueError(f"items are set in a {type(mapping).__name__}")
        for position in range(0, len(items), 2):
            key = items[position]
            self._check_key(key)
            mapping[key] = items[position + 1]

    # Steps. Each replaces one of `pickle`'s, which may be slow or take memory beyond the bytes that it reads.

    def _load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items(self.stack[-1], [key, value])

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        self._set_items(self.stack[-1], items)

    def _load_dict(self) -> None:
        mapping: dict[Any, Any] = {}
        self._set_items(mapping, self.pop_mark())
        self.append(mapping)

    def _load_additems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise ValueError(f"items are added to a {type(target).__name__}")
        for item in items:
            self._check_key(item)
        target.update(items)

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        for item in items:
            self._check_key(item)
        self.append(frozenset(items))

    def _load_reduce(self) -> None:
        args = self.stack.pop()
        call = self.stack[-1]
        self._spend_on_call(args)
        if call is set:
            for item in itertools.chain(*args):
                self._check_key(item)
        self.stack[-1] = call(*args)

    def _load_newobj(self) -> None:
        args = self.stack.pop()
        kind = self.stack.pop()
        self._spend_on_call(args)
        self.append(kind.__new__(kind, *args))

    def _load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Record | _Ordered):
            raise ValueError(f"a state is set in a {type(target).__name__}")
        target.__setstate__(state)

    def _load_frame(self) -> None:
        self.read(8)  # its length; all of the content is in memory already

    def _load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(min(size, MOST_PICKLE_BYTES))))

    dispatch |= {
        pickle.SETITEM[0]: _load_setitem,
        pickle.SETITEMS[0]: _load_setitems,
        pickle.DICT[0]: _load_dict,
        pickle.ADDITEMS[0]: _load_additems,
        pickle.FROZENSET[0]: _load_frozenset,
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_newobj,
        pickle.BUILD[0]: _load_build,
        pickle.FRAME[0]: _load_frame,
        pickle.BYTEARRAY8[0]: _load_bytearray8,
    }


# Archives.

_LOCAL_HEADER_BYTES = 30
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


def _value_names(max_bytes: int) -> Allowed:
    """Returns the names of values whose tensors are read: so many bytes of them, as several may share a storage."""
    bytes_left = max_bytes

    def read(region: FileRegion) -> np.ndarray:
        nonlocal bytes_left
        bytes_left -= math.prod(region.shape) * region.dtype.itemsize
        if bytes_left < 0:
            raise ValueError("its tensors are larger than the archive")
        return read_region(region, tuple(slice(0, size) for size in region.shape))

    @_sealed
    def read_tensor_v2(*args: Any) -> np.ndarray:
        return read(_tensor_v2(*args))

    @_sealed
    def read_tensor_v3(*args: Any) -> np.ndarray:
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
        region = self._load(_TENSOR)
        if not isinstance(region, FileRegion):
            raise damaged(self.path, f"the archive at byte {self.offset} is not a tensor.")
        return region

    def value(self) -> Any:
        """Returns the archived value: plain Python, with tensors as numpy arrays; raises as `tensor`."""
        return self._load(_value_names(self.length))

    def regions(self, allowed: Allowed) -> Any:
        """Returns the value, with an unread `FileRegion` for each tensor; these names are also allowed."""
        return self._load({**_TENSOR, **allowed})

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[zipfile.ZipFile, _ArchiveWindow]]:
        with open_regular(self.path) as file:
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
        # By name without the folder around them, whose name varies.
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        self._check_members(members)
        order = members.get("byteorder")
        if order is not None and (order.file_size > 64 or archive.read(order).strip() != b"little"):
            raise damaged(self.path, f"the archive at byte {self.offset} is not little-endian.")

        def storage(kind: Any, dtype: Any, key: Any, location: Any, numel: Any, *_: Any) -> _Storage:
            if not isinstance(key, str | int) or type(numel) is not int:
                raise ValueError(f"a storage has the key {short(key)} and {short(numel)} elements")
            member = members[f"data/{key}"]
            is_known = kind == "storage" and dtype in DTYPES
            if not is_known or numel * DTYPES[dtype].itemsize > member.file_size:
                raise ValueError(f"its storage {key} has {member.file_size} bytes but should hold {numel} {dtype}")
            offset = self.offset + _data_offset(window, member)
            if offset + member.file_size > self.offset + self.length:
                raise ValueError(f"its storage {key} reaches past its end")
            return _Storage(self.path, offset, member.file_size, dtype)

        with archive.open(members["data.pkl"]) as file:
            return load(file.read(), allowed, self.path, storage=storage)

    def _check_members(self, members: dict[str, zipfile.ZipInfo]) -> None:
        if "data.pkl" not in members or members["data.pkl"].file_size > MOST_PICKLE_BYTES:
            raise damaged(self.path, f"the archive at byte {self.offset} has no pickle, or one that is too large.")
        packed = [member.filename for member in members.values() if not _is_plain(member)]
        if packed:
            raise CheckpointError(
                "The checkpoint holds compressed or encrypted tensors.",
                where=str(self.path),
                why=f"{packed[0]} of the archive at byte {self.offset}; PyTorch writes them plain.",
                do="save the checkpoint again with torch.distributed.checkpoint.save.",
            )


def _is_plain(member: zipfile.ZipInfo) -> bool:
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


def _region(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> FileRegion:
    if not isinstance(storage, _Storage) or not isinstance(dtype, str):
        raise ValueError("a tensor without a storage")
    size = _dims(size)
    stride = _dims(stride)
    is_offset = type(offset) is int and 0 <= offset < 1 << 62
    if len(size) != len(stride) or not is_offset:
        raise ValueError(f"a tensor of size {size}, stride {stride} at {short(offset)}")
    itemsize = DTYPES[dtype].itemsize
    offset_bytes = offset * itemsize
    strides = tuple(step * itemsize for step in stride)
    region = FileRegion(storage.path, storage.offset + offset_bytes, size, DTYPES[dtype], strides)
    # All elements count, and not only the span: a stride of 0 would expand few bytes to a large array.
    num_bytes = max(region.span_bytes, math.prod(region.shape) * itemsize)
    if offset_bytes + num_bytes > storage.nbytes:
        raise ValueError(f"a tensor of size {size}, stride {stride} at {offset} in {storage.nbytes} bytes")
    return region


def _dims(numbers: Any) -> tuple[int, ...]:
    """Returns the sizes or strides of a tensor; raises `ValueError` if these are none."""
    if not isinstance(numbers, tuple | list) or len(numbers) > _MAX_DIMS:
        raise ValueError(f"a tensor of size or stride {short(numbers)}")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"a tensor of size or stride {short(numbers)}")
    return tuple(numbers)
