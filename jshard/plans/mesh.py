"""Named meshes: `replica` copies, each sharded over `fsdp`, and further axes: `expert`, `context`, `tensor`."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast, overload

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jshard._text import counted
from jshard.errors import CallError, MeshError

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
    asked = {REPLICA: replica, FSDP: fsdp, EXPERT: expert, CONTEXT: context, TENSOR: tensor}
    found: list[Any] | None = None
    if not isinstance(devices, int):
        found = list(jax.devices() if devices is None else devices)
    count = devices if isinstance(devices, int) else len(found or ())
    shape = {axis: n for axis, n in _fill(asked, unknown, count, devices).items() if axis not in _ON_DEMAND or n > 1}
    axes, sizes = tuple(shape), tuple(shape.values())
    types = (AxisType.Auto,) * len(axes)
    if found is None:
        return AbstractMesh(sizes, axes, axis_types=types)
    if found[0].platform == "tpu":
        return Mesh(_in_torus(found, sizes), axes, axis_types=types)
    ordered = sorted(found, key=lambda d: (getattr(d, "slice_index", 0), d.process_index, d.id))
    return Mesh(np.array(ordered).reshape(sizes), axes, axis_types=types)


def _in_torus(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """TPUs by position in the torus of their slice; the outermost axes span the slices."""
    slices = left = len({getattr(d, "slice_index", 0) for d in devices})
    over = []
    for size in sizes:
        over.append(math.gcd(size, left))
        left //= over[-1]
    if left > 1:
        raise MeshError(
            "The mesh cannot span the slices.",
            where=f"degrees {' x '.join(map(str, sizes))}",
            why=f"the devices form {slices} slices, and no degrees contain their factors.",
            do=f"mesh = js.mesh(replica={slices})  # a copy of the model on each slice",
        )
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices)
    within = [size // n for size, n in zip(sizes, over, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(within, over, devices)


def _fill(asked: dict[str, int], unknown: dict[str, int], count: int, devices: Any) -> dict[str, int]:
    """The degrees in axis order, with -1 replaced by the remaining devices."""
    named = {k: v for k, v in asked.items() if k not in _ON_DEMAND or type(v) is not int or v != 1}
    bad = [k for k, v in asked.items() if type(v) is not int or (v < 1 and v != -1)]
    open_axes = [k for k, v in asked.items() if v == -1]
    fixed = 1 if bad else math.prod(v for v in asked.values() if v != -1)
    what, why, more = "", "", ""
    if unknown:
        what = f"The mesh has no axis {', '.join(map(repr, unknown))}."
        why = f"the axes are {', '.join(AXES)}."
    elif bad:
        what = f"The degree of mesh axis {', '.join(map(repr, bad))} is not a positive number."
        why = ", ".join(f"{k}={asked[k]!r}" for k in bad) + "; a degree must be 1 or more, or -1 for the rest."
    elif len(open_axes) > 1:
        what = f"More than one mesh axis is -1: {', '.join(open_axes)}."
        why = f"only one axis can take the rest of the {counted(count, 'device')}."
    elif count < 1 or count % fixed or (not open_axes and fixed != count):
        what = "The mesh does not match the devices."
        product = " x ".join(str(v) for v in named.values() if v != -1)
        does = "does not divide" if open_axes and count > 0 else "is not"
        why = f"{product} = {fixed} {does} {count}, the number of devices."
        more = _other_devices(fixed, count, devices)
    if what:
        where = "js.mesh(" + ", ".join(f"{k}={v}" for k, v in (named | unknown).items()) + ")"
        raise MeshError(what, where=where, why=why, do=_nearest_call(asked, count, devices) + more)
    return {k: count // fixed if v == -1 else v for k, v in asked.items()}


def nearest_degrees(asked: Mapping[str, Any], count: int) -> dict[str, int]:
    """Degrees for a number of devices, close to the requested ones: one axis takes the rest."""
    degrees = {axis: n for axis, n in asked.items() if axis in AXES and type(n) is int and (n > 0 or n == -1)}
    rest = next((axis for axis in AXES if degrees.get(axis) == -1), FSDP)
    found, left = {rest: -1}, max(count, 1)
    for axis in reversed(AXES):  # the innermost keeps as much as it can
        if axis != rest:
            found[axis] = max(n for n in range(1, min(max(degrees.get(axis, 1), 1), left) + 1) if left % n == 0)
            left //= found[axis]
    return {axis: found[axis] for axis in AXES if axis == FSDP or found[axis] != 1}


def _nearest_call(asked: Mapping[str, Any], count: int, devices: Any) -> str:
    """The call of `mesh` nearest to the requested one that works on the given devices."""
    words = [f"{axis}={n}" for axis, n in nearest_degrees(asked, count).items()]
    if devices is not None and count > 0:
        words.append(f"devices={devices if isinstance(devices, int) else f'jax.devices()[:{count}]'}")
    return f"js.mesh({', '.join(words)})"


def _other_devices(wanted: int, count: int, devices: Any) -> str:
    """A further hint if there are more devices than wanted, or fewer and they are CPU devices."""
    if devices is None and wanted < count:
        return f"  # or devices=jax.devices()[:{wanted}]"
    if devices is None and jax.default_backend() == "cpu":
        return (
            f'\njax.config.update("jax_num_cpu_devices", {wanted})  # simulates more; set before JAX looks for devices'
        )
    return ""


def check_mesh(value: Any) -> AnyMesh:
    """An annotation's mesh with Auto axes, or a MeshError if jshard cannot shard over it."""
    what, where, do = "", f"mesh={value!r}", "mesh = js.mesh(fsdp=-1)"
    if not isinstance(value, (Mesh, AbstractMesh)):
        what, why = "This is not a mesh.", f"a jax.sharding.Mesh is needed, not {type(value).__name__}."
    else:
        where = f"mesh axes {dict(zip(value.axis_names, value.axis_sizes, strict=True))}"
        wrong = [n for n, t in zip(value.axis_names, value.axis_types, strict=True) if t == AxisType.Manual]
        if FSDP not in value.axis_names:
            what = "The mesh has no axis to shard over."
            why = f"parameters are sharded over an axis named {FSDP!r}, and copies are on {REPLICA!r}."
        elif wrong:
            what, do = "The mesh has Manual axes.", "mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)"
            why = f"{', '.join(map(repr, wrong))}: Manual axes are for code inside a jax.shard_map."
    if what:
        raise MeshError(what, where=where, why=why, do=do)
    return with_auto_axes(value)


def with_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """The mesh with Explicit axes made Auto, so that the model's code need not specify shardings."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)


def degree(mesh: AnyMesh, axis: str) -> int:
    """Size of a mesh axis; 1 if the mesh lacks it."""
    return dict(mesh.shape).get(axis, 1)


def data_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes over which the batch is split, outermost first.

    Axes of degree 1 are omitted, because a reduction over one would stay in the program; `fsdp` is always included.
    """
    return tuple(a for a in DATA_AXES if a == FSDP or degree(mesh, a) > 1)


def batch_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The data axes that split only the batch and stored arrays: all except `expert`."""
    return tuple(a for a in data_axes(mesh) if a != EXPERT)


def inner_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes of the mesh over which a data shard's program is split further."""
    return tuple(a for a in INNER_AXES if degree(mesh, a) > 1)


def region_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes over which a region's devices have different work, outermost first."""
    return (*data_axes(mesh), CONTEXT) if degree(mesh, CONTEXT) > 1 else data_axes(mesh)


def region_degree(mesh: AnyMesh) -> int:
    """The number of devices over which a region splits its work."""
    return data_degree(mesh) * degree(mesh, CONTEXT)


def manual_axes(mesh: AnyMesh) -> frozenset[str]:
    """The axes over which a region is manual: its own, and others of degree 1, which compiles best."""
    return frozenset(axis for axis, size in dict(mesh.shape).items() if axis in REGION_AXES or size == 1)


def data_degree(mesh: AnyMesh) -> int:
    """The number of shards of the batch."""
    return data_shards(dict(mesh.shape))


def data_shards(degrees: Mapping[str, int]) -> int:
    """The number of batch shards on a mesh of these degrees."""
    return math.prod(degrees.get(axis, 1) for axis in DATA_AXES)


def batch_sharding(mesh: Mesh, shape: Sequence[int] = ()) -> NamedSharding:
    """The sharding of an array whose leading dim is the batch; given a shape, dim 1 is over `context` if it divides."""
    over = degree(mesh, CONTEXT)
    sequence = (CONTEXT,) if over > 1 and len(shape) > 1 and shape[1] % over == 0 else ()
    return NamedSharding(mesh, PartitionSpec(data_axes(mesh), *sequence))


def hosts_along(mesh: AnyMesh, axis: str) -> int:
    """The number of groups of neighbours with fast links along an axis; 1 if unknown, and on TPUs."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform == "tpu":
        return 1
    host = lambda device: device.process_index
    if len(set(map(host, mesh.devices.flat))) == mesh.size:  # a process for each device: a slice is a host there
        host = lambda device: getattr(device, "slice_index", 0)
    hosts = np.vectorize(host)(np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)).reshape(-1, mesh.shape[axis])
    return mesh.shape[axis] // math.gcd(mesh.shape[axis], *(np.flatnonzero(np.diff(hosts).any(0)) + 1).tolist())


def num_processes(mesh: Mesh) -> int:
    """The number of processes with devices of the mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def is_concrete(mesh: AnyMesh) -> bool:
    """Whether the mesh has devices, so that arrays can be placed on it."""
    return isinstance(mesh, Mesh)


NUMBERS = (bool, int, float, complex)
"""Python's numbers, which Flax takes as arrays without dims."""


def is_numeric(x: Any) -> bool:
    """Whether an object is an array that JAX takes, traced or abstract, or a number."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind not in "OUSMm" and x.dtype.type is not np.void
    return isinstance(x, NUMBERS) or hasattr(x, "dtype")


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Places a batch from the host over the data axes of the mesh, and its sequences over `context`.

    Args:
        batch: pytree of host arrays whose leading dim is the batch. With several processes each passes its
            own rows, in process order; processes that share rows pass the same ones, with whole sequences.
        mesh: the mesh of the model.

    Returns:
        The same pytree with global arrays, sharded over the data axes on the leading dim; on a mesh with `context`,
        also over that on dim 1 where it divides.

    Raises:
        CallError: a leading dim is not divisible by the number of data shards, or no sequence is by `context`.

    Example:
        >>> batch = js.shard_batch({"x": np.zeros((16, 4))}, mesh)
    """
    mesh = cast(Mesh, check_mesh(mesh))
    shards, parts, is_alone = _batch_layout(mesh)
    leaves, tree = jax.tree.flatten(batch)
    if not all(map(is_numeric, leaves)):
        wrong = [(jax.tree_util.keystr(p), x) for p, x in jax.tree.leaves_with_path(batch) if not is_numeric(x)]
        raise CallError(
            "The batch holds objects that are not numbers.",
            where=[f"batch{p}  {getattr(x, 'dtype', type(x).__name__)}" for p, x in wrong],
            why="a device holds arrays of numbers; texts, dates and lists of unequal length are not.",
            do='js.shard_batch({"ids": np.asarray(ids, np.int32)}, mesh)  # texts as token ids, padded to one length',
        )
    splits = lambda x: np.ndim(x) > 0 and np.shape(x)[0] * parts % shards == 0
    if not all(map(splits, leaves)):
        axes = ", ".join(f"{axis}={degree(mesh, axis)}" for axis in data_axes(mesh))
        bad = [(jax.tree_util.keystr(p), np.shape(x)) for p, x in jax.tree.leaves_with_path(batch) if not splits(x)]
        raise CallError(
            "The batch cannot be split over the data shards.",
            where=[f"batch{p}  shape {s}" for p, s in bad],
            why=f"that many rows{f' from each of {parts} processes' if parts > 1 else ''}"
            f" over {shards} data shards ({axes}).",
            do=f"use a global batch that is a multiple of {shards}.",
        )
    shapes = [(np.shape(x)[0] * parts, *np.shape(x)[1:]) for x in leaves]
    shardings = [batch_sharding(mesh, shape) for shape in shapes]
    if (over := degree(mesh, CONTEXT)) > 1 and not any(CONTEXT in sharding.spec for sharding in shardings):
        raise CallError(
            "The batch has no sequence that splits over the context axis.",
            where=[f"batch{jax.tree_util.keystr(p)}  shape {np.shape(x)}" for p, x in jax.tree.leaves_with_path(batch)],
            why=f"a sequence is dim 1 of an array, and none divides by {over}.",
            do=f"pad the sequences to a multiple of {over}, or js.mesh() without {CONTEXT!r}.",
        )
    if is_alone:
        return jax.device_put(batch, jax.tree.unflatten(tree, shardings))
    place = jax.make_array_from_process_local_data
    placed = [place(to, np.asarray(x), shape) for to, x, shape in zip(shardings, leaves, shapes, strict=True)]
    return jax.tree.unflatten(tree, placed)


@functools.lru_cache(maxsize=8)
def _batch_layout(mesh: Mesh) -> tuple[int, int, bool]:
    """The number of data shards, its ratio to those of this process, and whether this is the only process.

    Cached: a run calls it before every step.
    """
    shards = data_degree(mesh)
    here = batch_sharding(mesh).addressable_devices_indices_map((shards,)).values()
    return shards, shards // len({str(index) for index in here}), num_processes(mesh) == 1
