"""Estimated memory and time of a recipe's configurations before compiling: a filter, not a measurement.

Memory is that of `jshard.inspect.memory`. Time is that of matrix products, of traffic to the device's memory, and of
exposed collectives: those of the plan, and those of the model over its own axes. How they run beside the computation of
layers is in `layer_rounds`.

What is traced for it is in `model_traces`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import optax

import jshard as js
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.compile import Variant
from jshard.cluster.layer_rounds import Awaited, LayerRound, played, spread
from jshard.cluster.machine import Machine
from jshard.cluster.model_costs import KernelTimes, ModelTraffic, Place, kernel_times, without_parameter_work
from jshard.cluster.model_traces import Degrees, ModelTraces, Settings, alike
from jshard.cluster.predicted_stages import (
    check_divides,
    compute_factor,
    sums_bytes,
    with_carries,
    with_predicted_stages,
)
from jshard.engine.chosen_remat import chosen_for, with_chosen_remats
from jshard.engine.gathers import LATENCY_BOUND_BYTES, is_worth_two_gathers
from jshard.engine.schedule.unit_schedule import GATHERED_IN_TURN_BYTES
from jshard.inspect.activations import Activations, saved_arrays
from jshard.inspect.communication import BACKWARD, FORWARD, unit_traffic
from jshard.inspect.communication.planned import in_mesh_order
from jshard.inspect.hlo.collectives import group_along
from jshard.inspect.memory import (
    Memory,
    gathered_once,
    kept_bytes,
    memory_of,
    reduces_in_gathered_dtype,
    whole_sums_bytes,
)
from jshard.inspect.partitioned import MODEL_AXES
from jshard.inspect.plan_tables import folded_units
from jshard.inspect.staged_memory import stages_memory
from jshard.inspect.traced_work import DataCollective
from jshard.plans.mesh import FSDP, PIPE, REPLICA, AnyMesh, data_shards
from jshard.plans.plan import ShardPlan, UnitPlan
from jshard.plans.remat import AUTO, NONE
from jshard.plans.stages import Stages
from jshard.recipes.building import batch_of
from jshard.recipes.ema import with_averages
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe, check_batch, gathers_once

_UPDATE_PASSES = 7.0  # over the parameter shard: AdamW reads four arrays and writes three
_UPDATE_KERNELS = 3  # of each parameter: its cast gradient's norm, the scaled gradient, and the update
_JOINED_BYTES = 30 * 2**20  # XLA's bound for gathers that it joins


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The computation of a device in a step, in seconds."""

    products_s: float  # matrix products, as fast as large ones
    small_products_s: float  # that they take longer, because they are small
    traffic_s: float  # other operations, and gradients that are added: bound by the memory
    bubble_s: float  # that a device stands still in loops on stages
    update_s: float  # of the optimizer
    slowdown_s: float = 0.0  # that all of it takes longer beside collectives

    @property
    def microbatches_s(self) -> float:
        """Returns the time of forward and backward of all microbatches."""
        return self.products_s + self.small_products_s + self.traffic_s + self.bubble_s


@dataclasses.dataclass(frozen=True)
class Cost:
    """The estimated step of a configuration."""

    variant: Variant
    memory: Memory  # of one device
    work: StepWork
    communication_s: float  # the collectives, and copies from and to the host, run one after another
    exposed_s: float  # the part that the computation waits for
    left_out: tuple[str, ...] = ()  # the costs that are not modelled, as text

    @property
    def compute_s(self) -> float:
        """Returns the seconds that a device computes in a step."""
        return self.work.microbatches_s + self.work.update_s + self.work.slowdown_s

    @property
    def step_s(self) -> float:
        """Returns the seconds of a step: it computes, and waits for collectives."""
        return self.compute_s + self.exposed_s


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Equal collectives of a microbatch."""

    phase: str  # `forward` or `backward`
    count: float
    each_s: float
    is_alone: bool  # no computation overlaps with them
    row: str = ""  # of layers that have one of them each, beside the computation of a neighbour
    is_first: bool = False  # it ends before the other gathers of its layer begin
    in_layers: int = 0  # of how many layers they are a part, each of which waits for its own; 0 if of none
    expected_s: float = 0.0  # what the compiler expects each to take; 0 if it runs them one after another
    places: tuple[Place, ...] = ()  # in a layer, whose computation is 1; empty if unknown


@dataclasses.dataclass(frozen=True)
class _PlannedModel:
    """The facts about an annotated model that do not depend on the batch."""

    plan: ShardPlan
    memory: Memory  # without activations
    kept_bytes: int  # gathered parameters of the layers that are kept for backward
    collectives: tuple[Collectives, ...]


@dataclasses.dataclass(frozen=True)
class _Microbatch:
    """What a microbatch takes on a device, but for what depends on the mesh."""

    saved: Activations
    times: KernelTimes
    over_model_axes: tuple[ModelTraffic, ...]
    between_data_shards: tuple[DataCollective, ...]


class Costs:
    """Estimates for configurations of one recipe on one machine; their common parts are traced once."""

    def __init__(
        self, model_file: ModelFile, recipe: Recipe, machine: Machine, *, traces: ModelTraces | None = None
    ) -> None:
        self.model_file = model_file
        self.recipe = recipe
        self.machine = machine
        self.traces = traces or ModelTraces(model_file, recipe)

    def on(self, machine: Machine, *, settings: Sequence[str] = ()) -> Costs:
        """Returns the estimates on another machine with the same kind of device; both share what is traced.

        Args:
            machine: the other one.
            settings: changes to the batch of the recipe, in the form of `--set`.
        """
        recipe = override(self.recipe, settings)
        return Costs(self.model_file, recipe, machine, traces=self.traces)

    def of(self, variant: Variant) -> Cost:
        """Returns the estimate for one configuration, whose batch divides over its mesh.

        Raises:
            SettingError: the recipe cannot have its settings.
            RecipeError: its batch does not divide over the mesh.
            AnnotationError: the model cannot be annotated on its mesh.
            CallError: the recipe has too few microbatches for the stages of its mesh.
        """
        recipe = self._recipe(variant.settings)
        check_batch(recipe, self._mesh(tuple(variant.mesh.items())))
        requested = variant
        variant = self._settled(variant)
        planned = self._planned(tuple(variant.mesh.items()), tuple(variant.units.items()), recipe.stages)
        rows = recipe.batch_size // recipe.accumulate // data_shards(variant.mesh)
        check_divides(planned.plan, rows)
        plan = with_carries(planned.plan, self._layer_input_bytes(rows, variant))

        remat = _remat_setting(variant)
        axes = _model_axes(variant)
        is_once = gathers_once(recipe)
        computed = self._computed(rows, remat, alike(axes), is_once)
        saved = dataclasses.replace(computed.saved, saved_bytes=computed.saved.saved_bytes + planned.kept_bytes)
        memory = planned.memory.with_activations(saved, num_microbatches=recipe.accumulate)
        memory = dataclasses.replace(memory, stages=stages_memory(plan))
        once_s = 0.0
        if is_once:
            memory = gathered_once(memory, plan)
            once_s = _once_s(plan, self.machine.assumptions)

        collectives = [
            *(() if is_once else planned.collectives),
            *_between_places(plan, recipe.stages, self.machine.assumptions),
            *self._over_model_axes(plan, computed),
            *self._copies_of_activations(memory),
            *self._between_data_shards(plan, computed.between_data_shards),
        ]
        if not self.machine.overlaps_beside(memory.held_bytes):
            collectives = [dataclasses.replace(equal, is_alone=True, row="", in_layers=0) for equal in collectives]
        times = computed.times.with_shards(self.traces.size_of_shards(plan, remat, alike(axes)))
        work = self._work(plan, recipe, times)
        phases = _phases(work.microbatches_s / recipe.accumulate, times)
        overlap = _overlap(collectives, phases, self.machine)
        copies_s = self._copies_of_state_s(memory)
        return Cost(
            variant=requested,
            memory=memory,
            work=dataclasses.replace(work, slowdown_s=overlap.slowdown_s * recipe.accumulate),
            communication_s=overlap.communication_s * recipe.accumulate + once_s + copies_s,
            exposed_s=overlap.exposed_s * recipe.accumulate + once_s + copies_s,
            left_out=tuple(self._left_out(plan, memory)),
        )

    def saved(self, variant: Variant) -> Activations:
        """Returns what a device saves of a microbatch between forward and backward."""
        recipe = override(self.recipe, variant.settings)
        rows = recipe.batch_size // recipe.accumulate // data_shards(variant.mesh)
        return self.traces.saved(rows, _remat_setting(self._settled(variant)), _model_axes(variant))

    def remat_of(self, variant: Variant) -> str:
        """Returns the remat policy of the layers in a configuration; of "auto" the one that it chooses."""
        return _remat_setting(self._settled(variant)) or self.traces.remat

    def _settled(self, variant: Variant) -> Variant:
        """Returns a configuration with the policy that "auto" chooses in it; the same one if it has another policy."""
        requested = _remat_setting(variant) or self.traces.remat
        if requested != AUTO:
            return variant
        mesh = tuple(variant.mesh.items())
        units = tuple(variant.units.items())
        chosen = self._chosen_remat(mesh, units, variant.accumulate or self.recipe.accumulate)
        return dataclasses.replace(variant, units={**variant.units, "remat": chosen})

    @functools.cache  # noqa: B019
    def _chosen_remat(self, mesh: Degrees, units: Settings, accumulate: int) -> str:
        """Returns what "auto" chooses, from a trace of the whole batch on the whole mesh."""
        model = self.traces.revised(mesh, {**dict(units), "remat": AUTO})
        batch = batch_of(self.model_file, self.recipe, self.recipe.batch_size // accumulate)
        device = self.machine.device
        context = contextlib.nullcontext() if device is None else chosen_for(device)
        with context:
            saved_arrays(model, self.model_file.loss, batch, wrt=self.traces.trained)
        plan = with_chosen_remats(js.plan(model, wrt=self.traces.trained))
        chosen = self.traces.remat_in(plan)
        return NONE if chosen == AUTO else chosen  # no call of it was differentiated

    def held_bytes(self, mesh: Mapping[str, int]) -> int:
        """Returns the minimum memory per device on a mesh: the state between steps, and the gradients."""
        memory = self._planned(tuple(mesh.items()), ()).memory
        return memory.held_bytes + memory.gradients_bytes

    def least_step_s(self, mesh: Mapping[str, int]) -> float:
        """Returns a bound of the time of a step on a mesh: its matrix products alone, without recomputation."""
        assumptions = self.machine.assumptions
        plan = self._planned(tuple(mesh.items()), ()).plan
        step_flops, _ = self.model_file.step_flops(self.recipe, plan)
        flops_of_device = step_flops / self.machine.num_devices
        return flops_of_device / (assumptions.flops_per_s * assumptions.matmul_efficiency)

    def unit_bytes(self, mesh: Mapping[str, int]) -> int:
        """Returns the gathered bytes of the largest unit."""
        return self._planned(tuple(mesh.items()), ()).memory.largest_unit_bytes

    # ---- what is planned

    @functools.cache  # noqa: B019  (a command makes one `Costs`)
    def _recipe(self, settings: tuple[str, ...]) -> Recipe:
        return override(self.recipe, settings)

    @functools.cache  # noqa: B019
    def _mesh(self, mesh: Degrees) -> AnyMesh:
        return js.mesh(**dict(mesh), devices=self.machine.num_devices)

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return self.recipe.optimizer()

    @functools.cache  # noqa: B019
    def _computed(self, rows: int, remat: str, axes: Degrees, is_once: bool) -> _Microbatch:
        """Returns what a microbatch takes, whichever mesh has its devices.

        Args:
            rows: sequences of a device.
            remat: the policy of the layers.
            axes: degrees that are alike for it, as `alike` returns them.
            is_once: whether parameters are gathered and gradients reduced once a step, in none of its microbatches.
        """
        step = self.traces.step(rows, remat, axes)
        kernels = step.kernels
        if is_once:
            kernels = without_parameter_work(kernels, self.traces.step(0, remat, axes).kernels)
        saved = self.traces.saved(rows, remat, axes)
        return _Microbatch(
            saved=dataclasses.replace(saved, live=step.live),
            times=kernel_times(kernels, self.machine.assumptions),
            over_model_axes=tuple(self.traces.traffic(rows, remat, axes)),
            between_data_shards=step.collectives,
        )

    @functools.cache  # noqa: B019
    def _planned(self, mesh: Degrees, units: Settings, stages: Stages | None = None) -> _PlannedModel:
        layers = self.traces.layer_names
        plan = self.traces.plan(mesh, units)
        plan = with_predicted_stages(plan, layers, stages or self.recipe.stages)
        memory = with_averages(memory_of(plan, optimizer=self._optimizer), plan, self.recipe)
        memory = dataclasses.replace(memory, gathers_in_turn=self._gathers_in_turn(plan, memory))
        # Of the layers only; the traced step contains the other units' copies, but none of the layers.
        layers_kept_bytes = 0
        for unit in plan.units:
            if not layers.isdisjoint(unit.name.split("+")):
                layers_kept_bytes += kept_bytes(plan, unit)
        collectives = tuple(_collectives(plan, self.machine))
        return _PlannedModel(plan, memory, layers_kept_bytes, collectives)

    def _gathers_in_turn(self, plan: ShardPlan, memory: Memory) -> bool:
        """Returns whether a loop reduces the gradients of a layer before it gathers for the next one."""
        is_large = memory.prefetched_bytes >= GATHERED_IN_TURN_BYTES
        return is_large and self.machine.reduces_before_gathers and reduces_in_gathered_dtype(plan)

    def _over_model_axes(self, plan: ShardPlan, computed: _Microbatch) -> Iterator[Collectives]:
        """Yields the collectives of the model over its own axes."""
        for traffic in computed.over_model_axes:
            each_s = traffic.seconds(dict(plan.mesh), self.machine.assumptions)
            # The next operation needs the result. Only what goes round a ring is sent beside the computation.
            if traffic.kind == "collective-permute":
                yield Collectives("backward", traffic.count, each_s, is_alone=False)
                continue
            placed = list(_at_their_places(traffic, each_s, computed.times, self.traces.num_layers))
            if placed:
                yield from placed
            else:
                yield from _spread_over_phases(traffic, each_s, computed.times, self.traces.num_layers)

    # ---- times

    def _work(self, plan: ShardPlan, recipe: Recipe, times: KernelTimes) -> StepWork:
        """Returns the computation of a step on one device."""
        num_microbatches = recipe.accumulate
        added_bytes = sums_bytes(plan)
        if gathers_once(recipe):
            added_bytes += _added_bytes(plan)
        sums_s = added_bytes / self._reached_bytes_per_s
        return StepWork(
            products_s=num_microbatches * times.products_s,
            small_products_s=num_microbatches * times.small_products_s,
            traffic_s=num_microbatches * (times.traffic_s + sums_s),
            bubble_s=num_microbatches * (times.total_s + sums_s) * (compute_factor(plan) - 1),
            update_s=self._update_s(plan),
        )

    def _between_data_shards(self, plan: ShardPlan, all_sent: Iterable[DataCollective]) -> Iterator[Collectives]:
        """Yields what the model itself sends between data shards, as for a norm over the batch."""
        group = group_along(dict(plan.mesh), (REPLICA, FSDP))
        if len(group) == 1:
            return
        for sent in all_sent:
            each_s = self.machine.assumptions.transfer_s(sent.kind, sent.full_bytes(len(group)), group)
            # The next operation needs the result.
            yield Collectives(sent.phase, sent.rounds, each_s, is_alone=True)

    def _copies_of_activations(self, memory: Memory) -> Iterator[Collectives]:
        """Yields the copies of saved values to the host in forward, and back in backward, layer by layer."""
        rate = self.machine.assumptions.host_bytes_per_s
        if rate is None or not memory.host_activations_bytes:
            return
        each_s = memory.host_activations_bytes / self.traces.num_layers / rate
        for phase in ("forward", "backward"):
            yield Collectives(phase, self.traces.num_layers, each_s, is_alone=False)

    def _copies_of_state_s(self, memory: Memory) -> float:
        """Returns the time to copy what the update reads and writes in host memory. The copies go both ways at once."""
        rate = self.machine.assumptions.host_bytes_per_s
        if rate is None:
            return 0.0
        state_bytes = memory.host_parameters_bytes + memory.host_optimizer_bytes + memory.host_averages_bytes
        return state_bytes / rate

    def _left_out(self, plan: ShardPlan, memory: Memory) -> Iterator[str]:
        """Yields the costs of a configuration that an estimate does not model."""
        if not all(unit.gathered for unit in plan.units):
            yield "the communication of units that are never gathered"
        if memory.host_bytes and self.machine.assumptions.host_bytes_per_s is None:
            yield "copies to and from the host"

    def _layer_input_bytes(self, rows: int, variant: Variant) -> float:
        """Returns the bytes of a layer's input for the examples of a device: what full remat saves of each layer."""
        if variant.mesh.get(PIPE, 1) == 1:
            return 0.0  # it is sent nowhere, and would be one more trace
        saved = self.traces.saved(rows, "full", alike(_model_axes(variant)))
        of_layers_bytes = max(saved.saved_bytes - saved.outside_bytes, 0)
        return of_layers_bytes / self.traces.num_layers

    def _update_s(self, plan: ShardPlan) -> float:
        """Returns the time of the optimizer's update."""
        assumptions = self.machine.assumptions
        num_kernels = _UPDATE_KERNELS * sum(leaf.trained for leaf in plan.leaves)
        traffic_s = _UPDATE_PASSES * plan.bytes_per_device / self._reached_bytes_per_s
        return num_kernels * assumptions.launch_s + traffic_s * (1 + assumptions.straggling)

    @property
    def _reached_bytes_per_s(self) -> float:
        assumptions = self.machine.assumptions
        return assumptions.memory_bytes_per_s * assumptions.memory_efficiency


# ---- configurations


def _remat_setting(variant: Variant) -> str:
    """Returns the remat policy that a configuration requests; empty if it has the annotated one."""
    return str(variant.units.get("remat", ""))


def _model_axes(variant: Variant) -> Degrees:
    """Returns the degrees of the axes that split the work of a data shard, as far as they split it."""
    degrees = []
    for axis in MODEL_AXES:
        degree = variant.mesh.get(axis, 1)
        if degree > 1:
            degrees.append((axis, degree))
    return tuple(degrees)


# ---- collectives


def _collectives(plan: ShardPlan, machine: Machine) -> Iterator[Collectives]:
    """Yields the collectives of forward and backward in a plan, by kind of unit."""
    root = plan.units[0]
    for folded in folded_units(plan):
        unit = folded.first
        layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
        count = folded.count * layers
        for transfer in _layer_transfers(plan, unit, layers, machine):
            # The root is gathered first and reduced last; without prefetch a unit waits for its own gather.
            waits_for_gather = unit.prefetch == "0" and transfer.kind == "all-gather"
            # What goes to its stage, or comes from there, does so before the loop or after it.
            is_exchange = transfer.kind == "all-to-all" and bool(plan.stages)
            is_alone = unit.name == root.name or waits_for_gather or is_exchange
            row = "" if is_alone or count == 1 else folded.name
            yield Collectives(
                transfer.phase,
                count,
                transfer.seconds,
                is_alone,
                row,
                is_first=transfer.is_first,
                expected_s=transfer.expected_s,
            )


def _once_s(plan: ShardPlan, assumptions: Assumptions) -> float:
    """Returns the time to gather all parameters before the first microbatch, and to reduce gradients after the last.

    Nothing is computed meanwhile.
    """
    degrees = dict(plan.mesh)
    total_s = 0.0
    for folded in folded_units(plan):
        for traffic in unit_traffic(plan, folded.first.name):
            if traffic.group_size == 1 or traffic.purpose.startswith(BACKWARD):  # sends nothing; gathered already
                continue
            group = group_along(degrees, traffic.axes)[:: traffic.apart][: traffic.group_size]
            total_s += folded.count * assumptions.transfer_s(traffic.kind, traffic.full_bytes, group)
    return total_s


def _added_bytes(plan: ShardPlan) -> int:
    """Returns what a device reads and writes to add the whole gradients of a microbatch to their sums."""
    computed_bytes = 0
    for leaf in plan.leaves:
        if leaf.trained and leaf.placement.gathered:
            computed_bytes += leaf.placement.gathered_bytes
    return 2 * whole_sums_bytes(plan) + computed_bytes


@dataclasses.dataclass(frozen=True)
class _LayerTransfer:
    """A collective of one layer."""

    phase: str  # `forward` or `backward`
    kind: str
    seconds: float
    expected_s: float  # what the compiler expects it to take; 0 if it runs collectives one after another
    is_first: bool = False  # it ends before the other gathers of the layer begin

    @classmethod
    def of(
        cls, phase: str, kind: str, num_bytes: float, group: Sequence[int], machine: Machine, *, is_first: bool = False
    ) -> _LayerTransfer:
        """Returns the collective of a group that sends so many bytes."""
        expected_s = 0.0
        if machine.expected_assumptions is not None:
            expected_s = machine.expected_assumptions.transfer_s(kind, num_bytes, group)
        seconds = machine.assumptions.transfer_s(kind, num_bytes, group)
        return cls(phase, kind, seconds, expected_s, is_first)


def _layer_transfers(plan: ShardPlan, unit: UnitPlan, layers: int, machine: Machine) -> Iterator[_LayerTransfer]:
    """Yields the collectives of one layer of a unit."""
    degrees = dict(plan.mesh)
    gathers = _joined_gathers(plan, unit, ties_small=machine.ties_small_gathers)
    total_bytes = sum(gather.num_bytes for gather in gathers)
    for traffic in unit_traffic(plan, unit.name):
        if traffic.group_size == 1:  # nothing is sent
            continue
        phase = "forward" if traffic.purpose.startswith(FORWARD) else "backward"
        group = group_along(degrees, traffic.axes)[:: traffic.apart][: traffic.group_size]
        layer_bytes = traffic.full_bytes / layers
        if traffic.kind != "all-gather":
            yield _LayerTransfer.of(phase, traffic.kind, layer_bytes, group, machine)
            continue
        of_axes = [gather for gather in gathers if gather.axes == traffic.axes]
        bytes_of_axes = sum(gather.num_bytes for gather in of_axes)
        if not bytes_of_axes:  # pieces, or what a wire packs
            of_axes, bytes_of_axes = gathers, total_bytes
        for gather in of_axes:
            sent_bytes = layer_bytes * gather.num_bytes / bytes_of_axes
            yield _LayerTransfer.of(phase, traffic.kind, sent_bytes, group, machine, is_first=gather.is_first)


@dataclasses.dataclass(frozen=True)
class _JoinedGather:
    """Parameters of a layer that the compiler gathers at once."""

    axes: tuple[str, ...]
    dim: int
    is_first: bool
    num_bytes: int

    def can_take(self, other: _JoinedGather) -> bool:
        """Returns whether the compiler joins another gather with this one."""
        is_alike = (self.axes, self.dim, self.is_first) == (other.axes, other.dim, other.is_first)
        return is_alike and self.num_bytes + other.num_bytes <= _JOINED_BYTES


def _joined_gathers(plan: ShardPlan, unit: UnitPlan, *, ties_small: bool) -> list[_JoinedGather]:
    """Returns the gathers of one layer of a unit: the compiler joins small ones of equal dims.

    Args:
        plan: of the model.
        unit: one of its units.
        ties_small: whether large gathers are tied behind small ones, where a layer has both.
    """
    placements = [leaf.placement for leaf in plan.unit_leaves(unit.name)]
    gathered = [placement for placement in placements if placement.gathered and placement.dim is not None]
    sizes = [placement.gathered_bytes // placement.layers for placement in gathered]
    has_first = ties_small and unit.reshard_after_forward in (True, False) and is_worth_two_gathers(sizes)
    joined: list[_JoinedGather] = []
    for placement, num_bytes in zip(gathered, sizes, strict=True):
        assert placement.dim is not None
        axes = in_mesh_order(placement.axes, dict(plan.mesh))
        is_first = has_first and num_bytes < LATENCY_BOUND_BYTES
        _join(_JoinedGather(axes, placement.dim, is_first, num_bytes), joined)
    return joined


def _join(gather: _JoinedGather, joined: list[_JoinedGather]) -> None:
    """Adds a gather to the first one that can take it, or to the end of the list."""
    for place, other in enumerate(joined):
        if other.can_take(gather):
            joined[place] = dataclasses.replace(other, num_bytes=other.num_bytes + gather.num_bytes)
            return
    joined.append(gather)


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


@dataclasses.dataclass(frozen=True)
class _Phase:
    """The computation of a phase of a microbatch, in seconds."""

    total_s: float
    layers_s: float  # the part that is in layers
    independent_s: float  # of this, what nothing in a layer waits for
    attention_s: float  # of layers_s, attention in one kernel
    kernel_s: float  # how much of a kernel is left at any time, in the mean


def _at_their_places(
    traffic: ModelTraffic, each_s: float, times: KernelTimes, num_layers: int
) -> Iterator[Collectives]:
    """Yields equal collectives of the model where the trace has them in a layer; none if it does not say."""
    for phase, computed in times.phases.items():
        places = _places_in_layer(traffic, computed.places, num_layers)
        if places:
            count = len(places) * num_layers
            yield Collectives(phase, count, each_s, is_alone=True, in_layers=num_layers, places=places)


def _spread_over_phases(
    traffic: ModelTraffic, each_s: float, times: KernelTimes, num_layers: int
) -> Iterator[Collectives]:
    """Yields equal collectives of the model of unknown places: a phase has as much of them as of the computation."""
    for phase, computed in times.phases.items():
        count = traffic.count * computed.layers_s / max(times.layers_s, sys.float_info.min)
        if count:
            yield Collectives(phase, count, each_s, is_alone=True, in_layers=num_layers)


def _places_in_layer(traffic: ModelTraffic, places: Iterable[Place], num_layers: int) -> tuple[Place, ...]:
    """Returns where a layer in the middle has collectives of one kind, as parts of its computation."""
    in_layer = []
    for place in places:
        if place.kind != traffic.kind or place.axes != set(traffic.axes):
            continue
        if place.rounds > 1:
            in_layer.append(place)
            continue
        layer = num_layers // 2
        start = place.start * num_layers - layer
        if 0 <= start < 1:
            in_layer.append(dataclasses.replace(place, start=start, end=min(1.0, place.end * num_layers - layer)))
    return tuple(in_layer)


def _phases(microbatch_s: float, times: KernelTimes) -> dict[str, _Phase]:
    """Returns the forward and the backward part of a microbatch's computation.

    Args:
        microbatch_s: all of it, with what is not in kernels.
        times: of the kernels.
    """
    scale = microbatch_s / max(times.total_s, sys.float_info.min)
    phases = {}
    for name, of_kernels in times.phases.items():
        phases[name] = _Phase(
            total_s=scale * of_kernels.total_s,
            layers_s=scale * of_kernels.layers_s,
            independent_s=scale * of_kernels.independent_s,
            attention_s=scale * of_kernels.attention_s,
            kernel_s=scale * of_kernels.kernel_s,
        )
    return phases


@dataclasses.dataclass(frozen=True)
class _HiddenParts:
    """How collectives and computation of a microbatch run beside each other, in seconds."""

    communication_s: float  # all collectives, one after another
    exposed_s: float  # what the computation waits for
    slowdown_s: float  # what the computation takes longer beside collectives


def _layer_round(
    row: Sequence[Collectives],
    in_layers: Sequence[Collectives],
    phase: _Phase,
    num_layers: float,
    assumptions: Assumptions,
) -> LayerRound:
    """Returns what a device does while one layer computes, with the collectives of its neighbours and its own."""
    first_s = 0.0
    sent_s = []
    expected_s = []
    for equal in row:
        if equal.is_first:
            first_s += equal.each_s
            continue
        sent_s.append(equal.each_s)
        # Between sums over `tensor`, whose places only the compiler knows, it starts the others as late as it can.
        if equal.expected_s and all(own.places for own in in_layers):
            expected_s.append(equal.expected_s)
    # The compiler knows nothing of attention kernels, and of no device that is slower than others.
    expected_compute_s = (phase.layers_s - phase.attention_s) / (1 + assumptions.straggling)
    compute_s = phase.layers_s / num_layers
    return LayerRound(
        compute_s=compute_s,
        first_s=first_s,
        sent_s=tuple(sent_s),
        expected_s=tuple(expected_s),
        expected_pace=expected_compute_s / max(phase.layers_s, sys.float_info.min),
        kernel_s=phase.kernel_s,
        awaited=_awaited(in_layers, compute_s, phase.independent_s / num_layers, num_layers),
    )


def _awaited(
    in_layers: Sequence[Collectives], compute_s: float, independent_s: float, num_layers: float
) -> tuple[Awaited, ...]:
    """Returns the collectives that a layer waits for, in order.

    Args:
        in_layers: equal ones of all layers.
        compute_s: the layer's computation.
        independent_s: of this, what waits for none of them.
        num_layers: of the model.
    """
    of_unknown_place: list[float] = []
    awaited: list[Awaited] = []
    num_known = sum(len(equal.places) for equal in in_layers)
    for equal in in_layers:
        for place in equal.places:
            start_s = place.start * compute_s
            end_s = max(place.end * compute_s, start_s + independent_s / num_known)
            awaited.append(Awaited(equal.each_s, start_s, min(compute_s, end_s)))
        if not equal.places:
            per_layer = equal.count / num_layers
            num_equal = max(1, round(per_layer))
            of_unknown_place += [equal.each_s * per_layer / num_equal] * num_equal
    awaited += spread(of_unknown_place, compute_s, independent_s)
    return tuple(sorted(awaited, key=lambda collective: collective.end_s))


def _with_others(others: Sequence[Collectives], phase: _Phase, hidden: _HiddenParts, contention: float) -> _HiddenParts:
    """Returns how a phase overlaps with further collectives, of which as much as possible is hidden.

    Args:
        others: these collectives.
        phase: the computation.
        hidden: how it overlaps with those of rows of layers.
        contention: by how much computation is slower beside a collective.
    """
    exposed_s = 0.0
    hidden_s = 0.0
    for equal in others:
        if equal.is_alone:
            exposed_s += equal.count * equal.each_s
        else:
            exposed_s += equal.each_s
            hidden_s += (equal.count - 1) * equal.each_s
    # Beside collectives all the time, a phase takes longer by the contention.
    hidden_before_s = hidden.communication_s - hidden.exposed_s
    beside_s = min(hidden_s, max(0.0, phase.total_s * (1 + contention) - hidden_before_s))
    return _HiddenParts(
        hidden.communication_s + exposed_s + hidden_s,
        hidden.exposed_s + exposed_s + hidden_s - beside_s,
        hidden.slowdown_s + beside_s * contention / (1 + contention),
    )


def _hidden_in_phase(collectives: Sequence[Collectives], phase: _Phase, machine: Machine) -> _HiddenParts:
    """Returns how the collectives of one phase overlap with it."""
    rows: dict[str, list[Collectives]] = collections.defaultdict(list)
    in_layers = []
    others = []
    for equal in collectives:
        if equal.row:
            rows[equal.row].append(equal)
        elif equal.in_layers:
            in_layers.append(equal)
        else:
            others.append(equal)
    num_layers = sum(row[0].count for row in rows.values())
    if not rows and in_layers:
        num_layers = in_layers[0].in_layers
        rows[""] = []
    communication_s = 0.0
    exposed_s = 0.0
    slowdown_s = 0.0
    for row in rows.values():
        count = row[0].count if row else num_layers
        alone = _layer_round((), in_layers, phase, num_layers, machine.assumptions)
        beside = _layer_round(row, in_layers, phase, num_layers, machine.assumptions)
        for layer, rounds in ((alone, 1), (beside, count - 1)):
            result = played(layer, machine.assumptions.contention)
            communication_s += rounds * layer.communication_s
            exposed_s += rounds * result.exposed_s
            slowdown_s += rounds * result.slowdown_s
    hidden = _HiddenParts(communication_s, exposed_s, slowdown_s)
    return _with_others(others, phase, hidden, machine.assumptions.contention)


def _overlap(collectives: Sequence[Collectives], phases: Mapping[str, _Phase], machine: Machine) -> _HiddenParts:
    """Returns how collectives overlap with the computation.

    Args:
        collectives: of a microbatch.
        phases: the computation of its phases, behind which they may be hidden.
        machine: the devices.
    """
    communication_s = sum(equal.count * equal.each_s for equal in collectives)
    exposed_s = 0.0
    slowdown_s = 0.0
    for equal in collectives:
        if equal.row:
            # The first gather and the last reduction of a row of layers have nothing to overlap with.
            exposed_s += equal.each_s
    for name, phase in phases.items():
        of_phase = [equal for equal in collectives if equal.phase == name]
        hidden = _hidden_in_phase(of_phase, phase, machine)
        exposed_s += hidden.exposed_s
        slowdown_s += hidden.slowdown_s
    return _HiddenParts(communication_s, min(exposed_s, communication_s), slowdown_s)
