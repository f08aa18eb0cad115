"""Experts on an axis of their own: models/moe.py trains as on one device, tokens travel and experts do not."""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import CallError
from jshard.inspect.communication import traffic_of
from jshard.train import load_model_file
from tests.helpers import compile_to_read
from tests.micro_gpt import MODELS
from tests.parity import assert_parity

MOE_FILE = load_model_file(MODELS / "moe.py")
moe = sys.modules[MOE_FILE.build.__module__]

# Room for fewer tokens than are sent: some find no place.
MICRO = dataclasses.replace(
    MOE_FILE.recipe("tiny")[1].model, n_layer=2, n_head=2, n_kv_head=1, d_model=32, d_ff=64, capacity=1.0
)
IDS = np.random.default_rng(0).integers(0, 256, (16, 17), dtype=np.int32)
BATCH = {"inputs": IDS[:, :-1], "targets": IDS[:, 1:]}
THREE = {"replica": 2, "fsdp": 2, "expert": 2}


def build(config=MICRO):
    return MOE_FILE.build(config, nnx.Rngs(0))


def annotator(mesh):
    return lambda model: MOE_FILE.annotate(model, mesh)


def test_training_is_that_of_one_device():
    mesh = js.mesh(fsdp=2, expert=2, tensor=2)
    assert_parity(build, annotator(mesh), moe.loss_fn, (BATCH,), steps=3)


@pytest.fixture(scope="module")
def compiled():
    """A step on replica x fsdp x expert: its collectives and its plan."""
    mesh = js.mesh(**THREE)
    model = js.abstract_init(build, annotator(mesh))
    step = nnx.jit(lambda model, batch: nnx.value_and_grad(moe.loss_fn)(model, batch))
    return js.audit(compile_to_read(step.lower(model, BATCH).lowered), model=model)


def test_experts_lie_apart_and_are_sharded_besides(compiled):
    gate = compiled.plan.leaf("blocks/moe/experts/gate").placement
    assert gate.spec == (None, "expert", None, "fsdp") and gate.shards == 4
    assert gate.gathered_bytes * 2 == gate.logical_bytes  # never more than those that lie here
    assert compiled.plan.leaf("blocks/attention/q/kernel").placement.shards == 2


def test_only_tokens_travel_over_the_expert_axis(compiled):
    over = [row for row in compiled.rows if "expert" in row.over]
    assert {row.kind for row in over} == {"all-to-all", "all-reduce"}
    exchange = [row for row in over if row.kind == "all-to-all"]
    for phase in ("forward", "backward"):  # there and back in every layer
        assert sum(row.executions for row in exchange if row.phase == phase) == 2 * MICRO.n_layer
    batch, length = 16 // 8, 16
    places = MICRO.n_expert * math.ceil(MICRO.capacity * MICRO.top_k * length / MICRO.n_expert)
    each = batch * places * MICRO.d_model * 4
    assert sum(row.total_bytes for row in exchange) == 4 * MICRO.n_layer * each


def test_gradients_of_experts_are_not_summed_over_the_expert_axis(compiled):
    assert compiled.ok, compiled.differences
    experts = [leaf for leaf in compiled.plan.leaves if "/experts/" in leaf.path]
    others = [leaf for leaf in compiled.plan.leaves if "/experts/" not in leaf.path]
    found = dict.fromkeys((("replica",), ("replica", "expert"), ("replica", "fsdp", "expert")), 0)
    for row in compiled.rows:
        if row.kind == "all-reduce":
            found[row.over] += row.total_bytes
    assert found["replica",] == sum(leaf.placement.bytes_per_device for leaf in experts)
    shards = sum(leaf.placement.bytes_per_device for leaf in others if leaf.placement.dim is not None)
    assert found["replica", "expert"] == shards
    asked = {t.axes: t.full_bytes for t in traffic_of(compiled.plan) if t.kind == "all-reduce"}
    assert asked["replica",] == found["replica",] and asked["replica", "expert"] == shards


def test_the_batch_is_split_over_the_expert_axis_too():
    mesh = js.mesh(fsdp=-1, expert=4)
    assert dict(mesh.shape) == {"replica": 1, "fsdp": 2, "expert": 4, "tensor": 1}
    placed = js.shard_batch(np.arange(16), mesh)
    assert {s.data.shape for s in placed.addressable_shards} == {(2,)}
    with pytest.raises(CallError, match=r"over 8 data shards \(fsdp=2, expert=4\)"):
        js.shard_batch(np.arange(12), mesh)


# ---- The model itself ----------------------------------------------------------------------------


def test_recipes_have_their_size():
    _, recipe = MOE_FILE.recipe("mixtral_8x7b")
    params = nnx.state(nnx.eval_shape(lambda: build(recipe.model)), nnx.Param)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == 46_702_792_704
    assert moe.num_active(recipe.model) == 12_748_853_248
    tiny = nnx.state(nnx.eval_shape(lambda: build(MOE_FILE.recipe("tiny")[1].model)), nnx.Param)
    assert 1e6 < sum(math.prod(x.shape) for x in jax.tree.leaves(tiny)) < 3e6
    assert MOE_FILE.recipe()[0] == "tiny"


def mixture(capacity):
    config = dataclasses.replace(MICRO, capacity=capacity)
    return moe.MoE(config, rngs=nnx.Rngs(3)), jnp.asarray(
        np.random.default_rng(1).normal(size=(2, 16, 32)), jnp.float32
    )


call = nnx.jit(lambda layer, x: layer(x))


def test_with_room_for_all_it_is_the_mixture_of_the_best_experts():
    layer, x_BTD = mixture(MICRO.n_expert / MICRO.top_k)
    found, (share_E, score_E) = call(layer, x_BTD)
    every_EBTD = call(layer.experts, jnp.broadcast_to(x_BTD, (MICRO.n_expert, *x_BTD.shape)))
    score_BTE = jax.nn.softmax(layer.router(x_BTD))
    best_BTE = jnp.where(score_BTE >= jnp.sort(score_BTE)[..., -MICRO.top_k, None], score_BTE, 0)
    wanted = jnp.einsum("bte,ebtd->btd", best_BTE / best_BTE.sum(-1, keepdims=True), every_EBTD)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose([share_E.sum(), score_E.sum()], 1, rtol=1e-6)


def test_places_go_to_first_choices_and_to_earlier_tokens():
    layer, _ = mixture(0.5)  # two places for each of eight experts
    chosen_BTn = jnp.asarray([[[0, 1]] * 3 + [[1, 0]] * 13])
    place_BTn, token_BEC = layer.places(chosen_BTn)
    np.testing.assert_array_equal(token_BEC[0], [[0, 1], [3, 4], *[[16, 16]] * 6])
    np.testing.assert_array_equal(place_BTn[0, :4], [[0, 13], [1, 14], [2, 15], [0, 3]])
