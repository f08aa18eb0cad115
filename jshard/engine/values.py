"""What the leaves of a call are: nnx objects, arrays, arrays with a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def is_nnx(x: Any) -> bool:
    """Returns whether an object travels with the module, in one graph, rather than as arrays."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def is_array(x: Any) -> bool:
    """Returns whether a leaf of arguments or results is an array, traced or not."""
    return isinstance(x, (jax.Array, np.ndarray))


def raw(leaf: Any) -> Any:
    """Returns the value in a variable; an array is its own value."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def with_value(leaf: Any, value: Any) -> Any:
    """Returns a new variable of the same kind that holds a value; in place of an array, the value itself."""
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def has_gradient(x: Any) -> bool:
    """Returns whether an array can be differentiated: real and complex floats of any size.

    Whether a policy casts it is another question: `jshard.plans.policies.is_real_float`.
    """
    return jnp.issubdtype(x.dtype, jnp.inexact)
