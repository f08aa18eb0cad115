"""What the tables of an explanation do not say: lines about parameters that are an exception."""

from collections.abc import Sequence

from jshard._nnx import dotted, numberless
from jshard._replicated import Other
from jshard._shard_plan import ShardPlan
from jshard.inspect.tables import folded_names, human_bytes


def notes_of(plan: ShardPlan) -> list[str]:
    """The lines: what is never gathered or not ahead, what is replicated, padded, tied."""
    gathered = [*_ungathered_notes(plan), *_stack_notes(plan)]
    return [*gathered, *_replicated_notes(plan), *_padded_notes(plan), *_tied_notes(plan)]


def notes_of_others(others: Sequence[Other]) -> list[str]:
    """Lines for the float arrays that are no parameters: they are in no figure of the tables."""
    if not others:
        return []
    sizes: dict[str, list[int]] = {}
    for other in others:
        sizes.setdefault(f"{numberless(dotted(other.path))}  {other.kind} {other.form}", []).append(other.bytes)
    total = sum(other.bytes for other in others)
    count = f"{len(others)} float array{'s'[: len(others) != 1]}"
    head = f"Not parameters: {count}, {human_bytes(total)} on every device, in no figure above"
    return [head, *(f"  {line}" + (f"  x{len(found)}" if len(found) > 1 else "") for line, found in sizes.items())]


def _replicated_notes(plan: ShardPlan) -> list[str]:
    """One line for each reason, with the parameters it holds for."""
    if plan.leaves and plan.replicated == plan.leaves:
        return [f"Replicated: all parameters: {plan.leaves[0].placement.because}"]
    reasons: dict[str, dict[str, int]] = {}
    for leaf in plan.replicated:
        paths = reasons.setdefault(leaf.placement.because.split(" (")[0], {})
        shape = list(leaf.placement.shape)
        pattern = f"{numberless(leaf.path)} {shape}"
        paths[pattern] = paths.get(pattern, 0) + 1
    if not reasons:
        return []
    total = sum(leaf.placement.bytes_per_device for leaf in plan.replicated)
    lines = [f"Replicated: {len(plan.replicated)} parameters, {human_bytes(total)} on every device"]
    for because, paths in reasons.items():
        lines.append(f"  {because}:")
        lines += [f"    {path}" + (f"  x{count}" if count > 1 else "") for path, count in paths.items()]
    return lines


def _ungathered_notes(plan: ShardPlan) -> list[str]:
    """One line for the units that are never gathered: nothing of what they send is in the tables."""
    names = folded_names([unit.name for unit in plan.units if not unit.gathered])
    told = "called in global view; what that sends is the model's own, and not counted"
    return [f"Never gathered: {', '.join(names)} ({told})"] if names else []


def _stack_notes(plan: ShardPlan) -> list[str]:
    """A line for each stack of layers that no unit gathers ahead."""
    why = "no unit is inside their loop"
    return [
        f"Stacked layers: {path}, {human_bytes(size)}, gathered {plan.how_stacked(path, unit)}: {why}"
        for (path, unit), size in plan.unscheduled_stacks.items()
    ]


def _padded_notes(plan: ShardPlan) -> list[str]:
    """What is stored with zeros at the end, so that a dim divides."""
    padded = [leaf for leaf in plan.leaves if leaf.placement.padding]
    if not padded:
        return []
    zeros = sum((p.stored_size / p.size - 1) * p.logical_bytes for p in (leaf.placement for leaf in padded))
    sizes: dict[str, int] = {}
    for leaf in padded:
        p = leaf.placement
        dim = p.dim or 0
        line = f"  {numberless(leaf.path)} {list(p.shape)}: dim {dim} {p.shape[dim]} -> {p.stored_shape[dim]}"
        sizes[line] = sizes.get(line, 0) + 1
    count = f"{len(padded)} parameter{'s'[: len(padded) != 1]}"
    head = f"Padded: {count}, {human_bytes(zeros)} of zeros in all, which reads do not show"
    return [head, *(line + (f"  x{count}" if count > 1 else "") for line, count in sizes.items())]


def _tied_notes(plan: ShardPlan) -> list[str]:
    tied = [leaf for leaf in plan.leaves if leaf.aliases]
    return [f"Tied: {' = '.join((leaf.path, *leaf.aliases))}, gathered by {leaf.unit}" for leaf in tied]
