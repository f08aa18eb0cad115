"""What ways to train a recipe would hold and take, before any of them is compiled: a sieve, not a measure.

Memory is that of `jshard.inspect.memory`. Time is that of matrix products, of traffic to the device's memory, and of
what stays exposed of collectives and of copies from and to the host, if as much as can hides behind computation. What
the model sends over axes of its own stands between one product and the next, and hides behind nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

from flax import nnx

import jshard as js
from jshard.api.fully_shard import has_inner_units, repeated_layers, revise
from jshard.cluster.compile import Variant
from jshard.cluster.estimate import Machine
from jshard.cluster.traffic import Collectives, at_rows, exposed_s, host_copies, own_s, own_traffic, planned
from jshard.inspect.communication import Amounts
from jshard.inspect.memory import Activations, Memory, Saved, kept_bytes, memory_of, saved_arrays, summed
from jshard.plans.mesh import EXPERT, FSDP, REPLICA, TENSOR, data_shards
from jshard.plans.plan import ShardPlan
from jshard.plans.units import modules
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe

_RECOMPUTED = {"full": 4 / 3, "dots": 1.0, "none": 1.0}  # arithmetic, by that of forward and backward
# Traffic to the device's memory, by bytes: of what is saved, and of what would be saved without remat, which is read
# and written either way. As in programs that XLA compiled for GPUs.
_SAVED_PASSES, _COMPUTED_PASSES, _AGAIN_PASSES = 3.0, 3.4, 1.7
_UPDATE_PASSES = 7.0  # over the shard of the parameters: AdamW reads four arrays and writes three


_TRACED = (REPLICA, 1), (FSDP, 2)  # the smallest mesh whose parameters are sharded
KNOWN_RATE = "--assume host_bytes_per_s=50e9 states it"

_Waits = tuple[float, float]
"""Seconds of a step: all, and what of it the computation waits for."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """A step of one way, estimated.

    Args:
        variant: the way.
        memory: of one device.
        compute_s: what computes.
        communication_s: the collectives, one after another.
        exposed_s: what of them, and of copies from and to the host, the computation waits for.
        own_s: what of the collectives runs over the model's own axes: the computation waits for all of it.
        host_s: copies from and to the host.
        left_out: what has no price in it, in words.
    """

    variant: Variant
    memory: Memory
    compute_s: float
    communication_s: float
    exposed_s: float
    own_s: float = 0.0
    host_s: float = 0.0
    left_out: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """The step."""
        return self.compute_s + self.exposed_s


@dataclasses.dataclass(frozen=True)
class _Way:
    """What does not depend on the batch."""

    plan: ShardPlan
    held: Memory
    kept_bytes: int
    collectives: tuple[Collectives, ...]


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
        parts, compute_s = recipe.accumulate, self._compute_s(plan, recipe, rows, variant)
        saved = dataclasses.replace(saved, saved_bytes=saved.saved_bytes + way.kept_bytes)
        memory, there_s = way.held.with_activations(saved), self._there_s(plan, compute_s / parts)
        (planned_s, waits_s), own_s = exposed_s(way.collectives, there_s), self._own_s(variant, rows)
        host_s, host_waits_s = self._copies_s(plan, memory, there_s | {"update": self._update_s(plan)}, parts)
        return Cost(
            variant=variant,
            memory=memory,
            compute_s=compute_s + self._update_s(plan),
            communication_s=(planned_s + own_s) * parts,
            exposed_s=(waits_s + own_s) * parts + host_waits_s,
            own_s=own_s * parts,
            host_s=host_s,
            left_out=self._left_out(variant, plan, memory, rows),
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
        return _Way(plan, held, kept, tuple(planned(plan, self.machine.assumptions)))

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
        return saved_arrays(model, self.model_file.loss_fn, self._batch(2 * rows), wrt=self.model_file.wrt)

    def _batch(self, rows: int) -> Any:
        return batch_of(self.model_file, self.recipe, rows)

    # ---- times ---------------------------------------------------------------------------------------------------

    def _compute_s(self, plan: ShardPlan, recipe: Recipe, rows: int, variant: Variant) -> float:
        """Forward and backward of all microbatches on one device."""
        a = self.machine.assumptions
        flops = self.model_file.step_flops(recipe, plan)[0] / self.machine.num_devices
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

    def _there_s(self, plan: ShardPlan, compute_s: float) -> dict[str, float]:
        """What of a microbatch's computation is forward, and what backward."""
        forward_s = compute_s * (0.25 if _remat_of(plan, self._layer_names) == "full" else 1 / 3)
        return {"forward": forward_s, "backward": compute_s - forward_s}

    def _own_s(self, variant: Variant, rows: int) -> float:
        """What the collectives of a microbatch over the model's own axes take."""
        found = self._own(variant, rows)
        return 0.0 if found is None else own_s(found, variant.mesh, self.machine.assumptions)

    def _own(self, variant: Variant, rows: int) -> Amounts | None:
        """Those of so many sequences on a device; None where they are not known."""
        degrees = variant.mesh.get(EXPERT, 1), variant.mesh.get(TENSOR, 1)
        if max(degrees) == 1:
            return {}
        remat = str(variant.units.get("remat", ""))
        low = self._sequences(degrees[0])
        few, more = (self._sent(n, "" if remat == self.remat else remat, *degrees) for n in (low, low + 1))
        return None if few is None or more is None else at_rows(few, more, (low, low + 1, rows))

    def _sequences(self, expert: int) -> int:
        """Sequences on a device that are traced for what they send: such that no dim of a parameter looks like a batch.

        A number for each of 8 experts would be split as 8 sequences are.
        """
        sizes = {n for leaf in self._way(_TRACED, ()).plan.leaves for n in leaf.placement.shape}
        is_free = lambda n: not sizes & {_batch_size(n, expert), _batch_size(n + 1, expert)}
        return next(n for n in itertools.count(2) if is_free(n))

    @functools.cache  # noqa: B019
    def _sent(self, rows: int, remat: str, expert: int, tensor: int) -> Amounts | None:
        model = self._revised((*_TRACED, (EXPERT, expert), (TENSOR, tensor)), {"remat": remat} if remat else {})
        batch = self._batch(_batch_size(rows, expert))
        return own_traffic(model, self.model_file.loss_fn, batch, wrt=self.model_file.wrt)

    def _copies_s(self, plan: ShardPlan, memory: Memory, there_s: Mapping[str, float], parts: int) -> _Waits:
        """What copies from and to the host take in a step, and what of it nothing is computed beside."""
        rate, total, exposed = self.machine.assumptions.host_bytes_per_s, 0.0, 0.0
        if not rate:
            return 0.0, 0.0
        for phase, copies in host_copies(plan, memory).items():
            times, took_s = 1 if phase == "update" else parts, copies.time_s(rate)
            total += times * took_s
            exposed += times * max(0.0, took_s - there_s[phase])
        return total, exposed

    def _left_out(self, variant: Variant, plan: ShardPlan, memory: Memory, rows: int) -> tuple[str, ...]:
        """What an estimate of a way has no price for."""
        found = []
        if self._own(variant, rows) is None:
            found.append("collectives over tensor and expert, which this JAX does not show before it compiles")
        if not all(unit.gathered for unit in plan.units):
            found.append("what units that are never gathered send")
        if memory.host_bytes and not self.machine.assumptions.host_bytes_per_s:
            found.append(f"copies to and from the host, whose rate is not known: {KNOWN_RATE}")
        return tuple(found)


def _batch_size(rows: int, expert: int) -> int:
    """The traced batch that has so many sequences on each device."""
    return dict(_TRACED)[FSDP] * expert * rows


def _remat_of(plan: ShardPlan, layers: frozenset[str]) -> str:
    """The remat policy of the layers."""
    found = [unit.remat for unit in plan.units if unit.name in layers]
    return found[0] if found else "none"
