"""models/gpt.py: the recipes have the sizes they claim, the model is a causal decoder, and it learns sharded."""

import dataclasses
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def sharded(config=MICRO):
    mesh = js.mesh()
    model = js.shard_init(lambda: build(config), lambda model: gpt.annotate(model, mesh))
    return model, mesh


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


def test_compute_dtype_reaches_the_plan():
    config = dataclasses.replace(MICRO, compute_dtype="bfloat16")
    mesh = js.mesh(devices=8)
    plan = js.plan(js.abstract_init(lambda: build(config), lambda model: gpt.annotate(model, mesh)))
    assert {(p.dtype, p.gathered_dtype, p.reduce_dtype) for p in (leaf.placement for leaf in plan.leaves)} == {
        ("float32", "bfloat16", "float32")
    }


def test_initialisation_is_that_of_gpt2():
    model = build(dataclasses.replace(MICRO, n_layer=8, d_model=128, d_ff=512))
    block = model.blocks[3]
    for layer in (block.attention.qkv, block.mlp.up):
        np.testing.assert_allclose(layer.kernel[...].std(), 0.02, rtol=0.05)
    for layer in (block.attention.out, block.mlp.down):
        np.testing.assert_allclose(layer.kernel[...].std(), 0.02 / math.sqrt(2 * 8), rtol=0.05)
        assert not layer.bias[...].any()
    np.testing.assert_allclose(model.tokens.embedding[...].std(), 0.02, rtol=0.05)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("tied", [True, False])
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


def test_rotary_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(np.broadcast_to(rng.normal(size=(1, 1, 1, 8)), (1, 9, 1, 8)), jnp.float32) for _ in "qk")
    scores = jnp.einsum("bthk,bshk->ts", gpt.rotate(q), gpt.rotate(k))
    np.testing.assert_allclose(scores[3, 1], scores[8, 6], rtol=1e-5)
    assert abs(scores[3, 1] - scores[3, 2]) > 1e-3


def test_dropout_acts_in_training_only():
    model = build(dataclasses.replace(MICRO, dropout=0.5))
    ids = tokens((2, 8))
    assert jnp.abs(call(model, ids) - call(model, ids)).max() > 1e-3
    model.eval()
    np.testing.assert_array_equal(call(model, ids), call(model, ids))


@pytest.mark.wide
def test_loss_falls_when_trained_sharded():
    model, mesh = sharded(dataclasses.replace(MICRO, n_layer=1, dropout=0.1))
    optimizer = js.shard_optimizer(model, optax.adam(1e-2))
    ids = tokens((16, 17))
    batch = js.shard_batch({"inputs": np.asarray(ids[:, :-1]), "targets": np.asarray(ids[:, 1:])}, mesh)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(gpt.loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]


def test_sharded_loss_is_that_of_the_plain_model():
    model, mesh = sharded()
    ids = tokens((16, 17))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    plain = nnx.jit(gpt.loss_fn)(build(), batch)
    np.testing.assert_allclose(nnx.jit(gpt.loss_fn)(model, js.shard_batch(batch, mesh)), plain, rtol=1e-6)


def step_of(config, mesh, ids):
    """Loss and gradients of one batch, sharded."""
    model = placed(lambda: build(config), lambda model: gpt.annotate(model, mesh))
    loss, grads = nnx.jit(nnx.value_and_grad(gpt.loss_fn))(model, {"inputs": ids[:, :-1], "targets": ids[:, 1:]})
    return float(loss), {str(path): np.asarray(x, np.float32) for path, x in jax.tree.leaves_with_path(grads)}


def test_kernels_of_pallas_leave_the_loss_as_it_is():
    """On a CPU their twins run; in float32 these do what Flax's layers do, in every bit."""
    ids = tokens((8, 17))
    loss, grads = step_of(MICRO, js.mesh(), ids)
    found, found_grads = step_of(dataclasses.replace(MICRO, mlp="pallas"), js.mesh(), ids)
    assert found == loss
    for path, x in grads.items():
        np.testing.assert_array_equal(found_grads[path], x, err_msg=path)


@pytest.mark.wide
def test_kernels_of_pallas_step_by_step_are_their_twins(monkeypatch):
    """In bfloat16 on one device: the interpreter of kernels knows no more."""
    config = dataclasses.replace(MICRO, n_layer=1, d_model=64, d_ff=64, compute_dtype="bfloat16")
    ids, mesh = tokens((2, 9)), js.mesh(devices=jax.devices()[:1])
    loss, grads = step_of(config, mesh, ids)
    calls = []
    small = js.kernels.Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2)

    def interpreted(*args, **options):
        calls.append(args)
        return mlp(*args, **options | {"backend": "interpret", "occupancy": small})

    mlp = js.kernels.mlp
    monkeypatch.setattr(js.kernels, "mlp", interpreted)
    found, found_grads = step_of(dataclasses.replace(config, mlp="pallas"), mesh, ids)
    assert calls
    assert found == pytest.approx(loss, rel=1e-4)
    for path, x in grads.items():
        assert np.linalg.norm(found_grads[path] - x) <= 2e-2 * np.linalg.norm(x), path


def test_generate_continues_past_the_block_size():
    model = build()
    prompt = tokens((2, 30))
    text = gpt.generate(model, prompt, 5, key=jax.random.key(0))
    assert text.shape == (2, 35)
    np.testing.assert_array_equal(text[:, :30], prompt)
    np.testing.assert_array_equal(text, gpt.generate(model, prompt, 5, key=jax.random.key(0)))
    # Cold, it is the model's first choice: the padding behind the text must not be seen.
    cold = gpt.generate(model, prompt, 1, key=jax.random.key(0), temperature=1e-6)
    np.testing.assert_array_equal(cold[:, 30], call(model, prompt)[:, -1].argmax(-1))


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("fsdp", [1, 8])
def test_every_product_is_in_the_dtype_of_computation(scan, fsdp):
    """The table that scores the tokens too, which Flax would hold to the dtype it was built with."""
    config = dataclasses.replace(MICRO, compute_dtype="bfloat16", scan=scan)
    mesh = js.mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    model = js.abstract_init(lambda: build(config), lambda model: gpt.annotate(model, mesh))
    batch = {name: jnp.zeros((8, 32), jnp.int32) for name in ("inputs", "targets")}
    text = nnx.jit(gpt.loss_fn).lower(model, batch).lowered.as_text()
    products = re.findall(r"dot_general.* : \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\)", text)
    assert len(products) >= 6 and set(products) == {("bf16", "bf16")}
