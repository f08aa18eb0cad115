"""Gradients that are summed over several calls and reduced once: each data shard's own sums, between the calls."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.accumulate import GatheredOnce, Loss, Sums, gradient_dtype, summed, with_reduced_copies
from jshard.engine.weighted import nonzero
from jshard.errors import CallError
from jshard.plans.memories import to_host
from jshard.plans.mesh import AnyMesh, degrees_text, is_concrete, region_axes
from jshard.plans.placement import Placement
from jshard.plans.policies import wide_dtype


@dataclasses.dataclass(frozen=True)
class SummedParameter:
    """One parameter whose gradient is summed.

    Attributes:
        placement: how it is stored; None for a variable that is no parameter of the plan.
        dtype: of its gradient, once it is reduced.
        on_host: whether that is in host memory.
    """

    placement: Placement | None
    dtype: str
    on_host: bool


@dataclasses.dataclass(frozen=True, repr=False)
class SummedModel:
    """The model whose gradients are summed: sums of two models, or on two meshes, have no sum.

    Attributes:
        name: of the model, for messages.
        mesh: its mesh.
        parameters: what is summed.
        is_weighted: whether the loss is a `js.WeightedMean`.
    """

    name: str
    mesh: AnyMesh
    parameters: tuple[SummedParameter, ...]
    is_weighted: bool

    def __repr__(self) -> str:
        """Returns what JAX's error says of sums that cannot be added: not the placement of each parameter."""
        loss = "a weighted mean" if self.is_weighted else "a mean"
        degrees = degrees_text(dict(self.mesh.shape))
        return f"<{loss} of {self.name}, {len(self.parameters)} arrays, on js.mesh({degrees})>"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialGradients:
    """Gradients of one or several calls, summed on each data shard and not reduced over them.

    `js.value_and_grad(loss_fn, sync="none")` returns them, and `js.reduce_gradients` reduces them. Those of two calls
    are added by `jax.tree.map(jnp.add, a, b)`; they pass through `jax.jit`, and may be donated.

    Attributes:
        shards: for each parameter that is gathered, an array with one row per data shard: all of the gradient of the
            shard's own examples, in the reduce dtype. A device holds one row.
        rest: the gradients of parameters that are never gathered, and what a loss adds to the gradients of others
            outside of the model, such as a penalty. They are sharded like their parameters.
        weight: how many microbatches are summed; for a `js.WeightedMean` the sum of their weights.
        model: what is summed, in the order of the leaves of `rest`.
    """

    shards: list[jax.Array]
    rest: PyTree
    weight: jax.Array
    model: SummedModel = dataclasses.field(metadata={"static": True})

    def divided(self, divisor: jax.Array) -> "PartialGradients":
        """Returns the sums divided, as of a loss that was multiplied; they are reduced to floats of at least 32 bits.

        The weight stays: divided as well, it would cancel the division.
        """

        def quotient(x: jax.Array) -> jax.Array:
            return x.astype(wide_dtype(x.dtype)) / divisor

        shards, rest = jax.tree.map(quotient, (self.shards, self.rest))
        parameters = []
        for parameter in self.model.parameters:
            wide = str(np.dtype(wide_dtype(parameter.dtype)))
            parameters.append(dataclasses.replace(parameter, dtype=wide))
        model = dataclasses.replace(self.model, parameters=tuple(parameters))
        return dataclasses.replace(self, shards=shards, rest=rest, model=model)

    @property
    def placements(self) -> list[Placement | None]:
        """How the parameters are stored, in the order of the leaves of `rest`."""
        return [parameter.placement for parameter in self.model.parameters]


def unreduced(
    loss: Loss, batch: PyTree, steps: int, *, dtype: DTypeLike | None
) -> tuple[jax.Array, PyTree, PartialGradients, PyTree]:
    """Computes a loss and sums of its gradients over microbatches, which are left to be reduced.

    Args:
        loss: the loss.
        batch: the batch of this call.
        steps: the number of microbatches.
        dtype: of the gradients once they are reduced; None for those of the parameters.

    Returns:
        The loss of this call, aux of every microbatch, the sums, and the state after the last microbatch.
    """
    mesh = loss.root.mesh
    placements, _ = loss.placements
    once = GatheredOnce(placements, mesh)
    sums = summed(loss, batch, steps, once, once=True)
    parameters = []
    for x, placement in zip(jax.tree.leaves(loss.params), placements, strict=True):
        reduced_dtype = str(np.dtype(gradient_dtype(x.dtype, dtype)))
        parameters.append(SummedParameter(placement, reduced_dtype, _compat.on_host(x)))

    if sums.weight is None:
        mean = sums.value / steps
        weight = jnp.asarray(steps, jnp.int32)
    else:
        _check_totals_fit(sums, loss.name)
        mean = sums.value / nonzero(sums.weight)
        weight = sums.weight
        sums = _with_totals(sums, weight)
    partial = PartialGradients(
        shards=[_by_data_shard(x, mesh) for x in sums.copies],
        rest=_stored(sums.gradients, placements, mesh),
        weight=weight,
        model=SummedModel(loss.name, mesh, tuple(parameters), is_weighted=sums.weight is not None),
    )
    return mean, sums.aux, partial, sums.state


def reduced(partial: PartialGradients) -> PyTree:
    """Reduces sums over the data shards: the gradients of the mean over all calls, stored like their parameters."""
    once = GatheredOnce(partial.placements, partial.model.mesh)
    gradients = with_reduced_copies(partial.rest, once, once.reduce(partial.rest, partial.shards))
    divisor = nonzero(partial.weight)
    leaves, tree = jax.tree.flatten(gradients)
    means = []
    for x, parameter in zip(leaves, partial.model.parameters, strict=True):
        mean = (x / divisor.astype(wide_dtype(x.dtype))).astype(parameter.dtype)
        means.append(to_host(mean) if parameter.on_host else mean)
    return jax.tree.unflatten(tree, means)


def _with_totals(sums: Sums, weight: jax.Array) -> Sums:
    """Returns sums with the gradients of the totals in place of those of their mean."""

    # A mean cannot be added to that of another call, which has another weight.
    def total(mean: jax.Array) -> jax.Array:
        return (mean.astype(wide_dtype(mean.dtype)) * nonzero(weight)).astype(mean.dtype)

    gradients, copies = jax.tree.map(total, (sums.gradients, sums.copies))
    return dataclasses.replace(sums, gradients=gradients, copies=copies)


def _check_totals_fit(sums: Sums, name: str) -> None:
    """Raises for sums in float16, whose range the gradients of totals exceed."""
    narrow = [x for x in jax.tree.leaves((sums.gradients, sums.copies)) if x.dtype == jnp.float16]
    if narrow:
        raise CallError(
            "Gradients of a weighted mean cannot be summed over calls in float16.",
            where=name,
            why=f"{len(narrow)} of its sums are float16, up to {jnp.finfo(jnp.float16).max:,.0f}; a gradient times its"
            " weight, such as a number of tokens, may be larger.",
            do='js.fully_shard(model, mesh=mesh, mixed_precision=js.MixedPrecision(reduce_dtype="float32"))',
        )


def _by_data_shard(x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """Returns an array of rows with each on its own data shard."""
    # Stated, because a result of a program may be stored anywhere: all rows on a device would be many times as much.
    others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return _constrained(x, PartitionSpec(region_axes(mesh), *others), mesh)


def _stored(gradients: PyTree, placements: Sequence[Placement | None], mesh: AnyMesh) -> PyTree:
    """Returns gradients sharded like their parameters."""
    # Most are zeros, of which the compiler might else give each device the whole array.
    leaves, tree = jax.tree.flatten(gradients)
    stored = []
    for x, placement in zip(leaves, placements, strict=True):
        stored.append(x if placement is None else _constrained(x, placement.partition_spec, mesh))
    return jax.tree.unflatten(tree, stored)


def _constrained(x: jax.Array, spec: PartitionSpec, mesh: AnyMesh) -> jax.Array:
    if not is_concrete(mesh):
        return x
    assert isinstance(mesh, Mesh)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
