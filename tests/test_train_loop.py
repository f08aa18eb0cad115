"""`fit` trains a recipe end to end and leaves a record that can be read back."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard import checkpoint
from jshard.train import data, load_model_file
from jshard.train.loop import create, evaluate, fit, make_eval_step, make_train_step
from jshard.train.metrics import read_metrics
from tests.micro_gpt import micro

MODEL_FILE = load_model_file(__file__.replace("test_train_loop", "micro_gpt"))
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 400, dtype=np.uint8)
CORPUS = data.Corpus(train=TEXT[:15000], held_out=TEXT[15000:], description="a fox")


def test_fit_learns_and_leaves_its_record(tmp_path):
    recipe = dataclasses.replace(micro(), num_steps=40, eval_every=30, learning_rate=1e-2)
    out = tmp_path / "run"
    val_loss = fit(MODEL_FILE, recipe, mesh=js.mesh(replica=2), corpus=CORPUS, out=out)

    lines = read_metrics(out / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40
    assert losses[-1] < 0.6 * losses[0]
    assert [line["step"] for line in lines if "val_loss" in line] == [30, 40]
    assert lines[-1]["val_loss"] == val_loss < 0.6 * losses[0]
    assert json.loads((out / "recipe.json").read_text()) == dataclasses.asdict(recipe)
    assert (out / "loss.png").stat().st_size > 1000

    model, optimizer = create(MODEL_FILE, dataclasses.replace(recipe, seed=1), js.mesh(fsdp=8))
    like = {"model": model, "optimizer": optimizer, "step": 0}
    restored = checkpoint.restore(out / "checkpoint", like=like)
    assert restored["step"] == 40
    assert int(restored["optimizer"].step[...]) == 40
    loader = data.Loader(corpus=CORPUS, sequence_length=32, batch_size=16, seed=0, rows=range(16))
    again = evaluate(make_eval_step(MODEL_FILE.loss_fn), restored["model"], loader.held_out(32), js.mesh(fsdp=8))
    assert again == pytest.approx(val_loss, rel=1e-5)


def test_same_seed_same_losses_on_another_mesh(tmp_path):
    for name, mesh in {"a": js.mesh(fsdp=8), "b": js.mesh(fsdp=2, devices=jax.devices()[:2])}.items():
        fit(MODEL_FILE, micro(), mesh=mesh, corpus=CORPUS, out=tmp_path / name)
    a, b = ([x["loss"] for x in read_metrics(tmp_path / n / "metrics.jsonl") if "loss" in x] for n in "ab")
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_accumulated_step_is_the_whole_batch_step():
    recipe = dataclasses.replace(micro(), weight_decay=0.0)
    mesh = js.mesh(fsdp=4, devices=jax.devices()[:4])
    loader = data.Loader(corpus=CORPUS, sequence_length=32, batch_size=16, seed=0, rows=data.local_rows(16, mesh))
    batch = js.shard_batch(next(loader.train(1)), mesh)
    results = []
    for accumulate in (1, 4):
        model, optimizer = create(MODEL_FILE, recipe, mesh)
        scalars = make_train_step(MODEL_FILE.loss_fn, accumulate=accumulate)(model, optimizer, batch)
        results.append((scalars, model))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(results[0][0][key], results[1][0][key], rtol=1e-5)


def test_state_is_sharded_before_and_after_a_step():
    mesh = js.mesh()
    model, optimizer = create(MODEL_FILE, micro(), mesh)
    before = [x.sharding for x in jax.tree.leaves(nnx.state((model, optimizer)))]
    loader = data.Loader(corpus=CORPUS, sequence_length=32, batch_size=16, seed=0, rows=data.local_rows(16, mesh))
    step = make_train_step(MODEL_FILE.loss_fn)
    for batch in loader.train(2):
        step(model, optimizer, js.shard_batch(batch, mesh))
    after = [x.sharding for x in jax.tree.leaves(nnx.state((model, optimizer)))]
    assert all(b.is_equivalent_to(a, len(b.spec) + 4) or b == a for b, a in zip(before, after, strict=True))
    kernel = model.blocks[0].mlp.up.kernel.get_raw_value()
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def test_evaluation_is_without_dropout():
    recipe = dataclasses.replace(micro(), model=dataclasses.replace(micro().model, dropout=0.5))
    mesh = js.mesh()
    model, _ = create(MODEL_FILE, recipe, mesh)
    loader = data.Loader(corpus=CORPUS, sequence_length=32, batch_size=16, seed=0, rows=data.local_rows(16, mesh))
    eval_step = make_eval_step(MODEL_FILE.loss_fn)
    losses = [evaluate(eval_step, model, loader.held_out(16), mesh) for _ in range(2)]
    assert losses[0] == losses[1]
    assert not model.dropout.deterministic  # and training has it back
