"""The collectives of loops on pipeline stages, as they follow from a plan and what a trace has left with it.

On its place a parameter has the layers of that place alone. So each device exchanges `1 / fsdp` of what it then
gathers, and gathers `1 / pipe` of what it would without stages:

    parameters     to their places (pipe)   ─▶  gathered, for each round (fsdp)
    gradients      from their places (pipe) ◀─  reduced, for each round (fsdp)
    activations    to all places, from each to the next one, and back to their examples (pipe)
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from jshard.inspect.communication.of_parameter import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    Traffic,
    gather,
    gathered_elements,
    reductions_to_shard,
    sum_over_replicas,
)
from jshard.plans import staged_loops
from jshard.plans.mesh import PIPE
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan
from jshard.plans.staged_loops import BY_ROUND, LoopOnStages, StagedGradient, StagedParameter

_PARAMETERS_OF_PHASE = {staged_loops.FORWARD: FORWARD, staged_loops.BACKWARD: BACKWARD}


@dataclasses.dataclass(frozen=True)
class OnStages:
    """The parameters of a loop that have some paths, on the stages.

    Attributes:
        loop: the loop.
        leaves: the parameters: one of each layer, or a stack of all layers.
        degrees: of the mesh axes.
    """

    loop: LoopOnStages
    leaves: Sequence[LeafPlan]
    degrees: Mapping[str, int]

    @property
    def stored(self) -> Placement:
        """How they are stored over the data axes."""
        return self.leaves[0].placement

    @property
    def placement(self) -> Placement:
        """How they are stored on a place."""
        return self.stored.on_stage(self.num_places)

    @property
    def num_places(self) -> int:
        """The degree of `pipe`."""
        return self.degrees[PIPE]

    @property
    def degrees_of_place(self) -> dict[str, int]:
        """The degrees of the mesh axes on one place."""
        return {**self.degrees, PIPE: 1}

    @property
    def per_layer(self) -> float:
        """The factor from one of the parameters to a layer; of a stack it is less than 1."""
        return len(self.leaves) / self.loop.schedule.layout.num_layers

    @property
    def once(self) -> float:
        """The factor from one of the parameters to all layers that a place has room for, in a step."""
        return self.per_layer * self.loop.schedule.layout.layers_per_place * self.loop.times

    @property
    def by_tick(self) -> float:
        """The factor from one of the parameters to what a place gathers if it does so in each tick, in a step."""
        layout = self.loop.schedule.layout
        return self.per_layer * layout.layers_per_chunk * self.loop.schedule.num_ticks * self.loop.times

    def times_gathered(self, parameter: StagedParameter) -> float:
        """Returns the factor from one of the parameters to what a place gathers of them."""
        return self.once if parameter.gathered == BY_ROUND else self.by_tick

    def exchanged(self, kind: str, dtype: str, purpose: str, factor: float) -> Traffic:
        """Returns the exchange of their shards between places."""
        elements = gathered_elements(self.stored) / self.placement.degree
        size = elements * jnp.dtype(dtype).itemsize * factor
        return Traffic(kind, (PIPE,), self.num_places, dtype, round(size), purpose)


def gathered_on_stages(plan: ShardPlan) -> Iterator[tuple[StagedParameter, OnStages]]:
    """Yields the parameters that loops on stages gather, with what they are of."""
    for loop in plan.stages.loops:
        for parameter in loop.parameters:
            leaves = _gathered_leaves(plan, parameter.paths)
            if leaves:
                yield parameter, OnStages(loop, leaves, dict(plan.mesh))


def reduced_on_stages(plan: ShardPlan) -> Iterator[tuple[StagedGradient, OnStages]]:
    """Yields the gradients that loops on stages reduce, with what they are of."""
    for loop in plan.stages.loops:
        for gradient in loop.gradients:
            leaves = [leaf for leaf in _gathered_leaves(plan, gradient.paths) if leaf.trained]
            if leaves:
                yield gradient, OnStages(loop, leaves, dict(plan.mesh))


def _gathered_leaves(plan: ShardPlan, paths: Sequence[str]) -> list[LeafPlan]:
    """Returns the parameters at some paths, without those that are never gathered."""
    return [leaf for leaf in plan.leaves_at(paths) if leaf.placement.gathered]


def paths_gathered_on_stages(plan: ShardPlan) -> set[str]:
    """Returns the paths of the parameters that loops on stages gather."""
    return {leaf.path for _, on_stages in gathered_on_stages(plan) for leaf in on_stages.leaves}


def paths_reduced_on_stages(plan: ShardPlan) -> set[str]:
    """Returns the paths of the parameters whose gradients loops on stages reduce."""
    return {leaf.path for _, on_stages in reduced_on_stages(plan) for leaf in on_stages.leaves}


# ---- collectives


def traffic_of_parameters_on_stages(plan: ShardPlan) -> Iterator[Traffic]:
    """Yields the collectives of the parameters of loops on stages."""
    for parameter, on_stages in gathered_on_stages(plan):
        yield from _gathers(parameter, on_stages)
    for gradient, on_stages in reduced_on_stages(plan):
        yield from _reductions(gradient, on_stages)


def _gathers(parameter: StagedParameter, on_stages: OnStages) -> Iterator[Traffic]:
    phase = _PARAMETERS_OF_PHASE[on_stages.loop.phase]
    if PIPE in on_stages.stored.axes:
        yield on_stages.exchanged("all-to-all", parameter.dtype, f"{phase}, to their places", on_stages.once)
    if on_stages.placement.dim is None:
        return
    factor = on_stages.times_gathered(parameter)
    for traffic in gather(on_stages.placement, f"{phase}, by {parameter.gathered}", on_stages.degrees_of_place):
        yield _scaled(traffic, factor)


def _reductions(gradient: StagedGradient, on_stages: OnStages) -> Iterator[Traffic]:
    placement = on_stages.placement
    degrees = on_stages.degrees_of_place
    collectives = []
    if placement.dim is not None:
        collectives += reductions_to_shard(placement, degrees)
    collectives += sum_over_replicas(placement, degrees, f"{GRADIENTS}, over copies on a place")
    for traffic in collectives:
        yield _scaled(traffic, on_stages.once)
    purpose = f"{GRADIENTS}, from their places"
    if PIPE in on_stages.stored.axes:
        yield on_stages.exchanged("all-to-all", gradient.dtype, purpose, on_stages.once)
    else:
        yield on_stages.exchanged("all-gather", gradient.dtype, purpose, on_stages.once * on_stages.num_places)


def _scaled(traffic: Traffic, factor: float) -> Traffic:
    return dataclasses.replace(traffic, full_bytes=round(traffic.full_bytes * factor))


def traffic_of_activations(plan: ShardPlan) -> Iterator[Traffic]:
    """Yields what the places send each other of activations."""
    num_places = dict(plan.mesh).get(PIPE, 1)
    for transfer in plan.stages.transfers:
        yield Traffic(transfer.kind, (PIPE,), num_places, transfer.dtype, round(transfer.bytes), transfer.purpose)
