"""Reductions: over dims that are whole on each shard, and over the split dim, first on each shard and then over all."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jshard.engine.rules.building_blocks import dim_after_removal, remaining_dims, same, split_all, split_dim
from jshard.engine.rules.registry import IN_ALL, Partitioner, inverse_rule, rule
from jshard.engine.rules.values import PARTIAL, Value, array_bytes
from jshard.plans.policies import wide_dtype


@rule("reduce_sum", linear=IN_ALL)
def reduce_sum(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Sums over the dims of a shard. The sum over the split dim is partial."""
    # The open sum is taken by the first reader that needs it, once: after all that is linear, such as a division.
    (value,) = operands
    axes = eqn.params["axes"]
    if value.dim in axes:
        return same(p, eqn, operands, PARTIAL)
    return same(p, eqn, operands, dim_after_removal(axes, value.dim))


@rule("reduce_max", "reduce_min")
def reduce_extreme(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Takes the largest or smallest of a shard. Over the split dim, then that of all shards, by an all-reduce."""
    (value,) = operands
    axes = eqn.params["axes"]
    if value.dim not in axes or jnp.iscomplexobj(value.x):  # complex numbers have no such all-reduce
        return reduce_gathered(p, eqn, operands)
    (on_shard,) = same(p, eqn, operands, PARTIAL)  # no sum, but of its form: each shard has one array of the result's
    is_max = eqn.primitive.name == "reduce_max"
    with p.sends("max", eqn, on_shard.bytes):
        extreme = _extreme_over_shards(p, on_shard.x, is_max=is_max)
    return [Value(extreme)]


@rule("reduce_or", "reduce_and", "reduce_prod", "reduce_xor")
def reduce_gathered(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Reduces over the dims of a shard. Over the split dim, gathers what each shard has, and reduces that."""
    (value,) = operands
    axes = eqn.params["axes"]
    if value.dim not in axes:
        return same(p, eqn, operands, dim_after_removal(axes, value.dim))
    # Gathered, there is one small array of each shard, which the primitive itself reduces.
    (on_shard,) = p.bind(eqn, [value.x])
    gathered_bytes = array_bytes(on_shard) * p.degree
    with p.sends("whole", eqn, gathered_bytes):
        of_all_shards = p.gather(on_shard[None], 0)
    (x,) = p.bind(eqn, [of_all_shards], axes=(0,))
    return [Value(x)]


@inverse_rule("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "argmax", "argmin")
def _reduce_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int]:
    remaining = remaining_dims(operands[0].ndim, removed=eqn.params["axes"])
    return [remaining[dim]]


def _extreme_over_shards(p: Partitioner, x: jax.Array, *, is_max: bool) -> jax.Array:
    """Returns the largest or smallest of the shards' arrays; NaN where one of them has NaN.

    An all-reduce of floats may lose a NaN. So their bits are compared, as integers in the order of the floats, with NaN
    beyond the last. As integers, positive floats are in order already; negative ones are in reverse, so their bits but
    for the sign are inverted.
    """
    all_reduce = lax.pmax if is_max else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return all_reduce(x, p.axes)
    wide = x.astype(wide_dtype(x.dtype))  # integers of 16 bits have no all-reduce on GPUs
    num_bits = wide.dtype.itemsize * 8
    limits = jnp.iinfo(f"int{num_bits}")

    def reorder(bits: jax.Array) -> jax.Array:
        """Changes bits of floats to integers in the same order, and back."""
        return jnp.where(bits < 0, bits ^ limits.max, bits)

    # The limits are integers of no number, but of NaN: the bits of infinity are not the last.
    beyond_last = jnp.asarray(limits.max if is_max else limits.min, limits.dtype)
    is_nan = jnp.isnan(wide)
    ordered_bits = reorder(lax.bitcast_convert_type(wide, limits.dtype))
    extreme_bits = all_reduce(jnp.where(is_nan, beyond_last, ordered_bits), p.axes)
    extreme = lax.bitcast_convert_type(reorder(extreme_bits), wide.dtype)
    return extreme.astype(x.dtype)


@rule("argmax", "argmin")
def arg_reduce(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Finds the best of each shard, then, along the split dim, the first of the best."""
    (value,) = operands
    (axis,) = eqn.params["axes"]
    if value.dim != axis:
        return same(p, eqn, operands, dim_after_removal([axis], value.dim))
    # The best value comes from its index, not from a maximum: NaN, and equal values, are then chosen as by the
    # primitive.
    (local_index,) = p.bind(eqn, [value.x])
    best = _take_at(value.x, local_index, axis)
    start_of_shard = (p.shard * value.shape[axis]).astype(local_index.dtype)
    index = jnp.expand_dims(local_index + start_of_shard, axis)
    # Shards are in the order of their indices, so the first of equal ones has the smallest index, as on one device.
    best_of_shards = _gather_recorded(p, eqn, best, axis)
    index_of_shards = _gather_recorded(p, eqn, index, axis)
    (best_shard,) = p.bind(eqn, [best_of_shards])
    index_of_best = _take_at(index_of_shards, best_shard, axis)
    return [Value(index_of_best.squeeze(axis))]


def _take_at(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Takes the element at an index along an axis, which stays with size 1; the index has no such axis."""
    return jnp.take_along_axis(x, jnp.expand_dims(index, axis), axis)


def _gather_recorded(p: Partitioner, eqn: JaxprEqn, x: jax.Array, dim: int) -> jax.Array:
    """Gathers an array, and records that the equation does."""
    gathered_bytes = array_bytes(x) * p.degree
    with p.sends("whole", eqn, gathered_bytes):
        return p.gather(x, dim)


@rule("reduce")
def reduce_by_function(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Reduces by a function of the user, over whole dims: nothing says how to combine what the shards have."""
    dim = split_dim(operands)
    axes = eqn.params["dimensions"]
    if dim in axes:
        return None  # the operands are gathered, and all devices reduce the whole
    return same(p, eqn, split_all(p, operands, dim), dim_after_removal(axes, dim))


_WINDOW_OF_ONE = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
"""The parameters, along one dim, of windows that have one element each."""


@rule("reduce_window_sum", linear=IN_ALL)  # it pads with zeros
@rule(
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window",
    "select_and_scatter",
    "select_and_scatter_add",
    "select_and_gather_add",
)
def reduce_windows(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Reduces windows of one element along the split dim: larger ones would reach into the next shard."""
    dim = split_dim(operands)
    for name, value_of_one in _WINDOW_OF_ONE.items():
        values = eqn.params.get(name)  # one for each dim; some of the primitives lack some parameters
        if values and values[dim] != value_of_one:
            return None
    return same(p, eqn, split_all(p, operands, dim), dim)
