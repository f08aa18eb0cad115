"""The collectives of one forward and backward pass, as they follow from a plan."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from jshard.inspect.hlo import Window
from jshard.inspect.hlo.collectives import KINDS, ring_bytes
from jshard.plans.mesh import FSDP, REGION_AXES
from jshard.plans.model_axes import axes_of, degree_of, num_pieces
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan
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
    def wire_bytes(self) -> float:
        """Bytes that each device sends, by the ring algorithm."""
        return ring_bytes(self.kind, self.full_bytes, self.group_size)


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveKind:
    """A kind of collective over some axes of the mesh."""

    kind: str
    axes: tuple[str, ...]
    group_size: int

    @classmethod
    def of(cls, window: Window) -> "CollectiveKind":
        """Returns the kind of a collective of a program."""
        return cls(window.kind, window.axes or (), len(window.group))

    def has_groups_of(self, other: "CollectiveKind") -> bool:
        """Returns whether two kinds run over the same groups of devices."""
        return (self.axes, self.group_size) == (other.axes, other.group_size)


def traffic_of(plan: ShardPlan) -> tuple[Traffic, ...]:
    """Returns the collectives of one forward and backward pass according to the plan.

    A compiler omits the second gather of a parameter that backward does not need, such as most biases. Units that are
    never gathered have no collectives here.
    """
    degrees = dict(plan.mesh)
    reshard_of_unit = {unit.name: unit.reshard_after_forward for unit in plan.units}
    sizes: dict[Traffic, int] = collections.defaultdict(int)  # the keys have no size: collectives alike are added up
    for leaf in plan.leaves:
        # A loop of the root keeps no layer: each is gathered again, whatever the root's own setting is.
        reshard = leaf.by_layer or reshard_of_unit[leaf.unit]
        for traffic in _traffic_of_leaf(leaf, reshard, degrees):
            sizes[dataclasses.replace(traffic, full_bytes=0)] += traffic.full_bytes
    totals = [dataclasses.replace(traffic, full_bytes=size) for traffic, size in sizes.items()]
    return tuple(sorted(totals, key=_order_in_reports))


def _order_in_reports(traffic: Traffic) -> tuple[int, int]:
    return KINDS.index(traffic.kind), len(traffic.axes)


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


def _traffic_of_leaf(leaf: LeafPlan, reshard: bool | int, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Yields the collectives of one parameter."""
    placement = leaf.placement
    if not placement.gathered:
        return  # its communication is the model's own
    if placement.dim is not None:
        yield from _gathers(placement, reshard, degrees)
        if leaf.trained:
            yield from _reductions_to_shard(placement, degrees)
            yield from _sum_over_replicas(placement, degrees, "gradients, over replicas")
    elif leaf.trained:
        yield from _sum_over_replicas(placement, degrees, "gradients of the replicated")


def _gathers(placement: Placement, reshard: bool | int, degrees: Mapping[str, int]) -> Iterator[Traffic]:
    """Yields the gathers for forward, and those for backward unless forward keeps the whole copy."""
    yield from _gather(placement, FORWARD, degrees)
    if reshard is True:
        yield from _gather(placement, BACKWARD, degrees)
    elif reshard is not False:
        # Pieces of the gathered copy, which is no longer packed, so `gather_wire` does not apply.
        yield Traffic("all-gather", (FSDP,), int(reshard), placement.gathered_dtype, placement.gathered_bytes, BACKWARD)


def _gather(placement: Placement, purpose: str, degrees: Mapping[str, int]) -> Iterator[Traffic]:
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
    num_shards = _gathered_elements(placement) // elements_of_shard  # of all layers
    arrays = []
    for packed in wire_named(wire).packed_types(shard, dtype, placement.dim_of_layer):
        size = packed.size * packed.dtype.itemsize
        arrays.append(_PackedArray(packed.dtype.name, size * num_shards))
    return arrays


def _reductions_to_shard(placement: Placement, degrees: Mapping[str, int]) -> Iterator[Traffic]:
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


def _sum_over_replicas(placement: Placement, degrees: Mapping[str, int], purpose: str) -> Iterator[Traffic]:
    """Yields the sum of gradients over the axes along which the stored parameter is the same, if there are any."""
    axes = copied_over(placement, degrees)
    if axes:
        num_replicas = degree_of(axes, degrees)
        shard_bytes = _gradient_bytes(placement, placement.reduce_dtype) // placement.degree
        yield Traffic("all-reduce", axes, num_replicas, placement.reduce_dtype, shard_bytes, purpose)


def _gathered_elements(placement: Placement) -> int:
    return placement.gathered_bytes // jnp.dtype(placement.gathered_dtype).itemsize


def _gradient_bytes(placement: Placement, dtype: str) -> int:
    """Returns the bytes of the gradient of the gathered copy in a dtype."""
    return _gathered_elements(placement) * jnp.dtype(dtype).itemsize
