"""Weights of Hugging Face: their config.json makes the recipe, or is refused by the name of the key."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.recipes.building import check_source
from jshard.recipes.hf_config import HFConfigError, check, config_json, filled, read, settings_of
from jshard.recipes.hf_families import FAMILIES
from tests.hf_folders import ORIGINAL, config_of, logits, write_folder
from tests.models.model_files import assert_parity_of, module, smaller, tiny
from tests.wide import wide

llama, gpt, moe = module("llama"), module("gpt"), module("moe")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, ORIGINAL: 16}
EVERY = {"attention_bias": "all", "mlp_bias": True, "qk_norm": True, "sliding_window": 9}
MODELS = {
    "llama 2": config_of("llama", rms_norm_eps=0.1, head_dim=8, attention_bias=True, mlp_bias=True),
    "llama 3.1": config_of("llama", rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "linear": config_of("llama", rms_norm_eps=1e-5, rope_parameters={"rope_type": "linear", "factor": 4.0}),
    "yarn": config_of("llama", rms_norm_eps=1e-6, rope_parameters=YARN),
    "mistral": config_of("mistral", rms_norm_eps=1e-5, sliding_window=7, rope_theta=1e4),
    "qwen 2": config_of("qwen2", rms_norm_eps=1e-6, use_sliding_window=False, sliding_window=4, max_window_layers=1),
    "qwen 3": config_of("qwen3", rms_norm_eps=1e-6, head_dim=8, rope_theta=1e6, layer_types=["full_attention"]),
}


def restored(folder, config):
    model = js.shard_init(
        lambda: llama.build(config, nnx.Rngs(0)), lambda model: llama.annotate(model, js.mesh()), mesh=js.mesh()
    )
    return js.checkpoint.restore(folder, like={"model": model}, names=llama.hf_names(config))["model"]


MIXTRAL = config_of("mixtral", num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e4)
MIXTURES = {
    "best two": MIXTRAL,
    "best three": MIXTRAL | {"num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 7, "tie_word_embeddings": True},
}


@pytest.mark.wide
@pytest.mark.parametrize("name", [wide("best two"), "best three"])
def test_a_folder_of_mixtral_has_the_logits_of_its_formulas(name, tmp_path):
    weights = write_folder(tmp_path / "hf", MIXTURES[name])
    config = filled(moe.MoEConfig(), tmp_path / "hf")
    mesh = js.mesh(fsdp=4, expert=2)
    model = js.shard_init(lambda: moe.build(config, nnx.Rngs(0)), lambda model: moe.annotate(model, mesh), mesh=mesh)
    model = js.checkpoint.restore(tmp_path / "hf", like={"model": model}, names=moe.hf_names(config))["model"]
    tokens_T = np.arange(40) * 7 % 48
    result, _ = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(np.tile(tokens_T, (8, 1))))
    np.testing.assert_allclose(result[0], logits(MIXTURES[name], weights, tokens_T), atol=2e-5)
    written = moe.hf_config(config)
    assert filled(moe.MoEConfig(), saved(tmp_path / "out", written)) == config


def test_mixtral_drops_no_token_unless_a_setting_says_so(tmp_path):
    folder = saved(tmp_path / "hf", MIXTRAL)
    config = filled(moe.MoEConfig(capacity=1.25), folder)
    assert config.capacity == 0 and not config.drops_tokens
    with pytest.warns(UserWarning, match=r"capacity=1.25 drops .*capacity=0 and 2 drop none"):
        moe.hf_names(dataclasses.replace(config, capacity=1.25)).check(folder)
    moe.hf_names(dataclasses.replace(config, capacity=2.0)).check(folder)


MIXTRAL_CHANGES = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "num_local_experts": 0,
    "num_experts_per_tok": None,
    "router_aux_loss_coef": -0.1,
    "norm_topk_prob": False,
    "num_shared_experts": 1,
    "rope_scaling": {"rope_type": "longrope", "factor": 2.0},
}


@pytest.mark.parametrize("key", MIXTRAL_CHANGES)
def test_a_key_of_mixtral_that_the_recipe_does_not_compute_is_refused_by_name(key):
    bare = {name: value for name, value in MIXTRAL.items() if name != "rope_theta"}
    problems = read(bare | {key: MIXTRAL_CHANGES[key]}, moe.hf_types).problems
    assert key in [row.name for row in problems]


def test_what_mixtral_does_in_training_alone_is_not_refused():
    """Its weight counts each choice of a token, ours their mean; jitter is like dropout, which the recipe lacks."""
    training = {"router_jitter_noise": 0.1, "output_router_logits": True, "router_aux_loss_coef": 0.02}
    reading = read(MIXTRAL | training, moe.hf_types)
    assert not reading.problems and reading.fields["balance"] == 0.04
    assert read(MIXTRAL | {"router_aux_loss_coef": 0.0}, moe.hf_types).fields["balance"] == 0


def test_shared_experts_are_not_mixtral():
    config = dataclasses.replace(tiny("moe").model, n_shared=1, capacity=0)
    with pytest.raises(ValueError, match="no shared experts"):
        moe.hf_names(config)
    with pytest.raises(ValueError, match=r"none of mixtral has together .*n_shared=1"):
        moe.hf_config(config)


MOST = ["linear", "qwen 2"]  # what the others have, too


@pytest.mark.parametrize("name", [wide(name) if name in MOST else name for name in MODELS])
def test_a_folder_fills_the_recipe_and_has_the_logits_of_its_formulas(name, tmp_path):
    weights = write_folder(tmp_path / "hf", MODELS[name])
    config = filled(llama.LlamaConfig(queries_at_once=16), tmp_path / "hf")
    tokens_T = np.arange(40) * 7 % 48
    tokens_BT = jnp.asarray(np.tile(tokens_T, (8, 1)))
    result = nnx.jit(lambda model, tokens: model(tokens))(restored(tmp_path / "hf", config), tokens_BT)
    np.testing.assert_allclose(result[0], logits(MODELS[name], weights, tokens_T), atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_config_json_of_an_export_says_the_same_as_that_of_the_import(name, tmp_path):
    write_folder(tmp_path / "hf", MODELS[name])
    config = filled(llama.LlamaConfig(), tmp_path / "hf")
    written = config_json(config, llama.hf_types)
    assert filled(llama.LlamaConfig(), saved(tmp_path / "out", written)) == config
    assert read(written, llama.hf_types).fields == read(MODELS[name], [MODELS[name]["model_type"]]).fields


def saved(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_both_forms_of_rotary_positions_are_read(tmp_path):
    """`rope_theta` and `rope_scaling` until Transformers 4, `rope_parameters` from 5 on."""
    before = saved(tmp_path / "4", config_of("llama", rope_theta=5e5, rope_scaling=LLAMA3))
    since = saved(tmp_path / "5", config_of("llama", rope_parameters={"rope_theta": 5e5, **LLAMA3}))
    older = {"type" if name == "rope_type" else name: value for name, value in LLAMA3.items()}
    oldest = saved(tmp_path / "3", config_of("llama", rope_theta=5e5, rope_scaling=older))
    configs = [settings_of(folder, llama.hf_types) for folder in (before, since, oldest)]
    assert configs[0] == configs[1] == configs[2] and configs[0]["rope_scaling.original_size"] == 16


def test_absent_keys_have_the_defaults_of_transformers(tmp_path):
    bare = {"model_type": "mistral"}
    config = filled(llama.LlamaConfig(), saved(tmp_path / "hf", bare))
    assert (config.n_kv_head, config.sliding_window, config.rms_norm_eps) == (8, 4096, 1e-6)
    assert (config.rope_theta, config.d_ff, config.block_size) == (1e4, 14_336, 131_072)
    gpt2 = filled(gpt.GPTConfig(positions="rotary", n_head=4), saved(tmp_path / "gpt2", {"model_type": "gpt2"}))
    assert gpt2 == gpt.GPTConfig()


OTHERS = "gemma gemma2 granite olmo olmo2 cohere phi phi3 stablelm internlm internlm2 smollm3 helium glm mixtral"


@pytest.mark.parametrize("kind", OTHERS.split())
def test_models_with_the_names_of_llama_are_refused_by_their_type(kind, tmp_path):
    folder = saved(tmp_path / "hf", config_of("llama") | {"model_type": kind})
    with pytest.raises(HFConfigError, match=f'(?s)model_type: "{kind}".*llama, mistral, qwen2, qwen3'):
        check(folder, llama.LlamaConfig(), llama.hf_types)


CHANGES = {
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "hidden_act": "gelu",
    "sliding_window": 32,
    "layer_types": ["full_attention"],
    "partial_rotary_factor": 0.5,
    "rope_interleaved": True,
    "quantization_config": {"quant_method": "gptq"},
    "auto_map": {"AutoModelForCausalLM": "modeling.Mine"},
    "architectures": ["LlamaForSequenceClassification"],
    "per_layer_config": {"0": {"head_dim": 8}},
    "no_rope_layers": [1],
    "a_key_of_tomorrow": None,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "factor": 2.0},
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0},
    "rope_theta": -1.0,
    "rms_norm_eps": "1e-6",
    "num_attention_heads": True,
    "hidden_size": None,
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_the_recipe_does_not_compute_is_refused_by_name(key, tmp_path):
    folder = saved(tmp_path / "hf", config_of("llama") | {key: CHANGES[key]})
    with pytest.raises(HFConfigError, match=rf"(?s){key}.*where|{key}") as caught:
        check(folder, llama.LlamaConfig(), llama.hf_types)
    assert any(line.startswith(f"{key}: ") for line in caught.value.where), caught.value


def test_windows_of_some_layers_are_refused_and_windows_of_all_are_read():
    qwen = config_of("qwen2", num_hidden_layers=2, use_sliding_window=True, sliding_window=8)
    result = {first: read(qwen | {"max_window_layers": first}, ["qwen2"]) for first in (0, 1, 2)}
    assert result[0].fields["sliding_window"] == 8 and result[2].fields["sliding_window"] == 0
    assert "1 of 2 layers" in result[1].problems[0].text


@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", 1e-6), ("n_head", 2), ("tied", True), ("sliding_window", 8), ("qk_norm", True)],
)
def test_another_value_in_the_recipe_is_refused_with_both(field, value, tmp_path):
    """By `restore`, too: the names of a model know its settings."""
    write_folder(tmp_path / "hf", config_of("llama", rms_norm_eps=1e-5))
    config = dataclasses.replace(filled(llama.LlamaConfig(), tmp_path / "hf"), **{field: value})
    mesh = js.mesh()
    model = js.abstract_init(lambda: llama.build(config, nnx.Rngs(0)), lambda model: llama.annotate(model, mesh))
    with pytest.raises(HFConfigError, match=rf"(?s)model\.{field}") as caught:
        js.checkpoint.restore(tmp_path / "hf", like={"model": model}, names=llama.hf_names(config))
    assert f"{json.dumps(value)} " in "\n".join(caught.value.where)


def test_a_shorter_longest_sequence_is_the_same_model(tmp_path):
    folder = saved(tmp_path / "hf", config_of("llama"))
    config = filled(llama.LlamaConfig(), folder)
    check(folder, dataclasses.replace(config, block_size=8), llama.hf_types)


def test_a_model_file_that_does_not_say_what_it_computes_gets_a_warning(tmp_path, monkeypatch):
    file = dataclasses.replace(js.train.load_model_file("llama"), hf_types=(), hf_names=lambda config: {"a": "b"})
    names = file.names_elsewhere(llama.LlamaConfig())
    names.check(tmp_path)  # without a config.json there is nothing to compare
    with pytest.warns(UserWarning, match=r"(?s)config\.json is not compared.*llama\.py has no hf_types"):
        names.check(saved(tmp_path / "hf", config_of("llama")))


def test_a_model_file_without_names_gets_the_warning_too(tmp_path):
    write_folder(tmp_path / "hf", config_of("llama", rms_norm_eps=1e-5))
    file = dataclasses.replace(js.train.load_model_file("llama"), hf_types=(), hf_names=None)
    with pytest.warns(UserWarning, match=r"config\.json is not compared"), pytest.raises(js.checkpoint.CheckpointError):
        check_source(file, tiny("llama"), js.mesh(), tmp_path / "hf")


def test_a_model_without_a_field_is_refused_unless_the_file_has_it_off(tmp_path):
    """An older copy of llama.py, whose epsilon was fixed and which had no biases."""
    folder = saved(tmp_path / "hf", config_of("llama", rms_norm_eps=1e-6))
    values = dataclasses.asdict(filled(llama.LlamaConfig(), folder)) | {"rope_scaling": llama.RopeScaling()}
    for name in (*EVERY, "rms_norm_eps"):
        del values[name]
    older = dataclasses.make_dataclass("Older", values)(**values)
    with pytest.raises(HFConfigError, match="rms_norm_eps: 1e-06 there; Older has no field") as caught:
        check(folder, older, llama.hf_types)
    assert len(caught.value.where) == 2


def test_a_window_is_seen_by_one_token_as_by_all_at_once():
    config = dataclasses.replace(tiny("llama").model, n_layer=1, d_model=24, d_ff=16, n_head=2, sliding_window=3)
    model = llama.build(config, nnx.Rngs(0))
    ids = jnp.arange(2 * 8).reshape(2, 8)
    whole, past = nnx.jit(lambda model, ids: model.decode(ids, None, 0))(model, ids)
    decode = nnx.jit(lambda model, token, past, place: model.decode(token, past, place))
    for place in range(1, 8):  # `decode` sees what is before a place
        scores, past = decode(model, ids[:, place : place + 1], past, place)
        np.testing.assert_allclose(scores[:, 0], whole[:, place], atol=1e-5)


@pytest.mark.wide
def test_every_option_together_trains_as_on_one_device():
    recipe = smaller(tiny("llama"), n_layer=1, n_head=4, d_model=64, d_ff=96, queries_at_once=16, **EVERY)
    assert_parity_of("llama", recipe, fsdp=2, context=2, tensor=2)


def test_options_are_cut_by_the_tensor_axis_like_their_matrices():
    config = dataclasses.replace(tiny("llama").model, n_layer=1, **EVERY)
    mesh = js.mesh(fsdp=4, tensor=2)
    plan = js.plan(js.abstract_init(lambda: llama.build(config, nnx.Rngs(0)), lambda m: llama.annotate(m, mesh)))
    specs = {leaf.path.removeprefix("blocks/0/"): str(leaf.placement.spec) for leaf in plan.leaves}
    assert all("tensor" in specs[f"{path}/bias"] for path in ("attention/q", "attention/k", "mlp/gate", "mlp/up"))
    assert all("tensor" not in specs[path] for path in ("attention/out/bias", "attention/q_norm/scale"))
    assert {*llama.hf_names(config)} == {leaf.path for leaf in plan.leaves}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"mlp": "pallas", "mlp_bias": True}, "adds no bias"),
        ({"sliding_window": -1}, "no number of positions"),
        ({"rope_scaling": {"kind": "llama3", "factor": 8.0}}, "needs rope_scaling.original_size"),
        ({"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_size": 64}}, "up to block_size=64"),
    ],
)
def test_settings_without_a_meaning_are_refused(setting, why):
    def config():
        scaling = llama.RopeScaling(**setting.pop("rope_scaling", {}))
        return dataclasses.replace(tiny("llama").model, rope_scaling=scaling, **setting)

    with pytest.raises(ValueError, match=why):
        config()


def test_a_recipe_that_no_type_can_be_has_no_config_json():
    config = dataclasses.replace(tiny("llama").model, attention_bias="qkv", mlp_bias=True)
    with pytest.raises(ValueError, match="none of llama, mistral, qwen2, qwen3 has together attention_bias='qkv'"):
        llama.hf_config(config)
    types = {"none": "llama", "qkv": "qwen2"}
    for bias, kind in types.items():
        written = llama.hf_config(dataclasses.replace(tiny("llama").model, attention_bias=bias))
        assert (written["model_type"], written["rms_norm_eps"]) == (kind, 1e-5)


def test_t5_is_read_by_its_own_table():
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "feed_forward_proj": "gated-gelu", "num_layers": 8}
    t5 |= {"tie_word_embeddings": False, "dense_act_fn": "gelu_new", "is_gated_act": True, "dropout_rate": 0.1}
    reading = read(t5, ["t5"])
    assert not reading.problems and (reading.fields["gated"], reading.fields["tied"]) == (True, False)
    assert [row.name for row in read(t5 | {"layer_norm_epsilon": 1e-5}, ["t5"]).problems] == ["layer_norm_epsilon"]
    assert read(t5 | {"scale_decoder_outputs": True}, ["t5"]).problems
    assert read(t5 | {"num_decoder_layers": 4}, ["t5"]).fields["n_layer"] == 4


def test_the_tables_know_each_key_once():
    for family in FAMILIES.values():
        names = [name for key in family.keys for name in key.names] + [rule.name for rule in family.fixed]
        assert len(names) == len(set(names)), family.model_type
