"""What a plan sends: the collectives of one step of training, leaf by leaf, before anything is compiled."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from jshard._mesh import DATA_AXES, FSDP
from jshard._placement import Placement, axes_of
from jshard._shard_plan import LeafPlan, ShardPlan
from jshard.inspect.hlo import KINDS, ring_bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step.

    Args:
        kind: `all-gather`, `reduce-scatter` or `all-reduce`.
        axes: the mesh axes that it runs over.
        group_size: devices of a group.
        dtype: dtype on the wire.
        full_bytes: bytes of the whole arrays, before they are split over the group.
        purpose: what it is for.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    full_bytes: int
    purpose: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, by the ring algorithm."""
        return ring_bytes(self.kind, self.full_bytes, self.group_size)


def traffic_of(plan: ShardPlan) -> tuple[Traffic, ...]:
    """The collectives of one forward and backward pass as the plan asks for them.

    A compiler leaves out the second gather of a parameter that backward does not need, such as most biases. For units
    that are never gathered nothing is asked.
    """
    sums: dict[Traffic, int] = collections.defaultdict(int)
    reshard = {unit.name: unit.reshard_after_forward for unit in plan.units}
    for leaf in plan.leaves:
        for one in _of_leaf(leaf, leaf.by_layer or reshard[leaf.unit], dict(plan.mesh)):
            sums[dataclasses.replace(one, full_bytes=0)] += one.full_bytes
    found = [dataclasses.replace(one, full_bytes=total) for one, total in sums.items()]
    return tuple(sorted(found, key=lambda one: (KINDS.index(one.kind), len(one.axes))))


def _of_leaf(leaf: LeafPlan, reshard: bool | int, degrees: dict[str, int]) -> Iterator[Traffic]:
    placement = leaf.placement
    if not placement.gathered:
        return  # what it sends is the model's own
    fsdp, same = degrees[FSDP], copied_over(placement, degrees)
    num_same = math.prod(degrees[a] for a in same)
    reduce, gather = placement.reduce_dtype, placement.gathered_dtype
    full = placement.gathered_bytes
    reduced = full // jnp.dtype(gather).itemsize * jnp.dtype(reduce).itemsize
    if placement.dim is None:
        if same and leaf.trained:
            yield Traffic("all-reduce", same, num_same, reduce, reduced, "gradients of the replicated")
        return
    yield Traffic("all-gather", (FSDP,), fsdp, gather, full, "parameters for forward")
    if reshard is not False:
        size = fsdp if reshard is True else int(reshard)
        yield Traffic("all-gather", (FSDP,), size, gather, full, "parameters for backward")
    if not leaf.trained:
        return
    yield Traffic("reduce-scatter", (FSDP,), fsdp, reduce, reduced, "gradients")
    if same:
        yield Traffic("all-reduce", same, num_same, reduce, reduced // fsdp, "gradients, over replicas")


def copied_over(placement: Placement, degrees: Mapping[str, int]) -> tuple[str, ...]:
    """The data axes along which the stored shard is the same."""
    on = {name for entry in placement.spec for name in axes_of(entry)}
    return tuple(axis for axis in DATA_AXES if degrees.get(axis, 1) > 1 and axis not in on)
