"""The registry of other libraries' checkpoint formats: which format a path has, and how it is opened.

`docs/adding_a_format.md` adds a format, step by step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jshard._paths import expanded
from jshard.checkpoint.errors import CheckpointError, damaged, reason
from jshard.checkpoint.formats.dcp import DcpSource, is_dcp_folder
from jshard.checkpoint.formats.safetensors import SafetensorsSource, is_safetensors
from jshard.checkpoint.formats.source import ArraySource, Box, FormatSource, ReadableValue, bounds
from jshard.checkpoint.formats.torch_file import TorchSource, is_torch_file
from jshard.checkpoint.formats.zero import ZeroSource, is_zero_folder
from jshard.checkpoint.lookup import is_checkpoint
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.packed.layout import shape_of, slices_of
from jshard.errors import FourPartError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """A format of checkpoints.

    Attributes:
        name: unique among all formats; errors name it.
        detect: returns whether a path, a file or a folder, has this format. It looks at names, and opens little.
        open: opens such a path, without reading its arrays.
    """

    name: str
    detect: Callable[[Path], bool]
    open: Callable[[Path], FormatSource]


# In this order, as a folder may have several: safetensors beside the `.metadata` of DCP, or beside `pytorch_model.bin`.
BUILT_IN = (
    CheckpointFormat(name="dcp", detect=is_dcp_folder, open=DcpSource),
    CheckpointFormat(name="safetensors", detect=is_safetensors, open=SafetensorsSource),
    CheckpointFormat(name="zero", detect=is_zero_folder, open=ZeroSource),
    CheckpointFormat(name="torch", detect=is_torch_file, open=TorchSource),
)

REGISTERED: dict[str, CheckpointFormat] = {}
"""The formats of users, by name."""


def register_format(
    *, name: str, detect: Callable[[Path], bool], open: Callable[[Path], ArraySource], replace: bool = False
) -> None:
    """Registers a format of checkpoints, so that `restore`, `--init-from` and `jshard ckpt` read it.

    Each process of a run registers it, when it imports the module that defines it. Registered formats are tried before
    those of jshard, so a dialect of one of these can be read by other code. Checkpoints that jshard or Orbax wrote are
    never offered to them.

    Args:
        name: a name for errors, unlike that of any other format.
        detect: returns whether a path, a file or a folder, has this format.
        open: opens such a path, such as a class that takes it. The result has `leaves`, a mapping from names to
            `jshard.checkpoint.formats.stored_array(shape, dtype)`, and `read(name, box)`, which returns a part of an
            array: see `jshard.checkpoint.formats.ArraySource`. Only what a process needs is read, by several threads.
            An `OSError` is reported as damage, a `CheckpointError` as it is, and others as a fault of the format.
        replace: whether a registered format of this name is replaced, as by a cell of a notebook that runs again.

    Raises:
        CheckpointError: there is a format of this name.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import jshard as js
        >>> from jshard.checkpoint.formats import stored_array
        >>> class NpyFile:
        ...     def __init__(self, path):
        ...         self._array = np.load(path, mmap_mode="r")
        ...         self.leaves = {"kernel": stored_array(self._array.shape, self._array.dtype)}
        ...
        ...     def read(self, name, box):
        ...         return self._array[box]
        >>> def is_npy_file(path):
        ...     return path.suffix == ".npy"
        >>> js.checkpoint.register_format(name="npy file", detect=is_npy_file, open=NpyFile)
        >>> np.save("kernel.npy", np.ones((2, 3), np.float32))
        >>> js.checkpoint.restore("kernel.npy", like={"kernel": jnp.zeros((2, 3))})["kernel"].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    built_in_names = [built_in.name for built_in in BUILT_IN]
    is_built_in = name in built_in_names
    if is_built_in or (name in REGISTERED and not replace):
        names = [*built_in_names, *REGISTERED]
        do = f'register_format(name="my {name}", ...)'
        if not is_built_in:
            do += "\nor, if this is the same format again: register_format(..., replace=True)"
        raise CheckpointError(
            "There is a checkpoint format of this name.",
            where=f"name={name!r}",
            why=f"registered formats: {', '.join(names)}.",
            do=do,
        )
    # Both are wrapped: code of a user may raise anything, and its error would not name the format.
    REGISTERED[name] = CheckpointFormat(
        name=name,
        detect=functools.partial(_detects, name, detect),
        open=functools.partial(CheckedSource, name, open),
    )


def foreign_source(path: str | Path) -> FormatSource | None:
    """Opens a checkpoint of another library.

    Returns None if the path has no checkpoint of a known format. Raises `CheckpointError` if it cannot be read or its
    pickle names something that is not allowed, and `RunError` if it is damaged.
    """
    path = expanded(path)
    registered = _registered_format(path)
    # First those of users: one may read a dialect of a format below.
    if registered is not None:
        return registered.open(path)
    for built_in in BUILT_IN:
        if built_in.detect(path):
            return built_in.open(path)
    return None


def _registered_format(path: Path) -> CheckpointFormat | None:
    """Returns the format of a user that a path has; None if it has none. Raises if it has several."""
    # A `detect` that is too broad must not take over the checkpoints of the run itself.
    if not REGISTERED or is_checkpoint(path):
        return None
    detected = [registered for registered in REGISTERED.values() if registered.detect(path)]
    if len(detected) > 1:
        names = " and ".join(repr(registered.name) for registered in detected)
        raise CheckpointError(
            "Several checkpoint formats detect this path.",
            where=str(path),
            why=f"{names} are registered, and nothing says which of them can read it.",
            do="let `detect` of all but one return False, such as by a file that only this format has.",
        )
    return detected[0] if detected else None


def _detects(name: str, detect: Callable[[Path], bool], path: Path) -> bool:
    with _named_faults(name, "detect", path):
        return bool(detect(path))


class CheckedSource:
    """A checkpoint of a registered format: what is wrong in the format becomes an error that names it.

    The readers trust a source: an array of another dtype would be cast without a warning, and one of another shape
    would fail in JAX, in a thread, with no name of a leaf.

    Attributes:
        leaves: every array by its name.
        values: none; a number can be an array of shape ().
        notes: none.
    """

    values: Mapping[str, ReadableValue] = types.MappingProxyType({})
    notes: Sequence[str] = ()

    def __init__(self, format_name: str, open_source: Callable[[Path], ArraySource], path: Path) -> None:
        self._format_name = format_name
        self._path = path
        with _named_faults(format_name, "open", path):
            self._source = open_source(path)
            # A copy: what is checked here must not change, and `leaves` may be computed in each access.
            self.leaves: Mapping[str, StoredLeaf] = dict(self._source.leaves)
        unknown = []
        for name, leaf in self.leaves.items():
            # Whoever wrote the format may have put anything there.
            if not isinstance(leaf, StoredLeaf):
                unknown.append(f"{name}  {type(leaf).__name__}")
            elif not _has_numbers(leaf):
                unknown.append(f"{name}  {leaf.dtype}")
        if unknown:
            raise CheckpointError(
                f"The checkpoint format {format_name!r} does not describe its arrays.",
                where=[str(path), *unknown],
                why="`leaves` must map each name to the shape and dtype of an array of numbers.",
                do="from jshard.checkpoint.formats import stored_array\n"
                "self.leaves[name] = stored_array(array.shape, array.dtype)\n"
                "or, if it is text or another object: leave it out.",
            )

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of an array, as a new array; raises `CheckpointError` if it is another than described."""
        leaf = self.leaves[name]
        described = f"{name}  {leaf.shape} {leaf.dtype}"
        limits = bounds(box, leaf.shape)
        shape = shape_of(limits)
        # As numbers: jax passes `slice(None)` for a whole dim.
        box = slices_of(limits)
        with _named_faults(self._format_name, "read", self._path, described):
            array = self._source.read(name, box)
        is_array = isinstance(array, np.ndarray | np.generic)  # NumPy returns a scalar for `array[()]`
        if not is_array or array.shape != shape or array.dtype.name != leaf.dtype:
            actual = f"{array.shape} {array.dtype}" if is_array else f"a {type(array).__name__}"
            ranges = ", ".join(f"{start}:{stop}" for start, stop in limits)
            raise CheckpointError(
                f"The checkpoint format {self._format_name!r} does not read what it describes.",
                where=[str(self._path), described],
                why=f"read({name!r}, [{ranges}]) returned {actual}, not {shape} {leaf.dtype}.",
                do="return array[box], in the dtype that `leaves` has for it.",
            )
        if array.base is None and isinstance(array, np.ndarray) and array.dtype.isnative:
            return array
        # A view of a mapped file would change with it: jax may use the memory as it is. And jax refuses the other byte
        # order, which the name of a dtype does not have.
        return np.array(array, np.dtype(leaf.dtype))


def _has_numbers(leaf: StoredLeaf) -> bool:
    """Returns whether a leaf is an array of numbers: no texts, objects, records or dates."""
    if not leaf.is_array:
        return False
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:  # NumPy does not know the names of its own texts and records
        return False
    return dtype.kind not in "OSUmM"


@contextlib.contextmanager
def _named_faults(format_name: str, function: str, path: Path, *leaf: str) -> Iterator[None]:
    """Raises what a function of a registered format raises as an error that names both, and the leaf it reads."""
    where = [str(path), *leaf]
    try:
        yield
    except FourPartError:  # the format's author has said what is wrong
        raise
    except OSError as error:
        files = [] if error.filename in (None, str(path)) else [str(error.filename)]
        raise damaged(path, [*leaf, *files], reason(error)) from error
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint format {format_name!r} failed.",
            where=where,
            why=f"its `{function}` raised {type(error).__name__}: {error}",
            do="correct it, or copy the checkpoint again if it is damaged.",
        ) from error
