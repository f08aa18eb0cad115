"""A model file of a Linen model: planned, trained, evaluated and resumed as one of nnx is."""

import dataclasses
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jshard as js
from jshard.checkpoint import Checkpointer, CheckpointWarning
from jshard.cluster.compile_process import lowered_step
from jshard.data import load_text
from jshard.engine.context import plain_flax
from jshard.errors import AnnotationError
from jshard.inspect.activations import activations
from jshard.recipes.building import abstract_model, batch_of, create, new_model, restore
from jshard.recipes.model_file import next_token_loss
from jshard.recipes.step import inference_view
from jshard.train import Recipe, RunOptions, TrainStep, load_model_file, run_recipe
from tests.helpers import with_placement
from tests.linen_models import VOCAB, Block, Decoder, Layer, Scanned, cross_entropy, differences
from tests.micro_linen import Config
from tests.models.model_files import model_file, module, tiny
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE

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


def test_other_settings_of_the_units_are_planned():
    plain = file_of(Scanned(length=4), Layer).with_units({"remat": "none"})
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


GPT = {"block_size": 16, "n_layer": 1, "d_model": 64}


def test_the_model_that_comes_with_jshard_does():
    file = model_file("linen_gpt")
    small = dataclasses.replace(tiny("linen_gpt"), model=module("linen_gpt").Config(**GPT), sequence_length=16)
    wanted_losses, wanted = trained_plain(small, file.build(small.model, None))
    losses, found = trained(file, small, mesh=js.mesh())
    np.testing.assert_allclose(losses, wanted_losses, rtol=GRADIENT_TOLERANCE)
    square = lambda tree: sum(float((np.float64(x) ** 2).sum()) for x in jax.tree.leaves(tree))
    apart = square(jax.tree.map(np.subtract, found["params"], wanted["params"])) / square(wanted["params"])
    assert apart**0.5 <= PARAMETER_TOLERANCE


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
        with pytest.raises(AnnotationError, match="only in its own dtypes"):
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


# ---- runs ----------------------------------------------------------------------------------------------------------

NOISY = {"depth": 1, "rate": 0.1, "norm": True}


def test_a_checkpoint_of_a_run_is_read_by_a_loop_of_ones_own(tmp_path):
    """Each variable is under its Linen name."""
    text = tmp_path / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    data = load_text([text], sequence_length=RECIPE.sequence_length)
    how = {"mesh": js.mesh(replica=2), "out": tmp_path / "run", "sample_tokens": 0, "say": lambda line: None}
    whole = run_recipe(FILE, recipe(**NOISY), RunOptions(data=data, **how))
    model = js.fully_shard(Decoder(**NOISY), mesh=js.mesh(), units=Block)
    create = lambda: model.init(jax.random.key(1), batches(1)[0]["inputs"])["params"]
    like = {"model": js.abstract_init(create, model)}
    with pytest.warns(CheckpointWarning, match="4 stored leaves are skipped"):
        found = js.checkpoint.restore(whole.checkpoint, like=like, extra="ignore")["model"]
    assert found["block_0"]["Dense_0"]["kernel"].sharding.shard_shape((32, 128)) == (32, 16)
    trained = Checkpointer(whole.out / "checkpoints")
    wanted = restore(FILE, recipe(**NOISY), js.mesh(), trained)[0].variables["params"]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


# ---- what the model file may hold ----------------------------------------------------------------------------------


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


def test_an_annotation_that_gives_no_annotated_model_is_refused():
    file = dataclasses.replace(FILE, annotate=lambda model, mesh: None)
    with pytest.raises(js.ShardingError, match="returns no annotated model") as reported:
        abstract_model(file.with_units({"remat": "full"}), RECIPE, js.mesh(devices=8))
    assert "it returns None" in str(reported.value) and "do:    return js.fully_shard" in str(reported.value)


class Taken(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(VOCAB)(nn.Embed(VOCAB, 32, name="rngs")(ids))


class Late(nn.Module):
    @nn.compact
    def __call__(self, ids):
        if not self.is_initializing():
            self.variable("batch_stats", "late", jnp.zeros, ())
        self.variable("batch_stats", "early", jnp.zeros, ())
        return nn.Embed(VOCAB, VOCAB)(ids)


@pytest.mark.parametrize(
    ("module", "message"),
    [(Taken(), "Taken: rngs"), (Late(), "Late: batch_stats/late")],
    ids=["name", "variable"],
)
def test_what_a_run_cannot_hold_is_reported(module, message):
    mesh = js.mesh()
    with pytest.raises(AnnotationError, match=message):
        lowered_step(file_of(module, None), RECIPE, mesh)
