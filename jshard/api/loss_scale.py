"""Loss scaling, for gradients in float16: the loss is multiplied before backward, the gradients divided after.

In float16, values below 6e-8 become zero and values above 65504 infinite. So the loss is scaled up as far as possible:
an update with non-finite gradients is skipped and the scale halved; after many good updates the scale is doubled. It is
part of the optimizer's state, and is sharded, saved and restored with it. Gradients are global arrays, so all devices
agree on whether they are finite, wherever the overflow occurred.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jshard._types import PyTree
from jshard.api.gradients import LossFunction, value_and_grad
from jshard.engine.unreduced import PartialGradients
from jshard.engine.weighted import with_total
from jshard.errors import AnnotationError
from jshard.plans.memories import back, to_device
from jshard.plans.policies import wide_dtype

_LARGEST_SCALE = 2.0**64  # far beyond what float16 can use; its product with a loss is finite in float32


class LossScaleState(NamedTuple):
    """The optimizer state of `LossScale`.

    Attributes:
        scale: the factor that the loss is multiplied by.
        good_steps: updates since the scale last changed.
        skipped: total number of skipped updates.
        inner: the state of the optimizer.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling, to be wrapped around an optimizer.

    Args:
        initial: the initial scale.
        growth_interval: number of consecutive good updates after which the scale grows.
        factor: the factor by which it grows and shrinks; it does not shrink below 1.

    Examples:
        >>> optimizer = js.shard_optimizer(model, js.LossScale().around(optax.adamw(1e-3)))
        >>> loss, grads = js.scaled_value_and_grad(loss_fn, optimizer)(model, x)
        >>> optimizer.update(model, grads)  # nothing happens if they are not finite
    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    factor: float = 2.0

    def __post_init__(self) -> None:
        is_valid = self.factor > 1 and self.growth_interval >= 1 and 1 <= self.initial < float("inf")
        if not is_valid:
            raise AnnotationError(
                "The loss scale settings are not valid.",
                where=str(self),
                why="factor must be above 1, growth_interval at least 1, initial at least 1 and finite.",
                do="js.LossScale(initial=2.0**16, growth_interval=2000)",
            )

    def around(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Wraps a transformation: updates with non-finite gradients are skipped, and the scale is in its state.

        Args:
            tx: any Optax transformation, with its clipping: it receives unscaled gradients.
        """
        inner = optax.with_extra_args_support(tx)

        def init(params: optax.Params) -> LossScaleState:
            zero = jnp.zeros((), jnp.int32)
            # In float32: the largest scale is infinite in float16.
            return LossScaleState(jnp.asarray(self.initial, jnp.float32), zero, zero, inner.init(params))

        def update(
            grads: optax.Updates, state: LossScaleState, params: optax.Params | None = None, **extra: object
        ) -> tuple[optax.Updates, LossScaleState]:
            # The sum that clipping by the global norm needs too, so the compiler computes it once.
            is_finite = jnp.isfinite(optax.tree.norm(grads))

            def if_finite(new: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where(is_finite, new, old)

            # Computed in any case, and dropped below if the gradients are not finite.
            updates, inner_state = inner.update(grads, state.inner, params, **extra)
            next_inner_state = jax.tree.map(if_finite, inner_state, state.inner)
            updates = jax.tree.map(lambda u: if_finite(u, jnp.zeros_like(u)), updates)
            return updates, self._next_state(state, is_finite, next_inner_state)

        return optax.GradientTransformationExtraArgs(init, cast(optax.TransformUpdateExtraArgsFn, update))

    def _next_state(self, state: LossScaleState, is_finite: jax.Array, inner: optax.OptState) -> LossScaleState:
        """Returns the state after an update; `inner` is that of the optimizer."""
        # This update included.
        grows = state.good_steps + 1 >= self.growth_interval
        good_steps = jnp.where(is_finite & ~grows, state.good_steps + 1, 0)
        larger = jnp.minimum(state.scale * self.factor, _LARGEST_SCALE)
        # Below 1 the scale would add underflow, which it is there to avoid.
        smaller = jnp.maximum(state.scale / self.factor, 1.0)
        scale = jnp.where(is_finite, jnp.where(grows, larger, state.scale), smaller)
        return LossScaleState(scale, good_steps, state.skipped + ~is_finite, inner)


def loss_scale_of(optimizer: object) -> LossScaleState | None:
    """Returns the loss scale in an optimizer's state; None if there is none.

    Args:
        optimizer: an `nnx.Optimizer`, a Linen `TrainState`, or an Optax state.

    Examples:
        >>> optimizer = js.shard_optimizer(model, js.LossScale().around(optax.adamw(1e-3)))
        >>> float(js.loss_scale_of(optimizer).scale)
        65536.0
    """

    def is_scale(node: object) -> bool:
        return isinstance(node, LossScaleState)

    # Both `nnx.Optimizer` and a `TrainState` have their state under this name; an Optax state is one itself.
    state = getattr(optimizer, "opt_state", optimizer)
    scales = [node for node in jax.tree.leaves(state, is_leaf=is_scale) if is_scale(node)]
    if not scales:
        return None
    scale = scales[0]
    return LossScaleState(_array(scale.scale), _array(scale.good_steps), _array(scale.skipped), scale.inner)


def _array(x: nnx.Variable | jax.Array) -> jax.Array:
    """Returns the array in a variable; `nnx.Optimizer` keeps its state in variables, Optax in plain arrays."""
    return x[...] if isinstance(x, nnx.Variable) else x


def scaled_value_and_grad(
    loss_fn: LossFunction,
    optimizer: nnx.Optimizer,
    *,
    accumulate: int = 1,
    sync: str = "each",
    has_aux: bool = False,
) -> Callable[..., PyTree]:
    """Computes `js.value_and_grad` with the loss multiplied by the scale in an optimizer's state.

    Args:
        loss_fn: `loss_fn(model, *batch)`, as in `js.value_and_grad`.
        optimizer: the optimizer; without a loss scale in its state this is `js.value_and_grad`. Gradients are taken
            with respect to the parameters that it updates.
        accumulate: number of microbatches; the loss of each is scaled.
        sync: as in `js.value_and_grad`.
        has_aux: `loss_fn` returns `(loss, aux)`.

    Returns:
        A function of `(model, *batch)` that returns `(loss, gradients)`, or `((loss, aux), gradients)`, both unscaled.

    Examples:
        >>> optimizer = js.shard_optimizer(model, js.LossScale().around(optax.adamw(1e-3)))
        >>> loss, grads = js.scaled_value_and_grad(loss_fn, optimizer)(model, x)
        >>> optimizer.update(model, grads)  # nothing happens if they are not finite
    """
    settings: dict[str, Any] = {"accumulate": accumulate, "sync": sync, "has_aux": has_aux, "wrt": optimizer.wrt}
    state = loss_scale_of(optimizer)
    if state is None:
        return value_and_grad(loss_fn, **settings)
    # Read now: the function must be made inside the step, or it keeps the scale of this moment.
    scale = state.scale

    # Both are widened first: floats of 8 bits have no common dtype with the scale.
    def scaled_total(loss: jax.Array) -> jax.Array:
        return loss.astype(wide_dtype(loss.dtype)) * scale

    def unscaled(gradient: jax.Array) -> jax.Array:
        return gradient.astype(wide_dtype(gradient.dtype)) / scale

    def scaled_loss_fn(model: nnx.Module, *batch: PyTree) -> PyTree:
        result = loss_fn(model, *batch)
        if has_aux:
            return with_total(result[0], scaled_total), result[1]
        return with_total(result, scaled_total)

    def run(model: nnx.Module, *batch: PyTree) -> PyTree:
        result, scaled_gradients = value_and_grad(scaled_loss_fn, **settings)(model, *batch)
        loss = (result[0] if has_aux else result) / scale
        if isinstance(scaled_gradients, PartialGradients):
            return ((loss, result[1]) if has_aux else loss), scaled_gradients.divided(scale)
        # JAX computes with arrays of one memory alone.
        gradients = jax.tree.map(unscaled, to_device(scaled_gradients))
        gradients = back(gradients, scaled_gradients)  # those of parameters in host memory are there, too
        return ((loss, result[1]) if has_aux else loss), gradients

    return run
