"""Collectives of a program over axes that are not the partitioner's, and over dims, as a `vmap` with a name leaves."""

from collections.abc import Callable

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jshard.engine.rules.building_blocks import run_in_global_view, same
from jshard.engine.rules.registry import IN_ALL, OperandStates, Partitioner, rule
from jshard.engine.rules.values import Value, arrays_of, with_arrays

_OVER_DIMS: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "psum": lax.reduce_sum,
    "pmax": lax.reduce_max,
    "pmin": lax.reduce_min,
}
"""The reduction over dims that is the same as a collective over an axis."""


# In any state: over an axis that is not the partitioner's, each shard exchanges what it has with its like.
@rule("psum", operands=OperandStates.ANY, linear=IN_ALL)
@rule("pmax", "pmin", operands=OperandStates.ANY)
def all_reduce(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Reduces over the dims that `jax.vmap(axis_name=...)` leaves, then over axes. A sum may stay partial."""
    # `jax.vmap(axis_name=...)` puts the position of its dim where the name was.
    dims: list[int] = []
    names: list[str] = []
    for axis in eqn.params["axes"]:
        if isinstance(axis, int):
            dims.append(axis)
        else:
            names.append(axis)
    # The dim may be the one that is split. So it is a reduction like any other, with a sum over the shards if need be.
    if dims:
        operands = _reduce_over_dims(p, eqn, operands, tuple(dims))
    if not names:
        return operands
    if eqn.primitive.name != "psum":
        operands = [p.reduce_partial(v) for v in operands]  # the largest of sums is no sum of the largest
    return with_arrays(operands, p.bind(eqn, arrays_of(operands), axes=tuple(names)))


def _reduce_over_dims(p: Partitioner, eqn: JaxprEqn, operands: list[Value], dims: tuple[int, ...]) -> list[Value]:
    """Reduces over dims of operands in any state, by the rules of the reductions."""
    reduce_array = _OVER_DIMS[eqn.primitive.name]

    def reduce_arrays(*xs: jax.Array) -> list[jax.Array]:
        return [reduce_array(x, dims) for x in xs]

    return run_in_global_view(p, reduce_arrays, operands)


@rule("ppermute", "pbroadcast", "layout_constraint", operands=OperandStates.ANY)
def linear_in_place(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs what is elementwise and linear on operands in any state: all states stay."""
    # Elements are moved between places of another axis, or kept: shards, and parts of a sum, are moved like wholes.
    return with_arrays(operands, p.bind(eqn, arrays_of(operands)))


@rule("all_gather", linear=IN_ALL)
def all_gather(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Gathers along a dim that is not split, or adds a new one."""
    (value,) = operands
    gathered_dim = eqn.params["all_gather_dimension"]
    if not eqn.params["tiled"]:
        # It inserts a dim, and those from there on move back by one.
        dim = value.dim + 1 if gathered_dim <= value.dim else value.dim
        return same(p, eqn, operands, dim)
    if value.dim == gathered_dim:
        return None  # a shard would have its part of each array, one after the other: no part of what is gathered
    return same(p, eqn, operands, value.dim)


@rule("reduce_scatter", linear=IN_ALL)
def reduce_scatter(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Scatters along a dim that is not split; not tiled, it removes that dim."""
    (value,) = operands
    scattered_dim = eqn.params["scatter_dimension"]
    if value.dim == scattered_dim:
        return None  # a device would get a piece of its shard, which is not its shard of the piece
    if not eqn.params["tiled"] and scattered_dim < value.dim:
        return same(p, eqn, operands, value.dim - 1)
    return same(p, eqn, operands, value.dim)


@rule("all_to_all", linear=IN_ALL)
def all_to_all(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Exchanges along dims that are not split. One that moves dims is computed whole."""
    (value,) = operands
    split_axis = eqn.params["split_axis"]
    concat_axis = eqn.params["concat_axis"]
    moves_dims = not eqn.params["tiled"] and split_axis != concat_axis
    if moves_dims or value.dim in (split_axis, concat_axis):
        return None
    return same(p, eqn, operands, value.dim)
