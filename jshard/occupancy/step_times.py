"""Estimated times of a step's products and collectives: is it quicker to leave room to collectives, or to wait?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard.cluster.assumptions import Assumptions
from jshard.inspect.communication import FORWARD, Traffic, unit_traffic
from jshard.occupancy.products import MatrixProduct
from jshard.plans.plan import ShardPlan, UnitPlan

_BACKWARD = 2.0  # products of backward per product of forward


@dataclasses.dataclass(frozen=True)
class PhaseTimes:
    """Seconds of forward, or of backward, in one step on a device."""

    compute_s: float  # of products, on all multiprocessors
    hidden_s: float  # of collectives that another unit's products may hide, with all their blocks running
    exposed_s: float  # of the root's collectives, which no other unit can hide

    def total_s(self, reserved: int, *, needed: int, sms: int) -> float:
        """Returns the time if so many of `sms` multiprocessors are left to collectives that fill `needed`."""
        if reserved == 0:  # collectives wait for products, and these for them
            return self.compute_s + self.hidden_s + self.exposed_s
        slower = needed / reserved
        beside_s = max(self.compute_s * sms / (sms - reserved), self.hidden_s * slower)
        return beside_s + self.exposed_s * slower


StepTimes = tuple[PhaseTimes, PhaseTimes]
"""Forward and backward."""


def traffic_of_unit(plan: ShardPlan, unit: UnitPlan) -> list[Traffic]:
    """Returns the collectives of one unit of a plan, in one step."""
    return [traffic for traffic in unit_traffic(plan, unit.name) if traffic.group_size > 1]


def transfers(plan: ShardPlan, unit: UnitPlan, assumptions: Assumptions) -> list[tuple[Traffic, float]]:
    """Returns the collectives of a unit, each with its seconds per step."""
    layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
    timed = []
    for traffic in traffic_of_unit(plan, unit):
        # A stack of layers is sent layer by layer: each has the latency of a collective.
        layer_bytes = traffic.full_bytes / layers
        layer_s = assumptions.transfer_s(traffic.kind, layer_bytes, range(traffic.group_size))
        timed.append((traffic, layers * layer_s))
    return timed


def step_times(plan: ShardPlan, assumptions: Assumptions, products: Sequence[MatrixProduct]) -> StepTimes:
    """Returns the times of a model's products and of its plan's collectives."""
    return (
        _phase_times(plan, assumptions, products, is_forward=True),
        _phase_times(plan, assumptions, products, is_forward=False),
    )


def _phase_times(
    plan: ShardPlan, assumptions: Assumptions, products: Sequence[MatrixProduct], *, is_forward: bool
) -> PhaseTimes:
    root = plan.units[0]
    compute_s = 0.0
    hidden_s = 0.0
    exposed_s = 0.0
    for unit in plan.units:
        for traffic, seconds in transfers(plan, unit, assumptions):
            if traffic.purpose.startswith(FORWARD) != is_forward:
                continue
            if unit.name == root.name:
                exposed_s += seconds
            else:
                hidden_s += seconds
        flops = sum(product.flops for product in products if product.unit == unit.name)
        forward_s = flops / (assumptions.flops_per_s * assumptions.matmul_efficiency)
        if is_forward:
            compute_s += forward_s
        else:
            forwards_again = 1 if unit.remat == "full" else 0
            compute_s += forward_s * (_BACKWARD + forwards_again)
    return PhaseTimes(compute_s, hidden_s, exposed_s)


def best_reserve(times: StepTimes, *, needed: int, sms: int) -> tuple[int, Mapping[int, float]]:
    """Chooses how many multiprocessors to leave to collectives.

    Args:
        times: of a step.
        needed: how many multiprocessors the collectives fill, the most that are worth leaving.
        sms: how many there are.

    Returns:
        The number with the least time, the smallest in a tie; and the time for each number.
    """
    seconds = {}
    for reserved in range(needed + 1):
        seconds[reserved] = sum(phase.total_s(reserved, needed=needed, sms=sms) for phase in times)
    best = min(seconds, key=lambda reserved: (seconds[reserved], reserved))
    return best, seconds
