"""Which parameters of a Linen model are trained, in any tree of them: parameters, gradients, updates."""

import dataclasses
from typing import Any, TypeVar

import jax
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from jshard._types import PyTree
from jshard.errors import AnnotationError
from jshard.linen.layout import Layout
from jshard.plans.array_paths import key_texts, tail_in
from jshard.plans.checks import check_patterns_used
from jshard.plans.plan import ShardPlan
from jshard.plans.units import Path, as_filter, dotted

A = TypeVar("A")


class Frozen(optax.MaskedNode):
    """Stands for the gradient and update of a frozen parameter. Tree maps skip it; the parameter stays."""

    __slots__ = ()
    __array_ufunc__ = None  # so a numpy array also leaves the sum to it

    def __radd__(self, parameter: A) -> A:
        return parameter


class Trained:
    """The parameters of a layout that are trained; `wrt` as in `js.value_and_grad`.

    Attributes:
        parameters: for each parameter, by path, whether it is trained.
    """

    def __init__(self, layout: Layout, wrt: Filter) -> None:
        chosen = as_filter(wrt)
        self._predicate = nnx.filterlib.to_predicate(chosen)
        self.parameters: dict[Path, bool] = {}
        for path, leaf in layout.leaves.items():
            self.parameters[path] = self._is_chosen(path, leaf.placement.shape, leaf.placement.dtype)
        # The default trains all, and names nothing that the model could lack.
        if wrt is nnx.Param:
            return
        names = {dotted(path) for path in self.parameters}
        check_patterns_used(chosen, names, "wrt")
        if not any(self.parameters.values()):
            raise _none_trained(layout, wrt, names)

    def mask(self, tree: PyTree) -> PyTree:
        """Returns whether each array in a tree belongs to a trained parameter.

        Arrays that belong to no parameter, as in the state of an optimizer, are chosen by their own path.
        """

        def is_trained(path: tuple, x: Any) -> bool:
            # Optax's own placeholders, in the state of a masked transformation: they have no array.
            if _is_masked(x):
                return False
            keys = key_texts(path)
            # By the end of the path: the state of an optimizer repeats the tree of the parameters.
            parameter = tail_in(self.parameters, keys)
            if parameter is None:
                return self._is_chosen(keys, x.shape, x.dtype)
            return self.parameters[parameter]

        return jax.tree.map_with_path(is_trained, tree, is_leaf=_is_masked)

    def split(self, tree: PyTree) -> tuple[PyTree, PyTree]:
        """Returns a tree as two: the trained parameters, and the frozen ones."""
        mask = self.mask(tree)
        # Placeholders keep the structure, so that `joined` can map over both parts.
        trained = jax.tree.map(lambda is_trained, x: x if is_trained else Frozen(), mask, tree)
        frozen = jax.tree.map(lambda is_trained, x: Frozen() if is_trained else x, mask, tree)
        return trained, frozen

    def _is_chosen(self, path: Path, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> bool:
        """Applies the filter, which was written for variables of NNX, to a parameter of Linen."""
        # Without an array: the filter may look at the path, the class and the shape.
        return bool(self._predicate(path, nnx.Param(jax.ShapeDtypeStruct(shape, dtype))))


def _is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)


def _none_trained(layout: Layout, wrt: Filter, names: set[str]) -> AnnotationError:
    ellipsis = ", ..." if len(names) > 4 else ""
    return AnnotationError(
        "wrt selects no parameter of the Linen model.",
        where=f"{layout.root.kind}: wrt={wrt!r}",
        why=f"the parameters are {', '.join(sorted(names)[:4])}{ellipsis}; they have no types to filter by.",
        do='wrt="*/lora_*"  # a pattern of paths; or a function: lambda path, x: "lora_a" in path',
    )


def joined(trained: PyTree, frozen: PyTree) -> PyTree:
    """Returns the tree of which `Trained.split` made these parts."""

    def is_frozen(x: object) -> bool:
        return isinstance(x, Frozen)

    return jax.tree.map(lambda x, y: y if is_frozen(x) else x, trained, frozen, is_leaf=is_frozen)


def plan_of_training(layout: Layout, wrt: Filter) -> ShardPlan:
    """Returns the plan of a training in which not all parameters are trained; `wrt` as in `js.value_and_grad`."""
    trained = Trained(layout, wrt).parameters
    leaves = tuple(dataclasses.replace(leaf, trained=trained[leaf.keys[0]]) for leaf in layout.plan.leaves)
    return dataclasses.replace(layout.plan, leaves=leaves)
