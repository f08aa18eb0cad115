"""Which device sends which part of an array to which: the least bytes that make every target shard whole.

Example of one array of 8 rows, from 4 devices to 2 others:

    source shards   A: 0-2   B: 2-4   C: 4-6   D: 6-8
    target shards   E: 0-4            F: 4-8
    transfers       A->E 0-2, B->E 2-4, C->F 4-6, D->F 6-8

Everything here is computed from shardings alone, and in the same way by every process.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import jax
from jax.sharding import Sharding

from jshard.checkpoint.packed.layout import Limits, device_boxes, shape_of, size_of


@dataclasses.dataclass(frozen=True)
class ShardBox:
    """A box of an array that a device holds, or is to hold.

    Attributes:
        device: the device.
        box: the box in the array, without the padding that may be stored after it.
    """

    device: jax.Device  # pyright: ignore[reportInvalidTypeForm]
    box: Limits


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A box that is copied from one shard into another; both may be on the same device.

    Attributes:
        source: the shard that it is read from.
        target: the shard that it is written into.
        box: the box in the array.
    """

    source: ShardBox
    target: ShardBox
    box: Limits

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return shape_of(self.box)

    @property
    def is_local(self) -> bool:
        """Whether the bytes stay on their device."""
        return self.source.device == self.target.device


def shards_of(sharding: Sharding, stored_shape: tuple[int, ...], shape: tuple[int, ...]) -> list[ShardBox]:
    """Returns the shards of an array on all devices, of all processes, in the order of the devices' ids.

    Args:
        sharding: of the stored array.
        stored_shape: with padding.
        shape: without padding: boxes end where the array ends, and may be empty.
    """
    shards = []
    for device, stored_box in device_boxes(sharding, stored_shape).items():
        box = tuple((min(start, size), min(stop, size)) for (start, stop), size in zip(stored_box, shape, strict=True))
        shards.append(ShardBox(device, box))
    return sorted(shards, key=lambda shard: shard.device.id)


def plan_transfers(sources: Sequence[ShardBox], targets: Sequence[ShardBox]) -> list[Transfer]:
    """Returns the transfers that fill every target shard, each element once.

    Of several devices that hold the same box, a target takes it from itself, else from a device of its process, else
    from the device that has sent the least so far.

    Args:
        sources: shards whose boxes are equal or disjoint, and make up everything that the targets need.
        targets: shards to fill.
    """
    holders_by_box: dict[Limits, list[ShardBox]] = collections.defaultdict(list)
    for shard in sources:
        if size_of(shard.box):
            holders_by_box[shard.box].append(shard)
    # Elements, by the id of the device: with copies (HSDP), all would else come from the first holder.
    num_sent: collections.Counter[int] = collections.Counter()
    transfers = []
    for target in targets:
        for box, holders in holders_by_box.items():
            shared_box = intersection(box, target.box)
            if not size_of(shared_box):
                continue
            source = _nearest(holders, target, num_sent)
            transfers.append(Transfer(source, target, shared_box))
            if source.device != target.device:
                num_sent[source.device.id] += size_of(shared_box)
    return transfers


def _nearest(holders: Iterable[ShardBox], target: ShardBox, num_sent: collections.Counter[int]) -> ShardBox:
    """Returns the holder of a box from which a target takes it."""

    def distance(holder: ShardBox) -> tuple[bool, bool, int, int]:
        is_other_device = holder.device != target.device
        is_other_process = holder.device.process_index != target.device.process_index
        return is_other_device, is_other_process, num_sent[holder.device.id], holder.device.id

    return min(holders, key=distance)


def rounds_of(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    """Returns transfers in rounds that can each be one collective permute.

    In a round all boxes have the same shape, so that nothing is padded, and every device sends at most one and receives
    at most one. Local transfers have rounds of their own: they need no communication.
    """
    by_kind: dict[tuple[bool, tuple[int, ...]], list[Transfer]] = collections.defaultdict(list)
    for transfer in transfers:
        by_kind[transfer.is_local, transfer.shape].append(transfer)
    rounds = []
    for same_kind in by_kind.values():
        rounds += _without_conflicts(same_kind)
    return rounds


def _without_conflicts(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """Yields groups of transfers in which no device sends or receives twice, as many in each as come first."""
    waiting = list(transfers)
    while waiting:
        senders: set[int] = set()
        receivers: set[int] = set()
        group = []
        later = []
        for transfer in waiting:
            sender = transfer.source.device.id
            receiver = transfer.target.device.id
            if sender in senders or receiver in receivers:
                later.append(transfer)
                continue
            senders.add(sender)
            receivers.add(receiver)
            group.append(transfer)
        yield group
        waiting = later


def moved_elements(transfers: Iterable[Transfer]) -> int:
    """Returns the number of elements that leave their device."""
    return sum(size_of(transfer.box) for transfer in transfers if not transfer.is_local)


def least_elements(sources: Sequence[ShardBox], targets: Iterable[ShardBox]) -> int:
    """Returns the number of elements that targets need and do not hold already: no plan can move fewer."""
    boxes_of_device: dict[int, list[Limits]] = collections.defaultdict(list)
    for shard in sources:
        boxes_of_device[shard.device.id].append(shard.box)
    total = 0
    for target in targets:
        total += size_of(target.box)
        for box in boxes_of_device[target.device.id]:
            total -= size_of(intersection(box, target.box))
    return total


def intersection(first: Limits, second: Limits) -> Limits:
    """Returns the box that two boxes share; it may be empty."""
    shared = []
    for (first_start, first_stop), (second_start, second_stop) in zip(first, second, strict=True):
        start = max(first_start, second_start)
        stop = max(min(first_stop, second_stop), start)
        shared.append((start, stop))
    return tuple(shared)


def offset_in(box: Limits, outer: Limits) -> tuple[int, ...]:
    """Returns where a box begins inside another one."""
    return tuple(start - outer_start for (start, _), (outer_start, _) in zip(box, outer, strict=True))
