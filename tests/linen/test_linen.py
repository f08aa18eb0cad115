"""A Linen model under `js.fully_shard`: the gradients of one device, the schedule and the collectives of a unit."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jshard as js
from tests.helpers import compile_to_read
from tests.linen_models import (
    VOCAB,
    WIDTH,
    Block,
    Decoder,
    Layer,
    Scanned,
    SetupDecoder,
    X,
    Y,
    assert_equal,
    assert_same,
    creator,
    cross_entropy,
    tokens,
)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch": 0, "remat": "dots", "reshard_after_forward": 2},
        {"prefetch": "40KB", "remat": "full", "mesh": js.mesh(replica=2, fsdp=4)},
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(settings):
    assert_equal(Decoder(depth=3), units=Block, **settings)


def test_gradients_in_setup_style():
    assert_equal(SetupDecoder(depth=2), units="blocks_*")


def test_units_may_differ_in_their_settings():
    units = {
        "block_0": {"remat": "full", "prefetch": 0},
        Block: {"reshard_after_forward": False, "placement": js.PlacementPolicy(min_size=4096)},
    }
    plan = js.plan(assert_equal(Decoder(depth=3), units=units))
    assert [(u.remat, u.prefetch, u.reshard_after_forward) for u in plan.units[1:3]] == [
        ("full", "0", True),
        ("auto", "1", False),
    ]
    assert plan.leaf("block_1/Dense_0/kernel").placement.dim == 1
    assert plan.leaf("block_1/LayerNorm_0/scale").placement.because.startswith("smaller than min_size (32 < 4096")


def create(model: nn.Module) -> TrainState:
    return creator(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))()


def train(state: TrainState) -> tuple[TrainState, int]:
    """Three steps of plain Flax, and how often the step was traced."""
    traces = 0

    @jax.jit
    def step(state, ids, labels):
        nonlocal traces
        traces += 1
        grads = jax.grad(lambda params: cross_entropy(state.apply_fn({"params": params}, ids), labels))(state.params)
        return state.apply_gradients(grads=grads)

    for seed in range(3):
        state = step(state, *tokens(seed=seed))
    return state, traces


def test_a_train_state_is_born_sharded_and_trains_as_on_one_device():
    model = js.fully_shard(Decoder(depth=2), mesh=js.mesh(), units=Block)
    state, plain = js.shard_init(lambda: create(model), model), create(Decoder(depth=2))
    jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
    before = jax.tree.map(lambda x: x.sharding, state.params)
    kernel = js.plan(model).leaf("block_0/Dense_0/kernel").placement.partition_spec
    held = [state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu]
    assert [tree["block_0"]["Dense_0"]["kernel"].sharding.spec for tree in held] == [kernel] * 3
    found, traces = train(state)
    wanted, _ = train(plain)
    assert traces == 1
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), found.params, before)
    assert jax.tree.all(same)
    square = lambda tree: sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree))
    apart = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), found.params, wanted.params)
    assert (square(apart) / square(wanted.params)) ** 0.5 <= 2e-6
    assert int(found.step) == 3


@pytest.mark.wide
def test_init_of_a_root_that_a_transformation_made_shards_its_parameters():
    kind = nn.vmap(Decoder, variable_axes={"params": None}, split_rngs={"params": False})
    model = js.fully_shard(kind(depth=1), mesh=js.mesh(), units=Block)
    wanted = kind(depth=1).init(jax.random.key(0), X)["params"]
    made = [init(jax.random.key(0), X)["params"] for init in (model.init, jax.jit(model.init))]
    for params in (*made, js.shard_init(lambda: wanted, model)):
        assert_same(params, wanted, 1e-6)
        kernel = params["block_0"]["Dense_0"]["kernel"]
        assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def test_shapes_of_a_state_have_the_shardings_of_its_arrays():
    model = js.fully_shard(Decoder(depth=1), mesh=js.mesh(), units=Block)
    shapes = js.abstract_init(lambda: create(model), model)
    arrays = js.shard_init(lambda: create(model), model)
    kinds = lambda tree: [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]
    assert kinds(shapes) == kinds(arrays)


def test_a_plan_needs_no_devices():
    model = js.fully_shard(Decoder(), mesh=js.mesh(devices=16), units=Block)
    jax.eval_shape(model.init, jax.random.key(0), X)
    plan = js.plan(model)
    assert dict(plan.mesh)["fsdp"] == 16
    assert [unit.name for unit in plan.units] == ["(root)", "block_0", "block_1", "block_2", "block_3"]
    assert plan.leaf("table/embedding").unit == "(root)"
    assert "block_0..3  x4" in str(js.explain(model))
    shapes = js.abstract_init(lambda: model.init(jax.random.key(0), X), model)
    assert shapes["params"]["table"]["embedding"].sharding.shard_shape((VOCAB, WIDTH)) == (VOCAB // 16, WIDTH)


def test_annotations_of_one_jitted_class_do_not_share_traces():
    jitted = nn.jit(Block)
    variables = jax.eval_shape(Decoder(depth=2).init, jax.random.key(0), X)
    for dtype in ("float32", "bfloat16"):
        dtypes = js.MixedPrecision(param_dtype=dtype)
        model = js.fully_shard(Decoder(depth=2, block=jitted), mesh=js.mesh(), units=Block, mixed_precision=dtypes)
        text = str(jax.make_jaxpr(lambda v, model=model: model.apply(v, X))(variables))
        assert [unit.name for unit in js.plan(model).units] == ["(root)", "block_0", "block_1"]
        assert bool(re.search(r"bf16\[32,128\]\S* = all_gather", text)) == (dtype == "bfloat16")


class Named(nn.Module):
    """Logical axes, one of which is the batch, and a parameter with the name that boxes have."""

    @nn.compact
    def __call__(self, x):
        logical = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = x @ self.param("value", nn.initializers.normal(), (64, 64))
        return nn.with_logical_constraint(nn.Dense(64, kernel_init=logical)(self.perturb("x", x)), ("batch", "mlp"))


def test_parameters_are_placed_as_init_has_shown_whatever_their_boxes():
    model = js.fully_shard(Named(), mesh=js.mesh(fsdp=4, tensor=2), units=nn.Dense)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    init = lambda: nn.unbox(model.init(jax.random.key(0), x))
    run = lambda model, v: jax.jit(jax.grad(lambda v: (model.apply(v, x) ** 2).mean()))(v)
    with nn.logical_axis_rules([("batch", ("replica", "fsdp")), ("mlp", "tensor"), ("embed", None)]):
        made = js.shard_init(init, model)
        found = run(model, made)
    plan, params = js.plan(model), made["params"]
    assert plan.leaf("Dense_0/kernel").placement.spec == ("fsdp", "tensor")
    assert params["Dense_0"]["kernel"].sharding.spec == found["params"]["Dense_0"]["kernel"].sharding.spec
    assert params["value"].sharding.spec == plan.leaf("value").placement.partition_spec == jax.P("fsdp", None)
    wanted = run(Named(), jax.device_get(made))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


def lowered(model: nn.Module, plain: nn.Module) -> jax.stages.Lowered:
    params = jax.eval_shape(plain.init, jax.random.key(0), X)["params"]
    loss = lambda params: cross_entropy(model.apply({"params": params}, X))
    return jax.jit(jax.value_and_grad(loss)).lower(params)


@pytest.mark.wide
def test_the_compiled_step_sends_what_the_plan_says():
    model = js.fully_shard(Scanned(256, 12), mesh=js.mesh(), units=Layer)
    found = js.audit(compile_to_read(lowered(model, Scanned(256, 12))), model=model)
    assert not found.differences
    plan = js.plan(model)
    assert plan.leaf("layers/Block_0/Dense_0/kernel").placement.layers == 12
    sent = {kind: sum(t.full_bytes for t in js.explain(model).traffic if t.kind == kind) for kind in KINDS}
    root = sum(leaf.placement.gathered_bytes for leaf in plan.unit_leaves("(root)") if leaf.placement.dim is not None)
    assert sent["all-gather"] / plan.logical_bytes == pytest.approx(2.00 - root / plan.logical_bytes, abs=0.01)
    assert sent["reduce-scatter"] / plan.logical_bytes == pytest.approx(1.00, abs=0.01)


KINDS = "all-gather", "reduce-scatter"


# ---- Microbatches --------------------------------------------------------------------------------


STEPS = 2


def loss_of(model: nn.Module, params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss, with a penalty in global view over what may be boxes."""
    penalty = sum((x**2).sum() for x in jax.tree.leaves(params))
    return cross_entropy(model.apply({"params": params}, ids), labels) + 1e-3 * penalty


def of_microbatches(model: nn.Module, **settings: Any) -> Any:
    """Loss and gradients over microbatches."""
    loss_fn = functools.partial(loss_of, model)
    return js.value_and_grad(loss_fn, model=model, accumulate=STEPS, **settings)


class Odd(nn.Module):
    """A table that no dim divides, and one boxed for an axis that the mesh may have."""

    @nn.compact
    def __call__(self, ids):
        named = nn.with_partitioning(nn.initializers.normal(0.1), (None, "tensor"))
        x = nn.Embed(VOCAB + 1, 130, name="table")(ids)
        return nn.Dense(VOCAB, kernel_init=named)(Block(130)(x))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("plain", "degrees", "sync"),
    [
        (Decoder(depth=2), {}, "last"),
        (Odd(), {"tensor": 2}, "each"),
    ],
    ids=["zero3-last", "padded-each"],
)
def test_gradients_of_microbatches_equal_those_of_one_device(plain, degrees, sync):
    model = js.fully_shard(plain, mesh=js.mesh(**degrees), units=Block)
    js.shard_optimizer(model, optax.sgd(1.0))  # the table of one is padded
    params = js.shard_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    found, grads = jax.jit(of_microbatches(model, sync=sync))(params, X, Y)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
    assert all(g.sharding.is_equivalent_to(p.sharding, p.ndim) for g, p in pairs if any(p.sharding.spec))
    logical = nn.unbox(jax.device_get(params))
    wanted = jax.jit(jax.value_and_grad(lambda params: loss_of(plain, params, X, Y)))(logical)
    assert_same((found, nn.unbox(grads)), wanted)


def test_reduced_at_the_end_the_compiled_step_sends_all_once():
    model = js.fully_shard(Scanned(256, 12), mesh=js.mesh(), units=Layer)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    loss_fn = lambda params, ids, labels: cross_entropy(model.apply({"params": params}, ids), labels)
    run = js.value_and_grad(loss_fn, model=model, accumulate=STEPS, sync="last")
    program = compile_to_read(jax.jit(run).lower(params, X, Y))
    found = js.audit(program, model=model, accumulate=STEPS, sync="last")
    assert not found.differences
    gathered = sum(w.full_bytes * w.executions for w in found.schedule.windows if w.kind == "all-gather")
    reduced = sum(w.full_bytes * w.executions for w in found.schedule.windows if w.kind == "reduce-scatter")
    whole = js.plan(model).logical_bytes
    assert (gathered / whole, reduced / whole) == pytest.approx((1, 1), rel=0.05)


@pytest.mark.wide
def test_every_microbatch_draws_its_own_dropout_mask():
    model = js.fully_shard(Decoder(depth=1, rate=0.5), mesh=js.mesh(), units=Block)
    params = model.init(jax.random.key(0), X, train=False)["params"]

    def loss_fn(params, ids, labels, key):
        logits = model.apply({"params": params}, ids, rngs={"dropout": key})
        return cross_entropy(logits, labels), logits

    key, half = jax.random.key(1), [slice(i, None, STEPS) for i in range(STEPS)]
    run = js.value_and_grad(loss_fn, model=model, accumulate=STEPS, sync="each", has_aux=True)
    (_, found), _ = jax.jit(run)(params, X, Y, key)
    for i, its in enumerate(jax.random.split(key, STEPS)):
        np.testing.assert_allclose(found[i], jax.jit(loss_fn)(params, X[half[i]], Y[half[i]], its)[1], atol=1e-5)
