"""Deferred initialisation: every parameter is created where it will live."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._errors import MeshError
from jshard._mesh import AnyMesh
from jshard._nnx import plain_class, unit_of
from jshard._plan import root_forgotten
from jshard._replicated import check_replicated

M = TypeVar("M", bound=nnx.Module)


def abstract_init(build: Callable[[], M], annotate: Callable[[M], Any]) -> M:
    """The annotated model without arrays: shapes, dtypes and shardings, for a plan of any size.

    Args:
        build: returns the model, e.g. `lambda: GPT(config, rngs=nnx.Rngs(0))`.
        annotate: calls `fully_shard` on its submodules and on the root.

    Raises:
        AnnotationError: the root is not annotated, or a large parameter would be replicated.

    Example:
        >>> plan = js.plan(js.abstract_init(lambda: MLP(nnx.Rngs(0)), annotate))
    """
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(build)
    annotate(model)
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    check_replicated(unit, plain_class(model).__name__)
    return model


def shard_init(build: Callable[[], M], annotate: Callable[[M], Any], *, mesh: AnyMesh | None = None) -> M:
    """Builds a model with every parameter born sharded.

    The model is traced abstractly, annotated, and then initialised by one compiled program whose outputs have
    the plan's shardings: no device and no host ever holds the whole model. Values are bitwise those of `build()`.

    Args:
        build: returns the model, e.g. `lambda: GPT(config, rngs=nnx.Rngs(0))`. It is traced: it must not
            depend on values.
        annotate: calls `fully_shard` on its submodules and on the root.
        mesh: checked against the mesh of the annotation, if given.

    Returns:
        The annotated model, its arrays on the mesh.

    Raises:
        AnnotationError: the root is not annotated, or a large parameter would be replicated.
        MeshError: the annotation's mesh is abstract, or another than `mesh`.

    Example:
        >>> model = js.shard_init(lambda: MLP(nnx.Rngs(0)), annotate)
    """
    abstract = abstract_init(build, annotate)
    unit = unit_of(abstract)
    assert unit is not None
    used = unit.mesh
    if not isinstance(used, Mesh) or (mesh is not None and mesh != used):
        raise MeshError(
            "The model cannot be placed on this mesh.",
            where=f"shard_init({plain_class(abstract).__name__})",
            why="the annotation used an abstract mesh." if not isinstance(used, Mesh) else "the annotation used another.",
            do="give js.fully_shard and js.shard_init the same mesh = js.mesh(fsdp=-1).",
        )
    graphdef, state = nnx.split(abstract)
    replicated = NamedSharding(used, PartitionSpec())
    shardings = jax.tree.map(lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else replicated, state)

    def init() -> Any:
        with nnx.use_eager_sharding(False):
            fresh = nnx.state(build())
        return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(fresh))

    return cast(M, nnx.merge(graphdef, jax.jit(init, out_shardings=shardings)()))
