"""The forms of a leaf in a restore: what is read of a stored leaf, and how that becomes the leaf of the state.

A target is a leaf to restore: a `jax.ShapeDtypeStruct` with a sharding, a NumPy array or a Python value.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.matching import Pick

Leaf: TypeAlias = Any
"""A leaf as it was read, or as it is restored: an array of JAX or NumPy, or a Python value."""

Target: TypeAlias = Any
"""A `jax.ShapeDtypeStruct` with a sharding, a NumPy array, or a Python value of any type that is restored."""


def to_read(stored: StoredLeaf, pick: Pick, target: Target) -> Target:
    """Returns the target of the read: the stored shape and dtype, with a sharding derived from that of the target."""
    # What ends on the host is read to the host, whatever devices there are.
    if not stored.is_array or not isinstance(target, jax.ShapeDtypeStruct):
        return stored.on_host()
    dtype = jnp.dtype(stored.dtype)
    is_key = stored.key is not None and _is_key(target)
    if is_key:
        dtype = target.dtype
    elif jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return stored.on_host()  # 64 bits, but jax uses 32
    sharding = _stored_sharding(target.sharding, pick, len(target.shape))
    if _is_key(target) and not is_key:
        return jax.ShapeDtypeStruct(stored.shape, dtype, sharding=sharding)  # the numbers of keys
    # With the padding of the target. Of keys, it is the shape and the sharding of keys, not of their numbers.
    shape = target.shape
    if pick.form == "stack":
        shape = target.shape[1:]
    elif pick.form == "layer":
        shape = (stored.shape[0], *target.shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _stored_sharding(sharding: Sharding | None, pick: Pick, ndim: int) -> Sharding | None:
    """Returns the sharding of the stored leaves for one of a leaf with so many dims: the dim of layers is whole."""
    if not isinstance(sharding, NamedSharding) or pick.form == "same":
        return sharding
    entries = tuple(sharding.spec)
    # A spec may name fewer dims than there are. With all, the first one is that of the layers.
    entries += (None,) * (ndim - len(entries))
    entries = (None, *entries) if pick.form == "layer" else entries[1:]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def own_mesh(leaf: Target) -> contextlib.AbstractContextManager[object]:
    """Activates the mesh of a leaf: with Explicit axes, jax refuses to compute under another one."""
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext()


def finish(pick: Pick, parts: Sequence[Leaf], target: Target) -> Leaf:
    """Returns a leaf in the form, dtype and sharding of its target.

    Args:
        pick: where it comes from.
        parts: the leaves that were read, as many as are stored.
        target: the leaf to restore.
    """
    parts = [_as_keys_or_numbers(part, target) for part in parts]
    if not isinstance(target, jax.ShapeDtypeStruct):
        return _on_host(pick, parts, target)
    part = parts[0]
    if not isinstance(part, jax.Array):  # a Python value, or an array read on the host
        return _to_devices(pick, parts, target)
    if pick.form == "stack":
        return _stack(target.dtype, target.sharding)(parts)
    if pick.form == "layer":
        # The number is an argument of the program: as a constant in it, every layer would compile one.
        return _take_layer(target.dtype, target.sharding)(part, pick.layer)
    # Equivalent is enough: a spec of fewer dims may place the array alike, and then no program has to run.
    if part.dtype != target.dtype or not part.sharding.is_equivalent_to(target.sharding, part.ndim):
        return _cast(target.dtype, target.sharding)(part)
    return part


def _as_keys_or_numbers(leaf: Leaf, target: Target) -> Leaf:
    """Returns a random key as its numbers, or numbers as a key, if the target is in the other form."""
    if not isinstance(leaf, jax.Array) or _is_key(leaf) == _is_key(target):
        return leaf
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return jax.random.wrap_key_data(leaf, impl=target.dtype)


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)


def _to_devices(pick: Pick, parts: Sequence[Leaf], target: jax.ShapeDtypeStruct) -> jax.Array:
    array = _as_dtype(pick, np.asarray(_picked(pick, parts)), target.dtype)
    if array.shape != target.shape:  # the target is padded
        padding = [(0, padded - size) for padded, size in zip(target.shape, array.shape, strict=True)]
        array = np.pad(array, padding)
    assert target.sharding is not None
    # Every process has all of the array on its host; each device takes its box.
    return jax.make_array_from_callback(target.shape, target.sharding, array.__getitem__)


def _on_host(pick: Pick, parts: Sequence[Leaf], target: Target) -> Leaf:
    # Before numbers, as a bool is an int.
    if isinstance(target, bool):
        return bool(_as_dtype(pick, np.asarray(_picked(pick, parts)), np.bool_))
    if isinstance(target, np.ndarray | np.generic):
        return _as_dtype(pick, np.asarray(_picked(pick, parts)), target.dtype)
    value = parts[0]
    if hasattr(value, "shape"):
        value = np.asarray(_picked(pick, parts)).item()
    # As between arrays: an int that a float would round is refused.
    if isinstance(target, float) and isinstance(value, int):
        return _as_dtype(pick, np.asarray(value), np.dtype(np.float64)).item()
    return value


def _picked(pick: Pick, parts: Sequence[Leaf]) -> Leaf:
    if pick.form == "stack":
        return np.stack(parts)
    if pick.form == "layer":
        return parts[0][pick.layer]
    return parts[0]


def _as_dtype(pick: Pick, array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns an array in another dtype; raises for integers and bools that the dtype cannot hold exactly."""
    is_whole = array.dtype == object or jnp.issubdtype(array.dtype, jnp.integer)  # object: over 64 bits
    must_be_equal = is_whole or dtype == np.bool_
    try:
        with np.errstate(over="ignore"):  # the caller warns
            cast = array.astype(dtype)
        fits = not must_be_equal or _is_equal(cast, array)
    except OverflowError:
        cast = array
        fits = False
    if not fits:
        largest = f"{array.max()}"
        if array.size > 1:
            largest = f"up to {array.max()!s}"
        raise CheckpointError(
            "A stored number does not fit.",
            where=f"{pick.stored[0]}  {largest}",
            why=f"`like` wants it as {np.dtype(dtype).name}, which does not have this number.",
            do="put a Python int or a wider dtype there in `like`.",
        )
    return cast


def _is_equal(cast: np.ndarray, numbers: np.ndarray) -> bool:
    """Returns whether a cast of integers or bools has changed none."""
    if not jnp.issubdtype(cast.dtype, jnp.inexact):
        return bool((cast == numbers).all())
    # Python compares an int with a float exactly; NumPy would round both to float64 first.
    wide = np.complex128 if jnp.issubdtype(cast.dtype, jnp.complexfloating) else np.float64
    return bool((cast.astype(wide).astype(object) == numbers.astype(object)).all())


# One program for all leaves of a dtype and a sharding: jax then compiles once for each of their shapes.


@functools.lru_cache(maxsize=256)
def _take_layer(dtype: DTypeLike, sharding: Sharding) -> Callable[[jax.Array, int], jax.Array]:
    def take_layer(stack: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False).astype(dtype)

    return jax.jit(take_layer, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _stack(dtype: DTypeLike, sharding: Sharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    def stack(layers: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack(layers).astype(dtype)

    return jax.jit(stack, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _cast(dtype: DTypeLike, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype)

    return jax.jit(cast, out_shardings=sharding)


def num_overflows(pick: Pick, parts: Sequence[Leaf], leaf: Leaf) -> int:
    """Returns the number of values that are finite as stored but not in the restored leaf's dtype."""
    part = parts[0]
    if isinstance(part, int | float) and hasattr(leaf, "dtype"):  # a Python value
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) or not _num_not_finite(leaf):
            return 0
        return int(math.isfinite(part))
    stored_dtype = getattr(part, "dtype", int)
    dtype = getattr(leaf, "dtype", int)
    if not jnp.issubdtype(stored_dtype, jnp.inexact) or not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    # A dtype with numbers as large makes no infinities of finite ones.
    is_narrower = float(jnp.finfo(dtype).max) < float(jnp.finfo(stored_dtype).max)
    if not is_narrower:
        return 0
    count = _num_not_finite(leaf)
    if not count:
        return 0  # nearly always: then the stored values need not be counted
    stored_values = parts if pick.form == "stack" else [_picked(pick, parts)]
    return count - sum(map(_num_not_finite, stored_values))


def _num_not_finite(leaf: Leaf) -> int:
    if isinstance(leaf, jax.Array):
        return int(_count_not_finite(leaf))
    wide = leaf if leaf.dtype.itemsize > 2 else leaf.astype(np.float32)
    return int(np.sum(~np.isfinite(wide)))


@jax.jit
def _count_not_finite(leaf: jax.Array) -> jax.Array:
    wide = leaf if leaf.dtype.itemsize > 2 else leaf.astype(jnp.float32)
    return jnp.sum(~jnp.isfinite(wide), dtype=jnp.float32)
