"""How long a step would take on a cluster, and how much of its communication is hidden: an estimate with ranges."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.cluster.replay import Assumptions, Replay
from jshard.cluster.topology import Topology
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.inspect.hlo.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step on a machine as assumed.

    Args:
        assumptions: the machine.
        step_s: the step.
        compute_s: what of it computes.
        communication_s: what the collectives take, one after another.
        exposed_s: what of it the computation waits for.
        hidden: part of the communication that runs beside computation, from 0 to 1.
        hidden_in_loops: the same of the collectives inside loops.
        flops: of one device, with those computed again for backward.
    """

    assumptions: Assumptions
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    hidden: float
    hidden_in_loops: float
    flops: float

    def to_dict(self) -> dict[str, Any]:
        """The totals, for JSON."""
        found = dataclasses.asdict(self)
        return found | {"flops_per_s": found.pop("flops") / self.step_s if self.step_s else 0.0}


@dataclasses.dataclass(frozen=True)
class EstimateRange:
    """Estimates over ranges of assumptions.

    Args:
        stated: the estimate under the assumptions as given.
        cases: those at the corners of the ranges, and `stated`.
    """

    stated: Estimate
    cases: tuple[Estimate, ...]

    @property
    def fastest(self) -> Estimate:
        """The case with the shortest step."""
        return min(self.cases, key=lambda e: e.step_s)

    @property
    def slowest(self) -> Estimate:
        """The case with the longest step."""
        return max(self.cases, key=lambda e: e.step_s)

    def span(self, name: str) -> tuple[float, float]:
        """Smallest and largest value of a number of the cases."""
        values = [getattr(case, name) for case in self.cases]
        return min(values), max(values)


def estimate(schedule: Schedule, assumptions: Assumptions) -> Estimate:
    """Plays a schedule (`jshard.inspect.hlo.walk.read_schedule`) under assumptions."""
    replay = Replay(schedule, assumptions)
    times = list(zip(replay.communication_s, replay.exposed_s, strict=True))
    in_loops = [time for time, window in zip(times, schedule.windows, strict=True) if window.loop]
    return Estimate(
        assumptions,
        step_s=replay.clock_s,
        compute_s=replay.compute_s,
        communication_s=sum(replay.communication_s),
        exposed_s=sum(replay.exposed_s),
        hidden=_hidden(times),
        hidden_in_loops=_hidden(in_loops),
        flops=schedule.flops,
    )


def estimate_range(
    schedule: Schedule, assumptions: Assumptions, ranges: Mapping[str, tuple[float, float]]
) -> EstimateRange:
    """Estimates over ranges of what is least known.

    Args:
        schedule: as for `estimate`.
        assumptions: the machine; what is not varied stays as it says.
        ranges: lowest and highest value of some of its numbers; all corners of them are looked at.
    """
    corners = [
        estimate(schedule, dataclasses.replace(assumptions, **dict(zip(ranges, values, strict=True))))
        for values in itertools.product(*ranges.values())
    ]
    stated = estimate(schedule, assumptions)
    return EstimateRange(stated, (stated, *corners))


def _hidden(times: Sequence[tuple[float, float]]) -> float:
    total = sum(communication_s for communication_s, _ in times)
    return 1.0 - sum(exposed_s for _, exposed_s in times) / total if total else 1.0


# A cluster as an estimate sees it: the facts about its devices, and ranges of what nobody knows beforehand.

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
        return Machine(len(mesh.devices.flat), _device_bytes(mesh), near, _CPU)
    facts = device_of(first.device_kind) or DEVICES["h100"]
    return Machine(len(mesh.devices.flat), _device_bytes(mesh) or facts.hbm_bytes, near, _assumed(facts, near))


def _device_bytes(mesh: Mesh) -> int | None:
    """Memory of one device of a mesh; of simulated ones their share of the host's. None where it is not known."""
    local: list[Any] = list(mesh.local_devices)
    if local[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    try:
        return (local[0].memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # devices of a cluster that is not there
        return None


def assumptions_of(topology: Topology) -> Assumptions:
    """What an estimate takes for granted about a cluster, at the rates that its links are assumed to reach."""
    return _assumed(topology.device, topology.fast_group)


def _assumed(device: DeviceFacts, fast_group: int) -> Assumptions:
    peaks = {name: device.product_flops_per_s(name) for name in ("f32", *_FP8)}
    return Assumptions(
        name=device.title,
        flops_per_s=device.flops_per_s["bf16"],
        memory_bytes_per_s=device.hbm_bytes_per_s,
        fast_bytes_per_s=device.fast.bytes_per_s,
        fast_group=fast_group,
        slow_bytes_per_s=device.slow.bytes_per_s,
        matmul_efficiency=EFFICIENCY[0],
        host_bytes_per_s=device.host.bytes_per_s if device.host else None,
        flops_per_s_of=tuple(peaks.items()),
    )


@dataclasses.dataclass(frozen=True)
class PlannedCluster:
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
        link = ("slow_bytes_per_s", device.slow.range) if is_wide else ("fast_bytes_per_s", device.fast.range)
        found = dict([link, ("matmul_efficiency", EFFICIENCY)])
        return {name: ends for name, ends in found.items() if name not in self.known}

    def estimate(self, schedule: Schedule) -> EstimateRange:
        """Estimates of a compiled step, over the ranges of what is least known."""
        return estimate_range(schedule, self.assumptions, self.ranges)


def parse_known(texts: Sequence[str]) -> dict[str, float]:
    """What a command line knows of a cluster: texts such as `slow_bytes_per_s=25e9`.

    Raises:
        ShardingError: it is no assumption, cannot have the value, or is given twice.
    """
    names = [f.name for f in dataclasses.fields(Assumptions) if f.type in (float, int, float | None)]
    found = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        number = _number(name, value)
        if name not in names or number is None or name in found:
            raise ShardingError(
                "An assumption is given twice." if name in found else "The assumption about a cluster is not known.",
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
