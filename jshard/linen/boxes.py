"""Parameters of a Linen model that are stored padded: boxes that read as the logical array.

A Linen parameter is an array in the user's own tree. A parameter with no divisible dim is held in a Flax box, like
`nn.Partitioned`: the model, plain Flax and all readers of the box see the logical array; trees are mapped over the
stored one, whose padding is zero and has no gradient.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from flax.core import meta
from numpy.lib.mixins import NDArrayOperatorsMixin

from jshard._types import PyTree
from jshard.plans.array_paths import key_texts
from jshard.plans.padding import OF_STORAGE, Padding
from jshard.plans.state_places import StatePlaces


class Padded(NDArrayOperatorsMixin, meta.AxisMetadata[PyTree]):
    """A parameter that is stored padded: read, indexed and computed with as the logical array."""

    def __init__(self, value: PyTree, padding: Padding) -> None:
        self.value = value
        self.padding = padding

    def unbox(self) -> jax.Array:
        """Returns the logical array."""
        return self.padding.cut(self.value)

    def replace_boxed(self, val: PyTree) -> "Padded":
        """Returns a box with another array, logical or padded."""
        return Padded(self.padding.pad(val), self.padding)

    def add_axis(self, index: int, params: dict[object, object]) -> "Padded":
        """Returns the box itself: the padded dim is counted from the end, and layers come first."""
        return self

    def remove_axis(self, index: int, params: dict[object, object]) -> "Padded":
        """Returns the box itself."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.padding.logical_shape(self.value.shape)

    def __jax_array__(self) -> jax.Array:
        return self.unbox()

    def __array__(self, dtype: jax.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.unbox(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> object:
        """Computes an operator, which `NDArrayOperatorsMixin` expresses by a function of numpy."""
        # Other methods, such as `np.add.reduce`, and `out=` have no counterpart among the functions of jnp.
        if method != "__call__" or kwargs:
            return NotImplemented
        operands = [x.unbox() if isinstance(x, Padded) else x for x in inputs]
        # By name: jnp has a function for each that an operator is expressed by.
        return getattr(jnp, ufunc.__name__)(*operands)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.unbox()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.unbox())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("value", "padding"):  # requested before they exist, e.g. by copy
            raise AttributeError(name)
        # Such as `sharding` and `delete`: the logical array exists only when it is read.
        source = self.value if name in OF_STORAGE else self.unbox()
        return getattr(source, name)

    def __repr__(self) -> str:
        # A tree may hold anything in place of the array, such as a sharding or None.
        dtype = getattr(self.value, "dtype", None)
        stored = getattr(self.value, "shape", None) or ()
        return f"Padded({dtype}{list(self.padding.logical_shape(stored))}, stored {list(stored)})"


# Its key in paths is that of Flax's own boxes, which `key_texts` leaves out: a path is the same without the box.
def _flatten_with_keys(box: Padded) -> tuple[tuple[tuple[object, PyTree]], Padding]:
    return ((jax.tree_util.GetAttrKey("value"), box.value),), box.padding


def _flatten(box: Padded) -> tuple[tuple[PyTree], Padding]:
    return (box.value,), box.padding


def _unflatten(padding: Padding, children: Iterable[PyTree]) -> Padded:
    (value,) = children
    return Padded(value, padding)


def _state_dict_of(box: Padded) -> object:
    """Returns the logical array: a file has no padding, so it can be read on another mesh."""
    return serialization.to_state_dict(box.unbox())


def _from_state_dict(box: Padded, state: PyTree) -> Padded:
    # Padded for the mesh of this box, which may be another than that of the file.
    return box.replace_boxed(serialization.from_state_dict(box.unbox(), state))


jax.tree_util.register_pytree_with_keys(Padded, _flatten_with_keys, _unflatten, _flatten)
serialization.register_serialization_state(Padded, _state_dict_of, _from_state_dict)


def is_padded(x: object) -> bool:
    """Returns whether an object is the box of an array that is stored padded."""
    return isinstance(x, Padded)


def padding_in(leaf: object) -> Padding | None:
    """Returns the padding of the array in a box, also in nested boxes; None if there is none."""
    while isinstance(leaf, meta.AxisMetadata) and not is_padded(leaf):
        leaf = getattr(leaf, "value", None)
    return leaf.padding if isinstance(leaf, Padded) else None


def boxed(tree: PyTree, places: StatePlaces) -> PyTree:
    """Returns a tree whose arrays are stored padded, in boxes, where their parameters are."""

    def boxed_leaf(path: tuple, x: object) -> object:
        if is_padded(x):
            return x
        padding = places.padding(key_texts(path), getattr(x, "shape", ()))
        # By path and shape, so that the moments of a parameter are boxed like it.
        return x if padding is None else Padded(padding.pad(x), padding)

    return jax.tree.map_with_path(boxed_leaf, tree, is_leaf=is_padded)


def unboxed(tree: PyTree) -> PyTree:
    """Returns a tree with logical arrays in place of the boxes."""
    return jax.tree.map(lambda x: x.unbox() if isinstance(x, Padded) else x, tree, is_leaf=is_padded)


def boxed_like(old: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree in the form of the tree that it replaces."""

    def boxed_leaf(before: object, x: object) -> object:
        return before.replace_boxed(x) if isinstance(before, Padded) else x

    return jax.tree.map(boxed_leaf, old, tree, is_leaf=is_padded)
