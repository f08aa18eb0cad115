"""`js.value_and_grad`: the gradients of a loss, over microbatches, for an nnx or Linen model; and loss scaling.

Loss scaling is for gradients in float16: the loss is multiplied before backward, the gradients divided after. In
float16, values below 6e-8 become zero and values above 65504 infinite. So the loss is scaled up as far as possible: an
update with non-finite gradients is skipped and the scale halved; after many good updates the scale is doubled. It is
part of the optimizer's state, and is sharded, saved and restored with it. Gradients are global arrays, so all devices
agree on whether they are finite, wherever the overflow occurred.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jshard.engine.accumulate import Loss, accumulated
from jshard.engine.border import opened
from jshard.engine.context import parameters_fixed
from jshard.engine.weighted import mean_of, with_total
from jshard.errors import AnnotationError, CallError
from jshard.linen.annotation import annotation_for
from jshard.linen.layout import Trained, joined
from jshard.linen.train_state import linen_loss
from jshard.plans.checks import check_has_arrays
from jshard.plans.memories import back, to_device
from jshard.plans.padding import Padding, is_as_placed, padding_of
from jshard.plans.placement import Placement
from jshard.plans.plan import as_stored, record_of
from jshard.plans.policies import wide_dtype
from jshard.plans.units import Path, Unit, dotted, plain_class, units_in


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    model: nn.Module | None = None,
    accumulate: int = 1,
    sync: str = "each",
    has_aux: bool = False,
    wrt: Any = nnx.Param,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over microbatches; `jax.value_and_grad` for a Linen model.

    The batch is split into `accumulate` = n microbatches: microbatch i has the rows i, i + n, i + 2n and so on, so
    that every data shard keeps its own rows. Loss and gradients are the means over them. Where a loss is a plain mean
    over the batch, that is the loss of the whole batch, and nothing changes. A loss that divides by something else,
    such as the number of tokens that a mask keeps, returns a `js.WeightedMean` in place of the quotient: then loss and
    gradients are the sum of the totals, divided by the sum of the weights. State that an nnx model changes (BatchNorm,
    dropout counts) is carried from one to the next.

    Args:
        loss_fn: `loss_fn(model, *batch)`, a mean over the batch, in global view, or a `js.WeightedMean`; for a Linen
            model `loss_fn(params, *batch)`.
        model: the annotated Linen model that `loss_fn` calls; not needed for nnx models.
        accumulate: number of microbatches.
        sync: `"each"`: every microbatch gathers parameters and reduce-scatters gradients; the sum is sharded.
            `"last"`: parameters are gathered once and gradients reduced once per step; meanwhile each device
            holds the full parameters and gradients. Parameters that are never gathered are as with `"each"`.
        has_aux: `loss_fn` returns `(loss, aux)`; aux is returned stacked over the microbatches.
        wrt: the parameters to differentiate with respect to, as for `nnx.Optimizer`: an nnx filter. The others are
            frozen: they are only gathered. For a Linen model: a path pattern such as `"*/lora_*"`, a function of
            (path, parameter) with the path as a tuple, or a list of these.

    Returns:
        A function of `(model, *batch)`, or `(params, *batch)`, that returns `(loss, gradients)`, or
        `((loss, aux), gradients)`. The gradients of a Linen model have the structure of `params`, with an
        `optax.MaskedNode` for each frozen array, for which `optax.apply_updates` leaves the parameter unchanged.

    Raises:
        AnnotationError: the model is not annotated, or `wrt` selects none of a Linen model's parameters.
        CallError: the batch does not divide into microbatches that divide over the data shards; or the model is never
            called with the parameters that were gathered for it.

    Example:
        >>> grad_fn = js.value_and_grad(loss_fn, accumulate=4, sync="last")
        >>> loss, grads = nnx.jit(lambda model, x: grad_fn(model, x))(model, x)
    """
    if not isinstance(accumulate, int) or accumulate < 1 or sync not in ("each", "last"):
        raise AnnotationError(
            "The accumulation settings are not valid.",
            where=f"value_and_grad(accumulate={accumulate!r}, sync={sync!r})",
            why='accumulate must be a number of microbatches, and sync "each" or "last".',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="last")',
        )
    gradients = _nnx_gradients if model is None else functools.partial(_linen_gradients, model)
    settings = {"steps": accumulate, "once": sync == "last", "has_aux": has_aux, "wrt": wrt}

    @functools.wraps(loss_fn)
    def run(trained: Any, *batch: Any) -> Any:
        if accumulate == 1:
            return gradients(loss_fn, trained, batch, **settings)
        arrays, together = opened(batch)  # a dataclass of arrays is cut like a dict of them
        of_arrays = lambda trained, *arrays: loss_fn(trained, *together(arrays))
        return gradients(of_arrays, trained, tuple(arrays), **settings)

    return run


def _nnx_gradients(
    loss_fn: Callable, model: nnx.Module, batch: tuple, *, steps: int, once: bool, has_aux: bool, wrt: Any
) -> Any:
    unit = record_of(model)
    check_has_arrays(f"{plain_class(model).__name__}.__call__", jax.tree.leaves(nnx.state(model)))
    if steps == 1:
        return nnx.value_and_grad(_mean(loss_fn, has_aux), argnums=nnx.DiffState(0, wrt), has_aux=has_aux)(
            model, *batch
        )
    loss = _nnx_loss(loss_fn, model, unit, has_aux, wrt)
    if once:
        _check_parameters(loss.params, loss.name)
    value, aux, grads, state = accumulated(loss, batch, steps, once=once)
    nnx.update(model, state)
    return ((value, aux) if has_aux else value), grads


def _linen_gradients(
    model: nn.Module, loss_fn: Callable, params: Any, batch: tuple, *, steps: int, once: bool, has_aux: bool, wrt: Any
) -> Any:
    layout = annotation_for(model).layout
    trained, frozen = Trained(layout, wrt).split(params)
    if steps == 1:
        of_trained = lambda trained, *batch: _mean(loss_fn, has_aux)(joined(trained, frozen), *batch)
        return jax.value_and_grad(of_trained, has_aux=has_aux)(trained, *batch)
    loss = linen_loss(loss_fn, trained, frozen, layout, has_aux)
    value, aux, grads, _ = accumulated(loss, batch, steps, once=once)
    return ((value, aux) if has_aux else value), grads


def _mean(loss_fn: Callable, has_aux: bool) -> Callable:
    """The loss function, with the mean in place of a `WeightedMean`."""

    @functools.wraps(loss_fn)
    def run(*args: Any) -> Any:
        out = loss_fn(*args)
        return (mean_of(out[0]), out[1]) if has_aux else mean_of(out)

    return run


def _nnx_loss(loss_fn: Callable, model: nnx.Module, unit: Unit, has_aux: bool, wrt: Any) -> Loss:
    graphdef, params, frozen, state = nnx.split(model, wrt, nnx.Param, ...)

    def run(params: Any, frozen: Any, state: Any, part: Any) -> tuple[Any, tuple[Any, Any]]:
        live = nnx.merge(graphdef, params, frozen, state, copy=True)
        with parameters_fixed():
            out = loss_fn(live, *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, nnx.split(live, wrt, nnx.Param, ...)[3])

    def placement(path: Path, variable: nnx.Variable) -> Placement | None:
        member = unit.by_path.get(path)
        if member is None or padding_of(variable) != Padding.of(member.placement):
            return None
        if not is_as_placed(variable, member.placement):
            return None
        return as_stored(member, variable.get_raw_value().dtype, lambda: units_in(model)).placement

    def placements(state: Any) -> list[Placement | None]:  # in the order of its leaves: both are sorted
        flat = nnx.to_flat_state(state)
        return [placement(path, variable) for path, variable in flat for _ in jax.tree.leaves(variable)]

    placed = placements(params), placements(frozen)
    return Loss(run, params, frozen, state, placed, unit, plain_class(model).__name__)


def _check_parameters(params: Any, name: str) -> None:
    """Raises for differentiated variables that are not parameters: they have no shards."""
    kinds = [(dotted(path), type(v).__name__) for path, v in nnx.to_flat_state(params) if not isinstance(v, nnx.Param)]
    if kinds:
        raise CallError(
            "Gradients were requested for a variable that is not a parameter.",
            where=[f"{name}: {path}  {kind}" for path, kind in kinds],
            why='sync="last" gathers parameters and reduces their gradients; this one is whole on every device.',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each")  # or derive their class from nnx.Param',
        )


_MOST = 2.0**64  # far beyond what float16 can use; its product with a loss is finite in float32


class LossScaleState(NamedTuple):
    """The optimizer state of `LossScale`.

    Attributes:
        scale: the factor that the loss is multiplied by.
        good_steps: updates since the scale last changed.
        skipped: total number of skipped updates.
        inner: the state of the optimizer.
    """

    scale: Any
    good_steps: Any
    skipped: Any
    inner: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling, to be wrapped around an optimizer.

    Args:
        initial: the initial scale.
        growth_interval: number of consecutive good updates after which the scale grows.
        factor: the factor by which it grows and shrinks; it does not shrink below 1.

    Example:
        >>> optimizer = js.shard_optimizer(model, js.LossScale().around(optax.adamw(1e-3)))
        >>> loss, grads = js.scaled_value_and_grad(loss_fn, optimizer)(model, x)
        >>> optimizer.update(model, grads)  # nothing happens if they are not finite
    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not (self.factor > 1 and self.growth_interval >= 1 and 1 <= self.initial < float("inf")):
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

        def init(params: Any) -> LossScaleState:
            zero = jnp.zeros((), jnp.int32)
            return LossScaleState(jnp.asarray(self.initial, jnp.float32), zero, zero, inner.init(params))

        def update(grads: Any, state: LossScaleState, params: Any = None, **extra: Any) -> tuple[Any, LossScaleState]:
            # The sum that clipping by the global norm needs too, so the compiler computes it once.
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
    """Returns the loss scale in an optimizer's state; None if there is none.

    Args:
        optimizer: an `nnx.Optimizer`, a Linen `TrainState`, or an Optax state.

    Example:
        >>> optimizer = js.shard_optimizer(model, js.LossScale().around(optax.adamw(1e-3)))
        >>> float(js.loss_scale_of(optimizer).scale)
        65536.0
    """

    def is_scale(node: Any) -> bool:
        return isinstance(node, LossScaleState)

    state = getattr(optimizer, "opt_state", optimizer)
    scales = [node for node in jax.tree.leaves(state, is_leaf=is_scale) if is_scale(node)]
    if not scales:
        return None
    scale = scales[0]
    return LossScaleState(_array(scale.scale), _array(scale.good_steps), _array(scale.skipped), scale.inner)


def _array(x: Any) -> Any:
    """Returns the array in a variable; `nnx.Optimizer` keeps its state in variables, Optax in plain arrays."""
    return x[...] if isinstance(x, nnx.Variable) else x


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
        loss_fn: `loss_fn(model, *batch)`, as in `js.value_and_grad`.
        optimizer: the optimizer; without a loss scale in its state this is `js.value_and_grad`. Gradients are taken
            with respect to the parameters that it updates.
        accumulate: number of microbatches; the loss of each is scaled.
        sync: as in `js.value_and_grad`.
        has_aux: `loss_fn` returns `(loss, aux)`.

    Returns:
        A function of `(model, *batch)` that returns `(loss, gradients)`, or `((loss, aux), gradients)`, both unscaled.

    Example:
        >>> optimizer = js.shard_optimizer(model, js.LossScale().around(optax.adamw(1e-3)))
        >>> loss, grads = js.scaled_value_and_grad(loss_fn, optimizer)(model, x)
        >>> optimizer.update(model, grads)  # nothing happens if they are not finite
    """
    settings: dict[str, Any] = {"accumulate": accumulate, "sync": sync, "has_aux": has_aux, "wrt": optimizer.wrt}
    found = loss_scale_of(optimizer)
    if found is None:
        return value_and_grad(loss_fn, **settings)
    up = lambda loss: loss.astype(wide_dtype(loss.dtype)) * found.scale
    down = lambda g: g.astype(wide_dtype(g.dtype)) / found.scale

    def scaled(model: nnx.Module, *batch: Any) -> Any:
        out = loss_fn(model, *batch)
        return (with_total(out[0], up), out[1]) if has_aux else with_total(out, up)

    def run(model: nnx.Module, *batch: Any) -> Any:
        out, grads = value_and_grad(scaled, **settings)(model, *batch)
        loss = (out[0] if has_aux else out) / found.scale
        grads = back(jax.tree.map(down, to_device(grads)), grads)
        return ((loss, out[1]) if has_aux else loss), grads

    return run
