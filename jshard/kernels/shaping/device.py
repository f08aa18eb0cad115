"""The device that a step is shaped for: by its name, or the one that is here."""

from __future__ import annotations

import dataclasses

import jax

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.devices import DEVICES, DeviceFacts
from jshard.cluster.machine import assumptions_of
from jshard.cluster.topology import parse_topology
from jshard.kernels.occupancy import GPUS, GpuFacts, OccupancyError, gpu

_DEVICES_OF = {"a100": "a100-80"}  # where the tables of occupancy and of clusters have different names


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, as far as it is known.

    Attributes:
        title: in words.
        platform: "gpu", "tpu" or "cpu".
        gpu: what one of its multiprocessors holds; None where that is not known, or it has none.
        facts: its rates and links; None where they are not known.
        topology: the cluster it was named with, e.g. "h200:64x8"; empty where it was not.
        kind: as the driver of the one that is here names it; empty where it is only named.
    """

    title: str
    platform: str
    gpu: GpuFacts | None = None
    facts: DeviceFacts | None = None
    topology: str = ""
    kind: str = ""

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
        """What an estimate takes for granted of so many of them; None where nothing is known.

        Links at the slowest that they are assumed to be: what hides then, hides on quicker ones.
        """
        topology = self._cluster(num_devices)
        if self.facts is None or not topology:
            return None
        slow = {"fast_bytes_per_s": self.facts.fast_range[0], "slow_bytes_per_s": self.facts.slow_range[0]}
        return dataclasses.replace(assumptions_of(parse_topology(topology)), **slow)

    def _cluster(self, num_devices: int) -> str:
        """A topology of so many devices, if none was named."""
        if self.topology or self.facts is None or self.platform != "gpu":  # of a TPU slice nobody knows the shape
            return self.topology
        together = self.facts.fast_group if self.facts.hosts_share_links else min(8, self.facts.fast_group)
        each = next(n for n in range(min(num_devices, together), 0, -1) if num_devices % n == 0)
        return f"{self.facts.name}:{num_devices // each}x{each}"


def device_named(name: str | None) -> Device:
    """A device by its name in a topology or in `jshard occupancy`, or with its topology, or the first that is here.

    Raises:
        OccupancyError: there is no such device; the error names those that there are.

    Example:
        >>> device_named("h200").gpu.num_sms
        132
    """
    if name is None:
        return _running()
    short, _, shape = name.strip().lower().partition(":")
    topology = name.strip().lower() if shape else ""
    if short in DEVICES and DEVICES[short].platform != "gpu":
        return Device(DEVICES[short].title, DEVICES[short].platform, None, DEVICES[short], topology)
    if short not in DEVICES and short not in GPUS:
        raise _unknown(name)
    found = gpu(short)
    facts = DEVICES.get(short, DEVICES.get(_DEVICES_OF.get(short, short)))
    return Device(found.title, "gpu", found, facts, topology if facts else "")


def _running() -> Device:
    here = jax.devices()[0]
    if here.platform not in ("gpu", "cuda", "rocm"):
        return Device(here.device_kind, here.platform)
    try:
        found = gpu(here.device_kind)
    except OccupancyError:  # of the model: the kernels may run there, and nobody knows how full it is
        return Device(here.device_kind, "gpu", kind=here.device_kind)
    facts = DEVICES.get(_DEVICES_OF.get(found.name, found.name))
    return Device(found.title, "gpu", found, facts, kind=here.device_kind)


def _unknown(name: str) -> OccupancyError:
    known = dict.fromkeys([*DEVICES, *GPUS])
    return OccupancyError(
        f"There is no device {name!r}.",
        where=f"device={name!r}",
        why=f"the devices are {', '.join(known)}; or one with its cluster, as in h200:64x8.",
        do='js.overlap(model, device="h200")',
    )
