"""The average of the weights is that of the formula, placed like the weights, and its update sends nothing."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.cluster.compile_process import lowered_step
from jshard.errors import AnnotationError
from jshard.plans.padding import padding_of
from jshard.recipes.building import abstract_state, create
from jshard.recipes.ema import Ema, ema_of
from jshard.train import AveragedModel, EvalStep, TrainStep, evaluate, load_model_file

LINEN = load_model_file(Path(__file__).parents[1] / "micro_linen.py")
STEPS = 5


class Net(nnx.Module):
    """Tied scores, sizes that nothing divides, and statistics."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(96, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 67, rngs=rngs)
        self.down = nnx.Linear(67, width, rngs=rngs)

    def __call__(self, ids):
        x = self.norm(self.embed(ids))
        return self.embed.attend(x + self.down(jnp.tanh(self.up(x))))


def loss_fn(model, batch):
    logits = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def net(devices, *, width=64, param_dtype=None, **placement):
    mesh = js.mesh(fsdp=devices, devices=jax.devices()[:devices])
    settings = {"placement": js.PlacementPolicy(**placement)} if placement else {}

    def build():
        model = Net(width, nnx.Rngs(0))
        if param_dtype is not None:
            nnx.update(model, jax.tree.map(lambda x: x.astype(param_dtype), nnx.state(model, nnx.Param)))
        return model

    model = js.shard_init(build, lambda model: js.fully_shard(model, mesh=mesh, **settings))
    return model, js.shard_optimizer(model, optax.sgd(0.5))


def of_linen(devices):
    mesh = js.mesh(fsdp=devices, devices=jax.devices()[:devices])
    recipe = LINEN.recipe()[1]
    return create(LINEN, dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, depth=1, norm=True)), mesh)


KINDS = {
    "one device": lambda: net(1),
    "eight devices": lambda: net(8),
    "padded": lambda: net(8, width=61, shard_dim=0),
    "in host memory": lambda: net(8, offload="params"),
    "bfloat16 weights": lambda: net(8, param_dtype=jnp.bfloat16),
    "linen": lambda: of_linen(8),
}


def batch_of(mesh):
    ids = np.random.default_rng(0).integers(0, 96, (16, 5), dtype=np.int32)
    return js.shard_batch({"inputs": ids[:, :-1], "targets": ids[:, 1:]}, mesh)


def started(kind, **settings):
    model, optimizer = KINDS[kind]()
    ema = Ema(model, **{"decay": 0.9, **settings})
    mesh = model.embed.embedding.sharding.mesh if hasattr(model, "embed") else js.mesh()
    batch = batch_of(mesh)
    return TrainStep(loss_fn, model, optimizer, batch, ema=ema), batch


def averaged_paths(step):
    return {path for path, _ in nnx.to_flat_state(step.ema.weights)}


def weights(step):
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(step.model)):
        if path in averaged_paths(step):
            found[path] = np.asarray(variable.get_raw_value(), np.float64)
    return found


def averages(step):
    return {path: np.asarray(x.get_raw_value(), np.float64) for path, x in nnx.to_flat_state(step.ema.weights)}


def expected(seen, *, decay, start_step=0, warmup=True):
    """The average of the weights after each step, the first of which are those before any."""
    average, updates = seen[0], 0
    for number, now in enumerate(seen[1:], start=1):
        if number <= start_step:
            average = now
            continue
        share = decay
        if warmup:
            share = min(decay, (1 + updates) / (10 + updates))
        updates += 1
        average = {path: share * average[path] + (1 - share) * now[path] for path in now}
    return average


def trained(step, batch):
    seen = [weights(step)]
    for _ in range(STEPS):
        step(batch)
        seen.append(weights(step))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_is_that_of_the_formula(kind):
    step, batch = started(kind)
    seen = trained(step, batch)
    assert any(np.abs(seen[-1][path] - seen[0][path]).max() > 1e-3 for path in seen[0])
    # XLA may average weights before they are rounded to bfloat16.
    rtol = 1e-2 if kind.startswith("bfloat16") else 1e-5
    for path, value in expected(seen, decay=0.9).items():
        np.testing.assert_allclose(averages(step)[path], value, rtol=rtol, atol=rtol / 10, err_msg=str(path))


@pytest.mark.parametrize("settings", [{"warmup": False}, {"start_step": 2}, {"decay": 0.05}], ids=str)
def test_settings_of_the_average(settings):
    step, batch = started("eight devices", **settings)
    seen = trained(step, batch)
    for path, value in expected(seen, **{"decay": 0.9, **settings}).items():
        np.testing.assert_allclose(averages(step)[path], value, rtol=1e-5, atol=1e-6, err_msg=str(path))
    assert int(step.ema.count[...]) == STEPS - settings.get("start_step", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_are_placed_like_the_weights(kind):
    step, batch = started(kind)
    step(batch)
    model = dict(nnx.to_flat_state(nnx.state(step.model)))
    paddings = set()
    memories = set()
    for path, average in nnx.to_flat_state(step.ema.weights):
        raw, weight = average.get_raw_value(), model[path].get_raw_value()
        assert raw.sharding == weight.sharding, path
        assert raw.shape == weight.shape and raw.dtype == jnp.float32, path
        assert padding_of(average) == padding_of(model[path])
        paddings.add(padding_of(average))
        memories.add(raw.sharding.memory_kind)
    assert (len(paddings) > 1) == (kind == "padded")
    assert ("pinned_host" in memories) == (kind == "in host memory")


def test_statistics_are_averaged_and_tied_weights_once():
    step, _ = started("eight devices")
    paths = averaged_paths(step)
    assert ("norm", "mean") in paths
    assert sum("embedding" in path for path in paths) == 1


def test_only_trained_weights_are_averaged():
    model, _ = net(8)
    ema = Ema(model, decay=0.9, wrt=nnx.All(nnx.Param, nnx.PathContains("up")))
    assert {path for path, _ in nnx.to_flat_state(ema.weights)} == {
        *(("up", name) for name in ("kernel", "bias")),
        *(("norm", name) for name in ("mean", "var")),
    }


@pytest.mark.parametrize("kind", ["eight devices", "padded", "linen"])
def test_the_update_sends_nothing(kind):
    def collectives(ema):
        model, optimizer = KINDS[kind]()
        average = Ema(model, decay=0.9) if ema else None
        step = TrainStep(loss_fn, model, optimizer, batch_of(js.mesh()), ema=average)
        names = re.findall(r"= \S+ (all-\w+|reduce-scatter|collective-permute)", step.compiled.as_text())
        return sorted(names)

    assert collectives(ema=True) == collectives(ema=False) != []


def test_training_is_the_same_with_an_average():
    with_average, batch = started("eight devices")
    without = TrainStep(loss_fn, *KINDS["eight devices"](), batch)
    for _ in range(3):
        assert float(with_average(batch)["loss"]) == float(without(batch)["loss"])


@pytest.mark.parametrize("kind", ["eight devices", "padded", "bfloat16 weights", "linen"])
def test_an_evaluation_takes_the_averages(kind):
    step, batch = started(kind)
    for _ in range(3):
        step(batch)
    averaged = AveragedModel(step)
    (result,) = evaluate(averaged, EvalStep(loss_fn, averaged, batch), [batch]).values()
    assert result != evaluate(step, EvalStep(loss_fn, step, batch), [batch])["loss"]
    # The model itself with these weights.
    model = nnx.clone(step.model)
    for path, average in nnx.to_flat_state(step.ema.weights):
        variable = dict(nnx.to_flat_state(nnx.state(model)))[path]
        variable.set_raw_value(average.get_raw_value().astype(variable.get_raw_value().dtype))
        nnx.update(model, nnx.from_flat_state([(path, variable)]))
    model.set_attributes(deterministic=True, use_running_average=True, raise_if_not_found=False)
    assert abs(result - float(loss_fn(model, batch))) < 1e-5


def test_a_narrow_average_is_computed_in_float32():
    step, batch = started("eight devices", dtype="bfloat16")
    seen = trained(step, batch)
    for path, value in expected(seen, decay=0.9).items():
        np.testing.assert_allclose(averages(step)[path], value, rtol=2e-2, atol=1e-2, err_msg=str(path))
    assert {leaf.dtype for leaf in jax.tree.leaves(step.ema.weights)} == {jnp.dtype("bfloat16")}


def test_the_abstract_state_of_a_recipe_is_that_of_its_step():
    """The plan for a cluster, and a restore, know the average without an array."""
    recipe = dataclasses.replace(LINEN.recipe()[1], ema_decay=0.9, ema_dtype="bfloat16")
    mesh = js.mesh()
    model, _ = create(LINEN, recipe, mesh)
    live = ema_of(recipe, model, LINEN.wrt)
    abstract = abstract_state(LINEN, recipe, mesh)["ema"]
    for x, shape in zip(jax.tree.leaves(live.weights), jax.tree.leaves(abstract.weights), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (shape.shape, shape.dtype, shape.sharding)
    _, lowered = lowered_step(LINEN, recipe, mesh)
    _, without = lowered_step(LINEN, dataclasses.replace(recipe, ema_decay=None), mesh)
    more = len(jax.tree.leaves(lowered.in_avals)) - len(jax.tree.leaves(without.in_avals))
    assert more == len(jax.tree.leaves(live.weights)) + 1  # and the count


def test_a_step_without_an_average_is_refused():
    step = TrainStep(loss_fn, *KINDS["one device"](), batch_of(js.mesh(devices=jax.devices()[:1])))
    with pytest.raises(AnnotationError, match="keeps no average"):
        AveragedModel(step)
