"""Moves one array: to another sharding, to the hosts, or from the host of one process. Nothing is whole on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jshard.checkpoint.formats.source import Box
from jshard.checkpoint.opened import cut
from jshard.checkpoint.packed.layout import Limits, limits, size_of
from jshard.in_memory.exchange import Blocks, Device, exchange
from jshard.in_memory.transfers import ShardBox, Transfer, plan_transfers, shape_of, shards_of
from jshard.plans.memories import HOST_KIND, fetched

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
        processes = {device.process_index for device in target.sharding.device_set}
        values = on_hosts(array, shape, sorted(processes))
        return placed(values, target, dtype=array.dtype)
    transfers = transfers_for(array.sharding, array.shape, shape, target)
    sources = _blocks(array)
    target_devices = sorted(target.sharding.device_set, key=lambda device: device.id)
    target_block = target.sharding.shard_shape(target.shape)
    results = exchange(transfers, sources, Blocks(target_block, {}), target_devices=target_devices, dtype=array.dtype)
    return _assembled(results, target, array.dtype)


def placed(values: np.ndarray | None, target: jax.ShapeDtypeStruct, *, dtype: np.dtype) -> jax.Array:
    """Returns values that every process of the target has on its host, in the stored shape and sharding of a target."""
    sharding = target.sharding
    assert sharding is not None

    def part(box: Box | None) -> np.ndarray:
        assert values is not None
        if box is None:
            return values
        inside = tuple(slice(*each.indices(size)) for each, size in zip(box, target.shape, strict=True))
        result = values[inside]
        widths = []
        for each, size in zip(inside, result.shape, strict=True):
            widths.append((0, each.stop - each.start - size))
        # Beyond the end of the values is the padding of the target.
        return np.pad(result, widths) if any(width for _, width in widths) else result

    return jax.make_array_from_callback(target.shape, sharding, part, dtype=dtype)


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
    senders = _devices_of_process(process, like=targets[0].device)
    target_devices = [shard.device for shard in targets]
    results = Blocks(target.sharding.shard_shape(target.shape), {})
    for box in cut(shape, dtype.itemsize, CHUNK_BYTES):
        chunk = limits(box, shape)
        shards = _spread(chunk, senders)
        block_shape = shape_of(shards[0].box)
        blocks = {}
        if read is not None:
            values = read(box)
            for shard in shards:
                blocks[shard.device] = jax.device_put(_block_of(values, chunk, shard.box, block_shape), shard.device)
        transfers = plan_transfers(shards, targets)
        results = exchange(transfers, Blocks(block_shape, blocks), results, target_devices=target_devices, dtype=dtype)
    return _assembled(results, target, dtype)


def on_hosts(array: jax.Array, shape: tuple[int, ...], processes: Sequence[int]) -> np.ndarray | None:
    """Returns a whole array on the hosts of some processes; None in the others.

    A device holds at most one shard of another device beside its own at a time.

    Args:
        array: every process that has a part of it, and every one of `processes`, calls this.
        shape: of the array, without its padding.
        processes: that get the values.
    """
    shards = shards_of(array.sharding, array.shape, shape)
    result = None
    if jax.process_index() in processes:
        result = np.empty(shape, array.dtype)
        for box, block in _local_boxes(array, shards).items():
            _write(result, box, np.asarray(block))
    block_shape = array.sharding.shard_shape(array.shape)
    for targets in _waves(shards, sorted(set(processes))):
        transfers = plan_transfers(shards, targets)
        target_devices = [shard.device for shard in targets]
        received = exchange(
            transfers, _blocks(array), Blocks(block_shape, {}), target_devices=target_devices, dtype=array.dtype
        )
        if result is None:
            continue
        for shard in targets:
            if shard.device in received.by_device:
                _write(result, shard.box, np.asarray(received.by_device[shard.device]))
    return result


def _waves(shards: Sequence[ShardBox], processes: Sequence[int]) -> list[list[ShardBox]]:
    """Returns the boxes that processes lack, in groups in which each device receives at most one."""
    waves: list[list[ShardBox]] = []
    all_boxes = list(dict.fromkeys(shard.box for shard in shards if size_of(shard.box)))
    for process in processes:
        local_boxes = {shard.box for shard in shards if shard.device.process_index == process}
        devices = [shard.device for shard in shards if shard.device.process_index == process]
        if not devices:
            devices = _devices_of_process(process, like=shards[0].device)
        remote_boxes = [box for box in all_boxes if box not in local_boxes]
        for number, box in enumerate(remote_boxes):
            wave = number // len(devices)
            if wave == len(waves):
                waves.append([])
            waves[wave].append(ShardBox(devices[number % len(devices)], box))
    return waves


def _local_boxes(array: jax.Array, shards: Sequence[ShardBox]) -> dict[Limits, jax.Array]:
    """Returns the boxes of an array on devices of this process, each once."""
    box_of = {shard.device: shard.box for shard in shards}
    boxes = {}
    for shard in array.addressable_shards:
        box = box_of[shard.device]
        if size_of(box):
            boxes.setdefault(box, shard.data)
    return boxes


def _write(result: np.ndarray, box: Limits, block: np.ndarray) -> None:
    """Writes a block, which may have padding at its end, into its box of an array."""
    without_padding = block[tuple(slice(0, size) for size in shape_of(box))]
    result[tuple(slice(start, stop) for start, stop in box)] = without_padding


def _spread(box: Limits, devices: Sequence[Device]) -> list[ShardBox]:
    """Returns a box cut along its largest dim into a part for each device; the first is the largest."""
    shape = shape_of(box)
    if not shape:
        return [ShardBox(devices[0], box)]
    dim = max(range(len(shape)), key=lambda each: shape[each])
    start, stop = box[dim]
    step = max(1, math.ceil((stop - start) / len(devices)))
    shards = []
    for position, device in enumerate(devices):
        part_start = min(start + position * step, stop)
        part = (part_start, min(part_start + step, stop))
        shards.append(ShardBox(device, (*box[:dim], part, *box[dim + 1 :])))
    return shards


def _block_of(values: np.ndarray, chunk: Limits, box: Limits, block_shape: tuple[int, ...]) -> np.ndarray:
    """Returns a box of a chunk's values, filled up to the shape of a block."""
    in_chunk = []
    for (start, stop), (chunk_start, _) in zip(box, chunk, strict=True):
        in_chunk.append(slice(start - chunk_start, stop - chunk_start))
    block = np.zeros(block_shape, values.dtype)
    block[tuple(slice(0, size) for size in shape_of(box))] = values[tuple(in_chunk)]
    return block


def _assembled(results: Blocks, target: jax.ShapeDtypeStruct, dtype: np.dtype) -> jax.Array:
    """Returns an array that consists of the blocks on the devices of this process, in the memory of its target."""
    sharding = target.sharding
    assert sharding is not None
    is_on_host = sharding.memory_kind == HOST_KIND
    on_device = sharding
    if is_on_host and isinstance(sharding, NamedSharding):
        on_device = NamedSharding(sharding.mesh, sharding.spec)
    arrays = [results.by_device[device] for device in on_device.addressable_devices]
    array = jax.make_array_from_single_device_arrays(target.shape, on_device, arrays, dtype=dtype)
    return jax.device_put(array, sharding) if is_on_host else array


def _blocks(array: jax.Array | jax.ShapeDtypeStruct) -> Blocks:
    """Returns the shards of an array on devices of this process, in device memory."""
    assert array.sharding is not None
    block_shape = array.sharding.shard_shape(array.shape)
    if isinstance(array, jax.ShapeDtypeStruct):
        assert not array.sharding.addressable_devices, "a process that holds a part has the array"
        return Blocks(block_shape, {})
    return Blocks(block_shape, {shard.device: shard.data for shard in fetched(array).addressable_shards})


def _devices_of_process(process: int, *, like: Device) -> list[Device]:
    """Returns the devices of a process that are of the same platform as another device."""
    return [device for device in jax.devices(like.platform) if device.process_index == process]


def _platform(sharding: Sharding) -> str:
    return next(iter(sharding.device_set)).platform
