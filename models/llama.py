"""Llama 3 and its relatives in one readable file, sharded in three dimensions: replicas, parameter shards, heads.

    jshard train llama                                             # the tiny recipe, minutes on a laptop
    jshard train llama --mesh replica=2,fsdp=2,tensor=2            # the same, sharded in three dimensions
    jshard train llama --mesh fsdp=4,context=2                     # sequences split over two devices each
    jshard train llama --recipe llama3_8b --init-from llama3/      # begins with Hugging Face's weights
    jshard plan llama --recipe llama3_405b --topology h100:64x8    # without a GPU

Compared with gpt.py: norms without mean and bias (RMSNorm), a gated feed-forward (SwiGLU), rotary positions, and heads
of queries that share those of keys and values. With its options it is also Llama 2 and 3.1, Mistral, Qwen 2 and Qwen 3;
`--init-from` sets them as the config.json of the weights says. Everything up to `TENSOR` is plain Flax; `annotate`
decides what is sharded. The loss is the default of `jshard train` for a file without one: cross entropy with the next
token.

Names end in the dims of their array:

    B  batch                 D  model width (d_model)       H  heads of queries
    T  position in sequence  F  feed-forward width (d_ff)   G  heads of keys and values; each serves H / G of queries
    V  vocabulary            K  width of one head           N, S  some positions that look, and what they look at
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from rope import UNSCALED, RopeScaling, apart, rotate

import jshard as js
from jshard.checkpoint.formats import Stored
from jshard.recipes.hf_config import checked_names, config_json
from jshard.recipes.lora import NO_LORA, LoRA
from jshard.train import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Size and kind of a Llama; the defaults are Llama 3 8B. Parameters are float32 regardless of `compute_dtype`."""

    vocab_size: int = 128_256
    block_size: int = 8192  # longest sequence
    n_layer: int = 32
    n_head: int = 32
    n_kv_head: int = 8
    head_dim: int = 0  # width of one head, an even number; 0 for d_model / n_head
    d_model: int = 4096
    d_ff: int = 14_336
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling = UNSCALED
    rms_norm_eps: float = 1e-5
    attention_bias: Literal["none", "qkv", "all"] = "none"  # of queries, keys and values; all: of the output, too
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm of each head of queries and keys, before their positions
    sliding_window: int = 0  # positions that each one sees, its own included; 0 for all before it
    tied: bool = False  # one table embeds the tokens and scores them
    attention: str = "auto"  # or "cudnn", "xla"; auto: by cuDNN in 16 bits on NVIDIA GPUs, elsewhere in plain form
    over_context: str = "auto"  # or "heads", "ring": how it sees a sequence that is split over the context axis
    queries_at_once: int = 1024  # in plain form scores are made for so many positions at a time
    mlp: str = "plain"  # or "pallas": kernels that leave room for communication, where there is a GPU for them
    reserved_sms: int = 0  # multiprocessors that these leave alone; js.tune_overlap says how many
    scan: bool = False  # the blocks in one module, run as one loop: compile time does not grow with depth
    lora: LoRA = NO_LORA  # lora.rank=8: adapters beside the linear layers, which alone are trained
    # Read by `annotate` only: an unsharded Llama computes in float32 and keeps every activation.
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"  # of gradients on their way to each other
    gather_dtype: str | None = None  # "float8_e4m3fn": matrices are sent in 8 bits, with scales
    wire_dtype: str | None = None  # "bfloat16": gradients are sent in 16 bits, and summed in `reduce_dtype`
    remat: str = "auto"

    def __post_init__(self) -> None:
        if not self.head_dim and self.d_model % (2 * self.n_head):
            raise ValueError(f"d_model={self.d_model} does not split into n_head={self.n_head} of even width")
        if self.head_dim < 0 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is no even number above 0, nor 0 for d_model / n_head")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        if self.mlp not in ("plain", "pallas"):
            raise ValueError(f"mlp={self.mlp!r} is neither 'plain' nor 'pallas'")
        if self.mlp == "pallas" and self.mlp_bias:
            raise ValueError("mlp='pallas' adds no bias, and mlp_bias is set")
        if self.mlp == "pallas" and any(map(self.lora.adapts, FEED_FORWARD.values())):
            raise ValueError(
                f"mlp='pallas' computes no adapters, and lora.targets={self.lora.targets!r} has some there"
            )
        self.lora.check(LINEARS.values())
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window={self.sliding_window} is no number of positions, nor 0 for all")
        self.rope_scaling.check_length(self.block_size)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.d_model // self.n_head


# ---- The model -------------------------------------------------------------------------------


# By the names of Hugging Face's; each may have an adapter.
ATTENTION = {f"attention/{ours}": f"self_attn.{ours[0]}_proj" for ours in ("q", "k", "v", "out")}
FEED_FORWARD = {f"mlp/{ours}": f"mlp.{ours}_proj" for ours in ("gate", "up", "down")}
LINEARS = ATTENTION | FEED_FORWARD


def linear(
    config: LlamaConfig, path: str, d_in: int, d_out: int, *, std: float = 0.02, bias: bool = False, rngs: nnx.Rngs
) -> nnx.Linear:
    normal = nnx.initializers.normal(std)
    return config.lora.linear(LINEARS[path], d_in, d_out, use_bias=bias, kernel_init=normal, rngs=rngs)


def embed(num: int, width: int, *, rngs: nnx.Rngs) -> nnx.Embed:
    """A table that computes in its current dtype; Flax would use the one it was built with."""
    table = nnx.Embed(num, width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
    table.dtype = None
    return table


def rms_norm(config: LlamaConfig, rngs: nnx.Rngs, width: int = 0) -> nnx.RMSNorm:
    return nnx.RMSNorm(width or config.d_model, epsilon=config.rms_norm_eps, rngs=rngs)


def residual_std(config: LlamaConfig) -> float:
    """GPT-2 scales down additions to the residual stream, so that it does not grow with depth."""
    return 0.02 / math.sqrt(2 * config.n_layer)


class Attention(nnx.Module):
    """Causal self-attention with fewer keys and values than queries.

    With cuDNN there are no arrays of scores. In plain form queries are processed in groups: scores of all 8,192 x 8,192
    positions would be 34 GB for a sequence of the 405B, and half of them would be masked.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, K = config.d_model, config.head_width
        has_bias = config.attention_bias != "none"
        self.q = linear(config, "attention/q", D, config.n_head * K, bias=has_bias, rngs=rngs)
        self.k = linear(config, "attention/k", D, config.n_kv_head * K, bias=has_bias, rngs=rngs)
        self.v = linear(config, "attention/v", D, config.n_kv_head * K, bias=has_bias, rngs=rngs)
        has_bias = config.attention_bias == "all"
        width, std = config.n_head * K, residual_std(config)
        self.out = linear(config, "attention/out", width, D, std=std, bias=has_bias, rngs=rngs)
        if config.qk_norm:
            self.q_norm = rms_norm(config, rngs, K)
            self.k_norm = rms_norm(config, rngs, K)

    def __call__(
        self, x_BTD: jax.Array, past: Any = None, at: Any = 0, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """The output, and the keys and values for later tokens; with a `past`, for one token."""
        config, (B, T, _), K = self.config, x_BTD.shape, self.config.head_width
        q_BTQ, k_BTE, v_BTE = (  # names are for remat policies
            checkpoint_name(project(x_BTD), name)
            for project, name in ((self.q, "query_proj"), (self.k, "key_proj"), (self.v, "value_proj"))
        )
        q_BTHK = q_BTQ.reshape(B, T, config.n_head, K)
        k_BTGK, v_BTGK = (x_BTE.reshape(B, T, config.n_kv_head, K) for x_BTE in (k_BTE, v_BTE))
        if config.qk_norm:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BTHK, k_BTGK = (rotate(x, config.rope_theta, at, config.rope_scaling) for x in (q_BTHK, k_BTGK))
        if past is None:
            y_BTHK = self._over_all(q_BTHK, k_BTGK, v_BTGK, segments_BT)
        else:
            k_BTGK, v_BTGK = (
                jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1)
                for old, new in zip(past, (k_BTGK, v_BTGK), strict=True)
            )
            y_BTHK = self._of_one(q_BTHK, k_BTGK, v_BTGK, at)
        return checkpoint_name(self.out(y_BTHK.reshape(B, T, -1)), "out_proj"), (k_BTGK, v_BTGK)

    def _over_all(
        self, q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BT: jax.Array | None
    ) -> jax.Array:
        """Each position sees those up to its own, or the latest of them; of packed texts, those of its own text."""
        how: dict[str, Any] = {"backend": self.config.attention, "over_context": self.config.over_context}
        if segments_BT is None:
            how["queries_at_once"] = self.config.queries_at_once
        else:
            how["bias"] = apart(segments_BT)
        if self.config.sliding_window:
            how["window"] = self.config.sliding_window
        return js.kernels.attention(q_BTHK, k_BTGK, v_BTGK, is_causal=True, **how)

    def _of_one(self, q_B1HK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, at: Any) -> jax.Array:
        """The position `at` sees the past."""
        bias = None
        if self.config.sliding_window:
            position_T = jnp.arange(k_BTGK.shape[1])
            bias = jnp.where(position_T > at - self.config.sliding_window, 0.0, -jnp.inf)[None, None, None]
        lengths_B = jnp.full(len(k_BTGK), at + 1)
        return js.kernels.attention(q_B1HK, k_BTGK, v_BTGK, lengths=lengths_B, bias=bias, backend="xla")


class MLP(nnx.Module):
    """The feed-forward half of a block, SwiGLU: one projection gates the other."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.occupancy = js.kernels.Occupancy(reserved_sms=config.reserved_sms) if config.mlp == "pallas" else None
        D, F, bias = config.d_model, config.d_ff, config.mlp_bias
        self.gate = linear(config, "mlp/gate", D, F, bias=bias, rngs=rngs)
        self.up = linear(config, "mlp/up", D, F, bias=bias, rngs=rngs)
        self.down = linear(config, "mlp/down", F, D, std=residual_std(config), bias=bias, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.occupancy is not None:
            gate_DF, up_DF, down_FD = self.gate.kernel[...], self.up.kernel[...], self.down.kernel[...]
            return js.kernels.mlp(x_BTD, up_DF, down_FD, w_gate=gate_DF, activation="silu", occupancy=self.occupancy)
        gate_BTF, up_BTF = checkpoint_name(self.gate(x_BTD), "mlpwi_0"), checkpoint_name(self.up(x_BTD), "mlpwi_1")
        return checkpoint_name(self.down(jax.nn.silu(gate_BTF) * up_BTF), "mlpwo")


class Block(nnx.Module):
    """One layer: attention, then feed-forward, each applied after a norm and added back."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = rms_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, segments: jax.Array | None = None, positions: Any = 0) -> jax.Array:
        return self.decode(x_BTD, at=positions, segments_BT=segments)[0]

    def decode(
        self, x_BTD: jax.Array, past: Any = None, at: Any = 0, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        y_BTD, past = self.attention(self.attention_norm(x_BTD), past, at, segments_BT)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), past


def all_blocks(config: LlamaConfig, rngs: nnx.Rngs) -> Any:
    """A list of blocks; with `scan` one module of all, whose variables have a leading dim of layers."""
    if not config.scan:
        return nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])

    @nnx.split_rngs(splits=config.n_layer)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return build(rngs)


class Llama(nnx.Module):
    """Maps tokens to the logits of the next token at each position."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.tokens = embed(config.vocab_size, config.d_model, rngs=rngs)
        self.blocks = all_blocks(config, rngs)
        self.norm = rms_norm(config, rngs)
        if not config.tied:
            normal = nnx.initializers.normal(0.02)
            self.head = nnx.Linear(config.d_model, config.vocab_size, use_bias=False, kernel_init=normal, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, **packed: Any) -> jax.Array:
        """The logits. Packed texts are kept apart by their `segments` and `positions`, each (B, T)."""
        x_BTD = self._embedded(tokens_BT)
        if self.config.scan:
            x_BTD = js.scan_layers(self.blocks, x_BTD, **packed)
        else:
            for block in self.blocks:
                x_BTD = block(x_BTD, **packed)
        return self._scores(x_BTD)

    def decode(self, tokens_BT: jax.Array, past: Any, at: Any) -> tuple[jax.Array, Any]:
        """The logits, and the past for later tokens, as in gpt.py."""
        x_BTD = self._embedded(tokens_BT)
        if self.config.scan:
            layers = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), past)
            x_BTD, layers = js.scan_layers(self.blocks, x_BTD, xs=layers, collect=True, method="decode", at=at)
            past = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), layers)
        else:
            before, past = past or [None] * len(self.blocks), []
            for block, kept in zip(self.blocks, before, strict=True):
                x_BTD, kept = block.decode(x_BTD, kept, at)
                past.append(kept)
        return self._scores(x_BTD), past

    def _embedded(self, tokens_BT: jax.Array) -> jax.Array:
        if tokens_BT.shape[1] > self.config.block_size:
            raise ValueError(f"{tokens_BT.shape[1]} tokens are more than block_size={self.config.block_size}")
        return self.tokens(tokens_BT)

    def _scores(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.norm(x_BTD)
        return self.tokens.attend(x_BTD) if self.config.tied else self.head(x_BTD)


# ---- The interface for `jshard train` -----------------------------------------------------------

# On a mesh with a tensor axis every device has some heads and some of the hidden features: the first matrices of each
# half of a block are cut by columns and the last by rows, so that a half needs one sum over the devices, at its end.
# Adapters are small, and stay whole.
TENSOR = {
    "*/attention/[qkv]/kernel": (None, "tensor"),
    "*/attention/out/kernel": ("tensor", None),
    "*/mlp/gate/kernel": (None, "tensor"),
    "*/mlp/up/kernel": (None, "tensor"),
    "*/mlp/down/kernel": ("tensor", None),
}
ATTENTION_BIAS = {"*/attention/[qkv]/bias": ("tensor",)}
MLP_BIAS = {"*/mlp/gate/bias": ("tensor",), "*/mlp/up/bias": ("tensor",)}


def build(config: LlamaConfig, rngs: nnx.Rngs) -> Llama:
    return Llama(config, rngs=rngs)


def check_heads(config: LlamaConfig, degree: int) -> None:
    """Raises if a head of keys would be on two devices of the tensor axis; `fully_shard` checks the rest."""
    if config.n_kv_head % degree:
        raise js.ShardingError(
            "The heads do not split over the tensor axis.",
            where=f"mesh axis 'tensor' of degree {degree}",
            why=f"n_kv_head={config.n_kv_head} is no multiple of {degree}.",
            do=f"choose a degree that divides it: --mesh tensor={math.gcd(config.n_kv_head, degree)}.",
        )


def annotate(model: Llama, mesh: Mesh | AbstractMesh) -> None:
    """A unit for each block (or the stack of them), one for an untied head; the root keeps the rest."""
    config = model.config
    check_heads(config, mesh.shape["tensor"])
    table = dict(TENSOR)
    if config.attention_bias != "none":
        table |= ATTENTION_BIAS
    if config.mlp_bias:
        table |= MLP_BIAS
    js.parallel.split(model, table)
    param, reduce = (config.compute_dtype, config.reduce_dtype) if config.compute_dtype != "float32" else (None, None)
    precision = js.MixedPrecision(
        param_dtype=param, reduce_dtype=reduce, gather_dtype=config.gather_dtype, wire_dtype=config.wire_dtype
    )
    for block in [model.blocks] if config.scan else model.blocks:
        placement = js.PlacementPolicy(stacked=1 if config.scan else 0)
        js.fully_shard(block, mesh=mesh, mixed_precision=precision, remat=config.remat, placement=placement)
    if not config.tied:  # backward begins with the head: what forward gathered of it stays
        js.fully_shard(model.head, mesh=mesh, mixed_precision=precision, reshard_after_forward=False)
    js.fully_shard(model, mesh=mesh, mixed_precision=precision)


def flops(recipe: Recipe) -> tuple[float, str]:
    """FLOPs of a step. The embedding table multiplies nothing; in the 8B, attention is an eighth."""
    config, length = recipe.model, recipe.sequence_length
    D, K = config.d_model, config.head_width
    in_layer = 2 * D * K * (config.n_head + config.n_kv_head) + 3 * D * config.d_ff
    in_matrices = config.n_layer * in_layer + D * config.vocab_size
    window = min(config.sliding_window or length, length)
    seen = window * (2 * length - window) / (2 * length)  # by a position on average; without a window length / 2
    in_attention = round(2 * config.n_layer * config.n_head * K * seen)  # by queries and by scores
    tokens = recipe.batch_size * length
    if config.lora.rank:  # frozen matrices have no gradient; adapters are small, and not counted
        formula = f"(4 x {in_matrices:,} in frozen matrices + 6 x {in_attention:,} in attention) x {tokens:,} tokens"
        return (4.0 * in_matrices + 6.0 * in_attention) * tokens, formula
    formula = f"6 x ({in_matrices:,} in matrices + {in_attention:,} in causal attention) x {tokens:,} tokens"
    return 6.0 * (in_matrices + in_attention) * tokens, formula


hf_types = ("llama", "mistral", "qwen2", "qwen3")  # of Hugging Face's models, those that are this one with some options


def hf_names(config: LlamaConfig) -> Mapping[str, str | Stored]:
    """The name of each parameter in Hugging Face's LlamaForCausalLM; torch's Linear is (out, in)."""
    names: dict[str, str | Stored] = {
        "tokens/embedding": "model.embed_tokens.weight",
        "norm/scale": "model.norm.weight",
    }
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.qk_norm:
        norms |= {"attention/q_norm": "self_attn.q_norm", "attention/k_norm": "self_attn.k_norm"}
    with_bias = {
        "none": (),
        "qkv": ("attention/q", "attention/k", "attention/v"),
        "all": ("attention/q", "attention/k", "attention/v", "attention/out"),
    }[config.attention_bias]
    if config.mlp_bias:
        with_bias += ("mlp/gate", "mlp/up", "mlp/down")
    for layer in range(config.n_layer):
        for ours, theirs in norms.items():
            names[f"blocks/{layer}/{ours}/scale"] = f"model.layers.{layer}.{theirs}.weight"
        for ours, theirs in LINEARS.items():
            stored = Stored(f"model.layers.{layer}.{theirs}.weight", transpose=True)
            names[f"blocks/{layer}/{ours}/kernel"] = stored
        for ours in with_bias:
            names[f"blocks/{layer}/{ours}/bias"] = f"model.layers.{layer}.{LINEARS[ours]}.bias"
    if not config.tied:
        names["head/kernel"] = Stored("lm_head.weight", transpose=True)
    return checked_names(names, config, hf_types)


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """The contents of `config.json` for such a model."""
    return config_json(config, hf_types)


# ---- Recipes: a whole run as a value --------------------------------------------------------------


def tiny() -> Recipe:
    """1.3M parameters over bytes: trains on two CPU cores in minutes."""
    return Recipe(
        model=LlamaConfig(
            vocab_size=256,
            block_size=128,
            n_layer=3,
            n_head=6,
            n_kv_head=2,
            d_model=192,
            d_ff=512,
            rope_theta=10_000.0,
        ),
        sequence_length=128,
        batch_size=32,
        num_steps=500,
        learning_rate=4e-3,
        warmup_steps=50,
        eval_every=100,
        eval_sequences=2048,
    )


def large(
    config: LlamaConfig, *, sequence_length: int = 8192, batch_size: int = 1024, accumulate: int, learning_rate: float
) -> Recipe:
    """Shared by the recipes below; the schedule is that of the Llama 3 paper (arXiv 2407.21783, section 3.4.1)."""
    return Recipe(
        model=dataclasses.replace(config, scan=True, compute_dtype="bfloat16", remat="full"),
        sequence_length=sequence_length,
        batch_size=batch_size,
        accumulate=accumulate,
        num_steps=1_200_000,
        learning_rate=learning_rate,
        warmup_steps=8000,
        eval_every=1000,
    )


# What the sizes of a family share. With --init-from the config.json of the weights replaces all of it.
LLAMA3_2 = LlamaConfig(
    block_size=131_072, tied=True, rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_size=8192)
)
MISTRAL = LlamaConfig(vocab_size=32_768, block_size=32_768, rope_theta=1e6)
QWEN2_5 = LlamaConfig(vocab_size=152_064, block_size=32_768, rope_theta=1e6, rms_norm_eps=1e-6, attention_bias="qkv")
QWEN3 = LlamaConfig(
    vocab_size=151_936, block_size=40_960, rope_theta=1e6, rms_norm_eps=1e-6, head_dim=128, qk_norm=True
)


def qwen3_0_6b() -> Recipe:
    """596M parameters: 0.5M tokens a step, on 8 GPUs two sequences at a time."""
    config = dataclasses.replace(QWEN3, n_layer=28, n_head=16, d_model=1024, d_ff=3072, tied=True)
    return large(config, batch_size=64, accumulate=4, learning_rate=3e-4)


def llama3_2_1b() -> Recipe:
    """1.24B parameters: Llama 3.2 1B."""
    config = dataclasses.replace(LLAMA3_2, n_layer=16, d_model=2048, d_ff=8192)
    return large(config, batch_size=64, accumulate=4, learning_rate=3e-4)


def llama3_2_3b() -> Recipe:
    """3.21B parameters: Llama 3.2 3B."""
    config = dataclasses.replace(LLAMA3_2, n_layer=28, n_head=24, d_model=3072, d_ff=8192)
    return large(config, batch_size=64, accumulate=8, learning_rate=3e-4)


def mistral_7b() -> Recipe:
    """7.25B parameters: Mistral 7B v0.3, whose positions see all before them; 1M tokens a step."""
    return large(MISTRAL, batch_size=128, accumulate=2, learning_rate=3e-4)


def qwen2_5_7b() -> Recipe:
    """7.62B parameters: Qwen 2.5 7B."""
    config = dataclasses.replace(QWEN2_5, n_layer=28, n_head=28, n_kv_head=4, d_model=3584, d_ff=18_944)
    return large(config, batch_size=128, accumulate=2, learning_rate=3e-4)


def llama3_8b() -> Recipe:
    """8.03B parameters: 8M tokens a step, on 128 GPUs a sequence at a time."""
    return large(LlamaConfig(), accumulate=8, learning_rate=3e-4)


def qwen3_14b() -> Recipe:
    """14.8B parameters: 1M tokens a step, on 64 GPUs a sequence at a time."""
    config = dataclasses.replace(QWEN3, n_layer=40, n_head=40, d_model=5120, d_ff=17_408)
    return large(config, batch_size=128, accumulate=2, learning_rate=2e-4)


def qwen3_32b() -> Recipe:
    """32.8B parameters: 2M tokens a step, on 128 GPUs a sequence at a time."""
    config = dataclasses.replace(QWEN3, n_layer=64, n_head=64, d_model=5120, d_ff=25_600)
    return large(config, batch_size=256, accumulate=2, learning_rate=1.5e-4)


def llama3_70b() -> Recipe:
    """70.6B parameters."""
    config = LlamaConfig(n_layer=80, n_head=64, d_model=8192, d_ff=28_672)
    return large(config, accumulate=8, learning_rate=1.5e-4)


def llama3_405b() -> Recipe:
    """405.9B parameters: 4M tokens a step as the paper begins, on 512 GPUs a sequence at a time.

    For a sequence of 8,192, 126 blocks keep 34 GB: it fits, but leaves no room to gather ahead.
    """
    config = LlamaConfig(n_layer=126, n_head=128, d_model=16_384, d_ff=53_248)
    return large(config, sequence_length=4096, accumulate=2, learning_rate=8e-5)


RECIPES = {
    "tiny": tiny,
    "qwen3_0_6b": qwen3_0_6b,
    "llama3_2_1b": llama3_2_1b,
    "llama3_2_3b": llama3_2_3b,
    "mistral_7b": mistral_7b,
    "qwen2_5_7b": qwen2_5_7b,
    "llama3_8b": llama3_8b,
    "qwen3_14b": qwen3_14b,
    "qwen3_32b": qwen3_32b,
    "llama3_70b": llama3_70b,
    "llama3_405b": llama3_405b,
}
