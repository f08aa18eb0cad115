"""`js.reshard`: a state moves to another mesh in memory, with the least bytes, and computes on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard.checkpoint import CheckpointError
from jshard.checkpoint.formats import Stored
from jshard.in_memory import arrays
from tests.helpers import builder, loss_fn, token_batch
from tests.in_memory.states import CONFIG, annotator, differences, padded_model, plain_values

DEVICES = jax.devices()
MESHES = {
    "5 other devices": lambda: js.mesh(fsdp=5, devices=DEVICES[3:]),
    "more devices": lambda: js.mesh(fsdp=8),
    "one device": lambda: js.mesh(fsdp=1, devices=DEVICES[:1]),
    "copies and tensor": lambda: js.mesh(replica=2, fsdp=2, tensor=2),
}


def three():
    return js.mesh(fsdp=3, devices=DEVICES[:3])


@pytest.mark.parametrize("name", MESHES)
def test_a_model_and_its_optimizer_have_the_same_values_and_the_next_step_is_the_same(name):
    model = padded_model(three())
    optimizer = js.shard_optimizer(model, optax.sgd(0.1, momentum=0.9))
    batch = token_batch(CONFIG, batch=24)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return loss

    step(model, optimizer)
    annotate = annotator(MESHES[name]())
    moved = js.reshard({"model": model, "optimizer": optimizer, "step": jnp.array(1)}, annotate)
    assert differences(js.gather(moved["model"]), js.gather(model)) == []
    assert differences(js.gather(moved["optimizer"]), js.gather(optimizer)) == []
    planned = js.shard_init(builder(CONFIG), annotate)
    raw = lambda model: [x.sharding for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert raw(moved["model"]) == raw(planned)
    np.testing.assert_allclose(step(model, optimizer), step(moved["model"], moved["optimizer"]), rtol=1e-6)
    for x, y in zip(jax.tree.leaves(js.gather(model)), jax.tree.leaves(js.gather(moved["model"])), strict=True):
        if x.dtype == np.float32:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_the_first_state_stays_and_may_be_donated():
    model = padded_model(three())
    moved = js.reshard(model, annotator(three()))
    for x in jax.tree.leaves(nnx.state(model)):
        x.delete()
    assert differences(js.gather(moved), plain_values()) == []


@pytest.mark.parametrize("name", MESHES)
def test_the_forecast_is_the_least_possible(name):
    plan = js.reshard_plan(padded_model(three()), annotator(MESHES[name]()))
    assert plan.moved_bytes == plan.least_bytes
    assert plan.between_processes_bytes == 0
    if name == "one device":
        # The device has a third of every array already; parameters of one row each are not divided exactly.
        whole = sum(x.nbytes for x in jax.tree.leaves(plain_values()))
        assert plan.total_bytes == pytest.approx(whole, rel=0.01)
        assert plan.moved_bytes == pytest.approx(whole * 2 / 3, rel=0.02)


def test_what_a_device_holds_beside_both_states_is_as_forecast_and_less_than_a_unit(monkeypatch):
    model = padded_model(three())
    annotate = annotator(js.mesh(fsdp=5, devices=DEVICES[2:7]))
    plan = js.reshard_plan(model, annotate)
    exchange = arrays.exchange
    blocks = []

    def counted(transfers, sources, targets, **settings):
        itemsize = np.dtype(settings["dtype"]).itemsize
        blocks.append(itemsize * (np.prod(sources.shape) + 2 * np.prod(targets.shape)))
        return exchange(transfers, sources, targets, **settings)

    monkeypatch.setattr(arrays, "exchange", counted)
    js.reshard(model, annotate)
    assert max(blocks) == plan.extra_bytes
    unit_bytes = max(
        sum(leaf.placement.logical_bytes for leaf in js.plan(model).unit_leaves(f"blocks/{i}")) for i in (0, 1)
    )
    assert plan.extra_bytes < unit_bytes


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(7)(nn.gelu(nn.Dense(65)(x)))


def test_linen_parameters_go_where_an_abstract_tree_says():
    x = jnp.ones((24, 13))

    def annotated(mesh):
        return js.fully_shard(Net(), mesh=mesh, placement=js.PlacementPolicy(shard_dim=0, min_size=8))

    model, other = annotated(three()), annotated(js.mesh(fsdp=8))
    init = lambda model: lambda: model.init(jax.random.key(0), x)
    params = js.shard_init(init(model), model)
    moved = js.reshard(params, js.abstract_init(init(other), other))
    assert differences(js.gather(moved), js.gather(params)) == []
    np.testing.assert_allclose(other.apply(moved, x), model.apply(params, x), rtol=1e-5, atol=1e-6)


def test_smaller_floats_are_cast_before_they_are_sent(monkeypatch):
    model = padded_model(three())
    mesh = js.mesh(fsdp=2, devices=DEVICES[4:6])
    served = nnx.state(js.abstract_init(builder(CONFIG), annotator(mesh)), nnx.Param)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), served)
    params = nnx.state(model, nnx.Param)
    assert js.reshard_plan(params, half).moved_bytes * 2 == js.reshard_plan(params, served).moved_bytes
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), plain_values(nnx.Param))
    assert differences(js.gather(js.reshard(params, half)), expected) == []


class Mixed(nnx.Module):
    """Queries, keys and values in one kernel, and a stack of experts."""

    def __init__(self, rngs):
        self.qkv = nnx.Linear(8, 24, use_bias=False, rngs=rngs)
        self.experts = nnx.Param(jnp.arange(96.0).reshape(2, 8, 6))


def test_another_librarys_names_and_layout_as_a_server_holds_them():
    mesh = js.mesh(fsdp=4, devices=DEVICES[:4])
    model = js.fully_shard(Mixed(nnx.Rngs(0)), mesh=mesh, placement=js.PlacementPolicy(shard_dim=0, min_size=1))
    names = {
        "qkv/kernel": Stored("q.weight", "k.weight", "v.weight", transpose=True),
        "experts": Stored("w.0", "w.1", transpose=True, stack=0),
    }
    served_on = NamedSharding(js.mesh(fsdp=2, devices=DEVICES[6:]), PartitionSpec("fsdp"))
    shapes = dict.fromkeys(("q.weight", "k.weight", "v.weight"), (8, 8)) | {"w.0": (6, 8), "w.1": (6, 8)}
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=served_on) for name, shape in shapes.items()}
    served = js.reshard(model, like, names=names)
    q, k, v = np.split(js.gather(model)["qkv"]["kernel"].T, 3)
    experts = js.gather(model)["experts"]
    expected = {"q.weight": q, "k.weight": k, "v.weight": v, "w.0": experts[0].T, "w.1": experts[1].T}
    for name, array in served.items():
        assert array.sharding == served_on
        np.testing.assert_array_equal(array, expected[name])
    assert js.reshard_plan(model, like, names=names).moved_bytes == sum(x.nbytes for x in expected.values())


def test_an_annotation_for_a_state_without_a_model_is_refused():
    with pytest.raises(CheckpointError, match="which model"):
        js.reshard({"weights": jnp.ones(3)}, annotator(three()))


def test_a_target_of_other_shapes_is_refused_by_path():
    params = nnx.state(padded_model(three()), nnx.Param)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), params)
    with pytest.raises(CheckpointError, match="norm/scale"):
        js.reshard(params, like)
