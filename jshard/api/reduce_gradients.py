"""`js.reduce_gradients`: one reduction for the gradients of several calls."""

import dataclasses

import flax.linen as nn
import jax
from flax import nnx

from jshard._types import PyTree
from jshard.engine.unreduced import PartialGradients, reduced
from jshard.errors import CallError
from jshard.linen.annotation import annotation_for
from jshard.plans.array_paths import key_texts
from jshard.plans.mesh import AnyMesh, degrees_text
from jshard.plans.placement import Placement
from jshard.plans.plan import record_of
from jshard.plans.units import dotted, plain_class


def reduce_gradients(model: nnx.Module | nn.Module, partial: PartialGradients) -> PyTree:
    """Reduces gradients that several calls of `js.value_and_grad(..., sync="none")` have summed.

    The result is the gradient of the mean over all microbatches of all calls, as from one call with
    `accumulate=n, sync="last"`; of `js.WeightedMean`s it is that of the sum of the totals, divided by the sum of the
    weights. It is FSDP2's `set_requires_gradient_sync`: the calls gather parameters and reduce no gradients, and this
    function has the reductions of one step.

    Between the calls each device holds the gradients of its examples for all parameters that are gathered, in the
    reduce dtype: 4 bytes for each parameter in float32. Donate the sums to the function that adds to them, or they are
    held twice.

    Args:
        model: the annotated model, nnx or Linen.
        partial: the sum of what the calls have returned: `jax.tree.map(jnp.add, a, b)`.

    Returns:
        The gradients, as `js.value_and_grad` returns them: sharded like their parameters, in the `grad_dtype` of the
        calls.

    Raises:
        CallError: the sums are of another model, or of the model on another mesh.

    Examples:
        >>> grad_fn = js.value_and_grad(loss_fn, sync="none")
        >>> loss, total = nnx.jit(grad_fn)(model, x)
        >>> add = nnx.jit(lambda model, total, x: jax.tree.map(jnp.add, total, grad_fn(model, x)[1]), donate_argnums=1)
        >>> for next_x in (2 * x, 3 * x):
        ...     total = add(model, total, next_x)
        >>> grads = nnx.jit(js.reduce_gradients)(model, total)
    """
    if not isinstance(partial, PartialGradients):
        raise CallError(
            "Only gradients that were not reduced can be reduced.",
            where=f"js.reduce_gradients(model, {type(partial).__name__})",
            why='it takes the js.PartialGradients of calls with sync="none"; other gradients are reduced already.',
            do='js.value_and_grad(loss_fn, sync="none")',
        )
    target = _TargetModel.of(model, partial.rest)
    _check_mesh(partial, target)
    _check_parameters(partial, target)
    return reduced(partial)


@dataclasses.dataclass(frozen=True)
class _TargetModel:
    """The model whose gradients are reduced.

    Attributes:
        name: of the model.
        mesh: its mesh.
        paths: of the summed gradients, as text.
        placements: of the model's parameters at these paths; None where it has none.
    """

    name: str
    mesh: AnyMesh
    paths: list[str]
    placements: list[Placement | None]

    @classmethod
    def of(cls, model: nnx.Module | nn.Module, gradients: PyTree) -> "_TargetModel":
        """Returns the parameters of a model that are at the paths of some gradients."""
        paths: list[str] = []
        placements: list[Placement | None] = []
        if isinstance(model, nn.Module):
            layout = annotation_for(model).layout
            for path, _ in jax.tree.leaves_with_path(gradients):
                keys = key_texts(path)
                paths.append("/".join(keys))
                placements.append(layout.places.parameter(keys))
            return cls(layout.root.kind, layout.root.mesh, paths, placements)
        unit = record_of(model)
        # Gradients of another kind of model have no variables, and so no paths here.
        state = gradients if isinstance(gradients, nnx.State) else nnx.State({})
        for path, variable in nnx.to_flat_state(state):
            leaf = unit.by_path.get(path)
            placement = None if leaf is None else leaf.placement
            for _ in jax.tree.leaves(variable):  # a variable may hold a tree of arrays
                paths.append(dotted(path))
                placements.append(placement)
        return cls(plain_class(model).__name__, unit.mesh, paths, placements)


def _check_mesh(partial: PartialGradients, target: _TargetModel) -> None:
    """Raises for sums over the data shards of another mesh."""
    if partial.model.mesh != target.mesh:
        summed_on = degrees_text(dict(partial.model.mesh.shape))
        stored_on = degrees_text(dict(target.mesh.shape))
        raise CallError(
            "The gradients were summed on another mesh.",
            where=target.name,
            why=f"the sums are of js.mesh({summed_on}), or of other devices; the model is on js.mesh({stored_on}).",
            do='js.value_and_grad(loss_fn, sync="none")  # of the model as it is annotated now',
        )


def _check_parameters(partial: PartialGradients, target: _TargetModel) -> None:
    """Raises for sums of parameters that the model does not have, or stores in another way."""
    places = []
    if len(target.paths) != len(partial.model.parameters):
        places.append(target.name)
    else:
        for path, summed, placement in zip(target.paths, partial.placements, target.placements, strict=True):
            if summed is not None and not _is_stored_alike(summed, placement):
                stored = "no such parameter" if placement is None else f"stored as {list(placement.stored_shape)}"
                places.append(f"{target.name}: {path}  {stored}, the sum is of {list(summed.stored_shape)}")
    if places:
        raise CallError(
            "The gradients were summed for another model.",
            where=places,
            why=f"they are of {partial.model.name}, {len(partial.model.parameters)} arrays, where they were computed.",
            do='js.value_and_grad(loss_fn, sync="none")  # of this model',
        )


def _is_stored_alike(summed: Placement, placement: Placement | None) -> bool:
    if placement is None:
        return False
    return summed.stored_shape == placement.stored_shape and summed.spec == placement.spec
