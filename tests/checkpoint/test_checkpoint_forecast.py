"""What a restore will read is reported first: bytes, what is read for nothing, and a warning where it is a lot."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.checkpoint import restore_operation
from jshard.checkpoint.readers import open_checkpoint

ROWS, COLUMNS = 4096, 512


def like(num_devices, *spec):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))
    return {"kernel": jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=NamedSharding(mesh, P(*spec)))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved by two devices, cut along dim 0, in both formats."""
    folder = tmp_path_factory.mktemp("saved")
    state = {"kernel": jax.device_put(np.ones((ROWS, COLUMNS), np.float32), like(2, "fsdp")["kernel"].sharding)}
    for form in ("packed", "orbax"):
        js.checkpoint.save(folder / form, state, format=form)
    return folder


def test_any_degree_reads_what_it_wants_and_other_dims_read_whole_rows(saved):
    for wanted in (like(1, "fsdp"), like(8, "fsdp"), like(8, None, "fsdp")):
        reported = js.checkpoint.forecast(saved / "packed", wanted)
        assert reported.wanted_bytes == reported.touched_bytes == reported.host_bytes == 4 * ROWS * COLUMNS
    assert str(reported) == "8.0 MiB to read for 8.0 MiB (x1.00); up to 8.0 MiB of host memory beside the state"
    boxes = [((0, ROWS), (0, COLUMNS // 8)), ((0, ROWS // 2), (COLUMNS // 8, COLUMNS // 4))]
    opened = open_checkpoint(saved / "packed")
    assert opened.touched("kernel", opened.leaves["kernel"], boxes) == ROWS * COLUMNS


def test_of_zarr_each_device_reads_whole_chunks_and_a_lot_is_a_warning(saved, monkeypatch):
    wanted = like(8, None, "fsdp")
    assert js.checkpoint.forecast(saved / "orbax", wanted).amplification > 4
    monkeypatch.setattr(restore_operation, "_UNNEEDED_BYTES", 1 << 20)
    with pytest.warns(js.checkpoint.CheckpointWarning, match=r"jshard ckpt reshard .*/orbax .*/orbax-resharded"):
        js.checkpoint.restore(saved / "orbax", wanted)
