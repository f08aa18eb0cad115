"""Stored shards: along which dims a parameter is split, its padding, and how a collective is applied to it."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine.inner import FUSED, over_axis_p
from jshard.plans.mesh import FSDP, INNER_AXES
from jshard.plans.model_axes import Entry, axes_of
from jshard.plans.padding import Padding
from jshard.plans.placement import Placement

StoredArray = TypeVar("StoredArray", bound=jax.Array | jax.ShapeDtypeStruct)

Collective = Callable[[jax.Array], jax.Array]


def shard_dim(x: jax.Array, placement: Placement) -> int | None:
    """Returns the sharded dim of an array that is stored by a placement.

    None for an array that is not sharded; also for a row of a stack that is sharded along its layers: the loop has
    taken the row out of the shard.
    """
    return dim_counted_from_start(placement, x.ndim)


def dim_counted_from_start(placement: Placement, ndim: int) -> int | None:
    """Returns the `shard_dim` of an array of so many dims."""
    # From the end: a stack has further dims in front of the planned ones, and a row of a stack has fewer.
    from_end = placement.dim_from_end
    if from_end is None:
        return None
    dim = ndim + from_end
    return dim if dim >= 0 else None


@dataclasses.dataclass(frozen=True)
class HeldOrder:
    """The order of dims in which barriers and loops hold a gradient that is sharded.

    They hold arrays in the order of their dims: behind one of them another layout is a copy.

    Attributes:
        dims: the gradient's dims, as they are held.
    """

    dims: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, ndim: int, written_dims: tuple[int, ...] | None) -> "HeldOrder":
        """Returns the order of a gradient.

        Args:
            placement: how its parameter is stored.
            ndim: the number of its dims.
            written_dims: its dims as a product writes them; None if that is not known.
        """
        own_order = range(ndim)
        dim = dim_counted_from_start(placement, ndim)
        if dim is None:
            return cls(tuple(own_order))
        # XLA:CPU has fast kernels for products as autodiff writes them. It would fold the transpose into the product,
        # and take a slow one. The parts of its exchanges, which are in the dtype of the sum, are copied in any case.
        is_exchanged_on_cpus = placement.replaces_reduce_scatter and placement.reduce_wire == placement.reduce_dtype
        if is_exchanged_on_cpus and written_dims is not None:
            return cls(written_dims)
        # A reduce-scatter takes parts that are contiguous in memory, and the compiler gives its operand a layout in
        # which they are. With the sharded dim in front the product writes the gradient in the order in which it is
        # sent.
        return cls((dim, *[i for i in own_order if i != dim]))

    def held(self, x: jax.Array) -> jax.Array:
        """Returns a gradient with its dims in this order."""
        return lax.transpose(x, self.dims)

    def restored(self, x: jax.Array) -> jax.Array:
        """Returns what `held` has returned, with its dims in their own order."""
        return lax.transpose(x, tuple(self.dims.index(i) for i in range(len(self.dims))))


def num_layer_dims(x: jax.Array, placement: Placement) -> int:
    """Returns how many leading dims of an array that is stored by a placement index layers; a loop has taken some."""
    return max(x.ndim - len(placement.shape) + placement.layer_dims, 0)


def inner_dims(placement: Placement, ndim: int, *, gathered: bool = False) -> dict[str, int]:
    """Returns the dims of a parameter that are split over inner axes, by axis.

    Args:
        placement: how the parameter is stored.
        ndim: the number of its dims; more than planned in a stack, fewer in a row of one.
        gathered: of the gathered parameter. A collective that gathers it also covers the inner axes among the axes
            that it is stored over.
    """
    num_stacked = ndim - len(placement.spec)
    dims = {}
    for i, entry in enumerate(placement.spec):
        for axis in axes_of(entry):
            is_gathered = gathered and axis in placement.axes
            # A row of a stack lacks the dims in front: it cannot be split along one of these.
            if axis in INNER_AXES and not is_gathered and i + num_stacked >= 0:
                dims[axis] = i + num_stacked
    return dims


def entries_of(placement: Placement, ndim: int) -> tuple[Entry, ...]:
    """Returns the entries of a placement's spec for the last dims of what is stored by it."""
    num_more = ndim - len(placement.spec)
    if num_more > 0:
        return (None,) * num_more + placement.spec
    return tuple(placement.spec[-num_more:])


def cut(x: jax.Array, placement: Placement, pieces: int = 0) -> jax.Array:
    """Returns this device's shard of a parameter that is whole on every data shard.

    Args:
        x: the parameter.
        placement: how it is stored.
        pieces: into how many pieces it is cut, each kept by one device of a group of neighbours; 0 for the stored
            shard.
    """
    dim = shard_dim(x, placement)
    if dim is None:
        return x
    x = with_padding(x, placement)  # shards, and so their pieces, are of the padded array
    axes = (FSDP,) if pieces else placement.gather_axes
    num_pieces = pieces or lax.axis_size(axes)
    size = x.shape[dim] // num_pieces
    # Neighbours have the pieces in order, as the gather among them expects. The index over one axis needs no sum.
    piece = lax.axis_index(axes[0] if len(axes) == 1 else axes) % num_pieces
    return lax.dynamic_slice_in_dim(x, piece * size, size, dim)


def without_padding(x: StoredArray, placement: Placement) -> StoredArray:
    """Returns a stored array, or the type of one, without its rows of padding."""
    padding = Padding.of(placement)
    return x if padding is None else padding.cut(x)


def with_padding(x: jax.Array, placement: Placement) -> jax.Array:
    """Returns a logical array with the rows of padding that it is stored with."""
    padding = Padding.of(placement)
    return x if padding is None else padding.pad(x)


# ---- collectives over `fsdp` and `pipe`, beside the other axes of a parameter


def fused_over_inner_axes(x: jax.Array, placement: Placement) -> jax.Array:
    """Makes the next collective of an array also one over the inner axes that its parameter is stored over."""
    for axis in placement.axes:
        if axis in INNER_AXES:
            x = over_axis_p.bind(x, axis=axis, dim=FUSED, tensor_dim=None)
    return x


def beside_automatic_axes(collective: Collective, x: jax.Array, placement: Placement) -> Collective:
    """Returns a collective that runs per shard of the axes that stay automatic.

    In a partly manual region XLA would replicate a `tensor` axis before a collective over `fsdp`; being
    manual over it too, around just the collective, avoids that.
    """
    names = automatic_axes(x, placement)
    if not names:  # the usual case: a parameter without `tensor`
        return collective
    entries = []
    for entry in _spec_of(x, placement):
        automatic = tuple(axis for axis in axes_of(entry) if axis in names)
        entries.append(automatic or None)
    spec = PartitionSpec(*entries)
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)


def automatic_axes(x: jax.Array, placement: Placement) -> set[str]:
    """Returns the axes over which the compiler splits a parameter."""
    axes: set[str] = set()
    for entry in _spec_of(x, placement):
        axes.update(axes_of(entry))
    return axes - _compat.manual_axes()


def _spec_of(x: jax.Array, placement: Placement) -> tuple[str | tuple[str, ...] | None, ...]:
    """Returns the entries of the spec for the dims of an array.

    A row of a stack lacks the first of the planned dims; rows of several layers have one more.
    """
    return entries_of(placement, x.ndim)
