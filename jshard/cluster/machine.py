"""A cluster as an estimate sees it: the facts about its devices, and ranges of what nobody knows beforehand."""

from __future__ import annotations

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.estimate import EstimateRange, estimate_range
from jshard.cluster.topology import Topology
from jshard.inspect.schedule import Schedule

EFFICIENCY = 0.60, 0.75  # of matrix products, by the peak of the data sheet
_FP8 = "f8e4m3fn", "f8e5m2"


def assumptions_of(topology: Topology) -> Assumptions:
    """What an estimate takes for granted about a cluster, at the rates that its links are assumed to reach.

    Args:
        topology: the cluster.

    Example:
        >>> assumptions_of(parse_topology("h100:64x8")).slow_bytes_per_s
        42000000000.0
    """
    device = topology.device
    peaks = {name: device.product_flops_per_s(name) for name in ("f32", *_FP8)}
    return Assumptions(
        name=device.title,
        flops_per_s=device.flops_per_s["bf16"],
        memory_bytes_per_s=device.hbm_bytes_per_s,
        fast_bytes_per_s=device.fast_bytes_per_s,
        fast_group=topology.fast_group,
        slow_bytes_per_s=device.slow_bytes_per_s,
        matmul_efficiency=EFFICIENCY[0],
        flops_per_s_of=tuple(peaks.items()),
    )


def estimate_on(schedule: Schedule, topology: Topology) -> EstimateRange:
    """Estimates of a step over the ranges of what is least known: the efficiency, and the links that bind it.

    Where a cluster is larger than what fast links join, its adapters are what binds it; else the fast links are.

    Args:
        schedule: the compiled program.
        topology: the cluster that it was compiled for.
    """
    base = assumptions_of(topology)
    name, rates = binding_link(topology)
    return estimate_range(schedule, base, ranges={name: rates, "matmul_efficiency": EFFICIENCY})


def binding_link(topology: Topology) -> tuple[str, tuple[float, float]]:
    """The rate of `Assumptions` that is varied, and its range."""
    device = topology.device
    if topology.num_devices > topology.fast_group:
        return "slow_bytes_per_s", device.slow_range
    return "fast_bytes_per_s", device.fast_range
