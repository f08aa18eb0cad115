"""`js.value_and_grad`: the gradients of a loss, over microbatches, for an nnx or Linen model."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
from flax import nnx
from flax.nnx.filterlib import Filter

from jshard._types import PyTree
from jshard.engine.accumulate import Loss, accumulated
from jshard.engine.border import opened
from jshard.engine.context import parameters_fixed
from jshard.engine.weighted import mean_of
from jshard.errors import AnnotationError, CallError
from jshard.linen.annotation import annotation_for
from jshard.linen.train_state import linen_loss
from jshard.linen.trained import Trained, joined
from jshard.plans.call_checks import check_has_arrays
from jshard.plans.padding import Padding, is_as_placed, padding_of
from jshard.plans.placement import Placement
from jshard.plans.plan import as_stored, record_of
from jshard.plans.units import Path, Unit, dotted, plain_class, units_in

LossFunction = Callable[..., PyTree]
"""Of a model, or the parameters of one, and of the arrays of a batch."""


def value_and_grad(
    loss_fn: LossFunction,
    *,
    model: nn.Module | None = None,
    accumulate: int = 1,
    sync: str = "each",
    has_aux: bool = False,
    wrt: Filter = nnx.Param,
) -> Callable[..., PyTree]:
    """Computes `nnx.value_and_grad` over microbatches; `jax.value_and_grad` for a Linen model.

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
    is_valid = isinstance(accumulate, int) and accumulate >= 1 and sync in ("each", "last")
    if not is_valid:
        raise AnnotationError(
            "The accumulation settings are not valid.",
            where=f"value_and_grad(accumulate={accumulate!r}, sync={sync!r})",
            why='accumulate must be a number of microbatches, and sync "each" or "last".',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="last")',
        )
    settings = _Settings(num_microbatches=accumulate, reduces_once=sync == "last", has_aux=has_aux, wrt=wrt)
    gradients = _nnx_gradients if model is None else functools.partial(_linen_gradients, model)

    @functools.wraps(loss_fn)
    def run(trained: PyTree, *batch: PyTree) -> PyTree:
        # Plain differentiation: the one microbatch is the whole batch, and `sync` has no effect.
        if accumulate == 1:
            return gradients(loss_fn, trained, batch, settings)
        arrays, with_arrays = opened(batch)  # a dataclass of arrays is cut like a dict of them

        def loss_of_arrays(trained: PyTree, *arrays: PyTree) -> PyTree:
            return loss_fn(trained, *with_arrays(arrays))

        return gradients(loss_of_arrays, trained, tuple(arrays), settings)

    return run


@dataclasses.dataclass(frozen=True)
class _Settings:
    """How gradients are computed.

    Attributes:
        num_microbatches: 1: the batch as a whole, by plain differentiation.
        reduces_once: whether parameters are gathered, and gradients reduced, once for all microbatches.
        has_aux: whether the loss function returns `(loss, aux)`.
        wrt: which parameters are differentiated, as the user selects them.
    """

    num_microbatches: int
    reduces_once: bool
    has_aux: bool
    wrt: Filter


def _nnx_gradients(loss_fn: LossFunction, model: nnx.Module, batch: tuple[PyTree, ...], settings: _Settings) -> PyTree:
    """Returns the loss, with aux if it has one, and the gradients; changes the model's state."""
    unit = record_of(model)
    # Here, as differentiation would fail first, with an error of JAX about the type of an argument.
    check_has_arrays(f"{plain_class(model).__name__}.__call__", jax.tree.leaves(nnx.state(model)))
    has_aux = settings.has_aux
    if settings.num_microbatches == 1:
        differentiated = nnx.DiffState(0, settings.wrt)
        grad_fn = nnx.value_and_grad(_mean(loss_fn, has_aux), argnums=differentiated, has_aux=has_aux)
        return grad_fn(model, *batch)
    loss = _nnx_loss(loss_fn, model, unit, settings)
    if settings.reduces_once:
        _check_are_parameters(loss.params, loss.name)
    value, aux, grads, state = accumulated(loss, batch, settings.num_microbatches, once=settings.reduces_once)
    # What the last microbatch has left, such as statistics and counts of keys.
    nnx.update(model, state)
    return ((value, aux) if has_aux else value), grads


def _linen_gradients(
    model: nn.Module, loss_fn: LossFunction, params: PyTree, batch: tuple[PyTree, ...], settings: _Settings
) -> PyTree:
    """Returns the loss, with aux if it has one, and the gradients."""
    layout = annotation_for(model).layout
    trained, frozen = Trained(layout, settings.wrt).split(params)
    has_aux = settings.has_aux
    if settings.num_microbatches == 1:

        def loss_of_trained(trained: PyTree, *batch: PyTree) -> PyTree:
            return _mean(loss_fn, has_aux)(joined(trained, frozen), *batch)

        return jax.value_and_grad(loss_of_trained, has_aux=has_aux)(trained, *batch)
    loss = linen_loss(loss_fn, trained, frozen, layout, has_aux)
    value, aux, grads, _ = accumulated(loss, batch, settings.num_microbatches, once=settings.reduces_once)
    return ((value, aux) if has_aux else value), grads


def _mean(loss_fn: LossFunction, has_aux: bool) -> LossFunction:
    """Returns the loss function, with the mean in place of a `WeightedMean`."""

    @functools.wraps(loss_fn)
    def run(*args: PyTree) -> PyTree:
        result = loss_fn(*args)
        if has_aux:
            return mean_of(result[0]), result[1]
        return mean_of(result)

    return run


def _nnx_loss(loss_fn: LossFunction, model: nnx.Module, unit: Unit, settings: _Settings) -> Loss:
    """Returns the loss as a function of the trained parameters, the frozen ones, and the other state of the model."""
    wrt = settings.wrt
    # In this order: a filter takes what those before it have left, so the frozen ones are the other parameters.
    graphdef, params, frozen, state = nnx.split(model, wrt, nnx.Param, ...)

    def run(params: PyTree, frozen: PyTree, state: PyTree, microbatch: PyTree) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        # A copy: the loss may write to its variables, and is traced more than once.
        live_model = nnx.merge(graphdef, params, frozen, state, copy=True)
        # All microbatches start from the same parameters: a loss that writes one is refused.
        with parameters_fixed():
            result = loss_fn(live_model, *microbatch)
        loss, aux = result if settings.has_aux else (result, None)
        # Only the other state passes to the next microbatch.
        _, _, _, next_state = nnx.split(live_model, wrt, nnx.Param, ...)
        return loss, (aux, next_state)

    def placements(state: PyTree) -> list[Placement | None]:  # in the order of its leaves: both are sorted
        result = []
        for path, variable in nnx.to_flat_state(state):
            placement = _current_placement(model, unit, path, variable)
            result += [placement for _ in jax.tree.leaves(variable)]  # a variable may hold a tree of arrays
        return result

    return Loss(run, params, frozen, state, (placements(params), placements(frozen)), unit, plain_class(model).__name__)


def _current_placement(model: nnx.Module, unit: Unit, path: Path, variable: nnx.Variable) -> Placement | None:
    """Returns the placement of a variable in its current dtype; None if it is not stored as its plan says."""
    leaf = unit.by_path.get(path)
    if leaf is None or padding_of(variable) != Padding.of(leaf.placement):
        return None
    if not is_as_placed(variable, leaf.placement):
        return None
    # The model may have been cast since its annotation.
    return as_stored(leaf, variable.get_raw_value().dtype, lambda: units_in(model)).placement


def _check_are_parameters(params: PyTree, name: str) -> None:
    """Raises for differentiated variables that are not parameters: they have no shards."""
    others = {path: v for path, v in nnx.to_flat_state(params) if not isinstance(v, nnx.Param)}
    if others:
        raise CallError(
            "Gradients were requested for a variable that is not a parameter.",
            where=[f"{name}: {dotted(path)}  {type(variable).__name__}" for path, variable in others.items()],
            why='sync="last" gathers parameters and reduces their gradients; this one is whole on every device.',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each")  # or derive their class from nnx.Param',
        )
