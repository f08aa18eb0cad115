"""Creates every parameter and all optimizer state with its final sharding, and keeps it there."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import flax.linen as nn
import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.context import during
from jshard.engine.created import created
from jshard.errors import AnnotationError, MeshError
from jshard.linen.annotation import annotation_for
from jshard.linen.optimizer import linen_optimizer
from jshard.linen.train_state import linen_arrays, linen_shapes
from jshard.plans.checks import check_replicated, check_stored, check_variables, others_of
from jshard.plans.homes import Home, settle_in
from jshard.plans.memories import (
    StatePlaces,
    UpdateLayout,
    key_texts,
    parts_of,
    paths_of,
    place_variable,
    sharding_of,
    streamed,
    to_device,
    update_layout,
)
from jshard.plans.mesh import AnyMesh, check_mesh
from jshard.plans.padding import is_as_placed, logical, padding_of, store
from jshard.plans.plan import record_of
from jshard.plans.units import Path, dotted, holds_array, nested_units, plain_class, unit_of, walk

M = TypeVar("M")
N = TypeVar("N", bound=nnx.Module)
Opt = TypeVar("Opt", bound=nnx.Optimizer)


def abstract_init(build: Callable[[], M], annotate: Callable[[M], Any] | nn.Module) -> M:
    """Builds the annotated model without arrays: shapes, dtypes and shardings, to plan a model of any size.

    Args:
        build: returns the model, e.g. `lambda: GPT(config, rngs=nnx.Rngs(0))`; for a Linen model, its variables or a
            `TrainState`.
        annotate: calls `fully_shard` on its submodules and on the root; or the annotated Linen model.

    Raises:
        AnnotationError: the root is not annotated, or a large parameter would be replicated.

    Example:
        >>> plan = js.plan(js.abstract_init(lambda: MLP(nnx.Rngs(0)), annotate))
    """
    build = _traceable(build)
    if isinstance(annotate, nn.Module):
        return linen_shapes(build, annotate)
    return _annotated(nnx.merge(*_shapes(build)), annotate)


def shard_init(build: Callable[[], M], annotate: Callable[[M], Any] | nn.Module, *, mesh: AnyMesh | None = None) -> M:
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

    Example:
        >>> model = js.shard_init(lambda: MLP(nnx.Rngs(0)), annotate)
    """
    build = _traceable(build)
    if isinstance(annotate, nn.Module):
        used = _mesh_of_devices(annotation_for(annotate).root.mesh, mesh, f"shard_init({type(annotate).__name__})")
        return linen_arrays(build, annotate, used)
    graphdef, shapes = _shapes(build)
    abstract: Any = _annotated(nnx.merge(graphdef, shapes), annotate)
    used = _mesh_of_devices(record_of(abstract).mesh, mesh, f"shard_init({plain_class(abstract).__name__})")
    params = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    planned = {path: variable for path, variable in params if holds_array(variable)}
    replicated = NamedSharding(used, PartitionSpec())
    paths = [path for path, _ in _flat(shapes)]
    shardings = [planned[path].get_raw_value().sharding if path in planned else replicated for path in paths]
    paddings = [padding_of(planned.get(path)) for path in paths]
    init = lambda: [p.pad(x) if p else x for p, (_, x) in zip(paddings, _flat(_split(build)[1]), strict=True)]
    arrays = created(init, shardings, used, f"shard_init({plain_class(abstract).__name__})")
    model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(shapes), arrays))
    for path, variable in walk(model):
        if path in planned:
            store(variable, padding_of(planned[path]), variable.get_raw_value())
    return _annotated(model, annotate)  # the arrays are already placed: nothing moves


def _traceable(build: Callable[[], M]) -> Callable[[], M]:
    """The function, with an error that names the line where it needs the value of a traced array."""

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


def _mesh_of_devices(used: AnyMesh, asked: AnyMesh | None, where: str) -> Mesh:
    """The mesh of the annotation, which must have devices and match the requested one."""
    if isinstance(used, Mesh) and (asked is None or check_mesh(asked) == used):
        return used
    raise MeshError(
        "Arrays cannot be placed on this mesh.",
        where=where,
        why="the annotation used an abstract mesh." if not isinstance(used, Mesh) else "the annotation used another.",
        do="mesh = js.mesh(fsdp=-1)  # the same for js.fully_shard and js.shard_init",
    )


def _annotated(model: Any, annotate: Callable[[Any], Any]) -> Any:
    annotate(model)
    check_replicated(record_of(model), plain_class(model).__name__, others_of(model))
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
            why="init creates them: build must return the result of init, or a TrainState.",
            do="model = js.fully_shard(model, mesh=mesh); js.shard_init(lambda: model.init(key, x), model)",
        )
    check_variables(model)
    for _, variable in walk(model):  # variables record the setting; it must be that of a plain model
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(eager_sharding=eager)
    return nnx.split(model)


def _shapes(build: Callable[[], M]) -> tuple[nnx.GraphDef[M], Any]:
    with _compat.fast_shape_tracing():
        graphdef, shapes = jax.eval_shape(lambda: _split(build))
    model = nnx.merge(graphdef, shapes)
    lost = [dotted(p) for p, x in walk(model) if _compat.is_tracer(x)]
    if lost:
        raise AnnotationError(
            "The model holds arrays that Flax cannot see while it is traced.",
            where=[f"{plain_class(model).__name__}: {path}" for path in lost],
            why="a plain attribute that holds a traced array is static to Flax, and its value would be lost.",
            do=f"self.{lost[0].split('/')[-1]} = nnx.data(...)  # or nnx.Variable(...)",
        )
    return graphdef, shapes


def _flat(state: Any) -> list[tuple[tuple, Any]]:
    return [(path, leaf) for path, v in nnx.to_flat_state(state) for leaf in jax.tree.leaves(v)]


# Optimizer state.


@overload
def shard_optimizer(
    model: N, tx: optax.GradientTransformation, *, wrt: Any = ..., shard_replicated: bool = ...
) -> nnx.Optimizer[N]: ...


@overload
def shard_optimizer(
    model: nn.Module, tx: optax.GradientTransformation, *, wrt: Any = ...
) -> optax.GradientTransformationExtraArgs: ...


def shard_optimizer(
    model: Any, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param, shard_replicated: bool = False
) -> Any:
    """An `nnx.Optimizer` whose state is created sharded; for a Linen model the transformation for its `TrainState`.

    State with the shape of a parameter is placed like the parameter; other large state is sharded along a divisible
    dim; the rest is replicated. `nnx.Optimizer(model, tx, wrt=nnx.Param)` trains the same, but its first step
    compiles twice, because its counters are not on the mesh yet. It also sees the padding of parameters that are
    stored padded: gradients with respect to them are refused until this function has been called for the model.

    State of parameters annotated with `offload` stays in host memory: an update copies it to the device and back,
    leaf by leaf. Such parameters need this optimizer.

    A Linen model's state is created by its `TrainState.create(..., tx=js.shard_optimizer(model, tx))`, and sharded by
    `shard_init`. Its parameters need this only if they are stored padded or annotated with `offload`.

    Args:
        model: the annotated model, with its arrays on the mesh, or abstract, from `abstract_init`. Or a Linen model.
        tx: any Optax transformation, unchanged: it sees whole parameters in global view.
        wrt: which variables it updates; for a Linen model which parameters, as in `js.value_and_grad`: the others have
            no state.
        shard_replicated: ZeRO-1: also shard the state of replicated parameters, over `replica`. Each device
            then updates its part, and the parameters are gathered again. For nnx models.

    Returns:
        The optimizer. For an abstract model it is abstract, with the same shapes and shardings, for
        `jshard.checkpoint.restore`, so that a resumed run never holds its state twice. For a Linen model an
        `optax.GradientTransformationExtraArgs`.

    Raises:
        AnnotationError: the root of the model is not annotated, or `tx` is not a transformation.
        MeshError: the mesh of the annotation is abstract.

    Example:
        >>> optimizer = js.shard_optimizer(model, optax.adamw(3e-4))
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise AnnotationError(
            "The optimizer is not one of Optax.",
            where=f"shard_optimizer(model, {type(tx).__name__})",
            why="a transformation has the functions init and update.",
            do="js.shard_optimizer(model, optax.adamw(3e-4))",
        )
    if isinstance(model, nn.Module):
        return linen_optimizer(model, tx, wrt=wrt, shard_replicated=shard_replicated)
    optimizer = abstract_optimizer(model, tx, wrt=wrt, shard_replicated=shard_replicated)
    arrays = jax.tree.leaves(nnx.state(model))
    if arrays and all(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        return optimizer
    graphdef, state = nnx.split(optimizer)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    model_def, model_state = nnx.split(model)

    def init(model_state: Any) -> Any:
        made = type(optimizer)(nnx.merge(model_def, to_device(model_state)), optimizer.tx, wrt=wrt)
        return nnx.state(_padded(made, _places(model, over_replica=shard_replicated)))

    return _at_home(nnx.merge(graphdef, jax.jit(init, out_shardings=shardings)(model_state)))


def abstract_optimizer(
    model: nnx.Module, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param, shard_replicated: bool = False
) -> nnx.Optimizer:
    """The result of `shard_optimizer` for a model, abstract or not, without arrays: shapes, dtypes and shardings."""
    _check_is_whole(model)
    unit = record_of(model)
    mesh = _mesh_of_devices(unit.mesh, None, f"shard_optimizer({plain_class(model).__name__})")
    if isinstance(tx, _Placed) and tx.mesh != mesh:
        texts = [", ".join(f"{axis}={n}" for axis, n in of.shape.items()) for of in (tx.mesh, mesh)]
        raise AnnotationError(
            "The transformation belongs to another sharded optimizer.",
            where=f"shard_optimizer({plain_class(model).__name__}, tx)",
            why=f"it places its state on the mesh it was made for ({texts[0]}), and the model is on {texts[1]}.",
            do="tx = optax.adamw(3e-4); optimizer = js.shard_optimizer(model, tx)  # not other_optimizer.tx",
        )
    planned = [
        (path, variable, unit.by_path[path].placement)
        for path, variable in walk(model)
        if isinstance(variable, nnx.Param) and path in unit.by_path
    ]
    check_stored(plain_class(model).__name__, planned)
    for _, variable, placement in planned:  # a layer that was replaced is padded before its state is made
        if is_as_placed(variable, placement):
            place_variable(variable, placement, unit.mesh)
    if unit.optimizer is not None:
        unit.optimizer.exists = True
    places = _places(model, over_replica=shard_replicated)
    placed = _placed(tx, places, _places(model, over_replica=False), mesh)
    kind = OffloadedOptimizer if places.offloaded else nnx.Optimizer
    made = nnx.eval_shape(lambda model: kind(model, placed, wrt=wrt), model)
    graphdef, state = nnx.split(_padded(made, places))
    abstract = nnx.from_flat_state([(p, _sharded(p, v, places, mesh)) for p, v in nnx.to_flat_state(state)])
    return _at_home(nnx.merge(graphdef, abstract))


def _at_home(optimizer: Opt) -> Opt:
    """The optimizer, placed as planned: what is written to its variables later is placed like this."""
    for _, variable in walk(optimizer):
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
        if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and isinstance(value.sharding, NamedSharding):
            settle_in(variable, Home(value.sharding, value.shape))
    return optimizer


def _check_is_whole(model: Any) -> None:
    """Raises for a part of an annotated model that is not a unit: its parameters are placed, by a plan it has not."""
    if not isinstance(model, nnx.Module) or unit_of(model) is not None or any(True for _ in nested_units(model)):
        return
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    if any(isinstance(sharding, NamedSharding) for sharding in shardings):
        raise AnnotationError(
            "An optimizer was requested for a part of a model that is not a unit.",
            where=f"shard_optimizer({plain_class(model).__name__}, tx)",
            why="its parameters are on a mesh, and the plan that placed them belongs to the model around it.",
            do='trained = nnx.All(nnx.Param, nnx.PathContains("head"))  # its name in the model\n'
            "optimizer = js.shard_optimizer(model, tx, wrt=trained)\n"
            "loss, grads = js.value_and_grad(loss_fn, wrt=trained)(model, x); optimizer.update(model, grads)",
        )


class _Placed(optax.GradientTransformationExtraArgs):
    """A transformation that constrains its state to a plan, and so belongs to the plan's mesh."""

    mesh: Mesh


class OffloadedOptimizer(nnx.Optimizer):
    """An `nnx.Optimizer` for arrays in host memory: they are updated on the device, then copied back."""

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> optax.Updates:
        """Like `nnx.Optimizer.update`, one part of the parameters after another; the updates are on the device."""
        graphdef, state = nnx.split((model, self))
        (leaves, tree), (of_grads, grads_tree) = jax.tree.flatten(state), jax.tree.flatten(grads)
        shape_of_updates: Any = None

        def update(*arrays: jax.Array) -> list[jax.Array]:
            nonlocal shape_of_updates
            model, optimizer = nnx.merge(graphdef, jax.tree.unflatten(tree, arrays[: len(leaves)]))
            its_grads = jax.tree.unflatten(grads_tree, arrays[len(leaves) :])
            updates = nnx.Optimizer.update(optimizer, model, its_grads, **to_device(kwargs))
            of_updates, shape_of_updates = jax.tree.flatten(updates)
            return [*jax.tree.leaves(nnx.state((model, optimizer))), *of_updates]

        paths, grad_paths = paths_of(state), paths_of(grads)
        offloaded = _places(model, over_replica=False).offloaded
        parts = parts_of(offloaded, [*paths, *grad_paths], paths, grad_paths)
        found = streamed(update, [*leaves, *of_grads], parts, like=[*leaves, *[None] * len(of_grads)])
        nnx.update((model, self), jax.tree.unflatten(tree, found[: len(leaves)]))
        return jax.tree.unflatten(shape_of_updates, found[len(leaves) :])


def _places(model: nnx.Module, *, over_replica: bool) -> StatePlaces:
    plan = record_of(model).plan
    assert plan is not None, "an annotated model has one"
    return StatePlaces(plan, over_replica=over_replica)


def _padded(optimizer: nnx.Optimizer, places: StatePlaces) -> nnx.Optimizer:
    """The optimizer, with state stored padded where its parameter is."""
    for path, variable in walk(optimizer):
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
        padding = places.padding(tuple(map(str, path)), getattr(value, "shape", ()))
        if padding is not None:
            store(variable, padding, padding.pad(value))
    return optimizer


def _sharded(path: Path, variable: nnx.Variable, places: StatePlaces, mesh: Mesh) -> nnx.Variable:
    """The abstract variable with a sharding for each array in it; Optax masks some out."""
    keys = tuple(map(str, path))

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(mesh, places.spec(keys, x.shape), on_host=places.on_host(keys, x.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return variable.replace(jax.tree.map(one, variable.get_raw_value()))


def _placed(
    tx: optax.GradientTransformation, places: StatePlaces, parameters: StatePlaces, mesh: Mesh
) -> optax.GradientTransformationExtraArgs:
    """The transformation on logical arrays; its state is constrained to the plan, its updates to the placements.

    Removing and adding padding is local to each device: inside a program arrays may be sharded unevenly.
    """
    tx = optax.with_extra_args_support(tx)

    def cut(path: tuple, leaf: Any) -> Any:
        padding = places.padding(key_texts(path), getattr(leaf, "shape", ()))
        return leaf if padding is None else padding.cut(leaf)

    def init(params: Any) -> Any:
        return tx.init(jax.tree.map(logical, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        held = places.held((grads, state), mesh)
        grads, state, params, extra = jax.tree.map_with_path(cut, (*held, params, extra))
        with during(update_layout, UpdateLayout(places, mesh)):
            updates, state = tx.update(grads, state, params, **extra)
        return parameters.held(updates, mesh), places.held(state, mesh)

    placed = _Placed(init, cast(Any, update))
    placed.mesh = mesh
    return placed
