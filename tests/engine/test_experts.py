"""An expert axis: experts are apart, everything else is sharded over `fsdp` and `expert` together."""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.errors import CallError
from jshard.inspect.communication import traffic_of
from jshard.train import load_model_file
from tests.helpers import compile_to_read, placed
from tests.micro_gpt import MODELS
from tests.parity import assert_parity, flat, train

MOE_FILE = load_model_file(MODELS / "moe.py")
moe = sys.modules[MOE_FILE.build.__module__]

# Room for fewer tokens than are sent: some find no place.
MICRO_MOE = dataclasses.replace(
    MOE_FILE.recipe("tiny")[1].model,
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    d_model=32,
    d_ff=64,
    capacity=1.0,
    remat="none",
)
IDS = np.random.default_rng(0).integers(0, 256, (16, 17), dtype=np.int32)
BATCH = {"inputs": IDS[:, :-1], "targets": IDS[:, 1:]}


def build_moe(config=MICRO_MOE):
    return MOE_FILE.build(config, nnx.Rngs(0))


def moe_annotator(mesh):
    return lambda model: MOE_FILE.annotate(model, mesh)


def test_training_of_experts_is_that_of_one_device():
    mesh = js.mesh(fsdp=2, expert=2, tensor=2)
    build = lambda: build_moe(dataclasses.replace(MICRO_MOE, n_layer=1))
    assert_parity(build, moe_annotator(mesh), moe.loss_fn, (BATCH,))


# ---- What is compiled ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_experts():
    """A step on replica x fsdp x expert: its collectives and its plan."""
    model = js.abstract_init(build_moe, moe_annotator(js.mesh(replica=2, fsdp=2, expert=2)))
    step = nnx.jit(lambda model, batch: nnx.value_and_grad(moe.loss_fn)(model, batch))
    return js.audit(compile_to_read(step.lower(model, BATCH).lowered), model=model)


@pytest.mark.wide
def test_experts_are_placed_apart_and_are_sharded_besides(of_experts):
    gate = of_experts.plan.leaf("blocks/moe/experts/gate").placement
    assert gate.spec == (None, "expert", None, "fsdp") and gate.shards == 4
    assert gate.gathered_bytes * 2 == gate.logical_bytes  # never more than those that are here
    q = of_experts.plan.leaf("blocks/attention/q/kernel").placement
    assert q.spec == (None, ("fsdp", "expert"), None) and q.shards == 4
    assert q.gathered_bytes == q.logical_bytes


def sent(audit, kind):
    """Bytes by axes; those of a reduce-scatter are of its result."""
    found = dict.fromkeys([row.over for row in audit.rows if row.kind == kind], 0)
    for row in audit.rows:
        if row.kind == kind:
            found[row.over] += row.total_bytes
    return found


def test_only_tokens_travel_over_the_expert_axis_alone(of_experts):
    over = [row for row in of_experts.rows if row.over == ("expert",)]
    assert {row.kind for row in over} == {"all-to-all"}
    for phase in ("forward", "backward"):  # there and back in every layer
        assert sum(row.executions for row in over if row.phase == phase) == 2 * MICRO_MOE.n_layer
    batch, length = 16 // 8, 16
    places = MICRO_MOE.n_expert * math.ceil(MICRO_MOE.capacity * MICRO_MOE.top_k * length / MICRO_MOE.n_expert)
    each = batch * places * MICRO_MOE.d_model * 4
    assert sum(row.total_bytes for row in over) == 4 * MICRO_MOE.n_layer * each


def test_gradients_are_reduced_where_their_parameters_are_stored(of_experts):
    """Those of experts over `fsdp` alone, of others over both axes at once; the shards over `replica`."""
    assert of_experts.ok, of_experts.differences
    leaves = [leaf for leaf in of_experts.plan.leaves if leaf.placement.dim is not None]
    stored = {("fsdp",): 0, ("fsdp", "expert"): 0}
    for leaf in leaves:
        stored[leaf.placement.axes] += leaf.placement.gathered_bytes
    assert sent(of_experts, "reduce-scatter") == stored
    reduced = sent(of_experts, "all-reduce")
    assert set(reduced) == {("replica",), ("replica", "fsdp", "expert")}
    assert reduced["replica",] == sum(leaf.placement.bytes_per_device for leaf in leaves)
    asked = {t.axes: t.full_bytes for t in traffic_of(of_experts.plan) if t.kind == "all-reduce"}
    assert asked["replica",] == reduced["replica",]


def test_a_device_holds_what_it_holds_without_experts():
    """Within 1 %: Mixtral of 8 x 8 devices held 10.12 GiB each where fsdp=64 held 8.16."""
    _, recipe = MOE_FILE.recipe("mixtral_8x7b")

    def held(**degrees):
        mesh = js.mesh(devices=64, **degrees)
        return js.plan(js.abstract_init(lambda: build_moe(recipe.model), moe_annotator(mesh))).bytes_per_device

    assert held(fsdp=8, expert=8) == pytest.approx(held(fsdp=64), rel=0.01)
    assert held(fsdp=1, expert=8, replica=8) == pytest.approx(held(fsdp=8, replica=8), rel=0.01)


def test_the_batch_is_split_over_the_expert_axis_too():
    mesh = js.mesh(fsdp=-1, expert=4)
    assert dict(mesh.shape) == {"replica": 1, "fsdp": 2, "expert": 4, "tensor": 1}
    placed = js.shard_batch(np.arange(16), mesh)
    assert {s.data.shape for s in placed.addressable_shards} == {(2,)}
    with pytest.raises(CallError, match=r"over 8 data shards \(fsdp=2, expert=4\)"):
        js.shard_batch(np.arange(12), mesh)


# ---- What is stored over both axes, in other settings ----------------------------------------------


class Mixture(nnx.Module):
    """Each token to its best expert of eight, after a layer that all share."""

    def __init__(self, rngs):
        self.shared = nnx.Linear(32, 32, rngs=rngs)
        self.router = nnx.Linear(32, 8, rngs=rngs)
        self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, 32, 64)))
        self.down = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, 64, 32)))

    def __call__(self, x_BTD):
        x_BTD = x_BTD + self.shared(x_BTD)
        score_BTE = jax.nn.softmax(self.router(x_BTD))
        send_BTE = jax.nn.one_hot(score_BTE.argmax(-1), 8)
        x_EBTD = js.parallel.to_experts(jnp.einsum("bte,btd->ebtd", send_BTE, x_BTD))
        h_EBTF = nnx.relu(jnp.einsum("ebtd,edf->ebtf", x_EBTD, self.up[...]))
        y_EBTD = js.parallel.from_experts(jnp.einsum("ebtf,efd->ebtd", h_EBTF, self.down[...]))
        return x_BTD + jnp.einsum("bte,ebtd->btd", send_BTE * score_BTE, y_EBTD)


class DecodesByExperts(nnx.Module):
    """Its table of 1003 tokens is stored padded."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(1003, 32, rngs=rngs)
        self.layers = nnx.List([Mixture(rngs) for _ in range(2)])

    def __call__(self, ids_BT):
        x_BTD = self.tokens(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.tokens.attend(x_BTD)


def build():
    return DecodesByExperts(nnx.Rngs(0))


def annotator(mesh, **settings):
    def annotate(model):
        js.parallel.split(model, {"*/up": ("expert", None, None), "*/down": ("expert", None, None)})
        placement = js.PlacementPolicy(shard_dim=lambda path, shape: 0 if shape[0] == 1003 else None, **settings)
        layers = {"placement": js.PlacementPolicy(**settings)}
        js.fully_shard(model.layers[0], mesh=mesh, reshard_after_forward=mesh.shape["fsdp"], **layers)
        js.fully_shard(model.layers[1], mesh=mesh, **layers)
        js.fully_shard(model, mesh=mesh, placement=placement)

    return annotate


def loss_fn(model, ids_BT):
    log_BTV = jax.nn.log_softmax(model(ids_BT))
    return -jnp.take_along_axis(log_BTV, ids_BT[..., None], -1).mean() + (log_BTV**2).mean() / 1e3


@pytest.fixture(scope="module")
def one_device():
    return train(build(), loss_fn, (IDS,))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("degrees", "settings", "accumulate"),
    [
        ({"replica": 2, "fsdp": 2, "expert": 2}, {}, {}),
        ({"fsdp": 2, "expert": 4}, {}, {"accumulate": 2, "sync": "last"}),
        ({"fsdp": 1, "expert": 8}, {"offload": "params"}, {"accumulate": 2}),
    ],
)
def test_in_other_settings_it_is_one_device(one_device, degrees, settings, accumulate):
    """HSDP, padding, pieces kept, copies gathered once, parameters in host memory."""
    grad = lambda loss_fn: js.value_and_grad(loss_fn, **accumulate)
    annotate = annotator(js.mesh(**degrees), **settings)
    assert_parity(build, annotate, loss_fn, (IDS,), grad=grad, wanted=one_device)


@pytest.mark.wide
def test_beside_context_it_is_one_device():
    """Stored over all three axes, experts over two and `expert`."""
    mesh, ids = js.mesh(fsdp=2, expert=2, context=2), IDS[:, :14]
    assert_parity(build, annotator(mesh), loss_fn, (ids,))
    model = js.abstract_init(build, annotator(mesh))
    assert model.layers[1].shared.kernel.sharding.spec == P(("fsdp", "expert", "context"), None)
    assert model.layers[1].up.sharding.spec == P("expert", None, ("fsdp", "context"))


@pytest.mark.wide
def test_a_checkpoint_is_restored_onto_other_degrees(tmp_path):
    def state(**degrees):
        model = placed(build, annotator(js.mesh(**degrees)))
        return {"model": model, "optimizer": js.shard_optimizer(model, optax.adam(1e-2))}

    saved = state(fsdp=2, expert=4)
    nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.grad(loss_fn)(model, IDS)))(**saved)
    js.checkpoint.save(tmp_path / "c", saved)
    for degrees in ({"replica": 2, "fsdp": 2, "expert": 2}, {"fsdp": 8}):
        found = js.checkpoint.restore(tmp_path / "c", like=state(**degrees))
        for name in saved:
            wanted, other = flat(nnx.state(saved[name])), flat(nnx.state(found[name]))
            assert wanted.keys() == other.keys()
            for path, x in wanted.items():
                np.testing.assert_array_equal(other[path], x, err_msg=path)


# ---- Without places ------------------------------------------------------------------------------

DROPLESS = dataclasses.replace(MICRO_MOE, n_layer=1, capacity=0, n_shared=1, z_loss=0.01)


@pytest.mark.wide
def test_without_places_it_is_one_device():
    """With four experts a place, and with one, to which a token goes once at most."""
    build = lambda: build_moe(DROPLESS)
    alone = train(build(), moe.loss_fn, (BATCH,))
    for degrees in ({"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 1, "expert": 8}):
        assert_parity(build, moe_annotator(js.mesh(**degrees)), moe.loss_fn, (BATCH,), wanted=alone)


@pytest.mark.wide
def test_without_places_tokens_are_gathered_and_results_are_scattered():
    """And no parameters of experts are gathered over the axis."""
    model = js.abstract_init(lambda: build_moe(DROPLESS), moe_annotator(js.mesh(fsdp=2, expert=4)))
    step = nnx.jit(lambda model, batch: nnx.value_and_grad(moe.loss_fn)(model, batch))
    audit = js.audit(compile_to_read(step.lower(model, BATCH).lowered), model=model)
    assert audit.ok, audit.differences
    found = {}
    for row in audit.mixing:
        if row.over == ("expert",) and row.total_bytes >= 16 // 2 * 16 * DROPLESS.d_model * 4:
            found[row.kind, row.phase] = found.get((row.kind, row.phase), 0) + row.executions
    assert found == {
        ("all-gather", "forward"): 1,
        ("all-gather", "backward"): 2,  # forward again, and the gradient of its result
        ("reduce-scatter", "forward"): 1,
        ("reduce-scatter", "backward"): 1,
    }


# ---- The model itself ----------------------------------------------------------------------------


def mixture(capacity):
    config = dataclasses.replace(MICRO_MOE, capacity=capacity)
    return moe.MoE(config, rngs=nnx.Rngs(3)), jnp.asarray(
        np.random.default_rng(1).normal(size=(2, 16, 32)), jnp.float32
    )


call_layer = nnx.jit(lambda layer, x: layer(x))


def test_with_room_for_all_it_is_the_mixture_of_the_best_experts():
    layer, x_BTD = mixture(MICRO_MOE.n_expert / MICRO_MOE.top_k)
    found, (share_E, score_E, _) = call_layer(layer, x_BTD)
    every_EBTD = call_layer(layer.experts, jnp.broadcast_to(x_BTD, (MICRO_MOE.n_expert, *x_BTD.shape)))
    score_BTE = jax.nn.softmax(layer.router(x_BTD))
    best_BTE = jnp.where(score_BTE >= jnp.sort(score_BTE)[..., -MICRO_MOE.top_k, None], score_BTE, 0)
    wanted = jnp.einsum("bte,ebtd->btd", best_BTE / best_BTE.sum(-1, keepdims=True), every_EBTD)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose([share_E.sum(), score_E.sum()], 1, rtol=1e-6)
    layer.config = dataclasses.replace(MICRO_MOE, capacity=0)  # without places, the same
    np.testing.assert_allclose(call_layer(layer, x_BTD)[0], found, rtol=1e-5, atol=1e-8)


def test_places_go_to_first_choices_and_to_earlier_tokens():
    layer, _ = mixture(0.5)  # two places for each of eight experts
    chosen_BTn = jnp.asarray([[[0, 1]] * 3 + [[1, 0]] * 13])
    place_BTn, token_BEC = layer.places(chosen_BTn)
    np.testing.assert_array_equal(token_BEC[0], [[0, 1], [3, 4], *[[16, 16]] * 6])
    np.testing.assert_array_equal(place_BTn[0, :4], [[0, 13], [1, 14], [2, 15], [0, 3]])
