"""Annotating a Linen module: a copy of it whose calls go through jshard.

A Linen module is a frozen dataclass that is made before its parameters. The annotation is therefore a set of settings
and choices; the layout follows when `init` or `apply` is traced, and is kept with the annotation.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import flax.linen as nn

from jshard import _compat
from jshard._compat import LINEN_CALL
from jshard.errors import AnnotationError
from jshard.linen.layout import Layout, Leaf, Seen
from jshard.plans import checks
from jshard.plans.moved import OF_A_UNIT, check_placement
from jshard.plans.placement import ShardPlacement
from jshard.plans.plan import root_forgotten
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import LogicalOptimizer, Path, Unit, UnitChoice, chosen, dotted

L = TypeVar("L", bound=nn.Module)

_OWN_SETTINGS = ("reshard_after_forward", "mixed_precision", "remat", "prefetch", "placement")


@dataclasses.dataclass(eq=False)
class Annotation:
    """What `fully_shard` records of a Linen module, and the layouts found since.

    Args:
        base: the class that the user wrote.
        root: the record of the root, without parameters.
        choices: which submodules are units, each with the record of its units.
        layouts: what `init` has shown, by the shapes of the parameters.
        specs: the mesh axes that the model names for its parameters, as `init` has shown them.
        latest: the layout that was made or used last.
    """

    base: type[nn.Module]
    root: Unit
    choices: tuple[tuple[UnitChoice, Unit], ...]
    layouts: dict[Any, Layout] = dataclasses.field(default_factory=dict)
    specs: dict[tuple[Path, tuple[int, ...]], tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    latest: Layout | None = None

    @property
    def gathers_all(self) -> bool:
        """Whether every unit is gathered."""
        return all(record.placement.gathered for record in (self.root, *(record for _, record in self.choices)))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The choices of units, as text."""
        return tuple(_text(choice) for choice, _ in self.choices)

    def match(self, path: Path, module: nn.Module) -> int | None:
        """Which choice makes a submodule a unit: the first that it matches."""
        found = (i for i, (choice, _) in enumerate(self.choices) if chosen(choice, dotted(path), module))
        return next(found, None) if path else None

    def layout_of(self, leaves: Mapping[Path, Leaf], survey: Callable[[], Seen], *, keep: bool = False) -> Layout:
        """The layout of these parameters: the one that `init` has shown, or else the one that a survey shows.

        `init` reaches every submodule that has parameters. What another call shows is for that call only: another
        method may reach other units. Parameters that come without the boxes of `init` are placed as they were in them.
        """
        if keep:
            self.specs |= {(path, leaf.shape): leaf.spec for path, leaf in leaves.items()}
        else:
            leaves = {path: self._boxed(path, leaf) for path, leaf in leaves.items()}
        key = frozenset(leaves.items())
        found = None if keep else self.layouts.get(key)
        if found is None:
            found = Layout.make(self.base.__name__, self.root, survey(), leaves)
        if keep:
            self.layouts[key] = found
        self.latest = found
        return found

    def known_layout(self, leaves: Mapping[Path, Leaf]) -> Layout:
        """The layout that `init` has shown for these parameters.

        Raises:
            AnnotationError: it was not traced.
        """
        return self.layout_of(leaves, self._unknown)

    def plain(self, module: nn.Module) -> nn.Module:
        """An annotated module as it was before."""
        return _plain(module, self.base)

    def _boxed(self, path: Path, leaf: Leaf) -> Leaf:
        return leaf if any(leaf.spec) else dataclasses.replace(leaf, spec=self.specs.get((path, leaf.shape), leaf.spec))

    @property
    def layout(self) -> Layout:
        """The latest layout.

        Raises:
            AnnotationError: the parameters are not known yet.
        """
        if self.latest is None:
            self._unknown()
        assert self.latest is not None
        return self.latest

    def _unknown(self) -> NoReturn:
        raise AnnotationError(
            "The parameters of a Linen module are not known yet.",
            where=self.base.__name__,
            why="they are made by init, from its inputs; it has not been called since fully_shard.",
            do="jax.eval_shape(model.init, jax.random.key(0), x)  # computes nothing",
        )


def annotation_of(model: Any) -> Annotation | None:
    """The annotation of a Linen module; None for any other object."""
    return getattr(type(model), "_jshard_linen", None)


def annotation_for(model: Any) -> Annotation:
    """The annotation of a Linen module, which must have one."""
    annotation = annotation_of(model)
    if annotation is None:
        raise root_forgotten(model)
    return annotation


def annotated(module: L, root: Unit, units: Any, unit: Unit, call: Callable[..., Any]) -> L:
    """A copy of the module whose calls go through `call(module, method, *args, **kwargs)`."""
    _check(module, units, unit)
    optimizer = LogicalOptimizer("tx = js.shard_optimizer(model, tx)  # around the whole chain")
    root, unit = (dataclasses.replace(one, optimizer=optimizer) for one in (root, unit))
    annotation = Annotation(type(module), root, tuple(_choices(units, unit)))
    return _annotated_again(module.clone(), annotation, call)  # type: ignore[return-value]


def relaid(module: nn.Module, changed: Callable[[Layout], Layout], call: Callable[..., Any]) -> nn.Module:
    """An annotated module whose layouts are changed: other settings for the units that it has shown."""
    annotation = annotation_for(module)
    assert annotation.latest is not None, "its parameters are known"
    layouts = {key: changed(layout) for key, layout in annotation.layouts.items()}
    again = dataclasses.replace(annotation, layouts=layouts, latest=changed(annotation.latest))
    return _annotated_again(annotation.plain(module), again, call)


def _annotated_class(annotation: Annotation, call: Callable[..., Any]) -> type[nn.Module]:
    base = annotation.base

    @nn.nowrap
    def routed(self: nn.Module, *args: Any) -> Any:
        return call(self, getattr(base, LINEN_CALL), *args)

    def through(method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(method)(lambda self, *args, **kwargs: call(self, method, *args, **kwargs))

    body: dict[str, Any] = {
        **{name: through(method) for name, method in _compat.transformed_methods(base).items()},
        "_jshard_linen": annotation,
        "_jshard_plan": staticmethod(lambda wrt: annotation.layout.plan_for(wrt)),
        LINEN_CALL: routed,
        "__init__": base.__init__,
        "__reduce__": nn.nowrap(lambda self: (_annotated_again, (annotation.plain(self), annotation, call))),
        "__hash__": base.__hash__,
        "__annotations__": {},
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), body)


def _annotated_again(plain: nn.Module, annotation: Annotation, call: Callable[..., Any]) -> nn.Module:
    """What pickle calls; the class of an annotated module is made at run time."""
    object.__setattr__(plain, "__class__", _annotated_class(annotation, call))
    return plain


def _plain(module: nn.Module, base: type[nn.Module]) -> nn.Module:
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    return base(**(fields | {"parent": None}))


def _check(module: nn.Module, units: Any, unit: Unit) -> None:
    found = [name for name, child in _modules(module) if annotation_of(child) is not None]
    if found:
        raise AnnotationError(
            "A module is annotated twice.",
            where=f"{type(module).__name__}: {', '.join(found)}",
            why="it is annotated already; the settings of a Linen model are those of one fully_shard.",
            do='js.fully_shard(model, mesh=mesh, units={Block: {"remat": "full"}, "head": {}})',
        )
    if module.scope is not None:
        raise AnnotationError(
            "A bound module cannot be annotated.",
            where=type(module).__name__,
            why="it holds variables already, of a call that is under way.",
            do="annotate the model before init and apply: model = js.fully_shard(Model(), mesh=mesh)",
        )
    if units is not None and not unit.placement.gathered:
        raise AnnotationError(
            "A unit that is never gathered has units inside.",
            where=f"fully_shard(units={units!r}, placement=js.ShardPlacement(gathered=False))",
            why="its whole call runs as written, and so would they.",
            do='js.fully_shard(model, mesh=mesh, units={"tables": {"placement": js.ShardPlacement(gathered=False)},'
            " Block: {}})  # only the tables",
        )
    if unit.placement.stacked:
        raise AnnotationError(
            "stacked is not for Linen modules.",
            where=f"fully_shard({type(module).__name__}, stacked={unit.placement.stacked})",
            why="how many dims of layers nn.scan adds is found when the model is initialised.",
            do="js.fully_shard(model, mesh=mesh, units=Block)",
        )


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, and those in its fields."""
    yield "(root)", module
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None) if field.name not in ("parent", "name") else None
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, nn.Module):
                yield field.name, one


def _choices(units: Any, record: Unit) -> Iterator[tuple[UnitChoice, Unit]]:
    """The choices with the record of the units that each names."""
    if isinstance(units, Mapping):
        yield from ((choice, _with_settings(record, choice, settings)) for choice, settings in units.items())
    elif units is not None:
        every: Any = units if isinstance(units, Sequence) and not isinstance(units, str) else [units]
        yield from ((choice, record) for choice in every)


def _with_settings(unit: Unit, choice: UnitChoice, settings: Mapping[str, Any]) -> Unit:
    """The record with what one choice sets otherwise."""
    where, plain = check_placement(settings.get("placement")), ShardPlacement()
    of_all = [field.name for field in dataclasses.fields(where) if field.name not in OF_A_UNIT]
    unknown = [name for name in settings if name not in _OWN_SETTINGS]
    unknown += [name for name in of_all if getattr(where, name) != getattr(plain, name)]
    if unknown:
        own = [*_OWN_SETTINGS[:-1], f"placement with {', '.join(OF_A_UNIT)}"]
        raise AnnotationError(
            "A unit has no such setting of its own.",
            where=f"fully_shard(units={{{_text(choice)}: {dict(settings)!r}}})",
            why=f"{', '.join(map(repr, unknown))}; a unit sets {', '.join(own)}.",
            do='js.fully_shard(model, mesh=mesh, units={Block: {"remat": "full"}})',
        )
    common = unit.policy if where.gathered else UnitPolicy()  # what is said for all units is not for this one
    policy = common.changed(unit.mesh, **{name: x for name, x in settings.items() if name != "placement"})
    placing = {name: getattr(where, name) for name in OF_A_UNIT} if "placement" in settings else {}
    made = dataclasses.replace(unit, policy=policy, placement=dataclasses.replace(unit.placement, **placing))
    checks.check_unit(made)
    return made


def check_found(annotation: Annotation, seen: Seen, leaves: Mapping[Path, Leaf]) -> None:
    """Raises for a choice of units, or a pattern in `ignored`, that nothing in the initialised model matches."""
    used = {unit.choice for unit in seen.units.values()}
    unused = [choice for i, (choice, _) in enumerate(annotation.choices) if i not in used]
    if unused:
        raise AnnotationError(
            "No submodule is chosen as a unit.",
            where=f"fully_shard({annotation.base.__name__}, units={', '.join(map(_text, unused))})",
            why="none of its submodules matches; there are "
            + (", ".join(f"{k} ({p})" for k, p in seen.kinds.items()) or "none")
            + ".",
            do='name a class, js.fully_shard(model, units=Block, mesh=mesh), or a path, units="block_*".',
        )
    units = [(), *seen.units]
    names = {dotted(p[len(u) :]) for p in leaves for u in units if p[: len(u)] == u}
    checks.check_patterns_used(annotation.root.placement.ignored, names)


def _text(choice: UnitChoice) -> str:
    return repr(choice) if isinstance(choice, str) else getattr(choice, "__name__", repr(choice))
