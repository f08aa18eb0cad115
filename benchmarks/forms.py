"""A model file for benchmarks: one GPT in the usual forms of deep models, in nnx and in Linen.

The sizes are those of docs/schedules.md: six blocks of width 2048, sequences of 1024 tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import jshard as js
from jshard.train import Recipe
from models import gpt, linen_gpt

FORMS = "loop", "units", "scan_layers", "nnx.scan", "Linen", "nn.scan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gpt.GPTConfig):
    """Size and form of a GPT: `form` is one of `FORMS`.

    "loop" annotates block by block, "units" is the same model with the one-line annotation.
    """

    form: str = "loop"


class Scanning(gpt.GPT):
    """The GPT with Flax's own loop over its stacked blocks."""

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Scores of the next token."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x_BTD: jax.Array, block: gpt.Block) -> jax.Array:
            return block(x_BTD)

        x_BTD = self.dropout(self.tokens(tokens_BT)).astype(jnp.float32)  # as the blocks give it back
        return self.head(self.norm(run(x_BTD, self.blocks)))


class Layer(nn.Module):
    """A Linen block for `nn.scan`."""

    config: Any

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        """The carried value, and nothing to collect."""
        return linen_gpt.Block(self.config, name="block")(x_BTD), None


class LinenGPT(nn.Module):
    """A GPT in Linen, its layers one after another or in `nn.scan`."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Scores of the next token."""
        config = self.config
        x_BTD = nn.Embed(config.vocab_size, config.d_model, name="tokens")(tokens_BT)
        if config.form == "nn.scan":
            keys: Any = {"params": True, "dropout": True}
            stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs=keys, length=config.n_layer)
            x_BTD = stack(config, name="layers")(x_BTD.astype(jnp.float32), None)[0]
        else:
            for layer in range(config.n_layer):
                x_BTD = Layer(config, name=f"layer_{layer}")(x_BTD, None)[0]
        return nn.Dense(config.vocab_size, use_bias=False, name="head")(nn.LayerNorm(name="norm")(x_BTD))


def build(config: Config, rngs: nnx.Rngs) -> nnx.Module | nn.Module:
    """The model in its form."""
    if config.form in ("Linen", "nn.scan"):
        return LinenGPT(config)
    scan = config.form in ("scan_layers", "nnx.scan")
    kind = Scanning if config.form == "nnx.scan" else gpt.GPT
    return kind(dataclasses.replace(config, scan=scan), rngs=rngs)


def annotate(model: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Block by block as in `models/gpt.py`, or with the usual one-line annotation."""
    config: Config = model.config
    low = config.compute_dtype
    # What a loop of Flax's carries keeps its dtype.
    output = "float32" if config.form in ("nnx.scan", "nn.scan") else None
    precision = (
        None if low == "float32" else js.MixedPrecision(param_dtype=low, reduce_dtype="float32", output_dtype=output)
    )
    if config.form in ("Linen", "nn.scan", "units"):
        units = gpt.Block if config.form == "units" else Layer
        return js.fully_shard(model, mesh=mesh, units=units, remat=config.remat, mixed_precision=precision)
    if config.form != "nnx.scan":
        return gpt.annotate(model, mesh)
    js.fully_shard(
        model.blocks, mesh=mesh, remat=config.remat, mixed_precision=precision, placement=js.PlacementPolicy(stacked=1)
    )
    js.fully_shard(model.head, mesh=mesh, mixed_precision=precision, reshard_after_forward=False)
    return js.fully_shard(model, mesh=mesh, mixed_precision=precision)


loss_fn = gpt.loss_fn


def large() -> Recipe:
    """0.3B parameters, one sequence for each of 64 devices."""
    config = Config(
        vocab_size=512,
        n_layer=6,
        n_head=16,
        d_model=2048,
        d_ff=8192,
        tied=False,
        positions="rotary",
        compute_dtype="bfloat16",
        remat="full",
    )
    return Recipe(
        model=config, sequence_length=1024, batch_size=64, num_steps=1000, learning_rate=1e-3, warmup_steps=100
    )


def tiny() -> Recipe:
    """A small size, to check that it works."""
    config = dataclasses.replace(large().model, n_layer=2, d_model=128, d_ff=512, n_head=4)
    return dataclasses.replace(large(), model=config, sequence_length=128)


RECIPES = {"large": large, "tiny": tiny}
