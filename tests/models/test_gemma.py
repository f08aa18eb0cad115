"""models/gemma.py: Gemma 3 in its sizes, with the logits of its formulas, and equal when sharded."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.recipes.hf_config import filled, read
from tests.hf_folders import config_of, logits, write_folder
from tests.models.model_files import assert_parity_of, assert_plans, model_file, module, smaller, tiny

FILE, gemma = model_file("gemma"), module("gemma")
KEYS = {"num_hidden_layers": 3, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}
ROPES = {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "sliding_window_pattern": 2}
LINEAR = {"rope_type": "linear", "factor": 8.0}
MODELS = {
    "1B": config_of("gemma3_text", **KEYS, **ROPES),
    "with scaled positions": config_of("gemma3_text", **KEYS, **ROPES, rope_scaling=LINEAR, attention_bias=True),
}


def built(config, folder=None):
    annotate = lambda model: gemma.annotate(model, js.mesh())
    model = js.shard_init(lambda: gemma.build(config, nnx.Rngs(0)), annotate, mesh=js.mesh())
    if folder is None:
        return model
    return js.checkpoint.restore(folder, like={"model": model}, names=gemma.hf_names(config))["model"]


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_fills_the_recipe_and_has_the_logits_of_its_formulas(name, tmp_path):
    weights = write_folder(tmp_path / "hf", MODELS[name])
    config = filled(gemma.GemmaConfig(queries_at_once=16), tmp_path / "hf")
    tokens_T = np.arange(40) * 7 % 48
    model = built(config, tmp_path / "hf")
    result = nnx.jit(lambda model, ids: model(ids))(model, jnp.asarray(np.tile(tokens_T, (8, 1))))
    np.testing.assert_allclose(result[0], logits(MODELS[name], weights, tokens_T), atol=2e-5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps(gemma.hf_config(config)))
    assert filled(gemma.GemmaConfig(queries_at_once=16), tmp_path / "out") == config


@pytest.mark.parametrize(("name", "num_parameters"), [("gemma3_270m", 268_098_176), ("gemma3_1b", 999_885_952)])
def test_a_recipe_has_the_published_size(name, num_parameters):
    assert_plans("gemma", name, num_parameters=num_parameters, fsdp=8)


@pytest.mark.wide
def test_training_is_that_of_one_device():
    recipe = smaller(tiny("gemma"), sequence_length=24, n_layer=2, full_every=2, sliding_window=5, d_model=64, d_ff=96)
    assert_parity_of("gemma", recipe, replica=2, fsdp=2, tensor=2)


def test_every_parameter_has_a_name_at_hugging_face():
    config = dataclasses.replace(tiny("gemma").model, attention_bias="all")
    model = js.abstract_init(lambda: gemma.build(config, nnx.Rngs(0)), lambda m: gemma.annotate(m, js.mesh()))
    assert gemma.hf_names(config).keys() == {leaf.path for leaf in js.plan(model).leaves}


def test_a_token_sees_the_past_as_all_at_once():
    config = dataclasses.replace(tiny("gemma").model, n_layer=2, full_every=2, sliding_window=3, d_model=24, d_ff=16)
    model = gemma.build(config, nnx.Rngs(0))
    ids = jnp.arange(2 * 8).reshape(2, 8)
    whole, past = nnx.jit(lambda model, ids: model.decode(ids, None, 0))(model, ids)
    decode = nnx.jit(lambda model, token, past, place: model.decode(token, past, place))
    for place in range(1, 8):
        scores, past = decode(model, ids[:, place : place + 1], past, place)
        np.testing.assert_allclose(scores[:, 0], whole[:, place], atol=1e-5)


def test_flops_are_those_of_the_traced_loss():
    """Traced in pieces of 8 queries, which look at hardly more than they may see, as a window does not make less."""
    size = {"n_layer": 2, "full_every": 1, "n_head": 1, "n_kv_head": 1, "head_dim": 192, "d_model": 128, "d_ff": 256}
    recipe = smaller(tiny("gemma"), sequence_length=256, queries_at_once=8, block_size=256, **size)
    batch = {name: jnp.zeros((8, 256), jnp.int32) for name in ("inputs", "targets")}
    model = nnx.eval_shape(lambda: gemma.build(recipe.model, nnx.Rngs(0)))
    forward = nnx.jit(FILE.loss_fn).lower(model, batch).lowered.cost_analysis()["flops"]
    assert gemma.flops(recipe)[0] == pytest.approx(3 * forward, rel=0.04)
    with_windows = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, full_every=2, sliding_window=8))
    assert gemma.flops(with_windows)[0] < gemma.flops(recipe)[0]


PUBLISHED = {
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "pad_token_id": 0,
    "sliding_window_pattern": 6,
    "rope_scaling": None,
}
OF_TRANSFORMERS_5 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": False,
}


def test_keys_of_published_files_and_of_transformers_5_are_read():
    base = config_of("gemma3_text", **KEYS)
    assert not read(base | PUBLISHED, gemma.hf_types).problems
    reading = read(base | OF_TRANSFORMERS_5, gemma.hf_types)
    assert not reading.problems
    expected = {"rope_theta": 1e6, "local_theta": 1e4, "full_every": 2, "sliding_window": 5, "tied": True}
    assert {name: reading.fields[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("hidden_activation", "gelu"),
        ("tie_word_embeddings", False),
        ("use_bidirectional_attention", True),
        ("query_pre_attn_scalar", 16),
        ("layer_types", ["full_attention", "sliding_attention", "sliding_attention"]),
        ("rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_a_key_that_the_recipe_does_not_compute_is_refused_by_name(key, value):
    problems = read(config_of("gemma3_text", **KEYS) | {key: value}, gemma.hf_types).problems
    assert key in {row.name for row in problems}


@pytest.mark.parametrize("setting", [{"qk_norm": False}, {"tied": False}, {"scan": True}, {"full_every": 0}])
def test_settings_that_are_not_gemma_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        dataclasses.replace(tiny("gemma").model, **setting)
