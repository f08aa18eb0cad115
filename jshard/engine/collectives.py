"""The collectives of one parameter: all-gather before use, reduce-scatter of its gradient."""

import collections
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard._mesh import FSDP, data_axes
from jshard._offload import fetched, placed_like
from jshard._padded import Padding
from jshard._placement import Placement, axes_of
from jshard.engine import gloo

_SMALL_BYTES = 4 * 2**20  # about what the wires carry while a collective starts
_JOINED_BYTES = 64 * 2**10  # smaller gradients are copied together sooner than sent one after another


def all_gather(shard: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """The full parameter in its gathered dtype, counted as different on every data shard.

    The shard is made varying over all data axes *before* the gather: else differentiation would all-reduce
    the full gradient over `replica` instead of the shard. A shard in host memory is brought to the device first.
    """
    shard = vary(fetched(shard), data_axes(mesh)).astype(placement.gathered_dtype)
    dim = _dim(shard, placement)
    if dim is None:
        return shard
    run = lambda x: lax.all_gather(x, FSDP, axis=dim, tiled=True)
    if gloo.carries(mesh):
        run = lambda x: gloo.all_gather(x, dim, placement.degree)
    return _without_padding(_keep_other_axes(run, shard, placement)(shard), placement)


def gather_unit(shards: list, placements: list[Placement], mesh: Mesh) -> list:
    """The full parameters of a unit, the small ones first.

    Collectives share the wires, one after another. The compiler takes a small one for quick and lets the program wait
    for it early; behind a large one it is not.
    """
    first = small_ones(placements, mesh)
    full = {i: all_gather(shards[i], placements[i], mesh) for i in first}
    rest = [i for i in range(len(shards)) if i not in full]
    large = [shards[i] for i in rest]
    if first:
        small, large = lax.optimization_barrier(([full[i] for i in first], large))
        full = dict(zip(first, small, strict=True))
    full |= {i: all_gather(x, placements[i], mesh) for i, x in zip(rest, large, strict=True)}
    return [full[i] for i in range(len(placements))]


def small_ones(placements: list[Placement], mesh: Mesh) -> list[int]:
    """Positions of the parameters that are gathered first. On a TPU there are none: it fuses gathers into products."""
    if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu":
        return []
    sizes = [p.gathered_bytes // p.layers for p in placements]
    return [i for i, size in enumerate(sizes) if size < _SMALL_BYTES <= max(sizes)]


def scatter(full: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """The reduce-scatter over `fsdp` of each data shard's gradient of the full parameter, in the reduce dtype."""
    full = full.astype(placement.reduce_dtype)
    dim = _dim(full, placement)
    if dim is None:
        return full
    full = _with_padding(full, placement)
    run = lambda x: lax.psum_scatter(x, FSDP, scatter_dimension=dim, tiled=True)
    if gloo.carries(mesh):
        run = lambda x: gloo.reduce_scatter(x, dim, placement.degree)
    return _keep_other_axes(run, full, placement)(full)


def all_reduce(gradient: jax.Array, mesh: Mesh, like: jax.Array) -> jax.Array:
    """The sum over the data axes on which the stored shard is the same, and put where it lies."""
    axes = _same_on(gradient, mesh, like)
    return placed_like((lax.psum(gradient, axes) if axes else gradient).astype(like.dtype), like)


def all_reduce_unit(gradients: list, placements: list[Placement], mesh: Mesh, likes: list) -> list:
    """`all_reduce` of a unit's gradients, None for those that nobody asked for; the small ones travel in one array.

    Each would cost the time that a collective needs to start. What lies on other axes, too, travels alone: it could
    not be joined without being gathered over them.
    """
    together = collections.defaultdict(list)
    for i, (g, p, like) in enumerate(zip(gradients, placements, likes, strict=True)):
        if g is not None and p.shards == p.degree and g.size * g.dtype.itemsize < _JOINED_BYTES:
            together[_same_on(g, mesh, like), g.dtype].append(i)
    found = list(gradients)
    for (axes, _), at in together.items():
        if axes and len(at) > 1:
            for i, g in zip(at, _joined_psum([gradients[i] for i in at], axes), strict=True):
                found[i] = g
    return [None if g is None else all_reduce(g, mesh, like) for g, like in zip(found, likes, strict=True)]


def _same_on(gradient: jax.Array, mesh: Mesh, like: jax.Array) -> tuple[str, ...]:
    """The data axes over which a gradient is still to be summed."""
    differs = _compat.varying_axes(gradient) - _compat.varying_axes(like)
    return tuple(a for a in data_axes(mesh) if a in differs)


def _joined_psum(arrays: list, axes: tuple[str, ...]) -> list:
    whole = lax.psum(jnp.concatenate([x.ravel() for x in arrays]), axes)
    ends = list(itertools.accumulate(x.size for x in arrays))
    return [part.reshape(x.shape) for part, x in zip(jnp.split(whole, ends[:-1]), arrays, strict=True)]


def reduce_scatter(full: jax.Array, placement: Placement, mesh: Mesh, like: jax.Array) -> jax.Array:
    """The gradient of the stored shard from each data shard's gradient of the full parameter."""
    return all_reduce(scatter(full, placement, mesh), mesh, like)


def gather(shard: jax.Array, placement: Placement, mesh: Mesh, unit: str) -> jax.Array:
    """A differentiable all-gather whose gradient is the reduce-scatter above; the full copy is kept."""

    @jax.custom_vjp
    def gathered(shard: jax.Array) -> jax.Array:
        with jax.named_scope(scope(unit)):
            return all_gather(shard, placement, mesh)

    def forward(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gathered(shard), shard

    def backward(shard: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
        with jax.named_scope(f"{scope(unit)}/backward"):
            return (reduce_scatter(gradient, placement, mesh, shard),)

    gathered.defvjp(forward, backward)
    return gathered(shard)


def scope(unit: str) -> str:
    """The name that a unit's operations carry in the compiled program."""
    return f"jshard[{unit}]"


def keep_piece(full: jax.Array, placement: Placement, pieces: int) -> jax.Array:
    """The part of a gathered parameter that this device keeps: one of `pieces`, shared by a group of neighbours."""
    dim = _dim(full, placement)
    if dim is None:
        return full
    full = _with_padding(full, placement)
    size = full.shape[dim] // pieces
    mine = lax.axis_index(FSDP) % pieces
    return lax.dynamic_slice_in_dim(full, mine * size, size, dim)


def gather_pieces(piece: jax.Array, placement: Placement, pieces: int) -> jax.Array:
    """The full parameter from the pieces that a group of `pieces` neighbours kept."""
    dim = _dim(piece, placement)
    if dim is None:
        return piece
    groups = [list(range(i, i + pieces)) for i in range(0, placement.degree, pieces)]
    join = lambda x: lax.all_gather(x, FSDP, axis=dim, tiled=True, axis_index_groups=groups)
    return _without_padding(_keep_other_axes(join, piece, placement)(piece), placement)


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Counts a value as different along axes; its gradient is then summed over them."""
    missing = tuple(a for a in axes if a not in _compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _with_padding(full: jax.Array, placement: Placement) -> jax.Array:
    padding = Padding.of(placement)
    return full if padding is None else padding.pad(full)


def _without_padding(full: jax.Array, placement: Placement) -> jax.Array:
    padding = Padding.of(placement)
    return full if padding is None else padding.cut(full)


def _dim(x: jax.Array, placement: Placement) -> int | None:
    from_end = placement.dim_from_end
    return None if from_end is None else x.ndim + from_end


def _keep_other_axes(collective: Callable, x: jax.Array, placement: Placement) -> Callable:
    """Runs a collective per shard of the axes that stay automatic.

    In a partly manual region XLA would replicate a `tensor` axis before a collective over `fsdp`; being
    manual over it too, around just the collective, avoids that.
    """
    manual = _compat.manual_axes()
    automatic = lambda entry: tuple(n for n in axes_of(entry) if n not in manual) or None
    kept = PartitionSpec(*map(automatic, placement.spec[len(placement.spec) - x.ndim :]))
    names = {n for entry in kept for n in axes_of(entry)}
    if not names:
        return collective
    return jax.shard_map(collective, in_specs=kept, out_specs=kept, axis_names=names)
