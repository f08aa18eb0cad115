"""`wrt` in a model file: adapters are trained over the base of another run, and only they have gradients and state."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.checkpoint import CheckpointWarning
from jshard.cluster.compile_process import lowered_step
from jshard.inspect.activations import activations
from jshard.recipes.building import abstract_model, batch_of, check_source, create, create_from, restore
from jshard.recipes.model_file import dense_flops
from jshard.train import TrainStep, load_model_file
from tests.helpers import compile_to_read
from tests.micro_gpt import MODELS

GPT = load_model_file(MODELS / "gpt.py")
_SMALL = {"block_size": 16, "n_layer": 2, "n_head": 2, "d_model": 64, "d_ff": 128}


def small(**settings):
    _, tiny = GPT.recipe("tiny")
    model = dataclasses.replace(tiny.model, **_SMALL, **settings)
    return dataclasses.replace(tiny, model=model, sequence_length=16, batch_size=16, warmup_steps=0, learning_rate=0.03)


RECIPE = small(lora=js.train.LoRA(rank=8, targets="mlp.c_fc,mlp.c_proj"))
TRAINED = GPT.trained(RECIPE)
_ADAPTERS = 2 * 2 * RECIPE.model.lora.rank * (64 + 128)  # elements, of two layers in two blocks


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint of a base, and its model."""
    model, _ = create(GPT, dataclasses.replace(small(), seed=7), js.mesh())
    path = tmp_path_factory.mktemp("base") / "0"
    js.checkpoint.save(path, {"model": model})
    return path, model


def values(model, kind=nnx.Param):
    return {path: np.asarray(x) for path, x in nnx.to_flat_state(nnx.state(model, kind))}


def frozen(model):
    adapters = values(model, nnx.LoRAParam)
    return {path: x for path, x in values(model).items() if path not in adapters}


def equal(some, others):
    return some.keys() == others.keys() and all((some[path] == others[path]).all() for path in some)


def batches(mesh):
    rows = np.random.default_rng(0).integers(97, 107, (3, RECIPE.batch_size, RECIPE.sequence_length + 1), np.int32)
    return [js.shard_batch({"inputs": x[:, :-1], "targets": x[:, 1:]}, mesh) for x in rows]


@pytest.mark.wide
def test_adapters_are_trained_over_the_base_of_another_run(base, tmp_path):
    path, model = base
    mesh = js.mesh(replica=2)
    check_source(GPT, RECIPE, mesh, path)
    with pytest.warns(CheckpointWarning, match="8 leaves keep their values in `like`"):
        adapted, optimizer = create_from(GPT, RECIPE, mesh, path)
    assert equal(frozen(adapted), values(model)), "adapters begin as nothing"
    assert {key[-1] for key, x in nnx.to_flat_state(nnx.state(optimizer)) if x.ndim} == {"lora_a", "lora_b"}
    given = batches(mesh)
    step = TrainStep(GPT.loss_fn, adapted, optimizer, given[0])
    losses = [float(step(batch)["loss"]) for batch in [*given, *given]]
    assert losses[3:] < losses[:3]
    assert equal(frozen(step.model), values(model))
    changed = values(step.model, nnx.LoRAParam)
    assert all((x != 0).any() for key, x in changed.items() if key[-1] == "lora_b")

    series = js.checkpoint.Checkpointer(tmp_path)
    series.save(3, {"model": step.model, "optimizer": step.optimizer, "step": 3})
    series.wait()
    again, state, done, _ = restore(GPT, RECIPE, js.mesh(), series)
    assert done == 3 and equal(values(again), values(step.model))
    assert equal(values(state, nnx.OptState), values(step.optimizer, nnx.OptState))


def test_a_base_that_lacks_what_is_frozen_is_refused(base):
    deeper = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, n_layer=3))
    with pytest.raises(js.checkpoint.CheckpointError, match=r"blocks/2/\.\.\.  stored nothing  wanted 12 leaves"):
        check_source(GPT, deeper, js.mesh(), base[0])  # without its four adapters


def test_what_is_frozen_is_planned_and_compiled_as_frozen():
    model, lowered = lowered_step(GPT, RECIPE, js.mesh())
    plan = js.plan(model, wrt=TRAINED)
    assert {leaf.path.split("/")[-1] for leaf in plan.leaves if leaf.trained} == {"lora_a", "lora_b"}
    found = js.audit(compile_to_read(lowered), plan=plan)
    assert not [row for row in found.rows if row.kind == "reduce-scatter" and row.total_bytes > 4 * _ADAPTERS]
    assert found.ok, found.differences


def test_a_pattern_of_paths_says_it_too(tmp_path):
    (tmp_path / "patterns.py").write_text("from gpt import *\n\nwrt = '*/mlp/up/*'\n")
    (tmp_path / "gpt.py").symlink_to(MODELS / "gpt.py")
    file = load_model_file(tmp_path / "patterns.py")
    model = abstract_model(file, small(), js.mesh())
    trained = {leaf.path for leaf in js.plan(model, wrt=file.trained(small())).leaves if leaf.trained}
    assert trained == {f"blocks/{n}/mlp/up/{part}" for n in range(2) for part in ("kernel", "bias")}
    # Of a config with adapters these are trained, whatever the file says.
    adapted = abstract_model(file, RECIPE, js.mesh())
    assert js.plan(adapted, wrt=file.trained(RECIPE)) == js.plan(adapted, wrt=nnx.LoRAParam)


def test_explain_counts_state_and_activations_of_what_is_trained():
    mesh = js.mesh(fsdp=8, devices=8)
    model, batch = abstract_model(GPT, RECIPE, mesh), batch_of(GPT, RECIPE, RECIPE.batch_size)
    whole = js.explain(model, loss_fn=GPT.loss_fn, batch=batch)
    partly = js.explain(model, loss_fn=GPT.loss_fn, batch=batch, wrt=TRAINED)
    assert "of them are frozen" in str(partly) and "frozen" not in str(whole)
    assert partly.memory.optimizer_bytes < whole.memory.optimizer_bytes / 4
    assert partly.memory.gradients_bytes < whole.memory.gradients_bytes / 4
    saved = [activations(model, GPT.loss_fn, batch, wrt=wrt).saved_bytes for wrt in (nnx.Param, TRAINED)]
    assert saved[1] < saved[0]


def test_a_frozen_parameter_costs_one_product_backward():
    flops, formula = dense_flops(num_parameters=100, num_frozen=90, num_tokens=10)
    assert flops == (6 * 10 + 4 * 90) * 10
    assert formula == "(6 x 10 trained + 4 x 90 frozen parameters) x 10 tokens"
