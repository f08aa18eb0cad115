"""Loops on pipeline stages before anything is traced: which layers they will have, and what they cost.

A trace of a model says which loops it has. A search has no time for one on every mesh, and takes the layers that a
model has many of for one loop each: the same that `js.scan_layers` would run on stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator

import jax.numpy as jnp

from jshard.inspect.communication.of_parameter import gathered_elements
from jshard.inspect.communication.staged import paths_gathered_on_stages, reduced_on_stages
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
from jshard.recipes.overrides import SettingError


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


def check_divides(plan: ShardPlan, rows: int) -> None:
    """Raises `SettingError` unless the examples of a data shard divide into the microbatches of its stages.

    Args:
        plan: with predicted loops.
        rows: examples of one device.
    """
    for loop in plan.stages.loops:
        schedule = loop.schedule
        num_places = schedule.layout.num_places
        if rows * num_places % schedule.num_microbatches:
            raise SettingError(
                "The batch does not divide into the microbatches of the pipeline.",
                where=f"{rows * num_places} examples on each data shard",
                why=f"{schedule.num_microbatches} microbatches of equal size are needed.",
                do=f"--set stages.microbatches={num_places}",
            )


def with_carries(plan: ShardPlan, layer_input_bytes: float) -> ShardPlan:
    """Returns a plan whose loops on stages have the carries of a batch.

    Args:
        plan: with predicted loops.
        layer_input_bytes: of a layer's input, for the examples of one device.
    """
    loops = []
    for loop in plan.stages.loops:
        schedule = loop.schedule
        # The examples of all places go through each of them, in microbatches.
        entering_bytes = layer_input_bytes * schedule.layout.num_places
        carry_bytes = entering_bytes / schedule.num_microbatches
        loops.append(dataclasses.replace(loop, carry_bytes=round(carry_bytes), entering_bytes=round(entering_bytes)))
    return dataclasses.replace(plan, stages=dataclasses.replace(plan.stages, loops=tuple(loops)))


def compute_factor(plan: ShardPlan) -> float:
    """Returns how much longer a step computes than without stages: its bubble."""
    if not plan.stages:
        return 1.0
    bubble = max(loop.schedule.bubble for loop in plan.stages.loops)
    longer_loop = 1 / (1 - bubble)
    # The bubble is that of the loops: what is outside of them takes as long as without stages.
    share = _share_on_stages(plan)
    return share * longer_loop + (1 - share)


def _share_on_stages(plan: ShardPlan) -> float:
    """Returns the share of a model's parameters that is in loops on stages: about that of its products."""
    leaves = plan.leaves_at(paths_gathered_on_stages(plan))
    num_on_stages = sum(leaf.placement.size for leaf in leaves)
    return num_on_stages / max(plan.num_parameters, 1)


def sums_bytes(plan: ShardPlan) -> float:
    """Returns what a device reads and writes in a step to add the gradients of its microbatches."""
    total_bytes = 0.0
    for gradient, on_stages in reduced_on_stages(plan):
        schedule = on_stages.loop.schedule
        sum_itemsize = jnp.dtype(gradient.dtype).itemsize
        computed_itemsize = jnp.dtype(on_stages.stored.gathered_dtype).itemsize
        elements_of_layer = gathered_elements(on_stages.stored) * on_stages.per_layer
        # The sum is read and written; the gradient is read as it was computed.
        bytes_each_time = elements_of_layer * (2 * sum_itemsize + computed_itemsize)
        total_bytes += bytes_each_time * schedule.layout.layers_per_place * schedule.num_microbatches
    return total_bytes
