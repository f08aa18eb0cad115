"""How long a step would take on a cluster, and how much of its communication is hidden: an estimate with ranges."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.cluster.replay import Assumptions, Replay
from jshard.cluster.topology import Topology
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.inspect.hlo.schedule import Schedule, Window

# Links between hosts from congested to new ones, and what good kernels reach of a device's peak.
RANGES: Mapping[str, tuple[float, float]] = {"slow_bytes_per_s": (15e9, 50e9), "matmul_efficiency": (0.60, 0.75)}


@dataclasses.dataclass(frozen=True)
class CollectiveEstimate:
    """A collective of the schedule, in an estimate.

    Args:
        window: the collective.
        communication_s: what it takes, over all executions.
        exposed_s: what of it the computation waits for.
    """

    window: Window
    communication_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step on a machine as assumed.

    Args:
        assumptions: the machine.
        step_s: the step.
        compute_s: what of it computes.
        flops: of one device, with those computed again for backward.
        collectives: the collectives, in the order of the schedule.
    """

    assumptions: Assumptions
    step_s: float
    compute_s: float
    flops: float
    collectives: tuple[CollectiveEstimate, ...]

    @property
    def communication_s(self) -> float:
        """What the collectives take, one after another."""
        return sum(c.communication_s for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """What of it the computation waits for."""
        return sum(c.exposed_s for c in self.collectives)

    @property
    def hidden(self) -> float:
        """Part of the communication that runs beside computation, from 0 to 1."""
        return _hidden(self.collectives)

    @property
    def hidden_in_loops(self) -> float:
        """The same of the collectives inside loops."""
        return _hidden(c for c in self.collectives if c.window.loop)

    @property
    def flops_per_s(self) -> float:
        """Operations in a second on one device."""
        return self.flops / self.step_s if self.step_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The totals, for JSON."""
        names = "step_s", "compute_s", "communication_s", "exposed_s", "hidden", "hidden_in_loops", "flops_per_s"
        return {name: getattr(self, name) for name in names} | {"assumptions": dataclasses.asdict(self.assumptions)}


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

    @property
    def step_s(self) -> tuple[float, float]:
        """Shortest and longest step."""
        return self._range("step_s")

    @property
    def exposed_s(self) -> tuple[float, float]:
        """Least and most time that the computation waits for communication."""
        return self._range("exposed_s")

    @property
    def hidden(self) -> tuple[float, float]:
        """Smallest and largest hidden part of the communication."""
        return self._range("hidden")

    @property
    def hidden_in_loops(self) -> tuple[float, float]:
        """The same of the collectives inside loops."""
        return self._range("hidden_in_loops")

    def _range(self, name: str) -> tuple[float, float]:
        values = [getattr(case, name) for case in self.cases]
        return min(values), max(values)

    def to_dict(self) -> dict[str, Any]:
        """Ranges, the stated case and all cases, for JSON."""
        names = "step_s", "exposed_s", "hidden", "hidden_in_loops"
        ranges = {name: list(self._range(name)) for name in names}
        return ranges | {"stated": self.stated.to_dict(), "cases": [case.to_dict() for case in self.cases]}


def estimate(schedule: Schedule, assumptions: Assumptions) -> Estimate:
    """Plays a schedule under assumptions.

    Args:
        schedule: what `jshard.inspect.hlo.walk.read_schedule` read.
        assumptions: the machine.

    Raises:
        ShardingError: an assumption that is no positive number.

    Example:
        >>> estimate(read_schedule(compiled), h100).hidden
        0.98
    """
    _refuse_nonsense(assumptions)
    replay = Replay(schedule, assumptions)
    times = zip(schedule.windows, replay.communication_s, replay.exposed_s, strict=True)
    collectives = tuple(CollectiveEstimate(*each) for each in times)
    return Estimate(assumptions, replay.clock_s, replay.compute_s, schedule.flops, collectives)


def estimate_range(
    schedule: Schedule, assumptions: Assumptions, *, ranges: Mapping[str, tuple[float, float]] = RANGES
) -> EstimateRange:
    """Estimates over ranges of what is least known.

    Args:
        schedule: what `jshard.inspect.hlo.walk.read_schedule` read.
        assumptions: the machine; what is not varied stays as it says.
        ranges: lowest and highest value of some of its numbers; all corners of them are looked at.

    Raises:
        ShardingError: an assumption that is no positive number.

    Example:
        >>> estimate_range(schedule, h100, ranges={"slow_bytes_per_s": (15e9, 50e9)}).hidden
        (0.63, 0.99)
    """
    corners = [
        estimate(schedule, dataclasses.replace(assumptions, **dict(zip(ranges, values, strict=True))))
        for values in itertools.product(*ranges.values())
    ]
    stated = estimate(schedule, assumptions)
    return EstimateRange(stated, (stated, *corners))


def _hidden(collectives: Iterable[CollectiveEstimate]) -> float:
    found = list(collectives)
    total = sum(c.communication_s for c in found)
    return 1.0 - sum(c.exposed_s for c in found) / total if total else 1.0


def _refuse_nonsense(assumptions: Assumptions) -> None:
    numbers = {k: v for k, v in dataclasses.asdict(assumptions).items() if isinstance(v, int | float)}
    bad = {k: v for k, v in numbers.items() if not (v >= 0 if k == "latency_s" else v > 0)}
    bad |= {k: numbers[k] for k in ("matmul_efficiency", "memory_efficiency") if numbers[k] > 1}
    if bad:
        raise ShardingError(
            "An estimate cannot be made from these assumptions.",
            where=[f"{k} = {v!r}" for k, v in bad.items()],
            why="rates and sizes are positive, efficiencies between 0 and 1.",
            do="dataclasses.replace(assumptions, matmul_efficiency=0.6)",
        )


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
        return estimate_range(schedule, self.assumptions, ranges=self.ranges)


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
