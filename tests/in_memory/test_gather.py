"""`js.gather`: the logical values of a sharded state, whole, as a plain tree."""

import tracemalloc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.checkpoint import CheckpointError
from tests.helpers import Config, builder
from tests.in_memory.states import annotator, differences, padded_model, plain_values


@pytest.mark.parametrize("degree", [1, 3, 8])
def test_the_values_of_a_padded_and_tied_model_are_those_of_the_plain_one(degree):
    model = padded_model(js.mesh(fsdp=degree, devices=jax.devices()[:degree]))
    values = js.gather(model)
    assert differences(values, plain_values()) == []
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(values))


def test_optimizer_state_is_under_the_names_of_parameters():
    model = padded_model(js.mesh(fsdp=8))
    optimizer = js.shard_optimizer(model, optax.adam(1e-3))
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    values = js.gather(optimizer)
    moments = values["opt_state"][0]["mu"]
    expected = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), plain_values(nnx.Param))
    assert jax.tree.structure(moments) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(moments), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
        assert x.shape == y.shape


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(7)(nn.gelu(nn.Dense(65)(x)))


def test_linen_parameters_keep_their_tree_and_lose_their_padding():
    x = jnp.ones((8, 13))
    model = js.fully_shard(Net(), mesh=js.mesh(), placement=js.PlacementPolicy(shard_dim=0, min_size=8))
    params = js.shard_init(lambda: model.init(jax.random.key(0), x), model)
    values = js.gather(params)
    assert differences(values, jax.tree.map(np.asarray, Net().init(jax.random.key(0), x))) == []


def test_a_dict_of_parts_keeps_its_names_and_its_numbers():
    model = padded_model(js.mesh(fsdp=8))
    values = js.gather({"model": model, "step": 7, "note": "warm"})
    assert differences(values["model"], plain_values()) == []
    assert (values["step"], values["note"]) == (7, "warm")


def test_on_every_device_the_arrays_are_whole_and_logical():
    model = padded_model(js.mesh(fsdp=8))
    values = js.gather(model, where="all")
    assert differences(values, plain_values()) == []
    for x in jax.tree.leaves(values):
        assert x.is_fully_replicated and len(x.devices()) == 8


def test_values_stay_when_the_model_is_donated():
    model = padded_model(js.mesh(fsdp=8))
    before = js.gather(model)
    everywhere = js.gather(model, where="all")
    for x in jax.tree.leaves(nnx.state(model)):
        x.delete()
    assert differences(before, plain_values()) == []
    assert differences(everywhere, plain_values()) == []
    with pytest.raises(CheckpointError, match="gone"):
        js.gather(model)


def test_a_host_holds_the_values_once():
    config = Config(layers=2, width=256, hidden=1024, heads=4, vocab=512)
    model = padded_model(js.mesh(fsdp=8), config)
    num_bytes = js.plan(model).logical_bytes
    js.gather(model)  # what is imported and compiled at the first call does not count
    tracemalloc.start()
    try:
        values = js.gather(model)
        _, gathered_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before_bytes, _ = tracemalloc.get_traced_memory()
        js.load(model, values)
        _, loaded_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes <= gathered_bytes < 1.1 * num_bytes
    assert loaded_bytes - before_bytes < 0.2 * num_bytes


def test_an_abstract_state_has_no_values():
    with pytest.raises(CheckpointError, match="no values"):
        js.gather(js.abstract_init(builder(Config(layers=2)), annotator(js.mesh())))


def test_an_unknown_place_is_refused():
    with pytest.raises(CheckpointError, match="cannot be gathered"):
        js.gather(padded_model(js.mesh()), where="rank0")
