"""Copies boxes between the shards of devices, of one process or several: collective permutes over all devices involved.

One program does all transfers of an array. Every process that has one of the devices calls it, with the same arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jshard.in_memory.transfers import Transfer, offset_in, rounds_of
from jshard.plans.memories import fetched

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]

_AXIS = "device"


@dataclasses.dataclass(frozen=True)
class _PermuteRound:
    """Transfers of boxes of one shape, at most one from each device and to each.

    Attributes:
        shape: of the boxes.
        pairs: sender and receiver of each box, by their position among the devices; empty if all are local.
        source_offsets: for each device where its box begins in its source block; zeros if it sends none.
        target_offsets: for each device where its box begins in its target block; zeros if it receives none.
        receives: for each device whether it receives a box.
    """

    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    source_offsets: tuple[tuple[int, ...], ...]
    target_offsets: tuple[tuple[int, ...], ...]
    receives: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The arrays of a program's devices: one of the same shape on each.

    Attributes:
        shape: of each block.
        by_device: the blocks on devices of this process.
    """

    shape: tuple[int, ...]
    by_device: Mapping[Device, jax.Array]


def exchange(
    transfers: Sequence[Transfer],
    sources: Blocks,
    targets: Blocks,
    *,
    target_devices: Sequence[Device],
    dtype: DTypeLike,
) -> Blocks:
    """Returns the target blocks with the transferred boxes written into them.

    Args:
        transfers: what to copy. Boxes are positions in the whole array, and a block begins where its shard's box does.
        sources: the blocks that are read. On a device without one, nothing is read.
        targets: the blocks that are written; their memory is reused. On a device without one, it begins as zeros.
        target_devices: the devices, of all processes, for which there is a result.
        dtype: of all blocks.
    """
    devices = _devices_of(transfers, target_devices)
    mesh = Mesh(np.array(devices), _AXIS)
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    if not local_devices:
        return Blocks(targets.shape, {})
    run = _program(mesh, _numbered(transfers, devices))
    # A mesh of the caller may be active, under which jax would refuse this program.
    source = _joined(sources, mesh, local_devices, dtype)
    target = _joined(targets, mesh, local_devices, dtype)
    with jax.set_mesh(mesh):
        result = run(target, source)
    blocks = {}
    for shard in result.addressable_shards:
        if shard.device in target_devices:
            blocks[shard.device] = _reshaped(shard.data, targets.shape, shard.device)
    return Blocks(targets.shape, blocks)


def blocks_of(array: jax.Array | jax.ShapeDtypeStruct) -> Blocks:
    """Returns the shards of an array on devices of this process, in device memory."""
    assert array.sharding is not None
    block_shape = array.sharding.shard_shape(array.shape)
    if isinstance(array, jax.ShapeDtypeStruct):
        assert not array.sharding.addressable_devices, "a process that holds a part has the array"
        return Blocks(block_shape, {})
    return Blocks(block_shape, {shard.device: shard.data for shard in fetched(array).addressable_shards})


def _devices_of(transfers: Sequence[Transfer], target_devices: Sequence[Device]) -> list[Device]:
    """Returns all devices involved, in an order on which all processes agree."""
    # Without an order of their own, processes would compile different programs, and wait for each other for ever.
    devices = set(target_devices)
    for transfer in transfers:
        devices |= {transfer.source.device, transfer.target.device}
    return sorted(devices, key=lambda device: device.id)


def _numbered(transfers: Sequence[Transfer], devices: Sequence[Device]) -> tuple[_PermuteRound, ...]:
    """Returns the rounds of a program, with devices by their position."""
    position_of = {device: position for position, device in enumerate(devices)}
    rounds = []
    for group in rounds_of(transfers):
        shape = _lifted(group[0].shape)
        nowhere: tuple[int, ...] = (0,) * len(shape)
        source_offsets: list[tuple[int, ...]] = [nowhere] * len(devices)
        target_offsets: list[tuple[int, ...]] = [nowhere] * len(devices)
        receives = [False] * len(devices)
        pairs = []
        for transfer in group:
            sender = position_of[transfer.source.device]
            receiver = position_of[transfer.target.device]
            source_offsets[sender] = offset_in(transfer.box, transfer.source.box) or nowhere
            target_offsets[receiver] = offset_in(transfer.box, transfer.target.box) or nowhere
            receives[receiver] = True
            if not transfer.is_local:
                pairs.append((sender, receiver))
        rounds.append(_PermuteRound(shape, tuple(pairs), tuple(source_offsets), tuple(target_offsets), tuple(receives)))
    return tuple(rounds)


def _joined(blocks: Blocks, mesh: Mesh, local_devices: Sequence[Device], dtype: DTypeLike) -> jax.Array:
    """Returns the blocks of all devices as one array, which is split over the devices along its first dim."""
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    block_shape = _lifted(blocks.shape)
    shape = (mesh.size * block_shape[0], *block_shape[1:])
    lacking = [device for device in local_devices if device not in blocks.by_device]
    by_device = dict(blocks.by_device)
    if lacking or len(local_devices) < mesh.size:
        # In every process: it is one program for all devices. Whether another process lacks one is not known here.
        with jax.set_mesh(mesh):
            zeros = _zeros(shape, jnp.dtype(dtype), sharding)()
        for shard in zeros.addressable_shards:
            by_device.setdefault(shard.device, shard.data)
    arrays = [_reshaped(by_device[device], block_shape, device) for device in local_devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _reshaped(block: jax.Array, shape: tuple[int, ...], device: Device) -> jax.Array:
    """Returns a number as an array of one element, or the reverse; a larger block as it is."""
    if block.shape == shape:
        return block
    # Through the host: under a mesh of the caller, jax would not compute with an array on one device.
    return jax.device_put(np.asarray(block).reshape(shape), device)


def _lifted(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape of at least one dim: blocks are joined along the first, and a number has none."""
    return shape or (1,)


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


# Cached, because the layers of a model have few shapes and shardings, and weights may be moved every few steps.
@functools.lru_cache(maxsize=1024)
def _program(mesh: Mesh, rounds: tuple[_PermuteRound, ...]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the program of some rounds, which jax compiles for each shape and dtype of blocks."""

    def run(target: jax.Array, source: jax.Array) -> jax.Array:
        for each in rounds:
            target = _with_round(target, source, each)
        return target

    spec = PartitionSpec(_AXIS)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    # Only the target: the source is the user's state, which stays.
    return jax.jit(mapped, donate_argnums=0)


def _with_round(target: jax.Array, source: jax.Array, current: _PermuteRound) -> jax.Array:
    """Returns this device's target block after one round."""
    position = lax.axis_index(_AXIS)
    source_offset = jnp.array(current.source_offsets, jnp.int32)[position]
    target_offset = jnp.array(current.target_offsets, jnp.int32)[position]
    piece = lax.dynamic_slice(source, tuple(source_offset), current.shape)
    if current.pairs:
        piece = lax.ppermute(piece, _AXIS, current.pairs)
    # Every device runs this: one that receives nothing writes what is there already.
    unchanged = lax.dynamic_slice(target, tuple(target_offset), current.shape)
    piece = jnp.where(jnp.array(current.receives)[position], piece, unchanged)
    return lax.dynamic_update_slice(target, piece, tuple(target_offset))
