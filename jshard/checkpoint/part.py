"""A part of a checkpoint as a source, such as only the model, layer by layer."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import ArraySource, Box
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.matching import first_keys, stacks
from jshard.checkpoint.opened import Opened
from jshard.errors import printable


class ArrayPlace(NamedTuple):
    """Where an array of a part is in its source: a leaf, or a layer of one that is a stack of layers."""

    path: str
    layer: int | None = None


class Part(Opened):
    """Arrays of a source under other names; a layer of a stack may be one.

    Attributes:
        leaves: the arrays, by the names that they have here.
        left_over: what the source has and the part does not, one line each.
    """

    def __init__(self, source: ArraySource, places: Mapping[str, ArrayPlace], left_over: Collection[str] = ()) -> None:
        self._source = source
        self._places = places
        self.left_over = tuple(left_over)
        self.leaves = {name: self._leaf(place) for name, place in places.items()}

    def _leaf(self, place: ArrayPlace) -> StoredLeaf:
        leaf = dataclasses.replace(self._source.leaves[place.path], spec=None)
        if place.layer is None:
            return leaf
        return dataclasses.replace(leaf, shape=leaf.shape[1:])

    def values(self) -> dict[str, int | float | str]:
        """Returns no Python values: a part has arrays only."""
        return {}

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        path, layer = self._places[name]
        if layer is None:
            return self._source.read(path, box)
        in_stack = (slice(layer, layer + 1), *box)  # dim 0 of a stack is the layers
        return self._source.read(path, in_stack)[0]


def part_of(source: Opened, part: str, *, names: Collection[str] | None = None, preferred: str | None = None) -> Part:
    """Returns the arrays below a path; random keys and draw counts are left out.

    Args:
        source: the checkpoint.
        part: the path; "" for all.
        names: of the arrays, relative to the path; those that are not there are left out. By default all, as stored.
        preferred: another path: arrays below it are taken in place of those of the same names.
    """
    paths = _paths_below(source, part)
    if preferred is not None:
        paths |= _preferred_paths(source, preferred, paths)
    if not paths:
        names_there = sorted(first_keys(source.arrays))
        raise CheckpointError(
            "That part of the checkpoint has no arrays.",
            where=f"{source.path}: {part}",
            why=f"its parts are {', '.join(map(printable, names_there))}.",
            do=f"jshard ckpt inspect {source.path} --depth 1",
        )
    if names is None:
        return Part(source, {name: ArrayPlace(path) for name, path in paths.items()})

    places: dict[str, ArrayPlace] = {}
    for name in names:
        place = _place_of(name, paths, source.arrays)
        if place is not None:
            places[name] = place
    return Part(source, places, _left_over(paths.values(), places.values(), source.arrays))


def _paths_below(source: Opened, part: str) -> dict[str, str]:
    """Returns the paths of the arrays below a path, by their names relative to it."""
    # With the slash, "model" does not select "model_ema".
    prefix = f"{part.strip('/')}/" if part else ""
    paths = {}
    for path, leaf in source.arrays.items():
        # Modules of nnx have their random state, a key and a draw count for each stream, in an attribute `rngs`.
        is_random_state = "/rngs/" in path or leaf.key is not None
        if path.startswith(prefix) and not is_random_state:
            paths[path.removeprefix(prefix)] = path
    return paths


def _preferred_paths(source: Opened, preferred: str, paths: Collection[str]) -> dict[str, str]:
    """Returns the paths of the arrays below a path, all of which must have the name of one in `paths`."""
    preferred_paths = _paths_below(source, preferred)
    unknown = [path for name, path in preferred_paths.items() if name not in paths]
    if unknown or not preferred_paths:
        raise CheckpointError(
            "The arrays cannot be replaced by others of the checkpoint.",
            where=[f"{source.path}: {preferred}", *unknown],
            why="there are no arrays of that part, or they have names that no replaced array has.",
            do=f"jshard ckpt inspect {source.path} --depth 2",
        )
    return preferred_paths


def _place_of(name: str, paths: Mapping[str, str], leaves: Mapping[str, StoredLeaf]) -> ArrayPlace | None:
    """Finds an array as a leaf, or as a layer of a stack; None if there is none."""
    if name in paths:
        return ArrayPlace(paths[name])
    for stack, layer in stacks(name):
        # A model may have more layers than the stack: the array of such a one is missing.
        if stack in paths and layer < leaves[paths[stack]].shape[0]:
            return ArrayPlace(paths[stack], layer)
    return None


def _left_over(paths: Iterable[str], places: Iterable[ArrayPlace], leaves: Mapping[str, StoredLeaf]) -> list[str]:
    """Describes the leaves of which no array or not every layer is used, one line each."""
    used_layers: dict[str, set[int | None]] = collections.defaultdict(set)
    for place in places:
        used_layers[place.path].add(place.layer)

    lines = [f"{path}  {leaves[path].shape}" for path in paths if path not in used_layers]
    for path, layers in used_layers.items():
        if None in layers:
            continue  # the leaf itself is used
        unused = sorted(set(range(leaves[path].shape[0])) - layers)
        if unused:
            lines.append(f"{path}  {leaves[path].shape}: layers {', '.join(map(str, unused))}")
    return lines
