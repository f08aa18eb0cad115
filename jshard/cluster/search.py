"""Chooses among ways to train a recipe: by estimates, and what is left by compiling or by measuring.

The ways differ in how the devices are split into replicas and shards, in what is kept from forward to backward, in
what backward computes again, in microbatches, and in the batch where that is left free.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jshard._errors import AnnotationError
from jshard._mesh import FSDP, REPLICA
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.variants import Variant

ROOM = 0.92
"""Part of a device's memory that a way may take, by the estimate."""

_REMATS = "none", "dots", "full"
_MOST_SPLITS = 16
_HAIR = 0.002  # times that differ by less are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Every way that was looked at.

    Attributes:
        default: the way that was asked for.
        ranked: the ways that fit by the estimate, the quickest first.
        too_large: those that do not, the smallest first.
        refused: ways that cannot be annotated, with the reason.
    """

    default: Cost
    ranked: tuple[Cost, ...]
    too_large: tuple[Cost, ...]
    refused: Mapping[str, str]

    def finalists(self, count: int) -> tuple[Cost, ...]:
        """The first of the ranking that differ in more than a hair: of equal times the one that holds least."""
        found: list[Cost] = []
        for cost in self.ranked:
            if all(abs(cost.sequence_s / other.sequence_s - 1) > _HAIR for other in found):
                found.append(cost)
            if len(found) == count:
                break
        return tuple(found)


def search(costs: Costs, mesh: Mapping[str, int], *, batch_sizes: Sequence[int] = ()) -> Search:
    """Estimates every way.

    Args:
        costs: estimates for the recipe on its machine.
        mesh: the mesh asked for; degrees beside `replica` and `fsdp` stay.
        batch_sizes: batches to choose among; by default the recipe's alone.
    """
    default = costs.of(Variant(name="default", mesh=mesh))
    found, refused = [], {}
    for variant in _ways(costs, mesh, batch_sizes or (costs.recipe.batch_size,)):
        if variant.mesh_text in refused:
            continue
        try:
            found.append(costs.of(variant))
        except AnnotationError as error:
            refused[variant.mesh_text] = error.what
    capacity = costs.machine.capacity_bytes
    fits = lambda cost: capacity is None or cost.memory.step_bytes <= ROOM * capacity
    return Search(
        default=default,
        ranked=tuple(sorted(filter(fits, found), key=lambda c: (round(c.sequence_s, 12), c.memory.step_bytes))),
        too_large=tuple(sorted((c for c in found if not fits(c)), key=lambda c: c.memory.step_bytes)),
        refused=refused,
    )


def _ways(costs: Costs, mesh: Mapping[str, int], batch_sizes: Sequence[int]) -> Iterator[Variant]:
    devices = mesh[REPLICA] * mesh[FSDP]
    for fsdp, batch_size in itertools.product(_splits(devices), batch_sizes):
        split = dict(mesh) | {REPLICA: devices // fsdp, FSDP: fsdp}
        keep: list[Any] = [True, False] if fsdp > 1 else [True]
        keep += [costs.machine.near] if 1 < costs.machine.near < fsdp and fsdp % costs.machine.near == 0 else []
        for n, reshard, remat in itertools.product(_microbatches(batch_size, devices), keep, _REMATS):
            units = {"reshard_after_forward": reshard, "remat": remat}
            yield Variant(
                name=name_of(split, units, n),
                mesh=split,
                batch_size=None if batch_size == costs.recipe.batch_size else batch_size,
                accumulate=None if n == costs.recipe.accumulate else n,
                units=units,
            )


def name_of(mesh: Mapping[str, int], units: Mapping[str, Any], accumulate: int) -> str:
    """A way in a few words."""
    kept = {True: "zero3", False: "zero2"}.get(units["reshard_after_forward"], "hpz")
    kept = "replicate" if mesh[FSDP] == 1 else f"hsdp {kept}" if mesh[REPLICA] > 1 else kept
    return f"{kept}, {units['remat']}" + (f", {accumulate} parts" if accumulate > 1 else "")


def _splits(devices: int) -> list[int]:
    """Degrees of sharding, the largest first."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    if len(divisors) > _MOST_SPLITS:  # halves of halves
        divisors = [n for n in divisors if n == 1 or (devices // n) & (devices // n - 1) == 0]
    return divisors[::-1]


def _microbatches(batch_size: int, devices: int) -> list[int]:
    """Numbers of microbatches that divide evenly over the devices: powers of two and what leaves one sequence."""
    rows = batch_size // devices
    if rows * devices != batch_size:
        return []
    return [n for n in range(1, rows + 1) if rows % n == 0 and (n & (n - 1) == 0 or n == rows)]


def why_lost(cost: Cost, best: Cost) -> str:
    """Why a way that fits was not chosen, in words."""
    slower = cost.sequence_s / best.sequence_s - 1
    computes = cost.compute_s / cost.batch_size - best.compute_s / best.batch_size
    waits = cost.exposed_s / cost.batch_size - best.exposed_s / best.batch_size
    if slower <= _HAIR:
        return "holds more"
    return f"+{slower:.1%}: {'computes' if computes > waits else 'waits'} more"
