"""The config.json of published models: accepted with the sizes of the model, or refused for what it computes."""

import pytest

from jshard.recipes.hf_config import read
from jshard.recipes.hf_families import FAMILIES, HARMLESS
from tests.models.hub_configs import ACCEPTED, GPT2, LLAMA, MISTRAL, QWEN, T5


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_published_config_json_is_accepted(name):
    assert [row.text for row in read(ACCEPTED[name], list(FAMILIES)).problems] == []


LLAMA_3 = {"rope_scaling.kind": "llama3", "rope_scaling.original_size": 8192}
LINEAR = {"rope_scaling.kind": "linear", "rope_scaling.factor": 4.0}
FIELDS = {
    "decapoda-research/llama-7b-hf": {"block_size": 2048, "n_kv_head": 32, "rope_theta": 1e4, "rms_norm_eps": 1e-6},
    "lmsys/vicuna-7b-v1.5-16k": {"block_size": 4096, **LINEAR},
    "meta-llama/Llama-2-70b-chat-hf": {"n_head": 64, "n_kv_head": 8, "head_dim": 128, "tied": False},
    "openlm-research/open_llama_3b": {"head_dim": 100, "n_kv_head": 32},
    "deepseek-ai/deepseek-coder-6.7b-base": {"rope_theta": 1e5, **LINEAR},
    "meta-llama/Llama-3.1-8B-Instruct": {"rope_theta": 5e5, "rope_scaling.factor": 8.0, **LLAMA_3},
    "meta-llama/Llama-3.2-1B": {"head_dim": 64, "tied": True, "rope_scaling.factor": 32.0, **LLAMA_3},
    "ibm-granite/granite-3b-code-base": {"attention_bias": "all", "mlp_bias": True, "tied": True},
    "mistralai/Mistral-7B-v0.1": {"sliding_window": 4096, "rope_theta": 1e4, "n_kv_head": 8},
    "mistralai/Mistral-7B-v0.3": {"sliding_window": 0, "rope_theta": 1e6},
    "mistralai/Mistral-Nemo-Base-2407": {"d_model": 5120, "head_dim": 128, "sliding_window": 0},
    "Qwen/Qwen2.5-7B": {"attention_bias": "qkv", "sliding_window": 0, "n_kv_head": 4, "qk_norm": False},
    "Qwen/Qwen3-0.6B": {"attention_bias": "none", "head_dim": 128, "qk_norm": True, "tied": True, "rope_theta": 1e6},
    "Qwen/Qwen3-8B with YaRN": {"rope_scaling.kind": "yarn", "rope_scaling.original_size": 32768},
    "openai-community/gpt2-xl": {"n_layer": 48, "d_model": 1600, "d_ff": 6400, "tied": True, "block_size": 1024},
    "google-t5/t5-small": {"gated": False, "tied": True, "n_layer": 6},
    "google/flan-t5-small": {"gated": True, "tied": False, "n_layer": 8},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_published_config_json_sets_the_recipe(name):
    fields = read(ACCEPTED[name], list(FAMILIES)).fields
    assert {field: fields[field] for field in FIELDS[name]} == FIELDS[name]


LLAMA_7B = LLAMA["meta-llama/Llama-2-7b-hf"]
MISTRAL_7B = MISTRAL["mistralai/Mistral-7B-v0.1"]
QWEN_7B = QWEN["Qwen/Qwen2.5-7B"]
AWQ = {"quant_method": "awq", "bits": 4}
YARN_64K = {"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}
CODE = {"AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM"}

# Files with what distinguishes the model from its relatives, and the keys that they are refused for.
REFUSED = {
    "TheBloke/Llama-2-7B-AWQ": (LLAMA_7B | {"quantization_config": AWQ}, ["quantization_config"]),
    "mlx-community, 4 bits": (LLAMA_7B | {"quantization": {"group_size": 64, "bits": 4}}, ["quantization"]),
    "neuralmagic, sparse": (LLAMA_7B | {"compression_config": {"format": "dense"}}, ["compression_config"]),
    "NousResearch/Yarn-Llama-2-7b-64k": (
        LLAMA_7B | {"rope_scaling": YARN_64K, "auto_map": CODE},
        ["rope_scaling", "auto_map"],
    ),
    "SparseLLM/ReluLLaMA-7B": (LLAMA_7B | {"hidden_act": "relu"}, ["hidden_act"]),
    "lmsys/longchat-7b-16k": (LLAMA_7B | {"rope_condense_ratio": 8}, ["rope_condense_ratio"]),
    "a draft of EAGLE": (LLAMA_7B | {"architectures": ["LlamaForCausalLMEagle3"]}, ["architectures"]),
    "a classifier": (MISTRAL_7B | {"architectures": ["MistralForSequenceClassification"]}, ["architectures"]),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": (QWEN_7B | {"auto_map": CODE, "is_causal": False}, ["auto_map", "is_causal"]),
    "cerebras/Cerebras-GPT-111M": (
        GPT2["openai-community/gpt2"] | {"activation_function": "gelu"},
        ["activation_function"],
    ),
    "codeparrot/codeparrot": (
        GPT2["openai-community/gpt2"] | {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        ["scale_attn_by_inverse_layer_idx"],
    ),
    "google/ul2": (T5["google/t5-v1_1-small"] | {"feed_forward_proj": "gated-silu"}, ["feed_forward_proj"]),
    "an encoder of T5": (T5["google-t5/t5-small"] | {"architectures": ["T5EncoderModel"]}, ["architectures"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_json_is_refused_for_what_it_computes(name):
    config, keys = REFUSED[name]
    assert {row.name for row in read(config, list(FAMILIES)).problems} == set(keys)


OFF = [
    LLAMA_7B | {"sliding_window": None, "use_sliding_window": False},
    LLAMA_7B | {"is_causal": True, "quantization_config": None},
    QWEN_7B | {"attention_bias": True},
]


@pytest.mark.parametrize("config", OFF)
def test_a_switch_that_says_what_the_recipe_computes_is_accepted(config):
    assert not read(config, list(FAMILIES)).problems


def test_a_key_of_a_field_is_not_harmless():
    """A name in both tables would be read by one family, and be skipped by all others.

    GPT-2's `n_positions` is the exception: T5 has it too, and reads nothing from it.
    """
    keys = {name for family in FAMILIES.values() for key in (*family.keys, *family.fixed) for name in key.names}
    assert keys & HARMLESS == {"n_positions"}
