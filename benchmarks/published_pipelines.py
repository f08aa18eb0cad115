"""Pipelines as other frameworks run them ("1F1B"), estimated by one of their stages.

jshard's own loops on stages hold all microbatches that are in flight, and deal layers to the places round by round.
Those of Megatron, DeepSpeed and others give each stage neighbouring layers, have at most as many microbatches in flight
as there are stages, and reduce gradients once a step. Such a stage is a model of its share of the layers, on its share
of the devices:

- It computes each microbatch, and waits for one less than there are stages: `microbatches + stages - 1` in all.
- The last stage has the head as well, and as many layers less as keep the slowest stage as fast as possible.
- The first stage holds what as many microbatches as there are stages save for backward, and the table of the tokens;
  the last one what one of them saves, the logits, and the head.
- It sends each microbatch on, and its cotangents back, and nothing hides that.

Sources: Narayanan et al. 2021, arXiv 2104.04473, sections 2.2 and 3.2; `PipelineScheduleTrain` of Aleph-Alpha/scaling.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from benchmarks.published_pytorch import EagerMicrobatch
from benchmarks.published_tensor import tables_elsewhere
from jshard.cluster.compile import UnitSettings, Variant
from jshard.cluster.costs import Cost, Costs
from jshard.inspect.memory import Memory, copy_bytes, whole_elements
from jshard.plans.mesh import PIPE, TENSOR, data_shards
from jshard.plans.plan import LeafPlan
from jshard.recipes.recipe import Recipe

StageOf = Callable[[int], Costs]
EagerOf = Callable[[Costs], EagerMicrobatch]

_SENDS = 2  # a microbatch in forward, its cotangents in backward
_STORED_ARRAYS = 3  # of each parameter: itself, and the two moments of AdamW


@dataclasses.dataclass(frozen=True)
class Division:
    """How layers are divided over stages."""

    elsewhere: int  # layers of each stage but the last, at most
    beside_head: int  # layers of the last one
    slowest_s: float  # the time of the slowest stage


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How a batch goes through the stages."""

    num_layers: int  # of the model
    num_stages: int
    num_microbatches: int  # of a step, on each data shard
    rows: int  # sequences of one of them
    mesh: Mapping[str, int]  # of one stage

    @classmethod
    def of(cls, recipe: Recipe, mesh: Mapping[str, int]) -> Pipeline:
        """Returns the pipeline of a configuration, whose mesh has an axis `pipe`."""
        num_stages = mesh[PIPE]
        # In the file the places of the pipeline are data shards, as in jshard.
        rows = recipe.batch_size // recipe.accumulate // data_shards(mesh)
        of_stage = {axis: degree for axis, degree in mesh.items() if axis != PIPE}
        return cls(recipe.model.n_layer, num_stages, recipe.accumulate * num_stages, rows, of_stage)

    @property
    def num_rounds(self) -> int:
        """How many microbatches a stage computes or waits for."""
        return self.num_microbatches + self.num_stages - 1

    @property
    def num_in_flight(self) -> int:
        """How many microbatches the first stage holds at once."""
        return min(self.num_stages, self.num_microbatches)

    @property
    def layers_of_stage(self) -> int:
        """How many layers the stages have, if they are divided evenly."""
        return math.ceil(self.num_layers / self.num_stages)

    def divided(self, layer_s: float, head_s: float) -> Division:
        """Returns the division of the layers whose slowest stage is as fast as possible.

        Args:
            layer_s: the time of a layer.
            head_s: the time of what only the last stage has.
        """
        divisions = []
        for beside_head in range(self.layers_of_stage, -1, -1):  # of equally fast ones the most even
            elsewhere = math.ceil((self.num_layers - beside_head) / (self.num_stages - 1))
            slowest_s = max(elsewhere * layer_s, beside_head * layer_s + head_s)
            divisions.append(Division(elsewhere, beside_head, slowest_s))
        return min(divisions, key=lambda division: division.slowest_s)

    @property
    def batch_settings(self) -> tuple[str, ...]:
        """Settings of the batch that takes a stage as long as a step: the microbatches that it waits for are in it."""
        batch_size = self.num_rounds * self.rows * data_shards(self.mesh)
        return f"batch_size={batch_size}", f"accumulate={self.num_rounds}"


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The estimated step of a published configuration."""

    step_s: float
    standing_bytes: int  # of the device that holds most: what stays for the whole step
    passing_bytes: int  # what comes and goes
    eager: EagerMicrobatch
    left_out: tuple[str, ...]

    @property
    def step_bytes(self) -> int:
        """What is live at once."""
        return self.standing_bytes + self.passing_bytes

    def fits(self, device_bytes: float) -> bool:
        """Returns whether it fits into the memory of a device, with what an allocator reserves beyond it."""
        reserved_bytes = self.standing_bytes + self.eager.reserved * self.passing_bytes
        return reserved_bytes <= self.eager.room * device_bytes


def step_cost(costs: Costs, mesh: Mapping[str, int], units: UnitSettings, eager: EagerMicrobatch) -> StepCost:
    """Returns the estimate of a configuration without a pipeline.

    Args:
        costs: with the settings of its batch.
        mesh: degrees of its axes.
        units: settings of the layers.
        eager: what a microbatch takes in PyTorch.
    """
    variant = Variant(name="a step", mesh=mesh, units=units)
    cost = costs.of(variant)
    last_bytes = _last_stage_bytes(cost.memory, _saved_in_layers(costs, variant), eager)
    standing_bytes = _standing_bytes(cost.memory)
    return StepCost(
        step_s=cost.step_s + costs.recipe.accumulate * eager.more_s + eager.more_once_s,
        standing_bytes=standing_bytes - _tables_elsewhere(costs, variant, eager),
        passing_bytes=last_bytes - standing_bytes,
        eager=eager,
        left_out=cost.left_out,
    )


def pipeline_cost(stage_of: StageOf, pipeline: Pipeline, units: UnitSettings, eager_of: EagerOf) -> StepCost:
    """Returns the estimate of a pipeline.

    Args:
        stage_of: gives the costs of a stage with a number of layers, for the devices of one, and the batch of a stage.
        pipeline: how a batch goes through the stages.
        units: settings of the layers.
        eager_of: gives what a microbatch takes in PyTorch, on a stage of such costs.
    """
    variant = Variant(name="a stage", mesh=pipeline.mesh, units=units)

    def stage(num_layers: int) -> _Stage:
        costs = stage_of(max(num_layers, 1))
        return _Stage(costs, costs.of(variant), _saved_in_layers(costs, variant), eager_of(costs))

    num_layers = pipeline.layers_of_stage
    even = stage(num_layers)
    with_head_s = even.step_s(pipeline)
    layer_s = with_head_s - stage(num_layers - 1).step_s(pipeline) if num_layers > 1 else with_head_s
    division = pipeline.divided(layer_s, head_s=with_head_s - num_layers * layer_s)
    first, last = stage(division.elsewhere), stage(division.beside_head)
    # The first stage has no logits, and most microbatches in flight.
    first_bytes = first.cost.memory.in_layer_bytes - first.of_layers_bytes + pipeline.num_in_flight * first.kept_bytes
    last_bytes = _last_stage_bytes(last.cost.memory, last.of_layers_bytes, last.eager)
    most, largest = max((first_bytes, first), (last_bytes, last), key=lambda pair: pair[0])
    standing_bytes = _standing_bytes(largest.cost.memory)
    sends_s = pipeline.num_rounds * _SENDS * _send_s(even.costs, pipeline)
    return StepCost(
        step_s=division.slowest_s + sends_s,
        standing_bytes=standing_bytes - _tables_elsewhere(largest.costs, variant, largest.eager, is_stage=True),
        passing_bytes=most - standing_bytes,
        eager=largest.eager,
        left_out=even.cost.left_out,
    )


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A stage with the head and some layers, and the batch that takes it as long as a step."""

    costs: Costs
    cost: Cost
    of_layers_bytes: int  # what its layers save of a microbatch in jshard's program
    eager: EagerMicrobatch

    @property
    def kept_bytes(self) -> int:
        """What its layers keep of a microbatch."""
        return max(self.eager.layers_bytes, self.of_layers_bytes)

    def step_s(self, pipeline: Pipeline) -> float:
        """Returns the time of all rounds."""
        return self.cost.step_s + pipeline.num_rounds * self.eager.more_s + self.eager.more_once_s


def _standing_bytes(memory: Memory) -> int:
    """Returns what a device holds all through a step: the state, copies that stay, and sums of gradients."""
    return memory.held_bytes + memory.kept_bytes + memory.sums_bytes


def _last_stage_bytes(memory: Memory, of_layers_bytes: int, eager: EagerMicrobatch) -> int:
    """Returns what a model, or the last of its stages, takes with one microbatch.

    Args:
        memory: of jshard's program.
        of_layers_bytes: what its layers save of a microbatch.
        eager: what a microbatch takes in PyTorch.
    """
    kept_bytes = max(eager.layers_bytes, of_layers_bytes)
    own_bytes = memory.in_layer_bytes if eager.logits_bytes else memory.step_bytes
    at_loss = _standing_bytes(memory) + kept_bytes + eager.logits_bytes
    return max(own_bytes + kept_bytes - of_layers_bytes, at_loss)


def _saved_in_layers(costs: Costs, variant: Variant) -> int:
    """Returns what the layers of jshard's program save of a microbatch for backward."""
    saved = costs.saved(variant)
    return saved.saved_bytes - saved.outside_bytes


def _send_s(costs: Costs, pipeline: Pipeline) -> float:
    """Returns the time to send the values of a microbatch to the next stage, which other devices hold."""
    recipe = costs.recipe
    itemsize = jnp.dtype(recipe.model.compute_dtype).itemsize
    num_bytes = pipeline.rows * recipe.sequence_length * recipe.model.d_model * itemsize
    return costs.machine.assumptions.transfer_s("collective-permute", num_bytes, (0, costs.machine.num_devices))


def _tables_elsewhere(costs: Costs, variant: Variant, eager: EagerMicrobatch, *, is_stage: bool = False) -> int:
    """Returns the bytes of the tables of tokens and head that a device does not have, in jshard's program it does."""
    plan = costs.traces.plan(tuple(variant.mesh.items()), tuple(variant.units.items()))
    tensor = variant.mesh.get(TENSOR, 1) if eager.splits_tables else 1
    elsewhere = tables_elsewhere(costs, plan, tensor=tensor, is_stage=is_stage)
    return round(sum(elsewhere.get(leaf.path, 0.0) * _state_bytes(leaf) for leaf in plan.leaves))


def _state_bytes(leaf: LeafPlan) -> int:
    """Returns what a device holds of a parameter, of its optimizer state, of its copy and of its gradient."""
    placement = leaf.placement
    gradient_bytes = whole_elements(placement) * jnp.dtype(placement.reduce_dtype).itemsize
    return _STORED_ARRAYS * placement.bytes_per_device + copy_bytes(placement) + gradient_bytes
