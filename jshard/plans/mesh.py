"""The axes of a mesh: `replica` copies, sharded over `fsdp`; also `pipe`, `expert`, `context` and `tensor`."""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.errors import MeshError
from jshard.facts.devices import DeviceFacts, device_of
from jshard.facts.gpu_target import HOPPER, NvidiaTarget

PIPE = "pipe"
REPLICA = "replica"
FSDP = "fsdp"
EXPERT = "expert"
CONTEXT = "context"
TENSOR = "tensor"
AXES = (PIPE, REPLICA, FSDP, EXPERT, CONTEXT, TENSOR)
"""All axes, outermost first."""
SHARD_AXES = (FSDP, PIPE)
"""The axes over which every large parameter is stored, outermost first."""
DATA_AXES = (REPLICA, *SHARD_AXES, EXPERT)
"""The axes over which the batch is split, outermost first.

Devices of `pipe` are far apart, so it is the outermost axis of a mesh. Here it is inside `fsdp`: the examples of all
places along `pipe`, and their parts of a parameter, are then one contiguous part. Layers on stages exchange just these.
"""
INNER_AXES = (EXPERT, CONTEXT)
"""The axes over which a data shard's program is split further: over the experts, over the sequence."""
REGION_AXES = (*DATA_AXES, CONTEXT)
"""The axes over which a region is manual; parameters are sharded over some and replicated over the others."""

AnyMesh: TypeAlias = Mesh | AbstractMesh
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]


def check_mesh(value: object) -> AnyMesh:
    """Returns an annotation's mesh with Auto axes; a MeshError if jshard cannot shard over it."""
    if not isinstance(value, (Mesh, AbstractMesh)):
        raise MeshError(
            "This is not a mesh.",
            where=f"mesh={value!r}",
            why=f"a jax.sharding.Mesh is needed, not {type(value).__name__}.",
            do="mesh = js.mesh(fsdp=-1)",
        )
    where = f"mesh axes {dict(zip(value.axis_names, value.axis_sizes, strict=True))}"
    if FSDP not in value.axis_names:
        raise MeshError(
            "The mesh has no axis to shard over.",
            where=where,
            why=f"parameters are sharded over an axis named {FSDP!r}, and copies are on {REPLICA!r}.",
            do="mesh = js.mesh(fsdp=-1)",
        )
    kinds = zip(value.axis_names, value.axis_types, strict=True)
    manual = [name for name, kind in kinds if kind == AxisType.Manual]
    if manual:
        raise MeshError(
            "The mesh has Manual axes.",
            where=where,
            why=f"{', '.join(map(repr, manual))}: Manual axes are for code inside a jax.shard_map.",
            do="mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)",
        )
    return with_auto_axes(value)


def check_has_devices(mesh: AnyMesh, where: str, *, requested: AnyMesh | None = None) -> Mesh:
    """Returns an annotation's mesh; raises if it has no devices, or differs from a mesh that the user requested."""
    if isinstance(mesh, Mesh) and (requested is None or check_mesh(requested) == mesh):
        return mesh
    raise MeshError(
        "Arrays cannot be placed on this mesh.",
        where=where,
        # A mesh with devices is only refused because it differs.
        why="the annotation used another." if isinstance(mesh, Mesh) else "the annotation used an abstract mesh.",
        do="mesh = js.mesh(fsdp=-1)  # the same for js.fully_shard and js.shard_init",
    )


def with_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with Explicit axes made Auto, so that the model's code need not specify shardings."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)


def degree(mesh: AnyMesh, axis: str) -> int:
    """Returns the size of a mesh axis; 1 if the mesh lacks it."""
    # An axis that a mesh lacks and one of degree 1 mean the same.
    return dict(mesh.shape).get(axis, 1)


def data_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes over which the batch is split, outermost first.

    Axes of degree 1 are omitted, because a reduction over one would stay in the program; `fsdp` is always included.
    """
    return tuple(axis for axis in DATA_AXES if axis == FSDP or degree(mesh, axis) > 1)


def batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the data axes that split only the batch and stored arrays: all except `expert`."""
    return tuple(axis for axis in data_axes(mesh) if axis != EXPERT)


def mesh_of_place(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh of one place along `pipe`: the other axes. It stands for all places, which are alike."""
    if PIPE not in mesh.axis_names:
        return mesh
    position = mesh.axis_names.index(PIPE)
    names = tuple(axis for axis in mesh.axis_names if axis != PIPE)
    types = tuple(kind for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if axis != PIPE)
    if isinstance(mesh, Mesh):
        return Mesh(np.take(mesh.devices, 0, axis=position), names, axis_types=types)
    sizes = tuple(mesh.shape[axis] for axis in names)
    return AbstractMesh(sizes, names, axis_types=types)


def inner_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes of the mesh over which a data shard's program is split further."""
    return splitting_axes(INNER_AXES, dict(mesh.shape))


def splitting_axes(axes: Iterable[str], degrees: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes that split something: those of a degree above 1."""
    # As in `degree`, an axis that the mesh lacks counts as one of degree 1.
    return tuple(axis for axis in axes if degrees.get(axis, 1) > 1)


def degrees_text(degrees: Mapping[str, object]) -> str:
    """Returns degrees as arguments of `js.mesh`: `replica=2, fsdp=4`."""
    return ", ".join(f"{axis}={n}" for axis, n in degrees.items())


def data_degrees_text(mesh: AnyMesh) -> str:
    """Returns the data axes with their degrees, for messages."""
    return degrees_text({axis: degree(mesh, axis) for axis in data_axes(mesh)})


def region_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes over which a region's devices have different work, outermost first."""
    if degree(mesh, CONTEXT) == 1:
        return data_axes(mesh)
    return (*data_axes(mesh), CONTEXT)


def region_degree(mesh: AnyMesh) -> int:
    """Returns the number of devices over which a region splits its work."""
    return data_degree(mesh) * degree(mesh, CONTEXT)


def manual_axes(mesh: AnyMesh) -> frozenset[str]:
    """Returns the axes over which a region is manual: its own, and others of degree 1, which compiles best."""
    # `tensor` above 1 stays automatic: the compiler splits products along it.
    return frozenset(axis for axis, size in dict(mesh.shape).items() if axis in REGION_AXES or size == 1)


def data_degree(mesh: AnyMesh) -> int:
    """Returns the number of shards of the batch."""
    return data_shards(dict(mesh.shape))


def data_shards(degrees: Mapping[str, int]) -> int:
    """Returns the number of batch shards on a mesh of these degrees."""
    # `context` splits sequences: its devices share the rows of one data shard.
    return math.prod(degrees.get(axis, 1) for axis in DATA_AXES)


def batch_sharding(mesh: Mesh, shape: Sequence[int] = ()) -> NamedSharding:
    """Returns the sharding of an array whose leading dim is the batch.

    Given a shape, dim 1 is over `context` if it divides.
    """
    context_degree = degree(mesh, CONTEXT)
    has_sequence = context_degree > 1 and len(shape) > 1 and shape[1] % context_degree == 0
    if has_sequence:
        # Dim 1 of a batch is the sequence.
        return NamedSharding(mesh, PartitionSpec(data_axes(mesh), CONTEXT))
    return NamedSharding(mesh, PartitionSpec(data_axes(mesh)))


def hosts_along(mesh: AnyMesh, axis: str) -> int:
    """Returns the number of groups of neighbours with fast links along an axis; 1 if unknown, and on TPUs."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform == "tpu":
        return 1
    length = mesh.shape[axis]
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, length)
    hosts = np.vectorize(_host_of(mesh))(lines)
    # Where any line of devices goes from one host to the next: groups of neighbours end there, and have one size.
    # `hosts` has a row for each line of devices along the axis.
    borders = np.flatnonzero(np.diff(hosts).any(0)) + 1
    group_size = math.gcd(length, *borders.tolist())
    return length // group_size


def num_hosts(mesh: Mesh) -> int:
    """Returns the number of groups of devices with fast links among them."""
    host_of = _host_of(mesh)
    return len({host_of(device) for device in mesh.devices.flat})


def _host_of(mesh: Mesh) -> Callable[[Device], int]:
    """Returns a function from a device to its host."""
    has_process_for_each_device = num_processes(mesh) == mesh.size
    if has_process_for_each_device:  # a slice is a host there
        return slice_of
    return lambda device: device.process_index


def num_processes(mesh: Mesh) -> int:
    """Returns the number of processes with devices of the mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def is_of_tpus(mesh: AnyMesh) -> bool:
    """Returns whether the mesh has devices, and these are TPUs."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"


def fuses_units(mesh: AnyMesh) -> bool:
    """Returns whether it pays to let the compiler fuse the end of one unit with the beginning of the next.

    XLA:CPU removes barriers in jax 0.10, so nothing parts them there. On GPUs before Hopper XLA stores another array of
    each layer where it fuses both: GPT-2 124M on 64 A100 takes 102.5 in place of 100.4 ms, and 12.0 in place of 11.5
    GiB (compiled; times are the plan's estimates). Nothing is known of AMD's.
    """
    if not isinstance(mesh, Mesh):
        return True
    device = mesh.devices.flat[0]
    facts = device_of(device.device_kind)
    if facts is None or facts.target is None:
        return device.platform != "cpu"
    return _is_since_hopper(facts)


def reduces_before_gathers(mesh: AnyMesh) -> bool:
    """Returns whether a loop reduces one iteration before it gathers for the next, and not beside that.

    A compiler that starts collectives as early as possible would wait for the reduction at once, to start the gathers.
    That is so on AMD GPUs; and on Ampere, where XLA has such a scheduler or one without figures for collectives. On
    TPUs, which have more links than one, collectives can run side by side.
    """
    if not isinstance(mesh, Mesh):
        return True
    device = mesh.devices.flat[0]
    return device_reduces_before_gathers(device_of(device.device_kind), device.platform)


def device_reduces_before_gathers(facts: DeviceFacts | None, platform: str) -> bool:
    """Returns the same for a kind of device.

    Args:
        facts: its record; None if it is unknown.
        platform: by JAX's name.
    """
    if facts is None or facts.target is None:
        return platform != "tpu"
    return _is_since_hopper(facts)


def products_write_sums(mesh: AnyMesh) -> bool:
    """Returns whether products write gradients in the dtype of their sum, often a wider one than their own.

    So it is on NVIDIA GPUs before Hopper: Llama 3 8B on 64 A100 takes 2843 in place of 2870 ms (compiled; times are the
    plan's estimates). For later ones XLA's model of products has no figures with a wider result, takes such a product
    for 64 times as long as it is, and hides all collectives of a layer behind one. On TPUs the cast is part of the
    product already. On stages the gradients of several microbatches are added first.
    """
    if not isinstance(mesh, Mesh):
        return False
    target = _nvidia_target(mesh)
    return target is not None and target.major < HOPPER and degree(mesh, PIPE) == 1


def reduces_in_parts(mesh: AnyMesh) -> bool:
    """Returns whether it is faster to reduce the gradients of a unit in parts than in one collective.

    So it is on NVIDIA GPUs before Hopper with jax 0.10. XLA has no figures of their reductions, takes each for a short
    one, and starts it one kernel before its result is read: several have more kernels beside them than one. Llama 3 8B
    on 64 A100, reduced in float32, takes 2755 in place of 2841 ms, with 8 replicas 2884 in place of 3023 (compiled;
    times are the plan's estimates). Later versions start collectives as early as possible there, and would wait for a
    part at once, to start the next.
    """
    if not isinstance(mesh, Mesh):
        return False
    target = _nvidia_target(mesh)
    return target is not None and target.major < HOPPER and _compat.ESTIMATES_AMPERE


def _nvidia_target(mesh: Mesh) -> NvidiaTarget | None:
    """Returns what the devices of a mesh are to the compiler; None unless they are NVIDIA GPUs that are known."""
    facts = device_of(mesh.devices.flat[0].device_kind)
    if facts is None or not isinstance(facts.target, NvidiaTarget):
        return None
    return facts.target


def _is_since_hopper(facts: DeviceFacts) -> bool:
    """Returns whether it is an NVIDIA GPU of the Hopper generation, or a later one."""
    return isinstance(facts.target, NvidiaTarget) and facts.target.major >= HOPPER


class SumsOnArrival(enum.Enum):
    """Of which gradients each device sums the parts that arrive, in the place of a reduce-scatter."""

    NEVER = "never"
    OF_NARROWER = "of narrower"
    """Of those that are computed in a narrower dtype than that of their sum: the parts are sent as they are."""
    ALWAYS = "always"


def sums_on_arrival(mesh: AnyMesh) -> SumsOnArrival:
    """Returns when gradients are sent in parts that each device sums itself, because that is faster on the platform.

    Between processes on CPUs, collectives are those of gloo. Its reduce-scatter takes two to three times as long as its
    all-to-all and a local sum, which send the same bytes. Within one process no such sum is faster.

    Within a host of NVIDIA GPUs a reduce-scatter in float32 needs each gradient of bfloat16 cast before it. The parts
    have half of the bytes, and their sum is one kernel that reads them and writes a shard. Between hosts a
    reduce-scatter sends less: it sums within each host first. On stages gradients are sums of several already.
    """
    if not isinstance(mesh, Mesh):
        return SumsOnArrival.NEVER
    if mesh.devices.flat[0].platform == "cpu":
        return SumsOnArrival.ALWAYS if num_processes(mesh) > 1 else SumsOnArrival.NEVER
    is_host_of_nvidia = _nvidia_target(mesh) is not None and num_hosts(mesh) == 1
    if is_host_of_nvidia and degree(mesh, PIPE) == 1:
        return SumsOnArrival.OF_NARROWER
    return SumsOnArrival.NEVER


def is_concrete(mesh: AnyMesh) -> bool:
    """Returns whether the mesh has devices, so that arrays can be placed on it."""
    return isinstance(mesh, Mesh)


def slice_of(device: Device) -> int:
    """Returns the number of a device's slice; devices without slices are all in one."""
    return getattr(device, "slice_index", 0)
