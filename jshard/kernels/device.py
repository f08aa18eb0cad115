"""The device that a kernel is traced for, and the mesh axes over which the compiler splits arrays there."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh

from jshard import _compat
from jshard.engine.context import region_mesh
from jshard.facts.devices import device_of
from jshard.facts.gpu_target import NvidiaTarget
from jshard.facts.gpus import GpuFacts, OccupancyError, gpu
from jshard.plans.mesh import manual_axes

Device: TypeAlias = Any
"""A device of JAX, or the description of one: they share a platform and a kind, and report more if they can."""

# Of a Hopper GPU, if neither the device nor the table says them.
_HOPPER_SMS = 132
_HOPPER_SMEM_BYTES = 227 * 1024


@dataclasses.dataclass(frozen=True)
class TracedDevice:
    """A device to trace for."""

    platform: str  # "gpu", "tpu" or "cpu"
    kind: str  # the driver's name for it
    sms: int = _HOPPER_SMS  # its multiprocessors
    smem_limit_bytes: int = _HOPPER_SMEM_BYTES  # the most shared memory of a block
    capability: int = 0  # major compute capability of an NVIDIA GPU; 0 for others, or if not known


_planned: contextvars.ContextVar[TracedDevice | None] = contextvars.ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(device: TracedDevice) -> Iterator[None]:
    """Traces code without devices of its own for this device inside the block, as for an absent cluster."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def device_in_use() -> TracedDevice:
    """Returns the device of the mesh that is in use, or of this process.

    A mesh made from a description, as for a compile without hardware, has no devices, but it has their kind and their
    number of multiprocessors.
    """
    mesh = region_mesh()
    device = _device_of_mesh(mesh)
    if device is not None:
        return _traced(device)
    planned = _planned.get()
    if planned is not None:
        return planned
    if mesh is not None and not _compat.has_devices():
        # A dry run has none: to look for some would start a backend.
        return TracedDevice(platform="cpu", kind="an unknown device")
    return _traced(_default_device())


def _device_of_mesh(mesh: Mesh | None) -> Device | None:
    """Returns a device of the model's mesh, or else of the mesh in JAX's context; None if neither has any."""
    if mesh is None:
        return _compat.abstract_device()
    described = mesh.abstract_mesh.abstract_device
    if described is None and isinstance(mesh, Mesh):  # an abstract mesh may have neither
        return mesh.devices.flat[0]
    return described


def _default_device() -> Device:
    default = getattr(jax.config, "jax_default_device", None)
    if isinstance(default, str):  # the name of a platform
        return jax.devices(default)[0]
    return default or jax.devices()[0]


def _traced(device: Device) -> TracedDevice:
    if device.platform not in ("gpu", "cuda", "rocm"):
        return TracedDevice(device.platform, device.device_kind)
    listed = _listed(device.device_kind)
    num_sms = getattr(device, "num_cores", None) or getattr(device, "core_count", None)
    smem_limit_bytes = getattr(device, "shared_memory_per_block_optin", None)
    if listed is not None:
        num_sms = num_sms or listed.num_sms
        smem_limit_bytes = smem_limit_bytes or listed.smem_per_block_bytes
    return TracedDevice(
        platform="gpu",
        kind=device.device_kind,
        sms=num_sms or _HOPPER_SMS,
        smem_limit_bytes=smem_limit_bytes or _HOPPER_SMEM_BYTES,
        capability=_capability(device, listed),
    )


def _listed(kind: str) -> GpuFacts | None:
    """Returns the limits of a GPU by its driver's name; None if the table does not have it."""
    try:
        return gpu(kind)
    except OccupancyError:
        return None


def _capability(device: Device, listed: GpuFacts | None) -> int:
    """Returns the major compute capability; for an absent device, from its row in a table."""
    reported = getattr(device, "compute_capability", "")  # such as "9.0"
    major, _, _ = str(reported or "").partition(".")
    if major.isdecimal():
        return int(major)
    if listed is not None:
        return listed.major
    facts = device_of(device.device_kind)
    if facts is None or not isinstance(facts.target, NvidiaTarget):
        return 0
    return facts.target.major


def automatic_axes() -> dict[str, int]:
    """Returns the axes over which the compiler splits arrays where the kernel will run, with their degrees above 1."""
    mesh = region_mesh()
    if mesh is None:
        return _compat.automatic_axes()
    manual = manual_axes(mesh)
    return {axis: degree for axis, degree in mesh.shape.items() if axis not in manual and degree > 1}


def may_be_split() -> bool:
    """Returns whether arrays are not known to be whole: no mesh is in use, and there are several devices."""
    has_several_devices = jax.device_count() > 1 or _planned.get() is not None
    has_mesh = region_mesh() is not None or _compat.abstract_device() is not None
    return has_several_devices and not has_mesh
