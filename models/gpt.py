"""A GPT in one readable file: the model, its sharding, its loss and its recipes.

    jshard train gpt                        # the tiny recipe, minutes on a laptop
    jshard train gpt --recipe gpt2_small    # 124M parameters
    jshard train gpt --recipe gpt3_175b --mesh replica=4,fsdp=128 --dry-run

Everything up to `annotate` is plain Flax and independent of devices (`js.scan_layers` is a loop over
the blocks if they are not sharded); only `annotate` decides what is sharded. Copy this file, change
what you like, and pass your copy to `jshard train`.

Names end in the dims of their array:

    B  batch                 D  model width (d_model)       H  heads
    T  position in sequence  F  feed-forward width (d_ff)   K  width of one head
    V  vocabulary
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

import jshard as js
from jshard.checkpoint.formats import Stored
from jshard.recipes.hf_config import checked_names, config_json
from jshard.recipes.lora import NO_LORA, LoRA
from jshard.train import Batch, Recipe, segments_in, token_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Size and kind of a GPT. Parameters are float32 regardless of `compute_dtype`."""

    vocab_size: int = 50257
    block_size: int = 1024  # longest sequence
    n_layer: int = 12
    n_head: int = 12
    head_dim: int = 0  # width of one head; 0 for d_model / n_head
    d_model: int = 768
    d_ff: int = 3072
    layer_norm_eps: float = 1e-5
    dropout: float = 0.0
    tied: bool = True  # one table embeds the tokens and scores them
    positions: str = "learned"  # or "rotary"
    attention: str = "auto"  # or "cudnn", "xla"; auto: by cuDNN in 16 bits on NVIDIA GPUs, elsewhere in plain form
    mlp: str = "plain"  # or "pallas": kernels that leave room for communication, where there is a GPU for them
    reserved_sms: int = 0  # multiprocessors that these leave alone; js.tune_overlap says how many
    scan: bool = False  # the blocks in one module, run as one loop: compile time does not grow with depth
    split_sequence: bool = False  # between products, over the `tensor` axis: less memory for activations
    lora: LoRA = NO_LORA  # lora.rank=8: adapters beside the linear layers, which alone are trained
    # Read by `annotate` only: an unsharded GPT computes in float32 and keeps every activation.
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"  # of gradients on their way to each other
    gather_dtype: str | None = None  # "float8_e4m3fn": matrices are sent in 8 bits, with scales
    wire_dtype: str | None = None  # "bfloat16": gradients are sent in 16 bits, and summed in `reduce_dtype`
    remat: str = "auto"
    offload: Literal["optimizer", "params"] | None = None  # what is in host memory

    def __post_init__(self) -> None:
        if not self.head_dim and self.d_model % self.n_head:
            raise ValueError(f"d_model={self.d_model} does not split into n_head={self.n_head}")
        if self.head_dim < 0 or (self.positions == "rotary" and self.head_dim % 2):
            raise ValueError(f"head_dim={self.head_dim} is no width of a head, nor 0 for d_model / n_head")
        if self.positions not in ("learned", "rotary"):
            raise ValueError(f"positions={self.positions!r} is neither 'learned' nor 'rotary'")
        if self.mlp not in ("plain", "pallas"):
            raise ValueError(f"mlp={self.mlp!r} is neither 'plain' nor 'pallas'")
        if self.mlp == "pallas" and (self.lora.adapts("mlp.c_fc") or self.lora.adapts("mlp.c_proj")):
            raise ValueError(
                f"mlp='pallas' computes no adapters, and lora.targets={self.lora.targets!r} has some there"
            )
        self.lora.check(LINEARS.values())


# ---- The model -------------------------------------------------------------------------------


# By the names of Hugging Face's GPT-2; each may have an adapter.
LINEARS = {
    "attention/qkv": "attn.c_attn",
    "attention/out": "attn.c_proj",
    "mlp/up": "mlp.c_fc",
    "mlp/down": "mlp.c_proj",
}


def linear(config: GPTConfig, path: str, d_in: int, d_out: int, *, std: float, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer with GPT-2's initialisation: normal weights, zero biases."""
    return config.lora.linear(LINEARS[path], d_in, d_out, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def embed(num: int, width: int, *, rngs: nnx.Rngs) -> nnx.Embed:
    """A table that computes in its current dtype; Flax would use the one it was built with."""
    table = nnx.Embed(num, width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
    table.dtype = None
    return table


def layer_norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)


def residual_std(config: GPTConfig) -> float:
    """GPT-2 scales down additions to the residual stream, so that it does not grow with depth."""
    return 0.02 / math.sqrt(2 * config.n_layer)


def positions_from(at: Any, length: int) -> jax.Array:
    """The positions of so many tokens from `at` on, (1, T); in packed texts `at` has that of each token, (B, T)."""
    return at if jnp.ndim(at) == 2 else (at + jnp.arange(length))[None]


def rotate(x_BTHK: jax.Array, at: Any) -> jax.Array:
    """Rotary positions, from `at` on: rotates each pair of features by an angle that grows with the position."""
    T, K = x_BTHK.shape[1], x_BTHK.shape[3]
    frequency_k = 10_000.0 ** (-jnp.arange(K // 2) / (K // 2))
    angle_BTk = positions_from(at, T)[..., None] * frequency_k[None, None]
    cos, sin = jnp.cos(angle_BTk)[:, :, None], jnp.sin(angle_BTk)[:, :, None]
    x1, x2 = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def apart(segments_BT: jax.Array) -> jax.Array:
    """A bias for attention, by which each token of packed texts sees only its own text: 0, or a very small number."""
    is_own_B1TS = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    return jnp.where(is_own_B1TS, 0.0, -1e9)


class Attention(nnx.Module):
    """Causal self-attention: each position attends to the positions before it."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        D = config.d_model
        self.n_head = config.n_head
        self.rotary = config.positions == "rotary"
        self.backend: Any = config.attention
        width = config.n_head * (config.head_dim or D // config.n_head)  # D by default
        normal = nnx.initializers.normal(0.02)
        self.qkv = config.lora.linear_general("attn.c_attn", D, (3, width), kernel_init=normal, rngs=rngs)
        self.out = linear(config, "attention/out", width, D, std=residual_std(config), rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, past: Any = None, at: Any = 0, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """The output, and the keys and values for later tokens; with a `past`, for one token."""
        B, T, _ = x_BTD.shape
        qkv_BT3D = checkpoint_name(self.qkv(x_BTD), "qkv_proj")  # names are for remat policies
        qkv_BT3HK = qkv_BT3D.reshape(B, T, 3, self.n_head, -1)
        q_BTHK, k_BTHK, v_BTHK = jnp.unstack(js.parallel.hold(qkv_BT3HK, None, None, None, "tensor"), axis=2)
        if self.rotary:
            q_BTHK, k_BTHK = rotate(q_BTHK, at), rotate(k_BTHK, at)
        if past is None:
            bias = None if segments_BT is None else apart(segments_BT)
            y_BTHK = js.kernels.attention(q_BTHK, k_BTHK, v_BTHK, bias=bias, is_causal=True, backend=self.backend)
        else:
            k_BTHK, v_BTHK = (
                jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1)
                for old, new in zip(past, (k_BTHK, v_BTHK), strict=True)
            )
            y_BTHK = js.kernels.attention(q_BTHK, k_BTHK, v_BTHK, lengths=jnp.full(B, at + 1), backend="xla")
        y_BTD = js.parallel.hold(y_BTHK, None, None, "tensor").reshape(B, T, -1)
        return checkpoint_name(self.out(y_BTD), "out_proj"), (k_BTHK, v_BTHK)


class MLP(nnx.Module):
    """The feed-forward half of a block: expand, activate, contract, each position independently."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.occupancy = js.kernels.Occupancy(reserved_sms=config.reserved_sms) if config.mlp == "pallas" else None
        D, F = config.d_model, config.d_ff
        self.up: Any = linear(config, "mlp/up", D, F, std=0.02, rngs=rngs)
        self.down: Any = linear(config, "mlp/down", F, D, std=residual_std(config), rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.occupancy is not None:
            up_DF, down_FD = self.up.kernel[...], self.down.kernel[...]
            up_F, down_D = self.up.bias[...], self.down.bias[...]
            return js.kernels.mlp(x_BTD, up_DF, down_FD, b_up=up_F, b_down=down_D, occupancy=self.occupancy)
        h_BTF = jax.nn.gelu(checkpoint_name(self.up(x_BTD), "mlpwi"))
        return checkpoint_name(self.down(h_BTF), "mlpwo")


class Block(nnx.Module):
    """One layer: attention, then feed-forward, each applied after a norm and added back."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.along = (None, "tensor") if config.split_sequence else (None,)
        self.attention_norm = layer_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = layer_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x_BTD: jax.Array, segments: jax.Array | None = None, positions: Any = 0) -> jax.Array:
        return self.decode(x_BTD, at=positions, segments_BT=segments)[0]

    def decode(
        self, x_BTD: jax.Array, past: Any = None, at: Any = 0, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        along = self.along if past is None else (None,)  # one token cannot be split
        y_BTD, past = self.attention(self.attention_norm(x_BTD), past, at, segments_BT)
        x_BTD = js.parallel.hold(x_BTD + self.dropout(y_BTD), *along)
        return js.parallel.hold(x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD))), *along), past


def all_blocks(config: GPTConfig, rngs: nnx.Rngs) -> Any:
    """A list of blocks; with `scan` one module of all, whose variables have a leading dim of layers."""
    if not config.scan:
        return nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])

    @nnx.split_rngs(splits=config.n_layer)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return build(rngs)


class GPT(nnx.Module):
    """Maps tokens to the logits of the next token at each position."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        V, D = config.vocab_size, config.d_model
        self.tokens = embed(V, D, rngs=rngs)
        if config.positions == "learned":
            self.positions = embed(config.block_size, D, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
        self.blocks = all_blocks(config, rngs)
        self.norm = layer_norm(config, rngs)
        if not config.tied:
            self.head = nnx.Linear(D, V, use_bias=False, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, **packed: Any) -> jax.Array:
        """The logits. Packed texts are kept apart by their `segments` and `positions`, each (B, T)."""
        x_BTD = self._embedded(tokens_BT, packed.get("positions", 0))
        if self.config.scan:
            x_BTD = js.scan_layers(self.blocks, x_BTD, **packed)
        else:
            for block in self.blocks:
                x_BTD = block(x_BTD, **packed)
        return self._scores(x_BTD)

    def decode(self, tokens_BT: jax.Array, past: Any, at: Any) -> tuple[jax.Array, Any]:
        """The logits, and the keys and values of each block: the past for later tokens.

        Without a past `tokens_BT` is the beginning of a text; with it, the single token at the current position.
        """
        x_BTD = self._embedded(tokens_BT, at)
        if self.config.scan:  # outside of it the past has its batch first, as all arrays that are split have
            layers = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), past)
            x_BTD, layers = js.scan_layers(self.blocks, x_BTD, xs=layers, collect=True, method="decode", at=at)
            past = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), layers)
        else:
            before, past = past or [None] * len(self.blocks), []
            for block, kept in zip(self.blocks, before, strict=True):
                x_BTD, kept = block.decode(x_BTD, kept, at)
                past.append(kept)
        return self._scores(x_BTD), past

    def _embedded(self, tokens_BT: jax.Array, at: Any = 0) -> jax.Array:
        if tokens_BT.shape[1] > self.config.block_size:
            raise ValueError(f"{tokens_BT.shape[1]} tokens are more than block_size={self.config.block_size}")
        x_BTD = self.tokens(tokens_BT)
        if self.config.positions == "learned":
            x_BTD += self.positions(positions_from(at, tokens_BT.shape[1]))
        return self.dropout(x_BTD)

    def _scores(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.norm(x_BTD)
        return self.tokens.attend(x_BTD) if self.config.tied else self.head(x_BTD)


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: GPTConfig, rngs: nnx.Rngs) -> GPT:
    return GPT(config, rngs=rngs)


# The last dims on the `tensor` axis, if the mesh has one: heads, features and tokens are split.
# Adapters are small, and stay whole.
OUT, IN = ("tensor",), ("tensor", None)
TENSOR = {"*/qkv/[!l]*": OUT, "*/up/[!l]*": OUT, "*/out/kernel": IN, "*/down/kernel": IN, "tokens/embedding": IN}


def annotate(model: GPT, mesh: Mesh | AbstractMesh) -> None:
    """A unit for each block (or the stack of them), one for an untied head; the root keeps the rest."""
    config = model.config
    js.parallel.split(model, TENSOR if config.tied else TENSOR | {"head/kernel": OUT})
    param, reduce = (config.compute_dtype, config.reduce_dtype) if config.compute_dtype != "float32" else (None, None)
    precision = js.MixedPrecision(
        param_dtype=param, reduce_dtype=reduce, gather_dtype=config.gather_dtype, wire_dtype=config.wire_dtype
    )
    placement, stacked = (js.PlacementPolicy(offload=config.offload, stacked=n) for n in (0, 1))
    settings = dict[str, Any](mesh=mesh, mixed_precision=precision, placement=placement)
    if config.scan:
        js.fully_shard(model.blocks, remat=config.remat, **dict[str, Any](settings, placement=stacked))
    else:
        for block in model.blocks:
            js.fully_shard(block, remat=config.remat, **settings)
    if not config.tied:  # backward begins with the head: what forward gathered of it stays
        js.fully_shard(model.head, reshard_after_forward=False, **settings)
    js.fully_shard(model, **settings)


def loss_fn(model: GPT, batch: Batch) -> Any:
    """Mean cross entropy, in nats per token, over the whole (global) batch; of conversations, over the replies."""
    return token_loss(model(batch["inputs"], **segments_in(batch)), batch)


hf_types = ("gpt2",)  # of Hugging Face's models


def hf_names(config: GPTConfig) -> Mapping[str, str | Stored]:
    """The name of each parameter in Hugging Face's GPT-2; a tied head is not a separate array there either."""
    if config.positions != "learned":
        raise ValueError(f"GPT-2 learns its positions; positions={config.positions!r} have no place in it")
    if config.head_dim not in (0, config.d_model // config.n_head):
        raise ValueError(f"GPT-2's heads are d_model / n_head wide, and head_dim={config.head_dim}")
    names: dict[str, str | Stored] = {
        "tokens/embedding": "transformer.wte.weight",
        "positions/embedding": "transformer.wpe.weight",
        "norm/scale": "transformer.ln_f.weight",
        "norm/bias": "transformer.ln_f.bias",
    }
    norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    for layer in range(config.n_layer):
        for ours, theirs in (norms | LINEARS).items():  # matrices are (in, out), as Flax has them
            for kind, last in (("scale" if ours in norms else "kernel", "weight"), ("bias", "bias")):
                name = f"transformer.h.{layer}.{theirs}.{last}"
                names[f"blocks/{layer}/{ours}/{kind}"] = Stored(name, parts=3) if "qkv" in ours else name
    if not config.tied:
        names["head/kernel"] = Stored("lm_head.weight", transpose=True)  # torch's Linear is (out, in)
    return checked_names(names, config, hf_types)


def hf_config(config: GPTConfig) -> dict[str, Any]:
    """The contents of `config.json` for such a GPT-2."""
    return config_json(config, hf_types) | {
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


# ---- Recipes: a whole run as a value --------------------------------------------------------------


def tiny() -> Recipe:
    """1.4M parameters over bytes: trains on two CPU cores in minutes."""
    return Recipe(
        model=GPTConfig(
            vocab_size=256,
            block_size=128,
            n_layer=3,
            n_head=6,
            d_model=192,
            d_ff=768,
            positions="rotary",
        ),
        sequence_length=128,
        batch_size=32,
        num_steps=500,
        learning_rate=4e-3,
        warmup_steps=50,
        eval_every=100,
        eval_sequences=2048,
    )


def gpt2_small() -> Recipe:
    """124M parameters; batch and schedule as in nanoGPT's reproduction."""
    return Recipe(
        model=GPTConfig(compute_dtype="bfloat16"),
        sequence_length=1024,
        batch_size=480,
        accumulate=5,
        num_steps=600_000,
        learning_rate=6e-4,
        warmup_steps=2000,
        eval_every=1000,
    )


def gpt2_xl() -> Recipe:
    """1.56B parameters, the largest GPT-2."""
    return Recipe(
        model=GPTConfig(
            n_layer=48,
            n_head=25,
            d_model=1600,
            d_ff=6400,
            scan=True,
            compute_dtype="bfloat16",
            remat="full",
        ),
        sequence_length=1024,
        batch_size=512,
        num_steps=300_000,
        learning_rate=2e-4,
        warmup_steps=2000,
        eval_every=1000,
    )


def gpt3_175b() -> Recipe:
    """The minGPT-175B of the PyTorch FSDP paper: vocabulary 50000, block 2048, untied head."""
    return Recipe(
        model=GPTConfig(
            vocab_size=50_000,
            block_size=2048,
            n_layer=96,
            n_head=96,
            d_model=12_288,
            d_ff=49_152,
            tied=False,
            scan=True,
            compute_dtype="bfloat16",
            remat="full",
        ),
        sequence_length=2048,
        batch_size=1536,
        num_steps=95_000,
        learning_rate=6e-5,
        warmup_steps=100,
        eval_every=1000,
    )


RECIPES = {
    "tiny": tiny,
    "gpt2_small": gpt2_small,
    "gpt2_xl": gpt2_xl,
    "gpt3_175b": gpt3_175b,
}
