"""The forms of a leaf: as it is stored, as it is read, and as it is wanted."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.matching import Pick
from jshard.checkpoint.seal import StoredLeaf


def to_read(stored: StoredLeaf, pick: Pick, wanted: Any) -> Any:
    """What to ask the storage for: the stored shape and dtype, with a sharding made of the wanted one."""
    if not stored.is_array:
        return {"int": 0, "float": 0.0, "str": ""}[stored.dtype]
    if not isinstance(wanted, jax.ShapeDtypeStruct):
        return np.empty(stored.shape, stored.dtype)
    is_key = stored.key is not None and _is_key(wanted)
    dtype = wanted.dtype if is_key else jnp.dtype(stored.dtype)
    if not is_key and jax.dtypes.canonicalize_dtype(dtype) != dtype:  # 64 bits, and jax is set to 32
        return np.empty(stored.shape, stored.dtype)
    shape = stored.shape
    if is_key or not _is_key(wanted):  # that of the keys, not of their numbers; with the padding of the wanted array
        shape = wanted.shape[1:] if pick.form == "stack" else wanted.shape
        shape = (stored.shape[0], *shape) if pick.form == "layer" else shape
    sharding = _as_stored(wanted.sharding, pick, len(wanted.shape))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _as_stored(sharding: Sharding, pick: Pick, ndim: int) -> Sharding:
    if not isinstance(sharding, NamedSharding) or pick.form == "same":
        return sharding
    spec = tuple(sharding.spec) + (None,) * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*((None, *spec) if pick.form == "layer" else spec[1:])))


def own_mesh(wanted: Any) -> contextlib.AbstractContextManager[Any]:
    """The mesh of a leaf as the active one: with Explicit axes, jax refuses to compute under another."""
    mesh = getattr(getattr(wanted, "sharding", None), "mesh", None)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext()


def finish(pick: Pick, found: list[Any], wanted: Any) -> Any:
    """A leaf in the form, dtype and sharding in which it is wanted."""
    if not isinstance(wanted, jax.ShapeDtypeStruct):
        return _on_host(pick, found, wanted)
    found = [_same_kind(leaf, wanted) for leaf in found]
    leaf = found[0]
    if not isinstance(leaf, jax.Array):  # a value of Python, or an array that was read on the host
        array = _as_dtype(np.asarray(_picked(pick, found)), wanted.dtype)
        if array.shape != wanted.shape:  # which is padded
            array = np.pad(array, [(0, size - own) for size, own in zip(wanted.shape, array.shape, strict=True)])
        return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda box: array[box])
    if pick.form == "stack":
        return _stacked(wanted.dtype, wanted.sharding)(found)
    if pick.form == "layer":
        return _layer(wanted.dtype, wanted.sharding)(leaf, pick.layer)
    if leaf.dtype != wanted.dtype or not leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim):
        return _cast(wanted.dtype, wanted.sharding)(leaf)
    return leaf


def num_overflows(pick: Pick, found: list[Any], leaf: Any) -> int:
    """How many values of a leaf were numbers as they were stored, and are none in the dtype that is wanted."""
    dtypes = [getattr(x, "dtype", int) for x in (found[0], leaf)]
    if not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return 0
    if float(jnp.finfo(dtypes[1]).max) >= float(jnp.finfo(dtypes[0]).max) or not (lost := _num_not_finite(leaf)):
        return 0
    return lost - sum(map(_num_not_finite, found if pick.form == "stack" else [_picked(pick, found)]))


def _num_not_finite(leaf: Any) -> int:
    if isinstance(leaf, jax.Array):
        return int(_count_not_finite(leaf))
    return int(np.sum(~np.isfinite(leaf if leaf.dtype.itemsize > 2 else leaf.astype(np.float32))))


@jax.jit
def _count_not_finite(leaf: jax.Array) -> jax.Array:
    wide = leaf if leaf.dtype.itemsize > 2 else leaf.astype(jnp.float32)
    return jnp.sum(~jnp.isfinite(wide), dtype=jnp.float32)


def _on_host(pick: Pick, found: list[Any], wanted: Any) -> Any:
    """The same for leaves that are not on devices."""
    found = [_same_kind(leaf, wanted) for leaf in found]
    if isinstance(wanted, bool):
        return bool(_as_dtype(np.asarray(_picked(pick, found)), np.bool_))
    if not hasattr(found[0], "shape") and not isinstance(wanted, np.ndarray | np.generic):
        return found[0]
    array = np.asarray(_picked(pick, found))
    return _as_dtype(array, wanted.dtype) if isinstance(wanted, np.ndarray | np.generic) else array.item()


def _same_kind(leaf: Any, wanted: Any) -> Any:
    """A random key as its numbers, or numbers as a key, where the other is wanted."""
    if not isinstance(leaf, jax.Array) or _is_key(leaf) == _is_key(wanted):
        return leaf
    return jax.random.key_data(leaf) if _is_key(leaf) else jax.random.wrap_key_data(leaf, impl=wanted.dtype)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)


def _as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """An array in another dtype, but for integers, and truth values, that it cannot hold."""
    is_whole = array.dtype == object or jnp.issubdtype(array.dtype, jnp.integer)  # object: of more than 64 bits
    try:
        with np.errstate(over="ignore"):  # whoever asked is warned
            cast = array.astype(dtype)
        is_exact = dtype == np.bool_ or (is_whole and jnp.issubdtype(dtype, jnp.integer))
        is_changed = is_exact and bool((cast != array).any())
    except OverflowError:
        cast, is_changed = array, True
    if is_changed:
        raise CheckpointError(
            "A stored number is too large.",
            where=f"{array.max() if array.size == 1 else 'up to ' + str(array.max())}",
            why=f"`like` wants it as {np.dtype(dtype).name}.",
            do="give `like` a value of Python or a wider dtype there.",
        )
    return cast


def _picked(pick: Pick, found: list[Any]) -> Any:
    return np.stack(found) if pick.form == "stack" else found[0][pick.layer] if pick.form == "layer" else found[0]


# One program for all leaves of a shape.
@functools.lru_cache(maxsize=256)
def _layer(dtype: Any, sharding: Sharding) -> Any:
    def one(stack: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False).astype(dtype)

    return jax.jit(one, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _stacked(dtype: Any, sharding: Sharding) -> Any:
    return jax.jit(lambda layers: jnp.stack(layers).astype(dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _cast(dtype: Any, sharding: Sharding) -> Any:
    return jax.jit(lambda leaf: leaf.astype(dtype), out_shardings=sharding)


def bytes_here(leaf: Any) -> int:
    """Bytes of a leaf that this process reads; a shard that several of its devices hold counts once."""
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
        return getattr(leaf, "nbytes", 0)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 0
    boxes = {str(box) for box in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
    return len(boxes) * math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
