"""The units that a user names for a Linen model: which submodules, and with which settings."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn

from jshard.errors import AnnotationError
from jshard.plans import checks
from jshard.plans.placement import PlacementPolicy
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import Path, Unit, UnitChoice, chosen, dotted

# What one choice of units can have for itself. The other settings hold for the whole model, and each unit has those of
# the root; `stacked` is shown by `init`.
_OWN_SETTINGS = ("reshard_after_forward", "mixed_precision", "remat", "prefetch", "placement")
_OWN_PLACEMENT = ("shard_dim", "min_size", "offload", "gathered")


@dataclasses.dataclass(frozen=True)
class ChosenUnits:
    """One choice of `units=`, and the record of the units that it chooses."""

    choice: UnitChoice
    record: Unit

    @property
    def text(self) -> str:
        """The choice as a user writes it."""
        return text_of(self.choice)


def text_of(choice: UnitChoice) -> str:
    """Returns a choice as a user writes it: a pattern, or the name of a class or a function."""
    if isinstance(choice, str):
        return repr(choice)
    return getattr(choice, "__name__", repr(choice))


def first_match(choices: Sequence[ChosenUnits], path: Path, module: nn.Module) -> int | None:
    """Returns the index of the first choice that a submodule matches, which makes it a unit; None for the root."""
    # The root has a record of its own.
    if not path:
        return None
    for i, chosen_units in enumerate(choices):
        if chosen(chosen_units.choice, dotted(path), module):
            return i
    return None


def chosen_units(units: Any, record: Unit) -> Iterator[ChosenUnits]:
    """Yields the choices in the argument `units` of `fully_shard`, with their settings applied to a unit's record."""
    if isinstance(units, Mapping):
        for choice, settings in units.items():
            yield ChosenUnits(choice, _with_settings(record, choice, settings))
    elif isinstance(units, Sequence) and not isinstance(units, str):
        for choice in units:
            yield ChosenUnits(choice, record)
    elif units is not None:
        yield ChosenUnits(units, record)


def _with_settings(unit: Unit, choice: UnitChoice, settings: Mapping[str, Any]) -> Unit:
    """Returns the record with the settings of one choice applied."""
    # Unknown names are refused by `_check_settings`, which also needs the placement.
    policy_settings = {name: value for name, value in settings.items() if name in _OWN_SETTINGS}
    inherited = PlacementPolicy(**_placement_settings(unit.placement))
    requested = checks.check_placement(policy_settings.pop("placement", inherited))
    _check_settings(choice, settings, requested)
    placement = dataclasses.replace(unit.placement, **_placement_settings(requested))
    # A unit that is never gathered has no schedule: the settings for all units do not apply to it.
    common = unit.policy if requested.gathered else UnitPolicy()
    policy = common.changed(unit.mesh, **policy_settings)
    result = dataclasses.replace(unit, policy=policy, placement=placement)
    checks.check_unit(result)
    return result


def _placement_settings(policy: PlacementPolicy) -> dict[str, Any]:
    """Returns the settings of a placement that a single unit can have."""
    return {name: getattr(policy, name) for name in _OWN_PLACEMENT}


def _check_settings(choice: UnitChoice, settings: Mapping[str, Any], requested: PlacementPolicy) -> None:
    """Raises for settings that only a whole model can have, also in a placement."""
    unknown = [name for name in settings if name not in _OWN_SETTINGS]
    default = PlacementPolicy()
    for field in dataclasses.fields(requested):
        is_set = getattr(requested, field.name) != getattr(default, field.name)
        if is_set and field.name not in _OWN_PLACEMENT:
            unknown.append(field.name)
    if unknown:
        raise AnnotationError(
            "A single unit has no such setting.",
            where=f"fully_shard(units={{{text_of(choice)}: {dict(settings)!r}}})",
            why=f"{', '.join(map(repr, unknown))}; a unit can set {', '.join(_OWN_SETTINGS)} with"
            f" {', '.join(_OWN_PLACEMENT)}.",
            do='js.fully_shard(model, mesh=mesh, units={Block: {"remat": "full"}})',
        )
