"""What a model costs beyond its plan, before compiling: it sends over its own axes, and its kernels compute."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jshard.cluster.assumptions import Assumptions
from jshard.inspect.hlo.collectives import group_along
from jshard.inspect.hlo.work import OpWork
from jshard.inspect.partitioned import ModelCollective
from jshard.inspect.traced_program import BACKWARD, FORWARD
from jshard.inspect.traced_work import KernelWork
from jshard.plans.mesh import TENSOR

# ---- what it sends over `tensor`, `context` and `expert`


@dataclasses.dataclass(frozen=True)
class ModelTraffic:
    """The collectives of one kind over the same axes, of one microbatch."""

    kind: str
    axes: tuple[str, ...]
    count: float
    total_bytes: float  # of the whole arrays

    def seconds(self, degrees: Mapping[str, int], assumptions: Assumptions) -> float:
        """Returns the time of one of them, on a mesh."""
        group = group_along(degrees, self.axes)
        return assumptions.transfer_s(self.kind, self.total_bytes / self.count, group)


def summed_traffic(counts: Mapping[ModelCollective, int]) -> dict[tuple[str, tuple[str, ...]], ModelTraffic]:
    """Returns the traffic of a program, by kind and axes."""
    num: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    total_bytes: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for collective, count in counts.items():
        key = (collective.kind, collective.axes)
        num[key] += count
        total_bytes[key] += count * collective.full_bytes
    traffic = {}
    for key, count in num.items():
        kind, axes = key
        traffic[key] = ModelTraffic(kind, axes, count, total_bytes[key])
    return traffic


def traffic_of_rows(
    low: Mapping[ModelCollective, int], high: Mapping[ModelCollective, int], rows: tuple[int, int], wanted: float
) -> Iterator[ModelTraffic]:
    """Yields the traffic of a batch, which grows linearly with its rows.

    Args:
        low: of a program with few rows for each device.
        high: of one with more.
        rows: these two numbers of rows.
        wanted: the rows of the batch.
    """
    at_low = summed_traffic(low)
    at_high = summed_traffic(high)
    num_low, num_high = rows
    for key, traffic in at_low.items():
        more_bytes = at_high[key].total_bytes - traffic.total_bytes if key in at_high else 0.0
        growth = more_bytes / (num_high - num_low)
        total_bytes = max(0.0, traffic.total_bytes + (wanted - num_low) * growth)
        yield dataclasses.replace(traffic, total_bytes=total_bytes)


def over_other_tensor(
    counts: Mapping[ModelCollective, int], *, traced_degree: int, degree: int
) -> Mapping[ModelCollective, int]:
    """Returns the collectives of a device for another degree of `tensor`; of 1, nothing goes over it.

    Args:
        counts: the collectives for one degree.
        traced_degree: that degree.
        degree: the other one.
    """
    result: collections.Counter[ModelCollective] = collections.Counter()
    for collective, count in counts.items():
        if degree == 1 and TENSOR in collective.axes:
            continue
        if collective.is_part:
            full_bytes = collective.full_bytes * traced_degree // degree
            collective = dataclasses.replace(collective, full_bytes=full_bytes)
        result[collective] += count
    return result


def divides_all_that_grows(low: Mapping[ModelCollective, int], high: Mapping[ModelCollective, int], axis: str) -> bool:
    """Returns whether devices along an axis share all work on the examples: what they send there are only exchanges.

    Args:
        low: the collectives for few rows.
        high: those for more.
        axis: the axis.
    """
    at_low = summed_traffic(low)
    for key, traffic in summed_traffic(high).items():
        kind, axes = key
        if axis not in axes or kind == "all-to-all":
            continue
        if key not in at_low or traffic.total_bytes != at_low[key].total_bytes:
            return False
    return True


# ---- how long its kernels take

_LEAST_GROWTH = 1e-6  # of what a kernel reads and writes, from an empty batch; less is rounding


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """The computation of a microbatch."""

    products_s: float  # matrix products and attention, as fast as large ones
    small_products_s: float  # that they take longer, because they are small
    traffic_s: float  # other operations, bound by the memory
    forward_s: float  # of all of it
    backward_s: float

    @property
    def total_s(self) -> float:
        """Returns all of it."""
        return self.forward_s + self.backward_s


def without_parameter_work(kernels: Sequence[KernelWork], of_no_rows: Sequence[KernelWork]) -> list[KernelWork]:
    """Returns the kernels of a microbatch without those that only read and write parameters and their gradients.

    They cast what is gathered, and what is reduced. Where both are done once a step, no microbatch has them.

    Args:
        kernels: of a microbatch.
        of_no_rows: the same, of an empty one.
    """
    kept = []
    for kernel, empty in zip(kernels, of_no_rows, strict=True):
        grows = kernel.work.memory_bytes > (1 + _LEAST_GROWTH) * empty.work.memory_bytes
        if kernel.work.products or grows:
            kept.append(kernel)
    return kept


def kernel_times(kernels: Iterable[KernelWork], assumptions: Assumptions) -> KernelTimes:
    """Returns how long kernels take on a device, one after another."""
    large_products = dataclasses.replace(assumptions, multiprocessors=0, launch_s=0.0)
    products_s = 0.0
    large_products_s = 0.0
    traffic_s = 0.0
    phases_s = {FORWARD: 0.0, BACKWARD: 0.0}
    for kernel in kernels:
        seconds = kernel.rounds * assumptions.compute_s(kernel.work)
        phases_s[kernel.phase] += seconds
        if kernel.work.products:
            products_s += seconds
            alone = OpWork(kernel.work.products)
            large_products_s += kernel.rounds * large_products.compute_s(alone)
        else:
            traffic_s += seconds
    return KernelTimes(
        products_s=large_products_s,
        small_products_s=products_s - large_products_s,
        traffic_s=traffic_s,
        forward_s=phases_s[FORWARD],
        backward_s=phases_s[BACKWARD],
    )
