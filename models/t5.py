"""T5 in one readable file: an encoder and a decoder that share a table, trained to fill in removed spans.

    jshard train t5                                                # the tiny recipe, minutes on a laptop
    jshard plan t5 --recipe t5_11b --topology h100:64x8            # without a GPU

The data are those of the T5 paper (arXiv 1910.10683), over bytes: spans of text are removed, the encoder reads the
remaining text, and the decoder writes the spans. They come from `spans.py`, beside this file. Everything up to
`annotate` is plain Flax; only `annotate` decides what is sharded.

Names end in the dims of their array:

    B  batch                     D  model width (d_model)       H  heads
    S  position in the input     F  feed-forward width (d_ff)   K  width of one head (d_kv; not D / H)
    T  position in the target    V  vocabulary
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from spans import PAD, SpanRecipe, corrupted_text, lengths

import jshard as js
from jshard.checkpoint.formats import Stored
from jshard.data import Data
from jshard.recipes.hf_config import checked_names
from jshard.train import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Size and kind of a T5. Parameters are float32 regardless of `compute_dtype`."""

    vocab_size: int = 32_128
    n_layer: int = 24  # of the encoder, and also of the decoder
    n_head: int = 16
    d_model: int = 1024
    d_kv: int = 64
    d_ff: int = 2816
    gated: bool = False  # gated GELU, as from v1.1 on, instead of ReLU
    tied: bool = True  # one table embeds the tokens and scores them; untied from v1.1 on
    num_buckets: int = 32  # of distances, for the attention bias
    max_distance: int = 128  # larger distances share one bucket
    attention: str = "auto"  # or "cudnn", "xla"; auto: by cuDNN in 16 bits on NVIDIA GPUs, elsewhere in plain form
    scan: bool = False  # the layers of each half in one module, run as one loop
    # Read by `annotate` only: an unsharded T5 computes in float32 and keeps every activation.
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"  # of gradients on their way to each other
    remat: str = "auto"


# ---- The model -------------------------------------------------------------------------------


def linear(d_in: int, d_out: int, *, std: float, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, use_bias=False, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def embed(num: int, width: int, *, std: float, rngs: nnx.Rngs) -> nnx.Embed:
    """A table that computes in its current dtype; Flax would use the one it was built with."""
    table = nnx.Embed(num, width, embedding_init=nnx.initializers.normal(std), rngs=rngs)
    table.dtype = None
    return table


def rms_norm(config: T5Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.d_model, epsilon=1e-6, rngs=rngs)


def buckets(distance: jax.Array, config: T5Config, *, both_ways: bool) -> jax.Array:
    """Buckets of distances, key minus query: one per small distance, then ever wider ones."""
    num, first = config.num_buckets, jnp.zeros_like(distance)
    if both_ways:  # half of them for later positions
        num //= 2
        first = jnp.where(distance > 0, num, 0)
    away = jnp.abs(distance) if both_ways else jnp.maximum(-distance, 0)
    near = num // 2
    far = jnp.log(jnp.maximum(away, 1) / near) / math.log(config.max_distance / near)
    wide = jnp.minimum(near + (far * (num - near)).astype(jnp.int32), num - 1)
    return first + jnp.where(away < near, away, wide)


class PositionBias(nnx.Module):
    """T5's replacement of positions: a number per head and bucket of distances, added to the scores."""

    def __init__(self, config: T5Config, *, both_ways: bool, rngs: nnx.Rngs):
        self.config = config
        self.both_ways = both_ways
        self.table = embed(config.num_buckets, config.n_head, std=config.d_model**-0.5, rngs=rngs)

    def __call__(self, length: int) -> jax.Array:
        distance_TT = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
        bias_TTH = self.table(buckets(distance_TT, self.config, both_ways=self.both_ways))
        return jnp.moveaxis(bias_TTH, -1, 0)[None]


class Attention(nnx.Module):
    """Attention from x to the visible positions of y. Scores are not scaled; the initialisation accounts for that."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        D, HK = config.d_model, config.n_head * config.d_kv
        self.n_head = config.n_head
        self.backend: Any = config.attention
        self.q = linear(D, HK, std=(D * config.d_kv) ** -0.5, rngs=rngs)
        self.k = linear(D, HK, std=D**-0.5, rngs=rngs)
        self.v = linear(D, HK, std=D**-0.5, rngs=rngs)
        self.out = linear(HK, D, std=HK**-0.5, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        y_BSD: jax.Array,
        *,
        bias_1HTS: jax.Array | None = None,
        lengths_B: jax.Array | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        heads = lambda a, name: checkpoint_name(a, name).reshape(*a.shape[:2], self.n_head, -1)
        q_BTHK, k_BSHK = heads(self.q(x_BTD), "query_proj"), heads(self.k(y_BSD), "key_proj")  # for remat policies
        v_BSHK = heads(self.v(y_BSD), "value_proj")
        how: dict[str, Any] = {"lengths": lengths_B, "is_causal": is_causal, "scale": 1.0, "backend": self.backend}
        y_BTHK = js.kernels.attention(q_BTHK, k_BSHK, v_BSHK, bias=bias_1HTS, **how)
        return checkpoint_name(self.out(y_BTHK.reshape(*x_BTD.shape[:2], -1)), "out_proj")


class MLP(nnx.Module):
    """The feed-forward part of a layer: ReLU or gated GELU."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        D, F = config.d_model, config.d_ff
        self.gate = linear(D, F, std=D**-0.5, rngs=rngs) if config.gated else None
        self.up = linear(D, F, std=D**-0.5, rngs=rngs)
        self.down = linear(F, D, std=F**-0.5, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        up_BTF = checkpoint_name(self.up(x_BTD), "mlpwi" if self.gate is None else "mlpwi_1")
        if self.gate is None:
            return checkpoint_name(self.down(jax.nn.relu(up_BTF)), "mlpwo")
        gate_BTF = checkpoint_name(self.gate(x_BTD), "mlpwi_0")
        return checkpoint_name(self.down(jax.nn.gelu(gate_BTF) * up_BTF), "mlpwo")


class EncoderLayer(nnx.Module):
    """Attention over the whole input, then feed-forward, each applied after a norm and added back."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = rms_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, bias_1HSS: jax.Array, lengths_B: jax.Array) -> jax.Array:
        h_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.attention(h_BSD, h_BSD, bias_1HTS=bias_1HSS, lengths_B=lengths_B)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class DecoderLayer(nnx.Module):
    """Attention over the earlier targets, then over the input, then feed-forward."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.input_attention_norm = rms_norm(config, rngs)
        self.input_attention = Attention(config, rngs=rngs)
        self.mlp_norm = rms_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, bias_1HTT: jax.Array, encoded_BSD: jax.Array, lengths_B: jax.Array
    ) -> jax.Array:
        h_BTD = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.attention(h_BTD, h_BTD, bias_1HTS=bias_1HTT, is_causal=True)
        x_BTD = x_BTD + self.input_attention(self.input_attention_norm(x_BTD), encoded_BSD, lengths_B=lengths_B)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


def layers(kind: Callable[..., nnx.Module], config: T5Config, rngs: nnx.Rngs) -> Any:
    """A list of layers, or all in one module, whose variables have a leading dim of layers."""
    if not config.scan:
        return nnx.List([kind(config, rngs=rngs) for _ in range(config.n_layer)])

    @nnx.split_rngs(splits=config.n_layer)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return kind(config, rngs=rngs)

    return build(rngs)


class T5(nnx.Module):
    """Maps an input, and the target up to each position, to the logits of the target's tokens."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.tokens = embed(config.vocab_size, config.d_model, std=1.0, rngs=rngs)
        self.encoder_bias = PositionBias(config, both_ways=True, rngs=rngs)
        self.encoder = layers(EncoderLayer, config, rngs)
        self.encoder_norm = rms_norm(config, rngs)
        self.decoder_bias = PositionBias(config, both_ways=False, rngs=rngs)
        self.decoder = layers(DecoderLayer, config, rngs)
        self.decoder_norm = rms_norm(config, rngs)
        if not config.tied:
            self.head = linear(config.d_model, config.vocab_size, std=config.d_model**-0.5, rngs=rngs)

    def __call__(self, inputs_BS: jax.Array, before_BT: jax.Array) -> jax.Array:
        lengths_B = (inputs_BS != PAD).sum(-1, dtype=jnp.int32)  # padding is at the end
        encoded_BSD = self.tokens(inputs_BS)
        encoded_BSD = self.run(self.encoder, encoded_BSD, self.encoder_bias(inputs_BS.shape[1]), lengths_B)
        encoded_BSD = self.encoder_norm(encoded_BSD)
        x_BTD = self.tokens(before_BT)
        x_BTD = self.run(self.decoder, x_BTD, self.decoder_bias(before_BT.shape[1]), encoded_BSD, lengths_B)
        x_BTD = self.decoder_norm(x_BTD)
        if not self.config.tied:
            return self.head(x_BTD)
        return self.tokens.attend(x_BTD * self.config.d_model**-0.5)

    def run(self, layers: Any, x: jax.Array, *args: jax.Array) -> jax.Array:
        if self.config.scan:
            return js.scan_layers(layers, x, *args)
        for layer in layers:
            x = layer(x, *args)
        return x


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: T5Config, rngs: nnx.Rngs) -> T5:
    return T5(config, rngs=rngs)


def annotate(model: T5, mesh: Mesh | AbstractMesh) -> None:
    """A unit for each layer (or each stack of them), one for an untied head; the root has what both halves use."""
    config = model.config
    precision = None
    if config.compute_dtype != "float32":
        precision = js.MixedPrecision(param_dtype=config.compute_dtype, reduce_dtype=config.reduce_dtype)
    units = [model.encoder, model.decoder] if config.scan else [*model.encoder, *model.decoder]
    for unit in units:
        stacked = 1 if config.scan else 0
        js.fully_shard(
            unit,
            mesh=mesh,
            mixed_precision=precision,
            remat=config.remat,
            placement=js.PlacementPolicy(stacked=stacked),
        )
    if not config.tied:  # backward begins with the head: what forward gathered of it stays
        js.fully_shard(model.head, mesh=mesh, mixed_precision=precision, reshard_after_forward=False)
    small = ["encoder_bias/*", "decoder_bias/*"]  # a row per bucket: too few to shard over many devices
    js.fully_shard(model, mesh=mesh, mixed_precision=precision, placement=js.PlacementPolicy(allow_replicated=small))


def loss_fn(model: T5, batch: Batch) -> js.WeightedMean:
    """Mean cross entropy, in nats per token, over all tokens of the (global) batch except padding."""
    targets_BT = batch["targets"]
    before_BT = jnp.pad(targets_BT[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)  # padding also starts a target
    logits_BTV = model(batch["inputs"], before_BT).astype(jnp.float32)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    real_BT = targets_BT != PAD
    return js.WeightedMean((loss_BT * real_BT).sum(), real_BT.sum())


def data(recipe: SpanRecipe) -> Data:
    return corrupted_text(recipe)


def flops(recipe: SpanRecipe) -> tuple[float, str]:
    """FLOPs of a step. Input tokens pass only the encoder, and target tokens only the decoder."""
    config, (S, T) = recipe.model, lengths(recipe)
    D, HK, L = config.d_model, config.n_head * config.d_kv, config.n_layer
    attention, mlp = 4 * D * HK, (3 if config.gated else 2) * D * config.d_ff
    of_input = L * (attention + mlp + 2 * HK * S) + L * attention // 2  # the decoder's keys and values for it
    of_target = L * (attention * 3 // 2 + mlp + HK * T + 2 * HK * S) + D * config.vocab_size
    formula = f"6 x ({of_input:,} x {S} of the input + {of_target:,} x {T} of the target) x {recipe.batch_size} samples"
    return 6.0 * (of_input * S + of_target * T) * recipe.batch_size, formula


hf_types = ("t5",)  # of Hugging Face's models


def hf_names(config: T5Config) -> Mapping[str, str | Stored]:
    """The name of each parameter in Hugging Face's T5ForConditionalGeneration; torch's Linear is (out, in)."""
    names: dict[str, str | Stored] = {"tokens/embedding": "shared.weight"}
    if not config.tied:
        names["head/kernel"] = Stored("lm_head.weight", transpose=True)
    attention = {"q": "q", "k": "k", "v": "v", "out": "o"}
    mlp = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if config.gated else {"up": "wi", "down": "wo"}
    own, other, last = ("attention", "SelfAttention"), ("input_attention", "EncDecAttention"), ("mlp", "DenseReluDense")
    for half, parts in {"encoder": (own, last), "decoder": (own, other, last)}.items():
        bias = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names |= {f"{half}_bias/table/embedding": bias, f"{half}_norm/scale": f"{half}.final_layer_norm.weight"}
        for layer, (number, (ours, theirs)) in itertools.product(range(config.n_layer), enumerate(parts)):
            here, there = f"{half}/{layer}", f"{half}.block.{layer}.layer.{number}"
            names[f"{here}/{ours}_norm/scale"] = f"{there}.layer_norm.weight"
            for kernel, name in (mlp if ours == "mlp" else attention).items():
                stored = Stored(f"{there}.{theirs}.{name}.weight", transpose=True)
                names[f"{here}/{ours}/{kernel}/kernel"] = stored
    return checked_names(names, config, hf_types)


# ---- Recipes: a whole run as a value --------------------------------------------------------------


def tiny() -> SpanRecipe:
    """1.0M parameters over bytes: trains on two CPU cores in minutes."""
    return SpanRecipe(
        model=T5Config(
            vocab_size=384,
            n_layer=2,
            n_head=4,
            d_model=128,
            d_kv=32,
            d_ff=512,
        ),
        sequence_length=256,
        batch_size=32,
        num_steps=500,
        learning_rate=4e-3,
        warmup_steps=50,
        eval_every=100,
        eval_sequences=1024,
    )


def large(config: T5Config) -> SpanRecipe:
    """Shared by the recipes below: 512 input and 114 target tokens, as in the T5 paper."""
    return SpanRecipe(
        model=dataclasses.replace(config, scan=True, compute_dtype="bfloat16", remat="full"),
        sequence_length=568,
        batch_size=2048,
        num_steps=500_000,
        learning_rate=1e-4,
        warmup_steps=10_000,
        eval_every=1000,
    )


def t5_611m() -> SpanRecipe:
    """The T5-611M of the PyTorch FSDP paper.

    The paper does not give its layer sizes. These, v1.1's widths with the ungated feed-forward and the tied table of
    v1.0, are from a public PyTorch benchmark, and result in 611,838,976 parameters.
    """
    return large(T5Config())


def t5_2b() -> SpanRecipe:
    """The T5-2.28B of the PyTorch FSDP paper, from the same source: 2,280,642,560 parameters."""
    return large(T5Config(n_head=32, d_model=2048, d_ff=5120))


def t5_11b() -> SpanRecipe:
    """T5-11B as released (v1.0): 11,307,321,344 parameters."""
    return large(T5Config(n_head=128, d_kv=128, d_ff=65_536))


RECIPES = {
    "tiny": tiny,
    "t5_611m": t5_611m,
    "t5_2b": t5_2b,
    "t5_11b": t5_11b,
}
