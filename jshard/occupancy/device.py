"""The device that a step is shaped for."""

from __future__ import annotations

import dataclasses

import jax

from jshard.cluster.estimate import assumptions_of
from jshard.cluster.replay import Assumptions
from jshard.cluster.topology import parse_topology
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.occupancy import GPUS, GpuFacts, OccupancyError, gpu


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, as far as it is known."""

    title: str  # in words
    platform: str  # "gpu", "tpu" or "cpu"
    gpu: GpuFacts | None = None  # what one of its multiprocessors holds; None where that is not known, or it has none
    facts: DeviceFacts | None = None  # its rates and links; None where they are not known
    topology: str = ""  # the cluster it was named with, e.g. "h200:64x8"; empty where it was not.
    kind: str = ""  # as the driver of the one that is here names it; empty where it is only named

    def is_of(self, kind: str) -> bool:
        """Whether what was measured on a kind of device, as a driver names it, holds for this one."""
        if self.kind:
            return self.kind == kind
        try:
            return self.gpu is not None and gpu(kind).name == self.gpu.name
        except OccupancyError:
            return False

    @property
    def why_unshaped(self) -> str:
        """Why nothing is chosen for the kernels of jshard on it; empty where it is."""
        if self.gpu is not None and self.gpu.arch == "sm_90":
            return ""
        if self.gpu is None and self.platform == "gpu":
            return f"the multiprocessors of {self.title} are not known: nothing can be computed for it."
        return f"not a Hopper GPU ({self.title}): the plain forms run, which have no knobs."

    def assumptions(self, num_devices: int) -> Assumptions | None:
        """What an estimate takes for granted of so many of them; None where the device is not known.

        Links at the slowest that they are assumed to be: what hides then, hides on quicker ones.
        """
        if self.facts is None:
            return None
        on_a_host = next(n for n in range(min(num_devices, 8), 0, -1) if num_devices % n == 0)
        topology = self.topology or f"{self.facts.name}:{num_devices // on_a_host}x{on_a_host}"
        slow = {"fast_bytes_per_s": self.facts.fast.range[0], "slow_bytes_per_s": self.facts.slow.range[0]}
        return dataclasses.replace(assumptions_of(parse_topology(topology)), **slow)


def device_named(name: str | None) -> Device:
    """A device by its name in a topology or in `jshard occupancy`, or with its topology, or the first that is here.

    Raises:
        OccupancyError: the device is not known; the error names those that there are.

    Example:
        >>> device_named("h200").gpu.num_sms
        132
    """
    if name is None:
        return _running()
    name = name.strip().lower()
    short, _, shape = name.partition(":")
    facts = device_of(short)
    if short in DEVICES and DEVICES[short].platform != "gpu":
        return Device(DEVICES[short].title, DEVICES[short].platform, facts=DEVICES[short])
    if short not in DEVICES and short not in GPUS:
        known = ", ".join(dict.fromkeys([*DEVICES, *GPUS]))
        raise OccupancyError(
            f"The device {name!r} is not known.",
            where=f"device={name!r}",
            why=f"the devices are {known}; or one with its cluster, as in h200:64x8.",
            do='js.overlap(model, device="h200")',
        )
    found = gpu(short)
    return Device(found.title, "gpu", found, facts, name if shape and facts else "")


def _running() -> Device:
    here = jax.devices()[0]
    kind = here.device_kind
    if here.platform not in ("gpu", "cuda", "rocm"):
        return Device(kind, here.platform)
    try:
        found = gpu(kind)
    except OccupancyError:  # of the model: the kernels may run there, and nobody knows how full it is
        return Device(kind, "gpu", kind=kind)
    return Device(found.title, "gpu", found, device_of(kind), kind=kind)
