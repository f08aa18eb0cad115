"""`js.mesh`: arranges devices over the named axes, the innermost over the fastest links."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard, overload

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jshard import _compat
from jshard._text import counted
from jshard.errors import MeshError
from jshard.plans.mesh import (
    AXES,
    CONTEXT,
    EXPERT,
    FSDP,
    PIPE,
    REPLICA,
    TENSOR,
    AnyMesh,
    Device,
    degrees_text,
    slice_of,
)

Devices: TypeAlias = Sequence[Device] | int | None
"""The devices of a mesh; a number, of a mesh whose devices need not exist; None, all devices."""

_ON_DEMAND = (PIPE, EXPERT, CONTEXT)  # of degree 1 a mesh lacks them: they appear in no program, plan or message


@overload
def mesh(
    *,
    pipe: int = 1,
    replica: int = 1,
    fsdp: int = -1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Device] | None = None,
) -> Mesh: ...
@overload
def mesh(
    *,
    pipe: int = 1,
    replica: int = 1,
    fsdp: int = -1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: int,
) -> AbstractMesh: ...
def mesh(  # noqa: D417 - no caller passes `unknown`: it is there for an error that names the axes
    *,
    pipe: int = 1,
    replica: int = 1,
    fsdp: int = -1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Devices = None,
    **unknown: int,
) -> AnyMesh:
    """Arranges the devices over the axes `pipe`, `replica`, `fsdp`, `expert`, `context` and `tensor`.

    The batch is split over all axes except `context`, which splits its sequences, and `tensor`. `expert` and `tensor`
    split the parameters that the model's own annotations name; parameters are sharded over `fsdp` and `pipe`, together
    with `expert` (if they have no experts there) and `context`, and replicated over the others. Loops over units run
    in stages along `pipe`. The innermost axes use the
    fastest links: devices are ordered by slice, process and id (on TPU by their position in the torus), so that
    neighbours share a host.

    Args:
        pipe: degree of the axis of pipeline stages; -1: the remaining devices. With degree 1 the mesh has no such
            axis.
        replica: degree of the replica axis; -1 uses the remaining devices.
        fsdp: degree of the sharding axis; -1 (the default): the remaining devices.
        expert: degree of the expert axis; -1: the remaining devices. With degree 1 the mesh has no such axis.
        context: degree of the axis that splits sequences; -1: the remaining devices. With degree 1 the mesh has no
            such axis.
        tensor: degree of the tensor axis; -1: the remaining devices.
        devices: the devices to use, all of them by default. An int creates a mesh of that many devices
            that need not exist: for `js.plan` and `js.explain`, not for arrays.

    Returns:
        A `jax.sharding.Mesh` with Auto axes, or an `AbstractMesh` if `devices` is an int.

    Raises:
        MeshError: an axis is unknown, a degree is not positive, more than one is -1, the product does not match the
            number of devices, or the installed libtpu has no tensor axis.

    Examples:
        >>> mesh = js.mesh(replica=2, fsdp=-1)
        >>> dict(mesh.shape)
        {'replica': 2, 'fsdp': 4, 'tensor': 1}
    """
    requested = {PIPE: pipe, REPLICA: replica, FSDP: fsdp, EXPERT: expert, CONTEXT: context, TENSOR: tensor}
    if isinstance(devices, int):  # for plans of machines that are not here
        degrees = _degrees_for(requested, unknown, devices, devices)
        sizes = tuple(degrees.values())
        return AbstractMesh(sizes, tuple(degrees), axis_types=_auto_axes(degrees))
    chosen = list(jax.devices() if devices is None else devices)
    degrees = _degrees_for(requested, unknown, len(chosen), devices)
    _check_tensor_on_tpu(chosen, degrees)
    arranged = _arranged(chosen, tuple(degrees.values()))
    return Mesh(arranged, tuple(degrees), axis_types=_auto_axes(degrees))


def _degrees_for(requested: dict[str, int], unknown: dict[str, int], count: int, devices: Devices) -> dict[str, int]:
    """Returns the axes of the mesh and their degrees; axes on demand are left out at degree 1."""
    return _without_default_axes(_fill(requested, unknown, count, devices))


def _auto_axes(degrees: Mapping[str, int]) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * len(degrees)


def _check_tensor_on_tpu(devices: Sequence[Device], degrees: Mapping[str, int]) -> None:
    """Raises for a tensor axis on TPUs whose compiler would abort the process."""
    if degrees[TENSOR] == 1 or devices[0].platform != "tpu":
        return
    version = _compat.libtpu_without_tensor()
    if version is None:
        return
    raise MeshError(
        "The TPU compiler is too old for a tensor axis.",
        where=f"js.mesh({degrees_text(degrees)})",
        why=f"libtpu {version} aborts the process on products that it splits inside of a region; 0.0.50 does not.",
        do="pip install --upgrade --no-deps 'libtpu>=0.0.50'",
    )


def _arranged(devices: Sequence[Device], sizes: tuple[int, ...]) -> np.ndarray:
    """Returns the devices as an array of these sizes, with neighbours along the last axes."""
    if devices[0].platform == "tpu":
        return _in_torus(devices, sizes)
    # Of a reshaped array the last axis varies fastest: its devices are neighbours.
    nearest_together = sorted(devices, key=_nearness)
    return np.array(nearest_together).reshape(sizes)


def _nearness(device: Device) -> tuple[int, int, int]:
    """Returns a key by which neighbours share a process, and neighbours of these a slice."""
    return slice_of(device), device.process_index, device.id


def _in_torus(devices: Sequence[Device], sizes: Sequence[int]) -> np.ndarray:
    """Arranges TPUs by position in the torus of their slice; the outermost axes span the slices.

    An axis is along whole dimensions of the torus if its degree allows that, and else along a part of one.
    """
    num_slices = len({slice_of(device) for device in devices})
    if num_slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    remaining = num_slices
    slices_per_axis = []
    sizes_in_slice = []
    for size in sizes:  # the outermost first: the links between slices are the slowest
        # As many slices as the axis can span.
        spanned = math.gcd(size, remaining)
        slices_per_axis.append(spanned)
        sizes_in_slice.append(size // spanned)
        remaining //= spanned
    if remaining > 1:
        raise _cannot_span_slices(sizes, num_slices)
    return mesh_utils.create_hybrid_device_mesh(
        sizes_in_slice, slices_per_axis, devices, allow_split_physical_axes=True
    )


def _cannot_span_slices(sizes: Sequence[int], num_slices: int) -> MeshError:
    return MeshError(
        "The mesh cannot span the slices.",
        where=f"degrees {' x '.join(map(str, sizes))}",
        why=f"the devices form {num_slices} slices, and no degrees contain their factors.",
        do=f"mesh = js.mesh(replica={num_slices})  # a copy of the model on each slice",
    )


def _fill(requested: dict[str, int], unknown: dict[str, int], count: int, devices: Devices) -> dict[str, int]:
    """Returns the degrees in axis order, with -1 replaced by the remaining devices.

    Args:
        requested: the degrees of all axes.
        unknown: axes that do not exist, with their degrees.
        count: the number of devices.
        devices: as `mesh` takes them, for messages.
    """
    problem = _problem_of(requested, unknown, count, devices)
    if problem is not None:
        call = _without_default_axes(requested) | unknown
        do = _nearest_call(requested, count, devices) + problem.hint
        raise MeshError(problem.what, where=f"js.mesh({degrees_text(call)})", why=problem.why, do=do)
    degrees = dict(requested)
    for axis, n in requested.items():
        if n == -1:
            # At most one is -1, and the product of the others divides the count: checked above.
            degrees[axis] = count // _product(requested)
    return degrees


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Why no mesh has the requested degrees: parts of the error."""

    what: str
    why: str
    hint: str = ""


def _problem_of(
    requested: Mapping[str, int], unknown: Mapping[str, int], count: int, devices: Devices
) -> _Problem | None:
    """Returns what is wrong with the requested degrees, or None; the arguments are those of `_fill`."""
    # In this order: later checks compute with degrees that the earlier ones have found valid.
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
    requested: Mapping[str, int], count: int, devices: Devices, *, has_open_axis: bool
) -> _Problem | None:
    """Returns what is wrong with the number of devices, or None. The degrees are valid, one of them may be -1."""
    fixed = _product(requested)
    fits = count % fixed == 0 if has_open_axis else count == fixed
    # 0 is a multiple of every product, and no mesh has 0 devices.
    if count >= 1 and fits:
        return None
    factors = " x ".join(str(n) for n in _without_default_axes(requested).values() if n != -1)
    relation = "does not divide" if has_open_axis and count > 0 else "is not"
    return _Problem(
        what="The mesh does not match the devices.",
        why=f"{factors} = {fixed} {relation} {count}, the number of devices.",
        hint=_other_devices(fixed, count, devices),
    )


def _is_degree(n: object) -> TypeGuard[int]:
    """Returns whether a value is a degree, or -1 for the rest; True is no number of devices."""
    return type(n) is int and (n >= 1 or n == -1)


def _without_default_axes(degrees: Mapping[str, int]) -> dict[str, int]:
    """Returns the degrees of the axes that a mesh or a message names: all but axes on demand of degree 1."""
    named = {}
    for axis, n in degrees.items():
        is_one = type(n) is int and n == 1  # True is a mistake, which the message must show
        if axis not in _ON_DEMAND or not is_one:
            named[axis] = n
    return named


def _product(degrees: Mapping[str, int]) -> int:
    """Returns the product of the degrees that are given, without that of the rest."""
    return math.prod(n for n in degrees.values() if n != -1)


def nearest_degrees(requested: Mapping[str, object], count: int) -> dict[str, int]:
    """Returns degrees for a number of devices, close to the requested ones: one axis takes the rest."""
    # The request may be the faulty one: what is no axis or no degree counts as not given.
    degrees = {axis: n for axis, n in requested.items() if axis in AXES and _is_degree(n)}
    rest = _axis_of_rest(degrees)
    nearest = {rest: -1}
    remaining = max(count, 1)
    for axis in reversed(AXES):  # the innermost keeps as much as it can
        if axis != rest:
            # A second -1 counts as 1: only one axis takes the rest.
            requested_degree = max(degrees.get(axis, 1), 1)
            nearest[axis] = _largest_divisor(remaining, at_most=requested_degree)
            remaining //= nearest[axis]
    return {axis: nearest[axis] for axis in AXES if axis == FSDP or nearest[axis] != 1}


def _axis_of_rest(degrees: Mapping[str, int]) -> str:
    """Returns the outermost axis of degree -1; without one `fsdp`, which takes the rest by default."""
    for axis in AXES:
        if degrees.get(axis) == -1:
            return axis
    return FSDP


def _largest_divisor(number: int, *, at_most: int) -> int:
    divisor = min(at_most, number)
    while number % divisor:  # ends at 1, which divides every number
        divisor -= 1
    return divisor


def _nearest_call(requested: Mapping[str, object], count: int, devices: Devices) -> str:
    """Returns the call of `mesh` nearest to the requested one that works on the given devices."""
    arguments: dict[str, object] = dict(nearest_degrees(requested, count))
    if devices is not None and count > 0:
        arguments["devices"] = devices if isinstance(devices, int) else f"jax.devices()[:{count}]"
    return f"js.mesh({degrees_text(arguments)})"


def _other_devices(needed: int, count: int, devices: Devices) -> str:
    """Returns a further hint if there are more devices than needed, or fewer and they are CPU devices."""
    if devices is None and needed < count:
        return f"  # or devices=jax.devices()[:{needed}]"
    if devices is None and jax.default_backend() == "cpu":
        line = f'jax.config.update("jax_num_cpu_devices", {needed})'
        return f"\n{line}  # simulates more; set before JAX looks for devices"
    return ""
