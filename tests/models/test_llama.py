"""models/llama.py: Llama 3 in its sizes, causal, with shared heads, and equal when sharded one, two or three ways."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.models.model_files import assert_parity_of, assert_plans, model_file, module, smaller, tiny

FILE, llama = model_file("llama"), module("llama")
RECIPE = smaller(tiny("llama"), sequence_length=24, n_layer=2, n_head=4, d_model=64, d_ff=96, queries_at_once=16)
MICRO = RECIPE.model


def build(config=MICRO):
    return llama.Llama(config, rngs=nnx.Rngs(0))


def tokens(shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, MICRO.vocab_size, shape), jnp.int32)


@nnx.jit
def call(model, ids):
    return model(ids)


def abstract(config, mesh):
    return js.abstract_init(lambda: build(config), lambda model: llama.annotate(model, mesh))


@pytest.mark.parametrize(
    ("name", "num_parameters", "degrees"),
    [
        ("qwen3_0_6b", 596_049_920, {"fsdp": 8}),
        ("llama3_2_1b", 1_235_814_400, {"fsdp": 8}),
        ("llama3_2_3b", 3_212_749_824, {"fsdp": 8}),
        ("mistral_7b", 7_248_023_552, {"fsdp": 64}),
        ("qwen2_5_7b", 7_615_616_512, {"fsdp": 64}),
        ("llama3_8b", 8_030_261_248, {"fsdp": 128}),
        ("qwen3_14b", 14_768_307_200, {"fsdp": 64}),
        ("qwen3_32b", 32_762_123_264, {"fsdp": 128}),
        ("llama3_70b", 70_553_706_496, {"replica": 2, "fsdp": 128}),
        ("llama3_405b", 405_853_388_800, {"fsdp": 512}),
    ],
)
def test_a_recipe_of_a_published_size_plans_from_its_shapes(name, num_parameters, degrees):
    assert_plans("llama", name, num_parameters=num_parameters, **degrees)


def test_a_tensor_axis_cuts_what_it_names():
    plan = assert_plans("llama", "llama3_405b", num_parameters=405_853_388_800, replica=2, fsdp=32, tensor=8)
    shards = {leaf.path: leaf.placement.shards for leaf in plan.leaves}
    for path, of in shards.items():
        assert of == (32 * 8 if path.startswith("blocks") and path.endswith("kernel") else 32), path
    specs = {leaf.path: leaf.placement.spec for leaf in plan.leaves}
    assert specs["blocks/attention/k/kernel"][2] == specs["blocks/mlp/gate/kernel"][2] == "tensor"
    assert specs["blocks/attention/out/kernel"][1] == specs["blocks/mlp/down/kernel"][1] == "tensor"


def test_heads_that_do_not_split_over_the_tensor_axis_are_refused():
    with pytest.raises(js.ShardingError, match=r"(?s)degree 4.*n_kv_head=2.*tensor=2"):
        abstract(MICRO, js.mesh(fsdp=2, tensor=4))


def test_training_in_three_dimensions_is_that_of_one_device():
    assert_parity_of("llama", smaller(RECIPE, n_layer=1), replica=2, fsdp=2, tensor=2)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_heads_of_another_width_train_as_on_one_device(name):
    """As in Mistral NeMo, whose 32 heads of 128 stand in a model of 5,120; stored checkpoints have the default."""
    recipe = smaller(tiny(name), n_layer=1, head_dim=20)
    assert recipe.model.head_dim * recipe.model.n_head != recipe.model.d_model
    assert_parity_of(name, recipe, fsdp=4, tensor=2)


def test_model_is_causal():
    ids = tokens((2, 24))
    logits, changed = (call(build(), x) for x in (ids, ids.at[:, 18].add(1)))
    np.testing.assert_array_equal(logits[:, :18], changed[:, :18])
    assert (jnp.abs(logits - changed)[:, 18:].max(-1) > 1e-4).all()


def test_shared_heads_are_heads_repeated():
    config = dataclasses.replace(MICRO, n_kv_head=4)
    model, wide, ids = build(), build(config), tokens((2, 24))
    nnx.update(wide, nnx.filter_state(nnx.state(model), lambda path, _: path[-2] not in ("k", "v")))
    for shared, repeated in zip(model.blocks, wide.blocks, strict=True):
        for name in ("k", "v"):
            kernel_DGK = getattr(shared.attention, name).kernel[...].reshape(64, 2, 16)
            getattr(repeated.attention, name).kernel[...] = jnp.repeat(kernel_DGK, 2, axis=1).reshape(64, 64)
    np.testing.assert_allclose(call(model, ids), call(wide, ids), atol=1e-6)


def test_rotary_turns_the_halves_of_a_head_as_complex_numbers():
    x = np.random.default_rng(0).normal(size=(2, 9, 3, 8)).astype(np.float32)
    angle = np.arange(9)[:, None] * 500_000.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[None, :, None]
    wanted = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(llama.rotate(jnp.asarray(x), 500_000.0, 0), wanted, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_name_at_hugging_face(tied):
    config = dataclasses.replace(MICRO, tied=tied)
    plan = js.plan(abstract(config, js.mesh()))
    names = llama.hf_names(config)
    assert names.keys() == {leaf.path for leaf in plan.leaves}
    assert ("head" in {unit.name for unit in plan.units}) is not tied
    stored = {path: getattr(theirs, "names", (theirs,))[0] for path, theirs in names.items()}
    assert stored["blocks/1/attention/out/kernel"] == "model.layers.1.self_attn.o_proj.weight"
    assert stored["blocks/0/mlp_norm/scale"] == "model.layers.0.post_attention_layernorm.weight"
    assert all(getattr(theirs, "transpose", False) == path.endswith("kernel") for path, theirs in names.items())


@pytest.mark.wide
def test_flops_are_those_of_the_traced_loss():
    """Traced in pieces of 8 queries, which look at hardly more than they may see."""
    size = {"n_head": 1, "n_kv_head": 1, "head_dim": 192, "d_model": 128, "d_ff": 256}
    recipe = smaller(RECIPE, sequence_length=256, queries_at_once=8, **size)
    batch = {name: jnp.zeros((8, 256), jnp.int32) for name in ("inputs", "targets")}
    model = nnx.eval_shape(lambda: build(dataclasses.replace(recipe.model, block_size=256)))
    forward = nnx.jit(FILE.loss_fn).lower(model, batch).lowered.cost_analysis()["flops"]
    assert llama.flops(recipe)[0] == pytest.approx(3 * forward, rel=0.04)


def test_every_product_is_in_the_dtype_of_computation():
    config = dataclasses.replace(MICRO, compute_dtype="bfloat16", scan=True)
    batch = {name: jnp.zeros((8, 24), jnp.int32) for name in ("inputs", "targets")}
    text = nnx.jit(FILE.loss_fn).lower(abstract(config, js.mesh()), batch).lowered.as_text()
    products = re.findall(r"dot_general.* : \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\)", text)
    assert len(products) >= 8 and set(products) == {("bf16", "bf16")}
