"""Writes what `torch.save` writes, without PyTorch: archives, the format before them, and tensors in shards."""

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jshard.checkpoint.formats.torch_archive import STORAGES
from jshard.checkpoint.formats.torch_writer import (
    PickledCall,
    PickledGlobal,
    PickledObject,
    pickled,
    rebuilt,
    write_archive,
)

MAGIC = 0x1950A86A20F9469CFC6C
SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


@dataclasses.dataclass
class View:
    """A tensor that is a view of an array's numbers: an offset in numbers, a shape and strides."""

    base: np.ndarray
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    metadata: Any = None


class _Storages:
    """The arrays that a file holds, each once."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def described(self, value: Any) -> Any:
        """A value with the calls that rebuild the tensors in it."""
        if isinstance(value, np.ndarray):
            strides = tuple(step // value.itemsize for step in value.strides)
            return self._tensor(View(_base(value), 0, value.shape, strides))
        if isinstance(value, View):
            return self._tensor(value)
        if isinstance(value, PickledCall):
            return PickledCall(value.function, tuple(map(self.described, value.args)))
        if isinstance(value, PickledObject):
            return PickledObject(value.kind, self.described(value.state))
        if isinstance(value, dict):
            return type(value)((key, self.described(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(map(self.described, value))
        return value

    def _tensor(self, view: View) -> PickledCall:
        number = next((n for n, array in enumerate(self.arrays) if array is view.base), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(view.base)
        call = rebuilt(view.base)
        storage, _, _, _, *rest = call.args
        kind, name, _, device, size = storage.key
        storage = storage._replace(key=(kind, name, str(number), device, size))
        metadata = [] if view.metadata is None else [view.metadata]
        return call._replace(args=(storage, view.offset, view.shape, view.strides, *rest, *metadata))


def _base(array: np.ndarray) -> np.ndarray:
    """The numbers of an array in the order in which they are in memory."""
    return array if array.flags.c_contiguous else array.T


def save(path: Path, value: Any) -> None:
    """What `torch.save` writes."""
    storages = _Storages()
    content = storages.described(value)
    with path.open("wb") as file:
        write_archive(file, content, tuple(storages.arrays))


def save_legacy(path: Path, value: Any, *, system: dict = SYSTEM, keys: Any = None) -> None:
    """What `torch.save` wrote before 1.6, and writes by `_use_new_zipfile_serialization=False`."""
    storages = _Storages()
    content = storages.described(value)
    names = [str(number) for number in range(len(storages.arrays))]
    parts = [pickled(part, protocol=2) for part in (MAGIC, 1001, system, content, names if keys is None else keys)]
    for array in storages.arrays:
        size = array.size if array.dtype.name in STORAGES.values() else array.nbytes
        parts.append(size.to_bytes(8, "little"))
        parts.append(array.tobytes())
    path.write_bytes(b"".join(parts))


# ---- tensors in shards

TENSOR = "torch.distributed.tensor"


def placed(kind: str, **fields: Any) -> PickledObject:
    """A placement: `placed("Shard", dim=0)`."""
    return PickledObject(PickledGlobal(f"{TENSOR}.placement_types", kind), fields)


def dtensor(
    local: np.ndarray, shape: tuple[int, ...], placements: list, degrees: tuple, coordinate: Any
) -> PickledCall:
    """A `DTensor` of a rank, as PyTorch 2.13 pickles it."""
    axes = tuple(
        PickledObject(
            PickledGlobal("torch.distributed._mesh_layout", "_FlatLayout"), {"shape": (size,), "stride": (1,)}
        )
        for size in degrees
    )
    layout = PickledObject(PickledGlobal("torch.distributed._mesh_layout", "_MeshLayout"), {"axes": axes})
    mesh = {"_device_type": "cuda", "_layout": layout, "_coordinate_on_dim": coordinate}
    spec = {
        "mesh": PickledObject(PickledGlobal("torch.distributed.device_mesh", "DeviceMesh"), mesh),
        "placements": tuple(placements),
    }
    state = {
        "_local_tensor": local,
        "_spec": PickledObject(PickledGlobal(f"{TENSOR}._dtensor_spec", "DTensorSpec"), spec),
    }
    return wrapped(PickledGlobal(TENSOR, "DTensor"), shape, str(local.dtype), (None, state))


def sharded_tensor(shards: list[tuple[tuple[int, ...], np.ndarray]], shape: tuple[int, ...]) -> PickledCall:
    """A `ShardedTensor` of a rank: its shards, each with its offsets."""
    module = "torch.distributed._shard"
    stored = []
    for offsets, array in shards:
        box = {"shard_offsets": list(offsets), "shard_sizes": list(array.shape)}
        metadata = PickledObject(PickledGlobal(f"{module}.metadata", "ShardMetadata"), (None, box))
        fields = {"tensor": array, "metadata": metadata}
        stored.append(PickledObject(PickledGlobal(f"{module}.sharded_tensor.shard", "Shard"), (None, fields)))
    kind = PickledGlobal(f"{module}.sharded_tensor.api", "ShardedTensor")
    return wrapped(kind, shape, "float32", (stored, None))


def wrapped(kind: PickledGlobal, shape: tuple[int, ...], dtype: str, state: Any) -> PickledCall:
    """A tensor of one of these classes, without numbers of its own."""
    device = PickledCall(PickledGlobal("torch", "device"), ("cuda:0",))
    layout = PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",))
    strides = tuple(int(np.prod(shape[dim + 1 :])) for dim in range(len(shape)))
    args = (kind, PickledGlobal("torch", dtype), shape, strides, 0, layout, device, False)
    rebuild = PickledGlobal("torch._utils", "_rebuild_wrapper_subclass")
    return PickledCall(PickledGlobal("torch._tensor", "_rebuild_from_type_v2"), (rebuild, kind, args, state))


def parameter(tensor: Any) -> PickledCall:
    """An `nn.Parameter` of a tensor."""
    hooks = collections.OrderedDict()
    return PickledCall(PickledGlobal("torch._utils", "_rebuild_parameter"), (tensor, True, hooks))
