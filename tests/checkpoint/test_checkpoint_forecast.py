"""What a restore will read is reported first: bytes, what is read in vain, and a warning where it is a lot."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.checkpoint import restoring, storage

SHAPES = {"kernel": (4096, 2048), "table": (50304, 64), "bias": (2048,)}


def sharding(num_devices, *spec):
    return NamedSharding(Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",)), P(*spec))


def like(num_devices, *spec):
    wanted = {name: spec if len(shape) > 1 else spec[:1] for name, shape in SHAPES.items()}
    return {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding(num_devices, *wanted[name]))
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved by two devices, cut along dim 0."""
    path = tmp_path_factory.mktemp("saved") / "c"
    state = {
        name: jax.device_put(np.ones(shape, np.float32), like(2, "fsdp")[name].sharding)
        for name, shape in SHAPES.items()
    }
    js.checkpoint.save(path, state)
    return path


WANTED = sum(4 * int(np.prod(shape)) for shape in SHAPES.values())


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_any_degree_reads_what_it_wants(saved, num_devices):
    reported = js.checkpoint.forecast(saved, like(num_devices, "fsdp"))
    assert reported.wanted_bytes == WANTED and reported.amplification <= 1.1


def test_along_the_other_dim_whole_pieces_are_read(saved):
    reported = js.checkpoint.forecast(saved, like(8, None, "fsdp"))
    assert reported.worst == "kernel" and reported.amplification > 4
    assert str(reported).startswith(f"{reported.touched_bytes / 2**20:.1f} MiB to read for {WANTED / 2**20:.1f} MiB (x")


def test_a_lot_in_vain_is_a_warning_with_the_command(saved, monkeypatch):
    monkeypatch.setattr(restoring, "_WORTH_BYTES", 1 << 20)
    with pytest.warns(js.checkpoint.CheckpointWarning, match=r"kernel(.|\n)*jshard ckpt reshard .*/c .*/c-resharded"):
        js.checkpoint.restore(saved, like(8, None, "fsdp"))


def test_a_part_is_told_as_a_part(saved):
    reported = js.checkpoint.forecast(saved, like(8, "fsdp"), only="bias")
    assert reported.wanted_bytes == 2048 * 4


# How much is on its way at a time.


def told_memory(root, *, available, limit, used, cache, group):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(f"9:cpu:/\n{group}:/job/step\n")
    folder, names = root / "sys/fs/cgroup/memory/job", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    if group == "0:":
        folder, names = root / "sys/fs/cgroup/job", ("max", "current", "inactive_file")
        (folder / "step").mkdir(parents=True)
        (folder / "step" / "memory.max").write_text("max\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")
    return root


@pytest.mark.parametrize("group", ["0:", "4:memory"])
def test_free_memory_is_what_the_system_or_the_job_has_left(tmp_path, group):
    gib = 1 << 30
    job = told_memory(tmp_path / "a", available=9 * gib, limit=4 * gib, used=3 * gib, cache=gib, group=group)
    host = told_memory(tmp_path / "b", available=gib, limit=4 * gib, used=gib, cache=0, group=group)
    assert storage.free_bytes(job) == 2 * gib
    assert storage.free_bytes(host) == gib
    assert storage.free_bytes(tmp_path / "nothing") > 100 * gib


def test_something_can_be_read_where_no_memory_is_free(monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda: 0)
    assert storage.in_flight_bytes({"n": 3}) == 1  # Orbax refuses 0


@pytest.mark.parametrize(("free_mib", "shard_mib", "mib"), [(9999, 1, 128), (9999, 50, 200), (400, 1, 50), (9, 16, 16)])
def test_reads_in_flight_follow_the_free_memory(monkeypatch, free_mib, shard_mib, mib):
    monkeypatch.setattr(storage, "free_bytes", lambda: free_mib << 20)
    wanted = {"w": np.broadcast_to(np.uint8(0), shard_mib << 20)}
    assert storage.in_flight_bytes(wanted) == mib << 20
