"""Loops on pipeline stages before anything is traced: which layers they will have, and what they cost.

A trace of a model says which loops it has. A search has no time for one on every mesh, and takes the layers that a
model has many of for one loop each: the same that `js.scan_layers` would run on stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator

import jax.numpy as jnp

from jshard.plans.mesh import PIPE
from jshard.plans.plan import ShardPlan, UnitPlan
from jshard.plans.staged_loops import (
    BACKWARD,
    BY_ROUND,
    FORWARD,
    LoopOnStages,
    StagedGradient,
    StagedParameter,
    TracedStages,
)
from jshard.plans.stages import Stages, StageSchedule


def with_predicted_stages(plan: ShardPlan, layers: Collection[str], settings: Stages) -> ShardPlan:
    """Returns a plan with the loops that its layers will form on the stages of its mesh.

    Args:
        plan: a plan that no trace has added to.
        layers: names of the units that the model has many of.
        settings: how loops run on stages.
    """
    num_places = dict(plan.mesh).get(PIPE, 1)
    if num_places == 1:
        return plan
    loops = []
    for units in _equal_layers(plan, layers):
        num_layers = _num_layers(plan, units)
        if num_layers >= num_places:  # a loop of fewer runs on the data axes
            schedule = StageSchedule.of(num_layers, num_places, settings)
            loops += _loops_of(plan, units, schedule, settings)
    return dataclasses.replace(plan, stages=TracedStages(tuple(loops)))


def _equal_layers(plan: ShardPlan, layers: Collection[str]) -> Iterator[list[UnitPlan]]:
    """Yields the layers that differ in nothing but their names, together."""
    groups: dict[Hashable, list[UnitPlan]] = {}
    for unit in plan.units:
        if unit.name not in layers:  # modules that form one unit together are no layer of a loop
            continue
        content = []
        for leaf in plan.unit_leaves(unit.name):
            content.append((leaf.path.removeprefix(unit.name), leaf.placement))
        key = (tuple(content), dataclasses.replace(unit, name=""))
        groups.setdefault(key, []).append(unit)
    yield from groups.values()


def _num_layers(plan: ShardPlan, units: list[UnitPlan]) -> int:
    """Returns how many layers there are: a unit may itself be a stack of them."""
    if len(units) > 1:
        return len(units)
    return max((leaf.placement.layers for leaf in plan.unit_leaves(units[0].name)), default=1)


def _loops_of(
    plan: ShardPlan, units: list[UnitPlan], schedule: StageSchedule, settings: Stages
) -> Iterator[LoopOnStages]:
    """Yields the loop of forward over some layers, and that of backward."""
    parameters = []
    gradients = []
    first = units[0]
    for leaf in plan.unit_leaves(first.name):
        path_in_unit = leaf.path.removeprefix(first.name)
        paths = tuple(f"{unit.name}{path_in_unit}" for unit in units)
        parameters.append(StagedParameter(paths, leaf.placement.gathered_dtype, BY_ROUND))
        if leaf.trained:
            gradients.append(StagedGradient(paths, settings.sum_dtype or leaf.placement.dtype))
    forward = LoopOnStages(FORWARD, (first.name,), schedule, tuple(parameters), (), carry_bytes=0, entering_bytes=0)
    yield forward
    gathered_again = forward.parameters if first.reshard_after_forward is True else ()
    yield dataclasses.replace(forward, phase=BACKWARD, parameters=gathered_again, gradients=tuple(gradients))


def with_carries(plan: ShardPlan, layer_input_bytes: float) -> ShardPlan:
    """Returns a plan whose loops on stages have carries of a size.

    Args:
        plan: with predicted loops.
        layer_input_bytes: of a layer's input, for the examples of one device.
    """
    loops = []
    for loop in plan.stages.loops:
        # The examples of all places go through each of them, in microbatches.
        entering_bytes = layer_input_bytes * loop.schedule.layout.num_places
        carry_bytes = entering_bytes / loop.schedule.num_microbatches
        loops.append(dataclasses.replace(loop, carry_bytes=round(carry_bytes), entering_bytes=round(entering_bytes)))
    return dataclasses.replace(plan, stages=dataclasses.replace(plan.stages, loops=tuple(loops)))


def share_on_stages(plan: ShardPlan) -> float:
    """Returns the share of a model's parameters that is in loops on stages: about that of its products."""
    paths: set[str] = set()
    for loop in plan.stages.loops:
        for parameter in loop.parameters:
            paths.update(parameter.paths)
    on_stages = sum(leaf.placement.size for leaf in plan.leaves_at(sorted(paths)))
    return on_stages / max(plan.num_parameters, 1)


def compute_factor(plan: ShardPlan) -> float:
    """Returns how much longer a step computes than without stages: its bubble."""
    bubbles = [loop.schedule.bubble for loop in plan.stages.loops]
    if not bubbles:
        return 1.0
    return 1 + share_on_stages(plan) * (1 / (1 - max(bubbles)) - 1)


def sums_bytes(plan: ShardPlan) -> float:
    """Returns what a device reads and writes in a step to add the gradients of its microbatches."""
    total_bytes = 0.0
    for loop in plan.stages.loops:
        layout = loop.schedule.layout
        for gradient in loop.gradients:
            leaves = plan.leaves_at(gradient.paths)
            if not leaves:
                continue
            placement = leaves[0].placement
            # The sum is read and written; the gradient is read as it was computed.
            bytes_each = 2 * jnp.dtype(gradient.dtype).itemsize + jnp.dtype(placement.gathered_dtype).itemsize
            gathered_elements = placement.stored_size * placement.degree / placement.shards
            elements_of_layer = gathered_elements * len(leaves) / layout.num_layers
            total_bytes += elements_of_layer * bytes_each * layout.layers_per_place * loop.schedule.num_microbatches
    return total_bytes
