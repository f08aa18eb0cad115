"""The state of a Linen model: optimizer state that follows the plan, its loss, and arrays initialised in place."""

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
from jshard.engine.context import during
from jshard.engine.created import created
from jshard.errors import AnnotationError
from jshard.linen.annotation import annotation_for
from jshard.linen.layout import Layout, Trained, boxed, boxed_like, joined, unboxed
from jshard.plans.array_paths import Keys, key_texts, paths_of
from jshard.plans.memories import fetched, placed_like, sharding_of, to_device, to_host
from jshard.plans.placement import Placement
from jshard.plans.replication import check_replicated
from jshard.plans.state_places import StatePlaces, UpdateLayout, update_layout
from jshard.plans.streamed_updates import parts_of, streamed

# Optimizer state.


def linen_optimizer(
    model: nn.Module, tx: optax.GradientTransformation, *, wrt: Any, shard_replicated: bool
) -> optax.GradientTransformationExtraArgs:
    """The transformation for the `TrainState` of an annotated Linen model; see `js.shard_optimizer`.

    Its parameters need not be known yet: the placement of the state is looked up when it is created and updated.
    """
    annotation = annotation_for(model)
    if shard_replicated:
        raise AnnotationError(
            "The optimizer of a Linen model cannot shard the state of replicated parameters.",
            where=f"shard_optimizer({annotation.base.__name__}, tx, shard_replicated=True)",
            why="js.shard_init places the arrays of a TrainState: state like its parameters.",
            do="js.shard_optimizer(model, tx)",
        )
    assert annotation.root.optimizer is not None, "fully_shard sets one for every Linen model"
    annotation.root.optimizer.exists = True
    all_are, trained = wrt is nnx.Param, lambda: Trained(annotation.layout, wrt)
    tx = optax.with_extra_args_support(tx if all_are else optax.masked(tx, lambda tree: trained().mask(tree)))
    held = lambda tree: annotation.layout.places.held(tree, annotation.root.mesh, as_given=True)

    def init(params: Any) -> Any:
        places, logical = annotation.layout.places, unboxed(params)
        state, has_boxes = tx.init(to_device(logical)), jax.tree.structure(params) != jax.tree.structure(logical)
        there = lambda path, x: to_host(x) if places.on_host(key_texts(path), x.shape) else x
        return jax.tree.map_with_path(there, held(boxed(state, places) if has_boxes else state))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Updates and the next state, each placed like the array that it replaces."""
        extra = unboxed(to_device(extra))

        def on_device(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            given = held((grads, state))
            plain_grads, plain_state = unboxed(given)
            with during(update_layout, UpdateLayout(annotation.layout.places, annotation.root.mesh)):
                found = tx.update(plain_grads, plain_state, unboxed(params), **extra)
            return held(boxed_like(given, found))

        places, grads = annotation.layout.places, grads if all_are else trained().split(grads)[0]
        if not places.offloaded:
            return on_device(grads, state, params)
        return _streamed(on_device, held, places, grads, state, params)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def _streamed(
    rule: Callable[..., Any], held: Callable[[Any], Any], places: StatePlaces, grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """An update of arrays in host memory, which are copied to the device and back in parts.

    The update of a parameter carries the sum of both.
    """
    given, tree = jax.tree.flatten((grads, state, params))
    of_grads, of_state, of_params = map(paths_of, (grads, state, params))
    parameters = dict(zip(of_params, jax.tree.leaves(params), strict=True))
    away = {path: x for path in of_grads if (x := parameters.get(path)) is not None and _compat.on_host(x)}

    def update(*arrays: jax.Array) -> list[jax.Array]:
        grads, state, params = jax.tree.unflatten(tree, arrays)
        updates, state = rule(grads, state, params)
        sums = held(optax.apply_updates(params, updates)) if away else ()
        sums = dict(zip(paths_of(sums), jax.tree.leaves(sums), strict=True))
        return [*jax.tree.leaves((updates, state)), *(sums[path] for path in away)]

    made = [*of_grads, *of_state]
    parts = parts_of(places.offloaded, [*made, *of_params], [*made, *away], of_grads)
    found = streamed(update, given, parts, [*[None] * len(of_grads), *jax.tree.leaves(state), *away.values()])
    updates, state = jax.tree.unflatten(jax.tree.structure((grads, state)), found[: len(made)])
    sums = dict(zip(away, found[len(made) :], strict=True))

    def with_sum(path: tuple, x: Any) -> Any:
        keys = key_texts(path)
        return HostUpdate(x, (away[keys], sums[keys])) if keys in sums else x

    return jax.tree.map_with_path(with_sum, updates), state


class HostUpdate:
    """The update of a parameter in host memory, together with the sum of both.

    The streamed update has already computed this sum. It is valid only for that same array, and is lost if the update
    is changed: then the parameter is fetched, and the sum is computed again.
    """

    __array_ufunc__ = None

    def __init__(self, value: Any, made: tuple[Any, Any] | None = None) -> None:
        self.value, self._made = value, made  # the update on the device; the parameter and the sum

    def __radd__(self, parameter: Any) -> Any:
        if self._made is not None and self._made[0] is parameter:
            return self._made[1]
        return placed_like((fetched(parameter) + self.value).astype(parameter.dtype), parameter)


jax.tree_util.register_pytree_with_keys(
    HostUpdate,
    lambda update: (((jax.tree_util.GetAttrKey("value"), update.value),), None),
    lambda _, children: HostUpdate(*children),
)


# The loss of a Linen model, as a function of trees of arrays.


def linen_loss(loss_fn: Callable, trained: Any, frozen: Any, layout: Layout, has_aux: bool) -> Loss:
    """The loss of trained and frozen parameters."""

    def run(params: Any, frozen: Any, state: Any, part: Any) -> tuple[Any, tuple[Any, Any]]:
        out = loss_fn(joined(params, frozen), *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, state)

    def placement(path: tuple, x: Any) -> Placement | None:
        found = layout.placement_of(key_texts(path), x.dtype)
        return found if found is not None and found.stored_shape == jnp.shape(x) else None

    placed = [[placement(path, x) for path, x in jax.tree.leaves_with_path(tree)] for tree in (trained, frozen)]
    return Loss(run, trained, frozen, (), (placed[0], placed[1]), layout.root, layout.root.kind)


# Deferred initialisation of a Linen model: the result of `build`, such as a TrainState, with arrays created in place.


def linen_shapes(build: Callable[[], Any], model: nn.Module) -> Any:
    """The result of `build()` with shapes in place of arrays, and shardings if the mesh has devices.

    An array at the path of a parameter, with its shape, is sharded and padded like it. Host memory holds the parameters
    annotated with it, and the state that `build` placed there, as `js.shard_optimizer` does.
    """
    annotation = annotation_for(model)
    traced, shapes = jax.make_jaxpr(build, return_shape=True)()
    layout = annotation.layout
    check_replicated(layout.root, layout.root.kind)
    places, mesh = layout.places, layout.root.mesh
    away, offloaded = [_compat.on_host(aval) for aval in traced.out_avals], _offloaded(shapes, places)
    if not any(away):
        _check_offloaded(offloaded, layout.root.kind)
    parameters = {its for its, *_ in offloaded if places.on_host_itself(its)}

    def one(path: tuple, x: Any, on_host: bool) -> jax.ShapeDtypeStruct:
        is_key, keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key), key_texts(path)
        spec = PartitionSpec() if is_key else places.spec(keys, x.shape)
        sharding = sharding_of(mesh, spec, on_host=on_host or keys in parameters)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    stored = boxed(shapes, places)
    return jax.tree.map_with_path(one, stored, jax.tree.unflatten(jax.tree.structure(stored), away))


def linen_arrays(build: Callable[[], Any], model: nn.Module, mesh: Mesh) -> Any:
    """The result of `build()`, created by one compiled program."""
    leaves, tree = jax.tree.flatten(linen_shapes(build, model))
    places = annotation_for(model).layout.places
    make = lambda: jax.tree.leaves(boxed(build(), places))
    where = f"shard_init({annotation_for(model).base.__name__})"
    arrays = created(make, [x.sharding for x in leaves], mesh, where)
    return jax.tree.unflatten(tree, arrays)


def _offloaded(shapes: Any, places: StatePlaces) -> list[list[Keys]]:
    """The paths of the arrays that belong to each offloaded parameter; its own path, the shortest, is first."""
    found: dict[Any, list[Keys]] = {}
    for path, x in jax.tree.leaves_with_path(shapes):
        if places.on_host(keys := key_texts(path), x.shape):
            found.setdefault(places.tail(keys), []).append(keys)
    return [sorted(paths, key=len) for paths in found.values()]


def _check_offloaded(offloaded: list[list[Keys]], kind: str) -> None:
    """Raises for optimizer state that belongs in host memory but was created by plain Optax, which ignores memories."""
    state = ["/".join(keys) for _, *rest in offloaded for keys in rest]
    if state:
        raise AnnotationError(
            "The optimizer state would not be in host memory.",
            where=[f"{kind}: {path}" for path in state],
            why="the model was annotated with offload, and plain Optax made this state.",
            do="TrainState.create(..., tx=js.shard_optimizer(model, tx))",
        )
