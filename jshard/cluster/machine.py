"""A cluster as an estimate sees it: the facts about its devices, and ranges of what nobody knows beforehand."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from jshard._auto import device_bytes
from jshard._errors import ShardingError
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.devices import DEVICES, DeviceFacts
from jshard.cluster.estimate import EstimateRange, estimate_range
from jshard.cluster.topology import Topology
from jshard.inspect.schedule import Schedule

_CPU = Assumptions(  # a guess, to be corrected by measured steps
    name="CPU",
    flops_per_s=5e10,
    memory_bytes_per_s=1e10,
    fast_bytes_per_s=2e9,
    fast_group=1024,
    slow_bytes_per_s=1e9,
    latency_s=1e-4,
    host_bytes_per_s=1e10,  # the same memory
)
EFFICIENCY = 0.60, 0.75  # of matrix products, by the peak of the data sheet
_FP8 = "f8e4m3fn", "f8e5m2"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices as an estimate sees them.

    Args:
        num_devices: how many.
        capacity_bytes: memory of one of them; None where it is not known.
        near: neighbouring devices that the fast links join.
        assumptions: the rest.
    """

    num_devices: int
    capacity_bytes: int | None
    near: int
    assumptions: Assumptions


def machine_here(mesh: Mesh) -> Machine:
    """The devices of a run. What is not known of their kind is taken from an H100, or for a CPU guessed."""
    first = mesh.local_devices[0]
    near = len(mesh.local_devices)
    if first.platform == "cpu":
        return Machine(len(mesh.devices.flat), device_bytes(mesh), near, _CPU)
    facts = DEVICES[_known(first.device_kind)]
    return Machine(len(mesh.devices.flat), device_bytes(mesh) or facts.hbm_bytes, near, _assumed(facts, near))


def _known(kind: str) -> str:
    """The device of the table that a kind of `jax.Device` is, or the nearest that is known."""
    low = kind.lower()
    names = {"gb200": "gb200", "b200": "b200", "h200": "h200", "h100": "h100", "a100": "a100-80"}
    names |= {"v5 lite": "v5e", "v5e": "v5e", "v6 lite": "v6e", "v6e": "v6e", "v5": "v5p"}
    return next((name for part, name in names.items() if part in low), "h100")


def assumptions_of(topology: Topology) -> Assumptions:
    """What an estimate takes for granted about a cluster, at the rates that its links are assumed to reach.

    Args:
        topology: the cluster.

    Example:
        >>> assumptions_of(parse_topology("h100:64x8")).slow_bytes_per_s
        42000000000.0
    """
    return _assumed(topology.device, topology.fast_group)


def _assumed(device: DeviceFacts, fast_group: int) -> Assumptions:
    peaks = {name: device.product_flops_per_s(name) for name in ("f32", *_FP8)}
    return Assumptions(
        name=device.title,
        flops_per_s=device.flops_per_s["bf16"],
        memory_bytes_per_s=device.hbm_bytes_per_s,
        fast_bytes_per_s=device.fast_bytes_per_s,
        fast_group=fast_group,
        slow_bytes_per_s=device.slow_bytes_per_s,
        matmul_efficiency=EFFICIENCY[0],
        host_bytes_per_s=device.host_bytes_per_s,
        flops_per_s_of=tuple(peaks.items()),
    )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster that is not here, and what is known of it beyond its data sheets.

    Args:
        topology: the cluster.
        known: fields of `Assumptions` with values that are known: they are not varied.
    """

    topology: Topology
    known: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def assumptions(self) -> Assumptions:
        """What an estimate takes for granted."""
        return dataclasses.replace(assumptions_of(self.topology), **self.known)

    @property
    def machine(self) -> Machine:
        """The cluster as a search sees it."""
        topology = self.topology
        return Machine(topology.num_devices, topology.device.hbm_bytes, topology.fast_group, self.assumptions)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """What is least known: how fast the links are that bind the cluster, and what matrix products reach.

        Where a cluster is larger than what fast links join, its adapters bind it; else the fast links do.
        """
        device = self.topology.device
        is_wide = self.topology.num_devices > self.topology.fast_group
        link = ("slow_bytes_per_s", device.slow_range) if is_wide else ("fast_bytes_per_s", device.fast_range)
        found = dict([link, ("matmul_efficiency", EFFICIENCY)])
        return {name: ends for name, ends in found.items() if name not in self.known}

    def estimate(self, schedule: Schedule) -> EstimateRange:
        """Estimates of a compiled step, over the ranges of what is least known."""
        return estimate_range(schedule, self.assumptions, ranges=self.ranges)


def parse_known(texts: Sequence[str]) -> dict[str, float]:
    """What a command line knows of a cluster: texts such as `slow_bytes_per_s=25e9`.

    Raises:
        ShardingError: it is no assumption, has no such value, or is given twice.
    """
    names = [f.name for f in dataclasses.fields(Assumptions) if f.type in (float, int, float | None)]
    found = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        number = _number(name, value)
        if name not in names or number is None or name in found:
            raise ShardingError(
                "An assumption is given twice." if name in found else "There is no such assumption about a cluster.",
                where=f"--assume {text}",
                why=f"the assumptions are {', '.join(names)}, each a positive number and given once; an efficiency is"
                " at most 1, and fast_group whole.",
                do="--assume slow_bytes_per_s=25e9",
            )
        found[name] = number
    return found


def _number(name: str, text: str) -> float | None:
    """The value of an assumption; None if it cannot have that one."""
    try:
        number = int(text) if name == "fast_group" else float(text)
    except ValueError:
        return None
    most = 1.0 if name.endswith("_efficiency") else sys.float_info.max
    return number if 0 < number <= most else None
