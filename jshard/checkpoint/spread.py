"""Reading what several processes hold once: each reads a part, and they exchange the parts.

With HSDP every shard lies in as many processes as there are replicas, and each would read it from the storage. Here
the shard is cut further over these mesh axes for the read, and gathered afterwards over the network of the devices,
leaf by leaf (ByteCheckpoint's zero-redundant loading, arXiv 2407.20143, section 4).
"""

from __future__ import annotations

import math

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


def spreads(sharding: Sharding) -> tuple[str, ...]:
    """The mesh axes over which a read is cut: those whose devices hold equal shards in several processes.

    Args:
        sharding: of the leaf that is wanted.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return ()
    used = {axis for dim in sharding.spec if dim is not None for axis in (dim if isinstance(dim, tuple) else (dim,))}
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


def _spans_processes(mesh: Mesh, axis: str) -> bool:
    """Whether some devices along an axis belong to different processes."""
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    lines = np.moveaxis(owners, mesh.axis_names.index(axis), -1)
    return bool((lines != lines[..., :1]).any())
