"""Which parameters of a Linen model are trained, in any tree that has them: parameters, gradients, updates."""

from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jshard._annotation_checks import check_patterns_used
from jshard._choices import as_filter
from jshard._errors import AnnotationError
from jshard._linen.updates import Frozen, is_masked
from jshard._nnx import Path, dotted
from jshard._state_places import key_texts, tail_in

if TYPE_CHECKING:
    from jshard._linen.layout import Layout


class Trained:
    """The parameters that are trained.

    Args:
        layout: of the model.
        wrt: which, as in `js.value_and_grad`.

    Raises:
        AnnotationError: none is, or a pattern matches none.
    """

    def __init__(self, layout: "Layout", wrt: Any) -> None:
        self._predicate = nnx.filterlib.to_predicate(as_filter(wrt))
        placed = {leaf.keys[0]: leaf.placement for leaf in layout.plan.leaves}
        self._parameters = {path: self._chosen(path, p.shape, p.dtype) for path, p in placed.items()}
        if wrt is not nnx.Param:
            _check(layout, wrt, self.names)

    @property
    def names(self) -> set[str]:
        """Their paths from the model, as text."""
        return {dotted(path) for path, is_trained in self._parameters.items() if is_trained}

    def mask(self, tree: Any) -> Any:
        """Whether each array in a tree is that of a trained parameter; what is none of the model's has its own path."""

        def one(path: tuple, x: Any) -> bool:
            if is_masked(x):
                return False
            keys = key_texts(path)
            tail = tail_in(self._parameters, keys)
            return self._chosen(keys, x.shape, x.dtype) if tail is None else self._parameters[tail]

        return jax.tree.map_with_path(one, tree, is_leaf=is_masked)

    def part(self, tree: Any) -> Any:
        """A tree with nothing in the places of frozen parameters."""
        return jax.tree.map(lambda keep, x: x if keep else Frozen(), self.mask(tree), tree)

    def split(self, tree: Any) -> tuple[Any, Any]:
        """A tree as two: the trained parameters, and the frozen ones."""
        rest = jax.tree.map(lambda keep, x: Frozen() if keep else x, self.mask(tree), tree)
        return self.part(tree), rest

    def _chosen(self, path: Path, shape: tuple[int, ...], dtype: Any) -> bool:
        return bool(self._predicate(path, nnx.Param(jax.ShapeDtypeStruct(shape, dtype))))


def joined(trained: Any, frozen: Any) -> Any:
    """The tree of which these are the parts."""
    is_frozen = lambda x: isinstance(x, Frozen)
    return jax.tree.map(lambda x, y: y if is_frozen(x) else x, trained, frozen, is_leaf=is_frozen)


def _check(layout: "Layout", wrt: Any, names: set[str]) -> None:
    paths = set(layout.leaves)
    check_patterns_used(wrt, paths, "wrt")
    if not names:
        raise AnnotationError(
            "No parameter of the Linen model is trained.",
            where=f"{layout.kind}: wrt={wrt!r}",
            why=f"it chooses none of {', '.join(sorted(paths)[:4])}{', ...' if len(paths) > 4 else ''}; they have no"
            " types of their own.",
            do='wrt="*/lora_*", a pattern of paths, or a function: lambda path, x: "lora_a" in path.',
        )
