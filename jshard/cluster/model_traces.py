"""What estimates know of a recipe's model from traces: of no machine, and of no batch but small ones.

A search considers many configurations, so little is traced for each. What a model saves for backward grows linearly
with the batch, and does not depend on the number of data shards. So it is traced for two small batches on two devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

import jax.numpy as jnp
from flax import nnx

import jshard as js
from jshard._types import PyTree
from jshard.api.revise import has_inner_units, plan_of_layers, repeated_layers, revise_layers
from jshard.cluster.compile import UnitSettings
from jshard.cluster.model_costs import ModelTraffic, divides_all_that_grows, over_other_tensor, traffic_of_rows
from jshard.errors import FourPartError
from jshard.inspect.activations import Activations, Saved, over_tensor, saved_arrays, size_of_part, summed
from jshard.inspect.partitioned import ArrayForm, ModelCollective, PartitionedStep, partitioned_step
from jshard.inspect.traced_program import SizeOf
from jshard.inspect.traced_step import TracedGradient, TracedStep, step_for_rows, traced_gradient
from jshard.kernels.attention_over_context import SplitHeads, noted_heads
from jshard.plans.mesh import CONTEXT, EXPERT, FSDP, REPLICA, TENSOR, data_shards
from jshard.plans.model_axes import axes_in, axes_of
from jshard.plans.placement import Selection
from jshard.plans.plan import ShardPlan
from jshard.plans.remat import DOTS, NONE
from jshard.plans.units import modules
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe

# Settings as tuples, so that they are keys of a cache.
Degrees: TypeAlias = tuple[tuple[str, int], ...]
Settings: TypeAlias = tuple[tuple[str, bool | int | str | None], ...]

_MESH: Degrees = ((REPLICA, 1), (FSDP, 2))  # the smallest mesh with sharded parameters
# The degree of `tensor` that is traced for all: an array has as many parts, or is whole. And that of `expert`: a device
# has as many tokens, and sends as many, with any number of devices along it. Of `context`, where a device has a part of
# all work on a sequence: of more sequences it has as many tokens as of one with fewer devices.
_DEGREE = 2
# Sequences per device that are traced: so many that what does not grow with them is little; they divide as those of
# real batches do, and are the size of no other dim. All traces are of these, so that some serve several figures.
_FEWEST_ROWS = 72
_MORE_ROWS = 8


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Degrees that are traced in the place of others.

    Attributes:
        axes: the degrees.
        rows_factor: with so many sequences for one, a device has as much of them as with the other degrees.
    """

    axes: Degrees
    rows_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class _Partitioned:
    """A step as partitioned, and the heads of attention whose sequence is split there."""

    step: PartitionedStep
    heads: frozenset[SplitHeads]


class ModelTraces:
    """Traces of one recipe's model, each made once.

    Arguments that several methods have: `rows` are the sequences of a device; `remat` is the policy of the layers,
    empty as annotated; `axes` are the degrees of the axes that split each sequence, or the layers.
    """

    def __init__(self, model_file: ModelFile, recipe: Recipe) -> None:
        self.model_file = model_file
        self.recipe = recipe

    # ---- the model

    @property
    def trained(self) -> Selection:
        """Returns the parameters that are trained."""
        return self.model_file.trained(self.recipe)

    @functools.cache  # noqa: B019  (a command makes one of these)
    def model(self, mesh: Degrees) -> nnx.Module:
        """Returns the annotated model on a mesh, without arrays."""
        degrees = dict(mesh)
        abstract_mesh = js.mesh(**degrees, devices=math.prod(degrees.values()))
        return abstract_model(self.model_file, self.recipe, abstract_mesh)

    def revised(self, mesh: Degrees, units: UnitSettings) -> nnx.Module:
        """Returns the model with other settings of its units."""
        # A copy: `revise_layers` changes it, and the model is in the cache.
        model = nnx.merge(*nnx.split(self.model(mesh)))
        if has_inner_units(model):  # else only the mesh can vary
            revise_layers(model, units)
        return model

    @functools.cache  # noqa: B019
    def plan(self, mesh: Degrees, units: Settings) -> ShardPlan:
        """Returns the plan of the model on a mesh, with other settings of its units."""
        model = self.model(mesh)
        if not has_inner_units(model):  # only the mesh can vary
            return js.plan(model, wrt=self.trained)
        return plan_of_layers(model, dict(units), wrt=self.trained)

    def size_of_shards(self, plan: ShardPlan, remat: str, axes: Degrees) -> float:
        """Returns the size of a device's shards in a plan, relative to those of the mesh that is traced."""
        # In a trace, the arrays of a shard are whole over `tensor`.
        stand_in = self.stand_in(remat, axes)
        traced_axes = tuple((axis, degree) for axis, degree in stand_in.axes if axis != TENSOR)
        return plan.bytes_per_device / self.plan((*_MESH, *traced_axes), ()).bytes_per_device

    @functools.cached_property
    def remat(self) -> str:
        """Returns the remat policy of the layers, as annotated."""
        return self.remat_in(self.plan(_MESH, ()))

    def remat_in(self, plan: ShardPlan) -> str:
        """Returns the remat policy of the layers in a plan, which is the same for all."""
        for unit in plan.units:
            if unit.name in self.layer_names:
                return unit.remat
        return NONE

    @functools.cached_property
    def layer_names(self) -> frozenset[str]:
        """Returns the paths of the layers that the model has many of."""
        model = self.model(_MESH)
        layer_ids = {id(layer) for layer in repeated_layers(model)}
        return frozenset("/".join(map(str, path)) for path, module in modules(model) if id(module) in layer_ids)

    @functools.cached_property
    def depths(self) -> Collection[int]:
        """Returns the numbers of layers that the model has of one kind."""
        return repeated_layers(self.model(_MESH)).values()

    @property
    def num_layers(self) -> int:
        """Returns how many layers the model has; 1 if it has none that are repeated."""
        return max(sum(self.depths), 1)

    @functools.cached_property
    def has_sequences(self) -> bool:
        """Returns whether the examples are sequences of tokens, as long as the recipe has it."""
        inputs = batch_of(self.model_file, self.recipe, 2).get("inputs")
        if inputs is None or len(inputs.shape) != 2:
            return False
        return inputs.shape[1] == self.recipe.sequence_length and jnp.issubdtype(inputs.dtype, jnp.integer)

    def largest_degree(self, axis: str) -> int:
        """Returns over how many devices along one of its own axes the model can be split; 1 without such an axis."""
        try:
            plan = self.plan((*_MESH, (axis, 2)), ())
        except FourPartError:  # it refuses the axis
            return 1
        sizes = []
        for leaf in plan.leaves:
            placement = leaf.placement
            # Not those that are only stored in parts over it, as every parameter is over `expert` and `context`.
            if axis in placement.axes:
                continue
            for size, entry in zip(placement.shape, placement.spec, strict=False):
                if axis in axes_of(entry):
                    sizes.append(size)
        return min(sizes, default=1)

    # ---- which degrees are traced in the place of others

    @functools.cache  # noqa: B019
    def stand_in(self, remat: str, axes: Degrees) -> StandIn:
        """Returns the degrees that are traced in the place of some."""
        degrees = dict(axes)
        if EXPERT in degrees:
            degrees[EXPERT] = _DEGREE
        if CONTEXT in degrees:
            return self._on_fewer_parts(remat, degrees)
        if TENSOR in degrees:
            degrees[TENSOR] = _DEGREE
        return StandIn(tuple(degrees.items()))

    def _on_fewer_parts(self, remat: str, degrees: Mapping[str, int]) -> StandIn:
        """Returns degrees for which a device does the same with sequences that are split into fewer parts."""
        context = degrees[CONTEXT]
        tensor = degrees.get(TENSOR, 1)
        traced_tensor = _DEGREE if self.largest_degree(TENSOR) >= _DEGREE else 1
        fewest_parts = _with_degrees(degrees, _DEGREE, traced_tensor)
        itself = StandIn(tuple(degrees.items()))
        num_tokens = self.recipe.sequence_length
        if num_tokens % max(_DEGREE, context) or not self._shares_all_work(remat, fewest_parts):
            return itself
        low, _ = self.low_and_high_rows
        heads = self._partitioned(low, self._unless_annotated(remat), fewest_parts).heads
        # In the order of their size; more parts than wanted stand in for fewer where these repeat heads of keys.
        for parts in _powers_of_two(context * tensor):
            if num_tokens % max(parts, context):
                break
            if all(each.computes_alike((context, tensor), (parts, traced_tensor)) for each in heads):
                return StandIn(_with_degrees(degrees, parts, traced_tensor), parts / context)
        return itself

    @functools.cache  # noqa: B019
    def _shares_all_work(self, remat: str, axes: Degrees) -> bool:
        """Returns whether the devices along `context` share all work on a sequence."""
        low, high = self.low_and_high_rows
        remat = self._unless_annotated(remat)
        return divides_all_that_grows(self.collectives(low, remat, axes), self.collectives(high, remat, axes), CONTEXT)

    # ---- what a device saves for backward

    def saved(self, rows: int, remat: str, axes: Degrees) -> Activations:
        """Returns the bytes that a device saves: linear, from two traced batch sizes."""
        stand_in = self.stand_in(remat, axes)
        low, high = self.low_and_high_rows
        tensor = dict(axes).get(TENSOR, 1)
        at_low = self._saved_of_traced(low, remat, stand_in.axes, tensor)
        at_high = self._saved_of_traced(high, remat, stand_in.axes, tensor)
        more_rows = rows * stand_in.rows_factor - low
        sums = {}
        for name in ("saved_bytes", "outside_bytes", "offloaded_bytes"):
            value = getattr(at_low, name)
            growth = (getattr(at_high, name) - value) // (high - low)
            sums[name] = max(0, int(value + more_rows * growth))
        return Activations(**sums)

    @functools.cache  # noqa: B019
    def _saved_of_traced(self, rows: int, remat: str, axes: Degrees, tensor: int) -> Activations:
        """Returns the bytes that a device saves for a batch that is traced, with some degree of `tensor`."""
        traced = self._arrays(rows, self._unless_annotated(remat), axes)
        if TENSOR in dict(axes):
            traced = over_tensor(traced, traced_degree=dict(axes)[TENSOR], degree=tensor)
        return summed(traced, self.depths)

    @functools.cache  # noqa: B019
    def _arrays(self, rows: int, remat: str, axes: Degrees) -> Saved:
        model = self._traced_model(remat, axes)
        return saved_arrays(model, self.model_file.loss, self._batch(rows, axes), wrt=self.trained)

    @functools.cached_property
    def low_and_high_rows(self) -> tuple[int, int]:
        """Returns the traced numbers of sequences per device, with which no array looks like a stack of layers."""
        taken = set()
        for depth in self.depths:
            if depth > 1:
                taken |= {depth, depth - 1}
        low = _FEWEST_ROWS
        # Twice as many, and four times: the batch has the rows of both devices of the mesh.
        while not taken.isdisjoint({low, 2 * low, 4 * low}):
            low += _MORE_ROWS
        return low, 2 * low

    # ---- what a device computes

    def step(self, rows: int, remat: str, axes: Degrees) -> TracedStep:
        """Returns forward and backward of a microbatch on a device: linear, from two traced batch sizes."""
        stand_in = self.stand_in(remat, axes)
        low, high = self.low_and_high_rows
        remat = self._unless_annotated(remat)
        tensor = dict(axes).get(TENSOR, 1)
        at_low = self._traced_step(low, remat, stand_in.axes, tensor)
        at_high = self._traced_step(high, remat, stand_in.axes, tensor)
        return step_for_rows(at_low, at_high, (low, high), rows * stand_in.rows_factor)

    @functools.cache  # noqa: B019
    def _traced_step(self, rows: int, remat: str, axes: Degrees, tensor: int) -> TracedStep:
        gradient = self._gradient(rows, remat, axes)
        if TENSOR not in dict(axes):
            return gradient.step()
        return gradient.step(self._size_over_tensor(rows, remat, axes, tensor), tensor)

    @functools.cache  # noqa: B019
    def _gradient(self, rows: int, remat: str, axes: Degrees) -> TracedGradient:
        """Returns the trace of a step, which serves all degrees of `tensor`."""
        model = self._traced_model(remat, axes)
        return traced_gradient(model, self.model_file.loss, self._batch(rows, axes), wrt=self.trained)

    def _size_over_tensor(self, rows: int, remat: str, axes: Degrees, tensor: int) -> SizeOf:
        """Returns the bytes of a value that is split over `tensor` as saved values of its form are."""
        shares: dict[ArrayForm, float] = {}
        # Under both policies, the results of all products and most other values of a layer are saved.
        for policy in (NONE, DOTS):
            for array in self._arrays(rows, self._unless_annotated(policy), axes):
                item_bytes, shape = array.form
                shares[array.form] = array.over_tensor
                if shape and shape[0] in self.depths:
                    shares[ArrayForm(item_bytes, shape[1:])] = array.over_tensor  # of a layer, in a loop
        # A kernel saves values of forms that the plain operations in its place do not have; of others these know more.
        shares |= self._partitioned(rows, remat, axes).step.over_tensor
        # A product with a matrix that is split is split itself, as is the product that is the matrix's gradient.
        for shape in _split_over_tensor(self.plan((*_MESH, *axes), ())):
            for item_bytes in (2, 4):
                shares[ArrayForm(item_bytes, shape)] = 1.0
        return functools.partial(size_of_part, shares=shares, degree=tensor)

    # ---- what the model sends over its own axes

    def traffic(self, rows: int, remat: str, axes: Degrees) -> Iterator[ModelTraffic]:
        """Yields the collectives of the model over its own axes, for a batch."""
        if not axes:
            return
        stand_in = self.stand_in(remat, axes)
        low, high = self.low_and_high_rows
        remat = self._unless_annotated(remat)
        counts = []
        for traced_rows in (low, high):
            traced = self.collectives(traced_rows, remat, stand_in.axes)
            traced_degree = dict(stand_in.axes).get(TENSOR, 1)
            degree = dict(axes).get(TENSOR, 1)
            counts.append(over_other_tensor(traced, traced_degree=traced_degree, degree=degree))
        at_low, at_high = counts
        yield from traffic_of_rows(at_low, at_high, (low, high), rows * stand_in.rows_factor)

    def collectives(self, rows: int, remat: str, axes: Degrees) -> Mapping[ModelCollective, int]:
        """Returns the collectives of the model over its own axes, with their numbers, for a batch that is traced."""
        return self._partitioned(rows, remat, axes).step.collectives

    @functools.cache  # noqa: B019
    def _partitioned(self, rows: int, remat: str, axes: Degrees) -> _Partitioned:
        """Returns what the partitioner makes of a step, for a batch that is traced."""
        model = self._traced_model(remat, axes)
        with noted_heads() as heads:
            step = partitioned_step(model, self.model_file.loss, self._batch(rows, axes), wrt=self.trained)
        return _Partitioned(step, frozenset(heads))

    # ---- for all traces

    def _unless_annotated(self, remat: str) -> str:
        """Returns a policy; empty if the layers have it anyway, so that one trace serves both."""
        return "" if remat == self.remat else remat

    def _traced_model(self, remat: str, axes: Degrees) -> nnx.Module:
        """Returns the model that is traced, under a remat policy."""
        units: dict[str, bool | str] = {"reshard_after_forward": True}
        if remat:
            units["remat"] = remat
        return self.revised((*_MESH, *axes), units)

    def _batch(self, rows: int, axes: Degrees) -> PyTree:
        """Returns the shapes of a batch with so many rows for each device of the mesh that is traced."""
        num_rows = rows * data_shards(dict((*_MESH, *axes)))
        return batch_of(self.model_file, self.recipe, num_rows)


def _split_over_tensor(plan: ShardPlan) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of a layer's matrices that are split over `tensor`, with their dims in any order."""
    for leaf in plan.leaves:
        placement = leaf.placement
        if TENSOR not in axes_in(placement.spec):
            continue
        layer_dims = placement.layer_dims if placement.layers > 1 else 0
        yield from itertools.permutations(placement.shape[layer_dims:])


def alike(axes: Degrees) -> Degrees:
    """Returns degrees for which a device saves, computes and sends the same: any number of devices along `expert`."""
    return tuple((axis, _DEGREE if axis == EXPERT else degree) for axis, degree in axes)


def _with_degrees(degrees: Mapping[str, int], context: int, tensor: int) -> Degrees:
    """Returns degrees with other ones of these two axes, without one of 1."""
    changed = {axis: degree for axis, degree in degrees.items() if axis not in (CONTEXT, TENSOR)}
    changed[CONTEXT] = context
    if tensor > 1:
        changed[TENSOR] = tensor
    return tuple(changed.items())


def _powers_of_two(limit: int) -> Iterator[int]:
    """Yields 2, 4, 8 and so on, up to a limit."""
    power = 2
    while power <= limit:
        yield power
        power *= 2
