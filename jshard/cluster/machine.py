"""The devices that an estimate is for: those of a run, or a cluster you do not have and what is known about it."""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.estimate import EstimateRange, estimate_range
from jshard.cluster.topology import Topology
from jshard.errors import ShardingError
from jshard.facts.device_facts import Bounds
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.facts.gpu_target import NvidiaTarget
from jshard.inspect.hlo import Schedule
from jshard.plans.mesh import device_reduces_before_gathers

# ---- assumptions about devices

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
# Dtypes of matrix products, besides those of 16 bits, of which the peaks are known.
_DTYPES = ("f32", "f8e4m3fn", "f8e5m2")

# For GPUs. A TPU has separate engines for communication, and the variation between chips is not published.
# A collective takes multiprocessors and memory bandwidth from concurrent computation: arXiv 2507.03114, abstract, has
# 18.9 % on average and 40 % at most, on A100, H100, MI210 and MI250.
_CONTENTION = 0.19
_CONTENTION_RANGE = (0.0, 0.4)
# All wait for the slowest device: "5% and higher differences on an 8-gpu node" (ml-engineering, compute/accelerator).
_STRAGGLING = 0.05
_STRAGGLING_RANGE = (0.0, 0.1)
# Latency of a collective, and of its ring steps over NVLink and network: NCCL, src/graph/tuning.cc, ring with LL128.
_NCCL_LATENCY_S = 14e-6
_NCCL_FAST_HOP_S = 1.9e-6
_NCCL_SLOW_HOP_S = 4e-6
_LAUNCH_S = 1e-6  # developer.nvidia.com/blog/cuda-graphs: 3.8 us a kernel that runs for 2.9 us
# XLA's scheduler for GPUs leaves a fifth of the memory free. Of a program whose arguments alone take more, it starts
# nothing early, because that takes memory.
_SCHEDULED_MEMORY = 0.8
# What XLA's scheduler of jaxlib 0.10 expects a large collective to reach on a network adapter, by its own log with
# TF_CPP_VMODULE=sol_latency_estimator=10: 25 and 50 GB/s, less the preparation of chunks. On other devices it has no
# such model, or runs collectives one after another.
_EXPECTED_SLOW_BYTES_PER_S = {9: 20.5e9, 10: 43e9}  # by compute capability


def assumptions_of(topology: Topology) -> Assumptions:
    """Returns the assumptions of an estimate about a cluster."""
    return _assumptions(topology.device, topology.fast_group)


def _assumptions(device: DeviceFacts, fast_group: int) -> Assumptions:
    """Returns the assumptions about devices; the rates are those that their links are assumed to reach."""
    assumptions = Assumptions(
        name=device.title,
        flops_per_s=device.flops_per_s["bf16"],
        memory_bytes_per_s=device.hbm_bytes_per_s,
        fast_bytes_per_s=device.fast.bytes_per_s,
        fast_group=fast_group,
        slow_bytes_per_s=device.slow.bytes_per_s,
        fast_links=device.torus_links,
        matmul_efficiency=device.matmul.stated / 100,
        attention_efficiency=device.attention.stated / 100,
        host_bytes_per_s=None if device.host is None else device.host.bytes_per_s,
        flops_per_s_of=tuple((dtype, device.product_flops_per_s(dtype)) for dtype in _DTYPES),
        multiprocessors=0 if device.target is None else device.target.core_count,
    )
    if device.platform != "gpu":
        return assumptions
    return dataclasses.replace(
        assumptions,
        latency_s=_NCCL_LATENCY_S,
        fast_hop_s=_NCCL_FAST_HOP_S,
        slow_hop_s=_NCCL_SLOW_HOP_S,
        launch_s=_LAUNCH_S,
        contention=_CONTENTION,
        straggling=_STRAGGLING,
    )


# ---- the devices of a run


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts about devices that an estimate uses."""

    num_devices: int
    capacity_bytes: int | None  # memory of one device; None if unknown
    near: int  # neighbouring devices joined by the fast links
    assumptions: Assumptions
    device: DeviceFacts | None = None  # the record of one device; None if unknown

    @property
    def reduces_before_gathers(self) -> bool:
        """Returns whether a loop reduces the gradients of an iteration before it gathers much for the next one."""
        platform = "" if self.device is None else self.device.platform
        return device_reduces_before_gathers(self.device, platform)

    def overlaps_beside(self, held_bytes: int) -> bool:
        """Returns whether the compiler lets collectives overlap with computation.

        Args:
            held_bytes: what a device holds between steps.
        """
        if self.capacity_bytes is None or self.device is None or self.device.platform != "gpu":
            return True
        return held_bytes <= _SCHEDULED_MEMORY * self.capacity_bytes

    @property
    def expected_assumptions(self) -> Assumptions | None:
        """Returns what the compiler expects of collectives between hosts, if it starts several at a time; else None."""
        target = None if self.device is None else self.device.target
        if not isinstance(target, NvidiaTarget) or self.num_devices <= self.near:
            return None
        slow_bytes_per_s = _EXPECTED_SLOW_BYTES_PER_S.get(target.major)
        if slow_bytes_per_s is None:
            return None
        return dataclasses.replace(self.assumptions, slow_bytes_per_s=slow_bytes_per_s)

    @property
    def ties_small_gathers(self) -> bool:
        """Returns whether large gathers of a layer are tied behind its small ones."""
        return self.device is None or self.device.platform != "tpu"


def machine_here(mesh: Mesh) -> Machine:
    """Returns the devices of a run. Unknown figures are taken from an H100, or guessed for a CPU."""
    first = mesh.local_devices[0]
    num_devices = len(mesh.devices.flat)
    near = len(mesh.local_devices)
    capacity_bytes = _device_bytes(mesh)
    if first.platform == "cpu":
        return Machine(num_devices, capacity_bytes, near, _CPU)
    facts = device_of(first.device_kind) or DEVICES["h100"]
    return Machine(num_devices, capacity_bytes or facts.hbm_bytes, near, _assumptions(facts, near), facts)


def _device_bytes(mesh: Mesh) -> int | None:
    """Returns the memory of one device of a mesh; of simulated devices, their share of the host's. None if unknown."""
    local = list(mesh.local_devices)
    if local[0].platform == "cpu":
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host_bytes // len(local)
    try:
        stats = local[0].memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # devices of a cluster that does not exist here
        return None
    return stats.get("bytes_limit")


# ---- a cluster you do not have

Known = float | tuple[float, float]
"""A value, or its lowest and highest possible value."""


@dataclasses.dataclass(frozen=True)
class PlannedCluster:
    """A cluster you do not have, and what is known about it beyond data sheets."""

    topology: Topology
    known: Mapping[str, Known] = dataclasses.field(default_factory=dict)  # by field of `Assumptions`

    @property
    def assumptions(self) -> Assumptions:
        """Returns the assumptions of an estimate; of a known range its middle."""
        stated: dict[str, float] = {}
        for name, value in self.known.items():
            stated[name] = sum(value) / 2 if isinstance(value, tuple) else value
        return dataclasses.replace(assumptions_of(self.topology), **stated)

    @property
    def assume(self) -> tuple[str, ...]:
        """Returns the known values in the form that `parse_known` reads."""
        texts = []
        for name, value in self.known.items():
            ends = value if isinstance(value, tuple) else (value,)
            texts.append(f"{name}={'..'.join(f'{end:g}' for end in ends)}")
        return tuple(texts)

    @property
    def machine(self) -> Machine:
        """Returns the cluster for a search."""
        topology = self.topology
        device = topology.device
        return Machine(topology.num_devices, device.hbm_bytes, topology.fast_group, self.assumptions, device)

    @property
    def has_bounds_only(self) -> bool:
        """Returns whether nothing is known of what matrix products sustain but bounds."""
        return isinstance(self.topology.device.matmul, Bounds) and "matmul_efficiency" not in self.known

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Returns the least certain assumptions: the limiting links' rates, the kernels' efficiency, and waiting.

        In a cluster larger than a fast-link group, the adapters are the limiting links; otherwise the fast links are.
        """
        device = self.topology.device
        uncertain: dict[str, tuple[float, float]] = {}
        if self.topology.num_devices > self.topology.fast_group:
            uncertain["slow_bytes_per_s"] = device.slow.range
        else:
            uncertain["fast_bytes_per_s"] = device.fast.range
        uncertain["matmul_efficiency"] = device.matmul.range
        uncertain["attention_efficiency"] = device.attention.range
        if device.platform == "gpu":
            uncertain["contention"] = _CONTENTION_RANGE
            uncertain["straggling"] = _STRAGGLING_RANGE

        ranges = {name: ends for name, ends in uncertain.items() if name not in self.known}
        for name, value in self.known.items():
            if isinstance(value, tuple):
                ranges[name] = value
        return ranges

    def estimate(self, schedule: Schedule) -> EstimateRange:
        """Estimates a compiled step, over the ranges of the least certain assumptions."""
        return estimate_range(schedule, self.assumptions, self.ranges)


# ---- known values

_COUNTS = ("fast_group", "fast_links", "multiprocessors")
_MAY_BE_ZERO = ("contention", "straggling")


def parse_known(texts: Sequence[str], *, others: Sequence[str] = ()) -> dict[str, Known]:
    """Parses known values of a cluster, such as `slow_bytes_per_s=25e9` or `slow_bytes_per_s=10e9..14e9`.

    Args:
        texts: the values.
        others: the names of further assumptions, each a positive number, beside those of `Assumptions`.

    Raises:
        ShardingError: it is not an assumption, cannot have the value, or is given twice.
    """
    types = typing.get_type_hints(Assumptions)
    names = [name for name, kind in types.items() if kind in (float, int, float | None)]
    names += others
    known: dict[str, Known] = {}
    for text in texts:
        name, _, value_text = text.partition("=")
        name = name.strip()
        value = None
        if name in names and name not in known:
            value = _parsed_value(name, value_text.strip())
        if value is None:
            raise ShardingError(
                "An assumption is given twice." if name in known else "The assumption about the cluster is unknown.",
                where=f"--assume {text}",
                why=f"the assumptions are {', '.join(names)}, each a positive number, or a range such as 10e9..14e9,"
                " given once; efficiencies are at most 1, and fast_group, fast_links and multiprocessors are integers.",
                do="--assume slow_bytes_per_s=25e9",
            )
        known[name] = value
    return known


def _parsed_value(name: str, text: str) -> Known | None:
    """Returns the value or the range of an assumption; None if it is not valid."""
    numbers = []
    for end in text.split(".."):
        number = _parsed_number(name, end)
        if number is None:
            return None
        numbers.append(number)
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) == 2 and numbers[0] <= numbers[1]:
        return numbers[0], numbers[1]
    return None


def _parsed_number(name: str, text: str) -> float | None:
    """Returns one number of an assumption; None if it is not valid."""
    try:
        number = int(text) if name in _COUNTS else float(text)
    except ValueError:
        return None
    least = 0.0 if name in _MAY_BE_ZERO else sys.float_info.min
    most = 1.0 if name.endswith("_efficiency") else sys.float_info.max
    # False for NaN, too: no comparison with it is true.
    return number if least <= number <= most else None
