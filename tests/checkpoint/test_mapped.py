"""Arrays that are the files of a checkpoint: what becomes of them when these are deleted, changed, cut, or far away."""

import shutil
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jshard import checkpoint
from jshard.checkpoint.packed import file_io
from jshard.errors import RunError
from tests import compiling

VALUES = {
    "w": np.arange(1 << 19, dtype=np.float32).reshape(1024, 512),
    "b": np.arange(64, dtype=np.float32).reshape(8, 8),
    "n": np.float32(3),
}


def like(devices=8):
    sharding = lambda ndim: NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("fsdp",)), P(*["fsdp"][:ndim]))
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.ndim)) for name, x in VALUES.items()}


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "c", {name: jax.device_put(x, like()[name].sharding) for name, x in VALUES.items()})
    return tmp_path / "c"


def file_of(folder):
    (file,) = (folder / "arrays").iterdir()
    return file


def assert_equal(restored):
    for name, values in VALUES.items():
        np.testing.assert_array_equal(np.asarray(restored[name]), values)


def in_file(array):
    """Whether the memory of an array is that of a file of packed arrays."""
    place = array.addressable_shards[0].data.unsafe_buffer_pointer()
    for line in Path("/proc/self/maps").read_text().splitlines():
        limits, rest = line.split(" ", 1)
        start, stop = (int(number, 16) for number in limits.split("-"))
        if start <= place < stop:
            return ".safetensors" in rest
    return False


@pytest.mark.parametrize("verify", [True, False])
def test_arrays_are_the_file_also_when_it_is_deleted(saved, verify):
    restored = checkpoint.restore(saved, like(), mmap=True, verify=verify)
    assert in_file(restored["w"])
    shutil.rmtree(saved)
    assert_equal(restored)


def test_what_is_cut_otherwise_is_read(saved):
    restored = checkpoint.restore(saved, like(4), mmap=True)
    assert not in_file(restored["w"]) and in_file(restored["n"])
    assert_equal(restored)


def test_a_step_that_takes_the_arrays_leaves_the_file_as_it_is(saved):
    before = file_of(saved).read_bytes()
    restored = checkpoint.restore(saved, like(), mmap=True)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x.at[...].add(1), state), donate_argnums=0)
    after = step(step(restored))
    np.testing.assert_array_equal(np.asarray(after["w"]), VALUES["w"] + 2)
    assert file_of(saved).read_bytes() == before


def test_a_changed_bit_and_a_file_that_is_cut_are_refused(saved):
    file = file_of(saved)
    data = bytearray(file.read_bytes())
    data[300_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match="do not match their checksum"):
        checkpoint.restore(saved, like(), mmap=True)
    checkpoint.restore(saved, like(), mmap=True, verify=False)
    file.write_bytes(data[: len(data) // 2])
    for verify in (True, False):
        with pytest.raises(RunError):
            checkpoint.restore(saved, like(), mmap=True, verify=verify)


def test_on_a_network_it_is_read(saved, monkeypatch):
    monkeypatch.setattr(file_io, "LOCAL", {})
    with pytest.warns(checkpoint.CheckpointWarning, match="it was read, not mapped: it is not on a local disk"):
        restored = checkpoint.restore(saved, like(), mmap=True)
    assert not in_file(restored["w"])
    assert_equal(restored)


CUT = """
import sys, os
from tests.checkpoint.test_mapped import checkpoint, file_of, jax, like, np, Path
restored = checkpoint.restore(Path(sys.argv[1]), like(), mmap=True)
os.truncate(file_of(Path(sys.argv[1])), 0)
np.asarray(restored["w"].addressable_shards[0].data).sum()
"""


@pytest.mark.wide
def test_a_file_that_is_cut_under_its_arrays_ends_the_program(saved):
    """As the documentation says: if this fails one day, the better for it."""
    command = compiling.python(CUT, saved)
    ended = subprocess.run(command, env=compiling.environment() | {"JAX_NUM_CPU_DEVICES": "8"}, capture_output=True)
    assert ended.returncode == -signal.SIGBUS, ended.stderr.decode()[-2000:]
