"""`js.value_and_grad`: the gradients of a loss, over microbatches, of an nnx model or of a Linen one."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from jshard.engine.accumulate import Loss, accumulated
from jshard.errors import AnnotationError, CallError
from jshard.linen.annotation import annotation_for
from jshard.linen.layout import Trained, joined
from jshard.linen.train_state import linen_loss
from jshard.plans.placement import Placement
from jshard.plans.plan import record_of
from jshard.plans.units import Unit, dotted, plain_class


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    model: nn.Module | None = None,
    accumulate: int = 1,
    sync: str = "each",
    has_aux: bool = False,
    wrt: Any = nnx.Param,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over microbatches; of a Linen model `jax.value_and_grad`.

    The batch is cut into `accumulate` microbatches along its batch dim; loss and gradients are the means over
    them. State that an nnx model changes (BatchNorm, dropout counts) passes from one to the next.

    Args:
        loss_fn: `loss_fn(model, *batch)`, a mean over the batch, in global view; of a Linen model
            `loss_fn(params, *batch)`.
        model: the annotated Linen model that `loss_fn` calls; nnx models are their own.
        accumulate: number of microbatches.
        sync: `"each"`: every microbatch gathers parameters and reduce-scatters gradients; the sum is sharded.
            `"last"`: parameters are gathered once and gradients reduced once per step; each device holds the
            full parameters and gradients of the model meanwhile. What is never gathered is as with `"each"`.
        has_aux: `loss_fn` returns `(loss, aux)`; aux comes back stacked over the microbatches.
        wrt: the parameters to differentiate with respect to, as `nnx.Optimizer` takes them: an nnx filter. The others
            are frozen: gathered, and nothing more. Of a Linen model a path pattern such as `"*/lora_*"`, a function of
            (path, parameter), the path as a tuple, or a list of these.

    Returns:
        A function of `(model, *batch)`, or `(params, *batch)`, that returns `(loss, gradients)`, or
        `((loss, aux), gradients)`. The gradients of a Linen model have the form of `params`; in the place of a frozen
        array is an `optax.MaskedNode`, which `optax.apply_updates` leaves the parameter alone for.

    Raises:
        AnnotationError: the model is not annotated, or `wrt` chooses none of a Linen model's parameters.
        CallError: the batch does not divide into microbatches that divide over the data shards; or no call of the
            model is with the parameters that were gathered for it.

    Example:
        >>> grad_fn = js.value_and_grad(loss_fn, accumulate=4, sync="last")
        >>> loss, grads = nnx.jit(lambda model, x: grad_fn(model, x))(model, x)
    """
    if not isinstance(accumulate, int) or accumulate < 1 or sync not in ("each", "last"):
        raise AnnotationError(
            "The accumulation cannot work.",
            where=f"value_and_grad(accumulate={accumulate!r}, sync={sync!r})",
            why='accumulate is a number of microbatches, sync is "each" or "last".',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="last")',
        )
    gradients = _nnx_gradients if model is None else functools.partial(_linen_gradients, model)
    settings = {"steps": accumulate, "once": sync == "last", "has_aux": has_aux, "wrt": wrt}

    @functools.wraps(loss_fn)
    def run(trained: Any, *batch: Any) -> Any:
        return gradients(loss_fn, trained, batch, **settings)

    return run


def _nnx_gradients(
    loss_fn: Callable, model: nnx.Module, batch: tuple, *, steps: int, once: bool, has_aux: bool, wrt: Any
) -> Any:
    unit = record_of(model)
    if steps == 1:
        return nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)(model, *batch)
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
        of_trained = lambda trained, *batch: loss_fn(joined(trained, frozen), *batch)
        return jax.value_and_grad(of_trained, has_aux=has_aux)(trained, *batch)
    loss = linen_loss(loss_fn, trained, frozen, layout, has_aux)
    value, aux, grads, _ = accumulated(loss, batch, steps, once=once)
    return ((value, aux) if has_aux else value), grads


def _nnx_loss(loss_fn: Callable, model: nnx.Module, unit: Unit, has_aux: bool, wrt: Any) -> Loss:
    graphdef, params, frozen, state = nnx.split(model, wrt, nnx.Param, ...)

    def run(params: Any, frozen: Any, state: Any, part: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        live = nnx.merge(graphdef, params, frozen, state, copy=True)
        out = loss_fn(live, *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, nnx.split(live, wrt, nnx.Param, ...)[3])

    def placements(state: Any) -> list[Placement | None]:  # in the order of its leaves: both are sorted
        members = [unit.by_path.get(path) for path, _ in nnx.to_flat_state(state)]
        return [None if member is None else member.placement for member in members]

    placed = placements(params), placements(frozen)
    return Loss(run, params, frozen, state, placed, unit, plain_class(model).__name__)


def _check_parameters(params: Any, name: str) -> None:
    """Raises for variables that are differentiated and no parameters: they have no shards."""
    kinds = [(dotted(path), type(v).__name__) for path, v in nnx.to_flat_state(params) if not isinstance(v, nnx.Param)]
    if kinds:
        raise CallError(
            "Gradients are asked for of what is no parameter.",
            where=[f"{name}: {path}  {kind}" for path, kind in kinds],
            why='sync="last" gathers parameters and reduces their gradients; these are whole on every device.',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each"), or derive their class from nnx.Param.',
        )
