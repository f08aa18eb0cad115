"""The memory of loops on pipeline stages: bytes on one device, from a plan and what a trace has left with it."""

import dataclasses

import jax.numpy as jnp

from jshard.inspect.communication.of_parameter import gathered_elements
from jshard.inspect.communication.staged import OnStages, gathered_on_stages, reduced_on_stages
from jshard.plans.plan import ShardPlan
from jshard.plans.staged_loops import BY_ROUND, LoopOnStages

_MOST_ROUNDS = 3
"""Later places are in the round before, the first ones in the current one, and the next is gathered."""

_GRADIENT_ROUNDS = 3
"""Two rounds are added to, in turns, and the one before them is reduced."""


@dataclasses.dataclass(frozen=True)
class StagesMemory:
    """What a loop on stages holds besides what it saves for backward; of several loops the largest.

    Attributes:
        num_rounds: how many rounds of gathered parameters it holds at once.
        rounds_bytes: those parameters.
        layers_bytes: the shards of the layers of a place, before they are gathered.
        sums_bytes: gradients of the rounds that are not reduced yet, which add those of the microbatches.
        reduced_bytes: the reduced gradients of the layers of a place, before they go back to the data axes.
        activations_bytes: the carries of all microbatches, when they enter and when they are through.
    """

    num_rounds: int
    rounds_bytes: int
    layers_bytes: int
    sums_bytes: int
    reduced_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parameters = self.rounds_bytes + self.layers_bytes
        return parameters + self.sums_bytes + self.reduced_bytes + self.activations_bytes


def stages_memory(plan: ShardPlan) -> StagesMemory | None:
    """Returns the memory of the loop on stages that holds most; None if there is none."""
    memories = [_memory_of_loop(plan, loop) for loop in plan.stages.loops]
    return max(memories, key=lambda memory: memory.total_bytes, default=None)


def _memory_of_loop(plan: ShardPlan, loop: LoopOnStages) -> StagesMemory:
    alone = dataclasses.replace(plan, stages=dataclasses.replace(plan.stages, loops=(loop,)))
    layout = loop.schedule.layout
    num_rounds = min(_MOST_ROUNDS, layout.num_rounds)
    rounds_bytes = 0.0
    layers_bytes = 0.0
    for parameter, on_stages in gathered_on_stages(alone):
        row_bytes = _row_elements(on_stages) * jnp.dtype(parameter.dtype).itemsize
        layers_bytes += row_bytes / on_stages.placement.degree * layout.layers_per_place
        if parameter.gathered == BY_ROUND and on_stages.placement.dim is not None:
            rounds_bytes += row_bytes * layout.layers_per_chunk * num_rounds
    sums_bytes = 0.0
    reduced_bytes = 0.0
    for gradient, on_stages in reduced_on_stages(alone):
        row_bytes = _row_elements(on_stages) * jnp.dtype(gradient.dtype).itemsize
        sums_bytes += row_bytes * layout.layers_per_chunk * _GRADIENT_ROUNDS
        reduced_bytes += row_bytes / on_stages.placement.degree * layout.layers_per_place
    return StagesMemory(
        num_rounds,
        round(rounds_bytes),
        round(layers_bytes),
        round(sums_bytes),
        round(reduced_bytes),
        _carries_bytes(loop),
    )


def _row_elements(on_stages: OnStages) -> float:
    """Returns the elements of one layer of a parameter, once it is gathered."""
    return gathered_elements(on_stages.stored) * on_stages.per_layer


def _carries_bytes(loop: LoopOnStages) -> int:
    """Returns the bytes of the carries: of all places as they enter, those that are through, and those that wait."""
    num_collected = loop.schedule.num_microbatches
    num_waiting = 0
    if loop.schedule.layout.num_rounds > 1:
        num_waiting = loop.schedule.num_waiting
    return loop.entering_bytes + loop.carry_bytes * (num_collected + num_waiting)
