"""Whole arrays on hosts: from the shards of all processes, and to them. A device holds one shard more at most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jshard.checkpoint.packed.layout import Limits, shape_of, size_of, slices_of
from jshard.in_memory.exchange import Blocks, Device, blocks_of, exchange
from jshard.in_memory.transfers import ShardBox, plan_transfers, shards_of


def on_hosts(array: jax.Array, shape: tuple[int, ...], processes: Sequence[int]) -> np.ndarray | None:
    """Returns a whole array on the hosts of some processes; None in the others.

    What a process does not hold reaches it in waves: in each, every one of its devices receives at most one shard,
    which is copied to the host before the next wave.

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
            _write(result, box, block)
    block_shape = array.sharding.shard_shape(array.shape)
    # Also in processes that receive nothing: they send.
    for targets in _waves(shards, sorted(set(processes))):
        received = exchange(
            plan_transfers(shards, targets),
            blocks_of(array),
            Blocks(block_shape, {}),
            target_devices=[shard.device for shard in targets],
            dtype=array.dtype,
        )
        for shard in targets:
            block = received.by_device.get(shard.device)
            if block is not None and result is not None:
                _write(result, shard.box, block)
    return result


def _local_boxes(array: jax.Array, shards: Sequence[ShardBox]) -> dict[Limits, jax.Array]:
    """Returns the boxes of an array on devices of this process, each once."""
    box_of = {shard.device: shard.box for shard in shards}
    boxes = {}
    for shard in array.addressable_shards:
        box = box_of[shard.device]
        # A shard of padding alone has nothing to write.
        if size_of(box):
            boxes.setdefault(box, shard.data)
    return boxes


def _write(result: np.ndarray, box: Limits, block: jax.Array) -> None:
    """Writes a block, which may have padding at its end, into its box of an array."""
    without_padding = tuple(slice(0, size) for size in shape_of(box))
    result[slices_of(box)] = np.asarray(block)[without_padding]


def _waves(shards: Sequence[ShardBox], processes: Sequence[int]) -> list[list[ShardBox]]:
    """Returns the boxes that processes lack, in groups in which each device receives at most one."""
    # A dict keeps the order, on which all processes agree.
    all_boxes = dict.fromkeys(shard.box for shard in shards if size_of(shard.box))
    waves: list[list[ShardBox]] = []
    for process in processes:
        devices = _receivers(shards, process)
        local_boxes = {shard.box for shard in shards if shard.device.process_index == process}
        remote_boxes = [box for box in all_boxes if box not in local_boxes]
        for number, box in enumerate(remote_boxes):
            wave, position = divmod(number, len(devices))
            if wave == len(waves):
                waves.append([])
            waves[wave].append(ShardBox(devices[position], box))
    return waves


def _receivers(shards: Sequence[ShardBox], process: int) -> list[Device]:
    """Returns the devices of a process through which it receives: those of the array, else any."""
    devices = [shard.device for shard in shards if shard.device.process_index == process]
    return devices or devices_of(process, like=shards[0].device)


def devices_of(process: int, *, like: Device) -> list[Device]:
    """Returns the devices of a process that are of the same platform as another device."""
    return [device for device in jax.devices(like.platform) if device.process_index == process]


def spread(values: np.ndarray | None, box: Limits, devices: Sequence[Device]) -> tuple[list[ShardBox], Blocks]:
    """Cuts a box of an array along its largest dim into a part for each device of one process.

    Args:
        values: of the box, in the process of these devices; None in others.
        box: the box in the array.
        devices: of the process that has the values.

    Returns:
        The parts, of which the first is the largest, and the blocks that hold them, all of that shape.
    """
    shape = shape_of(box)
    if not shape:  # a number cannot be cut
        blocks = {} if values is None else {devices[0]: jax.device_put(values, devices[0])}
        return [ShardBox(devices[0], box)], Blocks((), blocks)
    dim = shape.index(max(shape))
    step = max(1, math.ceil(shape[dim] / len(devices)))
    block_shape = (*shape[:dim], step, *shape[dim + 1 :])
    shards = []
    blocks = {}
    for position, device in enumerate(devices):
        # Beyond the end of a short box, parts are empty.
        start = min(position * step, shape[dim])
        stop = min(start + step, shape[dim])
        shards.append(ShardBox(device, _shifted(box, dim, start, stop)))
        if values is not None:
            block = np.zeros(block_shape, values.dtype)
            # Views along the cut dim: what is written to one is in the block.
            np.moveaxis(block, dim, 0)[: stop - start] = np.moveaxis(values, dim, 0)[start:stop]
            blocks[device] = jax.device_put(block, device)
    return shards, Blocks(block_shape, blocks)


def _shifted(box: Limits, dim: int, start: int, stop: int) -> Limits:
    """Returns a range of a box along a dim, in which 0 is where the box begins."""
    begin = box[dim][0]
    return (*box[:dim], (begin + start, begin + stop), *box[dim + 1 :])
