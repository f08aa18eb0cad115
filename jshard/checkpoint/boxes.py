"""A checkpoint that Orbax wrote, read box by box: for tools that look at more than fits into memory.

Orbax reads whole leaves, or the shards of devices. The library below it, TensorStore, reads any box of an array.
"""

from __future__ import annotations

import collections
import functools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.errors import CheckpointError, reason
from jshard.checkpoint.formats.source import Box, StoredArray, bounds
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.opened import OrbaxCheckpoint, unreadable
from jshard.checkpoint.storage import DESCRIPTION
from jshard.errors import printable

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


# A part of a checkpoint as a source of its own: the model alone, layer by layer.


def part_of(source: CheckpointSource, part: str, *, names: Collection[str] | None = None) -> Part:
    """The arrays below a path, without it; random keys and counts of draws are left out.

    Args:
        source: a checkpoint.
        part: the path, such as "model"; empty for all.
        names: those that are wanted, layer by layer: `blocks/3/mlp/kernel` is then found in a stack
            `blocks/mlp/kernel`, too. Those that are stored nowhere are left out. All by default, as they are stored.

    Raises:
        CheckpointError: there is nothing below it.
    """
    begin = f"{part.strip('/')}/" if part else ""
    stored: dict[str, str] = {
        path.removeprefix(begin): path
        for path in source.leaves
        if path.startswith(begin) and "/rngs/" not in path and source.opened.leaves[path].key is None
    }
    if not stored:
        raise CheckpointError(
            "There are no arrays in that part of the checkpoint.",
            where=f"{source.path}: {part}",
            why=f"its parts are {', '.join(sorted({printable(path.split('/')[0]) for path in source.leaves}))}.",
            do=f"jshard ckpt inspect {source.path} --depth 1",
        )
    if names is None:
        return Part(source, {name: (path, None) for name, path in stored.items()}, ())
    found = {name: _find(name, stored, source) for name in names}
    places = {name: place for name, place in found.items() if place is not None}
    return Part(source, places, _left_over(stored.values(), places.values(), source))


def _find(name: str, stored: Mapping[str, str], source: CheckpointSource) -> tuple[str, int | None] | None:
    """The stored path of a leaf, and of one layer of a stack its number."""
    if name in stored:
        return stored[name], None
    keys = name.split("/")
    for place, key in enumerate(keys):
        stack = "/".join(keys[:place] + keys[place + 1 :])
        if key.isdecimal() and stack in stored and int(key) < source.leaves[stored[stack]].shape[0]:
            return stored[stack], int(key)
    return None


def _left_over(
    stored: Collection[str], used: Collection[tuple[str, int | None]], source: CheckpointSource
) -> list[str]:
    """Stored leaves, and layers of them, that nobody wants, a line each."""
    layers = collections.defaultdict(set)
    for path, layer in used:
        layers[path].add(layer)
    left = [f"{path}  {source.leaves[path].shape}" for path in stored if path not in layers]
    for path, found in layers.items():
        if None not in found and (gone := sorted(set(range(source.leaves[path].shape[0])) - found)):
            left.append(f"{path}  {source.leaves[path].shape}: layers {', '.join(map(str, gone))}")
    return left


class Part:
    """Some leaves of a checkpoint under other names: a `Source`.

    Attributes:
        leaves: see `Source`.
        left_over: leaves of that part, and layers of stacks, that are not among them, a line each.
    """

    def __init__(
        self, source: CheckpointSource, places: Mapping[str, tuple[str, int | None]], left_over: Collection[str]
    ) -> None:
        self._source, self._places, self.left_over = source, places, tuple(left_over)
        self.leaves: Mapping[str, StoredArray] = {name: self._leaf(*place) for name, place in places.items()}

    def _leaf(self, path: str, layer: int | None) -> StoredArray:
        leaf = self._source.leaves[path]
        return leaf if layer is None else StoredArray(leaf.shape[1:], leaf.dtype)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Source.read`."""
        path, layer = self._places[name]
        if layer is None:
            return self._source.read(path, box)
        return self._source.read(path, (slice(layer, layer + 1), *box))[0]
