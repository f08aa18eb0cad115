"""The state of a Linen model: its loss as a function of trees of arrays, and arrays initialised in place."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.accumulate import Loss
from jshard.engine.created import created
from jshard.errors import AnnotationError
from jshard.linen.annotation import annotation_for
from jshard.linen.boxes import boxed
from jshard.linen.layout import Layout
from jshard.linen.trained import joined
from jshard.plans.array_paths import Keys, key_texts
from jshard.plans.memories import sharding_of
from jshard.plans.placement import Placement
from jshard.plans.replication import check_replicated
from jshard.plans.state_places import StatePlaces

# The loss of a Linen model.


def linen_loss(loss_fn: Callable, trained: PyTree, frozen: PyTree, layout: Layout, has_aux: bool) -> Loss:
    """Returns the loss of trained and frozen parameters, two parts of one tree."""

    def run(params: PyTree, frozen: PyTree, state: PyTree, microbatch: PyTree) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        aux = None
        value = loss_fn(joined(params, frozen), *microbatch)
        if has_aux:
            value, aux = value
        return value, (aux, state)

    placements = (_placements(trained, layout), _placements(frozen, layout))
    # No state passes between microbatches: collections that a call changes are results of the user's loss.
    return Loss(run, trained, frozen, (), placements, layout.root, layout.root.kind)


def _placements(tree: PyTree, layout: Layout) -> list[Placement | None]:
    """Returns the placement of each array in a tree; None for one that is not stored as planned."""
    placements = []
    for path, x in jax.tree.leaves_with_path(tree):
        placement = layout.placement_of(key_texts(path), x.dtype)
        if placement is not None and placement.stored_shape != jnp.shape(x):
            # An array of another shape, such as an unpadded one, is not in the planned shards.
            placement = None
        placements.append(placement)
    return placements


# Deferred initialisation of a Linen model: the result of `build`, such as a TrainState, with arrays created in place.


def linen_shapes(build: Callable[[], PyTree], model: nn.Module) -> PyTree:
    """Returns the result of `build()` with shapes in place of arrays, and shardings if the mesh has devices.

    An array at the path of a parameter, with its shape, is sharded and padded like it. Host memory holds the parameters
    annotated with it, and the state that `build` placed there, as `js.shard_optimizer` does.
    """
    annotation = annotation_for(model)
    # Not `eval_shape`: only the types in the program name the memory of a result.
    traced, shapes = jax.make_jaxpr(build, return_shape=True)()
    layout = annotation.layout  # known now: `build` calls init
    # Before any array is made, which might not fit.
    check_replicated(layout.root, layout.root.kind)
    places = layout.places
    is_on_host = [_compat.on_host(aval) for aval in traced.out_avals]
    offloaded = _offloaded(shapes, places)
    if not any(is_on_host):
        _check_offloaded(offloaded, layout.root.kind)
    # `init` creates parameters on the device; the plan says which are moved.
    host_params = {paths[0] for paths in offloaded if places.on_host_itself(paths[0])}

    def placed_shape(path: tuple, x: jax.ShapeDtypeStruct, is_on_host: bool) -> jax.ShapeDtypeStruct:
        keys = key_texts(path)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        # Keys have no bytes to split, and each device needs them.
        spec = PartitionSpec() if is_key else places.spec(keys, x.shape)
        sharding = sharding_of(layout.root.mesh, spec, on_host=is_on_host or keys in host_params)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    stored = boxed(shapes, places)
    # The boxes are nodes of the tree, and hold one array each: the order is that of the traced results.
    return jax.tree.map_with_path(placed_shape, stored, jax.tree.unflatten(jax.tree.structure(stored), is_on_host))


def linen_arrays(build: Callable[[], PyTree], model: nn.Module, mesh: Mesh) -> PyTree:
    """Returns the result of `build()`, created by one compiled program."""
    # First: this trace of `build` calls `init`, by which the layout below is known.
    leaves, tree = jax.tree.flatten(linen_shapes(build, model))
    annotation = annotation_for(model)
    places = annotation.layout.places

    def create() -> list[jax.Array]:
        return jax.tree.leaves(boxed(build(), places))

    where = f"shard_init({annotation.base.__name__})"
    arrays = created(create, [x.sharding for x in leaves], mesh, where)
    return jax.tree.unflatten(tree, arrays)


def _offloaded(shapes: PyTree, places: StatePlaces) -> list[list[Keys]]:
    """Returns the paths of the arrays that belong to each offloaded parameter; its own path, the shortest, is first."""
    paths_by_parameter: dict[Keys | None, list[Keys]] = {}
    for path, x in jax.tree.leaves_with_path(shapes):
        keys = key_texts(path)
        if places.on_host(keys, x.shape):
            paths_by_parameter.setdefault(places.tail(keys), []).append(keys)
    return [sorted(paths, key=len) for paths in paths_by_parameter.values()]


def _check_offloaded(offloaded: Sequence[Sequence[Keys]], kind: str) -> None:
    """Raises for optimizer state that belongs in host memory but was created by plain Optax, which ignores memories."""
    places = []
    for _, *state_paths in offloaded:  # the first path is that of the parameter itself
        for keys in state_paths:
            places.append(f"{kind}: {'/'.join(keys)}")
    if places:
        raise AnnotationError(
            "The optimizer state would not be in host memory.",
            where=places,
            why="the model was annotated with offload, and plain Optax made this state.",
            do="TrainState.create(..., tx=js.shard_optimizer(model, tx))",
        )
