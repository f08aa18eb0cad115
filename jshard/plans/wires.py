"""Wires: how parameters and parts of gradients are sent, as pairs of pure functions that pack and unpack a shard."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jshard.errors import AnnotationError

Arrays: TypeAlias = tuple[jax.Array, ...]
Types: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]
Pack: TypeAlias = Callable[[jax.Array, int], Sequence[jax.Array]]
Unpack: TypeAlias = Callable[[Arrays, int, DTypeLike], jax.Array]

# XLA:CPU writes beyond the end of what it gathers of these.
TOO_NARROW_TO_GATHER = (jnp.int2, jnp.uint2)


@dataclasses.dataclass(frozen=True)
class Wire:
    """A form in which shards are sent.

    Attributes:
        name: under which `js.MixedPrecision` takes it.
        pack: returns the arrays to send of a shard.
        unpack: returns one array of the packed arrays of one or several shards.
        is_cast: whether it changes the dtype of each element, and nothing else. So it applies to parts of any shape.
    """

    name: str
    pack: Pack
    unpack: Unpack
    is_cast: bool = False

    def packed(self, x: jax.Array, dim: int, *, num_layer_dims: int, num_part_dims: int = 0) -> Arrays:
        """Packs shards: each layer, and each part along `dim`, for itself.

        Args:
            x: the array.
            dim: the sharded dim; in front of it are the dims that index parts.
            num_layer_dims: the number of leading dims that index layers.
            num_part_dims: the number of dims from `dim` on that index parts.
        """

        def pack(shard: jax.Array) -> Arrays:
            return tuple(self.pack(shard, dim - num_layer_dims))

        return _mapped(pack, dim, num_layer_dims, num_part_dims)(x)

    def unpacked(
        self, arrays: Arrays, dim: int, dtype: DTypeLike, *, num_layer_dims: int, num_part_dims: int = 0
    ) -> jax.Array:
        """Returns what was packed, in a dtype; the arguments are those of `packed`."""

        def unpack(arrays: Arrays) -> jax.Array:
            return self.unpack(arrays, dim - num_layer_dims, dtype)

        return _mapped(unpack, dim, num_layer_dims, num_part_dims)(arrays)

    def packed_types(self, shape: tuple[int, ...], dtype: DTypeLike, dim: int) -> Types:
        """Returns the types of the arrays that are sent of a shard of one layer."""
        return _packed_types(self, shape, jnp.dtype(dtype), dim)


def _mapped(function: Callable, dim: int, num_layer_dims: int, num_part_dims: int) -> Callable:
    """Returns a function of one part of one layer as a function of all of them."""
    # From the inside out: a part has no dims in front but those of its layer, which are removed first.
    for _ in range(num_part_dims):
        part_dim = dim - num_layer_dims
        function = jax.vmap(function, in_axes=part_dim, out_axes=part_dim)
    for _ in range(num_layer_dims):
        function = jax.vmap(function)
    return function


# Cached: a model has many parameters of few shapes, and a plan is compared with a program more than once.
@functools.lru_cache(maxsize=4096)
def _packed_types(wire: Wire, shape: tuple[int, ...], dtype: jnp.dtype, dim: int) -> Types:
    return tuple(jax.eval_shape(lambda x: tuple(wire.pack(x, dim)), jax.ShapeDtypeStruct(shape, dtype)))


# ---- the registry

REGISTERED: dict[str, Wire] = {}
"""Wires by name, but casts."""


def register_wire(name: str, *, pack: Pack, unpack: Unpack, replace: bool = False) -> None:
    """Registers a wire: how parameters, or parts of gradients, are sent between the devices.

    `js.MixedPrecision(gather_dtype=name)` then gathers matrices over it, and `js.MixedPrecision(wire_dtype=name)` sends
    the parts of their gradients over it. A plan holds the name, so every process that makes or reads one registers the
    wire first. Vectors, parameters in `keep`, those that are not sharded, and those that are not real floats of 16 bits
    or more are sent as without it.

    Both functions are pure. They see one layer of a stack, and one device's part of an array that is also split over
    `tensor`. Gradients ignore them: the gradient of a gather is that of the whole parameter.

    Args:
        name: the name; not that of a dtype.
        pack: `pack(shard, dim)` returns the arrays to send, in a tuple, each with the number of dims of the shard. They
            are gathered along `dim`, the sharded dim: rows of it that share a scale must be of one shard, and a
            parameter is rounded alike on every mesh if none share one.
        unpack: `unpack(arrays, dim, dtype)` returns the array in a dtype. Each of `arrays` has the parts of all shards
            along `dim`, in order: those of the whole parameter, or, of a gradient, those of one part.
        replace: whether a wire of this name is replaced, as by a cell of a notebook that runs again. Programs that were
            compiled with it are then compiled again.

    Raises:
        AnnotationError: there is a wire or a dtype of this name.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jshard as js
        >>> def pack(shard, dim):
        ...     other_dims = tuple(d for d in range(shard.ndim) if d != dim)
        ...     scales = jnp.abs(shard).max(other_dims, keepdims=True).astype(jnp.float32) / 127
        ...     scales = jnp.maximum(scales, 1e-30)
        ...     return jnp.round(shard / scales).astype(jnp.int8), scales
        >>> def unpack(arrays, dim, dtype):
        ...     codes, scales = arrays
        ...     return (codes * scales).astype(dtype)
        >>> js.register_wire("int8_rows", pack=pack, unpack=unpack)
        >>> js.MixedPrecision(param_dtype="bfloat16", gather_dtype="int8_rows").gather_dtype
        'int8_rows'
    """
    wire = Wire(name, pack, unpack)
    if REGISTERED.get(name) == wire:
        return  # a module that is imported again
    is_dtype = _is_dtype(name)
    if is_dtype or (name in REGISTERED and not replace):
        do = f'js.register_wire("my_{name}", pack=pack, unpack=unpack)'
        if not is_dtype:
            do += "\nor, if this is the same wire again: js.register_wire(..., replace=True)"
        raise AnnotationError(
            "There is a wire or a dtype of this name.",
            where=f"register_wire({name!r})",
            why=f"registered wires: {', '.join(REGISTERED)}; the name of a dtype stands for a cast to it.",
            do=do,
        )
    if name in REGISTERED:
        # Programs hold the functions that they were traced with, and are found again by the name.
        jax.clear_caches()
    REGISTERED[name] = wire


def registered_names() -> tuple[str, ...]:
    """Returns the names of all wires but casts."""
    return tuple(REGISTERED)


def wire_named(name: str) -> Wire:
    """Returns the wire of a name; the name of a dtype is that of a cast. Raises AnnotationError for others."""
    if name in REGISTERED:
        return REGISTERED[name]
    if _is_dtype(name):
        return _cast(name)
    raise AnnotationError(
        f"There is no wire {name!r}.",
        where=f"gather_dtype or wire_dtype {name!r}",
        why=f"registered wires: {', '.join(REGISTERED)}. A plan holds the name, and not the functions.",
        do=f"js.register_wire({name!r}, pack=pack, unpack=unpack)  # or import the module that does",
    )


def _is_dtype(name: str) -> bool:
    try:
        jnp.dtype(name)
    except TypeError:
        return False
    return True


# ---- the wires of jshard


@functools.cache
def _cast(name: str) -> Wire:
    """Returns the wire that sends each element in a dtype."""

    def pack(shard: jax.Array, dim: int) -> Arrays:
        return (shard.astype(name),)

    def unpack(arrays: Arrays, dim: int, dtype: DTypeLike) -> jax.Array:
        return arrays[0].astype(dtype)

    return Wire(name, pack, unpack, is_cast=True)


def _scaled_rows(name: str) -> Wire:
    """Returns the wire that sends codes of 8 bits, and a scale for each row: what has one index of the sharded dim.

    The codes are integers, which no compiler widens: those for CPUs, and for GPUs before Hopper, send such floats in
    16 bits.
    """

    def pack(shard: jax.Array, dim: int) -> Arrays:
        # Along the sharded dim each row is on one device: so a shard has the scales of its rows without a collective.
        reduced_dims = tuple(d for d in range(shard.ndim) if d != dim)
        x = shard.astype(jnp.float32)
        largest = jnp.abs(x).max(reduced_dims, keepdims=True)
        scales = largest / float(jnp.finfo(name).max)
        scales = jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)  # of a row of zeros
        codes = lax.bitcast_convert_type((x / scales).astype(name), jnp.uint8)
        return codes, scales

    def unpack(arrays: Arrays, dim: int, dtype: DTypeLike) -> jax.Array:
        codes, scales = arrays
        return (lax.bitcast_convert_type(codes, name).astype(jnp.float32) * scales).astype(dtype)

    return Wire(name, pack, unpack)


for _name in ("float8_e4m3fn", "float8_e5m2"):
    REGISTERED[_name] = _scaled_rows(_name)


# ---- checks


@dataclasses.dataclass(frozen=True)
class Sent:
    """What is sent over a wire: shards of a type, along a dim.

    Attributes:
        shape: of the shard of one layer.
        dtype: of the shard, and of what is unpacked.
        dim: the sharded dim.
        num_shards: how many are unpacked together.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int
    num_shards: int

    def gathered(self, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Returns the type of an array of each of the shards, gathered."""
        shape = list(array.shape)
        shape[self.dim] *= self.num_shards
        return jax.ShapeDtypeStruct(shape, array.dtype)


def check_wire(name: str, sent: Sent, *, field: str, path: str) -> None:
    """Raises AnnotationError unless the functions of a wire fit together for the shards of a parameter.

    By types alone: later, in a traced program, a wrong shape would be an error that names neither.

    Args:
        name: of the wire.
        sent: what is sent over it.
        field: of `js.MixedPrecision`, which names it.
        path: of the parameter.
    """
    fault = _fault(wire_named(name), sent)
    if fault:
        raise AnnotationError(
            f"The wire {name!r} does not fit a parameter.",
            where=f"{path}  shard {sent.shape} {sent.dtype}, dim {sent.dim}",
            why=fault,
            do=f"correct it, or leave the parameter out: js.MixedPrecision({field}={name!r}, keep=({path!r},))",
        )


@functools.lru_cache(maxsize=4096)
def _fault(wire: Wire, sent: Sent) -> str:
    """Returns what is wrong with the functions of a wire for some shards; empty if nothing is."""
    shard = jax.ShapeDtypeStruct(sent.shape, sent.dtype)
    call = f"pack(shard, {sent.dim})"
    try:
        packed = jax.eval_shape(lambda x: wire.pack(x, sent.dim), shard)
    except Exception as error:
        return f"{call} raised {type(error).__name__}: {error}"
    if not _is_tuple_of_arrays(packed):
        return f"{call} returned {_described(packed)}, which is no tuple of arrays."
    for array in packed:
        if array.ndim != shard.ndim or array.size == 0:
            return f"{call} returned {_described(array)}: it has no part of {shard.ndim} dims to gather."
        if array.dtype in TOO_NARROW_TO_GATHER:
            return f"{call} returned {_described(array)}: numbers of 2 bits are not sent. Put 4 in a uint8."

    target = sent.gathered(shard)
    gathered = tuple(sent.gathered(array) for array in packed)
    call = f"unpack(arrays, {sent.dim}, {sent.dtype})"
    try:
        result = jax.eval_shape(lambda arrays: wire.unpack(arrays, sent.dim, target.dtype), gathered)
    except Exception as error:
        return f"{call} raised {type(error).__name__}: {error}"
    if _described(result) != _described(target):
        return f"{call} of {sent.num_shards} shards returned {_described(result)}, not {_described(target)}."
    return ""


def _is_tuple_of_arrays(value: object) -> TypeGuard[Types]:
    if not isinstance(value, tuple) or not value:
        return False
    return all(isinstance(array, jax.ShapeDtypeStruct) for array in value)


def _described(value: Any) -> str:
    """Returns `int8 (8, 4)` of an array, and the class of another object."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype.name} {value.shape}"
    if isinstance(value, tuple | list):
        described = ", ".join(map(_described, value))
        return f"a {type(value).__name__} ({described})"
    return f"a {type(value).__name__}"
