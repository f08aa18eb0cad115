"""The `expert` axis: a program on one data shard, run once more on its part of the experts.

The program of a data shard, with its collectives, is traced for all experts and all of their batch. Then it is
interpreted again over `expert` alone, by the same table: the batch and the experts' parameters are split, what both
meet in moves by an all-to-all, and gradients of everything else are partial until they are stored shards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jshard._mesh import EXPERT
from jshard._placement import Placement, axes_of
from jshard.engine.partitioner import Partitioner
from jshard.engine.values import Moved, Value


def expert_dim(placement: Placement) -> int | None:
    """The dim of a parameter that its experts lie along, counted from the end; None if it is not one of experts."""
    found = (i for i, entry in enumerate(placement.spec) if EXPERT in axes_of(entry))
    return next((i - len(placement.spec) for i in found), None)


def with_experts(spec: PartitionSpec, dim: int | None) -> PartitionSpec:
    """A spec over the batch's axes with `expert` innermost along a dim."""
    if dim is None:
        return spec
    entries = [*spec, *[None] * (dim + 1 - len(spec))]
    entries[dim] = (*axes_of(entries[dim]), EXPERT)
    return PartitionSpec(*entries)


def over_experts(
    program: Callable[..., list[Any]],
    arrays: Sequence[Any],
    dims: Sequence[int | None],
    wanted: Sequence[int | None],
    degree: int,
    batch: int,
) -> tuple[list[Any], list[int | None], list[Moved]]:
    """Runs a data shard's program on the part of one place along `expert`.

    Args:
        program: the function of the data shard's arrays, each whole along `expert`.
        arrays: this place's parts of them.
        dims: the dim that each is split along over `expert`; None: it is whole.
        wanted: likewise of its first results, the others leave as they come.
        degree: of the axis.
        batch: the size of a data shard's batch.

    Returns:
        The parts of the results, the dims that they are split along, and the collectives over `expert`.
    """
    whole = [_whole(x, dim, degree) for x, dim in zip(arrays, dims, strict=True)]
    closed = jax.make_jaxpr(program)(*whole)
    p = Partitioner((EXPERT,), degree, batch_sizes=[batch] if batch else [])
    values = [Value(x, dim) for x, dim in zip(arrays, dims, strict=True)]
    outs = p.run(closed.jaxpr, closed.consts, values, gradients=range(len(wanted)))
    ended = [_reduced(p, v, dim) for v, dim in zip(outs, wanted, strict=False)]
    ended += [p.land(p.settle(v)) for v in outs[len(wanted) :]]
    return [v.x for v in ended], [v.dim if v.is_split else None for v in ended], p.moved


def _reduced(p: Partitioner, value: Value, dim: int | None) -> Value:
    """A gradient as it is stored. Its sum is planned, and no mixing of the model's own."""
    if not value.is_partial:
        return p.in_state(value, dim)
    return Value(p.sum(value.x)) if dim is None else Value(p.reduce_scatter(value.x, dim), dim)


def _whole(x: Any, dim: int | None, degree: int) -> jax.ShapeDtypeStruct:
    shape = [n * degree if i == dim else n for i, n in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)
