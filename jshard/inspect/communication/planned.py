"""The collectives of one forward and backward pass, as they follow from a plan."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

from jshard.inspect.communication.of_parameter import (
    Traffic,
    gathers,
    reductions_to_shard,
    sum_over_replicas,
)
from jshard.inspect.communication.staged import (
    paths_gathered_on_stages,
    paths_reduced_on_stages,
    traffic_of_activations,
    traffic_of_parameters_on_stages,
)
from jshard.inspect.hlo import Window
from jshard.inspect.hlo.collectives import KINDS
from jshard.plans.placement import Placement
from jshard.plans.plan import ShardPlan


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveKind:
    """A kind of collective over some axes of the mesh."""

    kind: str
    axes: tuple[str, ...]
    group_size: int

    @classmethod
    def of(cls, window: Window) -> "CollectiveKind":
        """Returns the kind of a collective of a program."""
        return cls(window.kind, window.axes or (), len(window.group))

    @classmethod
    def planned(cls, traffic: Traffic) -> "CollectiveKind":
        """Returns the kind of a planned collective."""
        return cls(traffic.kind, traffic.axes, traffic.group_size)

    def has_groups_of(self, other: "CollectiveKind") -> bool:
        """Returns whether two kinds run over the same groups of devices."""
        return (self.axes, self.group_size) == (other.axes, other.group_size)


def traffic_of(plan: ShardPlan) -> tuple[Traffic, ...]:
    """Returns the collectives of one forward and backward pass according to the plan.

    A compiler omits the second gather of a parameter that backward does not need, such as most biases. Units that are
    never gathered have no collectives here.
    """
    return _summed([*_traffic_of_parameters(plan), *traffic_of_activations(plan)], dict(plan.mesh))


def unit_traffic(plan: ShardPlan, name: str) -> tuple[Traffic, ...]:
    """Returns the part of the collectives that is of the parameters of one unit."""
    plan_of_unit = dataclasses.replace(plan, leaves=plan.unit_leaves(name))
    return _summed(_traffic_of_parameters(plan_of_unit), dict(plan.mesh))


def _summed(collectives: Iterable[Traffic], degrees: Mapping[str, int]) -> tuple[Traffic, ...]:
    """Returns collectives with those that are alike added up, in the order of reports."""
    sizes: dict[Traffic, int] = collections.defaultdict(int)  # the keys have no size
    for traffic in collectives:
        alike = dataclasses.replace(traffic, axes=in_mesh_order(traffic.axes, degrees), full_bytes=0)
        sizes[alike] += traffic.full_bytes
    totals = [dataclasses.replace(traffic, full_bytes=size) for traffic, size in sizes.items()]
    return tuple(sorted(totals, key=_order_in_reports))


def in_mesh_order(axes: Collection[str], degrees: Mapping[str, int]) -> tuple[str, ...]:
    """Returns axes in the order that they have in a mesh: programs are compared by it."""
    return tuple(axis for axis in degrees if axis in axes)


def _order_in_reports(traffic: Traffic) -> tuple[int, int]:
    return KINDS.index(traffic.kind), len(traffic.axes)


def _traffic_of_parameters(plan: ShardPlan) -> Iterator[Traffic]:
    """Yields the collectives of parameters and their gradients: on the data axes, then on stages."""
    degrees = dict(plan.mesh)
    reshard_of_unit = {unit.name: unit.reshard_after_forward for unit in plan.units}
    gathered_on_stages = paths_gathered_on_stages(plan)
    reduced_on_stages = paths_reduced_on_stages(plan)
    for leaf in plan.leaves:
        if not leaf.placement.gathered:
            continue  # its communication is the model's own
        if leaf.placement.dim is not None and leaf.path not in gathered_on_stages:
            # A loop of the root keeps no layer: each is gathered again, whatever the root's own setting is.
            reshard = leaf.by_layer or reshard_of_unit[leaf.unit]
            yield from gathers(leaf.placement, reshard, degrees)
        if leaf.trained and leaf.path not in reduced_on_stages:
            yield from _reductions(leaf.placement, degrees)
    yield from traffic_of_parameters_on_stages(plan)


def _reductions(placement: Placement, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Yields the collectives of the gradient of one parameter."""
    if placement.dim is None:
        yield from sum_over_replicas(placement, degrees, "gradients of the replicated")
        return
    yield from reductions_to_shard(placement, degrees)
    yield from sum_over_replicas(placement, degrees, "gradients, over replicas")
