"""Other settings for the units of an annotated Linen model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn

from jshard.errors import AnnotationError
from jshard.linen.annotated_class import annotated_again
from jshard.linen.annotation import Annotation, annotation_for
from jshard.linen.choices import ChosenUnits, text_of
from jshard.plans import checks
from jshard.plans.units import Unit

L = TypeVar("L", bound=nn.Module)


def revised_linen(module: L, units: Any, settings: Mapping[str, Any]) -> L:
    """Returns a copy of an annotated module whose units have other settings.

    Args:
        module: the annotated module.
        units: choices of its annotation, one or a list; None: all of them, and the root.
        settings: by their names in `js.fully_shard`; all are known.
    """
    annotation = annotation_for(module)
    # Values that are not valid are refused also where they apply to no unit.
    annotation.root.policy.changed(annotation.root.mesh, **settings)
    root = annotation.root
    if units is None:
        has_inner_units = bool(annotation.choices)
        # remat of the root would run every unit inside it three times.
        of_root = {name: value for name, value in settings.items() if name != "remat" or not has_inner_units}
        root = _changed(root, of_root)
        requested = [chosen_units.choice for chosen_units in annotation.choices]
    else:
        requested = list(units) if isinstance(units, Sequence) and not isinstance(units, str) else [units]
        _check_known(module, annotation, requested)
    choices = []
    for chosen_units in annotation.choices:
        if chosen_units.choice in requested and chosen_units.record.placement.gathered:
            chosen_units = ChosenUnits(chosen_units.choice, _changed(chosen_units.record, settings))
        choices.append(chosen_units)
    # Without the layouts, whose plans show the old settings: `init`, or the next call, makes new ones.
    revised = Annotation(annotation.base, root, tuple(choices), specs=dict(annotation.specs))
    return annotated_again(annotation.plain(module), revised)  # type: ignore[return-value]


def _changed(record: Unit, settings: Mapping[str, Any]) -> Unit:
    changed = dataclasses.replace(record, policy=record.policy.changed(record.mesh, **settings))
    checks.check_unit(changed)
    return changed


def _check_known(module: nn.Module, annotation: Annotation, requested: Sequence[Any]) -> None:
    """Raises for a choice that the annotation does not have: the submodules of a Linen model are not known yet."""
    known = [chosen_units.choice for chosen_units in annotation.choices]
    unknown = [choice for choice in requested if choice not in known]
    if unknown:
        raise AnnotationError(
            "No unit matches the choice of units.",
            where=f"revise({annotation.base.__name__}, {', '.join(map(text_of, unknown))})",
            why=f"the units of a Linen model are chosen by its annotation: {', '.join(map(text_of, known)) or 'none'}.",
            do=f"js.revise(model, {text_of(known[0]) if known else 'None'}, prefetch=2)",
        )
