"""models/gpt.py: the recipes have the sizes they claim, the model is a causal decoder, and it learns sharded."""

import dataclasses
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.train import load_model_file
from tests.helpers import placed
from tests.micro_gpt import MODELS, micro

GPT_FILE = load_model_file(MODELS / "gpt.py")
gpt = sys.modules[GPT_FILE.build.__module__]

MICRO = micro().model
PARAMETERS = {
    "tiny": None,  # below: the recipe is tuned now and then, its size is only bounded
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "gpt3_175b": 175_215_501_312,
}


def build(config=MICRO, seed=0):
    return gpt.GPT(config, rngs=nnx.Rngs(seed))


def tokens(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, MICRO.vocab_size, shape), jnp.int32)


@nnx.jit
def call(model, ids):
    return model(ids)


@pytest.mark.parametrize("name", ["tiny", "gpt2_small", "gpt2_xl"])
def test_recipe_has_its_size(name):
    _, recipe = GPT_FILE.recipe(name)
    params = nnx.state(nnx.eval_shape(lambda: GPT_FILE.build(recipe.model, nnx.Rngs(0))), nnx.Param)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert count == PARAMETERS[name] if PARAMETERS[name] else 0.5e6 < count < 2e6


def test_plan_has_a_unit_per_block_and_an_untied_head_of_its_own():
    mesh = js.mesh(devices=8)
    for tied in (True, False):
        config = dataclasses.replace(MICRO, tied=tied)
        plan = js.plan(js.abstract_init(lambda c=config: build(c), lambda model: gpt.annotate(model, mesh)))
        names = {unit.name for unit in plan.units} - {""}
        blocks = {f"blocks/{i}" for i in range(config.n_layer)}
        assert {n for n in names if n.startswith("blocks/")} == blocks
        assert ("head" in names) is not tied


@pytest.mark.parametrize(("positions", "tied"), [("learned", True), ("rotary", False)])
def test_model_is_causal_and_sees_positions(positions, tied):
    model = build(dataclasses.replace(MICRO, positions=positions, tied=tied))
    ids = tokens((2, 12))
    logits = call(model, ids)
    changed = call(model, ids.at[:, 7].add(1))
    np.testing.assert_array_equal(logits[:, :7], changed[:, :7])
    assert jnp.abs(logits[:, 7:] - changed[:, 7:]).max() > 1e-3
    # Two swapped tokens of the past look alike to a model that knows no positions.
    swapped = call(model, ids.at[:, 0].set(ids[:, 1]).at[:, 1].set(ids[:, 0]))
    assert jnp.abs(logits[:, -1] - swapped[:, -1]).max() > 1e-6


def test_dropout_acts_in_training_only():
    model = build(dataclasses.replace(MICRO, dropout=0.5))
    ids = tokens((2, 8))
    assert jnp.abs(call(model, ids) - call(model, ids)).max() > 1e-3
    model.eval()
    np.testing.assert_array_equal(call(model, ids), call(model, ids))


def step_of(config, mesh, ids):
    """Loss and gradients of one batch, sharded."""
    model = placed(lambda: build(config), lambda model: gpt.annotate(model, mesh))
    loss, grads = nnx.jit(nnx.value_and_grad(gpt.loss_fn))(model, {"inputs": ids[:, :-1], "targets": ids[:, 1:]})
    return float(loss), {str(path): np.asarray(x, np.float32) for path, x in jax.tree.leaves_with_path(grads)}


@pytest.mark.wide
def test_kernels_of_pallas_leave_the_loss_as_it_is():
    """On a CPU their twins run; in float32 these do what Flax's layers do, in every bit."""
    ids = tokens((8, 17))
    loss, grads = step_of(MICRO, js.mesh(), ids)
    found, found_grads = step_of(dataclasses.replace(MICRO, mlp="pallas"), js.mesh(), ids)
    assert found == loss
    for path, x in grads.items():
        np.testing.assert_array_equal(found_grads[path], x, err_msg=path)


@pytest.mark.parametrize(("scan", "fsdp"), [(False, 1), (True, 8)])
def test_every_product_is_in_the_dtype_of_computation(scan, fsdp):
    """The table that scores the tokens too, which Flax would hold to the dtype it was built with."""
    config = dataclasses.replace(MICRO, compute_dtype="bfloat16", scan=scan)
    mesh = js.mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    model = js.abstract_init(lambda: build(config), lambda model: gpt.annotate(model, mesh))
    batch = {name: jnp.zeros((8, 32), jnp.int32) for name in ("inputs", "targets")}
    text = nnx.jit(gpt.loss_fn).lower(model, batch).lowered.as_text()
    products = re.findall(r"dot_general.* : \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\)", text)
    assert len(products) >= 6 and set(products) == {("bf16", "bf16")}
