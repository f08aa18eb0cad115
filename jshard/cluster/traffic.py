"""What the collectives of a step take, those of a model's own axes, and what crosses the link to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from jshard.cluster.replay import Assumptions
from jshard.engine.context import shapes_only, without_update
from jshard.inspect.communication import Amounts, Sent, partitioned_collectives, traffic_of
from jshard.inspect.explain import folded_units
from jshard.inspect.hlo.collectives import group_along
from jshard.inspect.hlo.module import ProgramError
from jshard.inspect.memory import Memory
from jshard.plans.mesh import EXPERT, TENSOR
from jshard.plans.plan import ShardPlan, UnitPlan, root_forgotten
from jshard.plans.units import unit_of


def own_traffic(model: nnx.Module, loss: Callable[..., Any], batch: Any, *, wrt: Any = nnx.Param) -> Amounts | None:
    """The collectives of forward and backward over `tensor` and `expert`; None where they cannot be known.

    Those over the data axes alone are a plan's. So are sums over `expert`: of gradients of what all experts share.
    """
    root = unit_of(model)
    if root is None:
        raise root_forgotten(model)
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def backward(params: Any, rest: Any, batch: Any) -> Any:
        # Copied: what the model changes as it runs, as dropout's counts, belongs to the inner trace.
        run = lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), batch)
        return jax.value_and_grad(run)(params)

    try:
        with shapes_only(), without_update():
            lowered = jax.jit(backward).trace(params, rest, batch).lower(lowering_platforms=("cuda",))
        found = partitioned_collectives(lowered, root.mesh)
    except (NotImplementedError, ProgramError):  # an operation or a collective that is known to the compiler alone
        return None
    return None if found is None else {one: amount for one, amount in found.items() if _is_own(one)}


def _is_own(one: Sent) -> bool:
    return TENSOR in one.axes or (EXPERT in one.axes and one.kind != "all-reduce")


def at_rows(few: Amounts, more: Amounts, rows: tuple[int, int, int]) -> Amounts:
    """What so many sequences send: a straight line through two numbers of them."""
    low, high, asked = rows
    found = {}
    for one, (count, size) in few.items():
        growth = (more.get(one, (count, size))[1] - size) / (high - low)
        found[one] = count, max(0.0, size + (asked - low) * growth)
    return found


# What crosses the link between a device and its host in a step, where `offload` keeps something there.


@dataclasses.dataclass(frozen=True)
class HostCopies:
    """Bytes that one device copies in a part of a step. Both ways go at once.

    Args:
        to_device: from the host.
        to_host: back.
    """

    to_device: int = 0
    to_host: int = 0

    def time_s(self, host_bytes_per_s: float) -> float:
        """How long the copies take alone on the link."""
        return max(self.to_device, self.to_host) / host_bytes_per_s


def host_copies(plan: ShardPlan, memory: Memory) -> Mapping[str, HostCopies]:
    """The copies of `forward` and of `backward`, which each microbatch makes, and those of the `update`.

    Parameters come to be gathered, again for backward if they were let go. What autodiff saves goes there in forward
    and comes back in backward. Once in a step gradients go there, and the update brings what it needs and takes back
    what it changed: parameters and optimizer state. Only of parameters in host memory are gradients there, of each as
    many bytes.
    """
    again = {unit.name for unit in plan.units if unit.reshard_after_forward is True}
    away = [leaf for leaf in plan.leaves if leaf.placement.on_host]
    forward = sum(leaf.placement.bytes_per_device for leaf in away)
    backward = sum(leaf.placement.bytes_per_device for leaf in away if leaf.by_layer or leaf.unit in again)
    saved, updated = memory.host_activations_bytes, memory.host_optimizer_bytes + 2 * memory.host_gradients_bytes
    return {
        "forward": HostCopies(forward, saved),
        "backward": HostCopies(backward + saved, 0),
        "update": HostCopies(updated, updated),
    }


# What the collectives of a step take, one by one: those of a plan, and those of a model's own axes.


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
    """What the collectives over a model's own axes take, one after another."""
    total = 0.0
    for one, (count, full_bytes) in amounts.items():
        group = group_along(mesh, one.axes)
        total += count * assumptions.transfer_s(one.kind, full_bytes / count, group)
    return total


def exposed_s(found: Collection[Collectives], there_s: Mapping[str, float]) -> tuple[float, float]:
    """All of some collectives, and what of them is exposed."""
    total, exposed, left_s = 0.0, 0.0, dict(there_s)
    for one in found:
        total += one.count * one.each_s
        # The first gather and the last reduction of a row of layers find nothing beside them.
        exposed += one.each_s * (one.count if one.is_alone else 1)
        left_s[one.phase] -= 0.0 if one.is_alone else (one.count - 1) * one.each_s
    exposed += sum(max(0.0, -one) for one in left_s.values())
    return total, min(exposed, total)
