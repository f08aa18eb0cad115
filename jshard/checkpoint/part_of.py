"""A part of a checkpoint as a source of its own: the model alone, layer by layer."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping

import numpy as np

from jshard._errors import printable
from jshard.checkpoint.boxes import CheckpointSource
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import Box, StoredArray


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
