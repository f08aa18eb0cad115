"""PyTorch's distributed checkpoints for tests, made of what `write_dcp` of the library writes: of any chunks and ranks.

That the bytes are right is seen in `test_checkpoint_dcp.py`, where PyTorch reads them, and its own are read.
"""

import io
import pathlib
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from jshard.checkpoint.formats import dcp_writer
from jshard.checkpoint.formats.torch_writer import (
    PickledCall,
    PickledGlobal,
    PickledObject,
    pickled,
    rebuilt,
    write_archive,
)

Chunk = tuple[tuple[int, ...], np.ndarray]
"""Where a chunk begins in its tensor, and its numbers."""

DESCRIBED: dict[pathlib.Path, SimpleNamespace] = {}
"""What was written into `.metadata`, to be changed: `tensors` by name, and `places`, a list of them."""


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
    """Writes `.metadata` and one file per rank: of each tensor the chunks of each; the first one writes values."""
    folder.mkdir()
    found = SimpleNamespace(tensors={}, values=[*(values or {})], places=[])
    for name, ranks in tensors.items():
        chunks = [chunk for rank in ranks for chunk in rank]
        size = np.max([np.add(begin, array.shape) for begin, array in chunks], axis=0).tolist()
        corners = [SimpleNamespace(begin=begin, size=array.shape) for begin, array in chunks]
        encoding = PickledCall(PickledGlobal(dcp_writer.METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
        found.tensors[name] = SimpleNamespace(
            dtype=str(chunks[0][1].dtype), size=tuple(size), chunks=corners, encoding=encoding
        )
    for rank in range(max(map(len, tensors.values()), default=1)):
        file = io.BytesIO()
        items = [(name, None, value) for name, value in (values or {}).items()] if rank == 0 else []
        items += [(name, *chunk) for name, ranks in tensors.items() if rank < len(ranks) for chunk in ranks[rank]]
        for name, begin, item in items:
            offset, is_value = file.tell(), begin is None
            base = () if is_value else (item if item.flags.c_contiguous else item.T,)  # as it is stored
            length = write_archive(file, item if is_value else rebuilt(item), base)
            info = {"relative_path": f"__{rank}_0.distcp", "offset": offset, "length": length}
            found.places.append(SimpleNamespace(name=name, begin=begin, info=info))
        (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    DESCRIBED[folder] = found
    edit_metadata(folder, lambda found: None)


def edit_metadata(folder: pathlib.Path, change: Callable[[Any], object]) -> None:
    """Writes `.metadata` again after `change(description)`."""
    found = DESCRIBED[folder]
    change(found)
    described = {}
    for name, tensor in found.tensors.items():
        layout = PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",))
        state = (PickledGlobal("torch", tensor.dtype), layout, False, tensor.encoding, False)
        properties = dcp_writer._record("TensorProperties", state)
        corners = [{"offsets": dcp_writer._size(x.begin), "sizes": dcp_writer._size(x.size)} for x in tensor.chunks]
        chunks = [dcp_writer._record("ChunkStorageMetadata", corner) for corner in corners]
        fields = {"properties": properties, "size": dcp_writer._size(tensor.size), "chunks": chunks}
        described[name] = dcp_writer._record("TensorStorageMetadata", fields)
    described |= {name: dcp_writer._record("BytesStorageMetadata", {}) for name in found.values}
    stored = {}
    for place in found.places:
        begin = None if place.begin is None else dcp_writer._size(place.begin)
        index = dcp_writer._record("MetadataIndex", {"fqn": place.name, "offset": begin, "index": None})
        stored[index] = PickledObject(
            PickledGlobal(dcp_writer.METADATA_MODULE.replace("metadata", "filesystem"), "_StorageInfo"),
            place.info,
        )
    meta = {"checkpoint_id": str(folder), "save_id": "1", "load_id": None, "modules": []}
    fields = {
        "state_dict_metadata": described,
        "planner_data": {name: (name,) for name in described},
        "storage_data": stored,
        "storage_meta": dcp_writer._record("StorageMeta", meta),
        "version": "1.0.0",
    }
    (folder / ".metadata").write_bytes(pickled(dcp_writer._record("Metadata", fields), protocol=4))


def places(found: Any, name: str) -> list[dict[str, Any]]:
    """Where the chunks of an item are, as `.metadata` has it."""
    return [place.info for place in found.places if place.name == name]


def put_archive(folder: pathlib.Path, name: str, members: Mapping[str, bytes], **settings: Any) -> None:
    """Writes another archive for the first chunk of an item, with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **settings) as archive:
        for member, raw in members.items():
            archive.writestr(member, raw)
    path = folder / "__0_0.distcp"
    place = {"relative_path": path.name, "offset": path.stat().st_size, "length": len(file.getvalue())}
    path.write_bytes(path.read_bytes() + file.getvalue())
    edit_metadata(folder, lambda found: places(found, name)[0].update(place))


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
