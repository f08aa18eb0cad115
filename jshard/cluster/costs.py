"""Estimated memory and time of a recipe's configurations before compiling: a filter, not a measurement.

Memory is that of `jshard.inspect.memory`. Time is that of matrix products, of traffic to the device's memory, and of
the plan's exposed collectives, if as much as possible is hidden behind computation. Costs common to all configurations
are left out: a model's communication over its own axes, and copies between device and host.

A search considers many configurations, so little is traced for each. What a model saves for backward grows linearly
with the batch, and does not depend on the number of data shards. So it is traced for two small batches on two devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from flax import nnx

import jshard as js
from jshard.api.revise import has_inner_units, repeated_layers, revise_layers
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.compile import UnitSettings, Variant
from jshard.cluster.machine import Machine
from jshard.cluster.predicted_stages import (
    check_divides,
    compute_factor,
    sums_bytes,
    with_carries,
    with_predicted_stages,
)
from jshard.inspect.activations import Activations, Saved, saved_arrays, summed
from jshard.inspect.communication import FORWARD, unit_traffic
from jshard.inspect.hlo.collectives import group_along
from jshard.inspect.memory import Memory, kept_bytes, memory_of
from jshard.inspect.plan_tables import folded_units
from jshard.inspect.staged_memory import stages_memory
from jshard.plans.mesh import CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR, data_shards
from jshard.plans.plan import ShardPlan, UnitPlan
from jshard.plans.stages import Stages
from jshard.plans.units import modules
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.ema import with_averages
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe

_RECOMPUTED = {"full": 4 / 3, "dots": 1.0, "none": 1.0}  # arithmetic relative to that of forward and backward
# Shares of forward in the computation of a microbatch: backward has two products for each, and a third one if it
# computes forward again.
_FORWARD_SHARE = 1 / 3
_FORWARD_SHARE_RECOMPUTED = 0.25
# Passes over the device's memory per byte that is saved, and per byte that would be saved without remat, which is read
# and written in any case. As in programs that XLA compiled for GPUs.
_SAVED_PASSES = 3.0
_COMPUTED_PASSES = 3.4
_RECOMPUTED_PASSES = 1.7  # more of the latter if it is computed again
_UPDATE_PASSES = 7.0  # over the parameter shard: AdamW reads four arrays and writes three

# Settings as tuples, so that they are keys of a cache.
_Degrees = tuple[tuple[str, int], ...]
_Settings = tuple[tuple[str, bool | int | str | None], ...]

_TRACED_MESH: _Degrees = ((REPLICA, 1), (FSDP, 2))  # the smallest mesh with sharded parameters


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
        """Returns the seconds of a step: it computes, and waits for collectives."""
        return self.compute_s + self.exposed_s


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Equal collectives of a microbatch."""

    phase: str  # `forward` or `backward`
    count: int
    each_s: float
    is_alone: bool  # no computation overlaps with them


@dataclasses.dataclass(frozen=True)
class _PlannedModel:
    """The facts about an annotated model that do not depend on the batch."""

    plan: ShardPlan
    memory: Memory  # without activations
    kept_bytes: int  # gathered parameters of the layers that are kept for backward
    collectives: tuple[Collectives, ...]


class Costs:
    """Estimates for configurations of one recipe on one machine; their common parts are traced once."""

    def __init__(self, model_file: ModelFile, recipe: Recipe, machine: Machine) -> None:
        self.model_file = model_file
        self.recipe = recipe
        self.machine = machine

    def of(self, variant: Variant) -> Cost:
        """Returns the estimate for one configuration, whose batch divides over its mesh.

        Raises:
            SettingError: the recipe cannot have its settings.
            AnnotationError: the model cannot be annotated on its mesh.
            CallError: the recipe has too few microbatches for the stages of its mesh.
        """
        recipe = override(self.recipe, variant.settings)
        planned = self._planned(tuple(variant.mesh.items()), tuple(variant.units.items()))
        rows = recipe.batch_size // recipe.accumulate // data_shards(variant.mesh)
        check_divides(planned.plan, rows)
        plan = with_carries(planned.plan, self._layer_input_bytes(rows, variant))
        saved = self._saved(rows, _remat_setting(variant), _sequence_axes(variant))
        saved = dataclasses.replace(saved, saved_bytes=saved.saved_bytes + planned.kept_bytes)
        memory = dataclasses.replace(planned.memory.with_activations(saved), stages=stages_memory(plan))
        between_places = _between_places(plan, recipe.stages, self.machine.assumptions)
        collectives = [*planned.collectives, *between_places]
        compute_s = self._compute_s(planned.plan, recipe, rows, variant)
        phases_s = self._phases_s(planned.plan, compute_s / recipe.accumulate)
        communication_s, exposed_s = _exposed_s(collectives, phases_s)
        return Cost(
            variant=variant,
            memory=memory,
            compute_s=compute_s + self._update_s(planned.plan),
            communication_s=communication_s * recipe.accumulate,
            exposed_s=exposed_s * recipe.accumulate,
            left_out=tuple(_left_out(planned.plan, memory)),
        )

    @functools.cached_property
    def remat(self) -> str:
        """Returns the remat policy of the layers, as annotated."""
        return _remat_of(self._planned(_TRACED_MESH, ()).plan, self._layer_names)

    def held_bytes(self, mesh: Mapping[str, int]) -> int:
        """Returns the minimum memory per device on a mesh: the state between steps, and the gradients."""
        memory = self._planned(tuple(mesh.items()), ()).memory
        return memory.held_bytes + memory.gradients_bytes

    def unit_bytes(self, mesh: Mapping[str, int]) -> int:
        """Returns the gathered bytes of the largest unit."""
        return self._planned(tuple(mesh.items()), ()).memory.largest_unit_bytes

    # ---- what is planned

    @functools.cached_property
    def _layer_names(self) -> frozenset[str]:
        """Returns the paths of the layers that the model has many of."""
        model = self._model(_TRACED_MESH)
        layer_ids = {id(layer) for layer in repeated_layers(model)}
        return frozenset("/".join(map(str, path)) for path, module in modules(model) if id(module) in layer_ids)

    def _is_layer(self, unit: UnitPlan) -> bool:
        return any(path in self._layer_names for path in unit.name.split("+"))

    @functools.cache  # noqa: B019  (a command makes one `Costs`)
    def _model(self, mesh: _Degrees) -> nnx.Module:
        degrees = dict(mesh)
        abstract_mesh = js.mesh(**degrees, devices=math.prod(degrees.values()))
        return abstract_model(self.model_file, self.recipe, abstract_mesh)

    @functools.cache  # noqa: B019
    def _planned(self, mesh: _Degrees, units: _Settings) -> _PlannedModel:
        plan = js.plan(self._revised(mesh, dict(units)), wrt=self.model_file.wrt)
        plan = with_predicted_stages(plan, self._layer_names, self.recipe.stages)
        memory = with_averages(memory_of(plan, optimizer=self.recipe.optimizer()), plan, self.recipe)
        # Of the layers only; the traced step contains the other units' copies, but none of the layers.
        layers_kept_bytes = sum(kept_bytes(plan, unit) for unit in plan.units if self._is_layer(unit))
        return _PlannedModel(plan, memory, layers_kept_bytes, tuple(_collectives(plan, self.machine.assumptions)))

    def _revised(self, mesh: _Degrees, units: UnitSettings) -> nnx.Module:
        """Returns the model with other settings of its units."""
        model = nnx.merge(
            *nnx.split(self._model(mesh))
        )  # a copy: `revise_layers` changes it, and the model is in the cache
        if has_inner_units(model):  # else only the mesh can vary
            revise_layers(model, units)
        return model

    # ---- what is traced

    def _saved(self, rows: int, remat: str, axes: _Degrees) -> Activations:
        """Returns the bytes that a device saves for backward: linear, from two traced batch sizes.

        Args:
            rows: sequences per device.
            remat: the policy of the layers; empty as annotated.
            axes: degrees that split each sequence, or the layers.
        """
        low, high = self._traced_rows
        at_low = self._traced(low, remat, axes)
        at_high = self._traced(high, remat, axes)
        values = {}
        for field in dataclasses.fields(Activations):
            value = getattr(at_low, field.name)
            growth = (getattr(at_high, field.name) - value) // (high - low)
            values[field.name] = max(0, value + (rows - low) * growth)
        return Activations(**values)

    @functools.cache  # noqa: B019
    def _traced(self, rows: int, remat: str, axes: _Degrees) -> Activations:
        """Returns the bytes that a device saves for a batch that is traced."""
        saved = self._arrays(rows, self._unless_annotated(remat), axes)
        without_remat = self._arrays(rows, self._unless_annotated("none"), axes)
        return summed(saved, without_remat, self._depths)

    def _unless_annotated(self, remat: str) -> str:
        """Returns a policy; empty if the layers have it anyway, so that one trace serves both."""
        return "" if remat == self.remat else remat

    @functools.cached_property
    def _depths(self) -> Collection[int]:
        """Returns the numbers of layers that the model has of one kind."""
        return repeated_layers(self._model(_TRACED_MESH)).values()

    @functools.cached_property
    def _traced_rows(self) -> tuple[int, int]:
        """Returns the traced numbers of sequences per device, with which no array looks like a stack of layers."""
        taken = set()
        for depth in self._depths:
            if depth > 1:
                taken |= {depth, depth - 1}
        low = 1
        # Twice as many: the batch has the rows of both devices of the mesh.
        while not taken.isdisjoint({low, low + 1, 2 * low, 2 * (low + 1)}):
            low += 1
        return low, low + 1

    @functools.cache  # noqa: B019
    def _arrays(self, rows: int, remat: str, axes: _Degrees) -> Saved:
        units: dict[str, bool | str] = {"reshard_after_forward": True}
        if remat:
            units["remat"] = remat
        model = self._revised((*_TRACED_MESH, *axes), units)
        batch = batch_of(self.model_file, self.recipe, 2 * rows)
        return saved_arrays(model, self.model_file.loss, batch, wrt=self.model_file.wrt)

    # ---- times

    def _compute_s(self, plan: ShardPlan, recipe: Recipe, rows: int, variant: Variant) -> float:
        """Returns the time of forward and backward of all microbatches on one device."""
        assumptions = self.machine.assumptions
        step_flops, _ = self.model_file.step_flops(recipe, plan)
        flops = step_flops / self.machine.num_devices
        remat = _remat_of(plan, self._layer_names)
        reached_flops_per_s = assumptions.flops_per_s * assumptions.matmul_efficiency
        products_s = flops * _RECOMPUTED.get(remat, 1.0) / reached_flops_per_s

        axes = _sequence_axes(variant)
        saved_bytes = self._saved(rows, _remat_setting(variant), axes).saved_bytes
        computed_bytes = self._saved(rows, "none", axes).saved_bytes
        passes = _COMPUTED_PASSES
        if remat == "full":
            passes += _RECOMPUTED_PASSES
        traffic_bytes = _SAVED_PASSES * saved_bytes + passes * computed_bytes + sums_bytes(plan)
        computed_s = products_s + recipe.accumulate * traffic_bytes / self._reached_bytes_per_s
        return computed_s * compute_factor(plan)

    def _layer_input_bytes(self, rows: int, variant: Variant) -> float:
        """Returns the bytes of a layer's input for the examples of a device: what full remat saves of each layer."""
        if variant.mesh.get(PIPE, 1) == 1:
            return 0.0  # it is sent nowhere, and would be one more trace
        saved = self._saved(rows, "full", _sequence_axes(variant))
        return max(saved.saved_bytes - saved.outside_bytes, 0) / max(sum(self._depths), 1)

    @functools.cached_property
    def num_layers(self) -> int:
        """Returns how many layers the largest group of equal ones has."""
        return max(sum(self._depths), 1)

    def _update_s(self, plan: ShardPlan) -> float:
        """Returns the time of the optimizer's update."""
        return _UPDATE_PASSES * plan.bytes_per_device / self._reached_bytes_per_s

    @property
    def _reached_bytes_per_s(self) -> float:
        assumptions = self.machine.assumptions
        return assumptions.memory_bytes_per_s * assumptions.memory_efficiency

    def _phases_s(self, plan: ShardPlan, compute_s: float) -> dict[str, float]:
        """Returns the forward and the backward part of a microbatch's computation."""
        share = _FORWARD_SHARE
        if _remat_of(plan, self._layer_names) == "full":
            share = _FORWARD_SHARE_RECOMPUTED
        forward_s = compute_s * share
        return {"forward": forward_s, "backward": compute_s - forward_s}


# ---- configurations


def _remat_setting(variant: Variant) -> str:
    """Returns the remat policy that a configuration requests; empty if it has the annotated one."""
    return str(variant.units.get("remat", ""))


def _sequence_axes(variant: Variant) -> _Degrees:
    """Returns the axes that split each sequence, or the layers, over devices."""
    return tuple((axis, variant.mesh.get(axis, 1)) for axis in (CONTEXT, TENSOR))


def _left_out(plan: ShardPlan, memory: Memory) -> Iterator[str]:
    """Yields the costs of a configuration that an estimate does not model."""
    degrees = dict(plan.mesh)
    if any(degrees.get(axis, 1) > 1 for axis in (EXPERT, CONTEXT, TENSOR)):
        yield "collectives over expert, context and tensor"
    if not all(unit.gathered for unit in plan.units):
        yield "the communication of units that are never gathered"
    if memory.host_bytes:
        yield "copies to and from the host"


def _remat_of(plan: ShardPlan, layers: frozenset[str]) -> str:
    """Returns the remat policy of the layers, which is the same for all."""
    for unit in plan.units:
        if unit.name in layers:
            return unit.remat
    return "none"


# ---- collectives


def _collectives(plan: ShardPlan, assumptions: Assumptions) -> Iterator[Collectives]:
    """Yields the collectives of forward and backward in a plan, by kind of unit."""
    root = plan.units[0]
    for folded in folded_units(plan):
        unit = folded.first
        layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
        for transfer in _layer_transfers(plan, unit, layers, assumptions):
            # The root is gathered first and reduced last; without prefetch a unit waits for its own gather.
            waits_for_gather = unit.prefetch == "0" and transfer.kind == "all-gather"
            # What goes to its stage, or comes from there, does so before the loop or after it.
            is_exchange = transfer.kind == "all-to-all" and bool(plan.stages)
            is_alone = unit.name == root.name or waits_for_gather or is_exchange
            yield Collectives(transfer.phase, folded.count * layers, transfer.seconds, is_alone)


@dataclasses.dataclass(frozen=True)
class _LayerTransfer:
    """A collective of one layer."""

    phase: str  # `forward` or `backward`
    kind: str
    seconds: float


def _layer_transfers(
    plan: ShardPlan, unit: UnitPlan, layers: int, assumptions: Assumptions
) -> Iterator[_LayerTransfer]:
    """Yields the collectives of one layer of a unit."""
    degrees = dict(plan.mesh)
    for traffic in unit_traffic(plan, unit.name):
        if traffic.group_size == 1:  # nothing is sent
            continue
        phase = "forward" if traffic.purpose.startswith(FORWARD) else "backward"
        group = group_along(degrees, traffic.axes)[:: traffic.apart][: traffic.group_size]
        seconds = assumptions.transfer_s(traffic.kind, traffic.full_bytes / layers, group)
        yield _LayerTransfer(phase, traffic.kind, seconds)


def _between_places(plan: ShardPlan, stages: Stages, assumptions: Assumptions) -> Iterator[Collectives]:
    """Yields what the places of loops on stages send each other of activations."""
    degrees = dict(plan.mesh)
    group = group_along(degrees, (PIPE,))
    for loop in plan.stages.loops:
        each_s = assumptions.transfer_s("collective-permute", loop.carry_bytes, group)
        # Sent late, it is under way while the next microbatch computes.
        yield Collectives(loop.phase, loop.schedule.num_sends, each_s, is_alone=not stages.late)
        enter_s = assumptions.transfer_s("all-gather", loop.entering_bytes, group)
        leave_s = assumptions.transfer_s("all-to-all", loop.entering_bytes, group)
        yield Collectives(loop.phase, 1, enter_s + leave_s, is_alone=True)


def _exposed_s(collectives: Sequence[Collectives], phases_s: Mapping[str, float]) -> tuple[float, float]:
    """Returns the total and the exposed time of collectives.

    Args:
        collectives: of a microbatch.
        phases_s: the computation of its phases, behind which they may be hidden.
    """
    total_s = 0.0
    exposed_s = 0.0
    left_s = dict(phases_s)  # computation that hides nothing yet; negative if there is more to hide
    for equal in collectives:
        total_s += equal.count * equal.each_s
        if equal.is_alone:
            exposed_s += equal.each_s * equal.count
        else:
            # The first gather and the last reduction of a row of layers have nothing to overlap with.
            exposed_s += equal.each_s
            left_s[equal.phase] -= (equal.count - 1) * equal.each_s
    exposed_s += sum(-seconds for seconds in left_s.values() if seconds < 0)
    return total_s, min(exposed_s, total_s)
