"""Arrays on devices of one process, which every process has for itself: they are stored once, if all are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._processes import ProcessGroup
from jshard._text import counted
from jshard._types import Json
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.state.leaf_sums import box_sums

CopyFacts = list[Json]
"""The shape, the dtype and the checksums of a process's copy of an array, as JSON."""


def first_devices() -> dict[int, jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the first device of each process."""
    # In reverse, so that the first device of a process replaces the others.
    return {device.process_index: device for device in reversed(jax.devices())}


def is_local(leaf: object, group: ProcessGroup) -> TypeGuard[jax.Array]:
    """Returns whether this is a process-local array and there are several processes."""
    return isinstance(leaf, jax.Array) and len(group.members) > 1 and leaf.is_fully_addressable


def as_replicas(leaf: jax.Array, group: ProcessGroup) -> jax.Array:
    """Returns the copies of all processes as replicas of one array, without communication."""
    devices = first_devices()
    mesh = Mesh(np.array([devices[process] for process in group.members]), "process")
    # A replica must be on the device that the mesh has of this process, and the copy may be on another one.
    copy = jax.device_put(leaf, devices[jax.process_index()])
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, PartitionSpec()), [copy])


def local_copies(leaves: Mapping[str, object], group: ProcessGroup) -> dict[str, CopyFacts]:
    """Returns what to compare of this process's copies of process-local arrays, by path."""
    copies = {}
    for path, leaf in leaves.items():
        if not is_local(leaf, group) or not leaf.size:
            continue
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        # NumPy has no keys: their numbers are compared.
        values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        sums = box_sums(values, (slice(None),) * values.ndim, values.shape)
        # Lists, as they are after an exchange as JSON.
        copies[path] = [list(leaf.shape), str(leaf.dtype), list(sums)]
    return copies


def check_equal(copies_by_process: Sequence[Mapping[str, CopyFacts]], group: ProcessGroup) -> None:
    """Raises `CheckpointError` unless `local_copies` is the same on every process of a group."""
    all_paths = set().union(*copies_by_process)  # one that only some processes have differs, too
    first_copies = copies_by_process[0]
    bad = []
    for path in sorted(all_paths):
        differing = []
        for process, copies in zip(group.members, copies_by_process, strict=True):
            if copies.get(path) != first_copies.get(path):
                differing.append(str(process))
        if differing:
            bad.append(f"{path}  on process {group.members[0]} and process {', '.join(differing)}")
    if bad:
        raise CheckpointError(
            f"The state cannot be saved: {counted(len(bad), 'leaf differs', 'leaves differ')} between processes.",
            where=bad,
            why="an array on one device per process is stored once for all processes.",
            do="compute it from the same seed on every process, or shard it over the mesh with a row per process.",
        )
