"""`js.value_and_grad`: the gradients of a loss, over microbatches, for an nnx or Linen model."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.typing import DTypeLike

from jshard._types import PyTree
from jshard.engine.accumulate import Loss, accumulated, gradient_dtype
from jshard.engine.border import opened
from jshard.engine.context import parameters_fixed
from jshard.engine.unreduced import PartialGradients, unreduced
from jshard.engine.weighted import mean_of
from jshard.errors import AnnotationError, CallError
from jshard.linen.annotation import annotation_for
from jshard.linen.train_state import linen_loss
from jshard.linen.trained import Trained, joined
from jshard.plans.call_checks import check_has_arrays
from jshard.plans.memories import back, to_device
from jshard.plans.padding import Padding, is_as_placed, padding_of
from jshard.plans.placement import Placement
from jshard.plans.plan import as_stored, record_of
from jshard.plans.policies import is_real_float
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
    grad_dtype: DTypeLike | None = None,
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
            `"none"`: as `"last"`, but the gradients are not reduced: they are `js.PartialGradients`, which are added
            over calls and reduced by `js.reduce_gradients`. From the first call to the reduction each device holds the
            full gradients in the reduce dtype, and its shard of them in the dtype of the sum.
        has_aux: `loss_fn` returns `(loss, aux)`; aux is returned stacked over the microbatches.
        wrt: the parameters to differentiate with respect to, as for `nnx.Optimizer`: an nnx filter. The others are
            frozen: they are only gathered. For a Linen model: a path pattern such as `"*/lora_*"`, a function of
            (path, parameter) with the path as a tuple, or a list of these.
        grad_dtype: of the gradients, such as `"float32"` for parameters in bfloat16; None for the dtype that each
            parameter is stored in. With `sync="last"` and `"none"` the reduced sum, in the reduce dtype, is returned
            without being rounded to the stored dtype. With `sync="each"` the reduced gradient of each microbatch is
            rounded to the stored dtype once, and their sum is not. In all of them a data shard's gradient of one
            microbatch has the dtype that the unit computes in. Parameters that are no real floats keep their dtype.

    Returns:
        A function of `(model, *batch)`, or `(params, *batch)`, that returns `(loss, gradients)`, or
        `((loss, aux), gradients)`. The gradients of a Linen model have the structure of `params`, with an
        `optax.MaskedNode` for each frozen array, for which `optax.apply_updates` leaves the parameter unchanged.

    Raises:
        AnnotationError: the model is not annotated, or `wrt` selects none of a Linen model's parameters.
        CallError: the batch does not divide into microbatches that divide over the data shards; or the model is never
            called with the parameters that were gathered for it.

    Examples:
        >>> grad_fn = js.value_and_grad(loss_fn, accumulate=4, sync="last")
        >>> loss, grads = nnx.jit(lambda model, x: grad_fn(model, x))(model, x)
    """
    is_valid = isinstance(accumulate, int) and accumulate >= 1 and sync in ("each", "last", "none")
    if not is_valid:
        raise AnnotationError(
            "The accumulation settings are not valid.",
            where=f"value_and_grad(accumulate={accumulate!r}, sync={sync!r})",
            why='accumulate must be a number of microbatches, and sync "each", "last" or "none".',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="last")',
        )
    dtype = None if grad_dtype is None else _checked_dtype_of_gradients(grad_dtype)
    settings = _Settings(num_microbatches=accumulate, sync=sync, has_aux=has_aux, wrt=wrt, dtype=dtype)
    gradients = _nnx_gradients if model is None else functools.partial(_linen_gradients, model)

    @functools.wraps(loss_fn)
    def run(trained: PyTree, *batch: PyTree) -> PyTree:
        if settings.is_plain:
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
        num_microbatches: 1: the batch as a whole.
        sync: when gradients are reduced: in `"each"` microbatch, after the `"last"`, or `"none"`: by the user.
        has_aux: whether the loss function returns `(loss, aux)`.
        wrt: which parameters are differentiated, as the user selects them.
        dtype: of the gradients; None for those of the parameters.
    """

    num_microbatches: int
    sync: str
    has_aux: bool
    wrt: Filter
    dtype: str | None

    @property
    def gathers_once(self) -> bool:
        """Whether parameters are gathered once for all microbatches."""
        return self.sync != "each"

    @property
    def is_plain(self) -> bool:
        """Whether it is plain differentiation, with the batch as the one microbatch."""
        if self.num_microbatches > 1 or self.sync == "none":
            return False
        # Plain differentiation rounds to the stored dtype: only the gradient of a gathered copy is reduced unrounded.
        return self.dtype is None or self.sync == "each"


def _nnx_gradients(loss_fn: LossFunction, model: nnx.Module, batch: tuple[PyTree, ...], settings: _Settings) -> PyTree:
    """Returns the loss, with aux if it has one, and the gradients; changes the model's state."""
    unit = record_of(model)
    # Here, as differentiation would fail first, with an error of JAX about the type of an argument.
    check_has_arrays(f"{plain_class(model).__name__}.__call__", jax.tree.leaves(nnx.state(model)))
    has_aux = settings.has_aux
    if settings.is_plain:
        differentiated = nnx.DiffState(0, settings.wrt)
        grad_fn = nnx.value_and_grad(_mean(loss_fn, has_aux), argnums=differentiated, has_aux=has_aux)
        value, grads = grad_fn(model, *batch)
        return value, _cast(grads, settings.dtype)
    loss = _nnx_loss(loss_fn, model, unit, settings)
    if settings.gathers_once:
        _check_are_parameters(loss.params, loss.name, settings.sync)
    value, aux, grads, state = _over_microbatches(loss, batch, settings)
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
    if settings.is_plain:

        def loss_of_trained(trained: PyTree, *batch: PyTree) -> PyTree:
            return _mean(loss_fn, has_aux)(joined(trained, frozen), *batch)

        value, grads = jax.value_and_grad(loss_of_trained, has_aux=has_aux)(trained, *batch)
        return value, _cast(grads, settings.dtype)
    loss = linen_loss(loss_fn, trained, frozen, layout, has_aux)
    value, aux, grads, _ = _over_microbatches(loss, batch, settings)
    return ((value, aux) if has_aux else value), grads


def _over_microbatches(
    loss: Loss, batch: tuple[PyTree, ...], settings: _Settings
) -> tuple[jax.Array, PyTree, PyTree | PartialGradients, PyTree]:
    """Returns the loss, aux, the gradients and the state of the model."""
    steps = settings.num_microbatches
    if settings.sync == "none":
        return unreduced(loss, batch, steps, dtype=settings.dtype)
    return accumulated(loss, batch, steps, once=settings.gathers_once, dtype=settings.dtype)


def _cast(grads: PyTree, dtype: str | None) -> PyTree:
    """Returns gradients in the dtype that was requested, each in its memory."""
    if dtype is None:
        return grads
    cast = jax.tree.map(lambda g: g.astype(gradient_dtype(g.dtype, dtype)), to_device(grads))
    return back(cast, grads)


def _checked_dtype_of_gradients(dtype: DTypeLike) -> str:
    """Returns the name of a dtype for gradients, or raises."""
    try:
        name = str(np.dtype(dtype))
    except TypeError:
        name = ""
    if name and is_real_float(name):
        return name
    raise AnnotationError(
        "Gradients cannot have this dtype.",
        where=f"value_and_grad(grad_dtype={dtype!r})",
        why="grad_dtype must be a real float of 16 bits or more.",
        do='js.value_and_grad(loss_fn, grad_dtype="float32")',
    )


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


def _check_are_parameters(params: PyTree, name: str, sync: str) -> None:
    """Raises for differentiated variables that are not parameters: they have no shards."""
    others = {path: v for path, v in nnx.to_flat_state(params) if not isinstance(v, nnx.Param)}
    if others:
        raise CallError(
            "Gradients were requested for a variable that is not a parameter.",
            where=[f"{name}: {dotted(path)}  {type(variable).__name__}" for path, variable in others.items()],
            why=f'sync="{sync}" gathers parameters and reduces their gradients; this one is whole on every device.',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each")  # or derive their class from nnx.Param',
        )
