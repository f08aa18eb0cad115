"""The variables of a Linen module by path, and what a layout has to know of its parameters."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from flax.core import meta
from flax.linen.spmd import logical_to_mesh_axes

from jshard._types import PyTree
from jshard.errors import AnnotationError
from jshard.linen.boxes import padding_in
from jshard.plans.array_paths import key_texts
from jshard.plans.plan import Leaf
from jshard.plans.units import Path, dotted, is_key

PARAMS = "params"
"""The collection of the parameters."""


def flat(tree: Mapping[str, PyTree]) -> Iterable[tuple[Path, object]]:
    """Returns the variables in a collection, by path."""
    return traverse_util.flatten_dict(tree).items()


def nested(leaves: Iterable[tuple[Path, object]]) -> dict[str, object]:
    """Returns the collection that has these variables."""
    return traverse_util.unflatten_dict(dict(leaves))


def flat_params(tree: Mapping[str, PyTree]) -> list[tuple[Path, object]]:
    """Returns the arrays of the parameters in a collection, in their boxes, by path.

    A parameter may be a tuple or another pytree, as of a weight and its scale: its arrays are stored one by one.
    """
    return [(key_texts(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_box)]


def placeable(variables: Mapping[str, PyTree]) -> Iterator[tuple[Path, object]]:
    """Yields the parameters among variables, in their boxes, by path, without random keys, which no plan places."""
    for path, leaf in flat_params(variables.get(PARAMS, {})):
        if not is_key(raw_of(leaf)):
            yield path, leaf


def is_box(x: object) -> bool:
    """Returns whether a value is a box of Flax around an array."""
    return isinstance(x, meta.AxisMetadata)


def raw_of(leaf: object) -> Any:
    """Returns the array in a box; a leaf without one is its own value."""
    if not is_box(leaf):
        return leaf
    # Also of nested boxes, such as a `Padded` in an `nn.Partitioned`.
    (raw,) = jax.tree.leaves(leaf)
    return raw


def as_arrays(raw: PyTree) -> PyTree:
    """Returns the value of a variable, with arrays for numbers."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), raw)


def described_leaves(variables: Mapping[str, PyTree]) -> dict[Path, Leaf]:
    """Returns the descriptions of the parameters among variables, by path."""
    return {path: described(leaf, path) for path, leaf in placeable(variables)}


def described(leaf: object, path: Path) -> Leaf:
    """Returns the description of a parameter for a layout.

    Raises:
        AnnotationError: it is not an array.
    """
    # A box with two arrays, or a number of Python: neither has one shape to plan by.
    values = jax.tree.leaves(leaf)
    if len(values) != 1 or not hasattr(values[0], "shape"):
        raise AnnotationError(
            "A parameter of a Linen module is not an array.",
            where=f"{dotted(path)}: a {type(leaf).__name__}",
            why="arrays are sharded, also those in tuples, dicts and other pytrees; a box, such as nn.Partitioned,"
            " holds one.",
            do='self.param("scale", lambda key: jnp.ones(()))  # an array for a number',
        )
    (raw,) = values
    padding = padding_in(leaf)
    shape = tuple(raw.shape)
    if padding is not None:
        shape = padding.logical_shape(raw.shape)
    # The dtype as text: leaves are keys of layouts, and equal dtypes must be equal there.
    return Leaf(shape, jnp.dtype(raw.dtype).name, _spec_of(leaf))


def _spec_of(leaf: object) -> tuple[Any, ...]:
    """Returns what a box of the user's says of the dims of its array: an axis of the mesh, or a name, for each."""
    if isinstance(leaf, nn.LogicallyPartitioned):
        # As Flax resolves them: rules of the box first, then those of the context.
        rules = leaf.rules or nn.get_logical_axis_rules()
        if not rules:
            return leaf.names  # the placement's axis_rules apply
        return tuple(logical_to_mesh_axes(leaf.names, rules) or ())
    if isinstance(leaf, nn.Partitioned):
        return tuple(leaf.get_partition_spec())
    return ()
