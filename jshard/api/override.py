"""Other settings for the units of an annotated model: ways to train it are tried without touching its file."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jshard.errors import AnnotationError
from jshard.plans.plan import root_forgotten
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import Path, Unit, nested_units, occurrences, plain_class, store_plan, unit_of

SETTINGS = ("reshard_after_forward", "remat", "prefetch")
"""What `revise` changes; each as in `js.fully_shard`."""


def revise(model: nnx.Module, settings: Mapping[str, Any], *, strategy: str = "") -> None:
    """Changes settings of an annotated model's units, in place. Where the parameters are stays as it is.

    `prefetch`, and a `reshard_after_forward` of False, go to every unit inside the root. Other values of
    `reshard_after_forward`, and `remat`, go to the layers only: units that the model has several of, or stacks of
    them; to all innermost units where nothing comes twice. A head or an encoder's wrapper keeps what it was given, and
    so does a unit that is never gathered.

    Args:
        model: the root, annotated.
        settings: new values, by name (`SETTINGS`).
        strategy: why these, for `js.explain`.

    Raises:
        AnnotationError: there is no such setting, or not with such a value.
    """
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown:
        raise AnnotationError(
            "A setting of a unit is not known.",
            where=[f"{name}={settings[name]!r}" for name in unknown],
            why=f"the settings are {', '.join(SETTINGS)}.",
            do='revise(model, {"remat": "full"})',
        )
    root = unit_of(model)
    if root is None or root.plan is None:
        raise root_forgotten(model)
    UnitPolicy().changed(root.mesh, **settings)
    if settings and not has_inner_units(model):
        raise AnnotationError(
            "The model has no units whose settings could be changed.",
            where=", ".join(f"{name}={value!r}" for name, value in settings.items()),
            why="its root is the only unit, and is gathered as a whole.",
            do="js.fully_shard(model, units=Block, mesh=mesh)",
        )
    layers = set(map(id, repeated_layers(model)))
    units: dict[Path, Unit] = {}
    for path, module in nested_units(model):
        unit = unit_of(module)
        assert unit is not None
        mine = {} if path or not strategy else {"strategy": strategy}
        if path and unit.placement.gathered:
            mine = {k: v for k, v in settings.items() if id(module) in layers or _is_for_all(k, v)}
        units[path] = dataclasses.replace(unit, policy=unit.policy.changed(unit.mesh, **mine))
    store_plan(model, root.plan, units)


def has_inner_units(model: nnx.Module) -> bool:
    """Whether there are units inside the root whose settings can be changed."""
    return any(path and unit_of(module).placement.gathered for path, module in nested_units(model))  # type: ignore[union-attr]


def _is_for_all(name: str, value: Any) -> bool:
    return name == "prefetch" or (name == "reshard_after_forward" and value is False)


def repeated_layers(model: nnx.Module) -> dict[nnx.Module, int]:
    """The units that repeat, and how many layers each holds: innermost ones that come several times, or stacks."""
    inner = [module for path, module in nested_units(model) if path and _is_innermost(module)]
    inner = [module for module in inner if unit_of(module).placement.gathered]  # type: ignore[union-attr]
    count = collections.Counter(map(plain_class, inner))
    repeated = [module for module in inner if count[plain_class(module)] > 1 or _depth(module) > 1]
    return {module: _depth(module) for module in repeated or inner}


def _is_innermost(module: nnx.Module) -> bool:
    return all(not path for path, _ in nested_units(module)) and any(True for _ in occurrences(module))


def _depth(module: nnx.Module) -> int:
    """Layers that are stacked in a unit's parameters."""
    unit = unit_of(module)
    assert unit is not None
    return max((member.placement.layers for member in unit.members), default=1)
