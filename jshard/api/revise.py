"""`js.revise`: other settings for the units of an annotated model."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import flax.linen as nn
from flax import nnx

from jshard.api.fully_shard import leaves_of
from jshard.errors import AnnotationError
from jshard.linen.annotated_class import revised_linen
from jshard.plans import checks
from jshard.plans.placement import Selection
from jshard.plans.plan import ShardPlan, make_plan, record_of, with_units
from jshard.plans.plan import plan as make_plan_of
from jshard.plans.policies import Fallback, MixedPrecision, UnitPolicy
from jshard.plans.remat import Remat
from jshard.plans.stages import Stages
from jshard.plans.units import (
    Path,
    Unit,
    UnitChoice,
    chosen,
    dotted,
    nested_units,
    occurrences,
    plain_class,
    store_plan,
)

M = TypeVar("M", bound=nnx.Module | nn.Module)

LAYER_SETTINGS = ("reshard_after_forward", "remat", "prefetch")
"""What `revise_layers` changes; each as in `js.fully_shard`."""

SettingsByName = Mapping[str, Any]
"""Settings of units by their names in `js.fully_shard`."""


class RevisedSettings(TypedDict, total=False):
    """The settings of a unit that can be changed; each as in `js.fully_shard`."""

    reshard_after_forward: bool | int | None
    remat: Remat
    prefetch: int | str
    mixed_precision: MixedPrecision | None
    fallback: Fallback
    stages: Stages


def revise(
    model: M,
    units: UnitChoice | nnx.Module | Sequence[UnitChoice | nnx.Module] | None = None,
    **settings: Unpack[RevisedSettings],
) -> M:
    """Changes settings of an annotated model's units: how they are gathered, freed, recomputed and cast.

    Parameters keep their placement and their values. The settings are part of the model's class, so the next call of a
    compiled step with the model compiles once more; a change back finds the first program again. A step that was
    compiled with the model's old graph in its closure keeps the old settings.

    Args:
        model: the root of an annotated nnx model, which is changed in place; or an annotated Linen model.
        units: which units: a class, a path pattern such as `"blocks/*"`, a function of (path, module), a module of
            the model, which may be the root, or a list of these. None: all, and the root; `remat` then applies to the
            units inside the root only, as in `js.fully_shard`. Of a Linen model, choices of its annotation.
        **settings: `reshard_after_forward`, `remat`, `prefetch`, `mixed_precision` and `fallback`, each as in
            `js.fully_shard`; `stages`, a `js.parallel.Stages`. Settings that are not named stay as they are.

    Returns:
        The same object; for a Linen model, a copy, whose units are found again by its next `init` or call.

    Raises:
        AnnotationError: the model is not annotated, no unit is chosen, or a setting is not valid.

    Examples:
        >>> model = js.revise(model, reshard_after_forward=False)  # ZeRO-2, while gradients are accumulated
        >>> model = js.revise(model, "blocks/*", remat="full", prefetch=2)
    """
    _check_names(settings)
    if isinstance(model, nn.Module):
        return revised_linen(model, units, settings)
    root = record_of(model)
    # The values are checked before any record is changed, also where they apply to no unit.
    UnitPolicy().changed(root.mesh, **settings)
    chosen_paths = _chosen_paths(model, units)
    records: dict[Path, Unit] = {}
    for path, module in nested_units(model):
        record = record_of(module)
        if path in chosen_paths:
            record = _changed(record, _applicable(settings, path, len(chosen_paths), is_default=units is None))
        records[path] = record
    _store(model, records, dtypes_change="mixed_precision" in settings)
    return model


def _check_names(settings: SettingsByName) -> None:
    known = RevisedSettings.__annotations__
    unknown = [name for name in settings if name not in known]
    if unknown or not settings:
        where = ", ".join(f"{name}={settings[name]!r}" for name in unknown) or "none is named"
        raise AnnotationError(
            "A unit has no such setting.",
            where=f"revise({where})",
            why=f"the settings that can be changed are {', '.join(known)}; a placement or a mesh needs js.reshard.",
            do='js.revise(model, "blocks/*", remat="full")',
        )


def _chosen_paths(
    model: nnx.Module, units: UnitChoice | nnx.Module | Sequence[UnitChoice | nnx.Module] | None
) -> set[Path]:
    """Returns the paths of the chosen units; raises if there are none."""
    if units is None:
        return {path for path, module in nested_units(model) if not path or record_of(module).placement.gathered}
    # A pattern is a sequence of letters, and a list of modules may be a module of Flax.
    is_list = isinstance(units, Sequence) and not isinstance(units, str | nnx.Module)
    choices: list[Any] = list(units) if is_list else [units]  # type: ignore[arg-type]
    paths: set[Path] = set()
    for path, module in nested_units(model):
        if any(_is_chosen(choice, path, module) for choice in choices):
            paths.add(path)
    if not paths:
        raise _no_unit_chosen(model, units)
    return paths


def _no_unit_chosen(model: nnx.Module, units: object) -> AnnotationError:
    """Returns the error for a choice that matches no unit."""
    kinds: dict[str, str] = {}  # classes of the units, each with the path of one
    for path, module in nested_units(model):
        kinds.setdefault(plain_class(module).__name__, dotted(path))
    units_text = ", ".join(f"{name} at {path}" for name, path in kinds.items())
    # A line that can be pasted: the last unit is one inside the root, where there is one.
    *_, last_path = kinds.values()
    example = "model, prefetch=2" if last_path == dotted(()) else f'"{last_path}", prefetch=2'
    return AnnotationError(
        "No unit matches the choice of units.",
        where=f"revise({plain_class(model).__name__}, {units!r})",
        why=f"the units are {units_text}.",
        do=f"js.revise(model, {example})",
    )


def _is_chosen(choice: Any, path: Path, module: nnx.Module) -> bool:
    if isinstance(choice, nnx.Module):
        return choice is module
    # The root is chosen only as an object: every pattern is for what is inside it.
    return bool(path) and chosen(choice, dotted(path), module)


def _applicable(settings: SettingsByName, path: Path, num_chosen: int, *, is_default: bool) -> SettingsByName:
    """Returns the settings that apply to a unit."""
    if not is_default or path or num_chosen == 1:
        return settings
    # remat of the root would run every unit inside it three times.
    return {name: value for name, value in settings.items() if name != "remat"}


def _changed(record: Unit, settings: SettingsByName) -> Unit:
    """Returns the record of a unit with other settings; raises if they do not go together."""
    changed = dataclasses.replace(record, policy=record.policy.changed(record.mesh, **settings))
    checks.check_unit(changed)
    return changed


def _store(model: nnx.Module, records: Mapping[Path, Unit], *, dtypes_change: bool) -> None:
    """Sets new records of the units of a model, all at once: each has a view of the plan, in which all are shown."""
    plan = record_of(model).plan
    assert plan is not None, "an annotated model has one"
    if dtypes_change:
        # The plan has the dtypes in which parameters are gathered and reduced.
        plan = make_plan(leaves_of(model), records)
    store_plan(model, plan, records)


# Settings for a command line or a search, which name no units.


def revise_layers(model: nnx.Module, settings: SettingsByName) -> None:
    """Changes settings (`LAYER_SETTINGS`) of the units that they are meant for, in place.

    `prefetch`, and a `reshard_after_forward` of False, apply to every unit inside the root. Other values of
    `reshard_after_forward`, and `remat`, apply to the layers only: units that the model has several of, or stacks of
    them; to all innermost units if no unit repeats. A head or an encoder's wrapper keeps its settings, as does a unit
    that is never gathered.
    """
    _check_layer_settings(model, settings)
    _store(model, _with_other_layers(model, settings), dtypes_change=False)


def plan_of_layers(model: nnx.Module, settings: SettingsByName, *, wrt: Selection = nnx.Param) -> ShardPlan:
    """Returns the plan that a model has after `revise_layers`; the model stays as it is."""
    _check_layer_settings(model, settings)
    return with_units(make_plan_of(model, wrt=wrt), _with_other_layers(model, settings))


def _with_other_layers(model: nnx.Module, settings: SettingsByName) -> dict[Path, Unit]:
    """Returns the records of a model's units, with the settings where they apply."""
    layers = set(map(id, repeated_layers(model)))
    records: dict[Path, Unit] = {}
    for path, module in nested_units(model):
        record = record_of(module)
        is_root = not path
        # A unit that is never gathered has no schedule.
        if record.placement.gathered and not is_root:
            record = _changed_policy(record, settings, is_layer=id(module) in layers)
        records[path] = record
    return records


def _changed_policy(record: Unit, settings: SettingsByName, *, is_layer: bool) -> Unit:
    """Returns the record of a unit with those of the settings that apply to it."""
    applicable = {name: value for name, value in settings.items() if is_layer or _is_for_all(name, value)}
    return dataclasses.replace(record, policy=record.policy.changed(record.mesh, **applicable))


def _check_layer_settings(model: nnx.Module, settings: SettingsByName) -> None:
    """Raises for settings that are not valid, or for a model that has no unit to apply them to."""
    root = record_of(model)
    unknown = [name for name in settings if name not in LAYER_SETTINGS]
    if unknown:
        raise AnnotationError(
            "A unit has no such setting.",
            where=[f"{name}={settings[name]!r}" for name in unknown],
            why=f"the settings are {', '.join(LAYER_SETTINGS)}.",
            do='js.revise(model, "blocks/*", remat="full")',
        )
    UnitPolicy().changed(root.mesh, **settings)  # checks the values, also if they apply to no unit
    if settings and not has_inner_units(model):
        raise AnnotationError(
            "The model has no units whose settings could be changed.",
            where=", ".join(f"{name}={value!r}" for name, value in settings.items()),
            why="its root is the only unit, and it is gathered as a whole.",
            do="js.fully_shard(model, units=Block, mesh=mesh)",
        )


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
