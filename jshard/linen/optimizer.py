"""Optimizer state of a Linen model that follows the plan: sharded, padded, or in host memory like its parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.context import during
from jshard.errors import AnnotationError
from jshard.linen.annotation import Annotation, annotation_for
from jshard.linen.boxes import boxed, boxed_like, unboxed
from jshard.linen.trained import Trained
from jshard.plans.array_paths import Keys, key_texts, paths_of
from jshard.plans.memories import fetched, placed_like, to_device, to_host
from jshard.plans.state_places import StatePlaces, UpdateLayout, update_layout
from jshard.plans.streamed_updates import parts_of, streamed

Updated = tuple[optax.Updates, optax.OptState]
"""The updates, and the next state."""


def linen_optimizer(
    model: nn.Module, tx: optax.GradientTransformation, *, wrt: Filter, shard_replicated: bool
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation for the `TrainState` of an annotated Linen model; see `js.shard_optimizer`.

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
    annotation.root.optimizer.exists = True  # from now on gradients of padded parameters are not refused
    optimizer = _LinenOptimizer(annotation, tx, wrt)
    return optax.GradientTransformationExtraArgs(optimizer.init, cast(Any, optimizer.update))


class _LinenOptimizer:
    """A transformation that sees logical arrays on the device, while state and gradients are stored as planned."""

    def __init__(self, annotation: Annotation, tx: optax.GradientTransformation, wrt: Filter) -> None:
        self._annotation = annotation
        self._wrt = wrt
        self._trains_all = wrt is nnx.Param
        if not self._trains_all:
            # A function, because the parameters may not be known yet.
            tx = optax.masked(tx, lambda tree: self._trained().mask(tree))
        self._tx = optax.with_extra_args_support(tx)

    def init(self, params: optax.Params) -> optax.OptState:
        """Creates the state, each array where its parameter's state belongs."""
        places = self._annotation.layout.places
        logical = unboxed(params)
        state = self._tx.init(to_device(logical))
        has_boxes = jax.tree.structure(params) != jax.tree.structure(logical)
        if has_boxes:  # the state has the form of the parameters that it was created for
            state = boxed(state, places)
        # Constraints are on arrays on the device (see `held`), so the copies to the host come after them.
        state = self._hold(state)

        def in_its_memory(path: tuple, x: jax.Array) -> jax.Array:
            return to_host(x) if places.on_host(key_texts(path), x.shape) else x

        return jax.tree.map_with_path(in_its_memory, state)

    def update(
        self, grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> Updated:
        """Returns updates and the next state, each placed like the array that it replaces."""
        logical_extra = unboxed(to_device(extra))

        def update_on_device(grads: optax.Updates, state: optax.OptState, params: optax.Params | None) -> Updated:
            # The transformation sees logical arrays. The boxes of the old ones show how the new ones are stored.
            before = self._hold((grads, state))
            logical_grads, logical_state = unboxed(before)
            layout = UpdateLayout(self._annotation.layout.places, self._annotation.root.mesh)
            # For transformations that compute by the placement, as those of `js.shard_matrices`.
            with during(update_layout, layout):
                after = self._tx.update(logical_grads, logical_state, unboxed(params), **logical_extra)
            return self._hold(boxed_like(before, after))

        places = self._annotation.layout.places
        if not self._trains_all:
            grads, _ = self._trained().split(grads)
        if not places.offloaded:
            return update_on_device(grads, state, params)
        return _streamed_update(update_on_device, self._hold, places, grads, state, params)

    def _trained(self) -> Trained:
        """Returns what is trained, by the latest layout: `init` may be called after the optimizer is made."""
        return Trained(self._annotation.layout, self._wrt)

    def _hold(self, tree: PyTree) -> PyTree:
        """Constrains arrays as planned: the compiler would choose again, for each of them."""
        return self._annotation.layout.places.held(tree, self._annotation.root.mesh, as_given=True)


def _streamed_update(
    update_on_device: Callable[..., Updated],
    hold: Callable[[PyTree], PyTree],
    places: StatePlaces,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
) -> Updated:
    """Updates arrays in host memory, which are copied to the device and back in parts.

    The update of a parameter in host memory carries the sum of both, so that the parameter itself is fetched only once.

    Args:
        update_on_device: the update of arrays on the device.
        hold: constrains arrays as planned.
        places: where the state is.
        grads: the gradients; those of frozen parameters are placeholders.
        state: the state of the optimizer.
        params: the parameters.
    """
    arguments, tree = jax.tree.flatten((grads, state, params))
    grad_paths, state_paths, param_paths = paths_of(grads), paths_of(state), paths_of(params)
    host_params = _on_host(grad_paths, dict(zip(param_paths, jax.tree.leaves(params), strict=True)))

    def update(*arrays: jax.Array) -> list[jax.Array]:
        grads, state, params = jax.tree.unflatten(tree, arrays)
        updates, state = update_on_device(grads, state, params)
        results = jax.tree.leaves((updates, state))
        if host_params:
            sums = hold(optax.apply_updates(params, updates))
            sum_of = dict(zip(paths_of(sums), jax.tree.leaves(sums), strict=True))
            results += [sum_of[path] for path in host_params]
        return results

    update_paths = [*grad_paths, *state_paths]
    parts = parts_of(places.offloaded, [*update_paths, *param_paths], [*update_paths, *host_params], grad_paths)
    # Updates stay on the device, where the caller adds them; state and sums return to the memory that they came from.
    # In the order of `update`'s results.
    like = [*[None] * len(grad_paths), *jax.tree.leaves(state), *host_params.values()]
    results = streamed(update, arguments, parts, like)
    num_updated = len(update_paths)
    updates, state = jax.tree.unflatten(jax.tree.structure((grads, state)), results[:num_updated])
    sums = dict(zip(host_params, results[num_updated:], strict=True))

    def with_sum(path: tuple, x: jax.Array) -> jax.Array | HostUpdate:
        keys = key_texts(path)
        if keys not in sums:
            return x
        return HostUpdate(x, (host_params[keys], sums[keys]))

    return jax.tree.map_with_path(with_sum, updates), state


def _on_host(paths: Sequence[Keys], params: Mapping[Keys, jax.Array]) -> dict[Keys, jax.Array]:
    """Returns the parameters at paths that are in host memory."""
    host_params = {}
    for path in paths:
        parameter = params.get(path)
        if parameter is not None and _compat.on_host(parameter):
            host_params[path] = parameter
    return host_params


class HostUpdate:
    """The update of a parameter in host memory, together with the sum of both.

    The streamed update has already computed this sum. It is valid only for that same array, and is lost if the update
    is changed: then the parameter is fetched, and the sum is computed again.

    Attributes:
        value: the update, on the device.
    """

    __array_ufunc__ = None  # so an array of numpy leaves the sum to `__radd__`

    def __init__(self, value: jax.Array, parameter_and_sum: tuple[jax.Array, jax.Array] | None = None) -> None:
        self.value = value
        self._parameter_and_sum = parameter_and_sum

    def __radd__(self, parameter: jax.Array) -> jax.Array:
        if self._parameter_and_sum is not None:
            summed_parameter, result = self._parameter_and_sum
            # By identity: the caller may add the update to another array, such as an average of parameters.
            if summed_parameter is parameter:
                return result
        return placed_like((fetched(parameter) + self.value).astype(parameter.dtype), parameter)


def _flatten(update: HostUpdate) -> tuple[tuple[tuple[object, jax.Array]], None]:
    # Without the sum: a tree map makes another update, of which it would not be the sum.
    return ((jax.tree_util.GetAttrKey("value"), update.value),), None


def _unflatten(_: None, children: Iterable[PyTree]) -> HostUpdate:
    return HostUpdate(*children)


jax.tree_util.register_pytree_with_keys(HostUpdate, _flatten, _unflatten)
