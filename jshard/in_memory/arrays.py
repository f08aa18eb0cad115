"""Moves one array from a sharding to another, on the same devices or others; it is never whole on a device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jshard.checkpoint.formats.source import Box
from jshard.checkpoint.opened import cut
from jshard.checkpoint.packed.layout import limits, shape_of, slices_of
from jshard.in_memory.exchange import Blocks, blocks_of, exchange
from jshard.in_memory.hosts import devices_of, on_hosts, spread
from jshard.in_memory.transfers import Transfer, plan_transfers, shards_of
from jshard.plans.memories import HOST_KIND

CHUNK_BYTES = 128 << 20
"""Values of one host are sent in chunks of at most this size."""


def transfers_for(
    sharding: Sharding, stored_shape: tuple[int, ...], shape: tuple[int, ...], target: jax.ShapeDtypeStruct
) -> list[Transfer]:
    """Returns the transfers that move an array to the sharding of a target.

    Args:
        sharding: of the array.
        stored_shape: of the array, with its padding.
        shape: without the padding.
        target: with the shape that is to be stored, which may be padded otherwise.
    """
    assert target.sharding is not None
    sources = shards_of(sharding, stored_shape, shape)
    targets = shards_of(target.sharding, target.shape, shape)
    return plan_transfers(sources, targets)


def moved(array: jax.Array | jax.ShapeDtypeStruct, shape: tuple[int, ...], target: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array in the stored shape and the sharding of a target, in its own dtype; always a new array.

    Args:
        array: its devices may be others than those of the target. In a process that has none of them, its shape and
            sharding are enough.
        shape: of the array, without its padding.
        target: see `transfers_for`.
    """
    assert target.sharding is not None and array.sharding is not None
    if isinstance(array, jax.Array) and _platform(array.sharding) != _platform(target.sharding):
        # No collective has devices of two platforms.
        processes = {device.process_index for device in target.sharding.device_set}
        values = on_hosts(array, shape, sorted(processes))
        return placed(values, target, dtype=array.dtype)
    transfers = transfers_for(array.sharding, array.shape, shape, target)
    sources = blocks_of(array)
    target_devices = sorted(target.sharding.device_set, key=lambda device: device.id)
    target_block = target.sharding.shard_shape(target.shape)
    results = exchange(transfers, sources, Blocks(target_block, {}), target_devices=target_devices, dtype=array.dtype)
    return _assembled(results, target, array.dtype)


def placed(values: np.ndarray | None, target: jax.ShapeDtypeStruct, *, dtype: np.dtype) -> jax.Array:
    """Returns values that every process of the target has on its host, in the stored shape and sharding of a target."""
    assert target.sharding is not None

    def part(box: Box | None) -> np.ndarray:
        assert values is not None, "a process that holds a part has the values"
        return values if box is None else _with_padding(values, box, target.shape)

    return jax.make_array_from_callback(target.shape, target.sharding, part, dtype=dtype)


def _with_padding(values: np.ndarray, box: Box, stored_shape: tuple[int, ...]) -> np.ndarray:
    """Returns a box of the stored array, which has zeros beyond the end of the values."""
    limits_of_box = limits(box, stored_shape)
    part = values[slices_of(limits_of_box)]
    widths = []
    for size, part_size in zip(shape_of(limits_of_box), part.shape, strict=True):
        widths.append((0, size - part_size))
    has_padding = any(width for _, width in widths)
    return np.pad(part, widths) if has_padding else part


def sent_from(
    process: int,
    read: Callable[[Box], np.ndarray] | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    target: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Returns values that one process has on its host, in the stored shape and sharding of a target.

    Args:
        process: that has them.
        read: reads a box of them; None in other processes.
        shape: of the values.
        dtype: of the values.
        target: where they are to be.
    """
    assert target.sharding is not None
    targets = shards_of(target.sharding, target.shape, shape)
    senders = devices_of(process, like=targets[0].device)
    results = Blocks(target.sharding.shard_shape(target.shape), {})
    # In chunks: the devices of the sender hold no more than one beside their shards, however large the array is.
    for box in cut(shape, dtype.itemsize, CHUNK_BYTES):
        values = None if read is None else read(box)
        shards, blocks = spread(values, limits(box, shape), senders)
        results = exchange(
            plan_transfers(shards, targets),
            blocks,
            results,
            target_devices=[shard.device for shard in targets],
            dtype=dtype,
        )
    return _assembled(results, target, dtype)


def _assembled(results: Blocks, target: jax.ShapeDtypeStruct, dtype: np.dtype) -> jax.Array:
    """Returns an array that consists of the blocks on the devices of this process, in the memory of its target."""
    sharding = target.sharding
    assert sharding is not None
    # Blocks are exchanged between device memories, and copied to the host afterwards.
    is_on_host = sharding.memory_kind == HOST_KIND
    on_device = sharding
    if is_on_host and isinstance(sharding, NamedSharding):
        on_device = NamedSharding(sharding.mesh, sharding.spec)
    arrays = [results.by_device[device] for device in on_device.addressable_devices]
    array = jax.make_array_from_single_device_arrays(target.shape, on_device, arrays, dtype=dtype)
    return jax.device_put(array, sharding) if is_on_host else array


def _platform(sharding: Sharding) -> str:
    return next(iter(sharding.device_set)).platform
