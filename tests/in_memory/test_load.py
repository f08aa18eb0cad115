"""`js.load`: values from a tree in memory, strict or partial, with the names and messages of a restore."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.checkpoint import CheckpointError, CheckpointWarning
from jshard.checkpoint.formats import Stored
from tests.in_memory.states import differences, padded_model, plain_values


@pytest.fixture(scope="module")
def other():
    return padded_model(js.mesh(replica=2, fsdp=4), seed=1)


class Holder(nnx.Module):
    def __init__(self, shape):
        self.kernel = nnx.Param(jnp.zeros(shape))


def kernel(model):
    return model.blocks[0].up.kernel


def test_it_is_the_inverse_of_gather_on_any_mesh(other):
    values = js.gather(padded_model(js.mesh(fsdp=3, devices=jax.devices()[:3])))
    loaded = js.load(other, values)
    assert differences(js.gather(loaded), plain_values()) == []
    assert kernel(loaded).get_raw_value().sharding == kernel(other).get_raw_value().sharding
    assert differences(js.gather(other), plain_values()) != []  # it is not changed


def test_an_abstract_model_and_its_optimizer_are_filled(other):
    model = padded_model(js.mesh(fsdp=8))
    state = {"model": model, "optimizer": js.shard_optimizer(model, optax.adamw(1e-3)), "step": 3}
    like = {"model": other, "optimizer": js.shard_optimizer(other, optax.adamw(1e-3)), "step": 0}
    loaded = js.load(like, js.gather(state))
    assert differences(js.gather(loaded["optimizer"]), js.gather(state["optimizer"])) == []
    assert loaded["step"] == 3


def test_a_part_is_loaded_on_request_and_the_rest_keeps_its_values(other):
    values = plain_values()
    part = {"blocks": {0: values["blocks"][0]}}
    with pytest.raises(CheckpointError, match="stored nothing"):
        js.load(other, part)
    with pytest.warns(CheckpointWarning, match="keep their values"):
        loaded = js.load(other, part, missing="init")
    assert differences(js.gather(loaded)["blocks"][0], values["blocks"][0]) == []
    assert differences(js.gather(loaded)["blocks"][1], js.gather(other)["blocks"][1]) == []


def test_a_surplus_and_a_wrong_shape_are_refused_by_path(other):
    values = plain_values()
    values["head"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match="no place for"):
        js.load(other, values)
    with pytest.warns(CheckpointWarning, match="skipped"):
        js.load(other, values, extra="ignore")
    del values["head"]
    values["norm"]["scale"] = np.zeros(65, np.float32)
    with pytest.raises(CheckpointError, match=r"norm/scale  stored \(65,\)  wanted \(64,\)"):
        js.load(other, values)


def test_layers_in_a_list_are_loaded_into_a_stack():
    stacked = Holder((2, 3, 4))
    layers = {"kernel": {0: np.ones((3, 4), np.float32), 1: np.full((3, 4), 2, np.float32)}}
    loaded = js.load(stacked, layers)
    np.testing.assert_array_equal(loaded.kernel[...], np.stack(list(layers["kernel"].values())))


def test_another_librarys_names_and_layout():
    like = Holder((4, 6))
    stored = {"proj.weight": np.arange(24, dtype=np.float32).reshape(6, 4)}
    loaded = js.load(like, stored, names={"kernel": Stored("proj.weight", transpose=True)})
    np.testing.assert_array_equal(loaded.kernel[...], stored["proj.weight"].T)


class Tensor:
    """An array of a library that NumPy can read."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


def test_arrays_of_other_libraries():
    like = Holder((2, 3))
    np.testing.assert_array_equal(js.load(like, {"kernel": Tensor(np.ones((2, 3), np.float32))}).kernel[...], 1)


def test_values_under_another_name_are_found_and_the_line_can_be_pasted():
    like = {"model": Holder((2, 3))}
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        js.load(like, {"kernel": np.ones((2, 3), np.float32)})
    assert 'js.load(like, values, rename={"model": ""})' in caught.value.do


def test_no_values_at_all(other):
    with pytest.raises(CheckpointError, match="no values"):
        js.load(other, None)
