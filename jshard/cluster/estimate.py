"""Estimates, with ranges, the time of a step on a cluster and how much communication is hidden."""

from __future__ import annotations

import dataclasses
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
from jshard.inspect.hlo import Schedule


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A step under given assumptions about the machine."""

    assumptions: Assumptions
    step_s: float
    compute_s: float  # time of computation
    split_s: Mapping[str, float]  # the same, by `jshard.cluster.replay.WORKS`
    communication_s: float  # time of the collectives, run one after another
    exposed_s: float  # the part that the computation waits for
    exposed_by_kind_s: Mapping[str, float]
    hidden: float  # share of the communication that overlaps with computation, from 0 to 1
    hidden_in_loops: float  # the same, for the collectives inside loops
    flops: float  # of one device, including recomputation for backward

    def to_dict(self) -> dict[str, Any]:
        """The totals, for JSON."""
        found = dataclasses.asdict(self)
        return found | {"computed_flops_per_s": found.pop("flops") / self.step_s if self.step_s else 0.0}


@dataclasses.dataclass(frozen=True)
class EstimateRange:
    """Estimates over ranges of assumptions: as stated, and with all unknowns at their best or worst."""

    stated: Estimate
    fastest: Estimate
    slowest: Estimate

    @property
    def cases(self) -> tuple[Estimate, ...]:
        """All three."""
        return self.stated, self.fastest, self.slowest

    def span(self, name: str) -> tuple[float, float]:
        """The smallest and largest value of a quantity over the cases."""
        values = [getattr(case, name) for case in self.cases]
        return min(values), max(values)


def estimate(schedule: Schedule, assumptions: Assumptions) -> Estimate:
    """Replays a schedule (`jshard.inspect.hlo.walk.read_schedule`) under assumptions."""
    replay = Replay(schedule, assumptions)
    times = list(zip(replay.communication_s, replay.exposed_s, strict=True))
    by_kind = dict.fromkeys((window.kind for window in schedule.windows), 0.0)
    for window, exposed_s in zip(schedule.windows, replay.exposed_s, strict=True):
        by_kind[window.kind] += exposed_s
    in_loops = [time for time, window in zip(times, schedule.windows, strict=True) if window.loop]
    return Estimate(
        assumptions,
        step_s=replay.clock_s,
        compute_s=replay.compute_s,
        split_s=replay.split_s,
        communication_s=sum(replay.communication_s),
        exposed_s=sum(replay.exposed_s),
        exposed_by_kind_s=by_kind,
        hidden=_hidden(times),
        hidden_in_loops=_hidden(in_loops),
        flops=schedule.flops,
    )


_DELAYS = "contention", "straggling", "latency_s", "launch_s", "fast_hop_s", "slow_hop_s"


def estimate_range(
    schedule: Schedule, assumptions: Assumptions, ranges: Mapping[str, tuple[float, float]]
) -> EstimateRange:
    """Estimates over ranges of the least certain assumptions, given by their lowest and highest value."""
    well = {name: min(ends) if name in _DELAYS else max(ends) for name, ends in ranges.items()}
    badly = {name: max(ends) if name in _DELAYS else min(ends) for name, ends in ranges.items()}
    return EstimateRange(
        *(estimate(schedule, dataclasses.replace(assumptions, **changed)) for changed in ({}, well, badly))
    )


def _hidden(times: Sequence[tuple[float, float]]) -> float:
    total = sum(communication_s for communication_s, _ in times)
    return 1.0 - sum(exposed_s for _, exposed_s in times) / total if total else 1.0


# A cluster for an estimate: facts about its devices, and ranges for what is not known in advance.

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
_FP8 = "f8e4m3fn", "f8e5m2"
# For GPUs. A TPU has separate engines for communication, and the variation between chips is not published.
# A collective takes multiprocessors and memory bandwidth from concurrent computation: arXiv 2507.03114, abstract, has
# 18.9 % on average and 40 % at most, on A100, H100, MI210 and MI250.
_CONTENTION, _CONTENTIONS = 0.19, (0.0, 0.4)
# All wait for the slowest device: "5% and higher differences on an 8-gpu node" (ml-engineering, compute/accelerator).
_STRAGGLING, _STRAGGLINGS = 0.05, (0.0, 0.1)
# Latency of a collective, and of its ring steps over NVLink and network: NCCL, src/graph/tuning.cc, ring with LL128.
_NCCL = {"latency_s": 14e-6, "fast_hop_s": 1.9e-6, "slow_hop_s": 4e-6}
_LAUNCH_S = 1e-6  # developer.nvidia.com/blog/cuda-graphs: 3.8 us a kernel that runs for 2.9 us


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts about devices that an estimate uses."""

    num_devices: int
    capacity_bytes: int | None  # memory of one device; None if unknown
    near: int  # neighbouring devices joined by the fast links
    assumptions: Assumptions


def machine_here(mesh: Mesh) -> Machine:
    """The devices of a run. Unknown figures are taken from an H100, or guessed for a CPU."""
    first = mesh.local_devices[0]
    near = len(mesh.local_devices)
    if first.platform == "cpu":
        return Machine(len(mesh.devices.flat), _device_bytes(mesh), near, _CPU)
    facts = device_of(first.device_kind) or DEVICES["h100"]
    return Machine(len(mesh.devices.flat), _device_bytes(mesh) or facts.hbm_bytes, near, _assumed(facts, near))


def _device_bytes(mesh: Mesh) -> int | None:
    """Memory of one device of a mesh; for simulated devices, their share of the host's. None if unknown."""
    local: list[Any] = list(mesh.local_devices)
    if local[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    try:
        return (local[0].memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # devices of a cluster that does not exist here
        return None


def assumptions_of(topology: Topology) -> Assumptions:
    """The assumptions of an estimate about a cluster."""
    return _assumed(topology.device, topology.fast_group)


def _assumed(device: DeviceFacts, fast_group: int) -> Assumptions:
    """The rates are those that the device's links are assumed to reach."""
    peaks = {name: device.product_flops_per_s(name) for name in ("f32", *_FP8)}
    return Assumptions(
        name=device.title,
        flops_per_s=device.flops_per_s["bf16"],
        memory_bytes_per_s=device.hbm_bytes_per_s,
        fast_bytes_per_s=device.fast.bytes_per_s,
        fast_group=fast_group,
        slow_bytes_per_s=device.slow.bytes_per_s,
        matmul_efficiency=device.matmul.stated / 100,
        attention_efficiency=device.attention.stated / 100,
        contention=_CONTENTION if device.platform == "gpu" else 0.0,
        straggling=_STRAGGLING if device.platform == "gpu" else 0.0,
        host_bytes_per_s=device.host.bytes_per_s if device.host else None,
        flops_per_s_of=tuple(peaks.items()),
        multiprocessors=device.target.core_count if device.target is not None else 0,
        launch_s=_LAUNCH_S if device.platform == "gpu" else 0.0,
        **(_NCCL if device.platform == "gpu" else {}),
    )


Known = float | tuple[float, float]
"""A value, or its lowest and highest possible value."""


@dataclasses.dataclass(frozen=True)
class PlannedCluster:
    """A cluster you do not have, and what is known about it beyond data sheets."""

    topology: Topology
    known: Mapping[str, Known] = dataclasses.field(default_factory=dict)  # by field of `Assumptions`

    @property
    def assumptions(self) -> Assumptions:
        """The assumptions of an estimate."""
        stated = {name: sum(value) / 2 if isinstance(value, tuple) else value for name, value in self.known.items()}
        return dataclasses.replace(assumptions_of(self.topology), **stated)

    @property
    def assume(self) -> tuple[str, ...]:
        """The known values in the form that `parse_known` reads."""
        ends = lambda value: value if isinstance(value, tuple) else (value,)
        return tuple(f"{name}={'..'.join(f'{end:g}' for end in ends(value))}" for name, value in self.known.items())

    @property
    def machine(self) -> Machine:
        """The cluster for a search."""
        topology = self.topology
        return Machine(topology.num_devices, topology.device.hbm_bytes, topology.fast_group, self.assumptions)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least certain assumptions: the limiting links' rates, the kernels' efficiency, and waiting.

        In a cluster larger than a fast-link group, the adapters are the limiting links; otherwise the fast links are.
        """
        device, num_devices = self.topology.device, self.topology.num_devices
        is_wide = num_devices > self.topology.fast_group
        link = ("slow_bytes_per_s", device.slow.range) if is_wide else ("fast_bytes_per_s", device.fast.range)
        found = dict([link]) | {
            "matmul_efficiency": device.matmul.range,
            "attention_efficiency": device.attention.range,
        }
        found |= {"contention": _CONTENTIONS, "straggling": _STRAGGLINGS} if device.platform == "gpu" else {}
        given = {name: value for name, value in self.known.items() if isinstance(value, tuple)}
        return {name: ends for name, ends in found.items() if name not in self.known} | given

    def estimate(self, schedule: Schedule) -> EstimateRange:
        """Estimates of a compiled step, over the ranges of the least certain assumptions."""
        return estimate_range(schedule, self.assumptions, self.ranges)


def parse_known(texts: Sequence[str]) -> dict[str, Known]:
    """Parses known values of a cluster, such as `slow_bytes_per_s=25e9` or `slow_bytes_per_s=10e9..14e9`.

    Raises:
        ShardingError: it is not an assumption, cannot have the value, or is given twice.
    """
    names = [f.name for f in dataclasses.fields(Assumptions) if f.type in (float, int, float | None)]
    found = dict[str, Known]()
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        ends = [_number(name, end) for end in value.split("..")]
        numbers = [number for number in ends if number is not None]
        is_right = len(numbers) == len(ends) <= 2 and numbers == sorted(numbers)
        if name not in names or name in found or not is_right:
            raise ShardingError(
                "An assumption is given twice." if name in found else "The assumption about the cluster is unknown.",
                where=f"--assume {text}",
                why=f"the assumptions are {', '.join(names)}, each a positive number, or a range such as 10e9..14e9,"
                " given once; efficiencies are at most 1, and fast_group and multiprocessors are integers.",
                do="--assume slow_bytes_per_s=25e9",
            )
        found[name] = numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
    return found


def _number(name: str, text: str) -> float | None:
    """The value of an assumption; None if it is not valid."""
    try:
        number = int(text) if name in ("fast_group", "multiprocessors") else float(text)
    except ValueError:
        return None
    least = 0.0 if name in ("contention", "straggling") else sys.float_info.min
    most = 1.0 if name.endswith("_efficiency") else sys.float_info.max
    return number if least <= number <= most else None
