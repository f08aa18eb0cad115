"""Reads the pickles of a PyTorch checkpoint without PyTorch, and without running anything that they name.

A pickle is a program: it may call whatever can be imported. Here a name is looked up in a table and nowhere else, and
what the tables hold are records, tuples and texts. Any other name ends the reading.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import damaged
from jshard.errors import FourPartError

Allowed = Mapping[tuple[str, str], Any]

DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()},
    **{name: np.dtype(name) for name in "float16 float32 float64 complex64 complex128".split()},
    "bfloat16": np.dtype(jnp.bfloat16),
    "float8_e4m3fn": np.dtype(jnp.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(jnp.float8_e4m3fnuz),
    "float8_e5m2": np.dtype(jnp.float8_e5m2),
    "float8_e5m2fnuz": np.dtype(jnp.float8_e5m2fnuz),
    "float8_e8m0fnu": np.dtype(jnp.float8_e8m0fnu),
}
"""PyTorch's names of dtypes. A pickle gets the name, not the dtype: numpy's have a state that a pickle could set."""


class Sealed(type):
    """The kind of the classes that a pickle is given: it can make instances, and change nothing for the next pickle."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a pickle tried to set {cls.__name__}.{name}")


class Record(metaclass=Sealed):
    """Stands in for a class of PyTorch: what the pickle would have called it with, and its state."""

    args: tuple
    state: Any

    def __new__(cls, *args: Any) -> Record:
        """Keeps what the class would have been called with."""
        record = super().__new__(cls)
        record.args, record.state = args, {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """A field of the dataclass that it stands for; None if it has none of that name."""
        return self.state.get(field) if isinstance(self.state, dict) else None


class _Size(metaclass=Sealed):
    """`torch.Size`: a tuple."""

    def __new__(cls, dims: Any = ()) -> Any:
        return tuple(dims)


class _Encoding(metaclass=Sealed):
    """The enum of memory formats, which nothing here needs."""

    def __new__(cls, value: Any) -> Any:
        return value


class _Attribute(metaclass=Sealed):
    """`getattr`, as early versions of Python 3.11 pickle the member of an enum; it gets nothing from anything else."""

    def __new__(cls, owner: Any, name: Any) -> Any:
        if owner is not _Encoding:
            raise _NotAllowed("builtins", "getattr")
        return str(name)


class _EncodedBytes(metaclass=Sealed):
    """`_codecs.encode`, by which the older protocols write bytes; with that codec and no other."""

    def __new__(cls, text: Any = "", codec: Any = "latin1") -> Any:
        if not isinstance(text, str) or codec != "latin1":
            raise _NotAllowed("_codecs", "encode")
        return text.encode("latin1")


class _NoBytes(metaclass=Sealed):
    """`bytes`, by which the older protocols write none at all; a number would ask for memory."""

    def __new__(cls) -> Any:
        return b""


class _NotAllowed(Exception):
    """A name that is in no table."""


def records(module: str, *names: str) -> dict[tuple[str, str], Any]:
    """A table with a record for each of these classes."""
    return {(module, name): Sealed.__new__(Sealed, name, (Record,), {}) for name in names}


MEMORY_FORMAT = _Encoding
"""Stands in for the enum of memory formats."""

PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): _Size,
    **{("torch", name): name for name in DTYPES},
    ("_codecs", "encode"): _EncodedBytes,
    ("builtins", "getattr"): _Attribute,
    **{(module, "bytes"): _NoBytes for module in ("builtins", "__builtin__")},
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    **{(module, "complex"): complex for module in ("builtins", "__builtin__")},
    **records("torch", "device"),
}
"""What plain Python values and PyTorch's own small ones are pickled with."""


def load(file: IO[bytes], allowed: Allowed, path: Path, *, storage: Callable[..., Any] | None = None) -> Any:
    """What a pickle holds, if every name in it is allowed.

    Args:
        file: the pickle.
        allowed: what each module and name stands for.
        path: to tell in errors.
        storage: makes a persistent object of its key; None if there are none.

    Raises:
        CheckpointError: it names something else. Nothing of it has run.
        RunError: it is no pickle, or damaged.
    """
    try:
        return _Reader(file, allowed, storage).load()
    except FourPartError:
        raise
    except _NotAllowed as error:
        raise _refused(".".join(map(str, error.args)), path) from None
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(path, f"its pickle cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


class _Reader(pickle.Unpickler):
    """Looks names up in the table, and nowhere else."""

    def __init__(self, file: IO[bytes], allowed: Allowed, storage: Callable[..., Any] | None) -> None:
        super().__init__(file)
        self._allowed, self._storage = allowed, storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise _NotAllowed(module, name)
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None or not isinstance(pid, tuple):
            raise pickle.UnpicklingError("a persistent object where there are none")
        return self._storage(*pid)


def _refused(name: str, path: Path) -> CheckpointError:
    return CheckpointError(
        "The checkpoint was not read: its pickle names something that may run code.",
        where=str(path),
        why=f"{name} is not among the classes of a PyTorch checkpoint that are allowed here. Nothing of it has run.",
        do="do not load it with PyTorch, unless you trust who wrote it;\n"
        "a program that does can save its tensors alone, with torch.distributed.checkpoint or safetensors.",
    )
