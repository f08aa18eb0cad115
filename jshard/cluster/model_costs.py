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
from jshard.inspect.traced_work import AwaitedCollective, KernelWork
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
class Place:
    """Where a collective of the model is in the computation of the layers of a phase, of which all are 1.

    Attributes:
        kind: of the collective.
        axes: over which it runs.
        rounds: of its loop; 1 if the layers are in none.
        start: where it starts.
        end: where its result is needed.
    """

    kind: str
    axes: frozenset[str]
    rounds: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class ComputedPhase:
    """The computation of one phase of a microbatch."""

    total_s: float = 0.0
    layers_s: float = 0.0  # the part that is in layers
    independent_s: float = 0.0  # of this, what nothing in a layer waits for
    attention_s: float = 0.0  # of layers_s, attention in one kernel
    squares_s2: float = 0.0  # the squares of its kernels' times, of those in layers
    places: tuple[Place, ...] = ()  # of collectives in layers

    @property
    def kernel_s(self) -> float:
        """Returns how much of a kernel in a layer is left at any time, in the mean."""
        return self.squares_s2 / (2 * self.layers_s) if self.layers_s else 0.0

    def with_kernel(self, kernel: KernelWork, each_s: float) -> ComputedPhase:
        """Returns the times with a kernel, which takes some seconds in each of its rounds, if it has any."""
        seconds = kernel.rounds * each_s
        total_s = self.total_s + seconds
        if not kernel.in_layer:
            return dataclasses.replace(self, total_s=total_s)
        return dataclasses.replace(
            self,
            total_s=total_s,
            layers_s=self.layers_s + seconds,
            independent_s=self.independent_s + kernel.is_independent * seconds,
            attention_s=self.attention_s + (kernel.work.kind == "attention") * seconds,
            squares_s2=self.squares_s2 + seconds * each_s,
        )


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """The computation of a microbatch."""

    products_s: float  # matrix products and attention, as fast as large ones
    small_products_s: float  # that they take longer, because they are small
    traffic_s: float  # other operations, bound by the memory
    phases: Mapping[str, ComputedPhase]  # all of it; forward and backward
    # Of kernels on shards of gradients, not counted above: with the two shards of a trace, bound by the memory.
    on_shards_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Returns all of it."""
        return sum(phase.total_s for phase in self.phases.values())

    @property
    def layers_s(self) -> float:
        """Returns what is in layers."""
        return sum(phase.layers_s for phase in self.phases.values())

    def with_shards(self, share: float) -> KernelTimes:
        """Returns the times of a device whose shards are smaller than those of a trace.

        Args:
            share: how large they are, relative to those.
        """
        seconds = share * self.on_shards_s
        backward = self.phases[BACKWARD]
        later = dataclasses.replace(backward, total_s=backward.total_s + seconds)
        phases = {**self.phases, BACKWARD: later}
        return dataclasses.replace(self, traffic_s=self.traffic_s + seconds, phases=phases, on_shards_s=0.0)


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
    on_shards_s = 0.0
    phases = {FORWARD: ComputedPhase(), BACKWARD: ComputedPhase()}
    kernels = tuple(kernels)
    for kernel in kernels:
        each_s = assumptions.compute_s(kernel.work)
        if kernel.is_on_shards:
            on_shards_s += kernel.rounds * (each_s - assumptions.launch_s)
            each_s = assumptions.launch_s
        seconds = kernel.rounds * each_s
        phases[kernel.phase] = phases[kernel.phase].with_kernel(kernel, each_s)
        if kernel.work.products:
            products_s += seconds
            alone = OpWork(kernel.work.products)
            large_products_s += kernel.rounds * large_products.compute_s(alone)
        else:
            traffic_s += seconds
    for name, phase in phases.items():
        of_layers = [kernel for kernel in kernels if kernel.phase == name and kernel.in_layer]
        phases[name] = dataclasses.replace(phase, places=tuple(_places(of_layers, assumptions)))
    return KernelTimes(
        products_s=large_products_s,
        small_products_s=products_s - large_products_s,
        traffic_s=traffic_s,
        phases=phases,
        on_shards_s=on_shards_s,
    )


def _places(of_layers: Sequence[KernelWork], assumptions: Assumptions) -> Iterator[Place]:
    """Yields the places of collectives among the kernels of a phase's layers; of those in a loop, if there is one."""
    rounds = max((kernel.rounds for kernel in of_layers), default=1)
    in_loop = [kernel for kernel in of_layers if kernel.rounds == rounds]
    if not any(kernel.starts or kernel.waits for kernel in in_loop):
        return
    total_s = sum(assumptions.compute_s(kernel.work) for kernel in in_loop)
    starts: dict[AwaitedCollective, float] = {}
    before_s = 0.0
    for kernel in in_loop:
        starts |= dict.fromkeys(kernel.starts, before_s / total_s)
        for collective in kernel.waits:
            start = starts.pop(collective, before_s / total_s)
            yield Place(collective.kind, collective.axes, rounds, start, before_s / total_s)
        before_s += assumptions.compute_s(kernel.work)
