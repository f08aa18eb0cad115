"""Gradients in float16: an overflow on one shard skips the update on all of them, and training continues."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import jshard as js
from jshard.api.loss_scale import LossScale, loss_scale_of, scaled_value_and_grad
from jshard.data import Data, load_text
from jshard.errors import AnnotationError, RunError
from jshard.recipes import building
from jshard.recipes.building import optimizer_of
from jshard.recipes.model_file import next_token_loss
from jshard.train import ModelFile, Recipe, RunOptions, run_recipe
from jshard.train.records import read_metrics
from tests import linen_models
from tests.helpers import compile_to_read, mean_square
from tests.toy_models import Bigram, TwoLayers

HALF = js.MixedPrecision(param_dtype="float16", reduce_dtype="float32")
START = 2.0**14
SCALE = LossScale(initial=START, growth_interval=3)
GOOD = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
# One sample, of one shard, whose gradient is finite, and is not when it is multiplied by the scale.
BAD = np.where(np.arange(16)[:, None] == 5, 60 * GOOD, GOOD)


def two_layers() -> TwoLayers:
    return TwoLayers(64, 64, 64, nnx.Rngs(0), jax.nn.relu)


def made(tx: Any = None, scale: LossScale = SCALE) -> tuple[TwoLayers, nnx.Optimizer]:
    model = two_layers()
    js.fully_shard(model, units=nnx.Linear, mesh=js.mesh(), mixed_precision=HALF)
    return model, js.shard_optimizer(model, scale.around(tx or optax.adam(1e-3)))


def step_of(**settings: Any) -> Any:
    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = scaled_value_and_grad(mean_square, optimizer, **settings)(model, x)
        optimizer.update(model, grads)
        return loss, grads

    return step


STEPS = {case: step_of(**settings) for case, settings in {
    "plain": {},
    "each": {"accumulate": 2},
    "last": {"accumulate": 2, "sync": "last"},
}.items()}  # fmt: skip


def values(x: Any) -> list[np.ndarray]:
    """Every device's own copy or shard of every array."""
    return [np.asarray(s.data) for leaf in jax.tree.leaves(nnx.state(x)) for s in leaf.addressable_shards]


def same(a: list, b: list) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", STEPS)
def test_an_overflow_on_one_shard_skips_the_update_on_all(case):
    model, optimizer = made()
    step = STEPS[case]
    step(model, optimizer, GOOD)
    before, moments = values(model), values(loss_scale_of(optimizer).inner)
    loss, grads = step(model, optimizer, BAD)
    assert np.isfinite(loss) and not np.isfinite(optax.tree.norm(grads))
    assert same(values(model), before) and same(values(loss_scale_of(optimizer).inner), moments)
    assert tuple(loss_scale_of(optimizer)[:3]) == (START / 2, 0, 1)
    step(model, optimizer, GOOD)
    assert not same(values(model), before)
    assert all(np.isfinite(x).all() for x in values(model))
    assert tuple(loss_scale_of(optimizer)[:3]) == (START / 2, 1, 1)
    for _ in range(2):
        step(model, optimizer, GOOD)
    assert tuple(loss_scale_of(optimizer)[:3]) == (START, 0, 1)  # three good ones in a row
    counts = {int(x) for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim == 0 and x.dtype == jnp.int32}
    assert 4 in counts  # Adam has seen four updates of five


@pytest.mark.parametrize("case", STEPS)
def test_gradients_are_those_without_a_scale(case):
    """A scale that is a power of two changes no digit, except where float16 alone would have lost them."""
    model, optimizer = made()
    loss, grads = STEPS[case](model, optimizer, GOOD)
    plain, _ = made()
    wanted_loss, wanted = nnx.jit(nnx.value_and_grad(mean_square))(plain, GOOD)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert g.dtype == jnp.float32
        assert np.linalg.norm(g - w) <= 5e-3 * np.linalg.norm(w)


def test_the_scale_stays_within_bounds():
    tx = LossScale(initial=2.0).around(optax.sgd(1.0))
    state = tx.init({"a": jnp.zeros(2)})
    for wanted in (1.0, 1.0):
        updates, state = tx.update({"a": jnp.array([jnp.inf, 0.0])}, state)
        assert float(state.scale) == wanted and not updates["a"].any()
    with pytest.raises(AnnotationError, match="loss scale settings are not valid"):
        LossScale(growth_interval=0)


def test_no_communication_but_scalars():
    def reductions(optimizer_of_model):
        model = two_layers()
        js.fully_shard(model, units=nnx.Linear, mesh=js.mesh(), mixed_precision=HALF)
        optimizer = js.shard_optimizer(model, optimizer_of_model)
        text = compile_to_read(STEPS["plain"].lower(model, optimizer, GOOD).lowered).as_text()
        found = re.findall(r"= (\S+|\(.*?\)) (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(", text)
        return sorted((kind, *re.findall(r"\w+\[\d.*?\]", shapes)) for shapes, kind in found)  # without the scalars

    assert reductions(SCALE.around(optax.adam(1e-3))) == reductions(optax.adam(1e-3)) != []


def test_flaxs_own_scale_in_a_linen_train_state():
    class Scaled(TrainState):
        scale: Any = None

    model = js.fully_shard(
        linen_models.TwoLayers(64, 64, jax.nn.relu, jnp.float16), mesh=js.mesh(), units=nn.Dense, mixed_precision=HALF
    )

    def create():
        params = model.init(jax.random.key(0), GOOD)["params"]
        return Scaled.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3), scale=DynamicScale(scale=START))

    state = js.shard_init(create, model)

    @jax.jit
    def step(state, x):
        loss = lambda params: (model.apply({"params": params}, x).astype(jnp.float32) ** 2).mean()
        scale, is_finite, _, grads = state.scale.value_and_grad(loss)(state.params)
        after = state.apply_gradients(grads=grads)
        either = lambda new, old: jnp.where(is_finite, new, old)
        kept = jax.tree.map(either, (after.params, after.opt_state), (state.params, state.opt_state))
        return after.replace(params=kept[0], opt_state=kept[1], scale=scale)

    once = step(state, GOOD)
    skipped = step(once, BAD)
    jax.tree.map(np.testing.assert_array_equal, (skipped.params, skipped.opt_state), (once.params, once.opt_state))
    assert float(skipped.scale.scale) == START / 2
    again = step(skipped, GOOD)
    assert not np.array_equal(again.params["Dense_0"]["kernel"], once.params["Dense_0"]["kernel"])


# In the trainer.


def bigram(width: int, rngs: nnx.Rngs) -> Bigram:
    """Without attention: that of jax has no float16 on a CPU."""
    return Bigram(256, width, rngs, dtype=jnp.float16)


def model_file(dtype: str = "float16") -> ModelFile:
    def annotate(model, mesh):
        js.fully_shard(model, mesh=mesh, mixed_precision=js.MixedPrecision(param_dtype=dtype, reduce_dtype="float32"))

    return ModelFile(path=Path(__file__), recipes={}, build=bigram, annotate=annotate)


def recipe(**settings: Any) -> Recipe:
    sizes = {"model": 64, "sequence_length": 16, "batch_size": 16, "num_steps": 6, "eval_sequences": 16}
    return Recipe(**sizes, learning_rate=1e-2, warmup_steps=1, **settings)


def test_float16_asks_for_it_by_itself():
    def is_scaled(dtype, **settings):
        file = model_file(dtype)
        model = js.abstract_init(lambda: file.build(64, nnx.Rngs(0)), lambda model: file.annotate(model, js.mesh()))
        return loss_scale_of(optimizer_of(recipe(**settings), model).init({})) is not None

    assert [is_scaled(dtype) for dtype in ("float32", "bfloat16", "float16")] == [False, False, True]
    assert is_scaled("float32", loss_scale="dynamic") and not is_scaled("float16", loss_scale="none")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return load_text([text], sequence_length=recipe().sequence_length)


def run(out: Path, data: Data, say: Any = lambda line: None, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a run, without times."""
    end = {"resume": settings.pop("resume", False), "sample_tokens": 0, "say": say}
    run_recipe(model_file(), recipe(**settings), RunOptions(mesh=js.mesh(), data=data, out=out, **end))
    found = read_metrics(out / "metrics.jsonl")
    keys = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps", "val_loss")
    return [{k: line[k] for k in keys if k in line} for line in found]


@pytest.mark.wide
def test_a_run_in_float16_skips_and_continues_bit_for_bit(data, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "LossScale", lambda: LossScale(initial=2.0**24, growth_interval=2))
    lines: list[str] = []
    whole = run(tmp_path / "whole", data, lines.append)
    run(tmp_path / "parts", data, checkpoint_every=3)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "6")
    assert run(tmp_path / "parts", data, resume=True, checkpoint_every=3) == whole
    assert any(line == "loss scale: dynamic, now 1.67772e+07, as units are in float16" for line in lines)
    steps = [line for line in whole if "loss" in line]
    skipped = [line for line in steps if line["grad_norm"] is None]
    assert 0 < len(skipped) == steps[-1]["skipped_steps"] < len(steps)
    assert steps[0]["loss_scale"] == 2.0**23 and all(line["loss"] is not None for line in steps)
    assert len({line["loss_scale"] for line in steps}) > 2


def test_a_run_that_only_overflows_ends(data, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "LossScale", lambda: LossScale(initial=2.0))
    file = dataclasses.replace(model_file(), loss_fn=lambda model, batch: 1e9 * next_token_loss(model, batch))
    with pytest.raises(RunError, match="at step 1, before any update"):
        run_recipe(file, recipe(), RunOptions(mesh=js.mesh(), data=data, out=tmp_path / "run", sample_tokens=0))
