"""Optax and gradients for a Linen model: a transformation that holds its state to the plan."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

from jshard import _compat
from jshard.engine.accumulate import Loss
from jshard.errors import AnnotationError
from jshard.linen.annotation import annotation_of
from jshard.linen.layout import HostUpdate, Layout, Trained, joined
from jshard.linen.padded import boxed, boxed_like, unboxed
from jshard.plans.memories import to_device, to_host
from jshard.plans.mesh import AnyMesh, is_concrete
from jshard.plans.optimizer_state import Keys, StatePlaces, key_texts, parts_of, streamed
from jshard.plans.placement import Placement
from jshard.plans.plan import root_forgotten


def linen_optimizer(
    model: nn.Module, tx: optax.GradientTransformation, *, wrt: Any, shard_replicated: bool
) -> optax.GradientTransformationExtraArgs:
    """The transformation for the `TrainState` of an annotated Linen model; see `js.shard_optimizer`.

    Its parameters may be unknown yet: where the state is is looked up when it is made and updated.

    Raises:
        AnnotationError: the model is not annotated, or a setting is for nnx models.
    """
    annotation = annotation_of(model)
    if annotation is None:
        raise root_forgotten(model)
    if shard_replicated:
        raise _for_nnx(annotation.base.__name__)
    assert annotation.root.optimizer is not None, "fully_shard gives every Linen model one"
    annotation.root.optimizer.exists = True
    all_are, trained = wrt is nnx.Param, lambda: Trained(annotation.layout, wrt)
    tx = optax.with_extra_args_support(tx if all_are else optax.masked(tx, lambda tree: trained().mask(tree)))

    def init(params: Any) -> Any:
        places, state = places_of(annotation.layout), tx.init(unboxed(to_device(params)))
        state = boxed(state, places) if _has_boxes(params) else state
        return _to_host(_held(state, places, annotation.root.mesh), places)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        rule = _Update(tx, annotation.layout, unboxed(to_device(extra)))
        grads = grads if all_are else trained().part(grads)
        return rule.streamed(grads, state, params) if rule.places.offloaded else rule(grads, state, params)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def places_of(layout: Layout) -> StatePlaces:
    """Where the parameter at a path is, so that its state is there, too."""
    return StatePlaces(layout.plan)


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
        """Updates and the next state of arrays on the device, each placed as what it replaces."""
        held = _held((grads, state), self.places, self._mesh)
        plain_grads, plain_state = unboxed(held)
        made = self._tx.update(plain_grads, plain_state, unboxed(params), **self._extra)
        return _held(boxed_like(held, made), self.places, self._mesh)

    def streamed(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The same of arrays in host memory, which come to the device and go back a part at a time.

        With the update of a parameter there comes its sum with it.
        """
        given, tree = jax.tree.flatten((grads, state, params))
        of_grads, of_state, of_params = map(_paths, (grads, state, params))
        parameters = dict(zip(of_params, jax.tree.leaves(params), strict=True))
        away = {path: x for path in of_grads if (x := parameters.get(path)) is not None and _compat.on_host(x)}

        def update(*arrays: jax.Array) -> list[jax.Array]:
            grads, state, params = jax.tree.unflatten(tree, arrays)
            updates, state = self(grads, state, params)
            sums = self._sums(params, updates) if away else {}
            return [*jax.tree.leaves((updates, state)), *(sums[path] for path in away)]

        made = [*of_grads, *of_state]
        parts = parts_of(self.places.offloaded, [*made, *of_params], [*made, *away], of_grads)
        device = [jax.ShapeDtypeStruct((), "float32")] * len(of_grads)
        found = streamed(update, given, parts, like=[*device, *jax.tree.leaves(state), *away.values()])
        updates, state = jax.tree.unflatten(jax.tree.structure((grads, state)), found[: len(made)])
        return _with_sums(updates, away, dict(zip(away, found[len(made) :], strict=True))), state

    def _sums(self, params: Any, updates: Any) -> dict[Keys, jax.Array]:
        """The parameters after the update, by path."""
        sums = _held(optax.apply_updates(params, updates), self.places, self._mesh)
        return dict(zip(_paths(sums), jax.tree.leaves(sums), strict=True))


def _paths(tree: Any) -> list[Keys]:
    return [key_texts(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _with_sums(updates: Any, parameters: Mapping[Keys, Any], sums: Mapping[Keys, Any]) -> Any:
    """Updates; those of parameters in host memory with what the sums with them are."""

    def one(path: tuple, x: Any) -> Any:
        keys = key_texts(path)
        return HostUpdate(x, (parameters[keys], sums[keys])) if keys in sums else x

    return jax.tree.map_with_path(one, updates)


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
    """Optimizer state, put where the plan says: `shard_init` reads from its type where it is to be."""
    there = lambda path, x: to_host(x) if places.on_host(key_texts(path), x.shape) else x
    return jax.tree.map_with_path(there, state)


def _for_nnx(name: str) -> AnnotationError:
    return AnnotationError(
        "The optimizer of a Linen model shards no state of replicated parameters.",
        where=f"shard_optimizer({name}, tx, shard_replicated=True)",
        why="js.shard_init places what a TrainState holds: state as its parameters.",
        do="js.shard_optimizer(model, tx)",
    )


# The loss of a Linen model, as a function of trees of arrays.


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
