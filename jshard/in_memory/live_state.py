"""A state in memory, read as a checkpoint is: by path, onto any mesh. What is moved are shards, not files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard._processes import exchange
from jshard._text import counted
from jshard._types import PyTree
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.converting import Leaf, Target
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import Box, bounds, whole
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.packed.layout import Limits
from jshard.checkpoint.state import leaf_values
from jshard.checkpoint.state import leaves as _leaves
from jshard.checkpoint.state.local_arrays import is_local
from jshard.in_memory.arrays import moved, on_hosts, placed, sent_from

SHOWN_AS = Path("(in memory)")
"""The place of a state in messages, where a checkpoint has its path."""


class LiveState(Opened):
    """A state whose arrays are on devices, of this process or others, or on the host of every process.

    Attributes:
        casts: dtypes, by path, in which leaves are loaded: cast on their own devices, before they are sent.
    """

    path = SHOWN_AS

    def __init__(self, state: PyTree) -> None:
        by_path = {_leaves.text(path): _as_array(leaf) for path, leaf in _leaves.flatten(state).items()}
        _check_not_deleted(by_path)
        self._leaves = by_path
        self.casts: dict[str, np.dtype] = {}
        self._logical_shapes = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(state).items()}
        described = leaf_values.storable(
            {path: _shown(leaf) for path, leaf in _leaves.flatten(state).items()}, abstract=True
        )
        self.leaves = {
            path: _manifest.describe(leaf, self._logical_shapes.get(path)) for path, leaf in described.items()
        }
        self._values = {path: described[path] for path, leaf in self.leaves.items() if not leaf.is_array}

    def leaves_for(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`."""
        return self.leaves

    def load(self, targets: Mapping[str, Target]) -> dict[str, Leaf]:
        """See `Opened.load`; arrays are new, also where nothing moves: the state that is read may be donated."""
        result: dict[str, Leaf] = {}
        for path, target in targets.items():
            if path in self._values:
                result[path] = self._values[path]
            elif isinstance(target, jax.ShapeDtypeStruct):
                result[path] = jax.block_until_ready(self._array(path, target))
            else:
                result[path] = self.read(path, whole(self.leaves[path]))
        return result

    def source_of(self, path: str) -> Leaf:
        """Returns the array of a leaf as it is, or in the dtype set by `cast`; a random key as its numbers."""
        leaf = self._leaves[path]
        if _is_key(leaf):
            return _numbers_of(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else jax.random.key_data(leaf)
        dtype = self.casts.get(path)
        if dtype is None or dtype == leaf.dtype:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and not leaf.addressable_shards):
            # This process has no device of the array, and so no part in the cast.
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        return leaf.astype(dtype) if isinstance(leaf, np.ndarray) else _cast(leaf, dtype)

    def placed_as(self, path: str) -> jax.ShapeDtypeStruct | None:
        """Returns the stored shape, the dtype as loaded and the sharding of an array; None if it is on no devices."""
        leaf = self._leaves[path]
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or _is_key(leaf):
            return None
        return jax.ShapeDtypeStruct(leaf.shape, self.casts.get(path, leaf.dtype), sharding=sharding)

    def _array(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        if _is_key(target):
            numbers = self._numbers(path, _numbers_of(target))
            return jax.random.wrap_key_data(numbers, impl=target.dtype)
        return self._numbers(path, target)

    def _numbers(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        array = self.source_of(path)
        on_devices = isinstance(array, jax.Array | jax.ShapeDtypeStruct)
        if on_devices and not _is_on_every_host(array):
            return moved(array, self.leaves[path].shape, target)
        return placed(np.asarray(array), target, dtype=array.dtype)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`; every process reads the same boxes in the same order."""
        array = self.source_of(name)
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            values = on_hosts(array, self.leaves[name].shape, range(jax.process_count()))
            assert values is not None
            return values[box]
        return np.array(np.asarray(array)[box])

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """See `Opened.touched`."""
        return 0

    def values(self) -> dict[str, int | float | str]:
        """See `Opened.values`."""
        return {path: value for path, value in self._values.items() if isinstance(value, int | float | str)}


class StateOfOneProcess(Opened):
    """A state that only one process holds; the others learn of its leaves, and receive their shards.

    Args:
        opened: the state, in the process that holds it; None in the others.
        holder: the number of that process.
    """

    path = SHOWN_AS

    def __init__(self, opened: Opened | None, holder: int) -> None:
        self._opened = opened
        self._holder = holder
        message = None
        if opened is not None:
            leaves = {path: dataclasses.asdict(leaf) for path, leaf in opened.leaves.items()}
            message = {"leaves": leaves, "values": opened.values(), "absent": dict(opened.absent)}
        received = exchange("state of one process", message)[holder]
        self.leaves = {path: _leaf_of(fields) for path, fields in received["leaves"].items()}
        self.absent = received["absent"]
        self._values: dict[str, int | float | str] = received["values"]

    def leaves_for(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`."""
        return self.leaves

    def load(self, targets: Mapping[str, Target]) -> dict[str, Leaf]:
        """See `Opened.load`; one leaf at a time leaves the host that has it."""
        result: dict[str, Leaf] = {}
        for path, target in targets.items():
            if path in self._values:
                result[path] = self._values[path]
            elif isinstance(target, jax.ShapeDtypeStruct):
                result[path] = jax.block_until_ready(self._array(path, target))
            else:
                result[path] = self.read(path, whole(self.leaves[path]))
        return result

    def _array(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        if _is_key(target):
            return jax.random.wrap_key_data(self._numbers(path, _numbers_of(target)), impl=target.dtype)
        return self._numbers(path, target)

    def _numbers(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        leaf = self.leaves[path]
        opened = self._opened

        def read(box: Box) -> np.ndarray:
            assert opened is not None
            return opened.read(path, box)

        reader = None if opened is None else read
        return sent_from(self._holder, reader, leaf.shape, np.dtype(leaf.dtype), target)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`; the values are replicated first, so the others read them, too."""
        leaf = self.leaves[name]
        mesh = jax.make_mesh((jax.device_count(),), ("device",))
        replicated = NamedSharding(mesh, PartitionSpec())
        target = jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=replicated)
        return np.array(np.asarray(self._numbers(name, target).addressable_data(0))[box])

    def values(self) -> dict[str, int | float | str]:
        """See `Opened.values`."""
        return self._values


class NamedArrays:
    """Arrays under another library's names, as a source of a checkpoint is: `formats.source.FormatSource`."""

    values: Mapping[str, Any] = {}
    notes = ()

    def __init__(self, arrays: Mapping[str, object]) -> None:
        self._arrays = {name: np.asarray(_as_array(array)) for name, array in arrays.items()}
        self.leaves = {name: _manifest.describe(array) for name, array in self._arrays.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """Returns a copy of a box of an array."""
        limits = bounds(box, self.leaves[name].shape)
        return self._arrays[name][tuple(slice(start, stop) for start, stop in limits)].copy()


def _leaf_of(fields: Mapping[str, Any]) -> StoredLeaf:
    chunk = fields["chunk"]
    return StoredLeaf(**{**fields, "shape": tuple(fields["shape"]), "chunk": None if chunk is None else tuple(chunk)})


def _as_array(leaf: Any) -> Leaf:
    """Returns an array of another library as one of NumPy or JAX, without a copy where that is possible."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return leaf
    if hasattr(leaf, "__dlpack__"):
        return jnp.from_dlpack(_detached(leaf))
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return leaf


def _detached(tensor: Any) -> Any:
    """Returns a tensor without its history: PyTorch exports none that requires a gradient."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _shown(leaf: object) -> Leaf:
    """Returns what stands for a leaf if only its type matters: nothing is copied."""
    array = _as_array(leaf)
    if isinstance(array, jax.Array | np.ndarray | np.generic):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=getattr(array, "sharding", None))
    return array


def _check_not_deleted(leaves: Mapping[str, Leaf]) -> None:
    """Raises for arrays whose values are gone."""
    deleted = [path for path, leaf in leaves.items() if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if deleted:
        raise CheckpointError(
            f"The state cannot be read: the values of {counted(len(deleted), 'leaf')} are gone.",
            where=deleted,
            why="these arrays are deleted: a step that donates its arguments reuses their memory.",
            do="use what the step returns: state = step(state, batch).",
        )


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns an array in another dtype, with the same sharding."""
    return array.astype(dtype)


def _is_on_every_host(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether every process has an array of its own here, equal in all, on devices of its own."""
    return isinstance(array, jax.Array) and is_local(array) and len(array.sharding.device_set) == 1


def _is_key(leaf: object) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)


def _numbers_of(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the target of the numbers of a random key: with a dim more, which is whole."""
    numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(target.shape, target.dtype))
    sharding = target.sharding
    if isinstance(sharding, NamedSharding):
        entries = (*sharding.spec, *(None,) * (len(numbers.shape) - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=sharding)
