"""Dynamic loss scaling, for gradients in float16: the loss is multiplied before backward, the gradients divided after.

What is smaller than 6e-8 is zero in float16, what is larger than 65504 infinite. So the loss is scaled up as far as it
goes: an update whose gradients are not finite is skipped, and the scale halved; after many good ones it is doubled.

The scale lives in the optimizer's state: it is sharded, saved and restored as that is. Gradients are global arrays, so
that whether they are finite is one fact for all devices, wherever the overflow was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jshard.api.gradients import value_and_grad
from jshard.errors import AnnotationError
from jshard.plans.memories import back, to_device

_MOST = 2.0**64  # far beyond what float16 can use; its product with a loss is finite in float32


class LossScaleState(NamedTuple):
    """What `LossScale` adds to an optimizer's state.

    Attributes:
        scale: what the loss is multiplied by.
        good_steps: updates since the scale last changed.
        skipped: updates that were skipped, in all.
        inner: the state of the optimizer.
    """

    scale: Any
    good_steps: Any
    skipped: Any
    inner: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling, to be put around an optimizer.

    Args:
        initial: the scale at the beginning.
        growth_interval: so many good updates in a row, and the scale grows.
        factor: by which it grows and shrinks; it does not shrink below 1.

    Example:
        >>> optimizer = js.shard_optimizer(model, LossScale().around(optax.adamw(1e-3)))
        >>> loss, grads = scaled_value_and_grad(loss_fn, optimizer)(model, x, y)
        >>> optimizer.update(model, grads)  # nothing happens if they are not finite
    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not (self.factor > 1 and self.growth_interval >= 1 and 1 <= self.initial < float("inf")):
            raise AnnotationError(
                "The loss scale cannot work.",
                where=str(self),
                why="factor is above 1, growth_interval at least 1, initial at least 1 and finite.",
                do="LossScale(initial=2.0**16, growth_interval=2000)",
            )

    def around(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """The transformation, which skips updates whose gradients are not finite, with the scale in its state.

        Args:
            tx: any Optax transformation, with its clipping: it sees gradients without the scale.
        """
        inner = optax.with_extra_args_support(tx)

        def init(params: Any) -> LossScaleState:
            zero = jnp.zeros((), jnp.int32)
            return LossScaleState(jnp.asarray(self.initial, jnp.float32), zero, zero, inner.init(params))

        def update(grads: Any, state: LossScaleState, params: Any = None, **extra: Any) -> tuple[Any, LossScaleState]:
            # The sum that a clip of the global norm needs too, so that the compiler makes it once.
            is_finite = jnp.isfinite(optax.tree.norm(grads))
            updates, after = inner.update(grads, state.inner, params, **extra)
            either = lambda new, old: jnp.where(is_finite, new, old)
            kept = jax.tree.map(either, after, state.inner)
            return jax.tree.map(lambda u: either(u, jnp.zeros_like(u)), updates), self._after(state, is_finite, kept)

        return optax.GradientTransformationExtraArgs(init, cast(Any, update))

    def _after(self, state: LossScaleState, is_finite: jax.Array, inner: Any) -> LossScaleState:
        grows = state.good_steps + 1 >= self.growth_interval
        good_steps = jnp.where(is_finite & ~grows, state.good_steps + 1, 0)
        larger = jnp.minimum(state.scale * self.factor, _MOST)
        smaller = jnp.maximum(state.scale / self.factor, 1.0)
        scale = jnp.where(is_finite, jnp.where(grows, larger, state.scale), smaller)
        return LossScaleState(scale, good_steps, state.skipped + ~is_finite, inner)


def loss_scale_of(optimizer: Any) -> LossScaleState | None:
    """The loss scale in an optimizer's state; None if there is none.

    Args:
        optimizer: an `nnx.Optimizer`, a Linen `TrainState`, or a state of Optax.
    """
    is_scale = lambda x: isinstance(x, LossScaleState)
    leaves = jax.tree.leaves(getattr(optimizer, "opt_state", optimizer), is_leaf=is_scale)
    found = next(filter(is_scale, leaves), None)
    if found is None:
        return None
    value = lambda x: x[...] if isinstance(x, nnx.Variable) else x
    return LossScaleState(value(found.scale), value(found.good_steps), value(found.skipped), found.inner)


def scaled_value_and_grad(
    loss_fn: Callable[..., Any],
    optimizer: nnx.Optimizer,
    *,
    accumulate: int = 1,
    sync: str = "each",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """`js.value_and_grad` with the loss multiplied by the scale in an optimizer's state.

    Args:
        loss_fn: `loss_fn(model, *batch)`, a mean over the batch, in global view.
        optimizer: the optimizer; without a loss scale in its state this is `js.value_and_grad`. Gradients are those of
            the parameters that it updates.
        accumulate: number of microbatches; the loss of each is scaled.
        sync: as in `js.value_and_grad`.
        has_aux: `loss_fn` returns `(loss, aux)`.

    Returns:
        A function of `(model, *batch)` that returns `(loss, gradients)`, or `((loss, aux), gradients)`, both without
        the scale.
    """
    settings: dict[str, Any] = {"accumulate": accumulate, "sync": sync, "has_aux": has_aux, "wrt": optimizer.wrt}
    found = loss_scale_of(optimizer)
    if found is None:
        return value_and_grad(loss_fn, **settings)
    up = lambda loss: loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * found.scale
    down = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / found.scale

    def scaled(model: nnx.Module, *batch: Any) -> Any:
        out = loss_fn(model, *batch)
        return (up(out[0]), out[1]) if has_aux else up(out)

    def run(model: nnx.Module, *batch: Any) -> Any:
        out, grads = value_and_grad(scaled, **settings)(model, *batch)
        loss = (out[0] if has_aux else out) / found.scale
        grads = back(jax.tree.map(down, to_device(grads)), grads)
        return ((loss, out[1]) if has_aux else loss), grads

    return run
