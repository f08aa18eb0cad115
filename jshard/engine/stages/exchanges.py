"""Moves stacks of layers between the data axes, where each place has a part of every layer, and the stages.

on the data axes     each place has the same part of all layers: a shard of a parameter, the examples of a device
on the stages        each place has all parts, along `pipe`, of its own layers
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine.stored import entries_of
from jshard.plans.mesh import PIPE
from jshard.plans.model_axes import axes_of
from jshard.plans.placement import Placement
from jshard.plans.stages import StageLayout

Exchange = Callable[[jax.Array], jax.Array]

_NUM_STAGE_DIMS = 3
"""Of a stack as it is dealt: (rounds, places, layers of a chunk)."""


def this_place() -> jax.Array:
    """Returns the number of this device's place along `pipe`."""
    return lax.axis_index(PIPE)


def to_stages(x: jax.Array, layout: StageLayout, dim: int | None, placement: Placement | None = None) -> jax.Array:
    """Returns the layers of this place.

    Args:
        x: (layers, ...), of which this place has its part along `dim`.
        layout: which layers are where.
        dim: the dim of a layer that is split over `pipe`; None if each place has all layers whole.
        placement: of a parameter: how its layers are stored.

    Returns:
        (layers of a place, ...), with all of `dim`.
    """
    dealt = _dealt(x, layout)
    if dim is None:
        return _merged(lax.dynamic_index_in_dim(dealt, this_place(), 1, keepdims=False))
    concat_dim = _NUM_STAGE_DIMS + dim

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, PIPE, split_axis=1, concat_axis=concat_dim, tiled=True)

    received = _beside_automatic_axes(exchange, dealt, placement)(dealt)
    return _merged(received.squeeze(1))


def from_stages(x: jax.Array, layout: StageLayout, dim: int | None, placement: Placement | None = None) -> jax.Array:
    """Returns all layers, of which this place gets its part along `dim`: the inverse of `to_stages`."""
    own = x.reshape(layout.num_rounds, 1, layout.layers_per_chunk, *x.shape[1:])

    def exchange(x: jax.Array) -> jax.Array:
        if dim is None:
            return lax.all_gather(x, PIPE, axis=1, tiled=True)
        return lax.all_to_all(x, PIPE, split_axis=_NUM_STAGE_DIMS + dim, concat_axis=1, tiled=True)

    return _collected(_beside_automatic_axes(exchange, own, placement)(own), layout)


def among_zeros(x: jax.Array, layout: StageLayout) -> jax.Array:
    """Returns all layers, of which this place has its own, and zeros: a part of a sum over `pipe`."""
    own = x.reshape(layout.num_rounds, 1, layout.layers_per_chunk, *x.shape[1:])
    shape = (layout.num_rounds, layout.num_places, layout.layers_per_chunk, *x.shape[1:])
    zeros = jnp.zeros(shape, x.dtype)
    return _collected(lax.dynamic_update_slice_in_dim(zeros, own, this_place(), 1), layout)


def _dealt(x: jax.Array, layout: StageLayout) -> jax.Array:
    """Returns layers as (rounds, places, layers of a chunk, ...); numbers without a layer have zeros."""
    num_missing = layout.num_places * layout.layers_per_place - layout.num_layers
    if num_missing:
        x = jnp.concatenate([x, zeros((num_missing, *x.shape[1:]), x.dtype)])
    return x.reshape(layout.num_rounds, layout.num_places, layout.layers_per_chunk, *x.shape[1:])


def _collected(x: jax.Array, layout: StageLayout) -> jax.Array:
    """Returns layers in their order: the inverse of `_dealt`."""
    return _merged(_merged(x))[: layout.num_layers]


def _merged(x: jax.Array) -> jax.Array:
    """Returns an array with its first two dims as one."""
    return x.reshape(-1, *x.shape[2:])


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Returns zeros of a dtype; of that of typed keys, keys that are made of zeros."""
    return lax.full(shape, 0, dtype)


# ---- activations


def gather_examples(x: jax.Array, dim: int) -> jax.Array:
    """Returns the examples of all places along `pipe`, on each of them."""
    return _of_key_data(lambda x: lax.all_gather(x, PIPE, axis=dim, tiled=True), x)


def pass_on(x: jax.Array, num_places: int, step: int) -> jax.Array:
    """Sends an array to the place that is so many places further; receives one from the other direction."""
    order = [(place, (place + step) % num_places) for place in range(num_places)]
    return _of_key_data(lambda x: lax.ppermute(x, PIPE, order), x)


def from_place(x: jax.Array, place: int, dim: int | None) -> jax.Array:
    """Returns what one place has: whole on all places, or of a dim the part of this place."""

    def send(x: jax.Array) -> jax.Array:
        # Not a sum with zeros of the other places: it would lose the sign of -0.0, and has no form for bools.
        if dim is None:
            return lax.all_gather(x, PIPE, axis=0)[place]
        size = x.shape[dim] // lax.axis_size(PIPE)
        received = lax.all_to_all(x, PIPE, split_axis=dim, concat_axis=dim, tiled=True)
        return lax.slice_in_dim(received, place * size, (place + 1) * size, axis=dim)

    return _of_key_data(send, x)


def _of_key_data(run: Exchange, x: jax.Array) -> jax.Array:
    """Runs a collective; of typed keys on the numbers that they are made of."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return run(x)
    return jax.random.wrap_key_data(run(jax.random.key_data(x)), impl=jax.random.key_impl(x))


# ---- beside the other axes of a parameter


def _beside_automatic_axes(exchange: Exchange, x: jax.Array, placement: Placement | None) -> Exchange:
    """Returns an exchange that runs per shard of the axes over which the compiler splits a parameter.

    See `jshard.engine.stored.beside_automatic_axes`; these arrays have the dims of stages in front.
    """
    if placement is None:
        return exchange
    manual = _compat.manual_axes()
    entries = []
    for entry in entries_of(placement, x.ndim - _NUM_STAGE_DIMS):
        entries.append(tuple(axis for axis in axes_of(entry) if axis not in manual) or None)
    names = {axis for entry in entries for axis in axes_of(entry)}
    if not names:
        return exchange
    spec = PartitionSpec(*[None] * _NUM_STAGE_DIMS, *entries)
    return jax.shard_map(exchange, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)
