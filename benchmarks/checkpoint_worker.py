"""One library saves and loads the state of `checkpoint.py`, in a process of its own.

It is asked by one argument of JSON. Prints a line of JSON with seconds by operation; of several processes the first
one speaks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Times = dict[str, float]


def main() -> None:
    """Runs the library that the argument names."""
    asked = json.loads(sys.argv[1])
    libraries: dict[str, Callable[[dict[str, Any]], Times]] = {"raw": raw, "dcp": dcp}
    found = libraries.get(asked["library"], with_jax)(asked)
    if asked["process"] == 0:
        print(json.dumps(found))


def values(layers: int, rows: int) -> dict[str, np.ndarray]:
    """The state: so many layers of a (rows, 2048) kernel and a bias, random float32."""
    rng = np.random.default_rng(0)
    kernels = {f"layer{i:02d}/kernel": rng.standard_normal((rows, 2048), dtype=np.float32) for i in range(layers)}
    return kernels | {f"layer{i:02d}/bias": rng.standard_normal(2048, dtype=np.float32) for i in range(layers)}


def raw(asked: dict[str, Any]) -> Times:
    """Plain files, one an array: what the disk itself takes."""
    folder, state = Path(asked["folder"]), values(asked["layers"], asked["rows"])

    def write() -> None:
        folder.mkdir()
        for number, array in enumerate(state.values()):
            with (folder / str(number)).open("wb") as file:
                file.write(array)
                file.flush()
                os.fsync(file.fileno())

    def read() -> Any:
        return [np.fromfile(folder / str(number), np.float32) for number in range(len(state))]

    return _timed(folder, write, {"load": read})


def with_jax(asked: dict[str, Any]) -> Times:
    """jshard, or plain Orbax."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    processes = asked["processes"]
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    if processes > 1:
        jax.distributed.initialize(asked["coordinator"], processes, asked["process"])
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    meshes = {"all": Mesh(np.array(jax.devices()), ("fsdp",))}
    other = np.array(jax.devices()[:4] if processes == 1 else jax.devices())
    meshes["other"] = Mesh(other.reshape(2, -1), ("a", "b"))
    meshes["copies"] = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp"))  # one in each process, if two

    def shard(array: np.ndarray, mesh: str) -> Any:
        spec = P("fsdp") if mesh != "other" else P("b") if array.ndim == 1 else P("b", "a")
        return NamedSharding(meshes[mesh], spec)

    def placed(array: np.ndarray) -> Any:
        return jax.make_array_from_callback(array.shape, shard(array, "all"), lambda box: array[box])

    arrays = values(asked["layers"], asked["rows"])
    state = {name: placed(array) for name, array in arrays.items()}
    jax.block_until_ready(state)
    like = {
        mesh: {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=shard(a, mesh)) for name, a in arrays.items()}
        for mesh in meshes
    }
    return (_jshard if asked["library"].startswith("jshard") else _orbax)(asked, state, like)


def _jshard(asked: dict[str, Any], state: Any, like: Any) -> Times:
    import jax

    import jshard as js

    folder, verify = Path(asked["folder"]), True
    if asked["library"] == "jshard, no sums":
        from jshard.checkpoint import saving

        saving.LeafSums = _NoSums
        verify = False

    def load(mesh: str, read_once: bool = False) -> Any:
        return jax.block_until_ready(js.checkpoint.restore(folder, like[mesh], verify=verify, read_once=read_once))

    loads = {"load": lambda: load("all"), "resharded": lambda: load("other")}
    if asked["processes"] > 1:
        loads |= {"copies": lambda: load("copies", False), "copies, read once": lambda: load("copies", True)}
    times = _timed(folder, lambda: js.checkpoint.save(folder, state), loads, primary=asked["process"] == 0)
    _clear(folder, asked["process"] == 0)
    return times | _in_background(lambda: js.checkpoint.save_async(folder, state).wait)


class _NoSums:
    """In place of `LeafSums`: what a save takes without them."""

    def __init__(self, *leaf: Any) -> None:
        pass

    def total(self) -> tuple[int, int]:
        return 0, 0


def _orbax(asked: dict[str, Any], state: Any, like: Any) -> Times:
    import logging

    import jax
    from orbax.checkpoint import v1 as ocp

    logging.disable(logging.WARNING)
    folder = Path(asked["folder"])

    def load(mesh: str) -> Any:
        return jax.block_until_ready(ocp.load(str(folder), like[mesh]))

    loads = {"load": lambda: load("all"), "resharded": lambda: load("other")}
    times = _timed(folder, lambda: ocp.save(str(folder), state), loads, primary=asked["process"] == 0)
    _clear(folder, asked["process"] == 0)
    return times | _in_background(lambda: ocp.save_async(str(folder), state).result)


def dcp(asked: dict[str, Any]) -> Times:
    """PyTorch's distributed checkpoints, a process per rank, sharded along the first dim."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor, empty

    torch.set_num_threads(1)
    host, port = asked["coordinator"].split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    dist.init_process_group("gloo", rank=asked["process"], world_size=asked["processes"])
    mesh = init_device_mesh("cpu", (asked["processes"],))
    arrays = values(asked["layers"], asked["rows"])
    state = {name: distribute_tensor(torch.from_numpy(array), mesh, [Shard(0)]) for name, array in arrays.items()}
    folder = Path(asked["folder"])

    def load(dim: int) -> None:
        dims = {name: dim if array.ndim > 1 else 0 for name, array in arrays.items()}
        target = {
            name: empty(array.shape, device_mesh=mesh, placements=[Shard(dims[name])]) for name, array in arrays.items()
        }
        checkpoint.load(target, checkpoint_id=str(folder))

    loads = {"load": lambda: load(0), "resharded": lambda: load(1)}
    times = _timed(
        folder,
        lambda: checkpoint.save(state, checkpoint_id=str(folder)),
        loads,
        primary=asked["process"] == 0,
        meet=dist.barrier,
    )
    dist.destroy_process_group()
    return times


def _timed(
    folder: Path,
    save: Callable[[], Any],
    loads: dict[str, Callable[[], Any]],
    *,
    primary: bool = True,
    meet: Callable[[], Any] | None = None,
) -> Times:
    """Everything once without being counted, then once more."""
    times: Times = {}
    for _ in range(2):
        _clear(folder, primary, meet)
        begin = time.perf_counter()
        save()
        times["save"] = time.perf_counter() - begin
        for name, load in loads.items():
            begin = time.perf_counter()
            load()
            times[name] = time.perf_counter() - begin
    if meet is not None:
        meet()
    return times


def _in_background(save: Callable[[], Callable[[], Any]]) -> Times:
    """How long a save keeps its caller, and how long it takes; it gives what waits for its end."""
    begin = time.perf_counter()
    wait = save()
    blocked = time.perf_counter() - begin
    wait()
    return {"blocked": blocked, "asynchronous": time.perf_counter() - begin}


def _clear(folder: Path, primary: bool, meet: Callable[[], Any] | None = None) -> None:
    """Removes what is there, and waits until the disk has nothing left to write."""
    meet = meet or _meet
    meet()
    if primary:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    meet()


def _meet() -> None:
    if "jax" in sys.modules:
        from jshard._processes import exchange

        exchange("benchmark", "", timeout_s=600)


if __name__ == "__main__":
    main()
