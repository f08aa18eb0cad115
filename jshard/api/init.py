"""Creates a model with every parameter in its final place: no device or host ever holds the whole model."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.created import created
from jshard.errors import AnnotationError
from jshard.linen.annotation import annotation_for
from jshard.linen.train_state import linen_arrays, linen_shapes
from jshard.plans.checks import check_variables
from jshard.plans.mesh import AnyMesh, check_has_devices
from jshard.plans.padding import logical, padding_of, store
from jshard.plans.plan import record_of
from jshard.plans.replication import check_replicated, others_of
from jshard.plans.units import Path, detach, dotted, holds_array, nested_units, plain_class, walk

M = TypeVar("M")


def abstract_init(build: Callable[[], M], annotate: Callable[[M], object] | nn.Module) -> M:
    """Builds the annotated model without arrays: shapes, dtypes and shardings, to plan a model of any size.

    Args:
        build: returns the model, e.g. `lambda: GPT(config, rngs=nnx.Rngs(0))`; for a Linen model, its variables or a
            `TrainState`.
        annotate: calls `fully_shard` on its submodules and on the root; or the annotated Linen model.

    Raises:
        AnnotationError: the root is not annotated, or a large parameter would be replicated.

    Examples:
        >>> plan = js.plan(js.abstract_init(lambda: MLP(nnx.Rngs(0)), annotate))
    """
    build = _traceable(build)
    if isinstance(annotate, nn.Module):
        return linen_shapes(build, annotate)
    return _annotated(nnx.merge(*_shapes(build)), annotate)


def shard_init(
    build: Callable[[], M], annotate: Callable[[M], object] | nn.Module, *, mesh: AnyMesh | None = None
) -> M:
    """Builds a model with every parameter initialised sharded.

    The model is traced abstractly, annotated, and then initialised by one compiled program whose outputs have
    the plan's shardings: no device or host ever holds the whole model. Values are bitwise those of `build()`.

    Args:
        build: returns the model, e.g. `lambda: GPT(config, rngs=nnx.Rngs(0))`; for a Linen model, its variables or a
            `TrainState`: optimizer state is placed like its parameters. It is traced: it must not depend on values.
        annotate: calls `fully_shard` on its submodules and on the root; or the annotated Linen model.
        mesh: checked against the mesh of the annotation, if given.

    Returns:
        The result of `build`, annotated, with its arrays on the mesh.

    Raises:
        AnnotationError: the root is not annotated, or a large parameter would be replicated.
        AnnotationError: the processes of a run would initialise different models, as with a seed for each.
        MeshError: the annotation's mesh is abstract, or differs from `mesh`.

    Examples:
        >>> model = js.shard_init(lambda: MLP(nnx.Rngs(0)), annotate)
    """
    build = _traceable(build)
    if isinstance(annotate, nn.Module):
        where = f"shard_init({type(annotate).__name__})"
        concrete_mesh = check_has_devices(annotation_for(annotate).root.mesh, where, requested=mesh)
        return linen_arrays(build, annotate, concrete_mesh)
    graphdef, shapes = _shapes(build)  # of the plain model, which is annotated twice: for its plan, and with arrays
    abstract: Any = _annotated(nnx.merge(graphdef, shapes), annotate)
    where = f"shard_init({plain_class(abstract).__name__})"
    concrete_mesh = check_has_devices(record_of(abstract).mesh, where, requested=mesh)

    parameters = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    # A parameter that holds a tree of arrays is in no plan, and replicated.
    planned = {path: variable for path, variable in parameters if holds_array(variable)}
    shardings = []
    paddings = []
    for path, _ in _arrays_by_path(shapes):
        if path in planned:
            shardings.append(planned[path].get_raw_value().sharding)
        else:
            # What is no parameter, such as statistics and keys, is whole on every device.
            shardings.append(NamedSharding(concrete_mesh, PartitionSpec()))
        paddings.append(padding_of(planned.get(path)))

    def init() -> list[jax.Array]:
        _, state = _built_and_split(build)
        arrays = [x for _, x in _arrays_by_path(state)]
        return [x if padding is None else padding.pad(x) for x, padding in zip(arrays, paddings, strict=True)]

    arrays = created(init, shardings, concrete_mesh, where)
    model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(shapes), arrays))
    for path, variable in walk(model):  # merged from the plain model: the variables do not know of their padding yet
        if path in planned:
            store(variable, padding_of(planned[path]), variable.get_raw_value())
    return _annotated(model, annotate)  # the arrays are already placed: nothing moves


def abstract_copy(model: nnx.Module, annotate: Callable[[M], object]) -> M:
    """Returns an annotated model without its arrays, with another annotation, as `abstract_init` returns it."""
    graphdef, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    copy: Any = nnx.merge(graphdef, shapes)
    for _, module in list(nested_units(copy)):
        detach(module)
    for _, variable in walk(copy):
        if padding_of(variable) is not None:
            # The other mesh has another padding, or none.
            store(variable, None, logical(variable).get_raw_value())
    return _annotated(copy, annotate)


def _traceable(build: Callable[[], M]) -> Callable[[], M]:
    """Returns the function, with an error that names the line where it needs the value of a traced array."""

    @functools.wraps(build)
    def run() -> M:
        try:
            return build()
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            first = str(error).splitlines()[0].rstrip(".")
            raise AnnotationError(
                "The initialisation needs a value that is not known yet.",
                where=_compat.users_line(error),
                why=f"js.shard_init traces it, so that no array is ever whole: {first}.",
                do="x = jnp.asarray(x)  # a NumPy array cannot be indexed by random numbers that are traced\n"
                "Or compute it before: ids = np.asarray(jax.random.permutation(key, n)), outside of js.shard_init",
            ) from error

    return run


def _annotated(model: Any, annotate: Callable[[Any], object]) -> Any:
    """Returns the model, annotated in place, with its replicated arrays checked: the root is known now."""
    annotate(model)
    check_replicated(record_of(model), plain_class(model).__name__, others_of(model))
    return model


def _built_and_split(build: Callable[[], M]) -> tuple[nnx.GraphDef[M], nnx.State]:
    """Builds a model and splits it; a `tensor` axis in the model's metadata must not place arrays yet."""
    # Read first: the variables record the setting under which they are made.
    eager = nnx.using_eager_sharding()
    with nnx.use_eager_sharding(False):
        model = build()
    if isinstance(model, nn.Module):
        raise AnnotationError(
            "A Linen module holds no parameters to initialise.",
            where=f"build() returned {type(model).__name__}",
            why="init creates them: build must return the result of init, or a TrainState.",
            do="model = js.fully_shard(model, mesh=mesh); js.shard_init(lambda: model.init(key, x), model)",
        )
    check_variables(model)
    for _, variable in walk(model):  # variables record the setting; it must be that of a plain model
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(eager_sharding=eager)
    return nnx.split(model)


def _shapes(build: Callable[[], M]) -> tuple[nnx.GraphDef[M], nnx.State]:
    """Returns a model's graph, and its state with shapes in place of arrays."""
    with _compat.fast_shape_tracing():
        # The graph is static, and comes out of the trace as it is.
        graphdef, shapes = jax.eval_shape(lambda: _built_and_split(build))
    model = nnx.merge(graphdef, shapes)
    # A tracer that outlives its trace: Flax took the attribute for a static value.
    lost = [dotted(path) for path, node in walk(model) if _compat.is_tracer(node)]
    if lost:
        raise AnnotationError(
            "The model holds arrays that Flax cannot see while it is traced.",
            where=[f"{plain_class(model).__name__}: {path}" for path in lost],
            why="a plain attribute that holds a traced array is static to Flax, and its value would be lost.",
            do=f"self.{lost[0].split('/')[-1]} = nnx.data(...)  # or nnx.Variable(...)",
        )
    return graphdef, shapes


def _arrays_by_path(state: nnx.State) -> list[tuple[Path, jax.Array]]:
    """Returns the arrays of a state, each with the path of its variable, in the order of the state's leaves."""
    return [(path, leaf) for path, variable in nnx.to_flat_state(state) for leaf in jax.tree.leaves(variable)]
