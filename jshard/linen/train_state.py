"""The state of a Linen model: optimizer state that follows the plan, its loss, and arrays born in place."""

from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard.engine.accumulate import Loss
from jshard.errors import AnnotationError
from jshard.linen.annotation import annotation_for
from jshard.linen.layout import Layout, boxed, boxed_like, unboxed
from jshard.plans.checks import check_replicated
from jshard.plans.memories import Keys, key_texts, sharding_of
from jshard.plans.placement import Placement

# Optimizer state.


def linen_optimizer(
    model: nn.Module, tx: optax.GradientTransformation, *, wrt: Any, shard_replicated: bool
) -> optax.GradientTransformationExtraArgs:
    """The transformation for the `TrainState` of an annotated Linen model; see `js.shard_optimizer`.

    Its parameters may be unknown yet: where the state is is looked up when it is made and updated.
    """
    annotation = annotation_for(model)
    if shard_replicated or wrt is not nnx.Param:
        raise AnnotationError(
            "wrt and shard_replicated are settings of the optimizer of an nnx model.",
            where=f"shard_optimizer({annotation.base.__name__}, tx)",
            why="js.shard_init places what a TrainState holds: state as its parameters.",
            do="js.shard_optimizer(model, tx)  # around optax.masked(...), if some parameters are frozen",
        )
    assert annotation.root.optimizer is not None, "fully_shard gives every Linen model one"
    annotation.root.optimizer.exists = True
    tx = optax.with_extra_args_support(tx)
    held = lambda tree: annotation.layout.places.held(tree, annotation.root.mesh, as_given=True)

    def init(params: Any) -> Any:
        logical = unboxed(params)
        has_boxes = jax.tree.structure(params) != jax.tree.structure(logical)
        state = tx.init(logical)
        return held(boxed(state, annotation.layout.places) if has_boxes else state)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        given = held((grads, state))
        made = tx.update(*unboxed(given), unboxed(params), **unboxed(extra))
        return held(boxed_like(given, made))

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


# The loss of a Linen model, as a function of trees of arrays.


def linen_loss(loss_fn: Callable, params: Any, layout: Layout, has_aux: bool) -> Loss:
    """The loss of a tree of parameters."""
    places = layout.places

    def run(params: Any, frozen: Any, state: Any, part: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        out = loss_fn(params, *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, state)

    def placement(path: tuple, x: Any) -> Placement | None:
        found = places.parameter(key_texts(path))
        return found if found is not None and found.stored_shape == jnp.shape(x) else None

    placed = [placement(path, x) for path, x in jax.tree.leaves_with_path(params)]
    return Loss(run, params, (), (), (placed, []), layout.root, layout.root.kind)


# Deferred initialisation of a Linen model: what `build` returns, such as a TrainState, its arrays born in place.


def linen_shapes(build: Callable[[], Any], model: nn.Module) -> Any:
    """What `build()` returns, with shapes for arrays, and shardings if the mesh has devices.

    An array at the path of a parameter, of its shape, is sharded and padded as it is, and so in host memory.
    """
    shapes = jax.eval_shape(build)
    layout = annotation_for(model).layout
    check_replicated(layout.root, layout.root.kind)
    places, mesh = layout.places, layout.root.mesh
    parameters = _offloaded(shapes, layout)

    def one(path: tuple, x: Any) -> jax.ShapeDtypeStruct:
        is_key, keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key), key_texts(path)
        spec = PartitionSpec() if is_key else places.spec(keys, x.shape)
        sharding = sharding_of(mesh, spec, on_host=keys in parameters)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    return jax.tree.map_with_path(one, boxed(shapes, places))


def linen_arrays(build: Callable[[], Any], model: nn.Module, mesh: Mesh) -> Any:
    """What `build()` returns, made by one compiled program."""
    leaves, tree = jax.tree.flatten(linen_shapes(build, model))
    places = annotation_for(model).layout.places
    options = None if _compat.is_tracer(jnp.zeros(())) else _compat.init_options(mesh)  # jax: only at top level
    make = lambda: jax.tree.leaves(boxed(build(), places))
    arrays = jax.jit(make, out_shardings=[x.sharding for x in leaves], compiler_options=options)()
    return jax.tree.unflatten(tree, arrays)


def _offloaded(shapes: Any, layout: Layout) -> set[Keys]:
    """The paths of parameters in host memory; raises for optimizer state that should be there."""
    found: dict[Any, list[Keys]] = {}
    for path, x in jax.tree.leaves_with_path(shapes):
        if layout.places.on_host(keys := key_texts(path), x.shape):
            found.setdefault(layout.places.tail(keys), []).append(keys)
    sorted_by_length = [sorted(paths, key=len) for paths in found.values()]  # a parameter's own path is the shortest
    if state := [keys for _, *rest in sorted_by_length for keys in rest]:
        raise AnnotationError(
            "The optimizer state of a TrainState cannot be in host memory.",
            where=["/".join(keys) for keys in state],
            why=f"{layout.root.kind} was annotated with offload; its parameters and their state may be there in an nnx"
            " model, and in a run of `jshard train`.",
            do="leave offload out of the placement.",
        )
    return {keys for keys, *_ in sorted_by_length if layout.places.on_host_itself(keys)}
