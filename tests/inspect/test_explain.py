"""`explain` says what the plan says, distinguishes plan from estimate, and prints on any terminal."""

import contextlib
import gc
import io
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import jshard as js
from jshard.inspect.explain import explain
from jshard.inspect.memory import memory_of, optimizer_bytes
from jshard.inspect.plan_tables import folded_units
from tests.helpers import Config, abstract, annotator, builder, loss_fn, program, sharded, token_batch
from tests.wide import wide

GOLDEN = Path(__file__).parents[1] / "golden" / "explain.txt"


def small_plan() -> js.ShardPlan:
    precision = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
    return js.plan(abstract(Config(), js.mesh(replica=2), mixed_precision=precision, remat="full"))


def test_the_text():
    assert str(explain(small_plan())) + "\n" == GOLDEN.read_text()


def test_every_parameter_on_request():
    plan = small_plan()
    text = str(explain(plan, leaves=True))
    for leaf in plan.leaves:
        assert leaf.path.replace("blocks/0", "blocks/0..1").replace("blocks/1", "blocks/0..1") in text
    assert "replicated: smaller than" in text
    assert "(-, fsdp)" in text
    assert "(-, fsdp)" not in str(explain(plan))


def test_tied_parameters_are_shown():
    class Pair(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(64, 64, rngs=rngs)
            self.second = nnx.Linear(64, 64, rngs=rngs)
            self.second.kernel = self.first.kernel

    mesh = js.mesh(devices=8)
    model = js.abstract_init(lambda: Pair(nnx.Rngs(0)), lambda m: js.fully_shard(m, mesh=mesh))
    assert "Tied: first/kernel = second/kernel, gathered by (root)" in str(explain(model))


class Averaged(nnx.Module):
    """Weights with a copy that is no parameter, and state of Flax's own classes."""

    def __init__(self, rngs: nnx.Rngs, size: int = 64):
        self.linear = nnx.Linear(size, size, rngs=rngs)
        self.averages = nnx.List([nnx.Variable(jnp.zeros((size, size))) for _ in range(2)])
        self.norm, self.drop = (
            nnx.BatchNorm(2**15, use_bias=False, use_scale=False, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        )
        self.cache = nnx.Cache(jnp.zeros((2**15,)))

    def __call__(self, x):
        return self.linear(x)


def test_arrays_that_are_no_parameters_are_listed_and_state_of_flax_is_not():
    model = js.fully_shard(Averaged(nnx.Rngs(0)), mesh=js.mesh())
    text = str(explain(model))
    assert "Not parameters: 2 float arrays, 32.00 KiB on every device, in no figure above\n" in text
    assert text.endswith("  averages/*  Variable float32[64, 64]  x2")
    assert [one["bytes"] for one in json.loads(explain(model).to_json())["other_arrays"]] == [64 * 64 * 4] * 2
    assert "Not parameters" not in str(explain(small_plan()))


@pytest.mark.parametrize("allowed", [(), ("averages/*",)])
def test_a_warning_says_so_where_they_are_large(allowed):
    model = js.fully_shard(
        Averaged(nnx.Rngs(0), 128), mesh=js.mesh(), placement=js.PlacementPolicy(allow_replicated=allowed)
    )
    warns = pytest.warns(UserWarning, match="2 float array.* of Averaged are not parameters.*: 131072 bytes")
    with contextlib.nullcontext() if allowed else warns:
        model(jnp.ones((8, 128)))


class Doubles(nnx.Module):
    def __call__(self, x):
        return 2 * x


class LinenDoubles(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 2 * x


def test_a_model_without_arrays_sends_nothing():
    linen = js.fully_shard(LinenDoubles(), mesh=js.mesh())
    jax.eval_shape(linen.init, jax.random.key(0), jnp.ones((8, 8)))
    for model in (js.fully_shard(Doubles(), mesh=js.mesh()), linen):
        found = explain(model)
        assert "0 parameters" in str(found) and json.loads(found.to_json())["num_parameters"] == 0


def test_only_equal_units_are_folded():
    mesh = js.mesh(devices=8)

    def annotate(model):
        for i, block in enumerate(model.blocks):
            js.fully_shard(block, mesh=mesh, remat="full" if i in (1, 4) else "none")
        js.fully_shard(model, mesh=mesh)

    plan = js.plan(js.abstract_init(builder(Config(layers=12)), annotate))
    folded = [(name, count) for name, count, _ in folded_units(plan)]
    assert folded == [("(root)", 1), ("blocks/0,2..3,5..11", 10), ("blocks/1,4", 2)]


@pytest.mark.parametrize(
    ("tx", "scanned"),
    [
        (optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)), False),
        (optax.MultiSteps(optax.adafactor(1e-3), 4), True),
    ],
    ids=["adamw", "adafactor"],
)
def test_optimizer_bytes_are_those_that_shard_optimizer_holds(tx, scanned: bool):
    model = sharded(Config(scanned=scanned), js.mesh())
    plan, optimizer = js.plan(model), js.shard_optimizer(model, tx)
    shards = (x.addressable_shards[0].data for x in jax.tree.leaves(nnx.state(optimizer)))
    held = sum(shard.nbytes for shard in shards)
    assert optimizer_bytes(plan, tx)[0] == held
    assert optimizer_bytes(plan, optimizer)[0] == held


def test_adamw_is_assumed_and_the_text_says_so():
    plan = small_plan()
    assert memory_of(plan) != memory_of(plan, optimizer=optax.sgd(1e-3))
    assert memory_of(plan).optimizer_bytes == memory_of(plan, optimizer=optax.adamw(1e-3)).optimizer_bytes
    assert "optimizer state (AdamW assumed)" in str(explain(plan))
    assert "optimizer state (given)" in str(explain(plan, optimizer=optax.sgd(1e-3)))


def test_activations_are_estimated_only_with_loss_and_batch_and_without_devices_too():
    assert "not estimated   pass loss_fn= and batch=" in str(explain(abstract(Config(), js.mesh())))
    batch = token_batch(Config())
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batch)  # an abstract batch will do
    found = [
        explain(abstract(Config(), mesh), loss_fn=loss_fn, batch=given).memory.activations_bytes
        for mesh, given in ((js.mesh(), batch), (js.mesh(devices=8), shapes))
    ]
    assert found[0] == found[1] > 0


@pytest.mark.wide
@pytest.mark.parametrize("reshard", [wide(True), False])
def test_the_activations_estimate_is_close_to_the_compiled_program(reshard: bool):
    """What remat=full saves is the difference of the estimates, and about that of the programs' memory."""
    config = Config(layers=8, width=128, hidden=512, vocab=64, scanned=True)
    batch, estimated, compiled = token_batch(config, 16, 64), {}, {}
    for remat in ("none", "full"):
        settings = {"remat": remat, "reshard_after_forward": reshard}
        model = abstract(config, js.mesh(), **settings)
        estimated[remat] = explain(model, loss_fn=loss_fn, batch=batch).memory.activations_bytes
        made = program(config, batch=(16, 64), **settings)
        compiled[remat] = made.compiled.memory_analysis().temp_size_in_bytes
    saved = estimated["none"] - estimated["full"]
    assert saved == pytest.approx(compiled["none"] - compiled["full"], rel=0.15)
    inputs_of_blocks = 8 * 2 * 64 * 128 * 4
    assert inputs_of_blocks < estimated["full"] < 2 * inputs_of_blocks


def test_json_holds_the_plan_and_the_figures():
    plan = small_plan()
    explanation = explain(plan)
    data = json.loads(explanation.to_json())
    assert js.ShardPlan.from_json(json.dumps(data["plan"])) == plan
    assert data["memory_per_device"]["held_bytes"] == memory_of(plan).held_bytes
    assert data["num_parameters"] == plan.num_parameters
    assert [unit["unit"] for unit in data["units"]] == ["(root)", "blocks/0..1"]
    assert data["replicated"]["norm/scale"] == "smaller than min_size (64 < 1024 elements)"
    sent = sum(t["wire_bytes"] for t in data["communication_per_step"])
    assert sent == sum(t.wire_bytes for t in explanation.traffic)


def test_it_prints_only_when_printed(capsys):
    explanation = explain(small_plan())
    assert capsys.readouterr().out == ""
    assert repr(explanation) == str(explanation)
    narrow = Console(file=io.StringIO(), width=60)
    narrow.print(explanation)
    assert max(map(len, narrow.file.getvalue().splitlines())) <= 60


def test_a_large_model_is_explained_without_arrays():
    config = Config(layers=12, width=12_288, hidden=49_152, heads=96, vocab=50_000, tied=False)
    mesh = js.mesh(replica=4, fsdp=128, devices=512)
    gc.collect()  # what other tests have left would go in between
    live = len(jax.live_arrays())
    text = str(explain(js.abstract_init(builder(config), annotator(mesh, remat="full"))))
    assert len(jax.live_arrays()) == live
    assert "blocks/0..11  x12" in text
    assert "on 512 devices" in text


def test_activations_of_a_model_that_counts_its_random_numbers():
    def dropping() -> nnx.Sequential:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    model = js.abstract_init(dropping, lambda m: js.fully_shard(m, mesh=js.mesh()))
    batch = jax.ShapeDtypeStruct((16, 64), "float32")
    assert "saved for backward" in str(js.explain(model, loss_fn=lambda model, x: model(x).sum(), batch=batch))


class Real(nnx.Variable):
    """A parameter of a class of its own, which `wrt=Real` trains."""


class Plane(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.turn = Real(jnp.ones((64, 64)))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) @ self.turn[...]


def test_trained_variables_of_another_class_are_listed_as_replicated_with_the_line_that_shards_them():
    model = Plane(nnx.Rngs(0))
    js.fully_shard(model, mesh=js.mesh())
    line = "not an nnx.Param; to shard it: class Real(nnx.Param): ..."
    for text in (str(explain(model)), str(explain(model, wrt=Real)), str(explain(model, wrt=(nnx.Param, Real)))):
        replicated = text.partition("Replicated: ")[2]
        assert line in replicated and "turn" in replicated and "Not parameters" not in text
    assert json.loads(explain(model).to_json())["replicated"]["turn"] == line
    plan = js.plan(model, wrt=(nnx.Param, Real))
    leaf = plan.leaf("turn")
    assert leaf in plan.replicated and leaf.trained and leaf.placement.because == line and leaf.unit == "(root)"
    assert plan.num_parameters == 2 * 64 * 64 + 64 and plan.num_frozen == 0
    assert js.plan(model, wrt=Real).num_frozen == 64 * 64 + 64
    assert "turn" not in {leaf.path for leaf in js.plan(model).leaves}
    held = {t.kind: t.full_bytes for t in explain(model, wrt=Real).traffic}
    assert held["all-reduce"] == 64 * 64 * 4
    assert js.ShardPlan.from_json(plan.to_json()) == plan


def test_the_line_that_shards_them_does():
    class Turn(nnx.Param):
        """As the line says."""

    model = Plane(nnx.Rngs(0))
    model.turn = Turn(model.turn[...])
    js.fully_shard(model, mesh=js.mesh())
    assert js.plan(model, wrt=Turn).leaf("turn").placement.dim == 0


def test_a_step_that_trains_them_is_that_of_one_device_and_does_as_planned():
    model, plain = Plane(nnx.Rngs(0)), Plane(nnx.Rngs(0))
    js.fully_shard(model, mesh=js.mesh())
    x = jax.random.normal(jax.random.key(0), (16, 64))
    loss = lambda model, x: (model(x) ** 2).mean()
    wrt = (nnx.Param, Real)
    grads = nnx.jit(js.value_and_grad(loss, wrt=wrt))(model, x)[1]
    wanted = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(plain, x)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, wanted)
