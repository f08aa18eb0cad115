"""Memory that a restore has read into goes to another one when nothing refers to it any more, and not before."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jshard import checkpoint
from jshard.checkpoint.packed.host_memory import HOST_MEMORY, HostMemory

SHAPE = (1024, 512)  # 2 MiB, shards of 256 KiB


def sharding(*spec):
    return NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), P(*spec))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for name, value in (("ones", 1.0), ("twos", 2.0)):
        checkpoint.save(folder / name, {"w": jax.device_put(np.full(SHAPE, value, np.float32), sharding("fsdp"))})
    return folder


def collected():
    gc.collect()
    jax.block_until_ready(jnp.zeros(()))  # jax lets go of what others gave it at its next call
    gc.collect()


def test_a_buffer_comes_back_with_its_last_view():
    memory = HostMemory(kept_bytes=3 << 20)
    given = memory.take(1 << 20)
    place, view = given.ctypes.data, np.asarray(given[4:].view(np.float32).reshape(-1, 3)[1:].T)
    del given
    assert memory.kept_bytes == 0
    del view
    assert memory.kept_bytes == 1 << 20 and place % 64 == 0
    again = memory.take(1 << 20)
    assert again.ctypes.data == place and memory.kept_bytes == 0
    others = [memory.take(2 << 20) for _ in range(3)]
    del others
    assert memory.kept_bytes == 2 << 20  # and not more than 3
    del again
    assert memory.kept_bytes == 3 << 20
    memory.take(4 << 20)  # of another size: the kept ones make room
    assert memory.kept_bytes == 0


def donated(array):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    return step(array)


def deleted(array):
    array.delete()


@pytest.mark.parametrize("spec", [("fsdp",), ()], ids=["sharded", "on every device"])
@pytest.mark.parametrize("end", [None, donated, deleted], ids=["kept", "donated", "deleted"])
def test_no_one_reads_into_memory_that_is_in_use(saved, spec, end):
    like = {"w": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding(*spec))}
    array = checkpoint.restore(saved / "ones", like)["w"]
    views = [np.asarray(shard.data) for shard in array.addressable_shards]
    result = None if end is None else end(array)
    if end is not None:
        del array
    collected()
    later = [checkpoint.restore(saved / "twos", like)["w"] for _ in range(3)]
    assert all((view == 1).all() for view in views)
    assert result is None or (np.asarray(result) == 2).all()
    assert end is not None or (np.asarray(array) == 1).all()
    assert all((np.asarray(each) == 2).all() for each in later)


def test_memory_of_arrays_that_are_gone_is_used_again(saved):
    like = {"w": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding("fsdp"))}
    array = checkpoint.restore(saved / "ones", like)["w"]
    place = array.addressable_shards[0].data.unsafe_buffer_pointer()
    del array
    collected()
    assert HOST_MEMORY.kept_bytes >= 4 * np.prod(SHAPE)
    again = [checkpoint.restore(saved / "twos", like)["w"] for _ in range(4)]
    places = [each.addressable_shards[0].data.unsafe_buffer_pointer() for each in again]
    assert place in places and len(set(places)) == 4
