"""A value written to a variable of a placed model is placed as planned, from wherever it comes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.plans.padding import logical_shape

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


class OneOfEachPlacement(nnx.Module):
    """A parameter whose dim divides, one that is stored padded, and one that is small."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(64, 64, rngs=rngs)
        self.embed = nnx.Embed(1003, 67, rngs=rngs)
        self.out = nnx.Linear(67, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.a(x) + self.out(self.embed(jnp.arange(x.shape[0])))


def made(seed: int = 0) -> OneOfEachPlacement:
    return js.shard_init(lambda: OneOfEachPlacement(nnx.Rngs(seed)), lambda m: js.fully_shard(m, mesh=js.mesh()))


def shardings(model: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{x.sharding.spec}, {x.sharding.num_devices}"
        for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(model))
    }


def values(model: Any) -> dict:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def padding(variable: nnx.Variable) -> np.ndarray:
    stored, shape = np.array(variable.get_raw_value()), logical_shape(variable)
    stored[tuple(map(slice, shape))] = 0
    return stored


def by_update(model: OneOfEachPlacement, full: dict) -> OneOfEachPlacement:
    state = nnx.state(OneOfEachPlacement(nnx.Rngs(1)), nnx.Param)
    nnx.replace_by_pure_dict(state, full)
    nnx.update(model, state)
    return model


def by_replacing_in_its_state(model: OneOfEachPlacement, full: dict) -> OneOfEachPlacement:
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, full)
    nnx.update(model, state)
    return model


def by_pure_dict(model: OneOfEachPlacement, full: dict) -> OneOfEachPlacement:
    nnx.update(model, full)
    return model


def by_item(model: OneOfEachPlacement, full: dict) -> OneOfEachPlacement:
    for name, layer in full.items():
        for key, value in layer.items():
            getattr(getattr(model, name), key)[...] = value
    return model


def by_set_value(model: OneOfEachPlacement, full: dict) -> OneOfEachPlacement:
    for name, layer in full.items():
        for key, value in layer.items():
            getattr(getattr(model, name), key).set_value(value)
    return model


def into_a_clone(model: OneOfEachPlacement, full: dict) -> OneOfEachPlacement:
    return by_update(nnx.clone(model), full)


WRITERS = [by_update, by_replacing_in_its_state, by_pure_dict, by_item, by_set_value, into_a_clone]
SOURCES: dict[str, Callable[[np.ndarray], Any]] = {
    "host": np.asarray,
    "uncommitted": jnp.asarray,
    "one device": lambda x: jax.device_put(x, jax.devices()[0]),
    "another device": lambda x: jax.device_put(x, jax.devices()[5]),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("write", WRITERS)
def test_written_values_are_placed_as_planned(write, source):
    model, new = made(), OneOfEachPlacement(nnx.Rngs(7))
    planned, wanted = shardings(model), values(new)
    model = write(model, jax.tree.map(SOURCES[source], wanted))
    assert shardings(model) == planned
    jax.tree.map(np.testing.assert_array_equal, values(model), wanted)
    assert not padding(model.embed.embedding).any()
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, X), new(X), rtol=1e-5, atol=1e-5)


def test_a_state_written_as_a_function_of_raw_arrays_has_zeros_for_padding():
    model = made()
    planned, before = shardings(model), values(model)
    nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param)))
    assert shardings(model) == planned
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b + 1, rtol=1e-6), values(model), before)
    assert not padding(model.embed.embedding).any()


def test_values_written_inside_jit_are_placed_and_padded_as_planned():
    @nnx.jit
    def renew(model: OneOfEachPlacement) -> None:
        nnx.update(model, jax.tree.map(lambda x: jnp.ones_like(x) * 3, nnx.state(model, nnx.Param)))
        model.a.kernel[...] = jnp.full((64, 64), 2.0)

    model = made()
    planned = shardings(model)
    renew(model)
    assert shardings(model) == planned
    assert not padding(model.embed.embedding).any()
    assert float(model.embed.embedding[0, 0]) == 3 and float(model.a.kernel[0, 0]) == 2


def test_rows_of_one_device_can_be_written_into_a_sharded_parameter():
    model, row = made(), jax.device_put(jnp.arange(64.0), jax.devices()[3])
    planned = shardings(model)
    model.a.kernel[2] = row
    model.embed.embedding[1002] = jax.device_put(jnp.arange(67.0), jax.devices()[3])
    assert shardings(model) == planned
    np.testing.assert_array_equal(model.a.kernel[2], np.arange(64.0))
    np.testing.assert_array_equal(model.embed.embedding[1002], np.arange(67.0))


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_merged_from_a_full_state_is_placed_by_its_first_call(source):
    plain = OneOfEachPlacement(nnx.Rngs(7))
    planned, graphdef = shardings(made()), nnx.graphdef(made())
    state = jax.tree.map(SOURCES[source], nnx.state(plain))
    model = nnx.merge(graphdef, state)
    notes = str(js.explain(model))
    assert "Not placed as planned: 5 parameters" in notes
    assert ("an array of the host" if source == "host" else "whole on one device") in notes
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-5, atol=1e-5)
    assert shardings(model) == planned
    assert "Not placed as planned" not in str(js.explain(model))
    nnx.update(model, jax.tree.map(np.asarray, nnx.state(plain)))  # and from then on by each write
    assert shardings(model) == planned


def test_a_model_merged_from_a_plain_state_inside_jit_computes_and_differentiates_as_the_plain_one():
    graphdef, plain = nnx.graphdef(made()), OneOfEachPlacement(nnx.Rngs(7))

    def loss(state: nnx.State, graphdef: nnx.GraphDef) -> jax.Array:
        return (nnx.merge(graphdef, state)(X) ** 2).mean()

    total, grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(nnx.state(plain), graphdef)
    wanted, wanted_grads = jax.value_and_grad(loss)(nnx.state(plain), nnx.graphdef(plain))
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, wanted_grads)


def test_a_variable_put_in_the_place_of_another_is_placed_by_the_next_call():
    model = made()
    planned = shardings(model)
    model.a.kernel = nnx.Param(jax.device_put(jnp.ones((64, 64)), jax.devices()[0]))
    model(X)
    assert shardings(model) == planned


def test_a_model_closed_over_by_a_compiled_function_holds_no_value_of_its_trace():
    model = nnx.merge(nnx.graphdef(made()), nnx.state(OneOfEachPlacement(nnx.Rngs(7))))
    jax.jit(lambda x: model(x))(X)
    assert np.isfinite(np.asarray(model.a.kernel[...])).all()
    assert model.a.kernel.get_raw_value().sharding.num_devices == 8


def test_written_optimizer_state_is_placed_as_planned():
    model = made()
    optimizer = js.shard_optimizer(model, optax.adam(1e-2))
    planned = shardings(optimizer)
    nnx.update(optimizer, jax.tree.map(lambda x: np.asarray(x) + 1, nnx.state(optimizer)))
    assert shardings(optimizer) == planned
    padded = [x for _, x in nnx.to_flat_state(nnx.state(optimizer)) if logical_shape(x) != x.get_raw_value().shape]
    assert len(padded) == 2 and not any(padding(x).any() for x in padded)


def test_the_tree_of_a_placed_model_is_that_of_a_plain_one():
    placed, plain = nnx.state(made(), nnx.Not(nnx.PathContains("embed"))), OneOfEachPlacement(nnx.Rngs(0))
    plain_state = nnx.state(plain, nnx.Not(nnx.PathContains("embed")))
    jax.tree.map(np.testing.assert_array_equal, placed, plain_state)
    assert type(made().a.kernel) is nnx.Param


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_deep_copy_is_placed_again_by_its_first_call(copied):
    model = copied(made())
    planned = shardings(made())
    by_update(model, values(OneOfEachPlacement(nnx.Rngs(7))))
    model(X)
    assert shardings(model) == planned


@pytest.mark.parametrize("axes", [{"replica": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}])
def test_written_values_are_placed_as_planned_on_other_meshes(axes):
    def annotate(model: OneOfEachPlacement) -> None:
        if "tensor" in axes:
            js.parallel.split(model, {"a/kernel": (None, "tensor")})
        js.fully_shard(model, mesh=js.mesh(**axes))

    model = js.shard_init(lambda: OneOfEachPlacement(nnx.Rngs(0)), annotate)
    planned, wanted = shardings(model), values(OneOfEachPlacement(nnx.Rngs(7)))
    by_update(model, wanted)
    assert shardings(model) == planned
    jax.tree.map(np.testing.assert_array_equal, values(model), wanted)


def test_values_written_to_an_offloaded_parameter_return_to_host_memory():
    model = OneOfEachPlacement(nnx.Rngs(0))
    js.fully_shard(model, mesh=js.mesh(), placement=js.PlacementPolicy(offload="params"))
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, nnx.state(model))
    by_update(model, values(OneOfEachPlacement(nnx.Rngs(7))))
    assert jax.tree.map(lambda x: x.sharding.memory_kind, nnx.state(model)) == kinds
    assert model.a.kernel.get_raw_value().sharding.memory_kind == "pinned_host"


def test_a_linen_model_takes_host_arrays_as_they_are():
    """The tree is the user's: `apply` computes with it; `js.shard_init` places it."""
    plain = nn.Dense(64)
    params = jax.tree.map(np.asarray, plain.init(jax.random.key(0), X))
    model = js.fully_shard(plain, mesh=js.mesh())
    np.testing.assert_allclose(model.apply(params, X), plain.apply(params, X), rtol=1e-5, atol=1e-5)
    on_one_device = jax.device_put(params, jax.devices()[0])
    placed = js.shard_init(lambda: on_one_device, model)
    assert placed["params"]["kernel"].sharding.num_devices == 8
    np.testing.assert_allclose(model.apply(placed, X), plain.apply(params, X), rtol=1e-5, atol=1e-5)
