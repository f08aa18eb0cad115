"""Folders as Transformers writes them, and their logits by NumPy in float64, written from the formulas alone."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "dtype": "float32",
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
GEMMA = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}


def config_of(kind: str, **keys: Any) -> dict[str, Any]:
    """A config.json of a `model_type`."""
    if kind == "gemma3_text":
        sizes = {name: value for name, value in SIZES.items() if name != "hidden_act"}
        return {**sizes, **GEMMA, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, **keys}
    return {"model_type": kind, "architectures": [f"{CLASSES[kind]}ForCausalLM"], **SIZES, **keys}


def write_folder(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A folder with random weights for a config.json; returns them."""
    random = np.random.default_rng(0)
    weights = {name: (0.3 * random.normal(size=shape)).astype(np.float32) for name, shape in shapes(config).items()}
    for name, array in weights.items():
        if name.endswith("norm.weight") and config["model_type"] != "gemma3_text":  # which adds the 1 itself
            array += 1
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters, by their names there."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    K = config.get("head_dim") or D // H
    kind = config["model_type"]
    sizes = {"self_attn.q_proj": (H * K, D), "self_attn.k_proj": (G * K, D), "self_attn.v_proj": (G * K, D)}
    sizes |= {"self_attn.o_proj": (D, H * K)}
    if kind == "mixtral":
        sizes["block_sparse_moe.gate"] = (config["num_local_experts"], D)
        for expert in range(config["num_local_experts"]):
            name = f"block_sparse_moe.experts.{expert}"
            sizes |= {f"{name}.w1": (F, D), f"{name}.w2": (D, F), f"{name}.w3": (F, D)}
    else:
        sizes |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            result[f"model.layers.{layer}.{name}.weight"] = size
            is_attention, is_out = name.startswith("self_attn"), name.endswith("o_proj")
            has_bias = config.get("attention_bias", False) if is_attention else config.get("mlp_bias", False)
            if has_bias or (kind == "qwen2" and is_attention and not is_out):
                result[f"model.layers.{layer}.{name}.bias"] = size[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            result[f"model.layers.{layer}.{name}.weight"] = (D,)
        if kind == "gemma3_text":
            result |= {f"model.layers.{layer}.{name}_feedforward_layernorm.weight": (D,) for name in ("pre", "post")}
        if kind in ("qwen3", "gemma3_text"):
            result |= {f"model.layers.{layer}.self_attn.{name}_norm.weight": (K,) for name in "qk"}
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (V, D)
    return result


def logits(config: dict[str, Any], weights: dict[str, np.ndarray], tokens_T: np.ndarray) -> np.ndarray:
    """The logits of a sequence, in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    D, H, G = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    K, T = config.get("head_dim") or D // H, len(tokens_T)

    is_gemma = config["model_type"] == "gemma3_text"

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * (is_gemma + w[f"{name}.weight"])

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotated(x_THK: np.ndarray, kind: str) -> np.ndarray:
        frequency, amplitude = rope(config, K, kind)
        turn_TK = amplitude * np.exp(1j * np.arange(T)[:, None] * frequency)
        turned = (x_THK[..., : K // 2] + 1j * x_THK[..., K // 2 :]) * turn_TK[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    def gated(x: np.ndarray, gate: str, up: str, down: str) -> np.ndarray:
        opening = project(x, gate)
        if is_gemma:
            opened = opening * (1 + np.tanh(math.sqrt(2 / math.pi) * (opening + 0.044715 * opening**3))) / 2
        else:
            opened = opening / (1 + np.exp(-opening))
        return project(opened * project(x, up), down)

    def mixture(x_TD: np.ndarray, name: str) -> np.ndarray:
        score_TE = np.exp(project(x_TD, f"{name}.gate"))
        best_Tn = np.argsort(-score_TE, axis=-1)[:, : config["num_experts_per_tok"]]
        result = np.zeros_like(x_TD)
        for t, best_n in enumerate(best_Tn):
            for expert in best_n:
                matrices = (f"{name}.experts.{expert}.{matrix}" for matrix in ("w1", "w3", "w2"))
                result[t] += score_TE[t, expert] / score_TE[t, best_n].sum() * gated(x_TD[t], *matrices)
        return result

    ago = np.arange(T)[:, None] - np.arange(T)
    x = w["model.embed_tokens.weight"][tokens_T] * (math.sqrt(D) if is_gemma else 1.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        every = config.get("sliding_window_pattern", 6)
        kind = "full_attention" if not is_gemma or (layer + 1) % every == 0 else "sliding_attention"
        visible = (ago >= 0) & (ago < (window_of(config, kind) or T))
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (project(y, f"{at}.self_attn.{n}_proj").reshape(T, -1, K) for n in "qkv")
        if config["model_type"] in ("qwen3", "gemma3_text"):
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        k, v = (np.repeat(a, H // G, axis=1) for a in (rotated(k, kind), v))
        scores = np.einsum("thk,shk->hts", rotated(q, kind), k) / math.sqrt(K)
        scores = np.where(visible, scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        attended = project(np.einsum("hts,shk->thk", share, v).reshape(T, -1), f"{at}.self_attn.o_proj")
        if is_gemma:
            x = x + norm(attended, f"{at}.post_attention_layernorm")
            y = norm(x, f"{at}.pre_feedforward_layernorm")
            z = gated(y, *(f"{at}.mlp.{matrix}_proj" for matrix in ("gate", "up", "down")))
            x = x + norm(z, f"{at}.post_feedforward_layernorm")
            continue
        x = x + attended
        y = norm(x, f"{at}.post_attention_layernorm")
        if config["model_type"] == "mixtral":
            x = x + mixture(y, f"{at}.block_sparse_moe")
        else:
            x = x + gated(y, *(f"{at}.mlp.{matrix}_proj" for matrix in ("gate", "up", "down")))
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def window_of(config: dict[str, Any], kind: str = "full_attention") -> int:
    """The window of all layers, of Gemma's of a kind; 0 for none."""
    if config["model_type"] == "gemma3_text":
        return config["sliding_window"] if kind == "sliding_attention" else 0
    is_on = config["model_type"] in ("mistral", "mixtral") or config.get("use_sliding_window")
    return (config.get("sliding_window") or 0) if is_on else 0


def rope(config: dict[str, Any], K: int, layers: str = "full_attention") -> tuple[np.ndarray, float]:
    """The frequency of each pair of features, and the factor of what is rotated."""
    if layers == "sliding_attention":
        return config["rope_local_base_freq"] ** -(np.arange(0, K, 2) / K), 1.0
    keys = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = keys.get("rope_theta", config.get("rope_theta", 10_000.0))
    f = theta ** -(np.arange(0, K, 2) / K)
    kind, factor, first = keys.get("rope_type", "default"), keys.get("factor"), keys.get(ORIGINAL)
    if kind == "linear":
        return f / factor, 1.0
    if kind == "llama3":
        wave = 2 * np.pi / f
        slow, fast = first / keys["low_freq_factor"], first / keys["high_freq_factor"]
        smooth = (first / wave - keys["low_freq_factor"]) / (keys["high_freq_factor"] - keys["low_freq_factor"])
        between = (1 - smooth) * f / factor + smooth * f
        return np.where(wave > slow, f / factor, np.where(wave < fast, f, between)), 1.0
    if kind == "yarn":
        dim = lambda turns: K * math.log(first / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = max(math.floor(dim(32)), 0), min(math.ceil(dim(1)), K - 1)
        ramp = np.clip((np.arange(K // 2) - low) / (high - low), 0, 1)
        return f / factor * ramp + f * (1 - ramp), 0.1 * math.log(factor) + 1
    return f, 1.0


ORIGINAL = "original_max_position_embeddings"
