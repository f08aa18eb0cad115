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
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jshard import _compat
from jshard.plans.class_swap import swapped_class
from jshard.plans.numeric import Value
from jshard.plans.placement import Placement

V = TypeVar("V", bound=nnx.Variable)

PaddedVariable: TypeAlias = Any
"""A variable of a class that `_padded_class` made: an `nnx.Variable` with `_LogicalReads`."""

_MISSING = object()
_padding_is_kept: contextvars.ContextVar[bool] = contextvars.ContextVar("padding_is_kept", default=False)
# Attributes of an array that belong to the stored one: the logical array exists only when it is read.
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
        """Returns the padding of a parameter; None if it is not padded."""
        if not placement.padding or placement.dim is None:
            return None
        size = placement.shape[placement.dim]
        ndim = len(placement.shape)
        return cls(from_end=placement.dim - ndim, size=size, stored=size + placement.padding, ndim=ndim)

    def cut(self, x: Value) -> Value:
        """Returns the logical array; an array that is already logical is returned unchanged."""
        shape = getattr(x, "shape", ())
        if not self._fits(shape, self.stored) or not hasattr(x, "ndim"):  # Flax prints a stand-in with a shape only
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self._resized(shape, self.size), x.dtype)
        return lax.slice_in_dim(x, 0, self.size, axis=x.ndim + self.from_end)

    def pad(self, x: Value) -> Value:
        """Returns the stored array; an array that is already padded is returned unchanged."""
        if not self._fits(getattr(x, "shape", ()), self.size) or not hasattr(x, "ndim"):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self._resized(x.shape, self.stored), x.dtype)
        widths = [(0, 0)] * x.ndim
        widths[self.from_end] = (0, self.stored - self.size)
        return jnp.pad(x, widths)

    def cleared(self, x: Value) -> Value:
        """Returns a stored array, with zeros in its padding; an array without the padding is returned unchanged.

        So is one in host memory: each step writes it, and would have to copy it to the device and back.
        """
        if not isinstance(x, (jax.Array, np.ndarray)) or not self._fits(x.shape, self.stored):
            return x
        if _compat.on_host(x):
            return x
        return _cleared(x, x.ndim + self.from_end, self.size)

    def logical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that `cut` returns for an array of a shape."""
        if not self._fits(shape, self.stored):
            return shape
        return self._resized(shape, self.size)

    def _resized(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Returns a shape with another size of the padded dim."""
        resized = list(shape)
        resized[self.from_end] = size
        return tuple(resized)

    def _fits(self, shape: tuple[int, ...], size: int) -> bool:
        """Returns whether an array has the padded dim, in that size; leading dims may be missing, in a loop."""
        has_dim = -self.from_end <= len(shape) <= self.ndim
        return has_dim and shape[self.from_end] == size


class _LogicalReads:
    """Mixed into the variable's own class: reads, writes and shapes are those of the logical array."""

    __slots__ = ()
    _jshard_padding: Padding

    def get_value(self: PaddedVariable, *, index: object = _MISSING) -> Value:
        value = self._jshard_padding.cut(self.get_raw_value())
        if index is _MISSING or index is Ellipsis:
            return value
        return value[index]

    def create_value(self: PaddedVariable, value: Value) -> Value:
        return self._jshard_padding.pad(value)

    def set_value(self: PaddedVariable, value: Value, *, index: object = _MISSING) -> None:
        if index is not _MISSING and index is not Ellipsis:
            home = _compat.home_of(self)
            if home is not None:
                value = home.arriving(value)
            # On the logical array: an index from the end must not count the padding.
            value = self.get_value().at[index].set(value)
        self.set_raw_value(jnp.asarray(value))

    def set_raw_value(self: PaddedVariable, value: Value, **settings: Any) -> None:
        nnx.Variable.set_raw_value(self, self._stored(value), **settings)

    def update_from_state(self: PaddedVariable, variable_state: nnx.Variable) -> None:
        state = variable_state
        # A state of the same padding is taken as it is stored.
        if padding_of(state) != self._jshard_padding:  # of another mesh, or of a plain model: padded like this one
            state = logical(state)
        stored = self._stored(state.get_raw_value())
        nnx.Variable.update_from_state(self, state)  # also its metadata; the value that it sets may lack the padding
        _compat.write_unchecked(self, stored)

    def _stored(self: PaddedVariable, value: Value) -> Value:
        """Returns a written value, with zeros for padding.

        A function of all raw arrays, such as `v + 1`, has changed them.
        """
        # The value that the variable holds already is padded with zeros.
        if value is self.get_raw_value() or _padding_is_kept.get():
            return value
        return self._jshard_padding.cleared(self._jshard_padding.pad(value))

    def __getattr__(self: PaddedVariable, name: str) -> Value:
        # Called for what the class lacks: metadata, and attributes of the value, most of which are the logical one's.
        if name in OF_STORAGE or _compat.has_metadata(self, name):
            return nnx.Variable.__getattr__(self, name)
        return getattr(self._jshard_padding.cut(self.get_raw_value()), name)

    @property
    def shape(self: PaddedVariable) -> tuple[int, ...]:
        return self._jshard_padding.logical_shape(self.get_raw_value().shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def padding_of(variable: object) -> Padding | None:
    """Returns the padding of a variable's stored array; None if it has none."""
    return getattr(type(variable), "_jshard_padding", None)


def is_as_placed(variable: nnx.Variable, placement: Placement) -> bool:
    """Returns whether a variable can be split as a placement says; not if it was replaced by one of another size.

    Inside a region a padded parameter is the logical array, in a variable without padding.
    """
    padding = padding_of(variable)
    if padding is not None:
        return padding == Padding.of(placement)
    shape = variable.get_raw_value().shape
    dim = placement.dim_from_end
    if dim is None or len(shape) < -dim:
        return True  # nothing is split
    if placement.padding:
        return shape[dim] in (placement.shape[dim], placement.stored_shape[dim])
    return shape[dim] % placement.degree == 0


def logical_shape(variable: nnx.Variable) -> tuple[int, ...]:
    """Returns the shape of the logical array of a variable."""
    padding = padding_of(variable)
    shape = variable.get_raw_value().shape
    if padding is None:
        return shape
    return padding.logical_shape(shape)


def logical(variable: V) -> V:
    """Returns a variable of the user's own class that holds the logical array."""
    padding = padding_of(variable)
    if padding is None:
        return variable
    unpadded_variable: V = variable.replace(padding.cut(variable.get_raw_value()))  # type: ignore[assignment]
    object.__setattr__(unpadded_variable, "__class__", unpadded(type(variable)))
    return unpadded_variable


def store(variable: nnx.Variable, padding: Padding | None, value: Value) -> None:
    """Makes a variable hold an array with this padding, or with none."""
    cls = unpadded(type(variable))
    if padding is not None:
        cls = _padded_class(cls, padding)
    object.__setattr__(variable, "__class__", cls)
    _compat.write_past_home(variable, value)


def unpadded(cls: type) -> type:
    """Returns the class of variables without padding."""
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
    """Lets padded arrays be written as they are inside this context: they come from a program that keeps the zeros."""
    token = _padding_is_kept.set(True)
    try:
        yield
    finally:
        _padding_is_kept.reset(token)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cleared(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Returns an array with zeros from an index on: a mask, which each device applies to its part."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(index < size, x, jnp.zeros((), x.dtype))
