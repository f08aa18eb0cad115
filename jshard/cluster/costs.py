"""Estimated memory and time of a recipe's configurations before compiling: a filter, not a measurement.

Memory is that of `jshard.inspect.memory`. Time is that of matrix products, of traffic to the device's memory, and of
the plan's exposed collectives, if as much as possible is hidden behind computation. Costs common to all configurations
are left out: a model's communication over its own axes, and copies between device and host.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from flax import nnx

import jshard as js
from jshard.api.revise import has_inner_units, repeated_layers, revise
from jshard.cluster.compile import Variant
from jshard.cluster.estimate import Machine
from jshard.cluster.replay import Assumptions
from jshard.inspect.activations import Activations, Saved, saved_arrays, summed
from jshard.inspect.communication import FORWARD, traffic_of
from jshard.inspect.hlo.collectives import group_along
from jshard.inspect.memory import Memory, kept_bytes, memory_of
from jshard.inspect.plan_tables import folded_units
from jshard.plans.mesh import CONTEXT, EXPERT, FSDP, REPLICA, TENSOR, data_shards
from jshard.plans.plan import ShardPlan, UnitPlan
from jshard.plans.units import modules
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe

_RECOMPUTED = {"full": 4 / 3, "dots": 1.0, "none": 1.0}  # arithmetic relative to that of forward and backward
# Passes over the device's memory per byte that is saved, and per byte that would be saved without remat, which is read
# and written in any case. As in programs that XLA compiled for GPUs.
_SAVED_PASSES, _COMPUTED_PASSES, _AGAIN_PASSES = 3.0, 3.4, 1.7
_UPDATE_PASSES = 7.0  # over the parameter shard: AdamW reads four arrays and writes three

_Axes = tuple[tuple[str, int], ...]
_TRACED: _Axes = (REPLICA, 1), (FSDP, 2)  # the smallest mesh with sharded parameters


@dataclasses.dataclass(frozen=True)
class Cost:
    """The estimated step of a configuration."""

    variant: Variant
    memory: Memory  # of one device
    compute_s: float
    communication_s: float  # the collectives, run one after another
    exposed_s: float  # the part that the computation waits for
    left_out: tuple[str, ...] = ()  # the costs that are not modelled, as text

    @property
    def step_s(self) -> float:
        """The step."""
        return self.compute_s + self.exposed_s


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Equal ones."""

    phase: str  # `forward` or `backward`
    count: int
    each_s: float
    is_alone: bool  # no computation overlaps with them


@dataclasses.dataclass(frozen=True)
class _Way:
    """The facts that do not depend on the batch."""

    plan: ShardPlan
    held: Memory
    kept_bytes: int
    collectives: tuple[Collectives, ...]


class Costs:
    """Estimates for configurations of one recipe on one machine; their common parts are traced once."""

    def __init__(self, model_file: ModelFile, recipe: Recipe, machine: Machine) -> None:
        self.model_file, self.recipe, self.machine = model_file, recipe, machine

    def of(self, variant: Variant) -> Cost:
        """The estimate for one configuration, whose batch divides over its mesh."""
        recipe = override(self.recipe, variant.settings)
        way = self._way(tuple(variant.mesh.items()), tuple(variant.units.items()))
        plan, parts = way.plan, recipe.accumulate
        rows = recipe.batch_size // parts // data_shards(variant.mesh)
        saved = self._saved(rows, str(variant.units.get("remat", "")), _beside(variant))
        compute_s = self._compute_s(plan, recipe, rows, variant)
        saved = dataclasses.replace(saved, saved_bytes=saved.saved_bytes + way.kept_bytes)
        memory = way.held.with_activations(saved)
        planned_s, waits_s = _exposed_s(way.collectives, self._there_s(plan, compute_s / parts))
        return Cost(
            variant=variant,
            memory=memory,
            compute_s=compute_s + self._update_s(plan),
            communication_s=planned_s * parts,
            exposed_s=waits_s * parts,
            left_out=tuple(_left_out(plan, memory)),
        )

    @functools.cached_property
    def remat(self) -> str:
        """The remat policy of the layers, as annotated."""
        return _remat_of(self._way(_TRACED, ()).plan, self._layer_names)

    def held_bytes(self, mesh: Mapping[str, int]) -> int:
        """The minimum memory per device on a mesh of these degrees: the state between steps, and the gradients."""
        held = self._way(tuple(mesh.items()), ()).held
        return held.held_bytes + held.gradients_bytes

    def unit_bytes(self, mesh: Mapping[str, int]) -> int:
        """Gathered bytes of the largest unit."""
        return self._way(tuple(mesh.items()), ()).held.largest_unit_bytes

    # ---- what is traced ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _layer_names(self) -> frozenset[str]:
        model = self._model(_TRACED)
        layers = set(map(id, repeated_layers(model)))
        return frozenset("/".join(map(str, p)) for p, m in modules(model) if id(m) in layers)

    def _is_layer(self, name: str) -> bool:
        return any(part in self._layer_names for part in name.split("+"))

    @functools.cache  # noqa: B019  (one is made by a command)
    def _model(self, mesh: tuple[tuple[str, int], ...]) -> nnx.Module:
        degrees = dict(mesh)
        abstract = js.mesh(**degrees, devices=math.prod(degrees.values()))
        return abstract_model(self.model_file, self.recipe, abstract)

    @functools.cache  # noqa: B019
    def _way(self, mesh: tuple[tuple[str, int], ...], units: tuple[tuple[str, Any], ...]) -> _Way:
        plan = js.plan(self._revised(mesh, dict(units)), wrt=self.model_file.wrt)
        held = memory_of(plan, optimizer=self.recipe.optimizer())
        # Of the layers only; the traced step contains the other units' copies, but none of the layers.
        kept = sum(kept_bytes(plan, unit) for unit in plan.units if self._is_layer(unit.name))
        return _Way(plan, held, kept, tuple(_planned(plan, self.machine.assumptions)))

    def _revised(self, mesh: tuple[tuple[str, int], ...], units: Mapping[str, Any]) -> nnx.Module:
        model = nnx.merge(*nnx.split(self._model(mesh)))
        if has_inner_units(model):  # else only the mesh can vary
            revise(model, units)
        return model

    def _saved(self, rows: int, remat: str, beside: _Axes) -> Activations:
        """The bytes a device saves for this many sequences: linear, from two traced batch sizes."""
        low, high = self._numbers
        few, more = (self._traced(n, remat, beside) for n in (low, high))
        growth = lambda name: (getattr(more, name) - getattr(few, name)) // (high - low)
        at = lambda name: max(0, getattr(few, name) + (rows - low) * growth(name))
        return Activations(**{field.name: at(field.name) for field in dataclasses.fields(Activations)})

    @functools.cache  # noqa: B019
    def _traced(self, rows: int, remat: str, beside: _Axes) -> Activations:
        saved, whole = (
            self._arrays(rows, "" if policy == self.remat else policy, beside)
            for policy in (remat or self.remat, "none")
        )
        return summed(saved, whole, self._depths)

    @functools.cached_property
    def _depths(self) -> Collection[int]:
        return repeated_layers(self._model(_TRACED)).values()

    @functools.cached_property
    def _numbers(self) -> tuple[int, int]:
        """The traced number of sequences per device, chosen so that no array looks like a stack of layers."""
        taken = {n for depth in self._depths if depth > 1 for n in (depth, depth - 1)}
        low = next(n for n in itertools.count(1) if not taken & {n, n + 1, 2 * n, 2 * n + 2})
        return low, low + 1

    @functools.cache  # noqa: B019
    def _arrays(self, rows: int, remat: str, beside: _Axes) -> Saved:
        units = {"reshard_after_forward": True} | ({"remat": remat} if remat else {})
        model = self._revised((*_TRACED, *beside), units)
        batch = batch_of(self.model_file, self.recipe, 2 * rows)
        return saved_arrays(model, self.model_file.loss, batch, wrt=self.model_file.wrt)

    # ---- times ---------------------------------------------------------------------------------------------------

    def _compute_s(self, plan: ShardPlan, recipe: Recipe, rows: int, variant: Variant) -> float:
        """Forward and backward of all microbatches on one device."""
        a = self.machine.assumptions
        flops = self.model_file.step_flops(recipe, plan)[0] / self.machine.num_devices
        remat = _remat_of(plan, self._layer_names)
        products_s = flops * _RECOMPUTED.get(remat, 1.0) / (a.flops_per_s * a.matmul_efficiency)
        beside = _beside(variant)
        saved = self._saved(rows, str(variant.units.get("remat", "")), beside).saved_bytes
        passes = _COMPUTED_PASSES + (_AGAIN_PASSES if remat == "full" else 0.0)
        traffic = _SAVED_PASSES * saved + passes * self._saved(rows, "none", beside).saved_bytes
        return products_s + recipe.accumulate * traffic / (a.memory_bytes_per_s * a.memory_efficiency)

    def _update_s(self, plan: ShardPlan) -> float:
        a = self.machine.assumptions
        return _UPDATE_PASSES * plan.bytes_per_device / (a.memory_bytes_per_s * a.memory_efficiency)

    def _there_s(self, plan: ShardPlan, compute_s: float) -> dict[str, float]:
        """The forward and the backward part of a microbatch's computation."""
        forward_s = compute_s * (0.25 if _remat_of(plan, self._layer_names) == "full" else 1 / 3)
        return {"forward": forward_s, "backward": compute_s - forward_s}


def _beside(variant: Variant) -> _Axes:
    """The axes that split each sequence, or the layers, over devices."""
    return tuple((axis, variant.mesh.get(axis, 1)) for axis in (CONTEXT, TENSOR))


def _left_out(plan: ShardPlan, memory: Memory) -> Iterator[str]:
    """The costs of a configuration that an estimate does not model."""
    degrees = dict(plan.mesh)
    if max(degrees.get(axis, 1) for axis in (EXPERT, CONTEXT, TENSOR)) > 1:
        yield "collectives over expert, context and tensor"
    if not all(unit.gathered for unit in plan.units):
        yield "the communication of units that are never gathered"
    if memory.host_bytes:
        yield "copies to and from the host"


def _remat_of(plan: ShardPlan, layers: frozenset[str]) -> str:
    """The remat policy of the layers."""
    found = [unit.remat for unit in plan.units if unit.name in layers]
    return found[0] if found else "none"


def _planned(plan: ShardPlan, assumptions: Assumptions) -> Iterator[Collectives]:
    """The collectives of forward and backward in a plan, by kind of unit."""
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
        phase = "forward" if one.purpose.startswith(FORWARD) else "backward"
        group = group_along(dict(plan.mesh), one.axes)[:: one.apart][: one.group_size]
        yield phase, one.kind, assumptions.transfer_s(one.kind, one.full_bytes / layers, group)


def _exposed_s(found: Collection[Collectives], there_s: Mapping[str, float]) -> tuple[float, float]:
    """The total and the exposed time of some collectives."""
    total, exposed, left_s = 0.0, 0.0, dict(there_s)
    for one in found:
        total += one.count * one.each_s
        # The first gather and the last reduction of a row of layers have nothing to overlap with.
        exposed += one.each_s * (one.count if one.is_alone else 1)
        left_s[one.phase] -= 0.0 if one.is_alone else (one.count - 1) * one.each_s
    exposed += sum(max(0.0, -one) for one in left_s.values())
    return total, min(exposed, total)
