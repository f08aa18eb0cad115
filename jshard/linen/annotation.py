"""The record of an annotated Linen module: settings, choices of units, and the layouts found since.

A Linen module is a frozen dataclass that is created before its parameters. The annotation is therefore a set of
settings and choices; the layout is computed when `init` or `apply` is traced, and stored with the annotation.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import flax.linen as nn

from jshard.errors import AnnotationError
from jshard.linen.choices import ChosenUnits
from jshard.linen.layout import Layout
from jshard.linen.survey import Survey
from jshard.plans.model_axes import Entry
from jshard.plans.plan import Leaf, root_forgotten
from jshard.plans.units import Path, Unit

Leaves = Mapping[Path, Leaf]
LayoutKey = frozenset[tuple[Path, Leaf]]
"""Paths, shapes, dtypes and specs of all parameters: one annotated module may be initialised in several sizes."""


# Compared by identity: annotations of the same settings may know different layouts.
@dataclasses.dataclass(eq=False)
class Annotation:
    """The record of `fully_shard` for a Linen module.

    Attributes:
        base: the user's own class.
        root: the record of the root, without parameters.
        choices: which submodules are units.
        layouts: those found by `init`, by the parameters.
        specs: what the boxes of `init` say of each parameter, by path and shape.
        latest: the layout of the latest call; for the optimizer and for new states, which see no call.
    """

    base: type[nn.Module]
    root: Unit
    choices: tuple[ChosenUnits, ...]
    # The class of a module has its annotation: what one copy learns in `init`, all copies know.
    layouts: dict[LayoutKey, Layout] = dataclasses.field(default_factory=dict)
    specs: dict[tuple[Path, tuple[int, ...]], tuple[Entry, ...]] = dataclasses.field(default_factory=dict)
    latest: Layout | None = None

    @property
    def gathers_all(self) -> bool:
        """Whether every unit is gathered."""
        return self.root.placement.gathered and all(units.record.placement.gathered for units in self.choices)

    @property
    def layout(self) -> Layout:
        """The latest layout; an error if the parameters are not known yet."""
        return self.latest or self._unknown()

    def layout_of_init(self, leaves: Leaves, survey: Survey) -> Layout:
        """Makes and keeps the layout of the parameters that `init` created.

        `init` reaches every submodule with parameters. So later calls with such parameters need no survey.
        """
        for path, leaf in leaves.items():
            self.specs[path, leaf.shape] = leaf.spec
        layout = self._made(leaves, survey)
        self.layouts[_key_of(leaves.items())] = layout
        self.latest = layout
        return layout

    def layout_of(self, leaves: Leaves, survey: Callable[[], Survey]) -> Layout:
        """Returns the layout of these parameters: the one found by `init`, or else one made by a survey.

        A survey of another call is valid only for that call: another method may reach other units. Parameters without
        the boxes of `init` are placed as if they had them. Those that were cast since `init` have its layout, with the
        dtypes that follow from the new ones.
        """
        leaves = self._with_specs(leaves)
        layout = self.layouts.get(_key_of(leaves.items())) or self._recast(leaves)
        if layout is None:
            # Not stored in `layouts`: the next call may reach other units.
            layout = self._made(leaves, survey())
        self.latest = layout
        return layout

    def layout_by_init(self, leaves: Leaves) -> Layout | None:
        """Returns the layout found by `init` for these parameters; None if it was not traced."""
        return self.layouts.get(_key_of(self._with_specs(leaves).items()))

    def known_layout(self, leaves: Leaves) -> Layout:
        """Returns the layout found by `init` for these parameters; an error if it was not traced."""
        # In place of a survey: the error is raised only if no `init` knows these parameters.
        return self.layout_of(leaves, self._unknown)

    def plain(self, module: nn.Module) -> nn.Module:
        """Returns an annotated module without its annotation."""
        fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.init}
        # A bound module's parent is a scope or another module, to which the plain one does not belong.
        fields["parent"] = None
        return self.base(**fields)

    def _made(self, leaves: Leaves, survey: Survey) -> Layout:
        root = dataclasses.replace(self.root, kind=self.base.__name__)
        return Layout.make(root, survey, leaves)

    def _recast(self, leaves: Leaves) -> Layout | None:
        """Returns the layout that `init` found for these parameters in other dtypes; None without one."""
        key = _without_dtypes(leaves.items())
        for known_leaves, layout in self.layouts.items():
            # A cast changes no path, shape or spec.
            if _without_dtypes(known_leaves) == key:
                recast = layout.with_dtypes({path: leaf.dtype for path, leaf in leaves.items()})
                # One object for equal parameters: layouts are part of jit's cache key by identity.
                self.layouts[_key_of(leaves.items())] = recast
                return recast
        return None

    def _with_specs(self, leaves: Leaves) -> Leaves:
        """Returns the parameters with the specs of `init` where they have none of their own.

        Optimizers and users unbox parameters, and a checkpoint has no boxes.
        """
        completed = {}
        for path, leaf in leaves.items():
            # `specs` is by shape, too: one annotated module may be initialised in several sizes.
            if not any(leaf.spec):
                leaf = dataclasses.replace(leaf, spec=self.specs.get((path, leaf.shape), leaf.spec))
            completed[path] = leaf
        return completed

    def _unknown(self) -> NoReturn:
        raise AnnotationError(
            "The parameters of a Linen module are not known yet.",
            where=self.base.__name__,
            why="init creates them from its inputs, and it has not been called since fully_shard.",
            do="jax.eval_shape(model.init, jax.random.key(0), x)  # computes nothing",
        )


def _key_of(leaves: Iterable[tuple[Path, Leaf]]) -> LayoutKey:
    return frozenset(leaves)


def _without_dtypes(leaves: Iterable[tuple[Path, Leaf]]) -> LayoutKey:
    return _key_of((path, dataclasses.replace(leaf, dtype="")) for path, leaf in leaves)


def annotation_of(model: object) -> Annotation | None:
    """Returns the annotation of a Linen module; None for any other object."""
    return getattr(type(model), "_jshard_linen", None)


def annotation_for(model: object) -> Annotation:
    """Returns the annotation of a Linen module, which must have one."""
    annotation = annotation_of(model)
    if annotation is None:
        raise root_forgotten(model)
    return annotation
