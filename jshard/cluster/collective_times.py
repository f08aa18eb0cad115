"""What the collectives of a step take, one by one: those of a plan, and those of a model's own axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from jshard._shard_plan import ShardPlan, UnitPlan
from jshard.cluster.assumptions import Assumptions
from jshard.inspect.communication import traffic_of
from jshard.inspect.explain import folded_units
from jshard.inspect.hlo import group_along
from jshard.inspect.partitioned import Amounts


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Equal ones.

    Args:
        phase: `forward` or `backward`.
        count: how many.
        each_s: how long each takes.
        is_alone: nothing is computed beside them.
    """

    phase: str
    count: int
    each_s: float
    is_alone: bool


def planned(plan: ShardPlan, assumptions: Assumptions) -> Iterator[Collectives]:
    """Those of forward and backward that a plan asks for, of each kind of unit."""
    root = plan.units[0].name
    for _, units, unit in folded_units(plan):
        layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
        for phase, kind, each_s in _of_unit(plan, unit, layers, assumptions):
            alone = unit.name == root or (unit.prefetch == "0" and kind == "all-gather")
            yield Collectives(phase, units * layers, each_s, alone)


def _of_unit(
    plan: ShardPlan, unit: UnitPlan, layers: int, assumptions: Assumptions
) -> Iterator[tuple[str, str, float]]:
    """The collectives of one layer of a unit: (forward or backward, kind, seconds)."""
    of_unit = dataclasses.replace(plan, leaves=plan.unit_leaves(unit.name))
    for one in (t for t in traffic_of(of_unit) if t.group_size > 1):
        phase = "forward" if one.purpose == "parameters for forward" else "backward"
        group = group_along(dict(plan.mesh), one.axes)[: one.group_size]
        yield phase, one.kind, assumptions.transfer_s(one.kind, one.full_bytes / layers, group)


def own_s(amounts: Amounts, mesh: Mapping[str, int], assumptions: Assumptions) -> float:
    """What the collectives over a model's own axes take, one after another.

    Args:
        amounts: how many, and how much.
        mesh: degrees of the mesh axes.
        assumptions: the machine.
    """
    total = 0.0
    for one, (count, full_bytes) in amounts.items():
        group = group_along(mesh, one.axes)
        total += count * assumptions.transfer_s(one.kind, full_bytes / count, group)
    return total


def exposed_s(found: Collection[Collectives], there_s: Mapping[str, float]) -> tuple[float, float]:
    """All of some collectives, and what of them is exposed.

    Args:
        found: the collectives.
        there_s: how long forward and backward compute.
    """
    total, exposed, left_s = 0.0, 0.0, dict(there_s)
    for one in found:
        total += one.count * one.each_s
        # The first gather and the last reduction of a row of layers find nothing beside them.
        exposed += one.each_s * (one.count if one.is_alone else 1)
        left_s[one.phase] -= 0.0 if one.is_alone else (one.count - 1) * one.each_s
    exposed += sum(max(0.0, -one) for one in left_s.values())
    return total, min(exposed, total)
