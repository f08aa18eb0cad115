"""What several processes hold: each reads a part, and they exchange the parts.

And arrays that each process has for itself: they are stored as one, once they are found to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.sums import box_sums


def spreads(sharding: Sharding) -> tuple[str, ...]:
    """The mesh axes over which a read is cut: those whose devices hold equal shards in several processes."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return ()
    used = _used(sharding)
    free = [axis for axis in sharding.mesh.axis_names if axis not in used and sharding.mesh.shape[axis] > 1]
    return tuple(axis for axis in free if _spans_processes(sharding.mesh, axis))


def cut_further(sharding: NamedSharding, shape: tuple[int, ...], axes: tuple[str, ...]) -> NamedSharding:
    """A sharding that is cut over further axes, along the first dim that can be; as it was where none can."""
    degree = math.prod(sharding.mesh.shape[axis] for axis in axes)
    spec = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
    for dim, size in enumerate(sharding.shard_shape(shape)):
        if axes and size and size % degree == 0:
            before = spec[dim] or ()
            spec[dim] = (*(before if isinstance(before, tuple) else (before,)), *axes)
            return NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return sharding


def _used(sharding: NamedSharding) -> set[Any]:
    """The mesh axes that cut an array."""
    return {axis for dim in sharding.spec if dim is not None for axis in (dim if isinstance(dim, tuple) else (dim,))}


def _owners(devices: np.ndarray) -> np.ndarray:
    """The process of each device."""
    return np.vectorize(lambda device: device.process_index)(devices)


def _spans_processes(mesh: Mesh, axis: str) -> bool:
    """Whether some devices along an axis belong to different processes."""
    owners = _owners(mesh.devices)
    lines = np.moveaxis(owners, mesh.axis_names.index(axis), -1)
    return bool((lines != lines[..., :1]).any())


# Arrays that each process has for itself.


def is_local(leaf: Any) -> bool:
    """Whether each of several processes has an array of its own here."""
    return isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable


def as_one(leaf: jax.Array) -> jax.Array:
    """The copies of all processes as the replicas of one array; nothing is sent."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), "process")
    own = jax.device_put(leaf, first[jax.process_index()])
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, PartitionSpec()), [own])


def local_copies(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The facts of the copies that this process has: shape, dtype and sums by path."""
    return {key: _copy_facts(leaf) for key, leaf in leaves.items() if is_local(leaf) and leaf.size}


def check_equal(heard: Sequence[Mapping[str, list[Any]]]) -> None:
    """Raises a `CheckpointError` if what `local_copies` gave each process is not the same."""
    bad = []
    for key in sorted({key for found in heard for key in found}):
        others = [number for number, found in enumerate(heard) if found.get(key) != heard[0].get(key)]
        if others:
            bad.append(f"{key}  of process 0 and of process {', '.join(map(str, others))}")
    if bad:
        raise CheckpointError(
            f"The state cannot be saved: the processes have other values of {len(bad)} leaves.",
            where=bad,
            why="an array on a device of each process is stored once, for all of them.",
            do="compute it from the same seed everywhere; or lay it over the mesh, with a row for each process.",
        )


def _copy_facts(leaf: jax.Array) -> list[Any]:
    values = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
    sums = box_sums(values, tuple(slice(None) for _ in values.shape), values.shape)
    return [list(leaf.shape), str(leaf.dtype), list(sums)]
