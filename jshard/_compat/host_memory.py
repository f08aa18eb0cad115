"""Arrays in host memory, also of devices that this process does not have."""

from typing import Any, TypeVar

import jax
from jax import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshard._compat import private_names

_HOST = jax.memory.Space.Host

S = TypeVar("S")


def on_host(x: object) -> bool:
    """Returns whether an array, traced or not, is in host memory, which is part of its type."""
    aval = x if isinstance(x, core.ShapedArray) else jax.typeof(x)
    return getattr(aval, "memory_space", None) == _HOST


def host_rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns an uninitialised array in host memory, to be written row by row.

    Made as `lax.scan` makes its own: XLA:GPU would first create zeros on the device and copy them.
    """
    empty = private_names.EMPTY_ON_HOST.find()
    if empty is None:
        return jax.device_put(jax.numpy.zeros(shape, dtype), _HOST)
    return jax.lax.broadcast(empty(jax.numpy.dtype(dtype), memory_space=_HOST), shape)


def memory_kinds(device: Any) -> list[str]:
    """Returns the memory kinds that programs for a device can name; empty if it does not report them."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except (AttributeError, jax.errors.JaxRuntimeError):  # of an absent cluster
        return []


class _HostSharding(NamedSharding):
    """A sharding in host memory for devices that do not report their memories."""

    memory_kind = property(lambda self: "pinned_host")  # pyright: ignore[reportAssignmentType]

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.memory_kind))

    def __eq__(self, other: object) -> bool:
        # JAX keys its caches by shardings: this one must differ from that on the device, with the same mesh and spec.
        return isinstance(other, _HostSharding) and super().__eq__(other)


def host_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> NamedSharding:
    """Returns a sharding in host memory. jax drops the kind for absent devices, although the compiler supports it."""
    sharding = NamedSharding(mesh, spec, memory_kind="pinned_host")
    if sharding.memory_kind is None:
        return _HostSharding(mesh, spec)
    return sharding


def asked_of_results(sharding: S) -> S | NamedSharding:
    """Returns the sharding for the results of a program: for absent devices, only their types name the host."""
    if isinstance(sharding, _HostSharding):
        return NamedSharding(sharding.mesh, sharding.spec)
    return sharding
