"""What a restore will read is reported first: bytes, what is read in vain, and a warning where it is a lot."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.checkpoint import restoring
from jshard.checkpoint.readers import open_checkpoint

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


def test_along_the_other_dim_rows_are_read_whole_by_each_process(saved):
    reported = js.checkpoint.forecast(saved, like(8, None, "fsdp"))
    assert reported.worst is None and reported.touched_bytes == WANTED  # one process has all columns
    opened, (rows, columns) = open_checkpoint(saved), SHAPES["kernel"]
    boxes = [((0, rows), (0, columns // 8)), ((0, rows // 2), (columns // 8, columns // 4))]
    assert opened.touched("kernel", opened.leaves["kernel"], boxes) == rows * columns


@pytest.fixture(scope="module")
def saved_as_zarr(tmp_path_factory):
    path = tmp_path_factory.mktemp("zarr") / "c"
    value = np.ones(SHAPES["kernel"], np.float32)
    state = {"kernel": jax.device_put(value, like(2, "fsdp")["kernel"].sharding)}
    js.checkpoint.save(path, state, format="orbax")
    return path


def test_of_zarr_each_device_reads_whole_chunks(saved_as_zarr):
    reported = js.checkpoint.forecast(saved_as_zarr, {"kernel": like(8, None, "fsdp")["kernel"]})
    assert reported.worst == "kernel" and reported.amplification > 4
    assert str(reported).startswith(
        f"{reported.touched_bytes / 2**20:.1f} MiB to read for {reported.wanted_bytes / 2**20:.1f} MiB (x"
    )


def test_a_lot_in_vain_is_a_warning_with_the_command(saved_as_zarr, monkeypatch):
    monkeypatch.setattr(restoring, "_WORTH_BYTES", 1 << 20)
    with pytest.warns(js.checkpoint.CheckpointWarning, match=r"kernel(.|\n)*jshard ckpt reshard .*/c .*/c-resharded"):
        js.checkpoint.restore(saved_as_zarr, {"kernel": like(8, None, "fsdp")["kernel"]})


def test_a_part_is_told_as_a_part(saved):
    reported = js.checkpoint.forecast(saved, like(8, "fsdp"), only="bias")
    assert reported.wanted_bytes == 2048 * 4
