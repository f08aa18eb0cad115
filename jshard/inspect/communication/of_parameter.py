"""The collectives of one parameter, as they follow from its placement."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from jshard.inspect.hlo.collectives import ring_bytes
from jshard.plans.mesh import FSDP, REGION_AXES
from jshard.plans.model_axes import axes_of, degree_of, num_pieces
from jshard.plans.placement import Placement
from jshard.plans.wires import wire_named

# How the purposes of all-gathers begin.
FORWARD = "parameters for forward"
BACKWARD = "parameters for backward"

GRADIENTS = "gradients"
"""How the purposes of all reductions begin."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step."""

    kind: str  # `all-gather`, `reduce-scatter`, `all-reduce`, or `all-to-all` of gradients summed on arrival
    axes: tuple[str, ...]  # the mesh axes that it runs over
    group_size: int  # devices of a group
    dtype: str  # dtype on the wire
    full_bytes: int  # bytes of the whole arrays, before they are split over the group
    purpose: str  # what it is for
    apart: int = 1  # how far apart the devices of a group are on the axes

    @property
    def elements(self) -> float:
        """Elements of the whole arrays."""
        return self.full_bytes / jnp.dtype(self.dtype).itemsize  # a plan counts a byte for 4-bit integers

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, by the ring algorithm."""
        return ring_bytes(self.kind, self.full_bytes, self.group_size)


def copied_over(placement: Placement, degrees: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a region along which the stored shard is the same."""
    sharded_over: set[str] = set()
    for entry in placement.spec:
        sharded_over.update(axes_of(entry))
    axes = []
    for axis in REGION_AXES:
        has_several_devices = degrees.get(axis, 1) > 1
        if has_several_devices and axis not in sharded_over:
            axes.append(axis)
    return tuple(axes)


def gathers(placement: Placement, reshard: bool | int, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Yields the gathers for forward, and those for backward unless forward keeps the whole copy."""
    yield from gather(placement, FORWARD, degrees)
    if reshard is True:
        yield from gather(placement, BACKWARD, degrees)
    elif reshard is not False:
        # Pieces of the gathered copy, which is no longer packed, so `gather_wire` does not apply.
        yield Traffic("all-gather", (FSDP,), int(reshard), placement.gathered_dtype, placement.gathered_bytes, BACKWARD)


def gather(placement: Placement, purpose: str, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Yields the gather of a shard, or those of the arrays that its wire packs."""
    axes = placement.axes
    degree = placement.degree
    if not placement.gather_wire:
        yield Traffic("all-gather", axes, degree, placement.gathered_dtype, placement.gathered_bytes, purpose)
        return
    for array in _packed(placement, placement.gather_wire, placement.gathered_dtype, degrees):
        purpose_of_array = f"{purpose}, {placement.gather_wire}"
        yield Traffic("all-gather", axes, degree, array.dtype, array.bytes, purpose_of_array)


@dataclasses.dataclass(frozen=True)
class _PackedArray:
    """One of the arrays that a wire sends of a parameter: on one device of an inner axis, of all shards and layers."""

    dtype: str
    bytes: int


def _packed(placement: Placement, wire: str, dtype: str, degrees: Mapping[str, int]) -> list[_PackedArray]:
    """Returns what a wire sends of a parameter, or its gradient, in a dtype."""
    shard = placement.shard_of_layer(degrees)
    elements_of_shard = math.prod(shard)
    num_shards = gathered_elements(placement) // elements_of_shard  # of all layers
    arrays = []
    for packed in wire_named(wire).packed_types(shard, dtype, placement.dim_of_layer):
        size = packed.size * packed.dtype.itemsize
        arrays.append(_PackedArray(packed.dtype.name, size * num_shards))
    return arrays


def reductions_to_shard(placement: Placement, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Yields the collectives that reduce a whole gradient to the shards of one replica."""
    full_bytes = _gradient_bytes(placement, placement.reduce_dtype)
    reduce_wire = placement.reduce_wire
    if not reduce_wire:
        yield Traffic(
            "reduce-scatter", placement.axes, placement.degree, placement.reduce_dtype, full_bytes, "gradients"
        )
        return

    # A reduce-scatter would sum in the narrow dtype of the wire. So parts are exchanged over `fsdp`, and summed wide.
    is_cast = wire_named(reduce_wire).is_cast
    num_places = 1  # over the inner axes, of which each exchanges its part of a sum
    if not is_cast:
        num_places = placement.degree // num_pieces(placement.gather_axes, degrees)
    for array in _packed(placement, reduce_wire, placement.reduce_dtype, degrees):
        exchanged_bytes = array.bytes // num_places
        for exchange in placement.exchanges(degrees):
            purpose = "gradients, summed on arrival"
            yield Traffic(
                "all-to-all", (exchange.axis,), exchange.size, array.dtype, exchanged_bytes, purpose, exchange.stride
            )
            exchanged_bytes //= exchange.size  # of which each device has summed one part
    if is_cast:
        full_bytes //= num_pieces(placement.gather_axes, degrees)
    for axis in placement.axes:
        if axis not in placement.gather_axes:
            purpose = "gradients, over inner axes"
            yield Traffic("reduce-scatter", (axis,), degrees[axis], placement.reduce_dtype, full_bytes, purpose)
            full_bytes //= degrees[axis]


def sum_over_replicas(placement: Placement, degrees: Mapping[str, int], purpose: str) -> Iterator[Traffic]:
    """Yields the sum of gradients over the axes along which the stored parameter is the same, if there are any."""
    axes = copied_over(placement, degrees)
    if axes:
        num_replicas = degree_of(axes, degrees)
        shard_bytes = _gradient_bytes(placement, placement.reduce_dtype) // placement.degree
        yield Traffic("all-reduce", axes, num_replicas, placement.reduce_dtype, shard_bytes, purpose)


def gathered_elements(placement: Placement) -> int:
    """Returns the elements of the gathered copy on a device."""
    return placement.gathered_bytes // jnp.dtype(placement.gathered_dtype).itemsize


def _gradient_bytes(placement: Placement, dtype: str) -> int:
    """Returns the bytes of the gradient of the gathered copy in a dtype."""
    return gathered_elements(placement) * jnp.dtype(dtype).itemsize
