"""Chooses among ways to train a recipe: by estimates, and what is left by compiling or by measuring.

The ways differ in how the devices are split into replicas and shards, in what is kept from forward to backward, in
what backward computes again, in microbatches, and in the batch where that is left free.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jshard._errors import AnnotationError
from jshard._mesh import FSDP, REPLICA, data_shards
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.variants import Variant
from jshard.train.settings.overrides import SettingError

ROOM = 0.92
"""Part of a device's memory that a way may take, by the estimate."""

_REMATS = "none", "dots", "full"
_MOST_SPLITS = 16
_HAIR = 0.002  # times that differ by less are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Every way that was looked at.

    Attributes:
        default: the way that was asked for; one of the others, if its batch may be chosen.
        ranked: the ways that fit by the estimate, the quickest first; of equal times the one that holds least.
        too_large: those that do not, the smallest first.
        refused: ways that cannot be annotated, with the reason.
    """

    default: Cost
    ranked: tuple[Cost, ...]
    too_large: tuple[Cost, ...]
    refused: Mapping[str, str]

    @property
    def left_out(self) -> tuple[str, ...]:
        """What some estimates have no price for, a line for each thing."""
        found = (self.default, *self.ranked, *self.too_large)
        return tuple(dict.fromkeys(f"not in the estimate: {one}" for cost in found for one in cost.left_out))

    @property
    def counted(self) -> str:
        """How many ways there are, and how many of them fit."""
        return f"{len(self.ranked)} of {len(self.ranked) + len(self.too_large)} ways fit by the estimate"

    def finalists(self, count: int) -> tuple[Cost, ...]:
        """The first of the ranking whose times differ."""
        found: list[Cost] = []
        for cost in self.ranked:
            if not found or not _is_equal(cost, found[-1]):
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
    default = costs.of(Variant(name="as asked", mesh=mesh))
    sizes = batch_sizes or (default.batch_size,)
    found, refused = [default] if default.batch_size in sizes else [], {}
    for variant in _ways(costs, mesh, sizes):
        if variant.mesh_text in refused:
            continue
        try:
            cost = costs.of(variant)
        except SettingError:  # a recipe that refuses so many microbatches
            continue
        except AnnotationError as error:
            refused[variant.mesh_text] = error.what
        else:
            found += [] if is_same(cost, default) else [cost]
    capacity = costs.machine.capacity_bytes
    fits = lambda cost: capacity is None or cost.memory.step_bytes <= ROOM * capacity
    return Search(
        default=default,
        ranked=tuple(_ranked(filter(fits, found))),
        too_large=tuple(sorted((c for c in found if not fits(c)), key=lambda c: c.memory.step_bytes)),
        refused=refused,
    )


def _ranked(found: Iterable[Cost]) -> Iterator[Cost]:
    """The quickest first; those that take as long as the first of them are sorted by what they hold."""
    rest = collections.deque(sorted(found, key=lambda cost: cost.sequence_s))
    while rest:
        equal = [rest.popleft()]
        while rest and rest[0].sequence_s <= (1 + _HAIR) * equal[0].sequence_s:
            equal.append(rest.popleft())
        yield from sorted(equal, key=lambda cost: cost.memory.step_bytes)


def is_same(cost: Cost, other: Cost) -> bool:
    """Whether two ways are one, however their settings are written."""
    what = lambda c: (c.variant.mesh, c.batch_size, c.memory, c.step_s)
    return what(cost) == what(other)


def _is_equal(cost: Cost, other: Cost) -> bool:
    return abs(cost.sequence_s / other.sequence_s - 1) <= _HAIR


def _ways(costs: Costs, mesh: Mapping[str, int], batch_sizes: Sequence[int]) -> Iterator[Variant]:
    devices = mesh[REPLICA] * mesh[FSDP]
    for fsdp, batch_size in itertools.product(_splits(devices), batch_sizes):
        split = dict(mesh) | {REPLICA: devices // fsdp, FSDP: fsdp}
        keep: list[Any] = [True, False] if fsdp > 1 else [True]
        keep += [costs.machine.near] if 1 < costs.machine.near < fsdp and fsdp % costs.machine.near == 0 else []
        for n, reshard, remat in itertools.product(_microbatches(batch_size, data_shards(mesh)), keep, _REMATS):
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


def _microbatches(batch_size: int, shards: int) -> list[int]:
    """Numbers of microbatches that divide evenly over the shards; of many powers of two and what leaves a sequence."""
    rows = batch_size // shards
    if rows * shards != batch_size:
        return []
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return divisors if len(divisors) <= _MOST_SPLITS else [n for n in divisors if n & (n - 1) == 0 or n == rows]


def why_lost(cost: Cost, best: Cost) -> str:
    """Why a way that fits was not chosen, in words; "" for one that is no other."""
    slower = cost.sequence_s / best.sequence_s - 1
    computes = cost.compute_s / cost.batch_size - best.compute_s / best.batch_size
    waits = cost.exposed_s / cost.batch_size - best.exposed_s / best.batch_size
    if _is_equal(cost, best):
        return "holds more" if cost.memory.step_bytes > best.memory.step_bytes else ""
    return f"+{slower:.1%}: {'computes' if computes > waits else 'waits'} more"
