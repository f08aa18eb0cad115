"""Optax for a Linen model: a transformation that holds its state to the plan, in the memory that the plan says."""

from typing import Any, cast

import flax.linen as nn
import jax
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

from jshard._errors import AnnotationError
from jshard._linen import annotation_of
from jshard._linen_layout import Layout
from jshard._linen_padded import boxed, boxed_like, unboxed
from jshard._mesh import AnyMesh, is_concrete
from jshard._offload import to_device, to_host
from jshard._plan import root_forgotten
from jshard._state_places import StatePlaces, key_texts
from jshard._streamed import parts_of, streamed


def linen_optimizer(
    model: nn.Module, tx: optax.GradientTransformation, *, wrt: Any, shard_replicated: bool
) -> optax.GradientTransformationExtraArgs:
    """The transformation for the `TrainState` of an annotated Linen model; see `js.shard_optimizer`.

    Its parameters may be unknown yet: where the state lies is looked up when it is made and updated.

    Raises:
        AnnotationError: the model is not annotated, or a setting is for nnx models.
    """
    annotation = annotation_of(model)
    if annotation is None:
        raise root_forgotten(model)
    if wrt is not nnx.Param or shard_replicated:
        raise _for_nnx(annotation.base.__name__, wrt, shard_replicated)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        places, state = places_of(annotation.layout), tx.init(unboxed(params))
        state = boxed(state, places) if _has_boxes(params) else state
        return _to_host(_held(state, places, annotation.root.mesh), places)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        rule = _Update(tx, annotation.layout, unboxed(to_device(extra)))
        return rule.streamed(grads, state, params) if rule.places.offloaded else rule(grads, state, params)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def places_of(layout: Layout) -> StatePlaces:
    """Where what lies at the path of a parameter lies, too."""
    return StatePlaces({leaf.path: leaf.placement for leaf in layout.leaves.values()}, layout.root.rule.degrees)


class _Update:
    """An update by a transformation that sees logical arrays.

    Args:
        tx: the transformation.
        layout: of the model.
        extra: further arguments of the update.
    """

    def __init__(self, tx: optax.GradientTransformationExtraArgs, layout: Layout, extra: dict[str, Any]) -> None:
        self.places = places_of(layout)
        self._tx, self._mesh, self._extra = tx, layout.root.mesh, extra

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Updates and the next state of arrays on the device, each as what it replaces lies."""
        held = _held((grads, state), self.places, self._mesh)
        plain_grads, plain_state = unboxed(held)
        made = self._tx.update(plain_grads, plain_state, unboxed(params), **self._extra)
        return _held(boxed_like(held, made), self.places, self._mesh)

    def streamed(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The same of state in host memory, which comes to the device and goes back a part at a time."""
        (given, tree), like = jax.tree.flatten((grads, state, params)), jax.tree.leaves(state)
        paths = [[key_texts(path) for path, _ in jax.tree.leaves_with_path(x)] for x in (grads, state, params)]
        of_grads, of_state, of_params = paths
        made = jax.tree.structure((grads, state))
        parts = parts_of(self.places.offloaded, of_grads + of_state + of_params, of_grads + of_state, of_grads)
        update = lambda *arrays: jax.tree.leaves(self(*jax.tree.unflatten(tree, arrays)))
        device = [jax.ShapeDtypeStruct((), "float32")] * len(of_grads)
        return jax.tree.unflatten(made, streamed(update, given, parts, like=[*device, *like]))


def _held(tree: Any, places: StatePlaces, mesh: AnyMesh) -> Any:
    """Stored arrays of the model's parameters, held to the plan; without it the compiler picks anew.

    A caller may have others: of other models, and logical ones, which no sharding divides.
    """

    def hold(path: tuple, x: Any) -> Any:
        keys = key_texts(path)
        padding = places.padding(keys, x.shape)
        is_logical = padding is not None and padding.logical_shape(x.shape) == x.shape
        if is_logical or (x.ndim and places.tail(keys) is None):
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, places.spec(keys, x.shape)))

    return jax.tree.map_with_path(hold, tree) if is_concrete(mesh) else tree


def _has_boxes(tree: Any) -> bool:
    return jax.tree.structure(tree) != jax.tree.structure(unboxed(tree))


def _to_host(state: Any, places: StatePlaces) -> Any:
    """Optimizer state, put where the plan says: `shard_init` reads from its type where it is to lie."""
    there = lambda path, x: to_host(x) if places.on_host(key_texts(path), x.shape) else x
    return jax.tree.map_with_path(there, state)


def _for_nnx(name: str, wrt: Any, shard_replicated: bool) -> AnnotationError:
    told = [f"wrt={wrt!r}"] * (wrt is not nnx.Param) + ["shard_replicated=True"] * shard_replicated
    return AnnotationError(
        "The optimizer of a Linen model takes no such settings.",
        where=f"shard_optimizer({name}, tx, {', '.join(told)})",
        why="its TrainState says which parameters are updated, and js.shard_init places what that holds.",
        do="js.shard_optimizer(model, optax.masked(tx, mask))  # to update some of them",
    )
