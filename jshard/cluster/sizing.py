"""The best configurations by the estimates on clusters of growing size, and the smallest that reaches a target.

Nothing is compiled. A search takes up to minutes, so a cluster is not searched if its state or its matrix products
alone show that it cannot be the one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from jshard.cluster.costs import Cost, Costs
from jshard.cluster.goals import Pace, Target
from jshard.cluster.layouts import free_axes
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.search import ROOM, search
from jshard.cluster.topology import Topology
from jshard.errors import FourPartError
from jshard.plans.make_mesh import mesh as make_mesh
from jshard.plans.mesh import CONTEXT, TENSOR, data_shards

# ---- clusters of growing size


def growing(topology: Topology) -> tuple[Topology, ...]:
    """Returns clusters of the same device, each about twice as large as the one before; the last one is the given one.

    GPUs have one host, two, four and so on, of the same size. The slice of a TPU is halved along its longest extent.

    Examples:
        >>> from jshard.cluster.topology import parse_topology
        >>> [smaller.text for smaller in growing(parse_topology("h100:6x8"))]
        ['h100:1x8', 'h100:2x8', 'h100:4x8', 'h100:6x8']
    """
    halved = _halved_slice if topology.device.platform == "tpu" else _halved_hosts
    topologies = [topology]
    extents = halved(topology.extents)
    while extents is not None:
        topologies.insert(0, topology.with_extents(extents))
        extents = halved(extents)
    return tuple(topologies)


def _halved_hosts(extents: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the next smaller power of two of slices, or of hosts in the only one; None below one host."""
    slices, hosts, gpus = extents
    if slices > 1:
        return _next_power_below(slices), hosts, gpus
    if hosts > 1:
        return 1, _next_power_below(hosts), gpus
    return None


def _next_power_below(count: int) -> int:
    return 2 ** (math.ceil(math.log2(count)) - 1)


def _halved_slice(extents: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns half of the slices, or half of the longest extent of the only one; None below two chips along it."""
    slices, *chips = extents
    if slices > 1:
        return _next_power_below(slices), *chips
    longest = max(chips)
    if longest % 2 or longest <= 2:
        return None
    chips[chips.index(longest)] = longest // 2
    return 1, *chips


# ---- the best on one cluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be trained.

    Attributes:
        costs: estimates for the recipe on any machine of the kind.
        sizes: the requested degrees of the mesh axes; the others are chosen.
        num_steps: of the whole run.
    """

    costs: Costs
    sizes: Mapping[str, int]
    num_steps: int

    @property
    def tokens_per_step(self) -> int:
        """Returns the tokens that a step trains on."""
        recipe = self.costs.recipe
        return recipe.batch_size * recipe.sequence_length

    def pace(self, step_s: float, num_devices: int, *, ettr: float = 1.0) -> Pace:
        """Returns how fast the run is with a time of a step."""
        return Pace(
            step_s=step_s,
            num_devices=num_devices,
            tokens_per_step=self.tokens_per_step,
            num_steps=self.num_steps,
            ettr=ettr,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A cluster that was considered.

    Attributes:
        cluster: the devices.
        costs: estimates there; None if the batch cannot be split over them.
        mesh: with which a search begins.
        best: the fastest configuration; None if there was no search, or nothing fits.
        why_not: why there is none.
    """

    cluster: PlannedCluster
    costs: Costs | None = None
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    best: Cost | None = None
    why_not: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Returns the tokens per second of the fastest configuration."""
        assert self.best is not None and self.costs is not None
        recipe = self.costs.recipe
        return recipe.batch_size * recipe.sequence_length / self.best.step_s

    def searched(self, sizes: Mapping[str, int]) -> Size:
        """Returns the cluster with its fastest configuration."""
        assert self.costs is not None
        try:
            result = search(self.costs, self.mesh, free=free_axes(sizes))
        except FourPartError as error:
            return dataclasses.replace(self, why_not=error.what)
        if not result.ranked:
            return dataclasses.replace(self, why_not="no configuration fits by the estimate")
        best = result.ranked[0]
        if best is result.default:  # named as the requested one, which it is on one of the clusters at most
            name = f"as annotated, {self.costs.remat_of(best.variant)}"
            best = dataclasses.replace(best, variant=dataclasses.replace(best.variant, name=name))
        return dataclasses.replace(self, best=best, why_not="")


def prepared(workload: Workload, cluster: PlannedCluster) -> Size:
    """Returns a cluster with the mesh that a search begins with; without it if the batch or the state rules it out."""
    mesh = None
    for sizes in _starts(workload, cluster):
        mesh = _mesh_of(sizes, cluster.topology.num_devices)
        if mesh is not None and _divides(workload, mesh):
            break
    if mesh is None:
        return Size(cluster=cluster, why_not="the degrees of --mesh do not divide the devices")
    if not _divides(workload, mesh):
        batch_size = workload.costs.recipe.batch_size
        return Size(cluster=cluster, why_not=f"a batch of {batch_size} does not divide over {data_shards(mesh)} shards")
    costs = workload.costs.on(cluster.machine, settings=_batch_settings(workload, mesh))
    try:
        held_bytes = costs.held_bytes(mesh)
    except FourPartError as error:
        return Size(cluster=cluster, why_not=error.what)
    capacity_bytes = cluster.topology.device.hbm_bytes
    if held_bytes > ROOM * capacity_bytes:
        held = f"{held_bytes / 2**30:.0f} GiB of {capacity_bytes / 2**30:.0f}"
        return Size(cluster=cluster, why_not=f"state and gradients alone take {held}")
    return Size(cluster=cluster, costs=costs, mesh=mesh)


def _starts(workload: Workload, cluster: PlannedCluster) -> Iterator[dict[str, int]]:
    """Yields degrees to begin with: as requested, then those with which fewer sequences than devices are enough."""
    sizes = dict(workload.sizes)
    yield sizes
    free = free_axes(sizes)
    axes = []
    if TENSOR in free and workload.costs.traces.largest_degree(TENSOR) > 1:
        axes.append(TENSOR)
    if CONTEXT in free and workload.costs.traces.has_sequences:
        axes.append(CONTEXT)
    for axis in axes:
        degree = 2
        while degree <= cluster.machine.near:
            yield sizes | {axis: degree}
            degree *= 2


def _mesh_of(sizes: Mapping[str, int], num_devices: int) -> dict[str, int] | None:
    """Returns the degrees of all axes; None if those that are named do not divide the devices."""
    try:
        return dict(make_mesh(**sizes, devices=num_devices).shape)
    except FourPartError:
        return None


def _divides(workload: Workload, mesh: Mapping[str, int]) -> bool:
    return workload.costs.recipe.batch_size % data_shards(mesh) == 0


def _batch_settings(workload: Workload, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the most of the recipe's microbatches that divide over a mesh. A search tries other numbers."""
    recipe = workload.costs.recipe
    rows = recipe.batch_size // data_shards(mesh)
    return (f"accumulate={math.gcd(recipe.accumulate, rows)}",)


# ---- the smallest that reaches a target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizing:
    """The clusters that were considered for a target.

    Attributes:
        considered: the smallest first.
        nearest: the first that reaches it, or else the one that is nearest to it; None if nothing fits anywhere.
        is_reached: whether it does.
    """

    considered: tuple[Size, ...]
    nearest: Size | None
    is_reached: bool


def smallest_reaching(
    workload: Workload,
    clusters: Sequence[PlannedCluster],
    target: Target,
    *,
    pace_of: Callable[[Size], Pace],
    searched: Callable[[Size], Size],
) -> Sizing:
    """Searches clusters, the smallest first, until one reaches a target.

    Args:
        workload: what is to be trained.
        clusters: the smallest first.
        target: the figure to reach.
        pace_of: the pace of a cluster with a configuration.
        searched: searches a cluster.
    """
    considered: list[Size] = []
    too_slow: dict[int, Pace] = {}  # a bound of the pace, by place in `considered`
    for cluster in clusters:
        size = prepared(workload, cluster)
        bound = _bound_of_pace(workload, size)
        if bound is not None and target.is_reached(bound):
            size = searched(size)
        elif bound is not None:
            too_slow[len(considered)] = bound
            why = f"its products alone make {target.figure.name} {target.written(bound)}"
            size = dataclasses.replace(size, why_not=why)
        considered.append(size)
        if size.best is not None and target.is_reached(pace_of(size)):
            return Sizing(considered=tuple(considered), nearest=size, is_reached=True)

    if all(size.best is None for size in considered):
        _search_nearest(considered, target.by_nearness(too_slow), searched)
    nearest = _nearest(considered, target, pace_of)
    return Sizing(considered=tuple(considered), nearest=nearest, is_reached=False)


def _bound_of_pace(workload: Workload, size: Size) -> Pace | None:
    """Returns a pace that a cluster cannot exceed; None if it was ruled out before."""
    if size.costs is None:
        return None
    least_s = size.costs.least_step_s(size.mesh)
    return workload.pace(least_s, size.cluster.topology.num_devices)


def _search_nearest(considered: list[Size], places: Sequence[int], searched: Callable[[Size], Size]) -> None:
    """Searches the clusters at some places in turn, until one has a configuration: it says how far the target is."""
    for place in places:
        considered[place] = searched(considered[place])
        if considered[place].best is not None:
            return


def _nearest(considered: Sequence[Size], target: Target, pace_of: Callable[[Size], Pace]) -> Size | None:
    """Returns the cluster that is nearest to a target; None if nothing fits on any of them."""
    nearest = None
    for size in considered:
        if size.best is None:
            continue
        if nearest is None or target.is_nearer(pace_of(size), pace_of(nearest)):
            nearest = size
    return nearest
