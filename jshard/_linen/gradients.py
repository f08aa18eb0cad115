"""The loss of a Linen model, as a function of trees of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jshard._linen.annotation import annotation_of
from jshard._linen.layout import Layout
from jshard._linen.optimizer import places_of
from jshard._linen.trained import joined
from jshard._placement import Placement
from jshard._plan import root_forgotten
from jshard._state_places import key_texts
from jshard.engine.accumulate import Loss


def linen_loss(loss_fn: Callable, trained: Any, frozen: Any, layout: Layout, has_aux: bool) -> Loss:
    """The loss of trained and frozen parameters."""
    places = places_of(layout)

    def run(params: Any, frozen: Any, state: Any, part: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        out = loss_fn(joined(params, frozen), *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, state)

    def placement(path: tuple, x: Any) -> Placement | None:
        found = places.parameter(key_texts(path))
        return found if found is not None and found.stored_shape == jnp.shape(x) else None

    placed = [[placement(path, x) for path, x in jax.tree.leaves_with_path(tree)] for tree in (trained, frozen)]
    return Loss(run, trained, frozen, (), (placed[0], placed[1]), layout.root, layout.kind)


def layout_of(model: Any) -> Layout:
    """The layout of a Linen model whose loss is given."""
    annotation = annotation_of(model)
    if annotation is None:
        raise root_forgotten(model)
    return annotation.layout
