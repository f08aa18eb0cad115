"""A checkpoint that Orbax wrote, read box by box: for tools that look at more than fits into memory.

Orbax reads whole leaves, or the shards of devices. The library below it, TensorStore, reads any box of an array.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jshard._errors import printable
from jshard.checkpoint.failures import reason
from jshard.checkpoint.formats.source import Box, StoredArray, bounds
from jshard.checkpoint.opened import OrbaxCheckpoint, unreadable
from jshard.checkpoint.seal import StoredLeaf
from jshard.checkpoint.storage import DESCRIPTION

_BOX_BYTES = 64 << 20


class CheckpointSource:
    """What jshard or plain Orbax wrote, as a `Source`.

    Args:
        path: the folder of a checkpoint.

    Attributes:
        path: likewise.
        opened: the checkpoint, with its seal and its leaves.
        leaves: its arrays by path; a random key is its numbers.

    Raises:
        CheckpointError: there is no checkpoint, or a newer jshard wrote it.
        RunError: what describes it is damaged.

    Example:
        >>> source = CheckpointSource(Path("run/100"))
        >>> source.read("model/tokens/embedding", (slice(0, 8), slice(None)))
    """

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, OrbaxCheckpoint(path)
        self.leaves: Mapping[str, StoredArray] = {
            name: StoredArray(leaf.shape, jnp.dtype(leaf.dtype))
            for name, leaf in self.opened.leaves.items()
            if leaf.is_array
        }
        self._layout = _layout(path)
        self._arrays = functools.lru_cache(maxsize=64)(_open)

    @property
    def seal(self) -> Any:
        """See `opened`."""
        return self.opened.seal

    def values(self) -> dict[str, Any]:
        """The leaves that are values of Python.

        Raises:
            RunError: they cannot be read.
        """
        wanted = {name: like(leaf) for name, leaf in self.opened.leaves.items() if not leaf.is_array}
        return self.opened.read(wanted) if wanted else {}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, as a new array; threads may call it at the same time.

        Raises:
            RunError: it is missing, or cannot be read.
        """
        leaf = self.leaves[name]
        if 0 in leaf.shape:
            return np.zeros(tuple(stop - start for start, stop in bounds(box, leaf.shape)), leaf.dtype)
        array = self._array(name)
        if array is None:
            return self.opened.read({name: like(self.opened.leaves[name])})[name][box]
        try:
            return array[box].read().result() if box else array.read().result()
        except Exception as error:
            raise unreadable(self.path, f"{printable(name)}: {reason(error)}") from error

    def boxes(self, name: str, budget_bytes: int = _BOX_BYTES) -> Iterator[Box]:
        """Boxes that make up an array, each of whole chunks and of at most so many bytes, unless a chunk has more.

        Raises:
            RunError: it is missing, or cannot be read.
        """
        leaf, array = self.leaves[name], self._array(name)
        chunk = leaf.shape if array is None or not leaf.shape else array.chunk_layout.read_chunk.shape
        return cut(leaf.shape, leaf.dtype.itemsize, tuple(max(1, size) for size in chunk), budget_bytes)

    def folder(self, name: str) -> str | None:
        """Where in the checkpoint the files of an array lie; None if they hold others too."""
        if self._layout is None or self._layout[2]:
            return None
        return (self._layout[0] / _folder_name(self.opened.stored_name(name))).relative_to(self.path).as_posix()

    def _array(self, name: str) -> Any:
        """An array that is opened; None where only Orbax can tell how it is stored, or nothing is."""
        if self._layout is None or 0 in self.leaves[name].shape:
            return None
        try:
            array = self._arrays(*self._layout, _folder_name(self.opened.stored_name(name)))
        except Exception as error:
            if self.seal is None:  # keys with slashes lie elsewhere: let Orbax look, or tell
                return None
            raise unreadable(self.path, f"{printable(name)}: {reason(error)}") from error
        if tuple(array.shape) != self.leaves[name].shape:
            why = f"{printable(name)}: its shape is {tuple(array.shape)}; the checkpoint says {self.leaves[name].shape}"
            raise unreadable(self.path, why)
        return array


def like(leaf: StoredLeaf) -> Any:
    """What to ask `OrbaxCheckpoint.read` for, to get a leaf on the host."""
    return (
        np.empty(leaf.shape, jnp.dtype(leaf.dtype)) if leaf.is_array else {"int": 0, "float": 0.0}.get(leaf.dtype, "")
    )


def cut(shape: Sequence[int], itemsize: int, chunk: Sequence[int], budget_bytes: int) -> Iterator[Box]:
    """Cuts an array into boxes of whole chunks: the first dim as far as it goes, then the next.

    Args:
        shape: of the array.
        itemsize: bytes of an element.
        chunk: the boxes in which it is stored.
        budget_bytes: the most that a box should have.
    """
    if math.prod(shape) * itemsize <= max(budget_bytes, itemsize):
        yield tuple(slice(0, size) for size in shape)
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    step = chunk[0] * max(1, budget_bytes // (chunk[0] * row_bytes))
    for start in range(0, shape[0], step):
        rows = min(step, shape[0] - start)
        for rest in cut(shape[1:], itemsize * rows, chunk[1:], budget_bytes):
            yield slice(start, start + rows), *rest


def _layout(path: Path) -> tuple[Path, str, bool] | None:
    """Folder and form of the arrays, and whether they share files; None if there are several folders of them."""
    found = [file for file in (path / DESCRIPTION, *sorted(path.glob(f"*/{DESCRIPTION}"))) if file.is_file()]
    if len(found) != 1 or found[0].parent.name not in ("state", "default", path.name):
        return None
    try:
        described = json.loads(found[0].read_bytes())
    except (OSError, ValueError):
        described = None
    if not isinstance(described, dict):  # whoever reads it is told by Orbax
        return None
    return found[0].parent, "zarr3" if described.get("use_zarr3") else "zarr", bool(described.get("use_ocdbt"))


def _open(folder: Path, driver: str, is_shared: bool, name: str) -> Any:
    import tensorstore  # slow to import; Orbax brings it

    place: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    if is_shared:
        place = {"driver": "ocdbt", "base": place, "path": f"{name}/"}
    else:
        place["path"] += f"{name}/"
    # A chunk that is missing is an error, and not zeros.
    spec = {"driver": driver, "kvstore": place, "fill_missing_data_reads": False}
    return tensorstore.open(spec, open=True, read=True).result()


def _folder_name(name: str) -> str:
    return name.replace("/", ".")
