"""Tensors that PyTorch keeps in shards: what a file of one rank holds of a `DTensor` or a `ShardedTensor`.

FSDP2 saves a `DTensor` as its local numbers, the mesh, and a placement for each axis. Which part of the tensor these
numbers are follows from the rank's coordinate. It may be several boxes: tensor parallelism cuts before FSDP does.
FSDP1 saves a `ShardedTensor`, whose shards have their offsets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.boxes import is_inside
from jshard.checkpoint.formats.source import FileRegion, damaged
from jshard.checkpoint.formats.torch_archive import TENSOR
from jshard.checkpoint.formats.torch_pickle import (
    DTYPES,
    MEMORY_FORMAT,
    PLAIN,
    Record,
    Sealed,
    Unpickled,
    records,
    sealed,
    short,
)
from jshard.checkpoint.manifest import is_shape
from jshard.errors import printable


class Sharded(Record):
    """A tensor in shards, as a pickle has it: its class, its arguments, and its state."""


class _DTensor(Record):
    """FSDP2's, and that of tensor parallelism."""


class _ShardedTensor(Record):
    """FSDP1's."""


class _Wrapper(Record):
    """The function that makes an empty tensor of these classes."""


class _ShardPlacement(Record):
    """A placement: the dim is cut into equal parts, but for the last ones."""


class _StridedPlacement(Record):
    """A placement: the dim is cut into some parts, and each of those as by `_ShardPlacement`."""


class _ReplicatePlacement(Record):
    """A placement: all have the whole."""


@sealed
def _from_type(rebuild: Any, kind: object, args: Unpickled, state: Unpickled) -> object:
    """`torch._tensor._rebuild_from_type_v2`, also of tensors in shards."""
    if rebuild is not _Wrapper:
        return TENSOR["torch._tensor", "_rebuild_from_type_v2"](rebuild, kind, args, state)
    return Sharded(kind, args, state)


_PROCESS_GROUP = Sealed.__new__(Sealed, "ProcessGroupState", (Record,), {})


@sealed
def _attribute(owner: object, name: object) -> object:
    """`getattr`, as a class inside of another is pickled; refuses anything else."""
    if owner is _ShardedTensor and name == "ProcessGroupState":
        return _PROCESS_GROUP
    return PLAIN["builtins", "getattr"](owner, name)


def _placements(module: str) -> dict[tuple[str, str], Any]:
    classes = {"Shard": _ShardPlacement, "_StridedShard": _StridedPlacement, "Replicate": _ReplicatePlacement}
    names = {(module, name): record for name, record in classes.items()}
    return names | records(module, "Partial", "_Partial")


_SHARDED = "torch.distributed._shard"
_DTENSOR_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
)
_DTENSOR_NAMES: dict[tuple[str, str], Any] = {
    **{(module, "DTensor"): _DTensor for module in _DTENSOR_MODULES},
    **_placements("torch.distributed.tensor.placement_types"),
    **_placements("torch.distributed._tensor.placement_types"),
    **records("torch.distributed.tensor._dtensor_spec", "DTensorSpec", "TensorMeta", "ShardOrderEntry"),
    **records("torch.distributed._tensor.placement_types", "DTensorSpec", "TensorMeta"),
    **records("torch.distributed.device_mesh", "DeviceMesh"),
    **records("torch.distributed._tensor.device_mesh", "DeviceMesh"),
    **records("torch.distributed._mesh_layout", "_MeshLayout", "_FlatLayout"),
}
_SHARDED_TENSOR_NAMES: dict[tuple[str, str], Any] = {
    (f"{_SHARDED}.sharded_tensor.api", "ShardedTensor"): _ShardedTensor,
    (f"{_SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): MEMORY_FORMAT,
    **records(f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata", "TensorProperties"),
    **records(f"{_SHARDED}.sharded_tensor.shard", "Shard"),
    **records(f"{_SHARDED}.metadata", "ShardMetadata"),
    **records(f"{_SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    **records(f"{_SHARDED}.sharding_spec.api", "EnumerableShardingSpec"),
    **records("torch.distributed.remote_device", "_remote_device"),
}
SHARDED: dict[tuple[str, str], Any] = {
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._utils", "_rebuild_wrapper_subclass"): _Wrapper,
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "getattr"): _attribute,
    **_DTENSOR_NAMES,
    **_SHARDED_TENSOR_NAMES,
}
"""The names of tensors in shards. Those of TENSOR are allowed with them."""


class StoredBox(NamedTuple):
    """A box of a tensor, in a file."""

    start: tuple[int, ...]
    region: FileRegion


class FilePart(NamedTuple):
    """What one file holds of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: np.dtype
    pieces: list[StoredBox]
    work: int  # steps taken to find them, which a few bytes of a pickle can ask for


_Range = tuple[int, int]
"""The start and stop of a part of a dim."""

_MAX_PIECES = 1024  # of a part; tensor parallelism makes as many as it has devices
_MAX_DEGREE = 1 << 20  # of an axis


def part_of(file: Path, name: str, sharded: Sharded) -> FilePart:
    """Returns what a file holds of a tensor, or raises if its shards do not fit their description."""
    kind, args, state = sharded.args
    shape, dtype = _described(file, name, args)
    work = 0
    if kind is _DTensor:
        pieces, work = _pieces_of_dtensor(file, name, shape, _fields(state))
    elif kind is _ShardedTensor:
        pieces = _pieces_of_sharded_tensor(file, name, state)
    else:
        raise _unknown(file, name, "it is of another class than DTensor and ShardedTensor.")
    for piece in pieces:
        region = piece.region
        if region.dtype != dtype or not is_inside(piece.start, region.shape, shape):
            tensor_is = f"{printable(name)} is {shape} {dtype}"
            shard_is = f"{region.shape} {region.dtype} at {piece.start}"
            raise damaged(file, f"{tensor_is}, and a shard of it {shard_is}.")
    return FilePart(shape, dtype, pieces, work + len(pieces))


def _described(file: Path, name: str, args: Unpickled) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype of the whole tensor: the arguments are its class, dtype, size, and others."""
    if isinstance(args, tuple) and len(args) > 2:
        _, dtype, size, *_ = args
        if is_shape(size) and isinstance(dtype, str) and dtype in DTYPES:
            return tuple(size), DTYPES[dtype]
    raise _unknown(file, name, f"its shape and dtype are not known: {short(args)}.")


def _fields(state: Unpickled) -> Mapping[object, Unpickled]:
    """Returns the fields of an object; its state is a dict, or with slots a pair with one."""
    if isinstance(state, tuple) and len(state) == 2:
        _, state = state
    if isinstance(state, dict):
        return state
    return {}


# ---- DTensor


def _pieces_of_dtensor(
    file: Path, name: str, shape: tuple[int, ...], fields: Mapping[object, Unpickled]
) -> tuple[list[StoredBox], int]:
    """Returns the boxes of the local numbers, and the work of finding them."""
    spec = fields.get("_spec")
    local = fields.get("_local_tensor")
    mesh = None
    if isinstance(spec, Record):
        mesh = spec.get("mesh")
    if not isinstance(spec, Record) or not isinstance(mesh, Record) or not isinstance(local, FileRegion):
        raise _unknown(file, name, "it has no local numbers, or no mesh.")
    coordinate = mesh.get("_coordinate_on_dim")
    if coordinate is None:
        return [], 0  # this rank is not in the mesh, and holds nothing
    axes = _axes(file, name, spec, mesh, coordinate)
    ranges, work = _local_ranges(file, name, shape, axes)
    return _pieces(file, name, ranges, local), work


class _Axis(NamedTuple):
    """An axis of a tensor's mesh, whose placement is not checked yet."""

    degree: int
    index: int  # of this rank
    placement: Unpickled


def _axes(file: Path, name: str, spec: Record, mesh: Record, coordinate: Unpickled) -> list[_Axis]:
    """Returns the axes of a mesh in their order, which is that of the cuts."""
    placements = spec.get("placements")
    degrees = _degrees(mesh)
    if not _are_indices(coordinate, degrees) or not isinstance(placements, tuple | list):
        raise _unknown(file, name, f"its mesh is {short(degrees)}, with this rank at {short(coordinate)}.")
    if len(placements) != len(degrees):
        raise _unknown(file, name, f"it has {len(placements)} placements on a mesh of {len(degrees)} axes.")
    _check_order(file, name, spec.get("shard_order"))
    axes = []
    for degree, index, placement in zip(degrees, coordinate, placements, strict=True):
        axes.append(_Axis(degree, index, placement))
    return axes


def _local_ranges(file: Path, name: str, shape: Sequence[int], axes: Sequence[_Axis]) -> tuple[list[list[_Range]], int]:
    """Returns the ranges of each dim that this rank holds, and the work of finding them."""
    ranges: list[list[_Range]] = [[(0, size)] for size in shape]
    work = 0
    for axis in axes:
        if isinstance(axis.placement, _ReplicatePlacement):
            continue
        dim, num_groups = _cut_of(file, name, axis.placement, len(shape))
        num_steps = num_groups * len(ranges[dim])
        if num_steps > _MAX_PIECES:
            raise _unknown(file, name, f"it is cut into {num_steps} parts on one device.")
        work += num_steps
        shares = _shares(_length(ranges[dim]), num_groups, axis)
        ranges[dim] = _ranges_of_shares(ranges[dim], shares)
    return ranges, work


def _degrees(mesh: Record) -> list[int]:
    """Returns the degrees of the axes of a mesh, as one of the versions of PyTorch stores them; else an empty list."""
    layout = mesh.get("_layout")
    if isinstance(layout, Record):
        return _degrees_of_layout(layout)
    ranks = mesh.get("mesh")
    if isinstance(ranks, FileRegion):
        return list(ranks.shape)
    return []


def _degrees_of_layout(layout: Record) -> list[int]:
    axes = layout.get("axes")
    if isinstance(axes, tuple | list):  # since 2.13
        return [_product(axis.get("shape")) for axis in axes if isinstance(axis, Record)]
    sizes = layout.get("shape")  # since 2.9; of several axes in one it is nested
    if isinstance(sizes, tuple | list):
        return [_product(size) for size in sizes]
    return [_product(sizes)]


def _product(sizes: Unpickled, levels: int = 8) -> int:
    """Returns the product of nested sizes; 0 if they are none, which no index is below."""
    if type(sizes) is int and 0 < sizes <= _MAX_DEGREE:
        return sizes
    if not isinstance(sizes, tuple | list) or not 0 < len(sizes) < levels:
        return 0
    product = math.prod(_product(size, levels - 1) for size in sizes)
    return min(product, _MAX_DEGREE)


def _are_indices(coordinate: Unpickled, degrees: Sequence[int]) -> bool:
    """Returns whether a coordinate is in a mesh of these degrees."""
    if not isinstance(coordinate, tuple | list) or not degrees or len(coordinate) != len(degrees):
        return False
    for index, degree in zip(coordinate, degrees, strict=True):
        if type(index) is not int or not 0 <= index < degree:
            return False
    return True


def _check_order(file: Path, name: str, order: Unpickled) -> None:
    """Raises `CheckpointError` if a dim is cut over the axes in another order than that of the mesh."""
    if order is None:
        return
    entries = order if isinstance(order, tuple | list) else [order]
    for entry in entries:
        axes = None
        if isinstance(entry, Record) and len(entry.args) == 2:
            _, axes = entry.args
        if not isinstance(axes, tuple | list) or not _are_ascending(axes):
            raise _unknown(file, name, f"it is cut in the order of devices {short(entry)}.")


def _are_ascending(axes: Sequence[Any]) -> bool:
    if any(type(axis) is not int for axis in axes):
        return False
    return list(axes) == sorted(axes)


def _cut_of(file: Path, name: str, placement: Unpickled, ndim: int) -> tuple[int, int]:
    """Returns the dim that a placement cuts, and the number of parts of the dim that it cuts each."""
    dim: Unpickled = None
    num_groups: Unpickled = 1
    if isinstance(placement, _ShardPlacement | _StridedPlacement):
        dim = placement.get("dim")
    if isinstance(placement, _StridedPlacement):
        num_groups = placement.get("split_factor")
    is_dim = type(dim) is int and -ndim <= dim < ndim
    is_count = type(num_groups) is int and 0 < num_groups <= _MAX_PIECES
    if not is_dim or not is_count:
        # Such as a partial sum, which no box of one file is a box of.
        raise _unknown(file, name, "it is a partial sum, or placed in a way that is not known.")
    return dim % ndim, num_groups


def _length(ranges: Sequence[_Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _shares(length: int, num_groups: int, axis: _Axis) -> list[_Range]:
    """Returns the ranges that this rank gets of so many numbers: a chunk of each group of them.

    As `torch.chunk`: the parts of a dim are equal, but the last ones may be smaller, or empty.
    """
    shares = []
    for group in range(num_groups):
        group_start, group_stop = _chunk(length, num_groups, group)
        start, stop = _chunk(group_stop - group_start, axis.degree, axis.index)
        shares.append((group_start + start, group_start + stop))
    return shares


def _chunk(length: int, count: int, index: int) -> _Range:
    """Returns the range of one of so many chunks."""
    chunk_size = -(-length // count)
    start = min(index * chunk_size, length)
    stop = min(start + chunk_size, length)
    return start, stop


def _ranges_of_shares(ranges: Sequence[_Range], shares: Sequence[_Range]) -> list[_Range]:
    """Returns shares of the numbers in some ranges of a dim, as ranges of that dim."""
    ranges_of_shares: list[_Range] = []
    for share_start, share_stop in shares:
        # A share counts the numbers in the ranges, which follow each other without the gaps between them.
        num_before = 0
        for start, stop in ranges:
            common_start = max(start, start + share_start - num_before)
            common_stop = min(stop, start + share_stop - num_before)
            if common_start < common_stop:
                ranges_of_shares.append((common_start, common_stop))
            num_before += stop - start
    return ranges_of_shares


def _pieces(file: Path, name: str, ranges: Sequence[Sequence[_Range]], local: FileRegion) -> list[StoredBox]:
    """Returns the boxes that local numbers are: one for each combination of ranges of the dims."""
    shape = tuple(map(_length, ranges))
    if 0 in shape:
        return []
    if local.shape != shape:
        raise damaged(file, f"{printable(name)} has local numbers of shape {local.shape}; by its mesh it is {shape}.")
    num_pieces = math.prod(map(len, ranges))
    if num_pieces > _MAX_PIECES:
        raise _unknown(file, name, f"it is in {num_pieces} parts on one device.")
    return [_piece(side_by_dim, local) for side_by_dim in itertools.product(*map(_sides, ranges))]


class _Side(NamedTuple):
    """A box along one dim."""

    start: int  # in the tensor
    local_start: int  # in the local numbers
    size: int


def _sides(ranges: Sequence[_Range]) -> list[_Side]:
    """Returns the ranges of a dim with their places in the local numbers, where they follow each other."""
    sides = []
    local_start = 0
    for start, stop in ranges:
        size = stop - start
        sides.append(_Side(start, local_start, size))
        local_start += size
    return sides


def _piece(side_by_dim: Sequence[_Side], local: FileRegion) -> StoredBox:
    offset = local.offset
    for side, stride in zip(side_by_dim, local.strides, strict=True):
        offset += side.local_start * stride
    start = tuple(side.start for side in side_by_dim)
    sizes = tuple(side.size for side in side_by_dim)
    region = local._replace(offset=offset, shape=sizes)
    return StoredBox(start, region)


# ---- ShardedTensor


def _pieces_of_sharded_tensor(file: Path, name: str, state: Unpickled) -> list[StoredBox]:
    """Returns the boxes of the shards, without empty ones; the state is a tuple that begins with their list."""
    shards = None
    if isinstance(state, tuple) and state:
        shards = state[0]
    if not isinstance(shards, list):
        raise _unknown(file, name, "it has no list of shards.")
    pieces = []
    for shard in shards:
        piece = _piece_of_shard(file, name, shard)
        if 0 not in piece.region.shape:
            pieces.append(piece)
    return pieces


def _piece_of_shard(file: Path, name: str, shard: Unpickled) -> StoredBox:
    """Returns the box of a shard: its tensor, and metadata with its place."""
    fields = _fields_of(shard)
    metadata = _fields_of(fields.get("metadata"))
    region = fields.get("tensor")
    start = _sizes(metadata.get("shard_offsets"))
    sizes = _sizes(metadata.get("shard_sizes"))
    if not isinstance(region, FileRegion) or start is None or sizes is None or len(start) != len(sizes):
        raise _unknown(file, name, "a shard has no numbers, or no place.")
    if region.shape != sizes:
        raise damaged(file, f"a shard of {printable(name)} has the shape {region.shape}, and should have {sizes}.")
    return StoredBox(start, region)


def _fields_of(item: Unpickled) -> Mapping[object, Unpickled]:
    """Returns the fields of an item of a pickle; none if it is no object."""
    if isinstance(item, Record):
        return _fields(item.state)
    return {}


def _sizes(numbers: Unpickled) -> tuple[int, ...] | None:
    """Returns offsets or sizes, which PyTorch has in a list; None if they are none."""
    if not isinstance(numbers, tuple | list):
        return None
    sizes = tuple(numbers)
    if not is_shape(sizes):
        return None
    return sizes


def _unknown(file: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        "A tensor in shards cannot be read.",
        where=[str(file), printable(name)],
        why=why,
        do="save it by torch.distributed.checkpoint.save(state, checkpoint_id=folder), whose folders are read;\n"
        "or save whole tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
    )
