"""A mixture of experts after Mixtral, in one readable file: the model, its sharding, its loss and its recipes.

    jshard train moe                                   # the tiny recipe, minutes on a laptop
    jshard train moe --mesh fsdp=4,expert=2            # the experts on an axis of their own
    jshard train moe --recipe mixtral_8x7b --mesh fsdp=8,expert=8 --dry-run
    jshard train moe --recipe mixtral_8x7b --init-from mixtral/      # begins with Hugging Face's weights

In each block a router sends every token to the best `top_k` of E feed-forward layers, the experts. On a mesh with an
`expert` axis they are split: each device has E / (its degree) of them, sharded over `fsdp` like other parameters, and
tokens are sent to them and back. The model only calls `js.parallel.to_experts` and `from_experts` for this.

A sequence has C places for its tokens at each expert, C = capacity x top_k x T / E rounded up. A token without a place
skips that expert. Places are counted in each sequence separately, so the split of the batch does not matter.
With capacity=0 no token is dropped: tokens are sorted by expert, `jax.lax.ragged_dot` multiplies them, and the devices
along `expert` gather each other's tokens. Not for GPUs yet: XLA of jax 0.10 multiplies each row by all experts there.

Names end in the dims of their array:

    B  batch                 D  model width (d_model)       H  heads      E  experts
    T  position in sequence  F  width of an expert (d_ff)   K  width of one head
    V  vocabulary            C  places of a sequence at an expert
    n  choices of a token (top_k)       s  all of a sequence, the first choices first
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

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
from jshard.train import Batch, Recipe, segments_in, token_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Size and kind of the model. Parameters are float32 regardless of `compute_dtype`."""

    vocab_size: int = 32_000
    block_size: int = 32_768  # longest sequence
    n_layer: int = 32
    n_head: int = 32
    n_kv_head: int = 8  # keys and values are shared by groups of heads
    head_dim: int = 0  # width of one head, an even number; 0 for d_model / n_head
    d_model: int = 4096
    d_ff: int = 14_336
    n_expert: int = 8
    top_k: int = 2
    n_shared: int = 0  # experts that every token passes, as one layer of their width
    capacity: float = 1.25  # places at the experts, by those that an even load needs; 0: as many as are asked for
    rope_theta: float = 1e6
    rope_scaling: RopeScaling = UNSCALED
    rms_norm_eps: float = 1e-5
    sliding_window: int = 0  # positions that each one sees, its own included; 0 for all before it
    tied: bool = False  # one table embeds the tokens and scores them
    attention: str = "auto"  # or "cudnn", "xla"; auto: by cuDNN in 16 bits on NVIDIA GPUs, elsewhere in plain form
    balance: float = 0.02  # weight of the loss that keeps the load even
    z_loss: float = 0.0  # weight of the loss that keeps the router's numbers small
    lora: LoRA = NO_LORA  # lora.rank=8: adapters beside the matrices of attention, which alone are trained
    # Read by `annotate` only: an unsharded model computes in float32 and keeps every activation.
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"  # of gradients on their way to each other
    remat: str = "auto"

    def __post_init__(self) -> None:
        if not self.head_dim and self.d_model % (2 * self.n_head):
            raise ValueError(f"d_model={self.d_model} does not split into n_head={self.n_head} of even width")
        if self.head_dim < 0 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is no even number above 0, nor 0 for d_model / n_head")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        if not 1 <= self.top_k <= self.n_expert:
            raise ValueError(f"top_k={self.top_k} of n_expert={self.n_expert} cannot be chosen")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window={self.sliding_window} is no number of positions, nor 0 for all")
        self.rope_scaling.check_length(self.block_size)
        self.lora.check(ATTENTION.values())

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.d_model // self.n_head

    @property
    def drops_tokens(self) -> bool:
        """Whether an expert may be asked for more places than it has: at most one for each token of a sequence."""
        return 0 < self.capacity * self.top_k < self.n_expert


# ---- The model -------------------------------------------------------------------------------


# By the names of Hugging Face's; each may have an adapter.
ATTENTION = {f"attention/{ours}": f"self_attn.{ours[0]}_proj" for ours in ("q", "k", "v", "out")}


def linear(d_in: int, d_out: int, *, rngs: nnx.Rngs, lora: LoRA = NO_LORA, path: str = "") -> nnx.Linear:
    normal = nnx.initializers.normal(0.02)
    return lora.linear(ATTENTION.get(path, ""), d_in, d_out, use_bias=False, kernel_init=normal, rngs=rngs)


def rms_norm(config: MoEConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.d_model, epsilon=config.rms_norm_eps, rngs=rngs)


class Attention(nnx.Module):
    """Causal self-attention whose heads share keys and values in groups."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, K = config.d_model, config.head_width
        wide, shared, lora = config.n_head * K, config.n_kv_head * K, config.lora
        self.q = linear(D, wide, rngs=rngs, lora=lora, path="attention/q")
        self.k = linear(D, shared, rngs=rngs, lora=lora, path="attention/k")
        self.v = linear(D, shared, rngs=rngs, lora=lora, path="attention/v")
        self.out = linear(wide, D, rngs=rngs, lora=lora, path="attention/out")

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, at: Any) -> jax.Array:
        config, (B, T, _) = self.config, x_BTD.shape
        heads = lambda x_BTD, name: checkpoint_name(x_BTD, name).reshape(B, T, -1, config.head_width)
        q_BTHK, k_BTHK = heads(self.q(x_BTD), "query_proj"), heads(self.k(x_BTD), "key_proj")  # for remat policies
        v_BTHK = heads(self.v(x_BTD), "value_proj")
        q_BTHK, k_BTHK = (rotate(x, config.rope_theta, at, config.rope_scaling) for x in (q_BTHK, k_BTHK))
        how: dict[str, Any] = {"backend": config.attention, "window": config.sliding_window or None}
        if segments_BT is not None:
            how["bias"] = apart(segments_BT)
        y_BTHK = js.kernels.attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True, **how)
        return checkpoint_name(self.out(y_BTHK.reshape(B, T, -1)), "out_proj")


class Experts(nnx.Module):
    """E parallel feed-forward layers, each applied to the tokens sent to it."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        E, D, F = config.n_expert, config.d_model, config.d_ff
        normal = lambda *shape: nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        self.gate, self.up, self.down = normal(E, D, F), normal(E, D, F), normal(E, F, D)

    def __call__(self, x_EBCD: jax.Array) -> jax.Array:
        """Applies the experts to tokens at their places."""
        gate_EBCF = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", x_EBCD, self.gate[...]), "mlpwi_0")
        up_EBCF = checkpoint_name(jnp.einsum("ebcd,edf->ebcf", x_EBCD, self.up[...]), "mlpwi_1")
        h_EBCF = jax.nn.silu(gate_EBCF) * up_EBCF
        return checkpoint_name(jnp.einsum("ebcf,efd->ebcd", h_EBCF, self.down[...]), "mlpwo")

    def of_all(self, x_BTD: jax.Array, weight_BTn: jax.Array, chosen_BTn: jax.Array) -> jax.Array:
        """The weighted sum over each token's choices, however many tokens an expert has."""
        experts = jnp.arange(len(self.up[...])), self.gate[...], self.up[...], self.down[...]
        return js.parallel.by_experts(sorted_by_expert)((x_BTD, weight_BTn, chosen_BTn), experts)


def sorted_by_expert(tokens: tuple[jax.Array, ...], experts: tuple[jax.Array, ...]) -> jax.Array:
    """The contribution of some consecutive experts: the rows r of each expert are contiguous, those of others last."""
    (x_BTD, weight_BTn, chosen_BTn), (number_e, gate_eDF, up_eDF, down_eFD) = tokens, experts
    x_ND, n, e = x_BTD.reshape(-1, x_BTD.shape[-1]), chosen_BTn.shape[-1], len(number_e)
    expert_s = chosen_BTn.reshape(-1) - number_e[0]
    expert_s = jnp.where((expert_s >= 0) & (expert_s < e), expert_s, e)  # e: of others
    choice_r = jnp.argsort(expert_s)[: len(x_ND) * min(n, e)]  # no token chooses an expert twice
    size_e = jnp.bincount(expert_s, length=e).astype(jnp.int32)
    x_rD = x_ND[choice_r // n]
    gate_rF = checkpoint_name(jax.lax.ragged_dot(x_rD, gate_eDF, size_e), "mlpwi_0")
    up_rF = checkpoint_name(jax.lax.ragged_dot(x_rD, up_eDF, size_e), "mlpwi_1")
    y_rD = checkpoint_name(jax.lax.ragged_dot(jax.nn.silu(gate_rF) * up_rF, down_eFD, size_e), "mlpwo")
    weight_r = jnp.where(expert_s < e, weight_BTn.reshape(-1), 0)[choice_r].astype(x_ND.dtype)
    return jnp.zeros_like(x_ND).at[choice_r // n].add(weight_r[:, None] * y_rD).reshape(x_BTD.shape)


class Shared(nnx.Module):
    """The experts that every token passes."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        D, F = config.d_model, config.n_shared * config.d_ff
        self.gate, self.up, self.down = linear(D, F, rngs=rngs), linear(D, F, rngs=rngs), linear(F, D, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class MoE(nnx.Module):
    """The feed-forward half of a block: a router, and the experts it sends each token to."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.router = linear(config.d_model, config.n_expert, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        self.shared = Shared(config, rngs=rngs) if config.n_shared else None

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The mixture; of each expert the share of the tokens and the mean score; and how large the logits are."""
        logit_BTE = self.router(x_BTD).astype(jnp.float32)
        score_BTE = jax.nn.softmax(logit_BTE)
        weight_BTn, chosen_BTn = jax.lax.top_k(score_BTE, self.config.top_k)
        weight_BTn = weight_BTn / weight_BTn.sum(-1, keepdims=True)
        mix = self.at_places if self.config.capacity else self.experts.of_all
        y_BTD = mix(x_BTD, weight_BTn, chosen_BTn)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        share_E = jax.nn.one_hot(chosen_BTn, self.config.n_expert).mean((0, 1, 2))
        return y_BTD, (share_E, score_BTE.mean((0, 1)), (jax.nn.logsumexp(logit_BTE, -1) ** 2).mean())

    def at_places(self, x_BTD: jax.Array, weight_BTn: jax.Array, chosen_BTn: jax.Array) -> jax.Array:
        """The weighted sum over each token's choices, of those that have a place."""
        place_BTn, token_BEC = self.places(chosen_BTn)
        x_BECD = jax.vmap(lambda x_TD, token_EC: x_TD.at[token_EC].get(mode="fill", fill_value=0))(x_BTD, token_BEC)
        y_EBCD = js.parallel.from_experts(self.experts(js.parallel.to_experts(x_BECD.swapaxes(0, 1))))
        back = lambda y_ECD, chosen_Tn, place_Tn: y_ECD.at[chosen_Tn, place_Tn].get(mode="fill", fill_value=0)
        y_BTnD = jax.vmap(back)(y_EBCD.swapaxes(0, 1), chosen_BTn, place_BTn)
        return jnp.einsum("btn,btnd->btd", weight_BTn.astype(x_BTD.dtype), y_BTnD)

    def places(self, chosen_BTn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each token's place at its experts, C or more where there is none; and the token at each place, or T.

        First choices come before second ones, and earlier tokens before later ones.
        """
        (B, T, n), E = chosen_BTn.shape, self.config.n_expert
        C = math.ceil(self.config.capacity * n * T / E)
        sent_BsE = jax.nn.one_hot(chosen_BTn.swapaxes(1, 2).reshape(B, n * T), E, dtype=jnp.int32)
        place_Bs = ((jnp.cumsum(sent_BsE, axis=1) - 1) * sent_BsE).sum(-1)
        place_BTn = place_Bs.reshape(B, n, T).swapaxes(1, 2)

        def tokens(chosen_Tn: jax.Array, place_Tn: jax.Array) -> jax.Array:
            return jnp.full((E, C), T).at[chosen_Tn, place_Tn].set(jnp.arange(T)[:, None], mode="drop")

        return place_BTn, jax.vmap(tokens)(chosen_BTn, place_BTn)


class Block(nnx.Module):
    """One layer: attention, then the mixture, each read through a norm and added back."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = rms_norm(config, rngs)
        self.moe = MoE(config, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, segments: jax.Array | None = None, positions: Any = 0
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), segments, positions)
        y_BTD, load = self.moe(self.moe_norm(x_BTD))
        return x_BTD + y_BTD, load


class Model(nnx.Module):
    """Tokens in, for each position the scores of the token that comes next out, and how uneven the load is."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        V, D = config.vocab_size, config.d_model
        self.tokens = nnx.Embed(V, D, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.tokens.dtype = None  # computes in the dtype it has at the moment

        @nnx.split_rngs(splits=config.n_layer)
        @nnx.vmap(in_axes=0, out_axes=0)
        def build(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = build(rngs)  # all of them in one module, whose variables have a leading dim of layers
        self.norm = rms_norm(config, rngs)
        if not config.tied:
            self.head = linear(D, V, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, **packed: Any) -> tuple[jax.Array, jax.Array]:
        """The scores, and what the routers cost. E x the sum of share x score of a layer is 1 for an even load.

        Packed texts are kept apart by their `segments` and `positions`, each (B, T).
        """
        if tokens_BT.shape[1] > self.config.block_size:
            raise ValueError(f"{tokens_BT.shape[1]} tokens are more than block_size={self.config.block_size}")
        x_BTD, load = js.scan_layers(self.blocks, self.tokens(tokens_BT), collect=True, **packed)
        share_LE, score_LE, z_L = load
        uneven = self.config.n_expert * (share_LE * score_LE).sum(-1).mean()
        x_BTD = self.norm(x_BTD)
        logits_BTV = self.tokens.attend(x_BTD) if self.config.tied else self.head(x_BTD)
        return logits_BTV, self.config.balance * uneven + self.config.z_loss * z_L.mean()


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: MoEConfig, rngs: nnx.Rngs) -> Model:
    return Model(config, rngs=rngs)


def annotate(model: Model, mesh: Mesh | AbstractMesh) -> None:
    """The stack of blocks, the head and the rest are units; experts are on `expert`, heads and widths on `tensor`."""
    config = model.config
    js.parallel.split(
        model,
        {
            "*/experts/down": ("expert", "tensor", None),
            "*/experts/*": ("expert", None, "tensor"),
            "*/attention/out/kernel": ("tensor", None),
            "*/attention/*/kernel": (None, "tensor"),
        }
        | ({} if config.tied else {"head/kernel": (None, "tensor")})
        | (
            {"*/shared/down/kernel": ("tensor", None), "*/shared/*/kernel": (None, "tensor")} if config.n_shared else {}
        ),
    )
    precision = None
    if config.compute_dtype != "float32":
        precision = js.MixedPrecision(param_dtype=config.compute_dtype, reduce_dtype=config.reduce_dtype)
    js.fully_shard(
        model.blocks, mesh=mesh, mixed_precision=precision, remat=config.remat, placement=js.PlacementPolicy(stacked=1)
    )
    if not config.tied:
        js.fully_shard(model.head, mesh=mesh, mixed_precision=precision, reshard_after_forward=False)
    js.fully_shard(model, mesh=mesh, mixed_precision=precision)


def loss_fn(model: Model, batch: Batch) -> Any:
    """Mean cross entropy in nats per token over the whole (global) batch, and what the routers cost."""
    logits_BTV, cost = model(batch["inputs"], **segments_in(batch))
    loss = token_loss(logits_BTV, batch)
    if isinstance(loss, js.WeightedMean):  # of conversations: the cost of a microbatch counts by its tokens to learn
        return js.WeightedMean(loss.total + cost * loss.weight, loss.weight)
    return loss + cost


def num_active(config: MoEConfig) -> int:
    """Parameters that a token passes through: of the experts `top_k`, and no table of tokens."""
    D, layers = config.d_model, config.n_layer
    attention = 2 * D * config.head_width * (config.n_head + config.n_kv_head)
    experts = (config.top_k + config.n_shared) * 3 * D * config.d_ff + D * config.n_expert
    return layers * (attention + experts + 2 * D) + D + D * config.vocab_size


def flops(recipe: Recipe) -> tuple[float, str]:
    """Arithmetic of a step: 6 x active parameters x tokens."""
    active, tokens = num_active(recipe.model), recipe.batch_size * recipe.sequence_length
    times = 4 if recipe.model.lora.rank else 6  # what is frozen has no gradient
    return float(times) * active * tokens, f"{times} x {active:,} active parameters x {tokens:,} tokens"


hf_types = ("mixtral",)  # of Hugging Face's models


def hf_names(config: MoEConfig) -> Mapping[str, str | Stored]:
    """The name of each parameter in Hugging Face's MixtralForCausalLM, which stores each expert by itself."""
    if config.n_shared:
        raise ValueError(f"Mixtral has no shared experts, and n_shared={config.n_shared}")
    if config.drops_tokens:
        warnings.warn(
            f"Mixtral drops no token, and capacity={config.capacity} drops those for which an expert has no place:"
            f" their logits differ. capacity=0 and {config.n_expert / config.top_k:g} drop none.",
            stacklevel=1,
        )
    names: dict[str, str | Stored] = {
        "tokens/embedding": "model.embed_tokens.weight",
        "norm/scale": "model.norm.weight",
    }
    norms = {"attention_norm": "input_layernorm", "moe_norm": "post_attention_layernorm"}
    linears = ATTENTION | {"moe/router": "block_sparse_moe.gate"}
    experts = {"gate": "w1", "up": "w3", "down": "w2"}
    for layer in range(config.n_layer):
        block, there = f"blocks/{layer}", f"model.layers.{layer}"
        for ours, theirs in norms.items():
            names[f"{block}/{ours}/scale"] = f"{there}.{theirs}.weight"
        for ours, theirs in linears.items():
            names[f"{block}/{ours}/kernel"] = Stored(f"{there}.{theirs}.weight", transpose=True)
        for ours, theirs in experts.items():
            each = [f"{there}.block_sparse_moe.experts.{expert}.{theirs}.weight" for expert in range(config.n_expert)]
            names[f"{block}/moe/experts/{ours}"] = Stored(*each, transpose=True, stack=0)
    if not config.tied:
        names["head/kernel"] = Stored("lm_head.weight", transpose=True)
    return checked_names(names, config, hf_types)


def hf_config(config: MoEConfig) -> dict[str, Any]:
    """The contents of `config.json` for such a model."""
    return config_json(config, hf_types)


# ---- Recipes: a whole run as a value --------------------------------------------------------------


def tiny() -> Recipe:
    """2.3M parameters over bytes, 0.9M of them for each token: trains on two CPU cores in minutes."""
    return Recipe(
        model=MoEConfig(
            vocab_size=256,
            n_layer=3,
            n_head=4,
            n_kv_head=2,
            d_model=128,
            d_ff=256,
            rope_theta=1e4,
        ),
        sequence_length=128,
        batch_size=32,
        num_steps=400,
        learning_rate=3e-3,
        warmup_steps=50,
        eval_every=100,
        eval_sequences=512,
    )


def mixtral_8x7b() -> Recipe:
    """The size of Mixtral 8x7B: 46.7B parameters, 12.9B of them for each token."""
    return Recipe(
        model=MoEConfig(compute_dtype="bfloat16", remat="full"),
        sequence_length=4096,
        batch_size=1024,
        accumulate=8,
        num_steps=100_000,
        learning_rate=3e-4,
        warmup_steps=2000,
        eval_every=1000,
    )


def deepseek_moe_16b() -> Recipe:
    """The size of DeepSeekMoE 16B: 16.9B parameters, 2.6B of them for each token; all layers have experts."""
    return Recipe(
        model=MoEConfig(
            vocab_size=102_400,
            n_layer=28,
            n_head=16,
            n_kv_head=16,
            d_model=2048,
            d_ff=1408,
            n_expert=64,
            top_k=6,
            n_shared=2,
            balance=0.001,
            z_loss=0.001,
            rope_theta=1e4,
            compute_dtype="bfloat16",
            remat="full",
        ),
        sequence_length=4096,
        batch_size=2048,
        accumulate=8,
        num_steps=100_000,
        learning_rate=4.2e-4,
        warmup_steps=2000,
        eval_every=1000,
    )


RECIPES = {"tiny": tiny, "mixtral_8x7b": mixtral_8x7b, "deepseek_moe_16b": deepseek_moe_16b}
