"""Memory beyond the device: what `offload` means, which devices have it, and arrays on their way to and fro.

Where an array is is part of its type, so nothing here is asked what to move: what is typed as the host's goes to the
device before it is used, and what comes in its place has the same type.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.errors import MeshError
from jshard.plans.mesh import AnyMesh

HOST_KIND = "pinned_host"
"""JAX's name of the host's memory that a device reads and writes directly."""


def check_offload(offload: str | None, mesh: AnyMesh, *, activations: bool = False) -> None:
    """Raises for an offload, of arrays or of activations, that the devices of the mesh have no memory for.

    Those of an abstract mesh cannot be asked, and those of a cluster that is not there do not say: their compiler has
    the last word.
    """
    if not (offload or activations) or not isinstance(mesh, Mesh):
        return
    asked = f"offload={offload!r}" if offload else 'remat="offload"'
    kinds = {device: _compat.memory_kinds(device) for device in mesh.devices.flat}
    lacking = {device: found for device, found in kinds.items() if found and HOST_KIND not in found}
    if lacking:
        raise MeshError(
            "These devices have no host memory to offload to.",
            where=[f"{device}  memories: {', '.join(found)}" for device, found in lacking.items()],
            why=f"{asked} needs memory of the kind {HOST_KIND!r}; {len(lacking)} of {len(kinds)} devices lack it.",
            do='leave it out; remat="full" and accumulate=2 save memory on the device.',
        )


def sharding_of(mesh: Any, spec: PartitionSpec, *, on_host: bool) -> NamedSharding:
    """A sharding in the host's memory, or the device's."""
    return _compat.host_sharding(mesh, spec) if on_host else NamedSharding(mesh, spec)


def to_device(tree: Any) -> Any:
    """The tree with what is on the host brought to the device."""
    return jax.tree.map(fetched, tree)


def fetched(x: Any) -> Any:
    """An array, on the device."""
    return jax.device_put(x, jax.memory.Space.Device) if _compat.on_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
    """An array, in the host's memory."""
    return x if _compat.on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def placed_like(x: jax.Array, like: Any) -> jax.Array:
    """An array in the memory that another one is in."""
    return to_host(x) if _compat.on_host(like) else x


def back(tree: Any, like: Any) -> Any:
    """A tree of arrays, each in the memory that its like is in."""
    return jax.tree.map(placed_like, tree, like)


def hosted(arrays: Sequence) -> list[int]:
    """Positions of the arrays that are on the host; a gradient that nobody asked for is None, and is nowhere."""
    return [i for i, x in enumerate(arrays) if x is not None and _compat.on_host(x)]
