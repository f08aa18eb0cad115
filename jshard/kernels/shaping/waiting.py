"""What a step takes if multiprocessors are left to collectives, against waiting for them: the stated model.

For the layers of a unit, forward and backward, C is what their products take on all S multiprocessors, and K what their
collectives take if all of a collective's blocks run. Of the L layers' collectives one has nothing to hide behind: E is
K / L, and for the root all of K. With nothing left to them they begin when a persistent kernel has ended:

    C + K

With r multiprocessors left, of the n that the blocks fill, products and the other collectives run at the same time, and
a collective of fewer blocks moves proportionally less:

    max(C * S / (S - r), (K - E) * n / r) + E * n / r

The best r is the least of the sum over all units. It leaves out that both also share the memory's bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jshard._shard_plan import ShardPlan, UnitPlan
from jshard.cluster.assumptions import Assumptions
from jshard.inspect.communication import traffic_of
from jshard.inspect.tables import joined_name, name_pattern
from jshard.kernels.shaping.products import Product

_BACKWARD = 2.0  # products of backward for one of forward
_FORWARD = "parameters for forward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Equal units of a plan, all of them together, on one device.

    Attributes:
        unit: their name.
        count: how many layers they are.
        gathered_bytes: of the whole arrays, in forward.
        reduced_bytes: of the whole gradients.
        wire_bytes: what a device sends, forward and backward.
        communication_s: of forward and of backward, all blocks of the collectives running; an estimate.
        compute_s: of forward and of backward, on all multiprocessors; an estimate, None where it is not known.
        is_root: its collectives have no other unit to hide behind.
    """

    unit: str
    count: int = 1
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    wire_bytes: float = 0.0
    communication_s: tuple[float, float] = (0.0, 0.0)
    compute_s: tuple[float, float] | None = None
    is_root: bool = False


def unit_times(
    plan: ShardPlan, assumptions: Assumptions | None, products: Sequence[Product] | None
) -> tuple[UnitTimes, ...]:
    """What the units of a plan send, and how long that and their products take; equal ones of a list are added up.

    Args:
        plan: the plan.
        assumptions: of the devices and links; without them times are zero.
        products: those of forward; None where they are not known.
    """
    groups: dict[Any, list[tuple[int | None, UnitTimes]]] = {}
    for unit in plan.units:
        times = times_of_unit(plan, unit, assumptions, products)
        pattern, index = name_pattern(unit.name)
        key = pattern, times.gathered_bytes, times.reduced_bytes
        groups.setdefault(key, []).append((index, times))
    return tuple(
        _added(joined_name(pattern, [index for index, _ in found]), [times for _, times in found])
        for (pattern, *_), found in groups.items()
    )


def step_s(units: Sequence[UnitTimes], *, reserved: int, needed: int, sms: int) -> float:
    """What the units take with so many multiprocessors left to the collectives, by the model above."""
    total = 0.0
    for unit in units:
        for compute_s, communication_s in zip(unit.compute_s or (0.0, 0.0), unit.communication_s, strict=True):
            if not reserved:
                total += compute_s + communication_s
                continue
            slower_s = communication_s * needed / reserved
            alone_s = slower_s if unit.is_root else slower_s / unit.count
            total += max(compute_s * sms / (sms - reserved), slower_s - alone_s) + alone_s
    return total


def best_reserve(units: Sequence[UnitTimes], *, needed: int, sms: int) -> tuple[int, Mapping[int, float]]:
    """The number of multiprocessors to leave with the least time, the fewer of equals; and the time of each number.

    Args:
        units: of the plan.
        needed: what the blocks of a collective fill.
        sms: multiprocessors of the device.
    """
    times = {r: step_s(units, reserved=r, needed=needed, sms=sms) for r in range(needed + 1)}
    return min(times, key=lambda r: (times[r], r)), times


def times_of_unit(
    plan: ShardPlan, unit: UnitPlan, assumptions: Assumptions | None, products: Sequence[Product] | None
) -> UnitTimes:
    """What one unit of a plan sends, and how long that and its products take; arguments as of `unit_times`."""
    leaves = plan.unit_leaves(unit.name)
    layers = max((leaf.placement.layers for leaf in leaves), default=1)
    found = [one for one in traffic_of(dataclasses.replace(plan, leaves=leaves)) if one.group_size > 1]
    spent, compute_s = [0.0, 0.0], None
    if assumptions is not None:
        for one in found:
            each_s = assumptions.transfer_s(one.kind, one.full_bytes / layers, range(one.group_size))
            spent[one.purpose != _FORWARD] += layers * each_s
        if products is not None:
            flops = sum(product.flops for product in products if product.unit == unit.name)
            forward_s = flops / (assumptions.flops_per_s * assumptions.matmul_efficiency)
            compute_s = forward_s, forward_s * (_BACKWARD + (unit.remat == "full"))
    return UnitTimes(
        unit=unit.name,
        count=layers,
        gathered_bytes=sum(one.full_bytes for one in found if one.purpose == _FORWARD),
        reduced_bytes=sum(one.full_bytes for one in found if one.kind == "reduce-scatter"),
        wire_bytes=sum(one.wire_bytes for one in found),
        communication_s=(spent[0], spent[1]),
        compute_s=compute_s,
        is_root=unit.name == plan.units[0].name,
    )


def _added(name: str, units: Sequence[UnitTimes]) -> UnitTimes:
    pairs = [unit.compute_s for unit in units]
    both = lambda found: (sum(first for first, _ in found), sum(second for _, second in found))
    return UnitTimes(
        unit=name,
        count=sum(unit.count for unit in units),
        gathered_bytes=sum(unit.gathered_bytes for unit in units),
        reduced_bytes=sum(unit.reduced_bytes for unit in units),
        wire_bytes=sum(unit.wire_bytes for unit in units),
        communication_s=both([unit.communication_s for unit in units]),
        compute_s=None if None in pairs else both([pair for pair in pairs if pair is not None]),
        is_root=any(unit.is_root for unit in units),
    )
