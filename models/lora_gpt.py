"""A pretrained GPT with small adapters (LoRA): only the adapters are trained, and the rest is frozen.

    jshard train gpt --data corpus                                             # a base, runs/gpt-tiny
    jshard train lora_gpt --data another --init-from runs/gpt-tiny
    jshard train lora_gpt --recipe gpt2_small --data another --init-from gpt2/model.safetensors

The model is that of `gpt.py`, with adapters of rank R beside the feed-forward layers of every block:
`h = x W + x A B`, where A has R columns and B, which starts at zero, R rows (Hu et al. 2021, arXiv 2106.09685). `wrt`
selects what is trained; frozen weights are only gathered, without gradient, reduce-scatter or optimizer state.
"""

from __future__ import annotations

import dataclasses

import gpt
from flax import nnx

from jshard.train import Recipe

annotate, loss_fn, hf_names, hf_types = gpt.annotate, gpt.loss_fn, gpt.hf_names, gpt.hf_types
wrt = nnx.LoRAParam


@dataclasses.dataclass(frozen=True)
class LoRAConfig(gpt.GPTConfig):
    """Sizes of the model, and the rank of its adapters."""

    rank: int = 8


def build(config: LoRAConfig, rngs: nnx.Rngs) -> gpt.GPT:
    """The GPT, with an adapter beside each feed-forward layer; the paths of its own parameters do not change."""
    model = gpt.build(config, rngs)
    for block in model.blocks:
        block.mlp.up = with_adapter(block.mlp.up, config.rank, rngs)
        block.mlp.down = with_adapter(block.mlp.down, config.rank, rngs)
    return model


def with_adapter(layer: nnx.Linear, rank: int, rngs: nnx.Rngs) -> nnx.LoRALinear:
    """The layer with an adapter added."""
    adapted = nnx.LoRALinear(layer.in_features, layer.out_features, lora_rank=rank, rngs=rngs)
    adapted.kernel, adapted.bias = layer.kernel, layer.bias
    return adapted


def tiny() -> Recipe:
    """Adapters for the base that `jshard train gpt` trains."""
    return _over(gpt.tiny(), num_steps=200, warmup_steps=20)


def gpt2_small() -> Recipe:
    """Adapters for GPT-2 with 124M parameters."""
    return _over(gpt.gpt2_small(), num_steps=2000, warmup_steps=100)


def _over(base: Recipe, **settings: int) -> Recipe:
    config = LoRAConfig(**{field.name: getattr(base.model, field.name) for field in dataclasses.fields(base.model)})
    return dataclasses.replace(base, model=config, learning_rate=1e-3, **settings)


RECIPES = {"tiny": tiny, "gpt2_small": gpt2_small}
