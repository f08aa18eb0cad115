"""Ranks every configuration of a recipe by estimates, before anything is compiled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jshard.cluster.compile import UnitSettings, Variant
from jshard.cluster.costs import Cost, Costs
from jshard.errors import AnnotationError, CallError
from jshard.plans.mesh import FSDP, PIPE, REPLICA, data_shards
from jshard.recipes.overrides import SettingError

ROOM = 0.92
"""Share of a device's memory that a configuration may use, by the estimate."""

_REMATS = ("none", "dots", "full")
_MOST_SPLITS = 16  # divisors; of more only some are tried
_EQUAL = 0.002  # relative difference below which times are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Every configuration considered."""

    default: Cost  # the requested one
    ranked: tuple[Cost, ...]  # those that fit by the estimate, fastest first; among equal times the smallest first
    too_large: tuple[Cost, ...]  # those that do not fit, smallest first
    refused: Mapping[str, str]  # meshes that the model cannot run on, with the reason

    @property
    def left_out(self) -> tuple[str, ...]:
        """Returns the costs that some estimates do not model, one line each."""
        lines: dict[str, None] = {}  # a set that keeps the order
        for cost in (self.default, *self.ranked, *self.too_large):
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


def search(costs: Costs, mesh: Mapping[str, int]) -> Search:
    """Estimates every configuration.

    Args:
        costs: estimates for the recipe on a machine.
        mesh: the requested mesh, with degrees of all devices.
    """
    default = costs.of(Variant(name="as asked", mesh=mesh))
    estimated = [default]
    refused: dict[str, str] = {}
    for variant in _configurations(costs, mesh):
        # What refuses a mesh depends on no other setting: the annotation, or too few microbatches for its stages.
        if variant.mesh_text in refused:
            continue
        try:
            cost = costs.of(variant)
        except SettingError:  # the recipe refuses this number of microbatches
            continue
        except (AnnotationError, CallError) as error:
            refused[variant.mesh_text] = error.what
            continue
        # The requested one is in the list already, under its own name.
        if not is_same(cost, default):
            estimated.append(cost)

    capacity_bytes = costs.machine.capacity_bytes
    fitting = []
    too_large = []
    for cost in estimated:
        if capacity_bytes is None or cost.memory.step_bytes <= ROOM * capacity_bytes:
            fitting.append(cost)
        else:
            too_large.append(cost)
    return Search(
        default=default,
        ranked=tuple(_ranked(fitting)),
        too_large=tuple(sorted(too_large, key=_step_bytes)),
        refused=refused,
    )


# ---- the configurations


def _configurations(costs: Costs, mesh: Mapping[str, int]) -> Iterator[Variant]:
    """Yields the ways to split the devices, to keep or recompute, and to divide the batch.

    The other axes of the mesh stay as requested.
    """
    for split in _splits_in_replicas(mesh):
        yield from _variants(costs, split, _reshards(split[FSDP], costs.machine.near))
    for split in _splits_in_stages(costs, mesh):
        # What a stage gathers again for backward, it gathers beside all microbatches of a round.
        yield from _variants(costs, split, [True])


def _variants(costs: Costs, mesh: Mapping[str, int], reshards: Sequence[bool | int]) -> Iterator[Variant]:
    """Yields the configurations of a mesh, for each of some values of `reshard_after_forward`."""
    recipe = costs.recipe
    microbatches = _microbatches(recipe.batch_size, data_shards(mesh))
    for count, reshard, remat in itertools.product(microbatches, reshards, _REMATS):
        units = {"reshard_after_forward": reshard, "remat": remat}
        yield Variant(
            name=_name_of(mesh, units, count),
            mesh=mesh,
            accumulate=None if count == recipe.accumulate else count,
            units=units,
        )


def _splits_in_replicas(mesh: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields the meshes with other degrees of sharding, the largest first."""
    num_devices = mesh[REPLICA] * mesh[FSDP]
    for fsdp in _splits(num_devices):
        yield dict(mesh) | {REPLICA: num_devices // fsdp, FSDP: fsdp}


def _splits_in_stages(costs: Costs, mesh: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields the meshes with pipeline stages, each sharded over the rest of the devices.

    Within one host the links are fast, and stages would only add their bubble. So there are as many as divide the
    hosts, in powers of two, with a layer for each.
    """
    if mesh.get(PIPE, 1) > 1:  # as requested
        return
    num_devices = mesh[REPLICA] * mesh[FSDP]
    num_hosts = num_devices // costs.machine.near
    pipe = 2
    while pipe <= min(num_hosts, costs.num_layers):
        if num_hosts % pipe == 0:
            yield dict(mesh) | {PIPE: pipe, REPLICA: 1, FSDP: num_devices // pipe}
        pipe *= 2


def _splits(num_devices: int) -> list[int]:
    """Returns the degrees of sharding, the largest first."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    if len(divisors) > _MOST_SPLITS:  # only repeated halves of the devices, and 1
        divisors = [n for n in divisors if n == 1 or _is_power_of_two(num_devices // n)]
    divisors.reverse()
    return divisors


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
        divisors = [n for n in divisors if n == rows or _is_power_of_two(n)]
    return divisors


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


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
    name = f"{strategy}, {units['remat']}"
    if microbatches > 1:
        name += f", {microbatches} parts"
    return name


# ---- the ranking


def _ranked(costs: Sequence[Cost]) -> Iterator[Cost]:
    """Yields the fastest first; configurations of equal time are sorted by memory."""
    rest = sorted(costs, key=lambda cost: cost.step_s)
    while rest:
        # Equal to the fastest that is left, not to one another: else a long row of small steps would all be equal.
        limit_s = (1 + _EQUAL) * rest[0].step_s
        equal = [cost for cost in rest if cost.step_s <= limit_s]
        yield from sorted(equal, key=_step_bytes)
        rest = rest[len(equal) :]


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
    more_compute_s = cost.compute_s - best.compute_s
    more_waiting_s = cost.exposed_s - best.exposed_s
    reason = "computes" if more_compute_s > more_waiting_s else "waits"
    slower = cost.step_s / best.step_s - 1
    return f"+{slower:.1%}: {reason} more"
