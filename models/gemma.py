"""Gemma 3, the text models, as what they change in llama.py.

    jshard train gemma                                              # the tiny recipe, minutes on a laptop
    jshard train gemma --recipe gemma3_1b --init-from gemma3/       # begins with Hugging Face's weights
    jshard plan gemma --recipe gemma3_1b --topology h100:1x8        # without a GPU

Compared with llama.py: most layers see a window of the latest positions, and every sixth sees all, with slower rotary
positions; each half of a block has a norm after it, too; norms multiply by 1 + their scale; the gate is a GELU; and
embeddings are multiplied by the root of their width. As layers differ, they are not one loop.

Names end in the dims of their array, as in llama.py: B batch, T position in sequence, D model width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import llama
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from rope import UNSCALED

from jshard.checkpoint.formats import Stored
from jshard.recipes.hf_config import checked_names, config_json
from jshard.train import Recipe

annotate = llama.annotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(llama.LlamaConfig):
    """Size and kind of a Gemma; the defaults are Gemma 3 1B."""

    vocab_size: int = 262_144
    block_size: int = 32_768
    n_layer: int = 26
    n_head: int = 4
    n_kv_head: int = 1
    head_dim: int = 256
    d_model: int = 1152
    d_ff: int = 6912
    rope_theta: float = 1_000_000.0  # of layers that see all; so is `rope_scaling`
    local_theta: float = 10_000.0  # of layers that see a window
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    sliding_window: int = 512
    full_every: int = 6  # so often a layer sees all
    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {"qk_norm": True, "tied": True, "scan": False, "mlp": "plain"}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)!r} is not Gemma, whose {name} is {value!r}")
        if self.full_every < 1:
            raise ValueError(f"full_every={self.full_every} is no number of layers")

    def sees_all(self, layer: int) -> bool:
        """Whether a layer has no window."""
        return (layer + 1) % self.full_every == 0

    def of_layer(self, layer: int) -> GemmaConfig:
        """The config by which the attention of a layer computes."""
        if self.sees_all(layer):
            return dataclasses.replace(self, sliding_window=0)
        return dataclasses.replace(self, rope_theta=self.local_theta, rope_scaling=UNSCALED)


# ---- The model -------------------------------------------------------------------------------


class OffsetNorm(nnx.Module):
    """A norm without mean that multiplies by 1 + its scale, in float32."""

    def __init__(self, width: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        full = x.astype(jnp.float32)
        full *= jax.lax.rsqrt(jnp.mean(full**2, axis=-1, keepdims=True) + self.epsilon)
        factor = jnp.expand_dims(1 + self.scale[...].astype(jnp.float32), range(x.ndim - 1))
        return (full * factor).astype(x.dtype)


def offset_norm(config: GemmaConfig, width: int = 0) -> OffsetNorm:
    return OffsetNorm(width or config.d_model, config.rms_norm_eps)


class GemmaAttention(llama.Attention):
    """That of Llama, with Gemma's norms of queries and keys."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.q_norm = offset_norm(config, config.head_width)
        self.k_norm = offset_norm(config, config.head_width)


class GemmaMLP(llama.MLP):
    """The feed-forward half of a block, GeGLU."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate_BTF, up_BTF = checkpoint_name(self.gate(x_BTD), "mlpwi_0"), checkpoint_name(self.up(x_BTD), "mlpwi_1")
        return checkpoint_name(self.down(jax.nn.gelu(gate_BTF, approximate=True) * up_BTF), "mlpwo")


class GemmaBlock(nnx.Module):
    """One layer: attention, then feed-forward, each with a norm before and a norm after it."""

    def __init__(self, config: GemmaConfig, layer: int, *, rngs: nnx.Rngs):
        self.attention_norm = offset_norm(config)
        self.attention = GemmaAttention(config.of_layer(layer), rngs=rngs)
        self.attention_post_norm = offset_norm(config)
        self.mlp_norm = offset_norm(config)
        self.mlp = GemmaMLP(config, rngs=rngs)
        self.mlp_post_norm = offset_norm(config)

    def __call__(self, x_BTD: jax.Array, segments: jax.Array | None = None, positions: Any = 0) -> jax.Array:
        return self.decode(x_BTD, at=positions, segments_BT=segments)[0]

    def decode(
        self, x_BTD: jax.Array, past: Any = None, at: Any = 0, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        y_BTD, past = self.attention(self.attention_norm(x_BTD), past, at, segments_BT)
        x_BTD = x_BTD + self.attention_post_norm(y_BTD)
        return x_BTD + self.mlp_post_norm(self.mlp(self.mlp_norm(x_BTD))), past


class Gemma(llama.Llama):
    """Maps tokens to the logits of the next token at each position."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.tokens = llama.embed(config.vocab_size, config.d_model, rngs=rngs)
        self.blocks = nnx.List([GemmaBlock(config, layer, rngs=rngs) for layer in range(config.n_layer)])
        self.norm = offset_norm(config)

    def _embedded(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = super()._embedded(tokens_BT)
        return x_BTD * jnp.asarray(math.sqrt(self.config.d_model), x_BTD.dtype)  # the root is rounded, as theirs is


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: GemmaConfig, rngs: nnx.Rngs) -> Gemma:
    return Gemma(config, rngs=rngs)


def flops(recipe: Recipe) -> tuple[float, str]:
    """FLOPs of a step. The embedding table multiplies as the head alone."""
    config, length = recipe.model, recipe.sequence_length
    D, K = config.d_model, config.head_width
    in_layer = 2 * D * K * (config.n_head + config.n_kv_head) + 3 * D * config.d_ff
    in_matrices = config.n_layer * in_layer + D * config.vocab_size
    in_attention = 0
    for layer in range(config.n_layer):
        window = length if config.sees_all(layer) else min(config.sliding_window, length)
        seen = window * (2 * length - window) / (2 * length)  # by a position on average
        in_attention += round(2 * config.n_head * K * seen)
    tokens = recipe.batch_size * length
    times = 4 if config.lora.rank else 6  # frozen matrices have no gradient
    formula = f"({times} x {in_matrices:,} in matrices + 6 x {in_attention:,} in causal attention) x {tokens:,} tokens"
    return (float(times) * in_matrices + 6.0 * in_attention) * tokens, formula


hf_types = ("gemma3_text",)


def hf_names(config: GemmaConfig) -> Mapping[str, str | Stored]:
    """The name of each parameter in Hugging Face's Gemma3ForCausalLM, which has two more norms than Llama's."""
    names = dict(llama.hf_names(config))
    theirs = {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    for layer in range(config.n_layer):
        for ours, name in theirs.items():
            names[f"blocks/{layer}/{ours}/scale"] = f"model.layers.{layer}.{name}.weight"
    return checked_names(names, config, hf_types)


def hf_config(config: GemmaConfig) -> dict[str, Any]:
    """The contents of `config.json` for such a model."""
    return config_json(config, hf_types)


# ---- Recipes: a whole run as a value --------------------------------------------------------------


def tiny() -> Recipe:
    """1.3M parameters over bytes: trains on two CPU cores in minutes."""
    return Recipe(
        model=GemmaConfig(
            vocab_size=256,
            block_size=128,
            n_layer=3,
            n_head=6,
            n_kv_head=2,
            head_dim=32,
            d_model=192,
            d_ff=512,
            sliding_window=32,
            full_every=3,
        ),
        sequence_length=128,
        batch_size=32,
        num_steps=500,
        learning_rate=4e-3,
        warmup_steps=50,
        eval_every=100,
        eval_sequences=2048,
    )


def large(config: GemmaConfig, *, accumulate: int) -> Recipe:
    """Shared by the recipes below: 0.5M tokens a step, with the schedule of llama.py's."""
    return Recipe(
        model=dataclasses.replace(config, compute_dtype="bfloat16", remat="full"),
        sequence_length=8192,
        batch_size=64,
        accumulate=accumulate,
        num_steps=1_200_000,
        learning_rate=3e-4,
        warmup_steps=8000,
        eval_every=1000,
    )


def gemma3_270m() -> Recipe:
    """268M parameters, of which the table of tokens has 168M."""
    config = GemmaConfig(n_layer=18, d_model=640, d_ff=2048)
    return large(config, accumulate=4)


def gemma3_1b() -> Recipe:
    """1.00B parameters: on 8 GPUs a sequence at a time."""
    return large(GemmaConfig(), accumulate=8)


RECIPES = {"tiny": tiny, "gemma3_270m": gemma3_270m, "gemma3_1b": gemma3_1b}
