"""Dtypes as asked, and as near to the truth: bfloat16 with float32 masters and reductions, and Flax's fp8."""

import collections
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState

import jshard as js
from tests.helpers import (
    Block,
    Config,
    Decoder,
    abstract,
    annotator,
    builder,
    equations_run,
    loss_fn,
    placed,
    program,
    token_batch,
)
from tests.parity import Trained, flat, worst
from tests.toy_models import Normed

CONFIG = Config(attends=False)
SMALL = Config(layers=1, attends=False)
BATCH = token_batch(CONFIG)
HALF = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")

grad = nnx.jit(lambda model, *batch: nnx.value_and_grad(loss_fn)(model, *batch))


def half(mesh: jax.sharding.Mesh, config: Config = CONFIG) -> Decoder:
    return placed(builder(config), annotator(mesh, mixed_precision=HALF))


def error(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    """Relative, L2 over all leaves."""
    square = lambda arrays: sum(float((np.float64(x) ** 2).sum()) for x in arrays)
    return (square(np.float64(found[k]) - truth[k] for k in truth) / square(truth.values())) ** 0.5


@pytest.fixture(scope="module")
def truth() -> Trained:
    loss, grads = grad(builder(CONFIG)(), *BATCH)
    return Trained([float(loss)], flat(grads), {}, {}, 1)


@pytest.fixture(scope="module")
def one_device_in_half(truth) -> float:
    """Error of the gradients when the whole model is bfloat16 on one device."""
    model = builder(CONFIG)()
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    model.embed.dtype = jnp.bfloat16  # else its float32 output would make all activations float32
    return error(flat(grad(model, *BATCH)[1]), truth.gradients)


@pytest.mark.wide
def test_no_worse_than_half_precision_on_one_device(truth, one_device_in_half):
    model = half(js.mesh(replica=2))
    loss, grads = grad(model, *BATCH)
    found = flat(grads)
    assert abs(float(loss) - truth.losses[0]) <= 1e-2 * truth.losses[0]
    # Partial sums over the batch are float32, which one device in bfloat16 has not: better, by a little or much.
    assert 1e-4 < error(found, truth.gradients) <= 1.1 * one_device_in_half <= 0.1
    assert {x.dtype for x in found.values()} == {np.dtype("float32")}


def test_masters_and_optimizer_state_stay_float32():
    model = half(js.mesh(), SMALL)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-6))  # steps below what bfloat16 can distinguish
    before = flat(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer, *batch):
        optimizer.update(model, nnx.grad(loss_fn)(model, *batch))

    step(model, optimizer, *BATCH)
    after = flat(nnx.state(model, nnx.Param))
    state = {x.dtype for x in jax.tree.leaves(nnx.state(optimizer)) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert state == {jnp.dtype("float32")}
    for path, x in after.items():
        assert x.dtype == np.float32
        moved = np.abs(x - before[path]).max()
        assert 0 < moved < 1e-5, path


# Dtypes of what comes in and goes out.


class Unit(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.seen: nnx.Variable = nnx.Variable(jnp.zeros(()))

    def __call__(self, x, ids=None):
        return {"out": self.linear(x), "in": x, "ids": x[:, :1] if ids is None else ids}


def outputs(**settings) -> dict[str, str]:
    precision = js.MixedPrecision(**settings)
    model = js.fully_shard(Unit(nnx.Rngs(0)), mesh=js.mesh(), mixed_precision=precision)
    x, ids = np.ones((16, 64), np.float32), np.ones((16,), np.int32)
    return {k: v.dtype.name for k, v in nnx.jit(lambda m, x, ids: m(x, ids))(model, x, ids).items()}


@pytest.mark.parametrize(
    ("settings", "out", "given"),
    [
        ({}, "float32", "float32"),
        ({"param_dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"param_dtype": "bfloat16", "cast_inputs": False}, "float32", "float32"),
        ({"param_dtype": "bfloat16", "output_dtype": "float32"}, "float32", "float32"),
        ({"output_dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"param_dtype": "float16", "reduce_dtype": "float32"}, "float16", "float16"),
    ],
    ids=str,
)
def test_dtypes_of_inputs_and_outputs(settings, out, given):
    assert outputs(**settings) == {"out": out, "in": given, "ids": "int32"}


def on_the_wire(model: nnx.Module) -> dict[str, collections.Counter[str]]:
    """Elements that each kind of collective takes in, by dtype."""
    graphdef, state = nnx.split(model)
    grad = lambda state, *batch: nnx.value_and_grad(loss_fn)(nnx.merge(graphdef, state, copy=True), *batch)
    found = collections.defaultdict(collections.Counter)
    for eqn in equations_run(jax.make_jaxpr(grad)(state, *BATCH).jaxpr):
        for x in eqn.invars if eqn.primitive.name.startswith(("all_gather", "reduce_scatter", "psum")) else ():
            found[eqn.primitive.name.removesuffix("_invariant")][x.aval.dtype.name] += x.aval.size
    return found


@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        (js.MixedPrecision(), "float32", "float32"),
        (HALF, "bfloat16", "float32"),
        (js.MixedPrecision(param_dtype="bfloat16"), "bfloat16", "bfloat16"),
        (js.MixedPrecision(reduce_dtype="bfloat16"), "float32", "bfloat16"),
    ],
    ids=str,
)
def test_dtypes_of_the_collectives(precision, gathered, reduced):
    model = abstract(SMALL, js.mesh(replica=2), mixed_precision=precision)
    found = on_the_wire(model)
    assert found["all_gather"].keys() == {gathered}
    assert found["reduce_scatter"].keys() == {reduced}
    # all-reduces: replicated parameters, shards over the replicas, and the loss
    assert reduced in found["psum"]
    assert sum(n for dtype, n in found["psum"].items() if dtype != reduced) <= 64


KEPT = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", keep=("mlp_norm/*", "norm/*"))


def test_what_keeps_its_dtype():
    """The patterns hold against the end of a path, so that one policy serves blocks and root."""
    model = abstract(SMALL, js.mesh(), mixed_precision=KEPT)
    kept = {leaf.path for leaf in js.plan(model).leaves if leaf.placement.gathered_dtype == "float32"}
    assert kept == {"blocks/0/mlp_norm/scale", "norm/scale"}
    seen = {}

    class Seen(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.linear = nnx.RMSNorm(64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x):
            seen.update({"/".join(map(str, path)): v.dtype.name for path, v in nnx.to_flat_state(nnx.state(self))})
            return self.linear(x)

    kept_norm = js.MixedPrecision(param_dtype="bfloat16", keep="norm/*")
    model = js.fully_shard(
        Seen(nnx.Rngs(0)), mesh=js.mesh(), mixed_precision=kept_norm, placement=js.PlacementPolicy(min_size=1)
    )
    jax.eval_shape(lambda x: model(x), np.ones((16, 64), np.float32))
    assert seen == {"linear/bias": "bfloat16", "linear/kernel": "bfloat16", "norm/scale": "float32"}


def test_buffers_keep_their_dtype():
    """Statistics of BatchNorm are computed and stored in float32 whatever the unit computes in."""

    build = lambda: Normed(64, 64, nnx.Rngs(0), dtype=jnp.bfloat16)
    # Far from zero: in bfloat16 the mean of such a batch is off by a percent, and a step of 0.01 of it is lost.
    x = 1000 + np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    plain, model = build(), build()
    js.fully_shard(model, mesh=js.mesh(), mixed_precision=HALF)
    run = nnx.jit(lambda m, x: m(x))
    run(plain, x)
    assert run(model, x).dtype == jnp.bfloat16
    for name in ("mean", "var"):
        found = getattr(model.norm, name)[...]
        assert found.dtype == jnp.float32
        assert (found.astype(jnp.bfloat16) != found).any()
    apart = model.norm.mean[...] - plain.norm.mean[...]
    assert np.abs(apart).max() <= 1e-2 * np.abs(plain.norm.mean[...]).max()


# ---- fp8 -----------------------------------------------------------------------------------------


# The largest value is on another shard for each layer and step, far above what the others see.
ROWS = (
    np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    * np.linspace(1, 40, 16, dtype=np.float32)[:, None]
)


class InFp8(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(64, dot_general_cls=lambda: Fp8DirectDotGeneralOp(amax_history_length=4))(jax.nn.relu(x))
        return x


def creator_of(model: nn.Module) -> Any:
    def state():
        params = model.init(jax.random.key(0), ROWS)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    return state


@jax.jit
def linen_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(lambda params: (state.apply_fn(params, x) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


def sharded_mlp(**settings: Any) -> TrainState:
    model = js.fully_shard(InFp8(), mesh=js.mesh(replica=2, fsdp=4), **settings)
    return js.shard_init(creator_of(model), model)


def test_trains_as_on_one_device():
    """The history of a scale is what the largest over the whole batch was, as if there were no shards."""
    wanted, found = creator_of(InFp8())(), sharded_mlp(units=nn.Dense)
    for i in range(4):
        x = np.roll(ROWS, 3 * i, axis=0)
        (wanted, loss), (found, ours) = linen_step(wanted, x), linen_step(found, x)
        np.testing.assert_allclose(ours, loss, rtol=1e-6)
    metas = [state.params[OVERWRITE_WITH_GRADIENT] for state in (found, wanted)]
    assert len({float(x[0]) for x in jax.tree.leaves(metas[1])}) > 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *metas)
    of = lambda state: jax.tree.leaves(state.params["params"])
    assert max(worst(np.asarray(a), np.asarray(b)) for a, b in zip(of(found), of(wanted), strict=True)) < 1e-5


def quantised(module: Any) -> Any:
    """What qwix does to a module's class."""
    kind = type(module)
    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), {"_unquantized_type": kind}))
    return module


def test_what_qwix_changed_is_annotated_with_units_and_without():
    model = builder(Config(attends=False))()
    model.blocks = nnx.List([quantised(block) for block in model.blocks])
    assert len(js.plan(js.fully_shard(model, units=Block, mesh=js.mesh())).units) == 3
    for units in (None, Block):
        assert js.fully_shard(quantised(builder(Config(attends=False))()), mesh=js.mesh(), units=units)
    assert js.fully_shard(quantised(InFp8()), mesh=js.mesh(), units=nn.Dense)


def test_pieces_are_gathered_in_the_dtype_that_they_are_computed_in():
    """Also behind a parameter that is kept whole, in another dtype: each has its own dtype, not its neighbour's."""
    precision = js.MixedPrecision(
        param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32", keep=("*norm*",)
    )
    traced = program(Config(layers=3), reshard_after_forward=2, mixed_precision=precision)
    text = traced.lowered.as_text()
    dtypes = set(re.findall(r"all_gather.*-> tensor<[0-9x]*x(\w+)>", text))
    assert dtypes == {"bf16"}


@pytest.mark.wide
def test_parameters_that_keep_their_dtype_are_not_rounded_in_pieces():
    """Pieces hold what forward gathered, so gradients are those of a second gather, bit for bit."""
    precision = js.MixedPrecision(
        param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32", keep=("*kernel",)
    )
    config = Config(layers=3, attends=False)
    inputs, targets = token_batch(config, 8, 8)

    def gradients(reshard: bool | int) -> dict[str, np.ndarray]:
        annotate = annotator(js.mesh(), reshard_after_forward=reshard, mixed_precision=precision)
        model = placed(builder(config), annotate)
        return flat(nnx.jit(nnx.grad(loss_fn))(model, inputs, targets))

    again, in_pieces = gradients(True), gradients(2)
    for path, gradient in again.items():
        np.testing.assert_array_equal(in_pieces[path], gradient, err_msg=path)
