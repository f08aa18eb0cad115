"""`explain`: the plan in readable form: where each parameter is stored and why, and the memory and traffic."""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
from flax import nnx
from rich.console import Group
from rich.text import Text

from jshard._text import folded_names, human_bytes, human_count, joined_name, name_pattern
from jshard.engine.layer_stacks import as_traced
from jshard.engine.mixing import Mixing, mixing_of
from jshard.errors import AnnotationError
from jshard.inspect.communication import Traffic, traffic_of
from jshard.inspect.memory import Memory, activations, memory_of, unit_bytes
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.linen.annotation import annotation_of
from jshard.plans.checks import ARRAY, Other, others_of
from jshard.plans.homes import place_of
from jshard.plans.memories import is_placed
from jshard.plans.plan import LeafPlan, ShardPlan, UnitPlan, record_of, unsharded_class
from jshard.plans.plan import plan as make_plan
from jshard.plans.units import dotted, numberless, occurrences


def explain(
    model_or_plan: nnx.Module | nn.Module | ShardPlan,
    *,
    optimizer: Any = None,
    loss: Callable[..., Any] | None = None,
    batch: Any = None,
    wrt: Any = nnx.Param,
    leaves: bool = False,
) -> "Explanation":
    """Reports where every parameter of an annotated model is placed, and the memory and traffic of training.

    Nothing is compiled and no arrays are needed: an abstract model of any size works. Figures that follow from the
    plan are separate from estimates. After a call of the model, its communication for mixing the examples of the
    batch is listed by line.

    Args:
        model_or_plan: an annotated model, concrete or abstract, or its plan.
        optimizer: an `nnx.Optimizer` or an Optax transformation, to count its state; AdamW by default.
        loss: function of the model and the batch. With it and `batch`, activations of a model are estimated.
        batch: the global batch, abstract or real; a tuple is passed as several arguments of `loss`.
        wrt: the parameters of a model that are trained, as in `js.plan`.
        leaves: also list every parameter.

    Returns:
        An `Explanation`: print it, show it in a notebook, or take its JSON.

    Raises:
        AnnotationError: the root of the model is not annotated.

    Example:
        >>> print(js.explain(model, optimizer=optax.adamw(3e-4)))
    """
    plan = model_or_plan if isinstance(model_or_plan, ShardPlan) else make_plan(model_or_plan, wrt=wrt)
    if loss is not None and annotation_of(model_or_plan) is not None:
        raise AnnotationError(
            "The activations of a Linen model are not estimated.",
            where=f"explain({type(model_or_plan).__name__}, loss=...)",
            why="the estimate calls the loss with an nnx model.",
            do="print(js.audit(jax.jit(step).lower(state, batch).compile(), model=model))  # the compiler's figures",
        )
    mixing, plan = mixing_of(plan), as_traced(plan)
    held = memory_of(plan, optimizer=optimizer)
    if loss is not None and batch is not None and isinstance(model_or_plan, nnx.Module):
        held = held.with_activations(activations(model_or_plan, loss, batch, wrt=wrt))
    if not isinstance(model_or_plan, nnx.Module):
        return Explanation(plan, held, traffic_of(plan), leaves, mixing=mixing)
    planned = {leaf.path for leaf in plan.leaves}
    others = tuple(other for other in others_of(model_or_plan) if dotted(other.path) not in planned)
    return Explanation(plan, held, traffic_of(plan), leaves, others, mixing, tuple(_strays(model_or_plan)))


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
        tables = [_units_table(self.plan)]
        if self.leaves:
            tables.append(_leaves_table(self.plan))
        tables += [_memory_table(self.memory), _traffic_table(self.traffic, self.plan)]
        tables += [_mixing_table(self.mixing)] if self.mixing else []
        spaced = [part for table in tables for part in (Text(), table)]
        return Group(Text(_headline(self.plan)), *spaced, Text(), *map(Text, self._notes()))

    def _notes(self) -> Iterator[str]:
        yield from _notes(self.plan, self.others)
        if self.strays:
            count = f"{len(self.strays)} parameter{'s'[: len(self.strays) != 1]}"
            yield f"Not placed as planned: {count}, until the next call"
            yield from _counted(f"  {stray}" for stray in self.strays)

    def to_json(self) -> str:
        """Everything as JSON text; `ShardPlan.from_json` reads the plan in it."""
        bytes_ = dataclasses.asdict(self.memory)
        bytes_ |= {name: getattr(self.memory, name) for name in ("held_bytes", "step_bytes", "host_bytes")}
        traffic = [dataclasses.asdict(t) | {"wire_bytes": t.wire_bytes} for t in self.traffic]
        units = [
            {"unit": name, "count": count, "gathered_bytes": unit_bytes(self.plan, unit.name)}
            for name, count, unit in folded_units(self.plan)
        ]
        whole = {
            "plan": json.loads(self.plan.to_json()),
            "num_parameters": self.plan.num_parameters,
            "parameter_bytes": self.plan.logical_bytes,
            "units": units,
            "memory_per_device": bytes_,
            "communication_per_step": traffic,
            "mixing": [dataclasses.asdict(one) for one in self.mixing],
            "replicated": {leaf.path: leaf.placement.because for leaf in self.plan.replicated}
            | {dotted(other.path): unsharded_class(other.kind) for other in _of_own_class(self.others)},
            "not_placed_as_planned": list(self.strays),
            "other_arrays": [dataclasses.asdict(other) | {"path": dotted(other.path)} for other in self.others],
        }
        return json.dumps(whole, indent=1)


def _strays(model: nnx.Module) -> Iterator[str]:
    """The parameters of an annotated model that are not where the plan places them, as text."""
    root = record_of(model)
    for variable, path, _ in occurrences(model):
        planned = root.by_path.get(path)  # of a tied one, its first path
        if planned is not None and not is_placed(variable, planned.placement, root.mesh):
            value = variable.get_raw_value()
            yield f"{numberless(dotted(path))} {list(value.shape)}: {place_of(value)}"


def folded_units(plan: ShardPlan) -> list[tuple[str, int, UnitPlan]]:
    """The units, equal ones of a list folded: a name such as `blocks/0..11`, their number, the first of them."""
    groups: dict[Any, list[tuple[int | None, UnitPlan]]] = {}
    for unit in plan.units:
        pattern, index = name_pattern(unit.name)
        content = tuple((leaf.path.removeprefix(unit.name), leaf.placement) for leaf in plan.unit_leaves(unit.name))
        key = (pattern, content, dataclasses.replace(unit, name=""))
        groups.setdefault(key, []).append((index, unit))
    return [(joined_name(key[0], [i for i, _ in found]), len(found), found[0][1]) for key, found in groups.items()]


def _headline(plan: ShardPlan) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in plan.mesh)
    devices = math.prod(size for _, size in plan.mesh)
    where = f"on {devices} device{'s'[: devices != 1]} ({axes})"
    gathered = plan.gathered_part
    all_are = gathered.leaves == plan.leaves
    frozen = f"; {plan.num_frozen:,} of {'them' if all_are else 'all'} are frozen" if plan.num_frozen else ""
    if all_are:
        return f"{plan.num_parameters:,} parameters, {human_bytes(plan.logical_bytes)} = P, {where}{frozen}"
    return (
        f"{plan.num_parameters:,} parameters, {human_bytes(plan.logical_bytes)}, {where};"
        f" {gathered.num_parameters:,} of them, {human_bytes(gathered.logical_bytes)} = P, are gathered{frozen}"
    )


def _units_table(plan: ShardPlan) -> FittedTable:
    caption = (
        "dtypes: stored, gathered, reduced. kept: of the copy, until backward. ahead: prefetch. x<n>: figures of one."
    )
    columns = "unit", "kind??", "parameters>", "per device>", "gathered>", "dtypes", "kept", "ahead?", "remat"
    table = made_table("Units: what is gathered together", *columns, caption=caption)
    for name, count, unit in folded_units(plan):
        leaves = plan.unit_leaves(unit.name)
        add_row(
            table,
            f"{name}  x{count}" if count > 1 else name,
            unit.kind,
            human_count(sum(leaf.placement.size for leaf in leaves)),
            human_bytes(sum(leaf.placement.bytes_per_device for leaf in leaves)),
            *(_gathering(plan, unit) if unit.gathered else ("never", _dtypes(leaves), "-", "-", "-")),
        )
    return table


def _gathering(plan: ShardPlan, unit: UnitPlan) -> tuple[str, ...]:
    """How a unit is gathered: the bytes, the dtypes, the part kept, how early, and the recomputation."""
    dtypes = _dtypes(plan.unit_leaves(unit.name))
    gathered = human_bytes(unit_bytes(plan, unit.name))
    return gathered, dtypes, _kept(unit.reshard_after_forward), unit.prefetch, unit.remat


def _kept(reshard: bool | int) -> str:
    return {True: "nothing", False: "all"}[reshard] if isinstance(reshard, bool) else f"1/{reshard}"


def _dtypes(leaves: tuple[LeafPlan, ...]) -> str:
    placements = [leaf.placement for leaf in leaves]
    found = {(p.dtype, p.gathered_dtype, p.reduce_dtype) if p.gathered else (p.dtype,) for p in placements}
    return "; ".join(sorted(", ".join(map(_short, dtypes)) for dtypes in found)) or "-"


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f")


def _leaves_table(plan: ShardPlan) -> FittedTable:
    table = made_table("Parameters", "parameter", "shape", "dtypes", "per device>", "placement")
    for name, _, unit in folded_units(plan):
        for leaf in plan.unit_leaves(unit.name):
            p = leaf.placement
            path = name + leaf.path.removeprefix(unit.name) if leaf.path.startswith(unit.name) else leaf.path
            axes = ", ".join("-" if e is None else e if isinstance(e, str) else "+".join(e) for e in p.spec)
            where = f"({axes})" if p.shards > 1 else ""
            where += f" replicated: {p.because}" if p.dim is None else ""
            where += f" padded by {p.padding}" if p.padding else ""
            add_row(table, path, str(list(p.shape)), _dtypes((leaf,)), human_bytes(p.bytes_per_device), where.strip())
    return table


def _memory_table(held: Memory) -> FittedTable:
    table = made_table("Memory of one device", "", "bytes>", "")
    row = lambda name, size, why, **how: add_row(table, name, human_bytes(size), why, **how)
    row("parameters", held.parameters_bytes, "plan")
    row(f"optimizer state ({held.optimizer})", held.optimizer_bytes, "plan")
    row("held between steps", held.held_bytes, "plan", style="bold", end_section=True)
    row("gradients", held.gradients_bytes, "plan")
    row("gathered copies kept until backward", held.kept_bytes, "estimate")
    unit = f" ({held.largest_unit})" if held.largest_unit else ""
    row(f"largest gathered unit{unit}", held.largest_unit_bytes, "estimate: one computes")
    row("gathered ahead of its use", held.prefetched_bytes, "estimate: by prefetch")
    row("largest gradient of a unit, not yet reduced", held.largest_gradient_bytes, "estimate")
    if held.activations_bytes is None:
        add_row(table, "activations", "not estimated", "pass loss= and batch=")
        total, where = "in a step, without activations", "estimate"
    else:
        row("activations", held.activations_bytes, "estimate: saved for backward")
        total, where = "in a step", "estimate: the larger of head and layer"
    if held.recomputed_bytes:
        row("recomputed in a layer", held.recomputed_bytes, "estimate: by remat")
    row(total, held.step_bytes, where, style="bold", end_section=bool(held.host_bytes))
    if held.host_bytes:
        row("in host memory: parameters", held.host_parameters_bytes, "plan")
        row("in host memory: their gradients", held.host_gradients_bytes, "plan")
        row("in host memory: optimizer state", held.host_optimizer_bytes, "plan")
        if held.activations_bytes is not None:
            row("in host memory: activations", held.host_activations_bytes, "estimate: saved")
        row("in host memory, for this device", held.host_bytes, "", style="bold")
    return table


def _traffic_table(traffic: tuple[Traffic, ...], plan: ShardPlan) -> FittedTable:
    caption = 'accumulate=N with sync="each": N times as much; with sync="last": one gather and one reduction.'
    columns = "collective", "over", "dtype?", "arrays>", "in P>", "sent>", "for"
    table = made_table("Communication of one forward and backward pass, per device", *columns, caption=caption)
    whole = plan.gathered_part.logical_bytes or 1  # a model without parameters sends nothing
    for t in traffic:
        amounts = human_bytes(t.full_bytes), f"{t.full_bytes / whole:.2f}", human_bytes(t.wire_bytes)
        add_row(table, t.kind, f"{', '.join(t.axes)} ({t.group_size})", _short(t.dtype), *amounts, t.purpose)
    total = sum(t.wire_bytes for t in traffic)
    sent = f"{total / whole:.2f} P"
    add_row(table, "total", "", "", "", "", human_bytes(total), sent, style="bold")
    return table


def _mixing_table(found: Sequence[Mixing]) -> FittedTable:
    caption = "Last traced calls, forward and backward. bytes: of the results on one device, over all loop iterations."
    columns = "line", "operation", "how", "times>?", "bytes>"
    table = made_table("Communication of the model's own mixing of examples", *columns, caption=caption)
    for one in found:
        add_row(table, one.line, one.operation, one.how, str(one.times), human_bytes(one.bytes))
    total = sum(one.bytes for one in found)
    add_row(table, "total", "", "", str(sum(one.times for one in found)), human_bytes(total), style="bold")
    return table


def _notes(plan: ShardPlan, others: Sequence[Other]) -> Iterator[str]:
    """Notes on arrays that are never gathered, not gathered ahead, replicated, padded, tied, or not parameters."""
    if never := folded_names([unit.name for unit in plan.units if not unit.gathered]):
        why = "called in global view; their communication is the model's own, and not counted"
        yield f"Never gathered: {', '.join(never)} ({why})"
    for (path, unit), size in plan.unscheduled_stacks.items():
        how = f"gathered {plan.how_stacked(path, unit)}: no unit is inside their loop"
        yield f"Stacked layers: {path}, {human_bytes(size)}, {how}"
    own = _of_own_class(others)
    yield from _replicated(plan, own)
    if padded := [leaf for leaf in plan.leaves if leaf.placement.padding]:
        zeros = sum((p.stored_size / p.size - 1) * p.logical_bytes for p in (leaf.placement for leaf in padded))
        count = f"{len(padded)} parameter{'s'[: len(padded) != 1]}"
        yield f"Padded: {count}, {human_bytes(zeros)} of zeros in all, invisible to reads"
        yield from _counted(map(_padding, padded))
    for leaf in plan.leaves:
        if leaf.aliases:
            yield f"Tied: {' = '.join((leaf.path, *leaf.aliases))}, gathered by {leaf.unit}"
    if others := [other for other in others if other not in own]:
        count = f"{len(others)} float array{'s'[: len(others) != 1]}"
        total = human_bytes(sum(other.bytes for other in others))
        yield f"Not parameters: {count}, {total} on every device, in no figure above"
        yield from _counted(f"  {numberless(dotted(other.path))}  {other.kind} {other.form}" for other in others)


def _of_own_class(others: Sequence[Other]) -> list[Other]:
    """The arrays in variables of a class of the user's own, which may be trained by `wrt=`."""
    return [other for other in others if other.kind not in (ARRAY, nnx.Variable.__name__)]


def _replicated(plan: ShardPlan, others: Sequence[Other]) -> Iterator[str]:
    """The replicated parameters, by reason, and the variables of classes that are no parameters."""
    if plan.leaves and plan.replicated == plan.leaves and not others:
        yield f"Replicated: all parameters: {plan.leaves[0].placement.because}"
    elif plan.replicated or others:
        total = sum(leaf.placement.bytes_per_device for leaf in plan.replicated) + sum(other.bytes for other in others)
        count = len(plan.replicated) + len(others)
        what = f"{count} parameter{'s'[: count != 1]}" if plan.replicated else f"{count} variable{'s'[: count != 1]}"
        yield f"Replicated: {what}, {human_bytes(total)} on every device"
        reasons: dict[str, list[str]] = collections.defaultdict(list)
        for other in others:
            because = f"{unsharded_class(other.kind)}  # counted above only if wrt= has it"
            reasons[because].append(f"    {numberless(dotted(other.path))} {other.form}")
        for leaf in plan.replicated:
            path = f"    {numberless(leaf.path)} {list(leaf.placement.shape)}"
            reasons[leaf.placement.because.split(" (")[0]].append(path)
        for because, paths in reasons.items():
            yield from (f"  {because}:", *_counted(paths))


def _padding(leaf: LeafPlan) -> str:
    p = leaf.placement
    dim = p.dim or 0
    return f"  {numberless(leaf.path)} {list(p.shape)}: dim {dim} {p.shape[dim]} -> {p.stored_shape[dim]}"


def _counted(lines: Iterable[str]) -> list[str]:
    """Lines, with equal ones merged into one with a count."""
    return [line + (f"  x{count}" if count > 1 else "") for line, count in collections.Counter(lines).items()]
