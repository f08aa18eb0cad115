"""Parameters whose stored array is padded with rows of zeros at the end of the sharded dim, so that it divides.

JAX has no unevenly sharded arrays. Such a variable holds the padded array, and all code that reads or writes the
variable sees the logical one. Because the padding is in the class, it survives everything that nnx does to a variable.
Raw arrays (`jax.tree.leaves`, `nnx.as_pure`) are padded; their padding is zero, and has no gradient. An optimizer that
maps over them averages over the padding too: `jshard.engine.padded` refuses it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jshard import _compat
from jshard.plans.class_swap import swapped_class
from jshard.plans.placement import Placement

V = TypeVar("V", bound=nnx.Variable)

_MISSING = object()
_padding_is_kept: contextvars.ContextVar[bool] = contextvars.ContextVar("padding_is_kept", default=False)
OF_STORAGE = frozenset(
    "dtype sharding committed addressable_shards global_shards is_fully_addressable is_fully_replicated is_deleted"
    " delete block_until_ready".split()
)


@dataclasses.dataclass(frozen=True)
class Padding:
    """The padded dim of an array."""

    from_end: int  # the dim, counted from the end: also correct after a scan has removed leading dims
    size: int  # logical
    stored: int
    ndim: int  # of the array

    @classmethod
    def of(cls, placement: Placement) -> "Padding | None":
        """The padding of a parameter; None if it is not padded."""
        if not placement.padding or placement.dim is None:
            return None
        size, ndim = placement.shape[placement.dim], len(placement.shape)
        return cls(placement.dim - ndim, size, size + placement.padding, ndim)

    def cut(self, x: Any) -> Any:
        """The logical array; an array that is already logical is returned unchanged."""
        shape = getattr(x, "shape", ())
        if not self._fits(shape, self.stored) or not hasattr(x, "ndim"):  # Flax prints a stand-in with a shape only
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self._resized(shape, self.size), x.dtype)
        return lax.slice_in_dim(x, 0, self.size, axis=x.ndim + self.from_end)

    def pad(self, x: Any) -> Any:
        """The stored array; an array that is already padded is returned unchanged."""
        if not self._fits(getattr(x, "shape", ()), self.size) or not hasattr(x, "ndim"):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self._resized(x.shape, self.stored), x.dtype)
        zeros = [(0, (d == x.ndim + self.from_end) * (self.stored - self.size)) for d in range(x.ndim)]
        return jnp.pad(x, zeros)

    def cleared(self, x: Any) -> Any:
        """A stored array, with zeros in its padding; an array without the padding is returned unchanged.

        So is one in host memory: each step writes it, and would have to copy it to the device and back.
        """
        if not isinstance(x, (jax.Array, np.ndarray)) or not self._fits(x.shape, self.stored) or _compat.on_host(x):
            return x
        return _cleared(x, x.ndim + self.from_end, self.size)

    def logical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that `cut` returns for an array of a shape."""
        return self._resized(shape, self.size) if self._fits(shape, self.stored) else shape

    def _resized(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        return tuple(size if d == len(shape) + self.from_end else n for d, n in enumerate(shape))

    def _fits(self, shape: tuple[int, ...], size: int) -> bool:
        return -self.from_end <= len(shape) <= self.ndim and shape[self.from_end] == size


class _LogicalReads:
    """Mixed into the variable's own class: reads, writes and shapes are those of the logical array."""

    __slots__ = ()
    _jshard_padding: Padding

    def get_value(self: Any, *, index: Any = _MISSING) -> Any:
        value = self._jshard_padding.cut(self.get_raw_value())
        return value if index is _MISSING or index is Ellipsis else value[index]

    def create_value(self: Any, value: Any) -> Any:
        return self._jshard_padding.pad(value)

    def set_value(self: Any, value: Any, *, index: Any = _MISSING) -> None:
        if index is not _MISSING and index is not Ellipsis:
            home = _compat.home_of(self)
            value = self.get_value().at[index].set(value if home is None else home.arriving(value))
        self.set_raw_value(jnp.asarray(value))

    def set_raw_value(self: Any, value: Any, **settings: Any) -> None:
        nnx.Variable.set_raw_value(self, self._stored(value), **settings)

    def update_from_state(self: Any, variable_state: nnx.Variable) -> None:
        same = padding_of(variable_state) == self._jshard_padding
        # a state of another mesh, or of a plain model, is padded like this one
        state = variable_state if same else logical(variable_state)
        stored = self._stored(state.get_raw_value())
        nnx.Variable.update_from_state(self, state)
        nnx.Variable.set_raw_value(self, stored, _unsafe_bypass_check=True)

    def _stored(self: Any, value: Any) -> Any:
        """A written value, with zeros for padding: a function of all raw arrays, such as `v + 1`, has changed them."""
        if value is self.get_raw_value() or _padding_is_kept.get():
            return value
        return self._jshard_padding.cleared(self._jshard_padding.pad(value))

    def __getattr__(self: Any, name: str) -> Any:
        if name in OF_STORAGE or name in object.__getattribute__(self, "_var_metadata"):
            return nnx.Variable.__getattr__(self, name)
        return getattr(self._jshard_padding.cut(self.get_raw_value()), name)

    @property
    def shape(self: Any) -> tuple[int, ...]:
        return self._jshard_padding.logical_shape(self.get_raw_value().shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def padding_of(variable: Any) -> Padding | None:
    """The padding of a variable's stored array; None if it has none."""
    return getattr(type(variable), "_jshard_padding", None)


def is_as_placed(variable: nnx.Variable, placement: Placement) -> bool:
    """Whether a variable can be split as a placement says; not if it has been replaced by one of another size.

    Inside a region a padded parameter is the logical array, in a variable without padding.
    """
    padding, shape, dim = padding_of(variable), variable.get_raw_value().shape, placement.dim_from_end
    if padding is not None:
        return padding == Padding.of(placement)
    if dim is None or placement.dim is None or len(shape) < -dim:
        return True
    sizes = placement.shape[placement.dim], placement.stored_shape[placement.dim]
    return shape[dim] in sizes if placement.padding else shape[dim] % placement.degree == 0


def logical_shape(variable: nnx.Variable) -> tuple[int, ...]:
    """The shape of the logical array of a variable."""
    padding, shape = padding_of(variable), variable.get_raw_value().shape
    return shape if padding is None else padding.logical_shape(shape)


def logical(variable: V) -> V:
    """A variable of the user's own class that holds the logical array."""
    padding = padding_of(variable)
    if padding is None:
        return variable
    found: V = variable.replace(padding.cut(variable.get_raw_value()))  # type: ignore[assignment]
    object.__setattr__(found, "__class__", unpadded(type(variable)))
    return found


def store(variable: nnx.Variable, padding: Padding | None, value: Any) -> None:
    """Makes a variable hold an array with this padding, or with none."""
    cls = unpadded(type(variable))
    object.__setattr__(variable, "__class__", cls if padding is None else _padded_class(cls, padding))
    _compat.write_past_home(variable, value)


def unpadded(cls: type) -> type:
    """The class of variables without padding."""
    return getattr(cls, "_jshard_unpadded", cls)


@functools.cache
def _padded_class(base: type[nnx.Variable], padding: Padding) -> type[nnx.Variable]:
    attributes = {
        "__slots__": (),  # Python swaps the class of an object only for one with the same slots
        "_jshard_unpadded": base,
        "_jshard_padding": padding,
    }
    return swapped_class(base, attributes, rebuild=(_padded_class, (base, padding)), mixins=(_LogicalReads,))


@contextlib.contextmanager
def padding_kept() -> Iterator[None]:
    """A context in which padded arrays are written as they are: they come from a program that keeps the zeros."""
    token = _padding_is_kept.set(True)
    try:
        yield
    finally:
        _padding_is_kept.reset(token)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cleared(x: jax.Array, dim: int, size: int) -> jax.Array:
    """An array with zeros from an index on: a mask, which each device applies to its part."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(index < size, x, jnp.zeros((), x.dtype))
