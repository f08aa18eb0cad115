"""The values of Linen variables: arrays, some of them in boxes of Flax or of jshard."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen.spmd import logical_to_mesh_axes

from jshard._errors import AnnotationError
from jshard._linen.layout import Leaf
from jshard._linen.padded import padding_in
from jshard._nnx import Path, dotted

PARAMS = "params"
"""The collection of the parameters."""


def flat(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The variables in a collection, by path."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, child in tree.items():
        yield from flat(child, (*path, key))


def nested(leaves: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """The collection that has these variables."""
    found: dict[str, Any] = {}
    for path, leaf in leaves:
        tree = found
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
        tree[path[-1]] = leaf
    return found


def described(leaf: Any, path: Path) -> Leaf:
    """What a layout needs to know of a parameter."""
    raw, padding, spec = raw_of(leaf), padding_in(leaf), ()
    if not hasattr(raw, "shape"):
        raise AnnotationError(
            "A parameter of a Linen module is not an array.",
            where=f"{dotted(path)}: a {type(raw).__name__}",
            why="each parameter is sharded as one array.",
            do='make several: self.param("scale", ...), self.param("bias", ...)',
        )
    shape = tuple(raw.shape) if padding is None else padding.logical_shape(raw.shape)
    if isinstance(leaf, nn.LogicallyPartitioned):
        spec = tuple(logical_to_mesh_axes(leaf.names, leaf.rules) or ())
    elif isinstance(leaf, nn.Partitioned):
        spec = tuple(leaf.get_partition_spec())
    return Leaf(shape, jnp.dtype(raw.dtype).name, spec)


def raw_of(leaf: Any) -> Any:
    """The array in a box; a leaf without one is its own value."""
    if not isinstance(leaf, meta.AxisMetadata):
        return leaf
    (raw,) = jax.tree.leaves(leaf)
    return raw
