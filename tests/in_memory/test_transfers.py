"""Transfers between shards: every element once, as few bytes as possible, and rounds that one permute can do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jshard.in_memory import arrays
from jshard.in_memory.arrays import moved, on_hosts, sent_from, transfers_for
from jshard.in_memory.transfers import least_elements, moved_elements, rounds_of, shards_of

DTYPES = (np.float32, np.int8, np.bool_, jnp.bfloat16, jnp.float8_e4m3fn, np.complex64)


@st.composite
def shardings(draw):
    """A sharding of an array of two dims, over some of the devices, and its degree along each dim."""
    degrees = draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)).filter(lambda d: np.prod(d) <= 8))
    order = draw(st.permutations(range(8)))
    devices = np.array(jax.devices())[list(order[: np.prod(degrees)])].reshape(degrees)
    axes = draw(st.permutations(["a", "b", None]))
    mesh = Mesh(devices, ("a", "b", "copies"))
    by_axis = dict(mesh.shape) | {None: 1}
    return NamedSharding(mesh, PartitionSpec(*axes[:2])), [by_axis[axis] for axis in axes[:2]]


def stored(shape, degrees):
    """A shape padded to divide."""
    return tuple(-(-size // degree) * degree for size, degree in zip(shape, degrees, strict=True))


@settings(max_examples=150, deadline=None)
@given(shardings(), shardings(), st.tuples(st.integers(0, 13), st.integers(1, 9)))
def test_every_element_of_every_target_arrives_once_and_nothing_else(source, target, shape):
    (source, source_degrees), (target, target_degrees) = source, target
    struct = jax.ShapeDtypeStruct(stored(shape, target_degrees), np.float32, sharding=target)
    transfers = transfers_for(source, stored(shape, source_degrees), shape, struct)
    targets = shards_of(target, struct.shape, shape)
    written = {shard.device: np.zeros(shape, int) for shard in targets}
    for transfer in transfers:
        box = tuple(slice(*limits) for limits in transfer.box)
        written[transfer.target.device][box] += 1
    for shard in targets:
        expected = np.zeros(shape, int)
        expected[tuple(slice(*limits) for limits in shard.box)] = 1
        np.testing.assert_array_equal(written[shard.device], expected)
    assert moved_elements(transfers) == least_elements(shards_of(source, stored(shape, source_degrees), shape), targets)


@settings(max_examples=100, deadline=None)
@given(shardings(), shardings())
def test_in_a_round_boxes_are_alike_and_no_device_sends_or_receives_twice(source, target):
    struct = jax.ShapeDtypeStruct((12, 12), np.float32, sharding=target[0])
    transfers = transfers_for(source[0], (12, 12), (12, 12), struct)
    rounds = rounds_of(transfers)
    assert sorted(map(hash, (transfer for group in rounds for transfer in group))) == sorted(map(hash, transfers))
    for group in rounds:
        assert len({transfer.shape for transfer in group}) == 1
        assert len({transfer.is_local for transfer in group}) == 1
        assert len({transfer.source.device for transfer in group}) == len(group)
        assert len({transfer.target.device for transfer in group}) == len(group)


def on(first, last, spec, shape=None, names=("x",)):
    devices = np.array(jax.devices()[first:last])
    return NamedSharding(Mesh(devices.reshape(shape or devices.shape), names), PartitionSpec(*spec))


MOVES = {  # shape, stored shape and sharding of the source, of the target
    "3 to 5 devices": ((15, 3), (15, 3), on(0, 3, ["x"]), (15, 3), on(3, 8, ["x"])),
    "another dim": ((16, 6), (16, 6), on(0, 8, ["x"]), (16, 6), on(0, 8, ["a", "b"], (4, 2), ("a", "b"))),
    "other padding": ((13, 3), (16, 3), on(0, 4, ["x"]), (15, 3), on(2, 7, ["x"])),
    "a number": ((), (), on(0, 4, []), (), on(0, 8, [])),
    "copies": ((8, 6), (8, 6), on(0, 8, ["x"], (2, 4), ("r", "x")), (8, 6), on(0, 2, [None, "x"])),
    "from one device": ((8, 6), (8, 6), SingleDeviceSharding(jax.devices()[0]), (8, 6), on(0, 8, ["x"])),
    "nothing": ((0, 6), (0, 6), SingleDeviceSharding(jax.devices()[0]), (0, 6), on(0, 8, ["x"])),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", MOVES)
def test_an_array_arrives_bit_for_bit_with_zeros_for_padding(name, dtype, monkeypatch):
    shape, stored_shape, source, target_shape, target = MOVES[name]
    values = np.random.default_rng(0).standard_normal(shape) * 10
    values = np.asarray(values).astype(dtype)
    if dtype is np.float32 and values.size > 1:
        values.flat[0], values.flat[1] = -0.0, np.nan
    array = jax.device_put(padded(values, stored_shape), source)
    struct = jax.ShapeDtypeStruct(target_shape, dtype, sharding=target)
    result = moved(array, shape, struct)
    assert result.sharding == target
    assert np.asarray(result).tobytes() == padded(values, target_shape).tobytes()
    assert on_hosts(array, shape, [0]).tobytes() == values.tobytes()
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 64)  # several chunks
    result = sent_from(0, lambda box: values[box], shape, np.dtype(dtype), struct)
    assert np.asarray(result).tobytes() == padded(values, target_shape).tobytes()


def padded(values, shape):
    result = np.zeros(shape, values.dtype)
    result[tuple(slice(0, size) for size in values.shape)] = values
    return result
