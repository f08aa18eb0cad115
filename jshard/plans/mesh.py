"""Named meshes: `replica` copies, each sharded over `fsdp`, and further axes: `expert`, `context`, `tensor`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, overload

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jshard._text import counted
from jshard.errors import MeshError

REPLICA, FSDP, EXPERT, CONTEXT, TENSOR = AXES = ("replica", "fsdp", "expert", "context", "tensor")
DATA_AXES = (REPLICA, FSDP, EXPERT)
"""The axes over which the batch is split."""
INNER_AXES = (EXPERT, CONTEXT)
"""The axes over which a data shard's program is split further: over the experts, over the sequence."""
REGION_AXES = (*DATA_AXES, CONTEXT)
"""The axes over which a region is manual; parameters are sharded over some and replicated over the others."""

_ON_DEMAND = (EXPERT, CONTEXT)  # of degree 1 a mesh lacks them

AnyMesh: TypeAlias = Mesh | AbstractMesh


@overload
def mesh(
    *,
    replica: int = ...,
    fsdp: int = ...,
    expert: int = ...,
    context: int = ...,
    tensor: int = ...,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh: ...
@overload
def mesh(
    *,
    replica: int = ...,
    fsdp: int = ...,
    expert: int = ...,
    context: int = ...,
    tensor: int = ...,
    devices: int,
) -> AbstractMesh: ...
def mesh(
    *,
    replica: int = 1,
    fsdp: int = -1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | int | None = None,  # pyright: ignore[reportInvalidTypeForm]
    **unknown: int,
) -> AnyMesh:
    """Arranges the devices over the axes `replica`, `fsdp`, `expert`, `context` and `tensor`.

    The batch is split over all axes except `context`, which splits its sequences, and `tensor`. `expert` and `tensor`
    split the parameters that the model's own annotations name; parameters are sharded over `fsdp`, together with
    `expert` (if they have no experts there) and `context`, and replicated over the others. The innermost axes use the
    fastest links: devices are ordered by slice, process and id (on TPU by their position in the torus), so that
    neighbours share a host.

    Args:
        replica: degree of the replica axis; -1 uses the remaining devices.
        fsdp: degree of the sharding axis; -1 (the default): the remaining devices.
        expert: degree of the expert axis; -1: the remaining devices. With degree 1 the mesh has no such axis.
        context: degree of the axis that splits sequences; -1: the remaining devices. With degree 1 the mesh has no
            such axis.
        tensor: degree of the tensor axis; -1: the remaining devices.
        devices: the devices to use, all of them by default. An int creates a mesh of that many devices
            that need not exist: for `js.plan` and `js.explain`, not for arrays.
        **unknown: not accepted: there are no other axes.

    Returns:
        A `jax.sharding.Mesh` with Auto axes, or an `AbstractMesh` if `devices` is an int.

    Raises:
        MeshError: an axis is unknown, a degree is not positive, more than one is -1, or the product does
            not match the number of devices.

    Example:
        >>> mesh = js.mesh(replica=2, fsdp=-1)
        >>> dict(mesh.shape)
        {'replica': 2, 'fsdp': 4, 'tensor': 1}
    """
    requested = {REPLICA: replica, FSDP: fsdp, EXPERT: expert, CONTEXT: context, TENSOR: tensor}
    if isinstance(devices, int):
        shape = _shape_for(requested, unknown, devices, devices)
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    chosen = list(jax.devices() if devices is None else devices)
    shape = _shape_for(requested, unknown, len(chosen), devices)
    sizes = tuple(shape.values())
    if chosen[0].platform == "tpu":
        arranged = _in_torus(chosen, sizes)
    else:
        arranged = np.array(sorted(chosen, key=_nearness)).reshape(sizes)
    return Mesh(arranged, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def _shape_for(requested: dict[str, int], unknown: dict[str, int], count: int, devices: Any) -> dict[str, int]:
    """Returns the axes of the mesh and their degrees; axes on demand are left out at degree 1."""
    degrees = _fill(requested, unknown, count, devices)
    return {axis: n for axis, n in degrees.items() if axis not in _ON_DEMAND or n > 1}


def _nearness(device: Any) -> tuple[int, int, int]:
    """Returns a key by which neighbours share a process, and neighbours of these a slice."""
    return _slice_of(device), device.process_index, device.id


def _slice_of(device: Any) -> int:
    """Returns the number of a device's slice; devices without slices are all in one."""
    return getattr(device, "slice_index", 0)


def _in_torus(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Arranges TPUs by position in the torus of their slice; the outermost axes span the slices."""
    slices = len({_slice_of(device) for device in devices})
    remaining = slices
    slices_per_axis = []
    for size in sizes:  # the outermost first: the links between slices are the slowest
        slices_per_axis.append(math.gcd(size, remaining))
        remaining //= slices_per_axis[-1]
    if remaining > 1:
        raise MeshError(
            "The mesh cannot span the slices.",
            where=f"degrees {' x '.join(map(str, sizes))}",
            why=f"the devices form {slices} slices, and no degrees contain their factors.",
            do=f"mesh = js.mesh(replica={slices})  # a copy of the model on each slice",
        )
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices)
    sizes_in_slice = [size // n for size, n in zip(sizes, slices_per_axis, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(sizes_in_slice, slices_per_axis, devices)


def _fill(requested: dict[str, int], unknown: dict[str, int], count: int, devices: Any) -> dict[str, int]:
    """Returns the degrees in axis order, with -1 replaced by the remaining devices.

    Args:
        requested: the degrees of all axes.
        unknown: axes that do not exist, with their degrees.
        count: the number of devices.
        devices: as `mesh` takes them, for messages.
    """
    problem = _problem_of(requested, unknown, count, devices)
    if problem is not None:
        mentioned = _mentioned(requested) | unknown
        where = "js.mesh(" + ", ".join(f"{axis}={n}" for axis, n in mentioned.items()) + ")"
        do = _nearest_call(requested, count, devices) + problem.hint
        raise MeshError(problem.what, where=where, why=problem.why, do=do)
    fixed = _product(requested)
    return {axis: count // fixed if n == -1 else n for axis, n in requested.items()}


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Why no mesh has the requested degrees: parts of the error."""

    what: str
    why: str
    hint: str = ""


def _problem_of(requested: Mapping[str, int], unknown: Mapping[str, int], count: int, devices: Any) -> _Problem | None:
    """Returns what is wrong with the requested degrees, or None; the arguments are those of `_fill`."""
    if unknown:
        return _Problem(
            what=f"The mesh has no axis {', '.join(map(repr, unknown))}.",
            why=f"the axes are {', '.join(AXES)}.",
        )
    bad_axes = [axis for axis, n in requested.items() if not _is_degree(n)]
    if bad_axes:
        values = ", ".join(f"{axis}={requested[axis]!r}" for axis in bad_axes)
        return _Problem(
            what=f"The degree of mesh axis {', '.join(map(repr, bad_axes))} is not a positive number.",
            why=f"{values}; a degree must be 1 or more, or -1 for the rest.",
        )
    open_axes = [axis for axis, n in requested.items() if n == -1]
    if len(open_axes) > 1:
        return _Problem(
            what=f"More than one mesh axis is -1: {', '.join(open_axes)}.",
            why=f"only one axis can take the rest of the {counted(count, 'device')}.",
        )
    return _problem_of_count(requested, count, devices, has_open_axis=bool(open_axes))


def _problem_of_count(
    requested: Mapping[str, int], count: int, devices: Any, *, has_open_axis: bool
) -> _Problem | None:
    """Returns what is wrong with the number of devices, or None. The degrees are valid, one of them may be -1."""
    fixed = _product(requested)
    fits = count % fixed == 0 if has_open_axis else count == fixed
    if count >= 1 and fits:
        return None
    factors = " x ".join(str(n) for n in _mentioned(requested).values() if n != -1)
    relation = "does not divide" if has_open_axis and count > 0 else "is not"
    return _Problem(
        what="The mesh does not match the devices.",
        why=f"{factors} = {fixed} {relation} {count}, the number of devices.",
        hint=_other_devices(fixed, count, devices),
    )


def _is_degree(n: Any) -> bool:
    """Returns whether a value is a degree, or -1 for the rest; True is no number of devices."""
    return type(n) is int and (n >= 1 or n == -1)


def _mentioned(requested: Mapping[str, int]) -> dict[str, int]:
    """Returns the degrees that a message names: all but axes on demand that the user left at 1."""
    return {axis: n for axis, n in requested.items() if axis not in _ON_DEMAND or type(n) is not int or n != 1}


def _product(degrees: Mapping[str, int]) -> int:
    """Returns the product of the degrees that are given, without that of the rest."""
    return math.prod(n for n in degrees.values() if n != -1)


def nearest_degrees(requested: Mapping[str, Any], count: int) -> dict[str, int]:
    """Returns degrees for a number of devices, close to the requested ones: one axis takes the rest."""
    degrees = {axis: n for axis, n in requested.items() if axis in AXES and _is_degree(n)}
    rest = next((axis for axis in AXES if degrees.get(axis) == -1), FSDP)
    nearest = {rest: -1}
    remaining = max(count, 1)
    for axis in reversed(AXES):  # the innermost keeps as much as it can
        if axis != rest:
            requested_degree = max(degrees.get(axis, 1), 1)
            nearest[axis] = _largest_divisor(remaining, at_most=requested_degree)
            remaining //= nearest[axis]
    return {axis: nearest[axis] for axis in AXES if axis == FSDP or nearest[axis] != 1}


def _largest_divisor(number: int, *, at_most: int) -> int:
    return max(n for n in range(1, min(at_most, number) + 1) if number % n == 0)


def _nearest_call(requested: Mapping[str, Any], count: int, devices: Any) -> str:
    """Returns the call of `mesh` nearest to the requested one that works on the given devices."""
    words = [f"{axis}={n}" for axis, n in nearest_degrees(requested, count).items()]
    if devices is not None and count > 0:
        same_devices = devices if isinstance(devices, int) else f"jax.devices()[:{count}]"
        words.append(f"devices={same_devices}")
    return f"js.mesh({', '.join(words)})"


def _other_devices(needed: int, count: int, devices: Any) -> str:
    """Returns a further hint if there are more devices than needed, or fewer and they are CPU devices."""
    if devices is None and needed < count:
        return f"  # or devices=jax.devices()[:{needed}]"
    if devices is None and jax.default_backend() == "cpu":
        line = f'jax.config.update("jax_num_cpu_devices", {needed})'
        return f"\n{line}  # simulates more; set before JAX looks for devices"
    return ""


def check_mesh(value: Any) -> AnyMesh:
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
    return dict(mesh.shape).get(axis, 1)


def data_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes over which the batch is split, outermost first.

    Axes of degree 1 are omitted, because a reduction over one would stay in the program; `fsdp` is always included.
    """
    return tuple(axis for axis in DATA_AXES if axis == FSDP or degree(mesh, axis) > 1)


def batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the data axes that split only the batch and stored arrays: all except `expert`."""
    return tuple(axis for axis in data_axes(mesh) if axis != EXPERT)


def inner_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes of the mesh over which a data shard's program is split further."""
    return tuple(axis for axis in INNER_AXES if degree(mesh, axis) > 1)


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
    return frozenset(axis for axis, size in dict(mesh.shape).items() if axis in REGION_AXES or size == 1)


def data_degree(mesh: AnyMesh) -> int:
    """Returns the number of shards of the batch."""
    return data_shards(dict(mesh.shape))


def data_shards(degrees: Mapping[str, int]) -> int:
    """Returns the number of batch shards on a mesh of these degrees."""
    return math.prod(degrees.get(axis, 1) for axis in DATA_AXES)


def batch_sharding(mesh: Mesh, shape: Sequence[int] = ()) -> NamedSharding:
    """Returns the sharding of an array whose leading dim is the batch.

    Given a shape, dim 1 is over `context` if it divides.
    """
    context_degree = degree(mesh, CONTEXT)
    has_sequence = context_degree > 1 and len(shape) > 1 and shape[1] % context_degree == 0
    if has_sequence:
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
    borders = np.flatnonzero(np.diff(hosts).any(0)) + 1
    group_size = math.gcd(length, *borders.tolist())
    return length // group_size


def _host_of(mesh: Mesh) -> Callable[[Any], int]:
    """Returns a function from a device to its host."""
    processes = {device.process_index for device in mesh.devices.flat}
    has_process_for_each_device = len(processes) == mesh.size
    if has_process_for_each_device:  # a slice is a host there
        return _slice_of
    return lambda device: device.process_index


def num_processes(mesh: Mesh) -> int:
    """Returns the number of processes with devices of the mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def is_concrete(mesh: AnyMesh) -> bool:
    """Returns whether the mesh has devices, so that arrays can be placed on it."""
    return isinstance(mesh, Mesh)
