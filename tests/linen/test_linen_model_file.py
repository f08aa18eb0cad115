"""A model file of a Linen model: planned, trained, evaluated and resumed as one of nnx is."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState

import jshard as js
from jshard import cli
from jshard.checkpoint import Checkpointer, CheckpointWarning
from jshard.cluster.compile_process import lowered_step
from jshard.data import load_text
from jshard.engine.context import plain_flax
from jshard.errors import AnnotationError
from jshard.inspect.memory import activations
from jshard.recipes.building import abstract_model, batch_of, new_model
from jshard.recipes.model_file import next_token_loss
from jshard.recipes.state import create, restore
from jshard.recipes.step import inference_view
from jshard.train import Recipe, TrainStep, load_model_file, run_recipe
from jshard.train.records import read_metrics
from tests.compiling import environment
from tests.helpers import with_placement
from tests.linen_models import VOCAB, Block, Decoder, cross_entropy, differences
from tests.micro_linen import Config
from tests.models.model_files import MODELS, model_file, module, tiny
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE
from tests.wide import wide

PATH = Path(__file__).parents[1] / "micro_linen.py"
FILE = load_model_file(PATH)
RECIPE = FILE.recipe()[1]
STEPS = 3


class Straight(Recipe):
    """With an optimizer that shows the gradients: the first steps of AdamW are the signs of the smallest, too."""

    def optimizer(self):
        return optax.sgd(0.5)


def recipe(**config):
    return dataclasses.replace(RECIPE, model=Config(**config))


def straight(**config):
    return Straight(**vars(recipe(**config)))


def file_of(module, units, **settings):
    """A model file of another module."""
    annotate = lambda model, mesh: js.fully_shard(model, mesh=mesh, units=units, **with_placement(**settings))
    return dataclasses.replace(FILE, build=lambda config, rngs: module, annotate=annotate)


def batches(number=STEPS):
    rows, length = RECIPE.batch_size, RECIPE.sequence_length
    tokens = np.random.default_rng(0).integers(0, VOCAB, (number, rows, length + 1), np.int32)
    return [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in tokens]


# ---- the plan ------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Layers in one stack."""

    @nn.compact
    def __call__(self, ids):
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(VOCAB, name="head")(stack(name="layers")(nn.Embed(VOCAB, 32, name="table")(ids), None)[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x))), None


@pytest.mark.parametrize(
    ("module", "units"), [(Decoder(2), [Block, "table"]), (Deep(), Layer)], ids=["unrolled", "scanned"]
)
def test_the_plan_is_that_of_the_annotated_module(module, units):
    mesh = js.mesh(devices=16)
    annotated = js.fully_shard(module, mesh=mesh, units=units)
    jax.eval_shape(annotated.init, jax.random.key(0), batches(1)[0]["inputs"])
    model = abstract_model(file_of(module, units), RECIPE, mesh)
    assert js.plan(model) == js.plan(annotated)
    shapes = {"/".join(path): v.get_raw_value().shape for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert shapes == {leaf.path: leaf.placement.shape for leaf in js.plan(model).leaves}


def test_the_command_plans_a_linen_model(capsys):
    assert cli.main(["plan", str(PATH), "--mesh", "fsdp=64", "--set", "batch_size=64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [unit["name"] for unit in found["plan"]["units"]] == ["(root)", "block_0", "block_1"]
    assert found["memory_per_device"]["activations_bytes"] > 0


@pytest.mark.parametrize(("module", "units"), [(Decoder(2), Block), (Deep(), Layer)], ids=["unrolled", "scanned"])
def test_other_settings_of_the_units_are_planned_and_run(module, units):
    plain = file_of(module, units)
    other = plain.with_units({"remat": "full"}).with_units({"prefetch": 0})
    mesh, batch = js.mesh(), batch_of(plain, RECIPE, RECIPE.batch_size)
    before, after = (abstract_model(file, RECIPE, mesh) for file in (plain, other))
    assert {unit.remat for unit in js.plan(before).units} == {"none"}
    root, *layers = js.plan(after).units
    assert root.remat == "none" and {(unit.remat, unit.prefetch) for unit in layers} == {("full", "0")}
    saved = [activations(model, next_token_loss, batch).saved_bytes for model in (before, after)]
    assert saved[1] < 0.7 * saved[0]


# ---- training ------------------------------------------------------------------------------------------------------


def trained(file, recipe, *, mesh, steps=STEPS):
    """Losses of some steps, and the model after them, its variables on the host."""
    first, state = js.shard_batch(batches()[0], mesh), create(file, recipe, mesh)
    step = TrainStep(file.loss_fn, *state, first, accumulate=recipe.accumulate)
    losses = [float(step(js.shard_batch(batch, mesh))["loss"]) for batch in batches(steps)]
    return losses, jax.tree.map(np.asarray, step.model.variables)


def trained_plain(recipe, model=None, *, steps=STEPS):
    """The same in plain Flax on one device."""
    model = model or Decoder(recipe.model.depth, recipe.model.rate, recipe.model.norm)
    variables = nn.unbox(jax.jit(model.init)(jax.random.key(recipe.seed), batches()[0]["inputs"]))
    state = TrainState.create(apply_fn=model.apply, params=variables.pop("params"), tx=recipe.optimizer())

    @jax.jit
    def step(state, rest, batch):
        def loss_fn(params):
            logits, changed = model.apply({"params": params, **rest}, batch["inputs"], mutable=list(rest))
            return cross_entropy(logits, batch["targets"]), changed

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), changed, loss

    losses = []
    for batch in batches(steps):
        state, variables, loss = step(state, variables, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, {"params": state.params, **variables})


def test_it_trains_as_on_one_device():
    """Losses, parameters and the statistics of BatchNorm; the first loss is that of the same initial parameters."""
    wanted_losses, wanted = trained_plain(straight(norm=True))
    losses, found = trained(FILE, straight(norm=True), mesh=js.mesh(replica=2))
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6)
    assert max(differences(found, wanted).values()) < 2e-6


GPT = {"block_size": 16, "n_layer": 2, "d_model": 64}


@pytest.mark.parametrize("replica", [1, wide(2)])
def test_the_model_that_comes_with_jshard_does(replica):
    file = model_file("linen_gpt")
    small = dataclasses.replace(tiny("linen_gpt"), model=module("linen_gpt").Config(**GPT), sequence_length=16)
    wanted_losses, wanted = trained_plain(small, file.build(small.model, None))
    losses, found = trained(file, small, mesh=js.mesh(replica=replica))
    np.testing.assert_allclose(losses, wanted_losses, rtol=GRADIENT_TOLERANCE)
    square = lambda tree: sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(tree))
    apart = square(jax.tree.map(np.subtract, found["params"], wanted["params"])) / square(wanted["params"])
    assert apart**0.5 <= PARAMETER_TOLERANCE


@pytest.mark.wide
def test_it_learns_real_text_and_writes_some(tmp_path, capsys):
    settings = [f"--set=model.{key}={value}" for key, value in GPT.items()]
    settings += ["--set=sequence_length=16", "--set=batch_size=16", "--set=warmup_steps=2", "--set=eval_sequences=64"]
    command = ["train", str(MODELS / "linen_gpt.py"), "--out", str(tmp_path / "run"), "--steps", "20", *settings]
    assert cli.main([*command, "--track", "--sample-tokens", "8", "--set=model.dropout=0.1"]) == 0
    said = capsys.readouterr().out
    assert "block_0..1" in said and "a sample; its first words are of held-out text" in said
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.wide
def test_microbatches_do():
    halves = dataclasses.replace(straight(depth=1), accumulate=2)
    once, twice = trained_plain(straight(depth=1), steps=2)[0], trained(FILE, halves, mesh=js.mesh(), steps=2)[0]
    np.testing.assert_allclose(twice, once, rtol=2e-6)


class Odd(nn.Module):
    """A kernel of 30 x 127, in a box of the user's own if it is to be."""

    boxed: bool = False

    @nn.compact
    def __call__(self, ids):
        init = nn.initializers.normal(0.1)
        x = nn.Embed(VOCAB, 30, name="table")(ids)
        kernel = nn.with_partitioning(init, (None, None)) if self.boxed else init
        x = nn.Dense(127, name="odd", kernel_init=kernel)(x)
        return nn.Dense(VOCAB, name="head")(nn.gelu(x))


@pytest.mark.parametrize("boxed", [False, True], ids=["", "nn.Partitioned"])
@pytest.mark.wide
def test_a_parameter_that_no_dim_divides_is_padded(boxed):
    file = file_of(Odd(boxed), nn.Dense, shard_dim=lambda path, shape: 1 if shape == (30, 127) else None)
    losses, _ = trained(file, RECIPE, mesh=js.mesh())
    assert js.plan(abstract_model(file, RECIPE, js.mesh())).leaf("odd/kernel").placement.stored_shape == (30, 128)
    np.testing.assert_allclose(losses, trained_plain(RECIPE, Odd(boxed))[0], rtol=1e-5)


@pytest.mark.wide
def test_state_and_parameters_are_in_host_memory_and_the_losses_are_the_same():
    wanted, batch = trained_plain(recipe(depth=1))[0], js.shard_batch(batches()[0], js.mesh())
    memories = lambda held: "pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(held))}
    for offload in ("optimizer", "params"):
        file = file_of(Decoder(1), Block, offload=offload)
        step = TrainStep(FILE.loss_fn, *create(file, RECIPE, js.mesh()), batch)
        losses = [float(step(js.shard_batch(batch, js.mesh()))["loss"]) for batch in batches()]
        assert memories(step.optimizer) and memories(step.model) == (offload == "params")
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    with plain_flax():  # what jshard is compared with
        assert np.isfinite(step.model(batches()[0]["inputs"])).all()


def test_the_compiled_program_is_that_of_a_run_and_plain_flax_is_without_units():
    mesh = js.mesh()
    asked = recipe(depth=1)
    run = TrainStep(FILE.loss_fn, *create(FILE, asked, mesh), batch_of(FILE, asked, 16, mesh))
    instructions = lambda text: [
        re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines() if " = " in line
    ]
    compiled = lowered_step(FILE, asked, mesh)[1].compile()
    assert instructions(compiled.as_text()) == instructions(run.compiled.as_text())
    with plain_flax():
        assert "all_gather" not in lowered_step(FILE, asked, mesh)[1].as_text()
        with pytest.raises(AnnotationError, match="in its own dtypes only"):
            lowered_step(FILE.with_units({"remat": "full"}), asked, mesh)


# ---- evaluation ----------------------------------------------------------------------------------------------------


class Told(nn.Module):
    """Told whether it trains by a field, an argument, a constant, and inside other modules."""

    rate: float = 0.5
    deterministic: bool | None = False

    @nn.compact
    def __call__(self, ids, deterministic=None):
        x = nn.Embed(VOCAB, 32, name="table")(ids)
        x = nn.Dropout(self.rate)(
            x, nn.merge_param("deterministic", self.deterministic, deterministic or None) or False
        )
        x = nn.BatchNorm(name="norm", use_running_average=False)(x)
        x = Inner(self.rate, True, name="inner")(x)
        attention = nn.MultiHeadDotProductAttention(2, dropout_rate=self.rate, deterministic=False, name="attention")
        return nn.Dense(VOCAB, name="head")(x + attention(x))


class Inner(nn.Module):
    rate: float
    train: bool

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(self.rate, deterministic=not self.train)(nn.Dense(32)(x))


def test_evaluation_is_without_dropout_and_changes_nothing():
    file = file_of(Told(), [nn.Dense, nn.MultiHeadDotProductAttention])
    model = new_model(file, RECIPE, js.mesh())
    batch = js.shard_batch(batches(1)[0], js.mesh())
    run = nnx.jit(lambda model, batch: next_token_loss(model, batch))
    first = float(run(model, batch))  # of training, so that there are traces with dropout to be mistaken for others
    second, stats = float(run(model, batch)), jax.tree.map(np.asarray, model.variables["batch_stats"])
    assert first != second and np.abs(stats["norm"]["mean"]).max() > 0

    counts = jax.tree.map(np.asarray, nnx.state(model, nnx.RngCount))
    view = inference_view(model)
    found = [float(run(view, batch)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, nnx.state(model, nnx.RngCount)), counts)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, model.variables["batch_stats"]), stats)

    plain = Averaging().apply(jax.tree.map(np.asarray, model.variables), batch["inputs"])
    np.testing.assert_allclose(found, [float(cross_entropy(plain, batch["targets"]))] * 2, rtol=2e-6)
    assert float(run(model, batch)) not in (first, second, found[0])


class Averaging(nn.Module):
    """The same model as it is written for evaluation."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, 32, name="table")(ids)
        x = nn.BatchNorm(name="norm", use_running_average=True)(x)
        x = Inner(0.0, False, name="inner")(x)
        return nn.Dense(VOCAB, name="head")(x + nn.MultiHeadDotProductAttention(2, name="attention")(x))


Jitted = nn.jit(Inner)  # once, so that its traces are kept


class Traced(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return Jitted(0.5, True, name="inner")(nn.Embed(VOCAB, 32)(ids)) @ jnp.ones((32, VOCAB))


def test_evaluation_takes_no_trace_of_training():
    model = new_model(file_of(Traced(), None), RECIPE, js.mesh())
    batch, view = js.shard_batch(batches(1)[0], js.mesh()), inference_view(model)
    run = nnx.jit(lambda model, batch: model(batch["inputs"]).std())
    assert float(run(model, batch)) != float(run(model, batch))
    found, variables = float(run(view, batch)), jax.tree.map(np.asarray, model.variables["params"])
    x = variables["Embed_0"]["embedding"][batches(1)[0]["inputs"]]
    x = x @ variables["inner"]["Dense_0"]["kernel"] + variables["inner"]["Dense_0"]["bias"]
    np.testing.assert_allclose(found, x.sum(-1).std(), rtol=1e-5)


# ---- runs ----------------------------------------------------------------------------------------------------------

NOISY = {"depth": 1, "rate": 0.1, "norm": True}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return path


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing happened to."""
    return run_in(tmp_path_factory.mktemp("whole") / "run", text)


def run_in(out, text, *, data=None, resume=False):
    data = data or load_text([text], sequence_length=RECIPE.sequence_length)
    how = {"mesh": js.mesh(replica=2), "out": out, "sample_tokens": 0, "say": lambda line: None, "resume": resume}
    return run_recipe(FILE, recipe(**NOISY), data=data, **how)


def record(out):
    kept = ("step", "loss", "grad_norm", "val_loss")
    return [[line.get(key) for key in kept] for line in read_metrics(out / "metrics.jsonl")]


class Stopping:
    """A source that asks the run to stop while a sample is read."""

    def __init__(self, source, at):
        self._source, self._left = source, at

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._source[index]


@pytest.mark.wide
def test_a_stopped_run_goes_on_bit_for_bit(whole, text, tmp_path):
    """With dropout, whose masks have to be those of the run that was not stopped."""
    data = load_text([text], sequence_length=RECIPE.sequence_length)
    stopping = dataclasses.replace(data, train=Stopping(data.train, 4 * RECIPE.batch_size))
    stopped = run_in(tmp_path / "run", text, data=stopping)
    assert stopped.stopped_by == signal.SIGTERM and 0 < stopped.step < RECIPE.num_steps
    resumed = run_in(tmp_path / "run", text, resume=True)
    assert resumed.step == whole.step == RECIPE.num_steps
    assert record(resumed.out) == record(whole.out)


def test_a_checkpoint_of_a_run_is_read_by_a_loop_of_ones_own(whole):
    """Each variable lies under its Linen name."""
    model = js.fully_shard(Decoder(**NOISY), mesh=js.mesh(), units=Block)
    create = lambda: model.init(jax.random.key(1), batches(1)[0]["inputs"])["params"]
    like = {"model": js.abstract_init(create, model)}
    with pytest.warns(CheckpointWarning, match="4 stored leaves are left out"):
        found = js.checkpoint.restore(whole.checkpoint, like=like, extra="ignore")["model"]
    assert found["block_0"]["Dense_0"]["kernel"].sharding.shard_shape((32, 128)) == (32, 16)
    trained = Checkpointer(whole.out / "checkpoints")
    wanted = restore(FILE, recipe(**NOISY), js.mesh(), trained)[0].variables["params"]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.wide
def test_two_processes_train_as_one(whole, text, tmp_path):
    settings = [f"--set=model.{key}={value}" for key, value in NOISY.items()]
    command = ["train", str(PATH), "--data", str(text), "--out", str(tmp_path / "two"), "--track", "--sample-tokens=0"]
    done = subprocess.run(
        [sys.executable, "-m", "jshard", *command, "--processes=2", "--mesh=replica=2,fsdp=4", *settings],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # AdamW's first steps are the signs of the smallest gradients too, and a sum over processes has another order.
    for ours, theirs in zip(record(tmp_path / "two"), record(whole.out), strict=True):
        assert [x is None for x in ours] == [x is None for x in theirs]
        np.testing.assert_allclose(*([x for x in line if x is not None] for line in (ours, theirs)), rtol=1e-3)


# ---- what the model file may hold ----------------------------------------------------------------------------------


class Two(nn.Module):
    """Setup style; parameters boxed for a tensor axis, two methods, a field that a loss reads, and a sown value."""

    smoothing: float = 0.1

    def setup(self):
        boxed = nn.with_partitioning(nn.initializers.normal(1.0), (None, "tensor"))
        self.table = nn.Embed(VOCAB, 32)
        self.head = nn.Dense(VOCAB, kernel_init=boxed)

    def encode(self, ids):
        x = self.table(ids)
        self.sow("seen", "mean", x.mean())
        return x

    def __call__(self, ids):
        return self.head(self.encode(ids))


def smoothed(model, batch):
    labels = optax.smooth_labels(jax.nn.one_hot(batch["targets"], VOCAB), model.smoothing)
    penalty = (model.encode(batch["inputs"]) ** 2).mean()
    return optax.softmax_cross_entropy(model(batch["inputs"]), labels).mean() + penalty


def test_a_loss_of_ones_own_uses_methods_and_fields():
    file = dataclasses.replace(file_of(Two(), nn.Dense), loss_fn=smoothed)
    mesh = js.mesh(fsdp=4, tensor=2)
    model = new_model(file, RECIPE, mesh)
    assert model.variables.keys() == {"params"}
    assert model.variables["params"]["head"]["kernel"].names == (None, "tensor")
    assert model.head.kernel.get_raw_value().sharding.shard_shape((32, VOCAB)) == (8, VOCAB // 2)
    batch = js.shard_batch(batches(1)[0], mesh)
    found, grads = nnx.jit(nnx.value_and_grad(smoothed))(model, batch)
    plain = nn.unbox(jax.tree.map(np.asarray, model.variables))
    wanted, wanted_grads = jax.value_and_grad(lambda v: smoothed(Two().bind(v), batches(1)[0]))(plain)
    np.testing.assert_allclose(float(found), float(wanted), rtol=2e-6)
    assert max(differences(nnx.to_pure_dict(grads), wanted_grads["params"]).values()) < 1e-5


class Balanced(nn.Module):
    """Sows a penalty for tokens that choose alike, one by layer and one summed."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, 32, name="table")(ids)
        for i in range(2):
            x = Router(name=f"router_{i}")(x)
        return nn.Dense(VOCAB, name="head")(x)


class Router(nn.Module):
    @nn.compact
    def __call__(self, x):
        shares = nn.softmax(nn.Dense(32)(x)).mean((0, 1))
        self.sow("losses", "balance", (shares**2).sum())
        self.sow("total", "balance", (shares**2).sum(), init_fn=lambda: 0.0, reduce_fn=jnp.add)
        return x * shares[None, None]


def balanced(model, batch):
    logits, sown = model(batch["inputs"], mutable=["losses", "total"])
    penalty = sum(jax.tree.leaves(sown["losses"])) + 3 * sum(jax.tree.leaves(sown["total"]))
    return cross_entropy(logits, batch["targets"]) + penalty + (model(batch["inputs"]) ** 2).mean()


def test_a_loss_gets_what_a_call_sows():
    """Of that call alone, and of the whole batch; nothing is kept from step to step."""
    file = dataclasses.replace(file_of(Balanced(), Router), loss_fn=balanced)
    model = new_model(file, RECIPE, js.mesh(replica=2))
    assert model.variables.keys() == {"params"}
    batch = batches(1)[0]

    def plain(variables):
        logits, sown = Balanced().apply(variables, batch["inputs"], mutable=["losses", "total"])
        penalty = sum(jax.tree.leaves(sown["losses"])) + 3 * sum(jax.tree.leaves(sown["total"]))
        return cross_entropy(logits, batch["targets"]) + penalty + (logits**2).mean()

    wanted, wanted_grads = jax.jit(jax.value_and_grad(plain))(jax.device_get(model.variables))
    run = nnx.jit(nnx.value_and_grad(balanced))
    for _ in range(2):
        found, grads = run(model, batch)
        np.testing.assert_allclose(float(found), float(wanted), rtol=2e-6)
        apart = differences(nnx.to_pure_dict(grads), wanted_grads["params"])
        assert max(apart.values()) < 2e-5  # small differences of large sums, where shares are nearly equal
    assert model.variables.keys() == {"params"}
    np.testing.assert_allclose(float(balanced(inference_view(model), batch)), float(wanted), rtol=2e-6)


@pytest.mark.parametrize(
    ("annotate", "why"),
    [(lambda model, mesh: None, "it returns None"), (lambda model, mesh: model, "it returns a Decoder")],
)
def test_an_annotation_that_gives_no_annotated_model_is_refused(annotate, why):
    file = dataclasses.replace(FILE, annotate=annotate)
    with pytest.raises(js.ShardingError, match="gives no annotated model") as reported:
        abstract_model(file.with_units({"remat": "full"}), RECIPE, js.mesh(devices=8))
    assert why in str(reported.value) and "do:    return js.fully_shard" in str(reported.value)


class Taken(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(VOCAB)(nn.Embed(VOCAB, 32, name="rngs")(ids))


class Quantised(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(VOCAB, dot_general_cls=Fp8DirectDotGeneralOp)(nn.Embed(VOCAB, 32)(ids))


class Late(nn.Module):
    @nn.compact
    def __call__(self, ids):
        if not self.is_initializing():
            self.variable("batch_stats", "late", jnp.zeros, ())
        self.variable("batch_stats", "early", jnp.zeros, ())
        return nn.Embed(VOCAB, VOCAB)(ids)


@pytest.mark.parametrize(
    ("module", "message"),
    [(Taken(), "Taken: rngs"), (Late(), "Late: batch_stats/late"), (Quantised(), "scales of fp8 products")],
    ids=["name", "variable", "fp8"],
)
def test_what_a_run_cannot_hold_is_told(module, message):
    mesh = js.mesh()
    with pytest.raises(AnnotationError, match=message):
        lowered_step(file_of(module, None), RECIPE, mesh)
