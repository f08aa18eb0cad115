"""Reads the pickles of PyTorch without PyTorch, and without running anything they name.

A pickle is a program that can call anything importable. Here names are only looked up in a table, which contains
nothing but records, tuples and strings. Any other name stops the reading.
"""

from __future__ import annotations

import io
import itertools
import pickle
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import damaged
from jshard.errors import FourPartError, printable

Allowed = Mapping[tuple[str, str], Any]
"""By module and name, what a pickle gets for a name: a class that stands in for PyTorch's, or a string."""

Unpickled: TypeAlias = Any
"""A value from a pickle: of any type, as anyone may have written it."""

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
    state: Unpickled

    def __new__(cls, *args: Unpickled) -> Record:
        """Keeps the arguments for the class."""
        record = super().__new__(cls)
        record.args = args
        record.state = {}
        return record

    def __setstate__(self, state: Unpickled) -> None:
        self.state = state

    def get(self, field: str) -> Unpickled:
        """Returns a field of the dataclass it stands for; None if there is no such field."""
        # A pickle may set anything as the state, see `__setstate__`.
        if not isinstance(self.state, dict):
            return None
        return self.state.get(field)


class Ordered(dict, metaclass=Sealed):
    """`collections.OrderedDict`; the module versions that PyTorch attaches to a state dict are dropped."""

    def __init__(self) -> None:  # its items are set afterwards, so that their keys are checked
        super().__init__()

    def __setstate__(self, state: Unpickled) -> None:
        pass


class NotAllowedError(Exception):
    """A name that no table contains."""


def sealed(call: Callable[..., object]) -> Sealed:
    """Makes a class that a pickle may call in place of a function: the call returns the function's result."""

    def new(cls: type, *args: Unpickled) -> object:
        return call(*args)

    return Sealed(call.__name__, (), {"__new__": new})


@sealed
def _size(dims: Unpickled = ()) -> tuple:
    """`torch.Size`: a tuple."""
    if len(dims) > MAX_DIMS:
        raise ValueError(f"a size of {len(dims)} dims")
    return tuple(dims)


@sealed
def _attribute(owner: object, name: object) -> str:
    """`getattr`, as early versions of Python 3.11 pickle an enum member; refuses anything else."""
    if owner is not MEMORY_FORMAT:
        raise NotAllowedError("builtins", "getattr")
    return str(name)


@sealed
def _encoded_bytes(text: object = "", codec: object = "latin1") -> bytes:
    """`_codecs.encode`, with which older protocols write bytes; only with that codec."""
    if not isinstance(text, str) or codec != "latin1":
        raise NotAllowedError("_codecs", "encode")
    return text.encode("latin1")


@sealed
def _no_bytes() -> bytes:
    """`bytes`, with which older protocols write empty bytes; takes no size, which would allocate memory."""
    return b""


@sealed
def MEMORY_FORMAT(value: object) -> object:
    """Stands in for the enum of memory formats, which nothing here needs."""
    return value


def records(module: str, *names: str) -> dict[tuple[str, str], Any]:
    """Makes a table with a record for each of these classes."""
    return {(module, name): Sealed.__new__(Sealed, name, (Record,), {}) for name in names}


PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Ordered,
    ("torch", "Size"): _size,
    **{("torch", name): name for name in DTYPES},
    ("_codecs", "encode"): _encoded_bytes,
    ("builtins", "getattr"): _attribute,
    ("builtins", "bytes"): _no_bytes,
    ("builtins", "set"): set,
    ("builtins", "complex"): complex,
    ("__builtin__", "getattr"): _attribute,
    ("__builtin__", "bytes"): _no_bytes,  # Python 2's name of the module, which older protocols write
    ("__builtin__", "set"): set,
    ("__builtin__", "complex"): complex,
    **records("torch", "device"),
}
"""The names in pickles of plain Python values and small PyTorch ones."""

_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
PATHS: dict[tuple[str, str], Any] = {
    **records("pathlib", *_PATH_CLASSES),
    **records("pathlib._local", *_PATH_CLASSES),  # Python 3.13
}
"""The names of paths."""


MOST_PICKLE_BYTES = 1 << 30
MAX_DIMS = 64


def short(value: object) -> str:
    """Returns a value of a pickle as a short text. `str` of a few nested tuples can be longer than any memory."""
    if isinstance(value, str):
        return printable(value[:200])
    try:
        return printable(reprlib.repr(value))
    except ValueError:  # an integer of thousands of digits
        return f"a large {type(value).__name__}"


def load(content: bytes, allowed: Allowed, path: Path, *, storage: Callable[..., object] | None = None) -> Unpickled:
    """Returns the value of a pickle, if every name in it is allowed; memory and time are in proportion to its size."""
    (value,), _ = load_each(content, 1, allowed, path, storage=storage)
    return value


def load_each(
    content: bytes, count: int, allowed: Allowed, path: Path, *, storage: Callable[..., object] | None = None
) -> tuple[list[Unpickled], int]:
    """Returns the values of so many pickles, one after the other, and where the last of them ends; see `load`."""
    file = io.BytesIO(content)
    values = []
    try:
        for _ in range(count):
            # A reader for each: what one pickle has memorized is unknown to the next.
            values.append(_PickleReader(file, len(content), allowed, storage).load())
        return values, file.tell()
    except FourPartError:
        raise
    except NotAllowedError as error:
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

    def __init__(
        self, file: io.BytesIO, num_bytes: int, allowed: Allowed, storage: Callable[..., object] | None
    ) -> None:
        super().__init__(file)
        # Without its checks of frames, which are most of the time. What a step reads may then be too short, and the
        # next step is that of an empty text, which there is not.
        self.read = file.read
        self.readline = file.readline
        self._allowed = allowed
        self._storage = storage
        self._work_left = _WORK_PER_BYTE * (num_bytes + 4096)

    def load(self) -> Unpickled:
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

    def find_class(self, module: str, name: str) -> object:
        """Looks up a name."""
        # Nothing is imported: Python's own `find_class` imports the module, which runs its code.
        if (module, name) not in self._allowed:
            raise NotAllowedError(module, name)
        return self._allowed[module, name]

    def persistent_load(self, pid: object) -> object:
        """Looks up the bytes of a tensor."""
        if self._storage is None or not isinstance(pid, tuple):
            raise pickle.UnpicklingError("an unexpected persistent object")
        self._spend(len(pid))
        return self._storage(*pid)

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise ValueError("it asks for more work than a pickle of its size can need")

    def _spend_on_call(self, args: object) -> None:
        """Counts the arguments of a call, and what they contain: a call may copy it."""
        if not isinstance(args, tuple):
            raise TypeError("a call with arguments that are not a tuple")
        work = len(args)
        for arg in args:
            if isinstance(arg, _COPIED):
                work += len(arg)
        self._spend(work)

    def _check_key(self, key: object) -> None:
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

    def _set_items(self, mapping: object, items: list[Unpickled]) -> None:
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
        mapping: dict[object, object] = {}
        self._set_items(mapping, self.pop_mark())
        self.append(mapping)

    def _load_additems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        # Python's own step calls the method `add` of any other object.
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
        # Of the calls in the tables, only this one hashes the elements of its argument.
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
        # Python's own step sets the attributes of any object, and so could change what the reader relies on.
        if not isinstance(target, Record | Ordered):
            raise ValueError(f"a state is set in a {type(target).__name__}")
        target.__setstate__(state)

    def _load_frame(self) -> None:
        self.read(8)  # its length; all of the content is in memory already

    def _load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        # The length is as stated, and may be of exabytes: `read` returns at most what there is.
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
