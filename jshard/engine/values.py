"""What the leaves of a call are: nnx objects, arrays, arrays with a gradient."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import ShapedArray

from jshard._types import PyTree

Leaf: TypeAlias = Any
"""A leaf of the user's arguments or results: an array, an nnx object, or any other value of Python."""

MethodResult: TypeAlias = Any
"""What the user's method returns; in an adapter of another kind of module, with what it changed."""

AnyArray: TypeAlias = jax.Array | np.ndarray
"""An array of JAX, traced or not, or of NumPy."""


def is_nnx(x: object) -> bool:
    """Returns whether an object travels with the module, in one graph, rather than as arrays."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def is_array(x: object) -> bool:
    """Returns whether a leaf of arguments or results is an array, traced or not."""
    return isinstance(x, (jax.Array, np.ndarray))


def raw(leaf: nnx.Variable | AnyArray) -> PyTree:
    """Returns the value in a variable; an array is its own value."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def with_value(leaf: nnx.Variable | AnyArray, value: PyTree) -> PyTree:
    """Returns a new variable of the same kind that holds a value; in place of an array, the value itself."""
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def has_gradient(x: AnyArray | jax.ShapeDtypeStruct | ShapedArray) -> bool:
    """Returns whether an array can be differentiated: real and complex floats of any size.

    Whether a policy casts it is another question: `jshard.plans.policies.is_real_float`.
    """
    return jnp.issubdtype(x.dtype, jnp.inexact)


def have_gradients(xs: Iterable[AnyArray | jax.ShapeDtypeStruct | ShapedArray]) -> list[bool]:
    """Returns for each array whether it can be differentiated."""
    return [has_gradient(x) for x in xs]


def are_identical(xs: Sequence[object], ys: Sequence[object]) -> bool:
    """Returns whether two lists consist of the same objects, which need not be comparable: traced arrays are not."""
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))


def type_text(x: AnyArray | jax.ShapeDtypeStruct) -> str:
    """Returns the dtype and shape of an array for a message: `float32[8, 16]`."""
    return f"{x.dtype}{list(x.shape)}"


def type_texts(xs: Iterable[AnyArray | jax.ShapeDtypeStruct]) -> list[str]:
    """Returns the dtypes and shapes of arrays for a message."""
    return [type_text(x) for x in xs]
