"""Deferred initialisation of a Linen model: what `build` returns, such as a TrainState, its arrays born in place."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard._errors import AnnotationError
from jshard._linen import Annotation, annotation_of
from jshard._optimizer import StatePlaces, key_texts
from jshard._replicated import check_replicated


def linen_shapes(build: Callable[[], Any], model: nn.Module) -> Any:
    """What `build()` returns, with shapes for arrays, and shardings if the mesh has devices."""
    annotation = _annotation(model)
    shapes = jax.eval_shape(build)
    layout = annotation.layout
    check_replicated(layout.root, layout.kind)
    places = StatePlaces({leaf.path: leaf.placement for leaf in layout.leaves.values()}, layout.root.rule.degrees)
    mesh: Any = layout.root.mesh

    def one(path: tuple, x: Any) -> jax.ShapeDtypeStruct:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        spec = PartitionSpec() if is_key else places.spec(key_texts(path), x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec), weak_type=x.weak_type)

    return jax.tree.map_with_path(one, shapes)


def linen_arrays(build: Callable[[], Any], model: nn.Module, mesh: Mesh) -> Any:
    """What `build()` returns, made by one compiled program."""
    leaves, tree = jax.tree.flatten(linen_shapes(build, model))
    options = None if _compat.is_tracer(jnp.zeros(())) else _compat.init_options(mesh)  # jax: only at top level
    make = lambda: jax.tree.leaves(build())
    arrays = jax.jit(make, out_shardings=[x.sharding for x in leaves], compiler_options=options)()
    return jax.tree.unflatten(tree, arrays)


def linen_mesh(model: nn.Module) -> Any:
    """The mesh of an annotated Linen model."""
    return _annotation(model).root.mesh


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
