"""Sums of gradients over the data shards: reduce-scatters to stored shards, and all-reduces over the other axes.

A gradient is summed in up to two steps: over the axes that its parameter is stored over, which leaves each device its
shard of the sum; then over what is left, such as `replica`. The second step may be left pending: see `PendingSum`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jshard.engine.inner import over_axis_p
from jshard.engine.selections import at_positions
from jshard.engine.stored import (
    automatic_axes,
    beside_automatic_axes,
    fused_over_inner_axes,
    num_layer_dims,
    shard_dim,
    with_padding,
)
from jshard.plans.mesh import FSDP, INNER_AXES, batch_axes, degree, inner_axes, is_of_tpus
from jshard.plans.placement import Exchange, Placement
from jshard.plans.wires import wire_named

JOINED_BYTES = 64 * 2**10
"""Joining smaller gradients is faster than sending them one after another."""


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """A gradient of which each device has a part: what is summed, and what is left to sum.

    A gradient is summed over each batch axis once, whatever its placement says. Summed twice, it would be multiplied
    by the degree of the axis; not at all, each device would continue with the gradient of its own examples. So every
    collective passes through `after`, and the last step sums over the axes that are left.

    Attributes:
        array: this device's part, or the shard of one.
        axes: the batch axes over which it is yet to be summed, without those of degree 1.
    """

    array: jax.Array
    axes: tuple[str, ...]

    @classmethod
    def of(cls, gradient: jax.Array, mesh: Mesh) -> "PartialSum":
        """Returns the part of a data shard: partial over all batch axes."""
        axes = tuple(axis for axis in batch_axes(mesh) if degree(mesh, axis) > 1)
        return cls(gradient, axes)

    def after(self, array: jax.Array, axes: Sequence[str]) -> "PartialSum":
        """Returns the result of a collective that summed it over these axes."""
        twice = [axis for axis in axes if axis not in self.axes]
        assert not twice, f"a gradient is summed twice over {twice}"
        axes_left = tuple(axis for axis in self.axes if axis not in axes)
        return PartialSum(array, axes_left)

    def finished(self, mesh: Mesh) -> jax.Array:
        """Returns the sum over the axes that are left, and over inner axes where one is open."""
        x = self.array
        if self.axes:
            x = lax.psum(x, self.axes)
        # Only the interpretation over an inner axis knows whether this is a part over it: it is left an instruction.
        for axis in inner_axes(mesh):
            x = over_axis_p.bind(x, axis=axis, dim=None, tensor_dim=None)
        return x


@dataclasses.dataclass(frozen=True)
class PendingSum:
    """The second step of a gradient that has only taken its first: the axes that are left, and the dtype of the result.

    Between the steps the array is the sum over `fsdp` alone, in the reduce dtype. So nothing may read it before the
    second step: see `ProgramSchedule.pending_replica_sums`.
    """

    axes: tuple[str, ...]
    dtype: DTypeLike

    def finished(self, array: jax.Array, mesh: Mesh) -> jax.Array:
        """Returns the sum, from the result of the first step."""
        return PartialSum(array, self.axes).finished(mesh).astype(self.dtype)


def reduce_gradient(x: jax.Array, placement: Placement, mesh: Mesh, part_dtype: DTypeLike) -> jax.Array:
    """Sums each data shard's part of a gradient: the stored shard of the sum, in the part's dtype.

    It is reduced in the parameter's reduce dtype, over the axes that it is stored over, then over the others.

    Args:
        x: the part.
        placement: of the parameter.
        mesh: the mesh.
        part_dtype: the narrowest dtype that has all elements of the part: see `Value.narrowest_dtype`.
    """
    placement = placement.sending_parts_of(part_dtype)
    return _first_step(x, placement, mesh).finished(mesh).astype(x.dtype)


def pending_sum(x: jax.Array, placement: Placement, mesh: Mesh) -> PendingSum | None:
    """Returns the second step of a gradient; None if the first is the whole sum, or if there is no first one."""
    if shard_dim(x, placement) is None:
        return None
    axes = PartialSum.of(x, mesh).after(x, _scattered_axes(placement, mesh)).axes
    return PendingSum(axes, x.dtype) if axes else None


def _first_step(x: jax.Array, placement: Placement, mesh: Mesh) -> PartialSum:
    """Returns a gradient after the sum over its shards; one without shards is left to the second step."""
    part = PartialSum.of(x, mesh)
    if x.size == 0:
        return part.after(x, part.axes)  # an empty gradient is its own sum
    if shard_dim(x, placement) is None:
        # Nothing is summed yet. The second step sums it, in this dtype.
        return part.after(_in_dtype_of_sum(x, placement.reduce_dtype, mesh), [])
    return part.after(reduce_scatter(x, placement, mesh), _scattered_axes(placement, mesh))


def _scattered_axes(placement: Placement, mesh: Mesh) -> tuple[str, ...]:
    """Returns the batch axes that the sum over the shards covers; inner axes are no batch axes."""
    return tuple(axis for axis in placement.gather_axes if degree(mesh, axis) > 1)


def _in_dtype_of_sum(x: jax.Array, dtype: DTypeLike, mesh: Mesh) -> jax.Array:
    """Returns a part of a gradient in the dtype in which it is summed; on TPUs the sum is kept apart from the cast."""
    # Cast first, or the sum would be taken in the dtype of the computation, in which many parts lose digits.
    x = x.astype(dtype)
    if not is_of_tpus(mesh):
        return x
    # libtpu would fold the cast into an all-reduce, which then runs on the TensorCores only, where nothing hides it.
    return lax.optimization_barrier(x)


def cast_for_barrier(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """Returns a part of a gradient in the dtype in which a barrier holds it: that of the computation, often a smaller.

    On TPUs it is that of the sum: the product casts its result, where behind the barrier a kernel of its own would.
    """
    is_widened = jnp.dtype(placement.reduce_dtype).itemsize > x.dtype.itemsize
    if is_widened and is_of_tpus(mesh):
        return x.astype(placement.reduce_dtype)
    return x


def reduce_scatter(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """Takes the first step: the sum over the shards, each with its part, in the reduce dtype."""
    dim = shard_dim(x, placement)
    assert dim is not None, "callers have a dim to scatter along"

    def run(x: jax.Array) -> jax.Array:
        if placement.reduce_wire:
            return _summed_on_arrival(x, dim, placement, num_layer_dims(x, placement))
        x = fused_over_inner_axes(x, placement)
        return lax.psum_scatter(x, placement.gather_axes, scatter_dimension=dim, tiled=True)

    padded = with_padding(_in_dtype_of_sum(x, placement.reduce_dtype, mesh), placement)
    return beside_automatic_axes(run, padded, placement)(padded)


def _summed_on_arrival(x: jax.Array, dim: int, placement: Placement, layer_dims: int) -> jax.Array:
    """Runs the reduce-scatter whose parts are sent over a wire, and summed in the dtype of the array: as all-to-alls.

    The part for each destination is packed, sent and unpacked for itself. Over several hosts, parts are summed within
    each host first, so that only parts of host sums are sent between them. `dim` becomes one dim for each exchange, the
    outermost first, and what stays:

        8 devices on 2 hosts, (40,)  ->  (2 hosts, 4 devices of a host, 5)
    """
    wire = wire_named(placement.reduce_wire)
    # Received parts are summed in the reduce dtype: a reduce-scatter in the narrower one would also add in it.
    degrees = {axis: lax.axis_size(axis) for axis in (FSDP, *placement.gather_axes)}
    exchanges = placement.exchanges(degrees)
    remaining = _outermost_first(exchanges)
    dims_before = x.shape[:dim]
    dims_after = x.shape[dim + 1 :]
    part_dims = [exchange.size for exchange in remaining]
    x = x.reshape(*dims_before, *part_dims, -1, *dims_after)
    if not wire.is_cast:
        x = _summed_over_inner_axes(x, dim + len(remaining), placement)
    for exchange in exchanges:
        num_part_dims = len(remaining)
        exchanged_dim = dim + remaining.index(exchange)
        packed = wire.packed(x, dim, num_layer_dims=layer_dims, num_part_dims=num_part_dims)
        received = tuple(_exchanged_along(array, exchanged_dim, exchange) for array in packed)
        parts = wire.unpacked(received, dim, x.dtype, num_layer_dims=layer_dims, num_part_dims=num_part_dims)
        x = parts.sum(exchanged_dim)
        remaining.remove(exchange)
    return x


def _exchanged_along(x: jax.Array, dim: int, exchange: Exchange) -> jax.Array:
    """Sends each row along a dim to the device of the group that has its number; the dim then has what arrived."""
    num_shards = lax.axis_size(exchange.axis)
    groups = _exchange_groups(num_shards, exchange.size, exchange.stride)
    return lax.all_to_all(x, exchange.axis, split_axis=dim, concat_axis=dim, axis_index_groups=groups)


def _outermost_first(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Returns exchanges in the order of the parts along a sharded dim: `fsdp` outside of `pipe`, hosts of devices."""
    over_fsdp = [exchange for exchange in exchanges if exchange.axis == FSDP]
    over_pipe = [exchange for exchange in exchanges if exchange.axis != FSDP]
    return [*reversed(over_fsdp), *over_pipe]


def _summed_over_inner_axes(x: jax.Array, dim: int, placement: Placement) -> jax.Array:
    """Makes a gradient whole over the inner axes that its parameter is stored over: split along a dim, in shards.

    The scale of a sum is not the sum of scales: a part that is yet to be summed over such an axis cannot be packed.
    """
    for axis in placement.axes:
        if axis in INNER_AXES:
            x = over_axis_p.bind(x, axis=axis, dim=dim, tensor_dim=None)
    return x


def _exchange_groups(num_shards: int, size: int, stride: int) -> list[list[int]] | None:
    """Returns the groups of shards that exchange parts: `size` shards each, `stride` apart; None if it is all of them.

    Of 8 shards on 2 hosts, 4 in a group with stride 1 are those of a host; 2 with stride 4 are of both hosts.
    """
    if size == num_shards:
        return None
    groups = []
    for first in range(num_shards):
        if first // stride % size == 0:
            groups.append(list(range(first, first + size * stride, stride)))
    return groups


# ---- all gradients of a unit


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def reduce_unit(
    gradients: list[jax.Array],
    placements: tuple[Placement, ...],
    mesh: Mesh,
    first_step: bool,
    part_dtypes: tuple[np.dtype, ...],
) -> list[jax.Array]:
    """Sums the gradients of a unit to their stored shards; of units stored alike it is one function in a program.

    Small gradients that are summed whole are joined, which is faster than sending each alone; so are all that are
    summed on arrival in another dtype, because the compiler joins reductions but not exchanges. Gradients that are also
    split over other axes are not joined, because that would gather them over these axes.

    Args:
        gradients: each data shard's parts.
        placements: of their parameters.
        mesh: the mesh.
        first_step: whether to leave out the second step of those that have a `pending_sum`.
        part_dtypes: of each part the narrowest dtype that has all its elements: see `Value.narrowest_dtype`.
    """
    of_parts = []
    for placement, dtype in zip(placements, part_dtypes, strict=True):
        of_parts.append(placement.sending_parts_of(dtype))
    # The order of the collectives in the program: joined sums, joined exchanges, then the others one by one.
    parts = _summed_together(gradients, of_parts, mesh)
    for i, x in _exchanged_together(gradients, of_parts).items():
        unreduced = PartialSum.of(gradients[i], mesh)
        parts[i] = unreduced.after(x, _scattered_axes(of_parts[i], mesh))
    results = []
    for i, (x, placement) in enumerate(zip(gradients, of_parts, strict=True)):
        if i not in parts:
            parts[i] = _first_step(x, placement, mesh)
        pending = pending_sum(x, placement, mesh) if first_step else None
        if pending is None:
            total = parts[i].finished(mesh)
            results.append(total.astype(x.dtype))
            continue
        assert parts[i].axes == pending.axes, "the second step covers what the first has left"
        results.append(parts[i].array)
    return results


def _summed_together(
    gradients: Sequence[jax.Array], placements: Sequence[Placement], mesh: Mesh
) -> dict[int, PartialSum]:
    """Returns the sums of small gradients that are not stored in shards, by position: of each dtype one array."""
    # Small ones that are not sharded are summed over all axes, so their all-reduce has no second step to leave open.
    groups: dict[tuple[jnp.dtype, str], list[int]] = {}
    for i, (x, placement) in enumerate(zip(gradients, placements, strict=True)):
        if is_summed_with_others(x, placement):
            groups.setdefault((x.dtype, placement.reduce_dtype), []).append(i)
    sums: dict[int, PartialSum] = {}
    for (_, reduce_dtype), positions in groups.items():
        if len(positions) > 1:
            members = at_positions(gradients, positions)
            sums.update(zip(positions, _joined_sums(members, reduce_dtype, mesh), strict=True))
    return sums


def is_summed_with_others(x: jax.Array, placement: Placement) -> bool:
    """Returns whether a gradient is small, and summed whole: joined with others, its sum is faster."""
    is_small = 0 < x.size * x.dtype.itemsize < JOINED_BYTES
    return is_small and placement.shards == 1 and shard_dim(x, placement) is None


def _joined_sums(gradients: Sequence[jax.Array], reduce_dtype: DTypeLike, mesh: Mesh) -> list[PartialSum]:
    """Returns the sums of gradients of one dtype, by one all-reduce."""
    dtype = gradients[0].dtype
    rows = [lax.reshape(x, (x.size,)) for x in gradients]
    joined = _in_dtype_of_sum(jnp.concatenate(rows), reduce_dtype, mesh)
    # Over all batch axes, also those of degree 1: an inner axis that is open joins in a sum over any of them.
    total = lax.psum(joined, batch_axes(mesh)).astype(dtype)
    # Apart, or the updates of all these parameters would be one kernel, as they read one array: the compiler would then
    # update none of them in place, and copy each.
    rows = lax.optimization_barrier(_split(total, [x.size for x in gradients]))
    sums = []
    for x, row in zip(gradients, rows, strict=True):
        part = PartialSum.of(x, mesh)
        sums.append(part.after(lax.reshape(row, x.shape), part.axes))
    return sums


def _exchanged_together(gradients: Sequence[jax.Array], placements: Sequence[Placement]) -> dict[int, jax.Array]:
    """Takes the first step of gradients that are sent in another dtype, by position: of each dtype one exchange."""
    groups: dict[tuple[str, str, int], dict[int, int]] = {}  # of each group the sharded dims, by position
    for i, (x, placement) in enumerate(zip(gradients, placements, strict=True)):
        dim = shard_dim(x, placement)
        if dim is not None and _is_exchanged_with_others(x, placement):
            key = (placement.reduce_dtype, placement.reduce_wire, placement.hosts)
            groups.setdefault(key, {})[i] = dim
    sums: dict[int, jax.Array] = {}
    for dims in groups.values():
        members = at_positions(gradients, dims)
        placements_of_members = at_positions(placements, dims)
        shards = _exchanged(members, placements_of_members, list(dims.values()))
        sums.update(zip(dims, shards, strict=True))
    return sums


def _is_exchanged_with_others(x: jax.Array, placement: Placement) -> bool:
    """Returns whether a sharded gradient is joined with others for an exchange."""
    if not placement.reduce_wire or automatic_axes(x, placement):
        return False
    if not wire_named(placement.reduce_wire).is_cast:
        return False  # other wires pack a gradient in its shape, no joined ones
    is_only_moved = placement.replaces_reduce_scatter
    is_large = x.size * x.dtype.itemsize >= JOINED_BYTES
    # Joined, parts that are only moved are copied twice more, which costs more than an exchange of their own.
    return not (is_only_moved and is_large)


def _exchanged(gradients: Sequence[jax.Array], placements: Sequence[Placement], dims: Sequence[int]) -> list[jax.Array]:
    """Returns the shards of gradients that are summed in one exchange, given the dims that they are sharded along."""
    placement = placements[0]  # for what all of them have in common
    # The sharded dim comes first, and is cut into a row for each shard; the rows of all gradients are joined:
    #
    #     gradient a    [ a of shard 0 ] [ a of shard 1 ]         row of shard 0    [ a of 0 | b of 0 ]
    #     gradient b    [ b of shard 0 ] [ b of shard 1 ]   -->   row of shard 1    [ a of 1 | b of 1 ]
    num_shards = lax.axis_size(placement.gather_axes)
    ordered = []
    rows = []
    for x, own_placement, dim in zip(gradients, placements, dims, strict=True):
        padded = with_padding(x, own_placement)
        sharded_first = jnp.moveaxis(padded, dim, 0)
        ordered.append(sharded_first)
        widened = sharded_first.astype(placement.reduce_dtype)
        rows.append(widened.reshape(num_shards, -1))
    joined = jnp.concatenate(rows, 1)
    (own_row,) = _summed_on_arrival(joined, 0, placement, layer_dims=0)
    parts = _split(own_row, [row.shape[1] for row in rows])
    shards = []
    for part, x, dim in zip(parts, ordered, dims, strict=True):
        shard = part.reshape(-1, *x.shape[1:])
        shards.append(jnp.moveaxis(shard, 0, dim))
    return shards


def _split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Cuts an array into parts of these sizes."""
    part_ends = list(itertools.accumulate(sizes))
    return jnp.split(x, part_ends[:-1])
