"""All-gathers: whole parameters from their stored shards."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jshard.engine.rules import Shard, Value
from jshard.engine.selections import at_positions
from jshard.engine.stored import (
    Collective,
    beside_automatic_axes,
    fused_over_inner_axes,
    num_layer_dims,
    shard_dim,
    without_padding,
)
from jshard.plans.memories import fetched
from jshard.plans.mesh import FSDP, is_of_tpus
from jshard.plans.placement import Placement
from jshard.plans.wires import TOO_NARROW_TO_GATHER, Wire, wire_named

LATENCY_BOUND_BYTES = 4 * 2**20
"""Smaller gathers take about the time that a collective needs to start."""

# Of blocks below this, one gather is estimated faster than two: GPT-2 124M on 64 H100 (14 MiB a block) 47.0 -> 44.7 ms,
# 350M (24 MiB) 68.1 -> 66.1 ms. For larger ones a wait for a small gather behind a large one costs more.
_WORTH_TWO_GATHERS_BYTES = 32 * 2**20


def gather(value: Value, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns the whole logical parameter of a stored shard, gathered in a dtype; by default in the shard's."""
    # Cast as a shard: the gather sends this dtype, and only the shard exists in both.
    x = fetched(value.x)
    if dtype is not None:
        x = x.astype(dtype)
    placement = value.shard.placement
    dim = shard_dim(x, placement)
    if dim is None:
        return x
    if x.dtype in TOO_NARROW_TO_GATHER:
        return gather(value.with_array(x.astype(jnp.int8))).astype(x.dtype)
    run = _all_gather(value.shard, dim)
    # Pieces are of the gathered copy, which has been over the wire.
    is_packed = placement.gather_wire and not value.shard.pieces and x.dtype == placement.gathered_dtype
    if is_packed:
        run = _over_wire(run, wire_named(placement.gather_wire), dim, num_layer_dims(x, placement))
    return without_padding(beside_automatic_axes(run, x, placement)(x), placement)


def _all_gather(shard: Shard, dim: int) -> Collective:
    """Returns the all-gather of a shard; of pieces, among the neighbours along `fsdp` that share them."""

    def run(x: jax.Array) -> jax.Array:
        if shard.pieces:  # on 8 devices, 4 pieces are gathered among devices 0 to 3, and among 4 to 7
            starts = range(0, lax.axis_size(FSDP), shard.pieces)
            neighbours = [list(range(start, start + shard.pieces)) for start in starts]
            return lax.all_gather(x, FSDP, axis=dim, tiled=True, axis_index_groups=neighbours)
        x = fused_over_inner_axes(x, shard.placement)
        return lax.all_gather(x, shard.placement.gather_axes, axis=dim, tiled=True)

    return run


def _over_wire(send: Collective, wire: Wire, dim: int, num_layer_dims: int) -> Collective:
    """Returns a gather that sends the packed arrays of a shard."""

    def run(x: jax.Array) -> jax.Array:
        packed = wire.packed(x, dim, num_layer_dims=num_layer_dims)
        received = tuple(send(array) for array in packed)
        return wire.unpacked(received, dim, x.dtype, num_layer_dims=num_layer_dims)

    return run


def passes_barriers(placement: Placement) -> bool:
    """Returns whether a parameter need not be held back: it is small, and whole on each device.

    Nothing is sent. And to the compiler, what is behind a barrier is another parameter than that in front: kernels of
    backward would read the scale of a norm twice, and compute apart with each.
    """
    num_bytes = placement.gathered_bytes // placement.layers
    return placement.dim is None and num_bytes < LATENCY_BOUND_BYTES


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def gather_unit(
    arrays: list[jax.Array], shards: tuple[Shard, ...], mesh: Mesh, dtypes: tuple[np.dtype, ...]
) -> list[jax.Array]:
    """Gathers the parameters of a unit, the small ones first; of units stored alike it is one function in a program.

    Collectives share the links, one after another. The compiler assumes that a small one is fast and waits for it
    early; after a large one it is not fast. So the large ones are tied behind the small ones:

        arrays of small ─▶ gathered ─┐
                                     ├─ barrier ─▶ small; arrays of large ─▶ gathered
        arrays of large ─────────────┘
    """
    first = small_beside_large(shards, mesh)
    rest = [i for i in range(len(arrays)) if i not in first]
    gathered = {}
    for i in first:
        gathered[i] = gather(Value(arrays[i], shards[i]), dtypes[i])
    if first:
        small = at_positions(gathered, first)
        large_shards = at_positions(arrays, rest)
        small, large_shards = lax.optimization_barrier((small, large_shards))
        # Both groups continue with what is behind the barrier: XLA would remove an output that is not used.
        gathered = dict(zip(first, small, strict=True))
        for i, x in zip(rest, large_shards, strict=True):
            arrays[i] = x
    for i in rest:
        gathered[i] = gather(Value(arrays[i], shards[i]), dtypes[i])
    return at_positions(gathered, range(len(arrays)))


def small_beside_large(shards: tuple[Shard, ...], mesh: Mesh) -> list[int]:
    """Returns which parameters are gathered before the others: small ones, if there are large ones."""
    # On GPUs, GPT-175B on 512 H100: a gather of biases behind a large collective cost the time of that.
    if is_of_tpus(mesh):
        return []  # it fuses gathers into products; tied, fewer were hidden (16 % instead of 38 % of 175B on v5p)
    if any(shard.pieces for shard in shards):
        return []  # pieces are fast between neighbours, and the compiler joins the small ones
    # Of a stack one layer is gathered at a time.
    sizes = [shard.placement.gathered_bytes // shard.placement.layers for shard in shards]
    if not is_worth_two_gathers(sizes):
        return []
    return [i for i, size in enumerate(sizes) if size < LATENCY_BOUND_BYTES]


def is_worth_two_gathers(sizes: Sequence[int]) -> bool:
    """Returns whether the small parameters of a unit are gathered before the others, given the bytes of each."""
    # The compiler joins small ones in one gather; two would cost the latency of another.
    return max(sizes, default=0) >= LATENCY_BOUND_BYTES and sum(sizes) >= _WORTH_TWO_GATHERS_BYTES
