"""Layers of a loop that are no unit: the root gathers each when it is due, and stores its gradient in its trip."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend import core as jex

from jshard import _compat
from jshard.engine.moved import Key, key_of
from jshard.engine.rules import calls
from jshard.engine.values import Shard
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan
from jshard.plans.units import Unit

_PASSED_ON = ("convert_element_type", "copy", "copy_p")


def stored_rows(jaxpr: Any, gradients: Mapping[Any, Shard]) -> dict[Any, Shard]:
    """The stacked results of loops that become gradients, and nothing else, with how those are stored.

    Where a program is called more than once, a row may be stored that is none: whoever reads it gathers it again.

    Args:
        jaxpr: a program, which may hold others.
        gradients: the results of it that are gradients of stored parameters.
    """
    uses = collections.Counter(a for e in jaxpr.eqns for a in e.invars if isinstance(a, jex.Var))
    uses.update(a for a in jaxpr.outvars if isinstance(a, jex.Var))
    wanted = {v: s for v, s in gradients.items() if uses[v] == 1}
    found: dict[Any, Shard] = {}
    for e in reversed(jaxpr.eqns):
        mine = {k: wanted[v] for k, v in enumerate(e.outvars) if v in wanted}
        if not mine:
            continue
        if e.primitive.name in _PASSED_ON and uses[e.invars[0]] == 1:
            wanted[e.invars[0]] = mine[0]
        elif e.primitive.name in calls.CALLS:
            inner, _ = calls.program(e)
            found |= stored_rows(inner, {inner.outvars[k]: s for k, s in mine.items()})
        elif e.primitive.name == "scan":
            _, num_carried = _compat.scan_arguments(e)
            body, _ = calls.opened(e.params["jaxpr"])
            stacked = {k: s for k, s in mine.items() if k >= num_carried and not _is_of_unit(body, body.outvars[k])}
            found |= {e.outvars[k]: s for k, s in stacked.items()}
    return found


def _is_of_unit(jaxpr: Any, variable: Any) -> bool:
    """Whether a unit has made a value, and so has reduced it, or will."""
    for e in jaxpr.eqns:
        if variable in e.outvars:
            if e.primitive.name in calls.CALLS:
                inner, _ = calls.program(e)
                return _is_of_unit(inner, inner.outvars[e.outvars.index(variable)])
            return e.primitive.name == "unit"
    return False


# Layers of a loop that are no unit: the root gathers each when it is due, which a plan cannot know before a trace.

_LARGE_BYTES = 64 * 2**20  # of the gathered copy of all layers; below that nobody would miss the time

_seen: dict[Key, set[str]] = {}
_warned: set[tuple[Key, str]] = set()


def note_layers(unit: Unit, rows: dict[str, Placement]) -> None:
    """Records the parameters of which a region gathered one layer in a loop, and warns of large ones once.

    Args:
        unit: record of the root.
        rows: their placements by path.
    """
    if not rows:
        return
    key = key_of(unit.kind, unit.mesh.shape.items(), (m.placement for m in unit.members))
    _seen.setdefault(key, set()).update(rows)
    unknown = {path: p for path, p in rows.items() if p.layers == 1 or unit.placement.stacked}  # else its plan says so
    sizes: dict[str, int] = {}
    for path, stack in _stacks(unknown).items():
        sizes[stack] = sizes.get(stack, 0) + unknown[path].gathered_bytes
    large = {stack: size for stack, size in sizes.items() if size >= _LARGE_BYTES and (key, stack) not in _warned}
    if not large:
        return
    _warned.update((key, stack) for stack in large)
    listed = "".join(
        f"\n  {stack}  {size} bytes, by (root), each layer when it is due" for stack, size in large.items()
    )
    lines = "".join(
        f"\n  js.fully_shard({_written(stack)}, mesh=mesh, placement=js.ShardPlacement(stacked=1))" for stack in large
    )
    _compat.warn_user(
        f"{len(large)} stack(s) of layers of {unit.kind} are no unit, and are not gathered ahead of their use:{listed}"
        f"\n  Before the line of the model:{lines}"
    )


def as_traced(plan: ShardPlan) -> ShardPlan:
    """A plan that knows the layers that the last traced calls of its model gathered one at a time."""
    key = key_of(plan.units[0].kind, plan.mesh, (leaf.placement for leaf in plan.leaves))
    stacks = _stacks(_seen.get(key, ()))
    return dataclasses.replace(plan, leaves=tuple(_by_layer(leaf, stacks.get(leaf.path, "")) for leaf in plan.leaves))


def _by_layer(leaf: LeafPlan, stack: str) -> LeafPlan:
    if not stack or leaf.stack or leaf.owner != ():
        return leaf
    placement = leaf.placement
    if placement.layers == 1:
        placement = dataclasses.replace(placement, layers=placement.shape[0])
    return dataclasses.replace(leaf, stack=stack, placement=placement)


def _stacks(paths: Iterable[str]) -> dict[str, str]:
    """Of each parameter the module of layers that it is in: what those below one child of the root have in common."""
    below: dict[str, list[str]] = {}
    for path in paths:
        below.setdefault(path.split("/")[0], []).append(path)
    found = {}
    for together in below.values():
        modules = [path.split("/")[:-1] for path in together]
        alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*modules, strict=False))
        found |= dict.fromkeys(together, "/".join(names[0] for names in alike) or "(root)")
    return found


def _written(path: str) -> str:
    """A path of modules as it is written: `model.encoder.layers`, `model.towers[0]`."""
    return re.sub(r"\.(\d+)\b", r"[\1]", "model" if path == "(root)" else f"model.{path.replace('/', '.')}")
