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
SHARDED: dict[tuple[str, str], Any] = {
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._utils", "_rebuild_wrapper_subclass"): _Wrapper,
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "getattr"): _attribute,
    **{(module, "DTensor"): _DTensor for module in _DTENSOR_MODULES},
    **_placements("torch.distributed.tensor.placement_types"),
    **_placements("torch.distributed._tensor.placement_types"),
    **records("torch.distributed.tensor._dtensor_spec", "DTensorSpec", "TensorMeta", "ShardOrderEntry"),
    **records("torch.distributed._tensor.placement_types", "DTensorSpec", "TensorMeta"),
    **records("torch.distributed.device_mesh", "DeviceMesh"),
    **records("torch.distributed._tensor.device_mesh", "DeviceMesh"),
    **records("torch.distributed._mesh_layout", "_MeshLayout", "_FlatLayout"),
    (f"{_SHARDED}.sharded_tensor.api", "ShardedTensor"): _ShardedTensor,
    (f"{_SHARDED}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): MEMORY_FORMAT,
    **records(f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata", "TensorProperties"),
    **records(f"{_SHARDED}.sharded_tensor.shard", "Shard"),
    **records(f"{_SHARDED}.metadata", "ShardMetadata"),
    **records(f"{_SHARDED}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    **records(f"{_SHARDED}.sharding_spec.api", "EnumerableShardingSpec"),
    **records("torch.distributed.remote_device", "_remote_device"),
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
        if region.dtype != dtype or not _is_inside(piece, shape):
            is_at = f"{region.shape} {region.dtype} at {piece.start}"
            raise damaged(file, f"{printable(name)} is {shape} {dtype}, and a shard of it {is_at}.")
    return FilePart(shape, dtype, pieces, work + len(pieces))


def _is_inside(piece: StoredBox, shape: tuple[int, ...]) -> bool:
    if len(piece.start) != len(shape):
        return False
    dims = zip(piece.start, piece.region.shape, shape, strict=True)
    return all(start + size <= dim_size for start, size, dim_size in dims)


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
        state = state[1]
    return state if isinstance(state, dict) else {}


# ---- DTensor


def _pieces_of_dtensor(
    file: Path, name: str, shape: tuple[int, ...], fields: Mapping[object, Unpickled]
) -> tuple[list[StoredBox], int]:
    """Returns the boxes of the local numbers, and the work of finding them."""
    spec = fields.get("_spec")
    local = fields.get("_local_tensor")
    mesh = spec.get("mesh") if isinstance(spec, Record) else None
    if not isinstance(spec, Record) or not isinstance(mesh, Record) or not isinstance(local, FileRegion):
        raise _unknown(file, name, "it has no local numbers, or no mesh.")
    coordinate = mesh.get("_coordinate_on_dim")
    if coordinate is None:
        return [], 0  # this rank is not in the mesh, and holds nothing
    placements = spec.get("placements")
    degrees = _degrees(mesh)
    if not _are_indices(coordinate, degrees) or not isinstance(placements, tuple | list):
        raise _unknown(file, name, f"its mesh is {short(degrees)}, with this rank at {short(coordinate)}.")
    if len(placements) != len(degrees):
        raise _unknown(file, name, f"it has {len(placements)} placements on a mesh of {len(degrees)} axes.")
    _check_order(file, name, spec.get("shard_order"))
    ranges: list[list[_Range]] = [[(0, size)] for size in shape]
    work = 0
    for placement, degree, index in zip(placements, degrees, coordinate, strict=True):
        if isinstance(placement, _ReplicatePlacement):
            continue
        dim, num_groups = _cut_of(file, name, placement, len(shape))
        num_steps = num_groups * len(ranges[dim])
        if num_steps > _MAX_PIECES:
            raise _unknown(file, name, f"it is cut into {num_steps} parts on one device.")
        work += num_steps
        shares = _shares(_length(ranges[dim]), num_groups, degree, index)
        ranges[dim] = _taken(ranges[dim], shares)
    return _pieces(file, name, ranges, local), work


def _degrees(mesh: Record) -> list[int]:
    """Returns the degrees of the axes of a mesh, as one of the versions of PyTorch stores them; else an empty list."""
    layout = mesh.get("_layout")
    ranks = mesh.get("mesh")
    if isinstance(layout, Record):
        axes = layout.get("axes")
        if isinstance(axes, tuple | list):  # since 2.13
            return [_product(axis.get("shape")) for axis in axes if isinstance(axis, Record)]
        shape = layout.get("shape")  # since 2.9; of several axes in one it is nested
        return [_product(size) for size in shape] if isinstance(shape, tuple | list) else [_product(shape)]
    if isinstance(ranks, FileRegion):
        return list(ranks.shape)
    return []


def _product(sizes: Unpickled, levels: int = 8) -> int:
    """Returns the product of nested sizes; 0 if they are none, which no index is below."""
    if type(sizes) is int and 0 < sizes <= _MAX_DEGREE:
        return sizes
    if not isinstance(sizes, tuple | list) or not 0 < len(sizes) < levels:
        return 0
    return min(math.prod(_product(size, levels - 1) for size in sizes), _MAX_DEGREE)


def _are_indices(coordinate: Unpickled, degrees: Sequence[int]) -> bool:
    """Returns whether a coordinate is in a mesh of these degrees."""
    if not isinstance(coordinate, tuple | list) or not degrees or len(coordinate) != len(degrees):
        return False
    return all(type(index) is int and 0 <= index < degree for index, degree in zip(coordinate, degrees, strict=True))


def _check_order(file: Path, name: str, order: Unpickled) -> None:
    """Raises `CheckpointError` if a dim is cut over the axes in another order than that of the mesh."""
    if order is None:
        return
    entries = order if isinstance(order, tuple | list) else [order]
    for entry in entries:
        axes = entry.args[1] if isinstance(entry, Record) and len(entry.args) == 2 else None
        if not isinstance(axes, tuple | list) or not _are_ascending(axes):
            raise _unknown(file, name, f"it is cut in the order of devices {short(entry)}.")


def _are_ascending(axes: Sequence[object]) -> bool:
    numbers = [axis for axis in axes if type(axis) is int]
    return len(numbers) == len(axes) and numbers == sorted(numbers)


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


def _shares(length: int, num_groups: int, degree: int, index: int) -> list[_Range]:
    """Returns the ranges, in a dim of this length, that the device with this index gets.

    As `torch.chunk`: the parts of a dim are equal, but the last ones may be smaller, or empty.
    """
    shares = []
    for start, stop in (_chunk(length, num_groups, group) for group in range(num_groups)):
        first, last = _chunk(stop - start, degree, index)
        shares.append((start + first, start + last))
    return shares


def _chunk(length: int, count: int, index: int) -> _Range:
    """Returns the range of one of so many chunks."""
    chunk = -(-length // count)
    return min(index * chunk, length), min((index + 1) * chunk, length)


def _taken(ranges: Sequence[_Range], shares: Sequence[_Range]) -> list[_Range]:
    """Returns shares of the numbers in some ranges, as ranges of the same dim."""
    taken: list[_Range] = []
    for low, high in shares:
        passed = 0
        for start, stop in ranges:
            first = max(low - passed, 0)
            last = min(high - passed, stop - start)
            if first < last:
                taken.append((start + first, start + last))
            passed += stop - start
    return taken


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
    pieces = []
    for boxes in itertools.product(*map(_placed, ranges)):
        offset = local.offset
        for (_, at, _), stride in zip(boxes, local.strides, strict=True):
            offset += at * stride
        start = tuple(box[0] for box in boxes)
        sizes = tuple(box[2] for box in boxes)
        pieces.append(StoredBox(start, local._replace(offset=offset, shape=sizes)))
    return pieces


def _placed(ranges: Sequence[_Range]) -> list[tuple[int, int, int]]:
    """Returns for each range where it begins in the tensor, and in the local numbers, and its size."""
    placed = []
    at = 0
    for start, stop in ranges:
        placed.append((start, at, stop - start))
        at += stop - start
    return placed


# ---- ShardedTensor


def _pieces_of_sharded_tensor(file: Path, name: str, state: Unpickled) -> list[StoredBox]:
    shards = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(shards, list):
        raise _unknown(file, name, "it has no list of shards.")
    pieces = []
    for shard in shards:
        fields = _fields(shard.state) if isinstance(shard, Record) else {}
        region = fields.get("tensor")
        metadata = fields.get("metadata")
        box = _fields(metadata.state) if isinstance(metadata, Record) else {}
        start = _sizes(box.get("shard_offsets"))
        sizes = _sizes(box.get("shard_sizes"))
        if not isinstance(region, FileRegion) or start is None or sizes is None or len(start) != len(sizes):
            raise _unknown(file, name, "a shard has no numbers, or no place.")
        if region.shape != sizes:
            raise damaged(file, f"a shard of {printable(name)} has the shape {region.shape}, and should have {sizes}.")
        if 0 not in region.shape:
            pieces.append(StoredBox(start, region))
    return pieces


def _sizes(numbers: Unpickled) -> tuple[int, ...] | None:
    """Returns offsets or sizes, which PyTorch has in a list; None if they are none."""
    sizes = tuple(numbers) if isinstance(numbers, tuple | list) else None
    return sizes if is_shape(sizes) else None


def _unknown(file: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        "A tensor in shards cannot be read.",
        where=[str(file), printable(name)],
        why=why,
        do="save it by torch.distributed.checkpoint.save(state, checkpoint_id=folder), whose folders are read;\n"
        "or save whole tensors: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
    )
