"""The box of a Linen parameter that is stored padded: in a `TrainState`, in gradients, in optimizer state.

A Linen parameter is an array in the user's own tree. One that no dim divides is there in a box of Flax, as that of
`nn.Partitioned` is: the model, plain Flax and whoever reads the box see the logical array; trees are mapped over the
stored one, whose padding is zero and has no gradient.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from flax.core import meta
from numpy.lib.mixins import NDArrayOperatorsMixin

from jshard.plans.memories import StatePlaces, key_texts
from jshard.plans.padding import OF_STORAGE, Padding

_VALUE = jax.tree_util.GetAttrKey("value")


@jax.tree_util.register_pytree_with_keys_class
class Padded(NDArrayOperatorsMixin, meta.AxisMetadata[Any]):
    """A parameter that is stored padded: read, indexed and computed with as the logical array.

    Args:
        value: the stored array.
        padding: what of it is padding.
    """

    def __init__(self, value: Any, padding: Padding) -> None:
        self.value, self.padding = value, padding

    def unbox(self) -> Any:
        """The logical array."""
        return self.padding.cut(self.value)

    def replace_boxed(self, val: Any) -> "Padded":
        """A box of another array, logical or padded."""
        return Padded(self.padding.pad(val), self.padding)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Padded":
        """The same: the padded dim is counted from the end, and layers come first."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Padded":
        """The same."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.padding.logical_shape(self.value.shape)

    def __jax_array__(self) -> jax.Array:
        return self.unbox()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.unbox(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """What operators come to."""
        if method != "__call__" or kwargs:
            return NotImplemented
        return getattr(jnp, ufunc.__name__)(*[x.unbox() if isinstance(x, Padded) else x for x in inputs])

    def __getitem__(self, index: Any) -> Any:
        return self.unbox()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbox())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("value", "padding"):  # asked for before they are there, as by copy
            raise AttributeError(name)
        return getattr(self.value if name in OF_STORAGE else self.unbox(), name)

    def __repr__(self) -> str:
        dtype, stored = (getattr(self.value, name, None) for name in ("dtype", "shape"))
        return f"Padded({dtype}{list(self.padding.logical_shape(stored or ()))}, stored {list(stored or ())})"

    def tree_flatten_with_keys(self) -> tuple[tuple, Padding]:
        """For jax."""
        return ((_VALUE, self.value),), self.padding

    def tree_flatten(self) -> tuple[tuple, Padding]:
        """For jax."""
        return (self.value,), self.padding

    @classmethod
    def tree_unflatten(cls, padding: Padding, children: tuple) -> "Padded":
        """For jax."""
        return cls(children[0], padding)


serialization.register_serialization_state(
    Padded,
    lambda box: serialization.to_state_dict(box.unbox()),
    lambda box, state: box.replace_boxed(serialization.from_state_dict(box.unbox(), state)),
)


def is_padded(x: Any) -> bool:
    """Whether something is the box of an array that is stored padded."""
    return isinstance(x, Padded)


def padding_in(leaf: Any) -> Padding | None:
    """The padding of the array in a box, which may be in another one; None if there is none."""
    while isinstance(leaf, meta.AxisMetadata) and not is_padded(leaf):
        leaf = getattr(leaf, "value", None)
    return leaf.padding if isinstance(leaf, Padded) else None


def boxed(tree: Any, places: StatePlaces) -> Any:
    """A tree whose arrays are stored padded, in their boxes, where their parameters are."""

    def one(path: tuple, x: Any) -> Any:
        padding = None if is_padded(x) else places.padding(key_texts(path), getattr(x, "shape", ()))
        return x if padding is None else Padded(padding.pad(x), padding)

    return jax.tree.map_with_path(one, tree, is_leaf=is_padded)


def unboxed(tree: Any) -> Any:
    """A tree with logical arrays for the boxes."""
    return jax.tree.map(lambda x: x.unbox() if isinstance(x, Padded) else x, tree, is_leaf=is_padded)


def boxed_like(old: Any, tree: Any) -> Any:
    """A tree in the form of the one that it replaces."""
    one = lambda before, x: before.replace_boxed(x) if isinstance(before, Padded) else x
    return jax.tree.map(one, old, tree, is_leaf=is_padded)
