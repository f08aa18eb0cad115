"""The loss of an annotated model as a function of its parameters, for traces of which nothing is compiled or run."""

from collections.abc import Callable

from flax import nnx

from jshard._types import PyTree
from jshard.plans.placement import Selection

LossOfParameters = Callable[[PyTree, PyTree, tuple[PyTree, ...]], PyTree]
"""Of the trained parameters, the rest of the state, and what a batch passes to the loss."""


def loss_of_parameters(
    model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, wrt: Selection
) -> tuple[LossOfParameters, tuple[PyTree, PyTree, tuple[PyTree, ...]]]:
    """Returns the loss of a model as a function of its parameters, and the arguments of that function.

    Args:
        model: annotated; it may be abstract.
        loss: function of the model and the batch.
        batch: the global batch; a tuple is passed as several arguments.
        wrt: the parameters that are trained.
    """
    graphdef, params, rest = nnx.split(model, wrt, ...)

    # A new function each time: one that it knows, JAX does not trace again, even for another device.
    def of_parameters(params: PyTree, rest: PyTree, of_batch: tuple[PyTree, ...]) -> PyTree:
        # Copied: state that the model changes as it runs, such as dropout's counts, belongs to the inner trace.
        return loss(nnx.merge(graphdef, params, rest, copy=True), *of_batch)

    of_batch = batch if isinstance(batch, tuple) else (batch,)
    return of_parameters, (params, rest, of_batch)
