"""The tables and notes in which `explain` shows a plan, its memory and its traffic."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from flax import nnx

from jshard._text import counted, folded_names, human_bytes, human_count, joined_name, name_pattern
from jshard.engine.mixing import Mixing
from jshard.inspect.communication import Traffic
from jshard.inspect.memory import Memory, stored_bytes, unit_bytes
from jshard.inspect.staged_memory import StagesMemory
from jshard.inspect.tables import FittedTable, add_row, made_table
from jshard.plans.mesh import PIPE
from jshard.plans.model_axes import Entry
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan, UnitPlan, unsharded_class
from jshard.plans.replication import ARRAY, Other
from jshard.plans.staged_loops import LoopOnStages, TracedStages
from jshard.plans.units import dotted, numberless

# ---- units


class FoldedUnit(NamedTuple):
    """Equal units of a list."""

    name: str  # such as `blocks/0..11`
    count: int  # how many units
    first: UnitPlan  # one of them; the others differ from it in their names alone


def folded_units(plan: ShardPlan) -> list[FoldedUnit]:
    """Returns the units, equal ones of a list folded into one."""
    equal_units: dict[Hashable, list[UnitPlan]] = collections.defaultdict(list)
    for unit in plan.units:
        equal_units[_what_is_folded(plan, unit)].append(unit)
    return [FoldedUnit(_joined_name(units), len(units), units[0]) for units in equal_units.values()]


def _what_is_folded(plan: ShardPlan, unit: UnitPlan) -> Hashable:
    """Returns what equal units have in common: settings, and parameters of the same names, placed alike."""
    pattern, _ = name_pattern(unit.name)
    content = []
    for leaf in plan.unit_leaves(unit.name):
        content.append((leaf.path.removeprefix(unit.name), leaf.placement))
    return pattern, tuple(content), dataclasses.replace(unit, name="")


def _joined_name(units: Sequence[UnitPlan]) -> str:
    """Returns `blocks/0..11` for units whose names differ in a number."""
    pattern, _ = name_pattern(units[0].name)
    indices = []
    for unit in units:
        _, index = name_pattern(unit.name)
        indices.append(index)
    return joined_name(pattern, indices)


def headline(plan: ShardPlan) -> str:
    """Returns the size of the model, and where it is."""
    degrees = dict(plan.mesh)
    num_devices = math.prod(degrees.values())
    axes = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
    where = f"on {counted(num_devices, 'device')} ({axes})"
    size = f"{plan.num_parameters:,} parameters, {human_bytes(plan.logical_bytes)}"
    # P, in which the traffic is counted, is the size of what is gathered.
    gathered = plan.gathered_part
    if gathered.leaves == plan.leaves:
        text = f"{size} = P, {where}"
        of_which = "them"
    else:
        gathered_size = f"{gathered.num_parameters:,} of them, {human_bytes(gathered.logical_bytes)} = P"
        text = f"{size}, {where}; {gathered_size}, are gathered"
        of_which = "all"
    if plan.num_frozen:
        text += f"; {plan.num_frozen:,} of {of_which} are frozen"
    return text


def units_table(plan: ShardPlan) -> FittedTable:
    """Returns the units, and how each is gathered."""
    caption = (
        "dtypes: stored, gathered, reduced; one if equal. kept: of the copy, until backward. ahead: prefetch."
        " x<n>: figures of one."
    )
    columns = ("unit", "kind??", "parameters>", "per device>", "gathered>", "dtypes", "kept", "ahead?", "remat")
    table = made_table("Units: what is gathered together", *columns, caption=caption)
    for name, count, unit in folded_units(plan):
        leaves = plan.unit_leaves(unit.name)
        num_parameters = sum(leaf.placement.size for leaf in leaves)
        add_row(
            table,
            _with_count(name, count),
            unit.kind,
            human_count(num_parameters),
            human_bytes(stored_bytes(leaves)),
            *_gathering_cells(plan, unit),
        )
    return table


def _gathering_cells(plan: ShardPlan, unit: UnitPlan) -> tuple[str, str, str, str, str]:
    """Returns how a unit is gathered: the bytes, the dtypes, the part kept, how early, and the recomputation."""
    dtypes = _dtypes(plan.unit_leaves(unit.name))
    if not unit.gathered:
        return "never", dtypes, "-", "-", "-"
    gathered = human_bytes(unit_bytes(plan, unit.name))
    remat = f"auto: {unit.remat}" if unit.remat_because else unit.remat
    return gathered, dtypes, _part_kept(unit.reshard_after_forward), unit.prefetch, remat


def _part_kept(reshard: bool | int) -> str:
    """Returns which part of the gathered copy stays on a device until backward."""
    if reshard is True:
        return "nothing"
    if reshard is False:
        return "all"
    return f"1/{reshard}"


def _dtypes(leaves: Iterable[LeafPlan]) -> str:
    """Returns the different dtypes of some parameters: stored, gathered, reduced; one if these are equal."""
    texts = set()
    for leaf in leaves:
        placement = leaf.placement
        dtypes = [placement.dtype]
        if placement.gathered:  # else it is used as it is stored
            dtypes += [placement.gathered_dtype, placement.reduce_dtype]
        if len(set(dtypes)) == 1:  # three times the same would take three lines of a narrow table
            dtypes = dtypes[:1]
        texts.add(", ".join(map(_short, dtypes)))
    return "; ".join(sorted(texts)) or "-"


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "f")


# ---- parameters


def leaves_table(plan: ShardPlan) -> FittedTable:
    """Returns every parameter, those of equal units once."""
    table = made_table("Parameters", "parameter", "shape", "dtypes", "per device>", "placement")
    for name, _, unit in folded_units(plan):
        for leaf in plan.unit_leaves(unit.name):
            placement = leaf.placement
            path = leaf.path
            if path.startswith(unit.name):  # else it is tied, or of a module given in a list
                path = name + path.removeprefix(unit.name)
            size = human_bytes(placement.bytes_per_device)
            add_row(table, path, str(list(placement.shape)), _dtypes([leaf]), size, _where_placed(placement))
    return table


def _where_placed(placement: Placement) -> str:
    """Returns the axes of each dim, why a parameter is replicated, and how much it is padded."""
    parts = []
    if placement.shards > 1:
        axes = ", ".join(map(_axes_of_dim, placement.spec))
        parts.append(f"({axes})")
    if placement.dim is None:
        parts.append(f"replicated: {placement.because}")
    if placement.padding:
        parts.append(f"padded by {placement.padding}")
    return " ".join(parts).strip()


def _axes_of_dim(entry: Entry) -> str:
    if entry is None:
        return "-"
    if isinstance(entry, str):
        return entry
    return "+".join(entry)


# ---- memory


def memory_table(memory: Memory) -> FittedTable:
    """Returns the memory of a device, and where each figure comes from."""
    table = made_table("Memory of one device", "", "bytes>", "")

    def row(name: str, size: int, origin: str) -> None:
        add_row(table, name, human_bytes(size), origin)

    def total(name: str, size: int, origin: str, *, end_section: bool = False) -> None:
        add_row(table, name, human_bytes(size), origin, style="bold", end_section=end_section)

    row("parameters", memory.parameters_bytes, "plan")
    row(f"optimizer state ({memory.optimizer})", memory.optimizer_bytes, "plan")
    if memory.averages_bytes:
        row("averages of the weights", memory.averages_bytes, "plan")
    total("held between steps", memory.held_bytes, "plan", end_section=True)
    row("gradients", memory.gradients_bytes, "plan")
    row("gathered copies kept until backward", memory.kept_bytes, "estimate")
    unit = f" ({memory.largest_unit})" if memory.largest_unit else ""
    row(f"largest gathered unit{unit}", memory.largest_unit_bytes, "estimate: one computes")
    row("gathered ahead of its use", memory.prefetched_bytes, "estimate: by prefetch")
    row("largest gradient of a unit, not yet reduced", memory.largest_gradient_bytes, "estimate")
    if memory.stages is not None:
        _add_stages(table, memory.stages)
    if memory.activations_bytes is None:
        add_row(table, "activations", "not estimated", "pass loss_fn= and batch=")
        step = "in a step, without activations"
        origin = "estimate"
    else:
        row("activations", memory.activations_bytes, "estimate: saved for backward")
        step = "in a step"
        origin = "estimate: the larger of head and layer"
        row("live at the head", memory.live_outside_bytes, "estimate: with what is saved until then")
        if memory.live_in_layers_bytes:
            row("live while a layer computes", memory.live_in_layers_bytes, "estimate: the same")
    total(step, memory.step_bytes, origin, end_section=bool(memory.host_bytes))
    if memory.host_bytes:
        row("in host memory: parameters", memory.host_parameters_bytes, "plan")
        row("in host memory: their gradients", memory.host_gradients_bytes, "plan")
        row("in host memory: optimizer state", memory.host_optimizer_bytes, "plan")
        if memory.host_averages_bytes:
            row("in host memory: averages of the weights", memory.host_averages_bytes, "plan")
        if memory.activations_bytes is not None:
            row("in host memory: activations", memory.host_activations_bytes, "estimate: saved")
        total("in host memory, for this device", memory.host_bytes, "")
    return table


def _add_stages(table: FittedTable, stages: StagesMemory) -> None:
    """Adds what a loop on stages holds to the table of the memory."""
    rounds = counted(stages.num_rounds, "round")
    rows = {
        "on stages: shards of the layers of a place": stages.layers_bytes,
        f"on stages: gathered parameters of {rounds}": stages.rounds_bytes,
        "on stages: sums of gradients, not yet reduced": stages.sums_bytes,
        "on stages: reduced gradients of the layers of a place": stages.reduced_bytes,
        "on stages: carries of all microbatches": stages.activations_bytes,
    }
    for name, size in rows.items():
        add_row(table, name, human_bytes(size), "estimate")


# ---- stages


def stages_table(stages: TracedStages, num_places: int) -> FittedTable:
    """Returns the loops that ran on pipeline stages, forward and backward in one row if they are alike."""
    caption = (
        "Last traced calls. layers: on a place, of all. tick: one chunk of layers on one microbatch. bubble: the share"
        " of the ticks in which a place has none. carry: what a microbatch passes on, in each tick."
    )
    columns = ("units", "loop", "layers>", "chunks of>", "rounds>", "microbatches>", "ticks>", "bubble>", "carry>")
    title = f"Stages: loops over units on {counted(num_places, 'place')} along pipe"
    table = made_table(title, *columns, caption=caption)
    phases: dict[LoopOnStages, list[str]] = collections.defaultdict(list)  # of loops that are alike in all else
    for loop in stages.loops:
        alike = dataclasses.replace(loop, phase="", parameters=(), gradients=())
        phases[alike].append(loop.phase)
    for loop, phases_of_loop in phases.items():
        schedule = loop.schedule
        layout = schedule.layout
        add_row(
            table,
            ", ".join(loop.units) or "-",
            ", ".join(dict.fromkeys(phases_of_loop)),
            f"{layout.layers_per_place} of {layout.num_layers}",
            str(layout.layers_per_chunk),
            str(layout.num_rounds),
            str(schedule.num_microbatches),
            str(schedule.num_ticks),
            f"{schedule.bubble:.1%}",
            human_bytes(loop.carry_bytes),
        )
    return table


# ---- communication


def traffic_table(traffic: Sequence[Traffic], plan: ShardPlan) -> FittedTable:
    """Returns the collectives of a step; P is the size of the gathered parameters."""
    caption = (
        'accumulate=N with sync="each": N times as much; with sync="last": one gather and one reduction;'
        ' with sync="none": one gather.'
    )
    columns = ("collective", "over", "dtype?", "arrays>", "in P>", "sent>", "for")
    table = made_table("Communication of one forward and backward pass, per device", *columns, caption=caption)
    parameter_bytes = plan.gathered_part.logical_bytes or 1  # a model without parameters sends nothing
    total_bytes = 0.0
    for row in traffic:
        total_bytes += row.wire_bytes
        add_row(
            table,
            row.kind,
            f"{', '.join(row.axes)} ({row.group_size})",
            _short(row.dtype),
            human_bytes(row.full_bytes),
            f"{row.full_bytes / parameter_bytes:.2f}",
            human_bytes(row.wire_bytes),
            row.purpose,
        )
    in_parameters = f"{total_bytes / parameter_bytes:.2f} P"
    add_row(table, "total", "", "", "", "", human_bytes(total_bytes), in_parameters, style="bold")
    return table


def mixing_table(mixing: Sequence[Mixing]) -> FittedTable:
    """Returns the lines of the model that mix examples, with what they send."""
    caption = "Last traced calls, forward and backward. bytes: of the results on one device, over all loop iterations."
    columns = ("line", "operation", "how", "times>?", "bytes>")
    table = made_table("Communication of the model's own mixing of examples", *columns, caption=caption)
    total_times = 0
    total_bytes = 0
    for row in mixing:
        total_times += row.times
        total_bytes += row.bytes
        add_row(table, row.line, row.operation, row.how, str(row.times), human_bytes(row.bytes))
    add_row(table, "total", "", "", str(total_times), human_bytes(total_bytes), style="bold")
    return table


# ---- notes


def notes_on(plan: ShardPlan, others: Sequence[Other], strays: Sequence[str]) -> Iterator[str]:
    """Yields notes on parameters that are not sharded, gathered ahead or placed as usual, and on other arrays.

    Args:
        plan: the plan.
        others: float arrays of the model that are not parameters.
        strays: texts of parameters that are not where the plan places them.
    """
    of_own_class = in_own_classes(others)
    not_trained = [other for other in others if other not in of_own_class]
    yield from _stages_not_traced(plan)
    yield from chosen_remats(plan)
    yield from _never_gathered(plan)
    yield from _unscheduled_stacks(plan)
    yield from _replicated(plan, of_own_class)
    yield from _padded(plan)
    for leaf in plan.leaves:
        if leaf.aliases:
            yield f"Tied: {' = '.join((leaf.path, *leaf.aliases))}, gathered by {leaf.unit}"
    yield from _not_parameters(not_trained)
    if strays:
        yield f"Not placed as planned: {counted(len(strays), 'parameter')}, until the next call"
        yield from _merged(f"  {stray}" for stray in strays)


def beyond_the_sums(plan: ShardPlan, others: Sequence[Other]) -> Iterator[str]:
    """Yields those of `notes_on` that a summary of a plan needs: its sums do not show them, or are without them."""
    of_own_class = in_own_classes(others)
    yield from _stages_not_traced(plan)
    yield from _never_gathered(plan)
    yield from _unscheduled_stacks(plan)
    is_distributed = math.prod(degree for _, degree in plan.mesh) > 1
    if is_distributed and plan.leaves and plan.replicated == plan.leaves:
        yield from _replicated(plan, [])  # one line, as it is the same for all
    for kind in dict.fromkeys(other.kind for other in of_own_class):
        yield f"Replicated: {unsharded_class(kind)}"
    not_trained = [other for other in others if other not in of_own_class]
    # The first line has their sum; the others name them.
    yield from itertools.islice(_not_parameters(not_trained), 1)


def in_own_classes(others: Iterable[Other]) -> list[Other]:
    """Returns the arrays in variables of a class of the user's own, which may be trained by `wrt=`."""
    plain_kinds = (ARRAY, nnx.Variable.__name__)
    return [other for other in others if other.kind not in plain_kinds]


def _stages_not_traced(plan: ShardPlan) -> Iterator[str]:
    num_places = dict(plan.mesh).get(PIPE, 1)
    if num_places > 1 and not plan.stages:
        yield (
            f"Stages: loops over units run on the {num_places} places along pipe; all of the above is without them"
            " until the first call of the model"
        )


def chosen_remats(plan: ShardPlan) -> Iterator[str]:
    """Yields the remat policies that traced calls have chosen, and why; those of equal units in one line."""
    names: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for unit in plan.units:
        if unit.remat_because:
            names[unit.remat, unit.remat_because].append(unit.name)
    for (remat, because), units in names.items():
        yield f"Remat auto of {', '.join(folded_names(units))}: {remat}; {because}"


def _never_gathered(plan: ShardPlan) -> Iterator[str]:
    names = [unit.name for unit in plan.units if not unit.gathered]
    if names:
        why = "called in global view; their communication is the model's own, and not counted"
        yield f"Never gathered: {', '.join(folded_names(names))} ({why})"


def _unscheduled_stacks(plan: ShardPlan) -> Iterator[str]:
    for (path, unit), size in plan.unscheduled_stacks.items():
        remark = f"gathered {plan.how_stacked(path, unit)}: no unit is inside their loop"
        yield f"Stacked layers: {path}, {human_bytes(size)}, {remark}"


def _replicated(plan: ShardPlan, others: Sequence[Other]) -> Iterator[str]:
    """Yields the replicated parameters, by reason, and the variables of classes that are no parameters."""
    if not plan.replicated and not others:
        return
    if plan.replicated == plan.leaves and not others:
        yield f"Replicated: all parameters: {plan.leaves[0].placement.because}"
        return
    total_bytes = stored_bytes(plan.replicated) + _bytes_of(others)
    noun = "parameter" if plan.replicated else "variable"
    count = counted(len(plan.replicated) + len(others), noun)
    yield f"Replicated: {count}, {human_bytes(total_bytes)} on every device"
    for reason, lines in _replicated_by_reason(plan, others).items():
        yield f"  {reason}:"
        yield from _merged(lines)


def _replicated_by_reason(plan: ShardPlan, others: Sequence[Other]) -> dict[str, list[str]]:
    """Returns a line for each replicated parameter and variable, by the reason."""
    lines_by_reason: dict[str, list[str]] = collections.defaultdict(list)
    for other in others:
        reason = f"{unsharded_class(other.kind)}  # counted above only if wrt= has it"
        lines_by_reason[reason].append(f"    {numberless(dotted(other.path))} {other.form}")
    for leaf in plan.replicated:
        reason, _, _ = leaf.placement.because.partition(" (")  # the rest has numbers of this parameter
        lines_by_reason[reason].append(f"    {numberless(leaf.path)} {list(leaf.placement.shape)}")
    return lines_by_reason


def _padded(plan: ShardPlan) -> Iterator[str]:
    padded = [leaf for leaf in plan.leaves if leaf.placement.padding]
    if not padded:
        return
    zeros_bytes = 0.0
    for leaf in padded:
        placement = leaf.placement
        zeros_bytes += (placement.stored_size / placement.size - 1) * placement.logical_bytes
    count = counted(len(padded), "parameter")
    yield f"Padded: {count}, {human_bytes(zeros_bytes)} of zeros in all, invisible to reads"
    yield from _merged(map(_padding, padded))


def _padding(leaf: LeafPlan) -> str:
    placement = leaf.placement
    dim = placement.dim or 0
    sizes = f"{placement.shape[dim]} -> {placement.stored_shape[dim]}"
    return f"  {numberless(leaf.path)} {list(placement.shape)}: dim {dim} {sizes}"


def _not_parameters(others: Sequence[Other]) -> Iterator[str]:
    if others:
        count = counted(len(others), "float array")
        total = human_bytes(_bytes_of(others))
        yield f"Not parameters: {count}, {total} on every device, in no figure above"
        yield from _merged(f"  {numberless(dotted(other.path))}  {other.kind} {other.form}" for other in others)


def _bytes_of(others: Iterable[Other]) -> int:
    return sum(other.bytes for other in others)


def _merged(lines: Iterable[str]) -> list[str]:
    """Returns lines, with equal ones merged into one with a count."""
    return [_with_count(line, count) for line, count in collections.Counter(lines).items()]


def _with_count(text: str, count: int) -> str:
    """Returns a text that stands for several equal ones."""
    if count == 1:
        return text
    return f"{text}  x{count}"
