"""Whole arrays on hosts: from the shards of all processes, and to them. A device holds one shard more at most."""

from __future__ import annotations

import collections
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
    values = np.asarray(block)
    result[slices_of(box)] = values[_from_start(box)]


def _waves(shards: Sequence[ShardBox], processes: Sequence[int]) -> list[list[ShardBox]]:
    """Returns the boxes that processes lack, in groups in which each device receives at most one."""
    waves: dict[int, list[ShardBox]] = collections.defaultdict(list)
    for process in processes:
        devices = _receivers(shards, process)
        for number, box in enumerate(_remote_boxes(shards, process)):
            wave, position = divmod(number, len(devices))
            waves[wave].append(ShardBox(devices[position], box))
    return [waves[wave] for wave in sorted(waves)]


def _remote_boxes(shards: Sequence[ShardBox], process: int) -> list[Limits]:
    """Returns the boxes that no device of a process holds, in an order on which all processes agree."""
    # A dict keeps the order of the shards; copies have one box.
    is_local: dict[Limits, bool] = {}
    for shard in shards:
        if size_of(shard.box):
            is_of_process = shard.device.process_index == process
            is_local[shard.box] = is_local.get(shard.box, False) or is_of_process
    return [box for box, has_box in is_local.items() if not has_box]


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
        devices = devices[:1]
    parts = _parts(box, len(devices))
    block_shape = shape_of(parts[0])
    blocks = {}
    if values is not None:
        for part, device in zip(parts, devices, strict=True):
            block = np.zeros(block_shape, values.dtype)
            # Beyond the end of a short part, the block stays zero.
            block[_from_start(part)] = values[_inside(part, box)]
            blocks[device] = jax.device_put(block, device)
    shards = [ShardBox(device, part) for device, part in zip(devices, parts, strict=True)]
    return shards, Blocks(block_shape, blocks)


def _parts(box: Limits, count: int) -> list[Limits]:
    """Cuts a box along its largest dim; the last parts may be shorter, or empty."""
    shape = shape_of(box)
    if count == 1:  # also a number, which has no dim to cut
        return [box]
    dim = shape.index(max(shape))
    box_start, box_stop = box[dim]
    step = max(1, math.ceil(shape[dim] / count))
    parts = []
    for number in range(count):
        start = min(box_start + number * step, box_stop)
        stop = min(start + step, box_stop)
        parts.append((*box[:dim], (start, stop), *box[dim + 1 :]))
    return parts


def _from_start(box: Limits) -> tuple[slice, ...]:
    """Returns the index of a box's values in a block that begins with them."""
    return tuple(slice(0, size) for size in shape_of(box))


def _inside(part: Limits, box: Limits) -> tuple[slice, ...]:
    """Returns the index of a part in the values of a box."""
    index = []
    for (start, stop), (box_start, _) in zip(part, box, strict=True):
        index.append(slice(start - box_start, stop - box_start))
    return tuple(index)
