"""Arrays that every process of a run has for itself, on a device of its own: they are stored as one value.

A key, `jax.random.key(1)`, or a counter, `jnp.asarray(3)`, lies on one device of each process. Orbax writes only what
is one array of the whole run; so the copies are put together as the replicas of one, and compared before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.sums import box_sums


def is_local(leaf: Any) -> bool:
    """Whether each of several processes has an array of its own here."""
    return isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable


def as_one(leaf: jax.Array) -> jax.Array:
    """The copies of all processes as the replicas of one array; nothing is sent."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), "process")
    own = jax.device_put(leaf, first[jax.process_index()])
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, PartitionSpec()), [own])


def told(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What this process tells of the copies that it has: shape, dtype and sums by path."""
    return {key: _told(leaf) for key, leaf in leaves.items() if is_local(leaf) and leaf.size}


def check_equal(heard: Sequence[Mapping[str, list[Any]]]) -> None:
    """Compares the copies of all processes.

    Args:
        heard: what `told` gave each, by process.

    Raises:
        CheckpointError: the processes do not have the same values.
    """
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


def _told(leaf: jax.Array) -> list[Any]:
    values = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
    sums = box_sums(values, tuple(slice(None) for _ in values.shape), values.shape)
    return [list(leaf.shape), str(leaf.dtype), list(sums)]
