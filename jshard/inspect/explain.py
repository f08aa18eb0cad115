"""`explain`: the plan in readable form: where each parameter is stored and why, and the memory and traffic."""

import dataclasses
import json
from collections.abc import Callable, Iterator

import flax.linen as nn
from flax import nnx
from rich.console import Group, RenderableType
from rich.text import Text

from jshard._types import PyTree
from jshard.engine.layer_stacks import as_traced
from jshard.engine.mixing import Mixing, mixing_of
from jshard.errors import AnnotationError
from jshard.inspect.activations import activations
from jshard.inspect.communication import Traffic, traffic_of
from jshard.inspect.memory import AnyOptimizer, Memory, memory_of, unit_bytes
from jshard.inspect.plan_tables import (
    folded_units,
    headline,
    in_own_classes,
    leaves_table,
    memory_table,
    mixing_table,
    notes_on,
    stages_table,
    traffic_table,
    units_table,
)
from jshard.inspect.tables import Printed, dicts_of
from jshard.linen.annotation import annotation_of
from jshard.plans.homes import place_of
from jshard.plans.memories import is_placed
from jshard.plans.mesh import PIPE
from jshard.plans.placement import Selection
from jshard.plans.plan import ShardPlan, record_of, unsharded_class
from jshard.plans.plan import plan as make_plan
from jshard.plans.replication import Other, others_of
from jshard.plans.units import dotted, numberless, occurrences


def explain(
    model_or_plan: nnx.Module | nn.Module | ShardPlan,
    *,
    optimizer: AnyOptimizer | None = None,
    loss_fn: Callable[..., PyTree] | None = None,
    batch: PyTree = None,
    wrt: Selection = nnx.Param,
    leaves: bool = False,
) -> "Explanation":
    """Reports where every parameter of an annotated model is placed, and the memory and traffic of training.

    Nothing is compiled and no arrays are needed: an abstract model of any size works. Figures that follow from the
    plan are separate from estimates. After a call of the model, its communication for mixing the examples of the
    batch is listed by line.

    Args:
        model_or_plan: an annotated model, concrete or abstract, or its plan.
        optimizer: an `nnx.Optimizer` or an Optax transformation, to count its state; AdamW by default.
        loss_fn: function of the model and the batch. With it and `batch`, activations of a model are estimated.
        batch: the global batch, abstract or real; a tuple is passed as several arguments of `loss_fn`.
        wrt: the parameters of a model that are trained, as in `js.plan`.
        leaves: also list every parameter.

    Returns:
        An `Explanation`: print it, show it in a notebook, or take its JSON.

    Raises:
        AnnotationError: the root of the model is not annotated.

    Examples:
        >>> print(js.explain(model, optimizer=optax.adamw(3e-4)))
    """
    plan = model_or_plan if isinstance(model_or_plan, ShardPlan) else make_plan(model_or_plan, wrt=wrt)
    if loss_fn is not None and annotation_of(model_or_plan) is not None:
        raise AnnotationError(
            "The activations of a Linen model are not estimated.",
            where=f"explain({type(model_or_plan).__name__}, loss_fn=...)",
            why="the estimate calls the loss with an nnx model.",
            do="print(js.audit(jax.jit(step).lower(state, batch).compile(), model=model))  # the compiler's figures",
        )
    # In this order: records of calls are found by placements as they were annotated, and `as_traced` changes the layers
    # in some.
    mixing = mixing_of(plan)
    annotated = plan
    plan = as_traced(plan)
    if not isinstance(model_or_plan, nnx.Module):
        return Explanation(plan, memory_of(plan, optimizer=optimizer), traffic_of(plan), leaves, mixing=mixing)

    model = model_or_plan
    saved = None
    if loss_fn is not None and batch is not None:
        saved = activations(model, loss_fn, batch, wrt=wrt)
        # That was a call of the model: it may be the first to show its loops on stages, and to choose what they keep.
        traced = as_traced(annotated)
        plan = dataclasses.replace(plan, units=traced.units, stages=traced.stages)
    memory = memory_of(plan, optimizer=optimizer)
    if saved is not None:
        memory = memory.with_activations(saved)
    return Explanation(
        plan,
        memory,
        traffic_of(plan),
        leaves,
        others=tuple(_arrays_without_plan(model, plan)),
        mixing=mixing,
        strays=tuple(_strays(model)),
    )


def _arrays_without_plan(model: nnx.Module, plan: ShardPlan) -> Iterator[Other]:
    """Yields the float arrays of a model that are not in its plan."""
    planned = {leaf.path for leaf in plan.leaves}
    for array in others_of(model):
        if dotted(array.path) not in planned:
            yield array


def _strays(model: nnx.Module) -> Iterator[str]:
    """Yields the parameters of an annotated model that are not where the plan places them, as text."""
    root = record_of(model)
    for variable, path, _ in occurrences(model):
        planned = root.by_path.get(path)  # of a tied one, its first path
        if planned is not None and not is_placed(variable, planned.placement, root.mesh):
            value = variable.get_raw_value()
            yield f"{numberless(dotted(path))} {list(value.shape)}: {place_of(value)}"


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """The result of `js.explain`. `print` it; a notebook displays it; `to_json` is for programs."""

    plan: ShardPlan
    memory: Memory  # bytes on one device
    traffic: tuple[Traffic, ...]  # the collectives of one step
    leaves: bool = False  # whether every parameter is listed
    others: tuple[Other, ...] = ()  # float arrays of an nnx model that are not parameters, and in no other figure
    mixing: tuple[Mixing, ...] = ()  # communication of the last traced calls for mixing the examples of the batch
    strays: tuple[str, ...] = ()  # parameters of an nnx model that are not where the plan places them

    def __rich__(self) -> Group:
        tables = [units_table(self.plan)]
        if self.leaves:
            tables.append(leaves_table(self.plan))
        if self.plan.stages:
            tables.append(stages_table(self.plan.stages, dict(self.plan.mesh)[PIPE]))
        tables += [memory_table(self.memory), traffic_table(self.traffic, self.plan)]
        if self.mixing:
            tables.append(mixing_table(self.mixing))
        parts: list[RenderableType] = [Text(headline(self.plan))]
        for table in tables:
            parts += [Text(), table]
        return Group(*parts, Text(), *map(Text, notes_on(self.plan, self.others, self.strays)))

    def to_json(self) -> str:
        """Returns everything as JSON text; `ShardPlan.from_json` reads the plan in it."""
        values = {
            "plan": json.loads(self.plan.to_json()),
            "num_parameters": self.plan.num_parameters,
            "parameter_bytes": self.plan.logical_bytes,
            "units": self._units_json(),
            "memory_per_device": self._memory_json(),
            "communication_per_step": self._traffic_json(),
            "mixing": dicts_of(self.mixing),
            "replicated": self._replicated_json(),
            "not_placed_as_planned": list(self.strays),
            "other_arrays": self._others_json(),
        }
        return json.dumps(values, indent=1)

    def _units_json(self) -> list[dict[str, object]]:
        units = []
        for name, count, unit in folded_units(self.plan):
            units.append({"unit": name, "count": count, "gathered_bytes": unit_bytes(self.plan, unit.name)})
        return units

    def _memory_json(self) -> dict[str, object]:
        sums = {
            "held_bytes": self.memory.held_bytes,
            "step_bytes": self.memory.step_bytes,
            "host_bytes": self.memory.host_bytes,
        }
        memory: dict[str, object] = {**dataclasses.asdict(self.memory), **sums}
        if self.memory.stages is None:
            del memory["stages"]
        return memory

    def _traffic_json(self) -> list[dict[str, object]]:
        return [{**dataclasses.asdict(row), "wire_bytes": row.wire_bytes} for row in self.traffic]

    def _others_json(self) -> list[dict[str, object]]:
        return [{**dataclasses.asdict(array), "path": dotted(array.path)} for array in self.others]

    def _replicated_json(self) -> dict[str, str]:
        """Returns why arrays are replicated, by path."""
        reasons = {leaf.path: leaf.placement.because for leaf in self.plan.replicated}
        for array in in_own_classes(self.others):
            reasons[dotted(array.path)] = unsharded_class(array.kind)
        return reasons
