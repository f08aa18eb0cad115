"""Annotating a Linen module: a copy of a class made at run time, whose calls are dispatched.

Flax finds a module's methods in its class, and copies modules by their fields. So an annotation cannot be a field or a
wrapper: it is a class attribute of a subclass, which every copy of the module has, too.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn
from flax.nnx.filterlib import Filter

from jshard import _compat
from jshard._compat import LINEN_CALL, LINEN_REGISTER
from jshard.errors import AnnotationError
from jshard.linen.annotation import Annotation, annotation_for, annotation_of
from jshard.linen.call import FreeFunction
from jshard.linen.choices import ChosenUnits, chosen_units, text_of
from jshard.linen.dispatch import ROOT, call_annotated, call_function, is_inside_model
from jshard.linen.layout import Layout
from jshard.linen.trained import plan_of_training
from jshard.plans import checks
from jshard.plans.placement import PlacementPolicy
from jshard.plans.plan import ShardPlan
from jshard.plans.units import LogicalOptimizer, Method, Unit

L = TypeVar("L", bound=nn.Module)


def annotated(module: L, root: Unit, units: Any, unit: Unit) -> L:
    """Returns a copy of the module whose calls go through `call_annotated`.

    Args:
        module: the module, not bound to variables.
        root: the record of the root.
        units: the argument of `fully_shard`: which submodules are units, with settings.
        unit: the record of the units, with the settings for all of them.
    """
    _compat.check_linen(module)
    _check(module, unit.placement)
    # One for all records: whichever unit finds a padded parameter, asks whether an optimizer sees logical arrays.
    optimizer = LogicalOptimizer("tx = js.shard_optimizer(model, tx)  # around the whole chain")
    root = dataclasses.replace(root, optimizer=optimizer)
    unit = dataclasses.replace(unit, optimizer=optimizer)
    annotation = Annotation(type(module), root, tuple(chosen_units(units, unit)))
    # Of a copy: the class of the object itself is changed, and the user's module stays plain.
    return _annotated_again(module.clone(), annotation)  # type: ignore[return-value]


def relaid(module: nn.Module, changed: Callable[[Layout], Layout]) -> nn.Module:
    """Returns an annotated module with changed layouts: other settings for the units found so far."""
    annotation = annotation_for(module)
    assert annotation.latest is not None, "its parameters are known"
    layouts = {key: changed(layout) for key, layout in annotation.layouts.items()}
    changed_annotation = dataclasses.replace(annotation, layouts=layouts, latest=changed(annotation.latest))
    return _annotated_again(annotation.plain(module), changed_annotation)


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
        root = _with_settings(root, of_root)
        requested = [known.choice for known in annotation.choices]
    else:
        requested = list(units) if isinstance(units, Sequence) and not isinstance(units, str) else [units]
        _check_known(module, annotation, requested)
    choices = []
    for known in annotation.choices:
        record = known.record
        if known.choice in requested and record.placement.gathered:
            record = _with_settings(record, settings)
        choices.append(ChosenUnits(known.choice, record))
    # Without the layouts, whose plans show the old settings: `init`, or the next call, makes new ones.
    revised = Annotation(annotation.base, root, tuple(choices), specs=dict(annotation.specs))
    return _annotated_again(annotation.plain(module), revised)  # type: ignore[return-value]


def _with_settings(record: Unit, settings: Mapping[str, Any]) -> Unit:
    changed = dataclasses.replace(record, policy=record.policy.changed(record.mesh, **settings))
    checks.check_unit(changed)
    return changed


def _check_known(module: nn.Module, annotation: Annotation, requested: Sequence[Any]) -> None:
    """Raises for a choice that the annotation does not have: the submodules of a Linen model are not known yet."""
    known = [units.choice for units in annotation.choices]
    unknown = [choice for choice in requested if choice not in known]
    if unknown:
        raise AnnotationError(
            "No unit matches the choice of units.",
            where=f"revise({annotation.base.__name__}, {', '.join(map(text_of, unknown))})",
            why=f"the units of a Linen model are chosen by its annotation: {', '.join(map(text_of, known)) or 'none'}.",
            do=f"js.revise(model, {text_of(known[0]) if known else 'None'}, prefetch=2)",
        )


def _check(module: nn.Module, placement: PlacementPolicy) -> None:
    # A submodule with an annotation of its own would be refused at its call (`_refuse_other`): better here.
    annotated_fields = [name for name, child in _modules(module) if annotation_of(child) is not None]
    if annotated_fields or module.scope is not None:
        raise AnnotationError(
            "A module is annotated twice, or while it is bound to variables.",
            where=f"{type(module).__name__}: {', '.join(annotated_fields) or 'bound'}",
            why="one fully_shard sets everything for a Linen model, before init and apply.",
            do='js.fully_shard(Model(), mesh=mesh, units={Block: {"remat": "full"}, "head": {}})',
        )
    if placement.stacked:
        raise AnnotationError(
            "A placement's stacked cannot be set for Linen modules.",
            where=f"fully_shard({type(module).__name__}, stacked={placement.stacked})",
            why="init shows which layers nn.scan stacks.",
            do="js.fully_shard(model, mesh=mesh, units=Block)",
        )


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and those in its fields, each with the name of the field."""
    yield "(root)", module
    for field in dataclasses.fields(module):
        if field.name in ("parent", "name"):
            continue
        value = getattr(module, field.name, None)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, nn.Module):
                yield field.name, item


# The class of an annotated model.


def _annotated_class(annotation: Annotation) -> type[nn.Module]:
    base = annotation.base
    body = _kept_of_class(base)
    # Flax passes plain methods through LINEN_CALL; of a transformed one, only the method inside it.
    for name, method in _compat.transformed_methods(base).items():
        body[name] = _annotated_method(method)
    for name in ("apply", "init_with_output"):
        body[name] = _with_function(getattr(base, name))

    # `nowrap`: Flax would pass what this class defines through LINEN_CALL, too.
    @nn.nowrap
    def call_method(self: nn.Module, *args: object) -> object:
        return call_annotated(self, getattr(base, LINEN_CALL), *args)

    @nn.nowrap
    def reduce(self: nn.Module) -> tuple:
        # The class itself cannot be found by name: it is made again from the user's module.
        return _annotated_again, (annotation.plain(self), annotation)

    def plan_for(wrt: Filter) -> ShardPlan:
        return plan_of_training(annotation.layout, wrt)

    body[LINEN_CALL] = call_method
    body[LINEN_REGISTER] = _linking_register(base)
    body["__reduce__"] = reduce
    body["_jshard_linen"] = annotation
    body["_jshard_plan"] = staticmethod(plan_for)
    # Of the base's name, by which Flax names a submodule, and so its parameters.
    return type(base.__name__, (base,), body)


def _annotated_again(plain: nn.Module, annotation: Annotation) -> nn.Module:
    """Annotates a module in place; called by pickle, because the class is created at run time."""
    object.__setattr__(plain, "__class__", _annotated_class(annotation))
    return plain


def _annotated_method(method: Method) -> Method:
    @functools.wraps(method)
    def run(self: nn.Module, *args: object, **kwargs: object) -> object:
        return call_annotated(self, method, *args, **kwargs)

    return run


def _with_function(apply: Method) -> Method:
    """Returns Flax's `apply` whose `method=` may be a function that is no method of the class: it is one call, too."""

    @nn.nowrap
    @functools.wraps(apply)
    def run(self: nn.Module, *args: object, method: Method | str | None = None, **kwargs: object) -> object:
        function = getattr(method, "__func__", method)
        if callable(function) and not _compat.is_method(function) and inspect.signature(function).parameters:
            # A function without parameters cannot take the module: Flax refuses it, with its own error.
            method = functools.partial(call_function, FreeFunction(function))
        return apply(self, *args, method=method, **kwargs)

    return run


def _kept_of_class(base: type[nn.Module]) -> dict[str, object]:
    """Returns what a subclass keeps of its base: Flax would make it again."""
    return {
        "__init__": base.__init__,
        "__hash__": base.__hash__,
        "__annotations__": {},
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }


# The classes of submodules of a bound annotated model, as `model.bind(variables).encoder`: their calls find the model.


def _linking_register(base: type[nn.Module]) -> Callable[..., None]:
    """Returns the method by which a module takes submodules, of fields and of `setup`: it links them to the model."""

    @nn.nowrap
    def register(self: nn.Module, name: str, value: object) -> None:
        getattr(base, LINEN_REGISTER)(self, name, value)
        root = self if annotation_of(self) is not None else vars(self).get(ROOT)
        if root is None or is_inside_model():  # inside the model they are called as they are
            return
        for child in _compat.linen_children(self):
            # Past the frozen dataclass. The first root stays: a module may be shared by several.
            if annotation_of(child) is None and ROOT not in vars(child):
                object.__setattr__(child, "__class__", _linked_class(type(child)))
                object.__setattr__(child, ROOT, root)  # Flax's own reference to a parent does not keep it

    return register


@functools.cache
def _linked_class(base: type[nn.Module]) -> type[nn.Module]:
    body = _kept_of_class(base)
    for name, method in _compat.transformed_methods(base).items():
        body[name] = _linked_method(method)
    body[LINEN_CALL] = nn.nowrap(_linked_method(getattr(base, LINEN_CALL)))
    body[LINEN_REGISTER] = _linking_register(base)
    return type(base.__name__, (base,), body)


def _linked_method(method: Method) -> Method:
    @functools.wraps(method)
    def run(self: nn.Module, *args: object, **kwargs: object) -> object:
        if is_inside_model():
            return method(self, *args, **kwargs)
        return call_annotated(self, method, *args, **kwargs)

    return run
