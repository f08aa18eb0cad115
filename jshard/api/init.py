"""Deferred initialisation: every parameter is created where it will live."""

from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.errors import AnnotationError, MeshError
from jshard.linen.annotation import annotation_for
from jshard.linen.train_state import linen_arrays, linen_shapes
from jshard.plans.mesh import AnyMesh
from jshard.plans.padding import padding_of, store
from jshard.plans.plan import root_forgotten
from jshard.plans.replicated import check_replicated, others_of, warn_of_others
from jshard.plans.units import dotted, plain_class, unit_of, walk

M = TypeVar("M")


def abstract_init(build: Callable[[], M], annotate: Callable[[M], Any] | nn.Module) -> M:
    """The annotated model without arrays: shapes, dtypes and shardings, for a plan of any size.

    Args:
        build: returns the model, e.g. `lambda: GPT(config, rngs=nnx.Rngs(0))`; of a Linen model, its variables or a
            `TrainState`.
        annotate: calls `fully_shard` on its submodules and on the root; or the annotated Linen model.

    Raises:
        AnnotationError: the root is not annotated, or a large parameter would be replicated.

    Example:
        >>> plan = js.plan(js.abstract_init(lambda: MLP(nnx.Rngs(0)), annotate))
    """
    if isinstance(annotate, nn.Module):
        return linen_shapes(build, annotate)
    return _annotated(nnx.merge(*_shapes(build)), annotate)


def shard_init(build: Callable[[], M], annotate: Callable[[M], Any] | nn.Module, *, mesh: AnyMesh | None = None) -> M:
    """Builds a model with every parameter born sharded.

    The model is traced abstractly, annotated, and then initialised by one compiled program whose outputs have
    the plan's shardings: no device and no host ever holds the whole model. Values are bitwise those of `build()`.

    Args:
        build: returns the model, e.g. `lambda: GPT(config, rngs=nnx.Rngs(0))`; of a Linen model, its variables or a
            `TrainState`: optimizer state is placed as its parameters are. It is traced: it must not depend on values.
        annotate: calls `fully_shard` on its submodules and on the root; or the annotated Linen model.
        mesh: checked against the mesh of the annotation, if given.

    Returns:
        What `build` returns, annotated, its arrays on the mesh.

    Raises:
        AnnotationError: the root is not annotated, or a large parameter would be replicated.
        MeshError: the annotation's mesh is abstract, or another than `mesh`.

    Example:
        >>> model = js.shard_init(lambda: MLP(nnx.Rngs(0)), annotate)
    """
    if isinstance(annotate, nn.Module):
        used = _mesh_of_devices(annotation_for(annotate).root.mesh, mesh, type(annotate).__name__)
        return linen_arrays(build, annotate, used)
    graphdef, shapes = _shapes(build)
    abstract: Any = _annotated(nnx.merge(graphdef, shapes), annotate)
    unit = unit_of(abstract)
    assert unit is not None
    used = _mesh_of_devices(unit.mesh, mesh, plain_class(abstract).__name__)
    planned = dict(nnx.to_flat_state(nnx.state(abstract, nnx.Param)))
    replicated = NamedSharding(used, PartitionSpec())
    paths = [path for path, _ in _flat(shapes)]
    shardings = [planned[path].get_raw_value().sharding if path in planned else replicated for path in paths]
    paddings = [padding_of(planned.get(path)) for path in paths]
    init = lambda: [p.pad(x) if p else x for p, (_, x) in zip(paddings, _flat(_split(build)[1]), strict=True)]
    options = None if _compat.is_tracer(jnp.zeros(())) else _compat.init_options(used)  # jax: only at top level
    arrays = jax.jit(init, out_shardings=shardings, compiler_options=options)()
    model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(shapes), arrays))
    for path, variable in walk(model):
        if path in planned:
            store(variable, padding_of(planned[path]), variable.get_raw_value())
    return _annotated(model, annotate)  # the arrays are where it wants them: nothing moves


def _mesh_of_devices(used: AnyMesh, asked: AnyMesh | None, name: str) -> Mesh:
    """The mesh of the annotation, which must have devices and be the one that was asked for."""
    if isinstance(used, Mesh) and (asked is None or asked == used):
        return used
    raise MeshError(
        "The model cannot be placed on this mesh.",
        where=f"shard_init({name})",
        why="the annotation used an abstract mesh." if not isinstance(used, Mesh) else "the annotation used another.",
        do="give js.fully_shard and js.shard_init the same mesh = js.mesh(fsdp=-1).",
    )


def _annotated(model: Any, annotate: Callable[[Any], Any]) -> Any:
    annotate(model)
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    check_replicated(unit, plain_class(model).__name__)
    warn_of_others(unit, plain_class(model).__name__, others_of(model))
    return model


def _split(build: Callable[[], M]) -> tuple[nnx.GraphDef[M], Any]:
    """Builds and splits; a `tensor` axis in the model's metadata must not place arrays yet."""
    eager = nnx.using_eager_sharding()
    with nnx.use_eager_sharding(False):
        model = build()
    if isinstance(model, nn.Module):
        raise AnnotationError(
            "A Linen module holds no parameters to initialise.",
            where=f"build() returned {type(model).__name__}",
            why="init makes them: build returns what init returned, or a TrainState.",
            do="model = js.fully_shard(model, mesh=mesh); js.shard_init(lambda: model.init(key, x), model)",
        )
    for _, variable in walk(model):  # they note the setting; it is to be that of a plain model
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(eager_sharding=eager)
    return nnx.split(model)


def _shapes(build: Callable[[], M]) -> tuple[nnx.GraphDef[M], Any]:
    """The split model with shapes for arrays."""
    with _compat.fast_shape_tracing():
        graphdef, shapes = jax.eval_shape(lambda: _split(build))
    model = nnx.merge(graphdef, shapes)
    lost = [dotted(p) for p, x in walk(model) if _compat.is_tracer(x)]
    if lost:
        raise AnnotationError(
            "The model holds arrays that Flax cannot see while it is traced.",
            where=[f"{plain_class(model).__name__}: {path}" for path in lost],
            why="a plain attribute that is assigned a traced array counts as static, and its value would be lost.",
            do=f"wrap it: self.{lost[0].split('/')[-1]} = nnx.data(...), or nnx.Variable(...).",
        )
    return graphdef, shapes


def _flat(state: Any) -> list[tuple[tuple, Any]]:
    """The arrays of a state with the paths of their variables."""
    return [(path, leaf) for path, v in nnx.to_flat_state(state) for leaf in jax.tree.leaves(v)]
