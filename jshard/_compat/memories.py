"""Arrays in the host's memory, also of devices that are not there."""

from typing import Any

import jax
from jax import core
from jax.sharding import NamedSharding, PartitionSpec


def on_host(x: Any) -> bool:
    """Whether an array, traced or not, is in the host's memory: that is part of its type."""
    aval = x if isinstance(x, core.ShapedArray) else jax.typeof(x)
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def host_rows(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array in the host's memory, to be written row by row; what it holds before does not count.

    As `lax.scan` makes its own: of zeros that are put there, XLA:GPU would make a copy on the device first, which is
    what happens where the private name is gone.
    """
    try:
        from jax._src.lax.lax import empty2
    except ImportError:
        return jax.device_put(jax.numpy.zeros(shape, dtype), jax.memory.Space.Host)
    return jax.lax.broadcast(empty2(jax.numpy.dtype(dtype), memory_space=jax.memory.Space.Host), shape)


def memory_kinds(device: Any) -> list[str]:
    """The kinds of memory that programs for a device can name; empty where it does not say."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except (AttributeError, jax.errors.JaxRuntimeError):  # of a cluster that is not there
        return []


class _HostSharding(NamedSharding):
    """A sharding in the host's memory of devices that do not say which memories they have."""

    memory_kind = property(lambda self: "pinned_host")  # pyright: ignore[reportAssignmentType]

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.memory_kind))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostSharding) and super().__eq__(other)


def host_sharding(mesh: Any, spec: PartitionSpec) -> NamedSharding:
    """A sharding in the host's memory.

    Of the devices of a GPU cluster that is not there jax knows no memories, and would drop the kind without a word; the
    compiler knows it.
    """
    found = NamedSharding(mesh, spec, memory_kind="pinned_host")
    return found if found.memory_kind else _HostSharding(mesh, spec)


def asked_of_results(sharding: Any) -> Any:
    """A sharding for the results of a program: of devices that are not there, their types alone name the host."""
    return NamedSharding(sharding.mesh, sharding.spec) if isinstance(sharding, _HostSharding) else sharding
