"""What ways to train a recipe would hold and take, before any of them is compiled: a sieve, not a measure.

Memory is that of `jshard.inspect.memory`. Time is that of matrix products, of traffic to the device's memory, and of
the collectives that stay exposed if all the others hide behind computation as far as there is some.
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
from jshard._mesh import FSDP, REPLICA, TENSOR, data_shards
from jshard._nnx import modules
from jshard._plan import ShardPlan, UnitPlan
from jshard._revise import has_inner_units, repeated_layers, revise
from jshard.cluster.machine import Machine
from jshard.cluster.variants import Variant
from jshard.engine.context import unchecked
from jshard.inspect.activations import Activations, Saved, saved_arrays, summed
from jshard.inspect.communication import Traffic, traffic_of
from jshard.inspect.explain import folded_units
from jshard.inspect.memory import Memory, kept_bytes, memory_of
from jshard.train.building import abstract_model, batch_of
from jshard.train.metrics.mfu import dense_flops
from jshard.train.model_file import ModelFile
from jshard.train.settings.overrides import override
from jshard.train.settings.recipe import Recipe

_RECOMPUTED = {"full": 4 / 3, "dots": 1.0, "none": 1.0}  # arithmetic, by that of forward and backward
# Traffic to the device's memory, by bytes: of what is saved, and of what would be saved without remat, which is read
# and written either way. As in programs that XLA compiled for GPUs.
_SAVED_PASSES, _COMPUTED_PASSES, _AGAIN_PASSES = 3.0, 3.4, 1.7
_UPDATE_PASSES = 7.0  # over the shard of the parameters: AdamW reads four arrays and writes three


_TRACED = (REPLICA, 1), (FSDP, 2)  # the smallest mesh whose parameters are sharded


@dataclasses.dataclass(frozen=True)
class Cost:
    """A step of one way, estimated.

    Args:
        variant: the way.
        memory: of one device.
        compute_s: what computes.
        communication_s: the collectives, one after another.
        exposed_s: what of them the computation waits for.
        batch_size: sequences of a step.
    """

    variant: Variant
    memory: Memory
    compute_s: float
    communication_s: float
    exposed_s: float
    batch_size: int

    @property
    def step_s(self) -> float:
        """The step."""
        return self.compute_s + self.exposed_s

    @property
    def sequence_s(self) -> float:
        """Seconds for a sequence of the batch: what is compared between batches."""
        return self.step_s / self.batch_size


@dataclasses.dataclass(frozen=True)
class _Collectives:
    """Equal ones: in forward or backward, how many, how long each, and whether nothing is computed beside them."""

    phase: str
    count: int
    each_s: float
    is_alone: bool


@dataclasses.dataclass(frozen=True)
class _Way:
    """What does not depend on the batch."""

    plan: ShardPlan
    held: Memory
    kept_bytes: int
    collectives: tuple[_Collectives, ...]


class Costs:
    """Estimates for ways to train one recipe on one machine. What they have in common is traced once.

    Args:
        model_file: the model, its annotation and its loss.
        recipe: what to train.
        machine: the devices.
    """

    def __init__(self, model_file: ModelFile, recipe: Recipe, machine: Machine) -> None:
        self.model_file, self.recipe, self.machine = model_file, recipe, machine

    def of(self, variant: Variant) -> Cost:
        """The estimate for one way; its batch divides over its mesh."""
        recipe = override(self.recipe, variant.settings)
        way = self._way(tuple(variant.mesh.items()), tuple(variant.units.items()))
        plan = way.plan
        rows = recipe.batch_size // recipe.accumulate // data_shards(variant.mesh)
        saved = self._saved(rows, str(variant.units.get("remat", "")), variant.mesh.get(TENSOR, 1))
        compute_s = self._compute_s(plan, recipe, rows, variant)
        saved = dataclasses.replace(saved, saved_bytes=saved.saved_bytes + way.kept_bytes)
        communication_s, exposed_s = self._communication_s(way, compute_s / recipe.accumulate)
        return Cost(
            variant=variant,
            memory=way.held.with_activations(saved),
            compute_s=compute_s + self._update_s(plan),
            communication_s=communication_s * recipe.accumulate,
            exposed_s=exposed_s * recipe.accumulate,
            batch_size=recipe.batch_size,
        )

    @functools.cached_property
    def remat(self) -> str:
        """The remat policy of the layers, as annotated."""
        return _remat_of(self._way(_TRACED, ()).plan, self._layer_names)

    def held_bytes(self, mesh: Mapping[str, int]) -> int:
        """What a device holds between steps, and the gradients: the least that a mesh of these degrees needs."""
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
        # Of the layers; what is traced of a step holds the others' copies, and of the layers none.
        kept = sum(kept_bytes(plan, unit) for unit in plan.units if self._is_layer(unit.name))
        return _Way(plan, held, kept, tuple(self._collectives(plan)))

    def _revised(self, mesh: tuple[tuple[str, int], ...], units: Mapping[str, Any]) -> nnx.Module:
        model = nnx.merge(*nnx.split(self._model(mesh)))
        if has_inner_units(model):  # else nothing can be varied but the mesh
            revise(model, units)
        return model

    def _saved(self, rows: int, remat: str, tensor: int) -> Activations:
        """What a device saves for so many sequences: a straight line through two numbers of them."""
        low, high = self._numbers
        few, more = (self._traced(n, remat, tensor) for n in (low, high))
        growth = lambda name: (getattr(more, name) - getattr(few, name)) // (high - low)
        at = lambda name: max(0, getattr(few, name) + (rows - low) * growth(name))
        return Activations(**{field.name: at(field.name) for field in dataclasses.fields(Activations)})

    @functools.cache  # noqa: B019
    def _traced(self, rows: int, remat: str, tensor: int) -> Activations:
        saved, whole = (
            self._arrays(rows, "" if policy == self.remat else policy, tensor)
            for policy in (remat or self.remat, "none")
        )
        return summed(saved, whole, self._depths)

    @functools.cached_property
    def _depths(self) -> Collection[int]:
        return repeated_layers(self._model(_TRACED)).values()

    @functools.cached_property
    def _numbers(self) -> tuple[int, int]:
        """Sequences on a device that are traced: such that no array of them looks like a stack of the layers."""
        taken = {n for depth in self._depths if depth > 1 for n in (depth, depth - 1)}
        low = next(n for n in itertools.count(1) if not taken & {n, n + 1, 2 * n, 2 * n + 2})
        return low, low + 1

    @functools.cache  # noqa: B019
    def _arrays(self, rows: int, remat: str, tensor: int) -> Saved:
        units = {"reshard_after_forward": True} | ({"remat": remat} if remat else {})
        model = self._revised((*_TRACED, (TENSOR, tensor)), units)
        with unchecked():
            return saved_arrays(model, self.model_file.loss_fn, self._batch(2 * rows), wrt=self.model_file.wrt)

    def _batch(self, rows: int) -> Any:
        return batch_of(self.model_file, self.recipe, rows)

    # ---- times ---------------------------------------------------------------------------------------------------

    def _compute_s(self, plan: ShardPlan, recipe: Recipe, rows: int, variant: Variant) -> float:
        """Forward and backward of all microbatches on one device."""
        a = self.machine.assumptions
        flops = self._flops(plan, recipe) / self.machine.num_devices
        remat = _remat_of(plan, self._layer_names)
        products_s = flops * _RECOMPUTED.get(remat, 1.0) / (a.flops_per_s * a.matmul_efficiency)
        tensor = variant.mesh.get(TENSOR, 1)
        saved = self._saved(rows, str(variant.units.get("remat", "")), tensor).saved_bytes
        passes = _COMPUTED_PASSES + (_AGAIN_PASSES if remat == "full" else 0.0)
        traffic = _SAVED_PASSES * saved + passes * self._saved(rows, "none", tensor).saved_bytes
        return products_s + recipe.accumulate * traffic / (a.memory_bytes_per_s * a.memory_efficiency)

    def _update_s(self, plan: ShardPlan) -> float:
        a = self.machine.assumptions
        return _UPDATE_PASSES * plan.bytes_per_device / (a.memory_bytes_per_s * a.memory_efficiency)

    def _flops(self, plan: ShardPlan, recipe: Recipe) -> float:
        if self.model_file.flops is not None:
            return self.model_file.flops(recipe)[0]
        tokens = recipe.batch_size * recipe.sequence_length
        return dense_flops(num_parameters=plan.num_parameters, num_frozen=plan.num_frozen, num_tokens=tokens)[0]

    def _communication_s(self, way: _Way, compute_s: float) -> tuple[float, float]:
        """All collectives of a microbatch, and what of them is exposed beside its computation."""
        total, exposed = 0.0, 0.0
        there_s = {"forward": compute_s * (0.25 if _remat_of(way.plan, self._layer_names) == "full" else 1 / 3)}
        there_s["backward"] = compute_s - there_s["forward"]
        for one in way.collectives:
            total += one.count * one.each_s
            # The first gather and the last reduction of a row of layers find nothing beside them.
            exposed += one.each_s * (one.count if one.is_alone else 1)
            there_s[one.phase] -= 0.0 if one.is_alone else (one.count - 1) * one.each_s
        exposed += sum(max(0.0, -left_s) for left_s in there_s.values())
        return total, min(exposed, total)

    def _collectives(self, plan: ShardPlan) -> Iterator[_Collectives]:
        """Those of forward and backward, of each kind of unit."""
        root = plan.units[0].name
        for _, units, unit in folded_units(plan):
            layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
            for phase, kind, each_s in self._times(plan, unit, layers):
                alone = unit.name == root or (unit.prefetch == "0" and kind == "all-gather")
                yield _Collectives(phase, units * layers, each_s, alone)

    def _times(self, plan: ShardPlan, unit: UnitPlan, layers: int) -> Iterator[tuple[str, str, float]]:
        """The collectives of one layer of a unit: (forward or backward, kind, seconds)."""
        of_unit = dataclasses.replace(plan, leaves=plan.unit_leaves(unit.name))
        for one in (t for t in traffic_of(of_unit) if t.group_size > 1):
            phase = "forward" if one.purpose == "parameters for forward" else "backward"
            group = _positions(one, dict(plan.mesh))
            yield phase, one.kind, self.machine.assumptions.transfer_s(one.kind, one.full_bytes / layers, group)


def _remat_of(plan: ShardPlan, layers: frozenset[str]) -> str:
    """The remat policy of the layers."""
    found = [unit.remat for unit in plan.units if unit.name in layers]
    return found[0] if found else "none"


def _positions(one: Traffic, mesh: Mapping[str, int]) -> range | list[int]:
    """Where the first group of a collective lies in the mesh, whose last axis is the nearest."""
    stride, strides = 1, {}
    for axis, degree in reversed(list(mesh.items())):
        strides[axis], stride = stride, stride * degree
    if len(one.axes) == 1:
        return range(0, one.group_size * strides[one.axes[0]], strides[one.axes[0]])
    outer, inner = one.axes
    return [
        i * strides[outer] + j * strides[inner] for i in range(mesh.get(outer, 1)) for j in range(mesh.get(inner, 1))
    ]
