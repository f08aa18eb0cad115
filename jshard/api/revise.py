"""Changed settings for the units of an annotated model: to try configurations without editing its file."""

import collections
import dataclasses
from collections.abc import Mapping

from flax import nnx

from jshard.errors import AnnotationError
from jshard.plans.plan import record_of
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import Path, Unit, nested_units, occurrences, plain_class, store_plan

SETTINGS = ("reshard_after_forward", "remat", "prefetch")
"""What `revise` changes; each as in `js.fully_shard`."""


def revise(model: nnx.Module, settings: Mapping[str, object]) -> None:
    """Changes settings (`SETTINGS`) of an annotated model's units, in place. Parameters keep their placement.

    `prefetch`, and a `reshard_after_forward` of False, apply to every unit inside the root. Other values of
    `reshard_after_forward`, and `remat`, apply to the layers only: units that the model has several of, or stacks of
    them; to all innermost units if no unit repeats. A head or an encoder's wrapper keeps its settings, as does a unit
    that is never gathered.
    """
    root = record_of(model)
    assert root.plan is not None, "an annotated model has one"
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown:
        raise AnnotationError(
            "A unit has no such setting.",
            where=[f"{name}={settings[name]!r}" for name in unknown],
            why=f"the settings are {', '.join(SETTINGS)}.",
            do='revise(model, {"remat": "full"})',
        )
    UnitPolicy().changed(root.mesh, **settings)  # checks the values, also if they apply to no unit
    if settings and not has_inner_units(model):
        raise AnnotationError(
            "The model has no units whose settings could be changed.",
            where=", ".join(f"{name}={value!r}" for name, value in settings.items()),
            why="its root is the only unit, and it is gathered as a whole.",
            do="js.fully_shard(model, units=Block, mesh=mesh)",
        )
    layers = set(map(id, repeated_layers(model)))
    units: dict[Path, Unit] = {}
    for path, module in nested_units(model):
        unit = record_of(module)
        is_root = not path
        # A unit that is never gathered has no schedule.
        if unit.placement.gathered and not is_root:
            unit = _changed(unit, settings, is_layer=id(module) in layers)
        units[path] = unit
    # All records at once: each has its view of the plan, in which the settings of the units inside are shown.
    store_plan(model, root.plan, units)


def _changed(unit: Unit, settings: Mapping[str, object], *, is_layer: bool) -> Unit:
    """Returns the record of a unit with the settings that apply to it."""
    applicable = {name: value for name, value in settings.items() if is_layer or _is_for_all(name, value)}
    return dataclasses.replace(unit, policy=unit.policy.changed(unit.mesh, **applicable))


def _is_for_all(name: str, value: object) -> bool:
    """Returns whether a setting applies to every unit inside the root, and not to the layers alone."""
    return name == "prefetch" or (name == "reshard_after_forward" and value is False)


def has_inner_units(model: nnx.Module) -> bool:
    """Returns whether there are units inside the root whose settings can be changed."""
    return any(path and record_of(module).placement.gathered for path, module in nested_units(model))


def repeated_layers(model: nnx.Module) -> dict[nnx.Module, int]:
    """Returns the units that repeat, with the number of layers in each.

    These are innermost units that occur several times, or stacks; all innermost units if none is.
    """
    depths: dict[nnx.Module, int] = {}
    for path, module in nested_units(model):
        unit = record_of(module)
        if path and unit.placement.gathered and _is_innermost(module):
            # A stack is one module with all layers in its parameters.
            depths[module] = max((leaf.placement.layers for leaf in unit.members), default=1)
    counts = collections.Counter(map(plain_class, depths))
    repeated = {module: depth for module, depth in depths.items() if depth > 1 or counts[plain_class(module)] > 1}
    return repeated or depths


def _is_innermost(module: nnx.Module) -> bool:
    """Returns whether a unit has parameters and no unit inside."""
    has_inner_unit = any(path for path, _ in nested_units(module))
    has_parameter = any(True for _ in occurrences(module))
    return has_parameter and not has_inner_unit
