"""The device that a step is tuned for: present, or named."""

from __future__ import annotations

import dataclasses

import jax

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.machine import assumptions_of
from jshard.cluster.topology import parse_topology
from jshard.facts.amd_gpus import is_amd_gpu
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.kernels.backend import why_generation_unsupported
from jshard.kernels.generation import generation_of
from jshard.occupancy import GPUS, GpuFacts, OccupancyError, gpu

_MOST_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, as far as it is known."""

    title: str  # display name
    platform: str  # "gpu", "tpu" or "cpu"
    gpu: GpuFacts | None = None  # the limits of its multiprocessors; None if unknown, or if it has none
    facts: DeviceFacts | None = None  # its rates and links; None if unknown
    topology: str = ""  # the cluster that it was given with, e.g. "h200:64x8"; else empty
    kind: str = ""  # the present device's name by its driver; empty if it was only given by name

    def is_of(self, kind: str) -> bool:
        """Returns whether measurements on a kind of device, by its driver's name, are valid for this one."""
        if self.kind:
            return self.kind == kind
        if self.gpu is None:
            return False
        try:
            return gpu(kind).name == self.gpu.name
        except OccupancyError:
            return False

    @property
    def why_unshaped(self) -> str:
        """Returns why nothing is chosen for the kernels of jshard on it; empty if something is."""
        generation = None if self.gpu is None else generation_of(self.gpu.major)
        if generation is not None:
            why_unsupported = why_generation_unsupported(generation)
            return why_unsupported and f"{why_unsupported}: the plain forms run, which have no knobs."
        if self.gpu is None and self.facts is None and self.platform == "gpu":
            return f"the multiprocessors of {self.title} are unknown, so nothing can be computed for it."
        return f"not a Hopper or Ampere GPU ({self.title}): the plain forms run, which have no knobs."

    def assumptions(self, num_devices: int) -> Assumptions | None:
        """Returns the assumptions of an estimate for a number of these devices; None if the device is unknown.

        Links have the lowest assumed rate: communication hidden at that rate is also hidden on faster links.
        """
        if self.facts is None:
            return None
        topology = self.topology
        if not topology:
            per_host = _devices_per_host(num_devices)
            topology = f"{self.facts.name}:{num_devices // per_host}x{per_host}"
        slowest_fast, _ = self.facts.fast.range
        slowest_slow, _ = self.facts.slow.range
        return dataclasses.replace(
            assumptions_of(parse_topology(topology)),
            fast_bytes_per_s=slowest_fast,
            slow_bytes_per_s=slowest_slow,
        )


def _devices_per_host(num_devices: int) -> int:
    """Returns the most devices of equal hosts, at most eight."""
    per_host = min(num_devices, _MOST_PER_HOST)
    while num_devices % per_host != 0:
        per_host -= 1
    return per_host


def device_named(name: str | None) -> Device:
    """Returns a device by its name in a topology or in `jshard occupancy`, or with its topology.

    Args:
        name: such as "h200" or "h200:64x8". None: the first device present.

    Raises:
        OccupancyError: the device is unknown; the error lists the known ones.

    Examples:
        >>> device_named("h200").gpu.num_sms
        132
    """
    if name is None:
        return _present_device()
    name = name.strip().lower()
    short_name, _, shape = name.partition(":")
    if short_name in DEVICES and DEVICES[short_name].compiler != "cuda":
        facts = DEVICES[short_name]
        return Device(facts.title, facts.platform, facts=facts)
    if short_name not in DEVICES and short_name not in GPUS:
        known = ", ".join(dict.fromkeys([*DEVICES, *GPUS]))
        raise OccupancyError(
            f"The device {name!r} is unknown.",
            where=f"device={name!r}",
            why=f"the devices are {known}; also with a cluster, as in h200:64x8.",
            do='js.tune_overlap(model, device="h200")',
        )
    limits = gpu(short_name)
    device_facts = device_of(short_name)
    # A cluster needs rates of links, which are known of the devices that `jshard plan` knows.
    topology = name if shape and device_facts else ""
    return Device(limits.title, "gpu", limits, device_facts, topology)


def _present_device() -> Device:
    first = jax.devices()[0]
    kind = first.device_kind
    if first.platform not in ("gpu", "cuda", "rocm"):
        return Device(kind, first.platform)
    if is_amd_gpu(kind):  # it has other limits, but compiler options of its own
        return Device(kind, "gpu", facts=device_of(kind), kind=kind)
    try:
        limits = gpu(kind)
    except OccupancyError:  # of the model: the kernels may run there, but its limits are unknown
        return Device(kind, "gpu", kind=kind)
    return Device(limits.title, "gpu", limits, device_of(kind), kind=kind)
