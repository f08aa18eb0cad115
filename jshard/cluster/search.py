"""Ranks every configuration of a recipe by estimates, before anything is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from jshard.cluster.compile import UnitSettings, Variant
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.layouts import DATA_AND_STAGES, is_power_of_two, layouts, splits_layers_anew
from jshard.errors import FourPartError
from jshard.plans.mesh import CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR, data_shards
from jshard.recipes.overrides import SettingError
from jshard.recipes.recipe import RecipeError

ROOM = 0.92
"""Share of a device's memory that a configuration may use, by the estimate."""

_REMATS = ("none", "dots", "full")
_MOST_SPLITS = 16  # divisors; of more only some are tried
_IN_FLIGHT = (2, 4, 8)  # microbatches on stages, for each stage
_REFINED = 6  # meshes that split the layers, and of which all configurations are estimated
_REASONS = {  # by field of `StepWork`
    "products_s": "computes more",
    "small_products_s": "smaller products",
    "traffic_s": "computes more",
    "bubble_s": "bubble of stages",
    "update_s": "larger update",
    "slowdown_s": "slowed by collectives",
}
_EQUAL = 0.002  # relative difference below which times are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Every configuration considered."""

    default: Cost | None  # the requested one; None if the batch does not divide over its mesh
    ranked: tuple[Cost, ...]  # those that fit by the estimate, fastest first; among equal times the smallest first
    too_large: tuple[Cost, ...]  # those that do not fit, smallest first
    refused: Mapping[str, str]  # meshes that the model cannot run on, with the reason

    @property
    def considered(self) -> tuple[Cost, ...]:
        """Returns all configurations, the requested one first."""
        others = [cost for cost in (*self.ranked, *self.too_large) if cost is not self.default]
        if self.default is None:
            return tuple(others)
        return (self.default, *others)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Returns the costs that some estimates do not model, one line each."""
        lines: dict[str, None] = {}  # a set that keeps the order
        for cost in self.considered:
            for text in cost.left_out:
                lines[f"not in the estimate: {text}"] = None
        return tuple(lines)

    @property
    def counted(self) -> str:
        """Returns the number of configurations, and how many of them fit."""
        return f"{len(self.ranked)} of {len(self.ranked) + len(self.too_large)} configurations fit by the estimate"

    def finalists(self, count: int) -> tuple[Cost, ...]:
        """Returns the first configurations of the ranking with different times."""
        finalists: list[Cost] = []
        for cost in self.ranked:
            if len(finalists) == count:
                break
            if not finalists or not has_equal_time(cost, finalists[-1]):
                finalists.append(cost)
        return tuple(finalists)


def search(costs: Costs, mesh: Mapping[str, int], *, free: Collection[str] = DATA_AND_STAGES) -> Search:
    """Estimates every configuration.

    Of meshes that split the layers over devices there are many. For each of them few configurations are estimated
    first, and all of them for the best meshes only.

    Args:
        costs: estimates for the recipe on a machine.
        mesh: the requested mesh, with degrees of all devices.
        free: the axes whose degrees are chosen; the others stay as requested.
    """
    default = None
    with contextlib.suppress(RecipeError):  # the batch does not divide over it
        default = costs.of(Variant(name="as asked", mesh=mesh))
    candidates = _Candidates(costs, default)
    layers_split = []
    for layout in layouts(costs, mesh, free):
        if splits_layers_anew(layout, mesh):
            layers_split.append(layout)
        else:
            candidates.add(_configurations(costs, layout))
    if not layers_split:
        return candidates.result()

    first = []
    for layout in layers_split:
        cost = _first_of(candidates, costs, layout)
        if cost is not None:
            first.append(cost)
    first.sort(key=_step_s)
    for cost in first[:_REFINED]:
        candidates.add(_configurations(costs, cost.variant.mesh))
    return candidates.result()


def _first_of(candidates: _Candidates, costs: Costs, layout: Mapping[str, int]) -> Cost | None:
    """Estimates few configurations of a mesh; returns the fastest of those that fit, or None.

    What is recomputed holds least. If none of that fits, nothing else is estimated.
    """
    full = candidates.fastest_fitting(_few_configurations(costs, layout, "full"))
    if full is None:
        return None
    none = candidates.fastest_fitting(_few_configurations(costs, layout, "none"))
    if none is None:
        return full
    return min(none, full, key=_step_s)


class _Candidates:
    """The configurations that are estimated in a search."""

    def __init__(self, costs: Costs, default: Cost | None) -> None:
        self._costs = costs
        self._default = default
        self._estimated: dict[Hashable, Cost] = {}
        if default is not None:
            self._estimated[_key(default.variant, costs)] = default
        self._refused: dict[str, str] = {}  # by mesh

    def add(self, variants: Iterable[Variant]) -> None:
        """Estimates configurations."""
        for variant in variants:
            self._cost_of(variant)

    def fastest_fitting(self, variants: Iterable[Variant]) -> Cost | None:
        """Estimates configurations; returns the fastest of those that fit, or None."""
        fitting = []
        for variant in variants:
            cost = self._cost_of(variant)
            if cost is not None and self._fits(cost):
                fitting.append(cost)
        return min(fitting, key=_step_s, default=None)

    def result(self) -> Search:
        """Returns all that were estimated, ranked."""
        fitting = []
        too_large = []
        for cost in self._estimated.values():
            (fitting if self._fits(cost) else too_large).append(cost)
        return Search(
            default=self._default,
            ranked=tuple(_ranked(fitting)),
            too_large=tuple(sorted(too_large, key=_step_bytes)),
            refused=self._refused,
        )

    def _cost_of(self, variant: Variant) -> Cost | None:
        """Returns the estimate of a configuration; None if the model or the recipe refuses it."""
        # What refuses a mesh depends on no other setting: the annotation, or too few microbatches for its stages.
        if variant.mesh_text in self._refused:
            return None
        key = _key(variant, self._costs)
        if key in self._estimated:
            return self._estimated[key]
        try:
            cost = self._costs.of(variant)
        except (SettingError, RecipeError):  # the recipe refuses this number of microbatches
            return None
        except FourPartError as error:
            self._refused[variant.mesh_text] = error.what
            return None
        # The requested one is in the list already, under its own name.
        if self._default is None or not is_same(cost, self._default):
            self._estimated[key] = cost
        return cost

    def _fits(self, cost: Cost) -> bool:
        capacity_bytes = self._costs.machine.capacity_bytes
        return capacity_bytes is None or cost.memory.step_bytes <= ROOM * capacity_bytes


def _key(variant: Variant, costs: Costs) -> Hashable:
    """Returns what identifies a configuration."""
    accumulate = variant.accumulate or costs.recipe.accumulate
    return variant.mesh_text, accumulate, variant.stage_microbatches, tuple(sorted(variant.units.items()))


# ---- the configurations


def _configurations(costs: Costs, mesh: Mapping[str, int]) -> Iterator[Variant]:
    """Yields the configurations of a mesh: what to keep or recompute, and how to divide the batch."""
    if mesh.get(PIPE, 1) > 1:
        # What a stage gathers again for backward, it gathers beside all microbatches of a round.
        reshards: list[bool | int] = [True]
    else:
        near = costs.machine.near // _inner_degree(mesh)
        reshards = _reshards(mesh[FSDP], near)
    microbatches = _microbatches(costs.recipe.batch_size, data_shards(mesh))
    for count, reshard, remat in itertools.product(microbatches, reshards, _REMATS):
        for in_flight in _stage_microbatches(costs, mesh, count):
            yield _variant(costs, mesh, count, reshard, remat, in_flight)


def _few_configurations(costs: Costs, mesh: Mapping[str, int], remat: str) -> Iterator[Variant]:
    """Yields the configurations of a mesh, under a remat policy, that say most of it.

    Fewer microbatches send less, and hold more. So there are the fewest, the most, and some between.
    """
    microbatches = _microbatches(costs.recipe.batch_size, data_shards(mesh))
    some = sorted({*microbatches[:1], *microbatches[-2:], *microbatches[len(microbatches) // 2 :][:1]})
    for count in some:
        in_flight = _stage_microbatches(costs, mesh, count)
        for number in dict.fromkeys((in_flight[0], in_flight[-1])):
            yield _variant(costs, mesh, count, True, remat, number)


def _variant(
    costs: Costs,
    mesh: Mapping[str, int],
    count: int,
    reshard: bool | int,
    remat: str,
    stage_microbatches: int | None,
) -> Variant:
    units = {"reshard_after_forward": reshard, "remat": remat}
    name = _name_of(mesh, units, count)
    if stage_microbatches is not None:
        name += f", {stage_microbatches} in flight"
    return Variant(
        name=name,
        mesh=mesh,
        accumulate=None if count == costs.recipe.accumulate else count,
        units=units,
        stage_microbatches=stage_microbatches,
    )


def _stage_microbatches(costs: Costs, mesh: Mapping[str, int], count: int) -> list[int | None]:
    """Returns how many microbatches may be on the stages of a mesh: as requested, and some multiples of the stages.

    More of them make the bubble smaller, and the products too.

    Args:
        costs: estimates for the recipe.
        mesh: the mesh.
        count: the parts of the batch between which gradients are summed.
    """
    numbers: list[int | None] = [None]
    pipe = mesh.get(PIPE, 1)
    if pipe == 1 or costs.recipe.stages.microbatches is not None:
        return numbers
    # The examples of all places go through each of them.
    examples = costs.recipe.batch_size // count // data_shards(mesh) * pipe
    for factor in _IN_FLIGHT:
        if examples % (factor * pipe) == 0:
            numbers.append(factor * pipe)
    return numbers


def _inner_degree(mesh: Mapping[str, int]) -> int:
    """Returns how many neighbouring devices share the work on an example."""
    return math.prod(mesh.get(axis, 1) for axis in (EXPERT, CONTEXT, TENSOR))


def _reshards(fsdp: int, near: int) -> list[bool | int]:
    """Returns what may be kept from forward to backward: nothing, all, or a piece per neighbour."""
    reshards: list[bool | int] = [True]
    if fsdp > 1:  # else nothing is gathered, and all choices are the same
        reshards.append(False)
    if 1 < near < fsdp and fsdp % near == 0:
        reshards.append(near)
    return reshards


def _microbatches(batch_size: int, shards: int) -> list[int]:
    """Returns numbers of microbatches that divide evenly over the shards.

    Of many, powers of two and one-sequence batches.
    """
    rows = batch_size // shards
    if rows * shards != batch_size:
        return []
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    if len(divisors) > _MOST_SPLITS:
        divisors = [n for n in divisors if n == rows or is_power_of_two(n)]
    return divisors


def _name_of(mesh: Mapping[str, int], units: UnitSettings, microbatches: int) -> str:
    """Returns a short description of a configuration."""
    reshard = units["reshard_after_forward"]
    if reshard is True:
        strategy = "zero3"
    elif reshard is False:
        strategy = "zero2"
    else:
        strategy = "hpz"
    if mesh[FSDP] == 1:
        strategy = "replicate"
    elif mesh[REPLICA] > 1:
        strategy = f"hsdp {strategy}"
    if mesh.get(PIPE, 1) > 1:
        strategy = f"{mesh[PIPE]} stages, {strategy}"
    for axis in (TENSOR, CONTEXT, EXPERT):
        if mesh.get(axis, 1) > 1:
            strategy = f"{axis} {mesh[axis]}, {strategy}"
    name = f"{strategy}, {units['remat']}"
    if microbatches > 1:
        name += f", {microbatches} parts"
    return name


# ---- the ranking


def _ranked(costs: Sequence[Cost]) -> Iterator[Cost]:
    """Yields the fastest first; configurations of equal time are sorted by memory."""
    rest = sorted(costs, key=_step_s)
    while rest:
        # Equal to the fastest that is left, not to one another: else a long row of small steps would all be equal.
        limit_s = (1 + _EQUAL) * rest[0].step_s
        equal = [cost for cost in rest if cost.step_s <= limit_s]
        yield from sorted(equal, key=_step_bytes)
        rest = rest[len(equal) :]


def _step_s(cost: Cost) -> float:
    return cost.step_s


def _step_bytes(cost: Cost) -> int:
    return cost.memory.step_bytes


def is_same(cost: Cost, other: Cost) -> bool:
    """Returns whether two configurations are the same, however their settings are written."""
    if cost.variant.mesh != other.variant.mesh:
        return False
    return cost.memory == other.memory and cost.step_s == other.step_s


def has_equal_time(cost: Cost, other: Cost) -> bool:
    """Returns whether the times of two configurations differ too little to prefer one."""
    return abs(cost.step_s / other.step_s - 1) <= _EQUAL


def why_lost(cost: Cost, best: Cost) -> str:
    """Returns why a configuration that fits was not chosen, as text; "" for the chosen one."""
    if has_equal_time(cost, best):
        return "holds more" if cost.memory.step_bytes > best.memory.step_bytes else ""
    # By how many seconds each of its parts is longer.
    longer_s = {"waits more": cost.exposed_s - best.exposed_s}
    for name, reason in _REASONS.items():
        more_s = getattr(cost.work, name) - getattr(best.work, name)
        longer_s[reason] = longer_s.get(reason, 0.0) + more_s
    slower = cost.step_s / best.step_s - 1
    return f"+{slower:.1%}: {max(longer_s, key=lambda reason: longer_s[reason])}"
