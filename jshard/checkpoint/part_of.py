"""A part of a checkpoint as a source of its own: the model alone, layer by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from jshard.checkpoint.boxes import CheckpointSource
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import Box, Source, StoredArray


def part_of(source: CheckpointSource, part: str, *, names: Collection[str] | None = None) -> Source:
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
    stored = {
        path.removeprefix(begin): path
        for path in source.leaves
        if path.startswith(begin) and "/rngs/" not in path and source.opened.leaves[path].key is None
    }
    if not stored:
        raise CheckpointError(
            "There are no arrays in that part of the checkpoint.",
            where=f"{source.path}: {part}",
            why=f"its parts are {', '.join(sorted({path.split('/')[0] for path in source.leaves}))}.",
            do=f"jshard ckpt inspect {source.path} --depth 1",
        )
    if names is None:
        return _Part(source, {name: (path, None) for name, path in stored.items()})
    found = {name: _find(name, stored, source) for name in names}
    return _Part(source, {name: place for name, place in found.items() if place is not None})


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


class _Part:
    """Some leaves of a checkpoint under other names."""

    def __init__(self, source: CheckpointSource, places: Mapping[str, tuple[str, int | None]]) -> None:
        self._source, self._places = source, places
        self.leaves: Mapping[str, StoredArray] = {name: self._leaf(*place) for name, place in places.items()}

    def _leaf(self, path: str, layer: int | None) -> StoredArray:
        leaf = self._source.leaves[path]
        return leaf if layer is None else StoredArray(leaf.shape[1:], leaf.dtype)

    def read(self, name: str, box: Box) -> np.ndarray:
        path, layer = self._places[name]
        if layer is None:
            return self._source.read(path, box)
        return self._source.read(path, (slice(layer, layer + 1), *box))[0]
