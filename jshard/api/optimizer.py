"""`js.shard_optimizer`: creates all optimizer state with its final sharding, and keeps it there."""

from typing import TypeVar, cast, overload

import flax.linen as nn
import jax
import optax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath

from jshard._types import PyTree
from jshard.engine.context import during
from jshard.errors import AnnotationError
from jshard.linen.optimizer import linen_optimizer
from jshard.plans.array_paths import key_texts, paths_of
from jshard.plans.call_checks import check_stored
from jshard.plans.homes import Home, settle_in
from jshard.plans.memories import place_variable, sharding_of, to_device
from jshard.plans.mesh import check_has_devices
from jshard.plans.numeric import Value
from jshard.plans.padding import is_as_placed, logical, store
from jshard.plans.placement import Selection
from jshard.plans.plan import record_of
from jshard.plans.state_places import StatePlaces, UpdateLayout, update_layout
from jshard.plans.streamed_updates import parts_of, streamed
from jshard.plans.units import Path, Unit, nested_units, plain_class, unit_of, walk

N = TypeVar("N", bound=nnx.Module)
Opt = TypeVar("Opt", bound=nnx.Optimizer)


@overload
def shard_optimizer(
    model: N, tx: optax.GradientTransformation, *, wrt: Selection = ..., shard_replicated: bool = ...
) -> nnx.Optimizer[N]: ...


@overload
def shard_optimizer(
    model: nn.Module, tx: optax.GradientTransformation, *, wrt: Selection = ...
) -> optax.GradientTransformationExtraArgs: ...


def shard_optimizer(
    model: nnx.Module | nn.Module,
    tx: optax.GradientTransformation,
    *,
    wrt: Selection = nnx.Param,
    shard_replicated: bool = False,
) -> nnx.Optimizer | optax.GradientTransformationExtraArgs:
    """Returns an `nnx.Optimizer` with state created sharded; for a Linen model the transformation for its `TrainState`.

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

    Examples:
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
    abstract = abstract_optimizer(model, tx, wrt=wrt, shard_replicated=shard_replicated)
    model_arrays = jax.tree.leaves(nnx.state(model))
    # A model without arrays has nothing to restore, and gets an optimizer with arrays.
    is_abstract_model = bool(model_arrays) and all(isinstance(x, jax.ShapeDtypeStruct) for x in model_arrays)
    if is_abstract_model:
        return abstract
    graphdef, state = nnx.split(abstract)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    # An argument: closed over, the arrays would be constants of the program.
    model_graph, model_state = nnx.split(model)

    def init(model_state: nnx.State) -> nnx.State:
        model_on_device = nnx.merge(model_graph, to_device(model_state))
        # The class that was chosen above: `OffloadedOptimizer` where state is in host memory.
        optimizer = type(abstract)(model_on_device, abstract.tx, wrt=wrt)
        # Padded inside the program, whose results must divide by their shardings.
        return nnx.state(_with_padding(optimizer, _places(model, over_replica=shard_replicated)))

    state = jax.jit(init, out_shardings=shardings)(model_state)  # no device ever has the whole state
    return _with_homes(nnx.merge(graphdef, state))


def abstract_optimizer(
    model: nnx.Module, tx: optax.GradientTransformation, *, wrt: Filter = nnx.Param, shard_replicated: bool = False
) -> nnx.Optimizer:
    """Returns what `shard_optimizer` would for a model, abstract or not, without arrays: shapes, dtypes, shardings."""
    _check_is_whole(model)
    unit = record_of(model)
    name = plain_class(model).__name__
    mesh = check_has_devices(unit.mesh, f"shard_optimizer({name})")
    _check_mesh_of_transformation(tx, mesh, name)
    _pad_replaced_parameters(model, unit)
    if unit.optimizer is not None:
        unit.optimizer.exists = True  # from here on, gradients of padded parameters are not refused
    places = _places(model, over_replica=shard_replicated)
    # Updates are added to parameters, which are never split over `replica`: this gathers them again.
    placed_tx = _placed_transformation(tx, places, _places(model, over_replica=False), mesh)
    placed_tx.original = tx
    placed_tx.shard_replicated = shard_replicated
    kind = OffloadedOptimizer if places.offloaded else nnx.Optimizer
    optimizer = nnx.eval_shape(lambda model: kind(model, placed_tx, wrt=wrt), model)
    graphdef, state = nnx.split(_with_padding(optimizer, places))
    sharded = []
    for path, variable in nnx.to_flat_state(state):
        sharded.append((path, _with_shardings(path, variable, places, mesh)))
    return _with_homes(nnx.merge(graphdef, nnx.from_flat_state(sharded)))


def optimizer_like(optimizer: nnx.Optimizer, model: nnx.Module) -> nnx.Optimizer:
    """Returns the abstract optimizer for another annotation of a model: the same transformation, on another mesh."""
    tx = optimizer.tx
    shard_replicated = False
    if isinstance(tx, _PlacedTransformation):
        shard_replicated = tx.shard_replicated
        tx = tx.original
    return abstract_optimizer(model, tx, wrt=optimizer.wrt, shard_replicated=shard_replicated)


def _check_is_whole(model: object) -> None:
    """Raises for a part of an annotated model that is not a unit: its parameters are placed, by a plan it has not."""
    if not isinstance(model, nnx.Module) or unit_of(model) is not None:
        return
    has_units = any(True for _ in nested_units(model))
    if has_units:  # then it is a model whose root was forgotten, for which there is another error
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


def _check_mesh_of_transformation(tx: optax.GradientTransformation, mesh: Mesh, name: str) -> None:
    """Raises for the transformation of another sharded optimizer, if that is on another mesh."""
    if not isinstance(tx, _PlacedTransformation) or tx.mesh == mesh:
        return
    raise AnnotationError(
        "The transformation belongs to another sharded optimizer.",
        where=f"shard_optimizer({name}, tx)",
        why=f"it places its state on the mesh it was made for ({_degrees_text(tx.mesh)}), and the model is on"
        f" {_degrees_text(mesh)}.",
        do="tx = optax.adamw(3e-4); optimizer = js.shard_optimizer(model, tx)  # not other_optimizer.tx",
    )


def _degrees_text(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items())


def _pad_replaced_parameters(model: nnx.Module, unit: Unit) -> None:
    """Stores parameters of layers that were replaced after the annotation as planned, before their state is made."""
    planned = []
    for path, variable in walk(model):
        if isinstance(variable, nnx.Param) and path in unit.by_path:
            planned.append((path, variable, unit.by_path[path].placement))
    # All are checked before one is changed.
    check_stored(plain_class(model).__name__, planned)
    for _, variable, placement in planned:
        if is_as_placed(variable, placement):
            place_variable(variable, placement, unit.mesh)


def _places(model: nnx.Module, *, over_replica: bool) -> StatePlaces:
    plan = record_of(model).plan
    assert plan is not None, "an annotated model has one"
    return StatePlaces(plan, over_replica=over_replica)


def _with_padding(optimizer: nnx.Optimizer, places: StatePlaces) -> nnx.Optimizer:
    """Returns the optimizer, with state stored padded where its parameter is."""
    for path, variable in walk(optimizer):
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
        padding = places.padding(tuple(map(str, path)), getattr(value, "shape", ()))
        if padding is not None:
            store(variable, padding, padding.pad(value))
    return optimizer


def _with_shardings(path: Path, variable: nnx.Variable, places: StatePlaces, mesh: Mesh) -> nnx.Variable:
    """Returns the abstract variable with a sharding for each array in it; Optax masks some out."""
    keys = tuple(map(str, path))

    def with_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # By path and shape: what has not the shape of its parameter, as in Adafactor, has a placement of its own.
        sharding = sharding_of(mesh, places.spec(keys, x.shape), on_host=places.on_host(keys, x.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return variable.replace(jax.tree.map(with_sharding, variable.get_raw_value()))


def _with_homes(optimizer: Opt) -> Opt:
    """Returns the optimizer, placed as planned: what is written to its variables later is placed like this."""
    for _, variable in walk(optimizer):
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
        if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and isinstance(value.sharding, NamedSharding):
            settle_in(variable, Home(value.sharding, value.shape))
    return optimizer


class _PlacedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation that constrains its state to a plan, and so belongs to the plan's mesh.

    Attributes:
        mesh: of the plan.
        original: the user's transformation, which belongs to no mesh.
        shard_replicated: as in `shard_optimizer`.
    """

    mesh: Mesh
    original: optax.GradientTransformation
    shard_replicated: bool


def _placed_transformation(
    tx: optax.GradientTransformation, places: StatePlaces, parameters: StatePlaces, mesh: Mesh
) -> _PlacedTransformation:
    """Returns the transformation on logical arrays.

    Removing and adding padding is local to each device: inside a program arrays may be sharded unevenly.

    Args:
        tx: of the user.
        places: to which its state is constrained.
        parameters: to which its updates are constrained.
        mesh: of both.
    """
    tx = optax.with_extra_args_support(tx)

    def cut(path: KeyPath, leaf: Value) -> Value:
        padding = places.padding(key_texts(path), getattr(leaf, "shape", ()))
        return leaf if padding is None else padding.cut(leaf)

    def init(params: optax.Params) -> optax.OptState:
        return tx.init(jax.tree.map(logical, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, optax.OptState]:
        # Before and after the user's update: else the compiler chooses again.
        constrained = places.held((grads, state), mesh)
        grads, state, params, extra = jax.tree.map_with_path(cut, (*constrained, params, extra))
        with during(update_layout, UpdateLayout(places, mesh)):  # for the optimizers of `js.shard_matrices`
            updates, state = tx.update(grads, state, params, **extra)
        return parameters.held(updates, mesh), places.held(state, mesh)

    placed = _PlacedTransformation(init, cast(optax.TransformUpdateExtraArgsFn, update))
    placed.mesh = mesh
    return placed


class OffloadedOptimizer(nnx.Optimizer):
    """An `nnx.Optimizer` for arrays in host memory: they are updated on the device, then copied back."""

    def update(self, model: nnx.Module, grads: optax.Updates, /, **kwargs: PyTree) -> optax.Updates:
        """Updates like `nnx.Optimizer.update`, part of the parameters by part; the updates are on the device."""
        graphdef, state = nnx.split((model, self))
        leaves, tree = jax.tree.flatten(state)
        grad_leaves, grads_tree = jax.tree.flatten(grads)
        num_leaves = len(leaves)
        updates_tree: PyTree = None  # the update is a trace, from which only arrays come out as results

        def update(*arrays: jax.Array) -> list[jax.Array]:
            nonlocal updates_tree
            model, optimizer = nnx.merge(graphdef, jax.tree.unflatten(tree, arrays[:num_leaves]))
            grads = jax.tree.unflatten(grads_tree, arrays[num_leaves:])
            # Further arguments, such as the loss, belong to no parameter, and so to no part.
            updates = nnx.Optimizer.update(optimizer, model, grads, **to_device(kwargs))
            update_leaves, updates_tree = jax.tree.flatten(updates)
            return [*jax.tree.leaves(nnx.state((model, optimizer))), *update_leaves]

        paths = paths_of(state)
        grad_paths = paths_of(grads)
        offloaded = _places(model, over_replica=False).offloaded
        parts = parts_of(offloaded, arguments=[*paths, *grad_paths], results=paths, gradients=grad_paths)
        # Updates are returned to the caller, and stay where they were computed.
        results_on_device = [None] * len(grad_leaves)
        results = streamed(update, [*leaves, *grad_leaves], parts, like=[*leaves, *results_on_device])
        # The results of `update` begin with the state of both, in the order of its leaves.
        nnx.update((model, self), jax.tree.unflatten(tree, results[:num_leaves]))
        return jax.tree.unflatten(updates_tree, results[num_leaves:])
