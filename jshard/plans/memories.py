"""Host memory: which devices have it, which arrays are stored in it, and how they come and go."""

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard._types import PyTree
from jshard.errors import MeshError
from jshard.plans.homes import Home, settle_in
from jshard.plans.mesh import AnyMesh, is_concrete
from jshard.plans.numeric import Value
from jshard.plans.padding import Padding, padding_of, store
from jshard.plans.placement import PARAMS, Placement

HOST_KIND = "pinned_host"
"""JAX's name for host memory that a device reads and writes directly."""


def check_offload(offload: str | None, mesh: AnyMesh, *, activations: bool = False) -> None:
    """Raises for an offload, of arrays or of activations, if devices of the mesh report no memory for it."""
    has_offload = bool(offload) or activations
    if not has_offload or not isinstance(mesh, Mesh):
        return
    if offload == PARAMS and mesh.devices.flat[0].platform == "tpu":
        raise MeshError(
            "Parameters cannot be in the host's memory on TPUs.",
            where=f"offload={offload!r}",
            why="the TPU compiler fails on what is computed from arrays there: `Fusion must have backend config`.",
            do='js.PlacementPolicy(offload="optimizer")  # only the state of the optimizer',
        )
    lacking = []
    for device in mesh.devices.flat:
        kinds = _compat.memory_kinds(device)
        # A device that reports no kinds at all says nothing about host memory.
        if kinds and HOST_KIND not in kinds:
            lacking.append(f"{device}  memories: {', '.join(kinds)}")
    if lacking:
        setting = f"offload={offload!r}" if offload else 'remat="offload"'
        raise MeshError(
            "These devices have no host memory to offload to.",
            where=lacking,
            why=f"{setting} needs memory of the kind {HOST_KIND!r}; {len(lacking)} of {mesh.size} devices lack it.",
            do='omit it; remat="full" and accumulate=2 save memory on the device.',
        )


def sharding_of(mesh: AnyMesh, spec: PartitionSpec, *, on_host: bool) -> NamedSharding:
    """Returns a sharding in the host's memory, or the device's."""
    if on_host:
        return _compat.host_sharding(mesh, spec)
    return NamedSharding(mesh, spec)


def home_in(mesh: AnyMesh, placement: Placement) -> Home | None:
    """Returns where the values of a parameter belong; None on a mesh without devices."""
    if not is_concrete(mesh):
        return None
    sharding = sharding_of(mesh, placement.partition_spec, on_host=placement.on_host)
    return Home(sharding, placement.stored_shape)


def place_variable(variable: nnx.Variable, placement: Placement, mesh: AnyMesh) -> None:
    """Stores the value of a variable as planned, where it is not, and gives the variable its home.

    A variable that was merged from a plain state, or that replaced another, has no home and no padding yet. What a
    program traces is left as it is.
    """
    home = home_in(mesh, placement)
    value = variable.get_raw_value()
    if home is None or _compat.is_tracer(value):
        return
    padding = Padding.of(placement)
    if padding is not None and padding_of(variable) is None and value.shape == placement.shape:
        with jax.ensure_compile_time_eval():  # else, in a trace, the variable would hold a value of the trace
            store(variable, padding, padding.pad(value))
    settle_in(variable, home)


def is_placed(variable: nnx.Variable, placement: Placement, mesh: AnyMesh) -> bool:
    """Returns whether `place_variable` would change nothing."""
    home = home_in(mesh, placement)
    value = variable.get_raw_value()
    # What `place_variable` leaves as it is.
    if home is None or _compat.is_tracer(value) or isinstance(value, jax.ShapeDtypeStruct):
        return True
    lacks_padding = placement.padding > 0 and value.shape == placement.shape
    return not lacks_padding and not home.is_elsewhere(value)


# Copies between the memories, in a program and outside.


def to_device(tree: PyTree) -> PyTree:
    """Returns the tree, with arrays on the host copied to the device."""
    return jax.tree.map(fetched, tree)


def fetched(x: Value) -> Value:
    """Returns an array on the device."""
    if _compat.on_host(x):
        # By memory alone: the array keeps its sharding.
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def to_host(x: jax.Array) -> jax.Array:
    """Returns an array in the host's memory."""
    if _compat.on_host(x):
        return x
    return jax.device_put(x, jax.memory.Space.Host)


def stored_array(x: jax.Array, placement: Placement, mesh: AnyMesh) -> jax.Array:
    """Returns the array of a parameter as it is stored: padded, sharded, in its memory."""
    padding = Padding.of(placement)
    # Padded on the device, and then copied: a program computes with arrays on the device.
    stored = x if padding is None else padding.pad(x)
    is_layer_of_loop = stored.ndim != len(placement.spec)  # it lacks the leading dims of the stack
    if is_concrete(mesh) and not is_layer_of_loop:
        stored = lax.with_sharding_constraint(stored, NamedSharding(mesh, placement.partition_spec))
    return to_host(stored) if placement.on_host else stored


def placed_like(x: jax.Array, like: jax.Array | None) -> jax.Array:
    """Returns an array in the same memory as another array; unchanged if there is no other."""
    if like is not None and _compat.on_host(like):
        return to_host(x)
    return x


def back(tree: PyTree, like: PyTree) -> PyTree:
    """Returns a tree of arrays, each in the same memory as its counterpart."""
    return jax.tree.map(placed_like, tree, like)
