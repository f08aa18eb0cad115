"""Writes a PyTorch distributed checkpoint without PyTorch: the bytes that `torch.distributed.checkpoint.save` writes.

Its pickles name classes of PyTorch; for as long as they are written, stand-ins carry those names. That the bytes are
right is seen in `test_checkpoint_dcp.py`, where PyTorch reads them and its own are compared (`-m slow`).
"""

import collections
import contextlib
import enum
import io
import pathlib
import pickle
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

Chunk = tuple[tuple[int, ...], np.ndarray]
"""Where a chunk begins in its tensor, and its numbers."""

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
}


def split(array: np.ndarray, num_ranks: int, dim: int = 0) -> list[list[Chunk]]:
    """The chunks of each rank when a tensor is sharded as `Shard(dim)` does: equal parts, rounded up, the last less."""
    size = array.shape[dim]
    each = -(-size // num_ranks)
    chunks: list[list[Chunk]] = []
    for rank in range(num_ranks):
        begin, end = min(rank * each, size), min((rank + 1) * each, size)
        start = tuple(begin if d == dim else 0 for d in range(array.ndim))
        chunks.append([(start, array.take(range(begin, end), dim))] if begin < end else [])
    return chunks


def write_dcp(
    folder: pathlib.Path, tensors: Mapping[str, Sequence[Sequence[Chunk]]], values: Mapping[str, Any] | None = None
) -> None:
    """Writes `.metadata` and one file per rank.

    Args:
        folder: where to; it must not exist.
        tensors: by name the chunks that each rank holds.
        values: what is no tensor; the first rank writes it.
    """
    folder.mkdir()
    with torch_stand_ins() as torch:
        described, stored = {}, {}
        num_ranks = max(map(len, tensors.values()), default=1)
        for rank in range(num_ranks):
            file = io.BytesIO()
            items = [(name, None, value) for name, value in (values or {}).items()] if rank == 0 else []
            items += [(name, *chunk) for name, ranks in tensors.items() for chunk in (*ranks, *[()] * num_ranks)[rank]]
            for name, begin, item in items:
                archive = _archive(item, torch, tensor=begin is not None)
                offset = None if begin is None else torch["torch"].Size(begin)
                index = torch[METADATA].MetadataIndex(fqn=name, offset=offset, index=None if begin is None else 0)
                info = {"relative_path": f"__{rank}_0.distcp", "offset": file.tell(), "length": len(archive)}
                stored[index] = torch[FILESYSTEM]._StorageInfo(**info)
                file.write(archive)
            (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
        for name, ranks in tensors.items():
            described[name] = _described([chunk for rank in ranks for chunk in rank], torch)
        described |= {name: torch[METADATA].BytesStorageMetadata() for name in values or {}}
        metadata = torch[METADATA].Metadata(
            state_dict_metadata=described,
            planner_data={name: (name,) for name in described},
            storage_data=stored,
            storage_meta=torch[METADATA].StorageMeta(checkpoint_id=folder, save_id="1", load_id=None, modules=[]),
            version="1.0.0",
        )
        (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def edit_metadata(folder: pathlib.Path, change: Callable[[Any], object]) -> None:
    """Writes `.metadata` anew after `change(metadata)`."""
    with torch_stand_ins():
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def places(metadata: Any, name: str) -> list[Any]:
    """Where the chunks of an item lie, as `.metadata` has it."""
    return [info for index, info in metadata.storage_data.items() if index.fqn == name]


def put_archive(folder: pathlib.Path, name: str, members: Mapping[str, bytes], **settings: Any) -> None:
    """Writes another archive for the first chunk of an item, with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **settings) as archive:
        for member, raw in members.items():
            archive.writestr(member, raw)
    path = folder / "__0_0.distcp"
    start = path.stat().st_size
    path.write_bytes(path.read_bytes() + file.getvalue())

    def change(metadata: Any) -> None:
        place = places(metadata, name)[0]
        place.relative_path, place.offset, place.length = path.name, start, len(file.getvalue())

    edit_metadata(folder, change)


def _described(chunks: Sequence[Chunk], torch: Mapping[str, Any]) -> Any:
    """What `.metadata` says of a tensor."""
    size = torch["torch"].Size
    ends = [np.add(begin, array.shape) for begin, array in chunks]
    return torch[METADATA].TensorStorageMetadata(
        properties=torch[METADATA].TensorProperties(getattr(torch["torch"], str(chunks[0][1].dtype)), torch),
        size=size(np.max(ends, axis=0).tolist()),
        chunks=[
            torch[METADATA].ChunkStorageMetadata(offsets=size(begin), sizes=size(array.shape))
            for begin, array in chunks
        ],
    )


def _archive(item: Any, torch: Mapping[str, Any], *, tensor: bool) -> bytes:
    """What `torch.save` writes: a zip, each member padded so that its bytes begin at a multiple of 64."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, torch)
    pickler.dump(_Tensor(item) if tensor else item)
    members = {"data.pkl": pickled.getvalue(), ".format_version": b"1", ".storage_alignment": b"64"}
    members |= {"byteorder": b"little"} | {f"data/{key}": raw for key, raw in enumerate(pickler.storages)}
    members |= {"version": b"3\n", ".data/serialization_id": b"0" * 40}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, raw in members.items():
            info = zipfile.ZipInfo(f"archive/{name}")
            padding = -(file.tell() + 30 + len(info.filename) + 4) % 64
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            archive.writestr(info, raw)
            info.extra = b""  # the table at the end does not tell of the padding
    return file.getvalue()


class _Tensor:
    """A tensor on its way into a pickle."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class _Pickler(pickle.Pickler):
    """Writes tensors as `torch.save` does: a call that rebuilds one from a storage, whose bytes lie beside it."""

    def __init__(self, file: io.BytesIO, torch: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[bytes] = []
        self._torch = torch

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Tensor):
            return NotImplemented
        array = value.array
        strides = tuple(step // array.itemsize for step in array.strides)
        self.storages.append(array.tobytes("A"))  # as it lies: what is column-major stays so
        dtype = str(array.dtype)
        storage = _Storage(STORAGES.get(dtype, "UntypedStorage"), len(self.storages) - 1, array)
        args = (storage, 0, array.shape, strides, False, collections.OrderedDict())
        if dtype in STORAGES:
            return self._torch["torch._utils"]._rebuild_tensor_v2, args
        return self._torch["torch._utils"]._rebuild_tensor_v3, (*args, getattr(self._torch["torch"], dtype))

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        typed = value.kind != "UntypedStorage"
        kind = getattr(self._torch["torch" if typed else "torch.storage"], value.kind)
        return "storage", kind, str(value.key), "cpu", value.array.size if typed else value.array.nbytes


class _Storage:
    def __init__(self, kind: str, key: int, array: np.ndarray) -> None:
        self.kind, self.key, self.array = kind, key, array


class _Dataclass:
    """A record that is pickled as a dataclass is: by its fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class _Named:
    """Something that is pickled by its name alone, as dtypes are."""

    def __init__(self, name: str) -> None:
        self.__module__, self._name = "torch", name

    def __reduce__(self) -> str:
        return self._name


class _Properties:
    """`TensorProperties`, whose state is a tuple."""

    def __init__(self, dtype: Any, torch: Mapping[str, Any]) -> None:
        layout = _Call(torch["torch.serialization"]._get_layout, ("torch.strided",))
        self._state = dtype, layout, False, torch[METADATA]._MEM_FORMAT_ENCODING(0), False

    def __getstate__(self) -> tuple:
        return self._state

    def __setstate__(self, state: tuple) -> None:
        self._state = state


class _Call:
    """Something that a pickle calls a function for."""

    def __init__(self, function: Any, args: tuple) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple:
        return self._call


@contextlib.contextmanager
def torch_stand_ins() -> Iterator[dict[str, Any]]:
    """Modules with the names of PyTorch's, for a pickle to name; what `import` finds otherwise comes back after it."""
    modules: dict[str, Any] = {}

    def put(module: str, name: str, thing: Any) -> None:
        with contextlib.suppress(AttributeError, TypeError):
            thing.__module__, thing.__qualname__, thing.__name__ = module, name, name
        setattr(modules.setdefault(module, types.ModuleType(module)), name, thing)

    for name in "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata StorageMeta".split():
        put(METADATA, name, type(name, (_Dataclass,), {}))
    put(METADATA, "MetadataIndex", type("MetadataIndex", (_Dataclass,), {}))
    put(METADATA, "TensorProperties", type("TensorProperties", (_Properties,), {}))
    put(METADATA, "_MEM_FORMAT_ENCODING", enum.Enum("_MEM_FORMAT_ENCODING", {"TORCH_CONTIGUOUS_FORMAT": 0}))
    put(FILESYSTEM, "_StorageInfo", type("_StorageInfo", (_Dataclass,), {}))
    put("torch", "Size", type("Size", (tuple,), {"__reduce__": lambda self: (type(self), (tuple(self),))}))
    for name in (*STORAGES, "float8_e4m3fn", "float8_e5m2"):
        put("torch", name, _Named(name))
    for name in STORAGES.values():
        put("torch", name, type(name, (), {}))
    put("torch.storage", "UntypedStorage", type("UntypedStorage", (), {}))
    put("torch.serialization", "_get_layout", lambda name: name)
    for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        put("torch._utils", name, lambda *args: args)
    for parent in ("torch.distributed", "torch.distributed.checkpoint"):
        modules[parent] = types.ModuleType(parent)
    with mock.patch.dict(sys.modules, modules):
        yield modules


def write_with_torch(folder: str, rank: int, num_ranks: int) -> None:
    """The same by PyTorch itself, in as many processes: a model sharded by FSDP2, its optimizer, and other things."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    numbers = torch.arange(28.0).reshape(7, 4)
    state = {
        "model": weights,
        "optimizer": moments,
        "columns": distribute_tensor(numbers, mesh, [Shard(1)]),
        "rows": {
            str(dtype).removeprefix("torch."): distribute_tensor(numbers.to(dtype), mesh, [Shard(0)])
            for dtype in (torch.bfloat16, torch.float16, torch.float64)
        },
        "turned": numbers.t(),
        "scalar": torch.tensor(2.5),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "narrow": numbers.to(torch.float8_e4m3fn),
        "step": 7,
        "note": "text",
        "list": [1, 2.5, None],
        "raw": b"\x00\xff",
    }
    dcp.save(state, checkpoint_id=folder)
    whole = {name: tensor.full_tensor() for name, tensor in weights.items()}
    if rank == 0:
        np.savez(f"{folder}.npz", **{f"model.{name}": tensor.numpy() for name, tensor in whole.items()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    write_with_torch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
