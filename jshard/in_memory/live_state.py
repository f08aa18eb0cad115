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
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jshard._processes import ProcessGroup, exchange
from jshard._text import counted
from jshard._types import PyTree
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.converting import Leaf, Target, own_mesh
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import Box, bounds, whole
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.packed.layout import Limits
from jshard.checkpoint.state import leaf_values
from jshard.checkpoint.state import leaves as _leaves
from jshard.in_memory.arrays import moved, placed, sent_from
from jshard.in_memory.hosts import on_hosts
from jshard.plans.units import is_key

SHOWN_AS = Path("(in memory)")
"""The place of a state in messages, where a checkpoint has its path."""


class _InMemory(Opened):
    """What states in memory share as open checkpoints: how they are loaded."""

    path = SHOWN_AS
    noun = "state"
    call = "js.load({like}, values{options})"
    _values: Mapping[str, int | float | str]  # the leaves that are no arrays, by path

    @property
    def listing(self) -> str:
        """See `Opened.listing`."""
        return "js.gather(state)"

    def leaves_for(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`."""
        return self.leaves

    def load(self, targets: Mapping[str, Target]) -> dict[str, Leaf]:
        """See `Opened.load`. Arrays are new, also where nothing moves: the state that is read may be donated."""
        result: dict[str, Leaf] = {}
        for path, target in targets.items():
            if path in self._values:
                result[path] = self._values[path]
            elif isinstance(target, jax.ShapeDtypeStruct):
                # One leaf at a time: the memory of a transfer is free before the next begins.
                result[path] = jax.block_until_ready(self._array(path, target))
            else:
                result[path] = self.read(path, whole(self.leaves[path]))
        return result

    def _array(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        if not is_key(target):
            return self._numbers(path, target)
        # Collectives move numbers, and no keys.
        return jax.random.wrap_key_data(self._numbers(path, _numbers_of(target)), impl=target.dtype)

    def _numbers(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns an array, or the numbers of a random key, in the shape and the sharding of a target."""
        raise NotImplementedError

    def touched(self, name: str, leaf: StoredLeaf, boxes: Collection[Limits]) -> int:
        """See `Opened.touched`: no file is read."""
        return 0

    def values(self) -> dict[str, int | float | str]:
        """See `Opened.values`."""
        return dict(self._values)


class LiveState(_InMemory):
    """A state whose arrays are on devices, of this process or others, or on the host of every process.

    Attributes:
        casts: dtypes, by path, in which leaves are loaded. They are cast on their own devices, before they are sent.
    """

    def __init__(self, state: PyTree, group: ProcessGroup) -> None:
        """Describes a state, whose arrays may be elsewhere.

        Args:
            state: live; abstract in processes that have no device of it.
            group: the processes that read it together.
        """
        self._group = group
        flat = _leaves.flat_state(state)
        by_path = {path: _as_array(leaf) for path, leaf in flat.leaves.items()}
        self._leaves: dict[str, Leaf] = _leaves.by_text(by_path)
        self._check_not_deleted()
        self.casts: dict[str, np.dtype] = {}
        # Only types matter here: values would be copied.
        shown = {path: _shown(leaf) for path, leaf in by_path.items()}
        self._described = leaf_values.storable(shown, abstract=True)
        logical_shapes = _leaves.by_text(flat.logical_shapes)
        self.leaves = _manifest.describe_all(self._described, logical_shapes)
        self._values = _values_of(self.leaves, self._described)

    def check_has_values(self, *, may_be_elsewhere: bool = False) -> None:
        """Raises for arrays without values; `may_be_elsewhere` allows those that are on devices of others alone."""
        lacking = []
        for path, leaf in self._leaves.items():
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                continue
            is_elsewhere = leaf.sharding is not None and not leaf.sharding.addressable_devices
            if not is_elsewhere or not may_be_elsewhere:
                lacking.append(f"{path}  {leaf.shape}")
        if lacking:
            raise CheckpointError(
                f"The state cannot be read: {counted(len(lacking), 'leaf has', 'leaves have')} no values.",
                where=lacking,
                why="the state is abstract; js.reshard alone takes one, in a process without a device of it.",
                do="model = js.shard_init(build, annotate)  # creates the values",
            )

    def source_of(self, path: str) -> Leaf:
        """Returns the array of a leaf, in the dtype that `casts` has for it; a random key as its numbers."""
        leaf = self._leaves[path]
        if is_key(leaf):
            return _numbers_of(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else jax.random.key_data(leaf)
        dtype = self.casts.get(path, leaf.dtype)
        if dtype == leaf.dtype:
            return leaf
        if isinstance(leaf, np.ndarray):
            return leaf.astype(dtype)
        if isinstance(leaf, jax.ShapeDtypeStruct) or not leaf.addressable_shards:
            # This process has no device of the array, and so no part in the cast.
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        with own_mesh(leaf):
            return _cast(leaf, dtype)

    def placed_as(self, path: str) -> jax.ShapeDtypeStruct | None:
        """Returns the stored shape, the dtype as loaded and the sharding of an array; None if it is on no devices."""
        leaf = self._leaves[path]
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or is_key(leaf):
            return None
        return jax.ShapeDtypeStruct(leaf.shape, self.casts.get(path, leaf.dtype), sharding=sharding)

    def _numbers(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        array = self.source_of(path)
        is_on_devices = isinstance(array, jax.Array | jax.ShapeDtypeStruct)
        if is_on_devices and not _is_on_every_host(array):
            return moved(array, self.leaves[path].shape, target)
        return placed(np.asarray(array), target, dtype=array.dtype)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`; every process reads the same leaves in the same order."""
        array = self.source_of(name)
        if not isinstance(array, jax.Array) or _is_on_every_host(array):
            return np.array(np.asarray(array)[box])
        processes = [jax.process_index()] if array.is_fully_addressable else self._group.members
        values = on_hosts(array, self.leaves[name].shape, processes)
        assert values is not None, "every process is among them"
        return values[box]

    def _check_not_deleted(self) -> None:
        """Raises for arrays whose values are gone."""
        deleted = [path for path, leaf in self._leaves.items() if isinstance(leaf, jax.Array) and leaf.is_deleted()]
        if deleted:
            raise CheckpointError(
                f"The state cannot be read: the values of {counted(len(deleted), 'leaf')} are gone.",
                where=deleted,
                why="these arrays are deleted: a step that donates its arguments reuses their memory.",
                do="use what the step returns: state = step(state, batch).",
            )


class StateOfOneProcess(_InMemory):
    """A state that only one process holds; the others learn of its leaves, and receive their shards."""

    def __init__(self, opened: Opened | None, holder: int, group: ProcessGroup, *, timeout_s: float) -> None:
        """Exchanges what the leaves are; every process of the group calls it.

        Args:
            opened: the state, in the process that holds it; None in the others.
            holder: the index of that process.
            group: the processes that read it together.
            timeout_s: how long to wait for the others.
        """
        self._opened = opened
        self._group = group
        self._holder = holder
        message = None
        if opened is not None:
            leaves = {path: dataclasses.asdict(leaf) for path, leaf in opened.leaves.items()}
            message = {"leaves": leaves, "values": opened.values(), "absent": dict(opened.absent)}
        messages = exchange("state of one process", message, timeout_s=timeout_s, group=group)
        received = messages[group.members.index(holder)]
        self.leaves = {path: _leaf_of(fields) for path, fields in received["leaves"].items()}
        self.absent = received["absent"]
        self._values = received["values"]

    def _numbers(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        leaf = self.leaves[path]
        read = None if self._opened is None else functools.partial(self._opened.read, path)
        return sent_from(self._holder, read, leaf.shape, np.dtype(leaf.dtype), target)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`; every process reads the same leaves in the same order."""
        leaf = self.leaves[name]
        dtype = np.dtype(leaf.dtype)
        # As bytes: without `jax_enable_x64`, JAX has no numbers of 64 bits.
        shape = (*leaf.shape, dtype.itemsize)
        read = None
        if self._opened is not None:
            values = self._opened.read(name, whole(leaf))
            in_bytes = np.frombuffer(values.tobytes(), np.uint8).reshape(shape)
            read = in_bytes.__getitem__
        devices = [device for device in jax.devices() if device.process_index in self._group.members]
        mesh = Mesh(np.array(devices), "device")
        target = jax.ShapeDtypeStruct(shape, np.uint8, sharding=NamedSharding(mesh, PartitionSpec()))
        copies = sent_from(self._holder, read, shape, np.dtype(np.uint8), target)
        received = np.asarray(copies.addressable_data(0))
        return np.frombuffer(received.tobytes(), dtype).reshape(leaf.shape)[box].copy()


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


def _values_of(leaves: Mapping[str, StoredLeaf], described: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Returns the leaves that are no arrays, by path."""
    return {path: described[path] for path, leaf in leaves.items() if not leaf.is_array}


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


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns an array in another dtype, with the same sharding."""
    return array.astype(dtype)


def _is_on_every_host(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether every process has an array of its own here, equal in all, such as a counter on no mesh."""
    # An array on the mesh of one device belongs to the process of that device alone.
    return jax.process_count() > 1 and isinstance(array.sharding, SingleDeviceSharding)


def _numbers_of(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the target of the numbers of a random key: with a dim more, which is whole."""
    numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(target.shape, target.dtype))
    sharding = target.sharding
    if isinstance(sharding, NamedSharding):
        entries = (*sharding.spec, *(None,) * (len(numbers.shape) - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=sharding)
