"""Gradients that are yet to be reduced, as barriers and loops hold them, and the parts in which they are reduced."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from jshard.engine.rules import PARTIAL, Shard, Value
from jshard.engine.rules.values import array_bytes
from jshard.engine.stored import HeldOrder

REDUCED_ALONE_BYTES = 2**30
"""XLA reduces each gradient of as many bytes alone; tied one behind the other, they would only be later."""


# A tree whose one leaf is the array, so that a barrier takes and returns gradients as they are.
@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["order", "dtype", "shard"])
@dataclasses.dataclass(frozen=True)
class HeldGradient:
    """One device's part of a gradient that is yet to be reduced, as barriers and the carries of loops hold it.

    Attributes:
        array: the part, in the dtype that it was computed in.
        order: that of its dims.
        dtype: the dtype in which it is stored. It is cast to that before it is reduced.
        shard: how it is stored.
    """

    array: jax.Array
    order: HeldOrder
    dtype: np.dtype
    shard: Shard

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return array_bytes(self.array)

    def uncast(self) -> Value:
        """Returns the part as a value, in the dtype that it was computed in."""
        return Value(self.order.restored(self.array), PARTIAL)

    def unreduced(self) -> Value:
        """Returns the part as a value, in the dtype in which it is stored."""
        return self.uncast().in_dtype(self.dtype)


def reduction_parts(gradients: Sequence[HeldGradient], part_bytes: int | None) -> list[list[int]]:
    """Returns the positions of gradients in the parts in which they are reduced, the largest gradients first.

    Args:
        gradients: of one unit.
        part_bytes: the least bytes of each part but the last; None for one part.
    """
    in_own_order = list(range(len(gradients)))
    largest_bytes = max((gradient.num_bytes for gradient in gradients), default=0)
    if part_bytes is None or largest_bytes >= REDUCED_ALONE_BYTES:
        return [in_own_order]
    parts: list[list[int]] = []
    bytes_of_part = part_bytes
    for position in sorted(in_own_order, key=lambda position: gradients[position].num_bytes, reverse=True):
        if bytes_of_part >= part_bytes:
            parts.append([])
            bytes_of_part = 0
        parts[-1].append(position)
        bytes_of_part += gradients[position].num_bytes
    # One part is reduced by the function that reduces other units like it.
    return parts if len(parts) > 1 else [in_own_order]
