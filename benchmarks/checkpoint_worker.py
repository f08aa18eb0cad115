"""One library saves and loads a state of `checkpoint.py`: a process that runs one operation after another, on request.

Its argument is JSON, and so is each line that it reads or prints: the cost of an operation. It runs without JAX if the
library is PyTorch's or plain files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG

Operations = dict[str, Callable[[], Any]]
"""What can be asked for. A save in the background gives a function that waits for its end."""


def main() -> None:
    """Creates the state, reports it, and runs the requested operations until its input ends."""
    asked = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)  # also while it hangs in an operation
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    libraries: dict[str, Any] = {"plain": plain, "PyTorch DCP": dcp, "Orbax": orbax, "jshard": jshard, "index": index}
    operations = libraries[asked["library"]](asked)
    meet = _meeting(asked)
    versions = {name: sys.modules[name].__version__ for name in ("torch",) if name in sys.modules}
    print(json.dumps({"operations": list(operations), "versions": versions}), file=answers)
    for line in sys.stdin:
        try:
            # Before they meet: it takes 20 ms and more, and not the same time in each.
            gc.collect()
            meet()
            answer = measured(operations[line.strip()])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # nothing to end in order: the parent has all it wants


def _meeting(asked: dict[str, Any]) -> Callable[[], Any]:
    """What lets the processes begin at once: asked one by one, the first would wait for the others on its clock."""
    if asked.get("processes", 1) == 1 or asked["library"] == "plain":
        return lambda: None
    if asked["library"] == "PyTorch DCP":
        import torch.distributed as dist

        return dist.barrier
    from jax.experimental import multihost_utils

    return lambda: multihost_utils.sync_global_devices("an operation")


def measured(operation: Callable[[], Any]) -> dict[str, float]:
    """The cost of an operation: seconds of the clock and of the process tree, and bytes read."""
    before, cpu_s, begin_s = _io(), _cpu_s(), time.perf_counter()
    result = operation()
    end_s, found = time.perf_counter(), {}
    if callable(result):
        found["blocked_s"] = end_s - begin_s
        result()
        end_s = time.perf_counter()
    found |= {"wall_s": end_s - begin_s, "cpu_s": _cpu_s() - cpu_s}
    after = _io()
    del result
    gc.collect()
    return found | {"read_bytes": after[0] - before[0], "disk_bytes": after[1] - before[1], "rss_bytes": _rss_bytes()}


def _io() -> tuple[int, int]:
    """Bytes requested by this process, and those that came from the disk."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["read_bytes"])


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_s() -> float:
    """Seconds of all cores for this process, its ended children, and its running ones."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(_running_s(os.getpid()))


def _running_s(process: int) -> Iterator[float]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                yield sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                yield from _running_s(int(child))


# The state, and the libraries.


def arrays(asked: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Layers of a kernel and, if requested, a bias; random float32."""
    rng, shape = np.random.default_rng(0), asked["kernel"]
    for number in range(asked["layers"]):
        yield f"layer{number:05d}/kernel", rng.standard_normal(shape, dtype=np.float32)
        if asked["bias"]:
            yield f"layer{number:05d}/bias", rng.standard_normal(shape[-1], dtype=np.float32)


def plain(asked: dict[str, Any]) -> Operations:
    """One file per process, written sequentially and synced: the speed of the disk itself."""
    folder, rank, count = Path(asked["folder"]), asked["process"], asked["processes"]
    mine = {name: np.array_split(array, count)[rank].copy() for name, array in arrays(asked)}
    sizes = {name: part.shape for name, part in mine.items()}

    def save() -> None:
        folder.mkdir(exist_ok=True)
        with (folder / str(rank)).open("wb", buffering=0) as file:
            for part in mine.values():
                file.write(part.data)
            os.fsync(file.fileno())

    def load() -> Any:
        with (folder / str(rank)).open("rb", buffering=0) as file:
            found = {name: np.empty(shape, np.float32) for name, shape in sizes.items()}
            for part in found.values():
                file.readinto(part.data)
        return found

    return {"save": save, "load": load}


def dcp(asked: dict[str, Any]) -> Operations:
    """PyTorch's distributed checkpoints, a process per rank, sharded along the first dim."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor, empty

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder, count = asked["folder"], asked["processes"]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    if count == 1:
        state: Any = {name: torch.from_numpy(array) for name, array in arrays(asked)}
        new: Any = lambda dim: {name: torch.empty_like(tensor) for name, tensor in state.items()}
    else:
        host, port = asked["coordinator"].split(":")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        dist.init_process_group("gloo", rank=asked["process"], world_size=count)
        mesh = init_device_mesh("cpu", (count,))
        state = {name: distribute_tensor(torch.from_numpy(array), mesh, [Shard(0)]) for name, array in arrays(asked)}
        new = lambda dim: {
            name: empty(tensor.shape, device_mesh=mesh, placements=[Shard(min(dim, tensor.ndim - 1))])
            for name, tensor in state.items()
        }
    alone = {"no_dist": True} if count == 1 else {}

    def load(dim: int) -> Any:
        target = new(dim)
        checkpoint.load(target, checkpoint_id=folder, **alone)
        return target

    loads = {"load": lambda: load(0)} | ({"resharded": lambda: load(1)} if count > 1 else {})
    return {"save": lambda: _no_result(checkpoint.save(state, checkpoint_id=folder, **alone)), **loads}


def _no_result(result: Any) -> None:
    """A result that needs no waiting."""


def jshard(asked: dict[str, Any]) -> Operations:
    """With and without verifying checksums; memory-mapped if this version can."""
    import inspect

    state, likes = _with_jax(asked)
    import jax

    import jshard as js

    folder = asked["folder"]

    def load(mesh: str, **options: Any) -> Any:
        return jax.block_until_ready(js.checkpoint.restore(folder, likes[mesh], **options))

    found: Operations = {
        "save": lambda: js.checkpoint.save(folder, state),
        "load": lambda: load("all"),
        "resharded": lambda: load("other"),
        "unverified": lambda: load("all", verify=False),
        "asynchronous": lambda: js.checkpoint.save_async(folder, state).wait,
        "copies": lambda: load("copies"),
        "copies, read once": lambda: load("copies", read_once=True),
    }
    if "mmap" in inspect.signature(js.checkpoint.restore).parameters:
        found["mapped"] = lambda: load("all", mmap=True)
    return found


def orbax(asked: dict[str, Any]) -> Operations:
    """`save` and `load` with their defaults."""
    import logging

    state, likes = _with_jax(asked)
    import jax
    from orbax.checkpoint import v1 as ocp

    logging.disable(logging.WARNING)
    folder = asked["folder"]
    load = lambda mesh: jax.block_until_ready(ocp.load(folder, likes[mesh]))
    return {
        "save": lambda: _no_result(ocp.save(folder, state)),
        "load": lambda: load("all"),
        "resharded": lambda: load("other"),
        "asynchronous": lambda: ocp.save_async(folder, state).result,
    }


def index(asked: dict[str, Any]) -> Operations:
    """Opens a checkpoint of many processes, each with one row of each leaf: many files with indexes, without values."""
    import dataclasses

    from jshard.checkpoint import manifest
    from jshard.checkpoint.packed.layout import Piece, lay_out_files, num_blocks
    from jshard.checkpoint.readers import own_checkpoint
    from jshard.checkpoint.storage import FOLDER

    folder, writers, dtype = Path(asked["folder"]), asked["writers"], np.dtype(np.float32)
    paths = [f"model/layers/{number}/kernel" for number in range(asked["leaves"])]
    (folder / FOLDER).mkdir(parents=True)
    (layout,) = lay_out_files(Piece(n, path, dtype, ((0, 1), (0, 128))) for n, path in enumerate(paths))
    packed = {}
    for writer in range(writers):
        box = (writer, writer + 1), (0, 128)
        pieces = tuple(Piece(piece.leaf, piece.path, dtype, box) for piece in layout.pieces)
        own = dataclasses.replace(layout, pieces=pieces).index([0] * num_blocks(layout.index_begin))
        name = f"{writer:05d}-000.safetensors"
        with (folder / FOLDER / name).open("wb") as file:
            file.seek(layout.index_begin)  # nothing is there
            file.write(own)
        packed[name] = layout.num_bytes, int.from_bytes(own[-16:-8], "little")
    leaves = {path: manifest.StoredLeaf(shape=(writers, 128), dtype=dtype.name) for path in paths}
    files = {f"{FOLDER}/{name}": (size, None) for name, (size, _) in packed.items()}
    manifest.write(folder, manifest.Manifest(leaves=leaves, files=files, packed=packed, processes=writers))

    def open_all() -> None:
        pieces = own_checkpoint(folder).pieces.of(asked["leaves"] - 1)
        assert len(pieces.files) == writers

    return {"open": open_all}


def _with_jax(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The state on a mesh of all devices, and the abstract state for each mesh that it is loaded onto."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    processes = asked["processes"]
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    if processes > 1:
        jax.distributed.initialize(asked["coordinator"], processes, asked["process"])
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = np.array(jax.devices())
    meshes = {"all": Mesh(devices, ("fsdp",))}
    meshes["other"] = Mesh((devices[:4] if processes == 1 else devices).reshape(2, -1), ("a", "b"))
    meshes["copies"] = Mesh(devices.reshape(2, 4), ("replica", "fsdp"))  # one in each process, if two

    def sharding(ndim: int, mesh: str) -> Any:
        spec = P("fsdp") if mesh != "other" else P("b") if ndim == 1 else P("b", "a")
        return NamedSharding(meshes[mesh], spec)

    placed = lambda array: jax.make_array_from_callback(
        array.shape, sharding(array.ndim, asked["mesh"]), lambda box: array[box].copy()
    )
    state = {name: placed(array) for name, array in arrays(asked)}
    jax.block_until_ready(state)
    abstract = lambda x, mesh: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.ndim, mesh))
    return state, {mesh: {name: abstract(x, mesh) for name, x in state.items()} for mesh in meshes}


if __name__ == "__main__":
    main()
