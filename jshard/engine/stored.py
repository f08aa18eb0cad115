"""Stored shards: how parameters are gathered from them, and how gradients are reduced to them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard.engine.inner import FUSED, over_axis_p
from jshard.engine.rules import Shard, Value
from jshard.plans.memories import fetched
from jshard.plans.mesh import FSDP, INNER_AXES, batch_axes, degree, inner_axes
from jshard.plans.padding import Padding
from jshard.plans.placement import Placement, axes_of

SMALL_BYTES = 4 * 2**20  # about the bytes sent in the time that a collective needs to start
_SMALL_BYTES = 64 * 2**10  # joining smaller gradients is faster than sending them one after another


def gather(value: Value, dtype: Any = None) -> jax.Array:
    """The whole logical parameter, gathered in a dtype; by default in the shard's."""
    placement, pieces = value.shard.placement, value.shard.pieces
    x = fetched(value.x)
    x = x if dtype is None else x.astype(dtype)
    dim = _dim(x, placement)
    if dim is None:
        return x
    if x.dtype in (jnp.int2, jnp.uint2):  # XLA:CPU writes beyond the end of what it gathers of these
        return gather(value.with_array(x.astype(jnp.int8))).astype(x.dtype)
    join = lambda x: x if pieces else _fused(x, placement)  # pieces are of neighbours along `fsdp`
    groups = [list(range(i, i + pieces)) for i in range(0, lax.axis_size(FSDP), pieces)] if pieces else None
    run = lambda x: lax.all_gather(join(x), FSDP, axis=dim, tiled=True, axis_index_groups=groups)
    if (wire := placement.gather_wire) and not pieces and x.dtype == placement.gathered_dtype:
        send, layers = run, x.ndim - len(placement.shape) + placement.layer_dims

        def run(x: jax.Array) -> jax.Array:
            codes, scales = scaled(x, wire, dim, layers)
            return scaled_back(send(codes), send(scales), wire, x.dtype)

    return without_padding(_keep_other_axes(run, x, placement)(x), placement)


def scaled(x: jax.Array, dtype: Any, dim: int, layers: int = 0) -> tuple[jax.Array, jax.Array]:
    """Each row of `dim`, in each layer of the leading dims, in a dtype of 8 bits; and their scales.

    As integers, which no compiler widens: those for CPUs, and for GPUs before Hopper, send such floats in 16 bits.
    """
    others = tuple(d for d in range(max(layers, 0), x.ndim) if d != dim)
    x, limits = x.astype(jnp.float32), jnp.finfo(jnp.float32)
    scales = jnp.abs(x).max(others, keepdims=True) / float(jnp.finfo(dtype).max)
    scales = jnp.maximum(scales, limits.tiny)  # of a row of zeros
    return lax.bitcast_convert_type((x / scales).astype(dtype), jnp.uint8), scales


def scaled_back(x: jax.Array, scales: jax.Array, dtype: Any, wanted: Any) -> jax.Array:
    """The input of `scaled`, rounded, in another dtype."""
    return (lax.bitcast_convert_type(x, dtype).astype(jnp.float32) * scales).astype(wanted)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def gather_unit(xs: list[Any], shards: tuple[Shard, ...], mesh: Mesh, dtypes: tuple[Any, ...]) -> list[Any]:
    """The parameters of a unit, gathered, the small ones first; of units stored alike it is one function in a program.

    Collectives share the links, one after another. The compiler assumes that a small one is fast and waits for it
    early; after a large one it is not fast. A TPU fuses gathers into products; pieces are fast between neighbours, and
    the compiler joins the small ones.
    """
    is_tpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"
    sizes = [s.placement.gathered_bytes // s.placement.layers for s in shards]
    first = [i for i, size in enumerate(sizes) if size < SMALL_BYTES <= max(sizes)]
    if is_tpu or any(s.pieces for s in shards):
        first = []
    gathered = lambda i: gather(Value(xs[i], shards[i]), dtypes[i])
    full = {i: gathered(i) for i in first}
    rest = [i for i in range(len(xs)) if i not in full]
    if first:
        small, behind = lax.optimization_barrier(([full[i] for i in first], [xs[i] for i in rest]))
        full = dict(zip(first, small, strict=True))
        for i, x in zip(rest, behind, strict=True):
            xs[i] = x
    full |= {i: gathered(i) for i in rest}
    return [full[i] for i in range(len(xs))]


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
        return cls(gradient, tuple(axis for axis in batch_axes(mesh) if degree(mesh, axis) > 1))

    def after(self, array: jax.Array, axes: Sequence[str]) -> "PartialSum":
        """Returns the result of a collective that summed it over these axes."""
        twice = [axis for axis in axes if axis not in self.axes]
        assert not twice, f"a gradient is summed twice over {twice}"
        return PartialSum(array, tuple(axis for axis in self.axes if axis not in axes))

    def finished(self, mesh: Mesh) -> jax.Array:
        """Returns the sum over the axes that are left, and over inner axes where one is open."""
        x = lax.psum(self.array, self.axes) if self.axes else self.array
        for axis in inner_axes(mesh):
            x = over_axis_p.bind(x, axis=axis, dim=None, beside=None)
        return x


@dataclasses.dataclass(frozen=True)
class PendingSum:
    """The second step of a gradient whose first has begun: the axes that are left, and the dtype of the result."""

    axes: tuple[str, ...]
    dtype: Any

    def finished(self, array: jax.Array, mesh: Mesh) -> jax.Array:
        """Returns the sum, from the result of the first step."""
        return PartialSum(array, self.axes).finished(mesh).astype(self.dtype)


def reduce_gradient(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """Sums each data shard's part of a gradient: the stored shard of the sum, in the part's dtype.

    It is reduced in the parameter's reduce dtype, over the axes that it is stored over, then over the others.
    """
    return _first_step(x, placement, mesh).finished(mesh).astype(x.dtype)


def pending_sum(x: jax.Array, placement: Placement, mesh: Mesh) -> PendingSum | None:
    """Returns the second step of a gradient; None if the first is the whole sum, or if there is no first one."""
    if _dim(x, placement) is None:
        return None
    whole = PartialSum.of(x, mesh)
    axes = whole.after(x, _scattered_axes(mesh)).axes
    return PendingSum(axes, x.dtype) if axes else None


def _first_step(x: jax.Array, placement: Placement, mesh: Mesh) -> PartialSum:
    """Returns a gradient after its first step, a sum over the shards; a gradient that has no shards has no such step.

    An empty gradient is its own sum.
    """
    part = PartialSum.of(x, mesh)
    if x.size == 0:
        return part.after(x, part.axes)
    if _dim(x, placement) is None:
        return part.after(x.astype(placement.reduce_dtype), [])
    return part.after(reduce_scatter(x, placement, mesh), _scattered_axes(mesh))


def _scattered_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the batch axes that the sum over the shards covers; inner axes are no batch axes."""
    return (FSDP,) if degree(mesh, FSDP) > 1 else ()


def reduce_scatter(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """The first step: the sum over the shards, each with its part, in the reduce dtype."""
    dim = _dim(x, placement)
    assert dim is not None, "callers have a dim to scatter along"
    run = lambda x: lax.psum_scatter(_fused(x, placement), FSDP, scatter_dimension=dim, tiled=True)
    if placement.reduce_wire:
        run = functools.partial(_summed_on_arrival, dim=dim, placement=placement)
    x = _with_padding(x.astype(placement.reduce_dtype), placement)
    return _keep_other_axes(run, x, placement)(x)


def _summed_on_arrival(x: jax.Array, *, dim: int, placement: Placement) -> jax.Array:
    """The reduce-scatter whose parts are sent in a narrower dtype than that of the sum.

    Over several hosts, parts are summed within each host, so that only parts of host sums are sent between them.
    """
    degree = lax.axis_size(FSDP)
    exchanges = placement.exchanges(degree)
    x = x.reshape(*x.shape[:dim], *(size for size, _ in reversed(exchanges)), -1, *x.shape[dim + 1 :])
    for number, (size, apart) in enumerate(exchanges, 1):
        first = [i for i in range(degree) if i // apart % size == 0]
        groups = [list(range(i, i + size * apart, apart)) for i in first] if size < degree else None
        at, sent = dim + len(exchanges) - number, x.astype(placement.reduce_wire)
        found = lax.all_to_all(sent, FSDP, split_axis=at, concat_axis=at, axis_index_groups=groups)
        x = found.astype(x.dtype).sum(at)
    return x


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def reduce_unit(xs: list[Any], placements: tuple[Placement, ...], mesh: Mesh, first_step: bool) -> list[Any]:
    """The gradients of a unit, summed: stored shards; with `first_step`, those that have a `pending_sum` lack it.

    Small gradients that are summed whole are joined, which is faster than sending each alone; so are all that are
    summed on arrival, because the compiler joins reductions but not exchanges. Gradients that are also split over other
    axes are not joined, because that would gather them over these axes.
    """
    parts = _summed_together(xs, placements, mesh)
    for i, x in _exchanged_together(xs, placements).items():
        parts[i] = PartialSum.of(xs[i], mesh).after(x, _scattered_axes(mesh))
    results = []
    for i, (x, placement) in enumerate(zip(xs, placements, strict=True)):
        part = parts[i] if i in parts else _first_step(x, placement, mesh)
        pending = pending_sum(x, placement, mesh) if first_step else None
        if pending is None:
            results.append(part.finished(mesh).astype(x.dtype))
            continue
        assert part.axes == pending.axes, "the second step covers what the first has left"
        results.append(part.array)
    return results


def _summed_together(xs: Sequence[jax.Array], placements: Sequence[Placement], mesh: Mesh) -> dict[int, PartialSum]:
    """Returns the sums of small gradients that are not stored in shards, by their places: of each dtype one array."""
    together: dict[Any, list[int]] = {}
    for i, (x, placement) in enumerate(zip(xs, placements, strict=True)):
        is_small = 0 < x.size * x.dtype.itemsize < _SMALL_BYTES
        if is_small and placement.shards == 1 and _dim(x, placement) is None:
            together.setdefault((x.dtype, placement.reduce_dtype), []).append(i)
    sums = {}
    for (dtype, reduce_dtype), places in together.items():
        if len(places) == 1:
            continue
        joined = jnp.concatenate([xs[i].astype(reduce_dtype).ravel() for i in places])
        # Over all batch axes, also those of degree 1: an inner axis that is open joins in a sum over any of them.
        whole = lax.psum(joined, batch_axes(mesh)).astype(dtype)
        rows = jnp.split(whole, list(itertools.accumulate(xs[i].size for i in places))[:-1])
        for i, row in zip(places, rows, strict=True):
            part = PartialSum.of(xs[i], mesh)
            sums[i] = part.after(row.reshape(xs[i].shape), part.axes)
    return sums


def _exchanged_together(xs: Sequence[jax.Array], placements: Sequence[Placement]) -> dict[int, jax.Array]:
    """The first step of the gradients of a unit that are summed on arrival, by their places, in one exchange."""
    together: dict[Any, list[tuple[int, int]]] = {}
    for i, (x, one) in enumerate(zip(xs, placements, strict=True)):
        if one.reduce_wire and (dim := _dim(x, one)) is not None and not _other_axes(x, one):
            together.setdefault((one.reduce_dtype, one.reduce_wire, one.hosts), []).append((i, dim))
    found = {}
    for members in together.values():
        ordered = [jnp.moveaxis(_with_padding(xs[i], placements[i]), dim, 0) for i, dim in members]
        rows = [x.astype(placements[members[0][0]].reduce_dtype).reshape(lax.axis_size(FSDP), -1) for x in ordered]
        (mine,) = _summed_on_arrival(jnp.concatenate(rows, 1), dim=0, placement=placements[members[0][0]])
        parts = jnp.split(mine, list(itertools.accumulate(row.shape[1] for row in rows))[:-1])
        for (i, dim), x, part in zip(members, ordered, parts, strict=True):
            found[i] = jnp.moveaxis(part.reshape(-1, *x.shape[1:]), 0, dim)
    return found


def cut(x: jax.Array, placement: Placement, pieces: int = 0) -> jax.Array:
    """The stored shard of a value that is whole on every data shard.

    Or the part of a gathered parameter that this device keeps: one of `pieces`, shared by a group of neighbours.
    """
    dim = _dim(x, placement)
    if dim is None:
        return x
    x, pieces = _with_padding(x, placement), pieces or lax.axis_size(FSDP)
    size = x.shape[dim] // pieces
    return lax.dynamic_slice_in_dim(x, lax.axis_index(FSDP) % pieces * size, size, dim)


def inner_dims(placement: Placement, ndim: int, *, gathered: bool = False) -> dict[str, int]:
    """The dims on inner axes, of a stored array with `ndim` dims, or of a gathered one."""
    more = ndim - len(placement.spec)
    found = {axis: i + more for i, entry in enumerate(placement.spec) for axis in axes_of(entry) if axis in INNER_AXES}
    return {axis: dim for axis, dim in found.items() if dim >= 0 and not (gathered and axis in placement.axes)}


def _fused(x: jax.Array, placement: Placement) -> jax.Array:
    """An array whose next collective is also over the inner axes that its parameter is stored over."""
    for axis in placement.axes:
        x = over_axis_p.bind(x, axis=axis, dim=FUSED, beside=None) if axis in INNER_AXES else x
    return x


def without_padding(x: Any, placement: Placement) -> Any:
    """A stored array, or the type of one, without its rows of padding."""
    padding = Padding.of(placement)
    return x if padding is None else padding.cut(x)


def _with_padding(x: jax.Array, placement: Placement) -> jax.Array:
    padding = Padding.of(placement)
    return x if padding is None else padding.pad(x)


def _dim(x: jax.Array, placement: Placement) -> int | None:
    """The sharded dim. Also None for a row of a stack that is sharded along its layers, which the loop cut."""
    from_end = placement.dim_from_end
    return None if from_end is None or x.ndim + from_end < 0 else x.ndim + from_end


def _keep_other_axes(collective: Callable, x: jax.Array, placement: Placement) -> Callable:
    """Runs a collective per shard of the axes that stay automatic.

    In a partly manual region XLA would replicate a `tensor` axis before a collective over `fsdp`; being
    manual over it too, around just the collective, avoids that.
    """
    if not (names := _other_axes(x, placement)):
        return collective
    automatic = lambda entry: tuple(n for n in axes_of(entry) if n in names) or None
    kept = PartitionSpec(*map(automatic, placement.spec[len(placement.spec) - x.ndim :]))
    return jax.shard_map(collective, in_specs=kept, out_specs=kept, axis_names=names, check_vma=False)


def _other_axes(x: jax.Array, placement: Placement) -> set[str]:
    """The axes over which the compiler splits a parameter."""
    manual, spec = _compat.manual_axes(), placement.spec[len(placement.spec) - x.ndim :]
    return {name for entry in spec for name in axes_of(entry) if name not in manual}
