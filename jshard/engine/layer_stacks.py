"""Layers of a loop that form no unit: the root gathers each when it is needed. A plan learns this from a trace."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping

from jshard import _compat
from jshard.engine.chosen_remat import with_chosen_remats
from jshard.engine.mixing import ModelKey, key_of, key_of_unit
from jshard.engine.stages.records import traced_stages
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan
from jshard.plans.units import Unit

_WARNED_BYTES = 64 * 2**20  # of the gathered copy of all layers; below that the time is negligible

_paths_seen: dict[ModelKey, set[str]] = {}
_warned: set[tuple[ModelKey, str]] = set()


def note_layers(unit: Unit, rows: Mapping[str, Placement]) -> None:
    """Records the parameters of which a region gathered one layer in a loop; warns of large ones once.

    Args:
        unit: the root of the model.
        rows: these parameters, by path.
    """
    if not rows:
        return
    # Kept beyond the trace, as `mixing` keeps what is sent: a plan is made from shapes, and cannot see the loop.
    key = key_of_unit(unit)
    _paths_seen.setdefault(key, set()).update(rows)
    large = {}
    for stack, size in _stack_bytes(unit, rows).items():
        if size >= _WARNED_BYTES and (key, stack) not in _warned:
            large[stack] = size
    if not large:
        return
    setting = "mesh=mesh, placement=js.PlacementPolicy(stacked=1)"
    listed = ""
    lines = ""
    for stack, size in large.items():
        _warned.add((key, stack))
        listed += f"\n  {stack}  {size} bytes, by (root), each layer when it is needed"
        lines += f"\n  js.fully_shard({_in_python(stack)}, {setting})"
    _compat.warn_user(
        f"{len(large)} stack(s) of layers of {unit.kind} form no unit, and are not gathered ahead of their use:{listed}"
        f"\n  Before the line of the model:{lines}"
    )


def _stack_bytes(unit: Unit, rows: Mapping[str, Placement]) -> dict[str, int]:
    """Returns the gathered bytes of each stack of which the plan does not know that it has layers."""
    # The others are counted by layer in the plan already.
    unknown = {path: p for path, p in rows.items() if p.layers == 1 or unit.placement.stacked}
    sizes = collections.Counter[str]()
    for path, stack in _stacks(unknown).items():
        sizes[stack] += unknown[path].gathered_bytes
    return sizes


def as_traced(plan: ShardPlan) -> ShardPlan:
    """Returns a plan with what the last traced calls of its model did.

    That is the layers that they gathered one at a time, the loops that they ran on pipeline stages, and the policies of
    remat that they chose.
    """
    plan = with_chosen_remats(plan)
    # The key of the model's root, by which both were recorded.
    key = key_of(plan.units[0].kind, plan.mesh, (leaf.placement for leaf in plan.leaves))
    stacks = _stacks(_paths_seen.get(key, ()))
    leaves = [_with_layers(leaf, stacks.get(leaf.path, "")) for leaf in plan.leaves]
    return dataclasses.replace(plan, leaves=tuple(leaves), stages=traced_stages(key, plan))


def _with_layers(leaf: LeafPlan, stack: str) -> LeafPlan:
    belongs_to_root = leaf.owner == ()
    # The layers of a unit are gathered by it, and those of a stack that the plan knows are counted already.
    if not stack or leaf.stack or not belongs_to_root:
        return leaf
    placement = leaf.placement
    layers = placement.shape[0] if placement.layers == 1 else placement.layers
    return dataclasses.replace(leaf, stack=stack, placement=dataclasses.replace(placement, layers=layers))


def _stacks(paths: Iterable[str]) -> dict[str, str]:
    """Returns the module of layers of each parameter: the common path of those below one child of the root."""
    children: dict[str, list[str]] = {}
    for path in paths:
        children.setdefault(path.split("/")[0], []).append(path)
    stacks: dict[str, str] = {}
    for siblings in children.values():
        stack = _common_module(siblings) or "(root)"
        stacks |= dict.fromkeys(siblings, stack)
    return stacks


def _common_module(paths: Iterable[str]) -> str:
    """Returns the longest path of modules that all parameters are inside of; empty for the root."""
    modules = [path.split("/")[:-1] for path in paths]  # the last name is the parameter's own
    common: list[str] = []
    # As far as the shortest path: a module that all are inside of is a part of it.
    for names in zip(*modules, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return "/".join(common)


def _in_python(path: str) -> str:
    """Returns a path of modules in Python syntax: `model.encoder.layers`, `model.towers[0]`."""
    if path == "(root)":
        return "model"
    dotted = f"model.{path.replace('/', '.')}"
    return re.sub(r"\.(\d+)\b", r"[\1]", dotted)
