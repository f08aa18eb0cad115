"""Deferred initialisation of a Linen model: what `build` returns, such as a TrainState, its arrays born in place."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.linen.annotation import Annotation, annotation_of
from jshard.linen.optimizer import places_of
from jshard.linen.padded import boxed
from jshard.plans.memories import sharding_of
from jshard.plans.optimizer_state import Keys, StatePlaces, key_texts
from jshard.plans.replicated import check_replicated


def linen_shapes(build: Callable[[], Any], model: nn.Module) -> Any:
    """What `build()` returns, with shapes for arrays, and shardings if the mesh has devices.

    An array at the path of a parameter, of its shape, is sharded and padded as it is. In host memory are parameters
    that were annotated so, and state that `build` put there, which `js.shard_optimizer` does.
    """
    annotation = _annotation(model)
    traced, shapes = jax.make_jaxpr(build, return_shape=True)()
    layout = annotation.layout
    check_replicated(layout.root, layout.kind)
    places, mesh = places_of(layout), layout.root.mesh
    away, offloaded = [_compat.on_host(aval) for aval in traced.out_avals], _offloaded(shapes, places)
    if not any(away):
        _check_offloaded(offloaded, layout.kind)
    parameters = {its for its, *_ in offloaded if places.on_host_itself(its)}

    def one(path: tuple, x: Any, on_host: bool) -> jax.ShapeDtypeStruct:
        is_key, keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key), key_texts(path)
        spec = PartitionSpec() if is_key else places.spec(keys, x.shape)
        sharding = sharding_of(mesh, spec, on_host=on_host or keys in parameters)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    stored = boxed(shapes, places)
    return jax.tree.map_with_path(one, stored, jax.tree.unflatten(jax.tree.structure(stored), away))


def linen_arrays(build: Callable[[], Any], model: nn.Module, mesh: Mesh) -> Any:
    """What `build()` returns, made by one compiled program."""
    leaves, tree = jax.tree.flatten(linen_shapes(build, model))
    places = places_of(_annotation(model).layout)
    options = None if _compat.is_tracer(jnp.zeros(())) else _compat.init_options(mesh)  # jax: only at top level
    make = lambda: jax.tree.leaves(boxed(build(), places))
    arrays = jax.jit(make, out_shardings=[x.sharding for x in leaves], compiler_options=options)()
    return jax.tree.unflatten(tree, arrays)


def linen_mesh(model: nn.Module) -> Any:
    """The mesh of an annotated Linen model."""
    return _annotation(model).root.mesh


def _offloaded(shapes: Any, places: StatePlaces) -> list[list[Keys]]:
    """The paths of the arrays that belong to each offloaded parameter, its own first: that is the shortest."""
    found: dict[Any, list[Keys]] = {}
    for path, x in jax.tree.leaves_with_path(shapes):
        if places.on_host(keys := key_texts(path), x.shape):
            found.setdefault(places.tail(keys), []).append(keys)
    return [sorted(paths, key=len) for paths in found.values()]


def _check_offloaded(offloaded: list[list[Keys]], kind: str) -> None:
    """Raises for optimizer state that is to be in host memory, and that Optax alone made: it knows of no memory."""
    state = ["/".join(keys) for _, *rest in offloaded for keys in rest]
    if state:
        raise AnnotationError(
            "The optimizer state would not be in host memory.",
            where=[f"{kind}: {path}" for path in state],
            why="the model was annotated with offload, and this was made by Optax alone.",
            do="TrainState.create(..., tx=js.shard_optimizer(model, tx))",
        )


def _annotation(model: nn.Module) -> Annotation:
    annotation = annotation_of(model)
    if annotation is None:
        raise AnnotationError(
            "The Linen module is not annotated.",
            where=type(model).__name__,
            why="its settings say how its parameters are sharded; fully_shard returns a copy that has them.",
            do="model = js.fully_shard(model, mesh=mesh)",
        )
    return annotation
