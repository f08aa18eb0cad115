"""Converts leaves to the types that a checkpoint stores, and stored values to the types of a state."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jshard._processes import ProcessGroup, all_processes
from jshard._text import counted
from jshard.checkpoint.data_position.position import is_data_position, position_text, set_position
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.state.leaves import Path, text
from jshard.checkpoint.state.local_arrays import as_replicas, is_local

StoredValue = jax.Array | jax.ShapeDtypeStruct | np.ndarray | int | float | str
"""A leaf as it is stored; where only its type matters, an array may be given by shape and dtype."""

_STORABLE = frozenset(  # dtypes that TensorStore supports
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 "
    "complex64 complex128".split()
)


# ---- to be stored


def storable(
    leaves: Mapping[Path, object], *, abstract: bool = False, group: ProcessGroup | None = None
) -> dict[str, StoredValue]:
    """Returns leaves, by path as text, in the types that are stored: only arrays, ints, floats and texts.

    If only the types matter (`abstract`), positions in the data are not queried. `group` is the processes that save
    them, all by default. A `CheckpointError` names the leaves
    that are of other types or whose values are gone.
    """
    if not abstract:
        _check_values_exist(leaves)
    group = group or all_processes()
    stored: dict[str, StoredValue] = {}
    bad = []
    for path, leaf in leaves.items():
        key = text(path)
        value = _without_values(leaf, group) if abstract else _stored(leaf, group)
        if value is None:
            bad.append(f"{key}  {_kind(leaf)}")
        else:
            stored[key] = value
    if bad:
        raise CheckpointError(
            f"The state cannot be saved: {counted(len(bad), 'leaf is', 'leaves are')} not data.",
            where=bad,
            why="a checkpoint holds arrays of numbers, numbers of up to 64 bits, strings, and objects with get_state() "
            "and set_state().",
            do="leave them out of the state, or save the arrays and numbers they contain.",
        )
    return stored


def _check_values_exist(leaves: Mapping[Path, object]) -> None:
    """Refuses arrays without values, and arrays of which this process holds no part, so that it cannot save them."""
    deleted = []
    elsewhere = []
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            continue
        # A deleted array has no shards to look at.
        if leaf.is_deleted():
            deleted.append(text(path))
        elif not leaf.addressable_shards:
            elsewhere.append(text(path))
    if deleted:
        raise CheckpointError(
            f"The state cannot be saved: the values of {counted(len(deleted), 'leaf')} are gone.",
            where=deleted,
            why="these arrays are deleted: a step that donates its arguments reuses their memory.",
            do="save what the step returns: state = step(state, batch), then save(path, state). Or save before it.",
        )
    if elsewhere:
        arrays_elsewhere = counted(len(elsewhere), "array")
        raise CheckpointError(
            f"The state cannot be saved: process {jax.process_index()} holds no part of {arrays_elsewhere}.",
            where=elsewhere,
            why="only devices of other processes hold them, and all processes save together.",
            do="put them on a mesh of all devices: jax.device_put(x, NamedSharding(mesh, PartitionSpec()))",
        )


def _stored(leaf: object, group: ProcessGroup) -> StoredValue | None:
    """Returns the stored form of a leaf; None if it cannot be stored."""
    if isinstance(leaf, enum.Enum):
        # Before the types below, of which an enum may be, too. Its `str` is "Phase.MAIN" where the value is "main", by
        # the kind of enum and the version of Python.
        return _stored(leaf.value, group)
    if isinstance(leaf, str):
        return str.__str__(leaf)  # of a subclass, the text and not what its `__str__` makes of it
    if isinstance(leaf, np.ndarray | np.generic):
        return _stored_array(np.asarray(leaf))
    if isinstance(leaf, jax.Array):
        return _stored_device_array(leaf, group)
    if isinstance(leaf, int):
        # Of a bool or another subclass, the plain number.
        return int.__int__(leaf) if -(2**63) <= leaf < 2**63 else None
    if isinstance(leaf, float):
        return float.__float__(leaf)
    if is_data_position(leaf):
        return position_text(leaf)
    return None


def _stored_array(array: np.ndarray) -> np.ndarray | None:
    if not _is_storable(array.dtype):
        return None
    # A copy, because the caller may change the original. Byte order is not stored.
    return array.astype(array.dtype.newbyteorder("="))


def _stored_device_array(array: jax.Array, group: ProcessGroup) -> jax.Array | None:
    if not _is_storable(array.dtype):
        return None
    if is_local(array, group):  # every process has a copy, and one is written
        return as_replicas(array, group)
    return array


def _without_values(leaf: object, group: ProcessGroup) -> StoredValue | None:
    """Returns what stands for the stored form of a leaf if only its type matters; None if it cannot be stored."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_data_position(leaf):
        return ""
    return _stored(leaf, group)


@functools.cache  # of few dtypes, asked for every leaf of a state that training waits for
def _is_storable(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype.name in _STORABLE


def _kind(leaf: object) -> str:
    """Describes a leaf for messages."""
    if isinstance(leaf, jax.Array | np.ndarray):
        return f"an array of {leaf.dtype}"
    if isinstance(leaf, int):
        return f"an int of {leaf.bit_length()} bits"
    return f"a {type(leaf).__name__}"


# ---- to be restored


def abstract(leaves: Mapping[Path, object]) -> dict[Path, object]:
    """Returns shape, dtype and sharding of every array; other leaves are unchanged.

    Arrays on no mesh, such as the random state of an abstract model, are replicated over the mesh of the others.
    """
    replicated: NamedSharding | None = None
    for leaf in leaves.values():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            replicated = NamedSharding(sharding.mesh, PartitionSpec())
            break
    return {path: _abstract_leaf(leaf, replicated) for path, leaf in leaves.items()}


def _abstract_leaf(leaf: object, replicated: NamedSharding | None) -> object:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    # An abstract array may have no sharding, but a read needs one.
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if replicated is not None and not isinstance(sharding, NamedSharding):
        sharding = replicated
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def restored(path: str, value: Any, like: object) -> object:
    """Returns a stored value in the type of its counterpart in `like`; data positions are set.

    Raises:
        CheckpointError: the type of `like` has no such value, such as an enum without this member.
    """
    if is_data_position(like):
        set_position(like, value)
        return like
    # Before the types below, of which an enum may be, too.
    if isinstance(like, enum.Enum):
        return _enum_member(path, value, type(like))
    if isinstance(like, bool | int | float | str):
        return _python_value(path, value, type(like))
    if isinstance(like, np.generic):
        return like.dtype.type(value)
    return value


def _python_value(path: str, value: object, kind: type) -> object:
    if type(value) is kind:
        return value
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise _not_of_type(path, value, kind, f"{type(error).__name__}: {error}") from error


def _enum_member(path: str, value: Any, kind: type[enum.Enum]) -> enum.Enum:
    """Returns the member with a stored value; earlier versions stored text enums as `Phase.MAIN`."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    try:
        return kind(value)
    except ValueError as error:
        by_name = {f"{kind.__name__}.{name}": member for name, member in kind.__members__.items()}
        if value in by_name:
            return by_name[value]
        values = ", ".join(repr(member.value) for member in kind)
        raise _not_of_type(path, value, kind, f"its members have the values {values}.") from error


def _not_of_type(path: str, value: object, kind: type, why: str) -> CheckpointError:
    return CheckpointError(
        "A stored value cannot be given the type that `like` has there.",
        where=f"{path}  stored {value!r}  wanted a {kind.__name__}",
        why=why,
        do=f"put a plain {type(value).__name__} there in `like`, and convert the result.",
    )
