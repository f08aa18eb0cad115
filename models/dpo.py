"""Preferences learned directly (DPO, Rafailov et al. 2023, arXiv 2305.18290), by adapters of a Llama.

    jshard train dpo --init-from qwen3/ --set tokenizer=qwen3/ --set pairs=pairs.jsonl

A line of the pairs has a reply that is preferred and one that is not, each with the conversation before it:

    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}

Only the adapters are trained. The frozen reference is the same model without them, so there is no second copy of the
weights. Rewards are in nats, times beta: by how much likelier a reply is to the model than to the reference. The loss
of a pair is -log sigmoid(chosen reward - rejected reward).

    B  pairs of a batch    T  position in sequence    V  vocabulary
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import llama
import optax

from jshard.data import Data, HuggingFaceTokenizer, load_pairs
from jshard.train import Batch, LoRA, Recipe, without_adapters

build, annotate = llama.build, llama.annotate
hf_types, hf_names, hf_config = llama.hf_types, llama.hf_names, llama.hf_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(llama.LlamaConfig):
    """A Llama, and how strongly it is held to the reference."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lora.rank:
            raise ValueError("lora.rank=0: the reference is the model without its adapters, and there are none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPORecipe(Recipe):
    """A recipe, and its data.

    Attributes:
        pairs: a file of pairs, JSON lines or Parquet.
        tokenizer: the folder with the tokenizer and its chat template.
    """

    pairs: str
    tokenizer: str


def data(recipe: DPORecipe) -> Data:
    tokenizer = HuggingFaceTokenizer(recipe.tokenizer)
    return load_pairs(recipe.pairs, sequence_length=recipe.sequence_length, tokenizer=tokenizer)


def log_likelihoods(model: llama.Llama, batch: Batch, reply: str) -> jax.Array:
    """Of each reply, given the conversation before it, in nats: (B,)."""
    logits_BTV = model(batch[f"{reply}_inputs"]).astype(jnp.float32)
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch[f"{reply}_targets"])
    return -(loss_BT * batch[f"{reply}_weights"]).sum(-1)


def loss_fn(model: llama.Llama, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean over the pairs; and in how many the model prefers the chosen reply, and by how much."""
    config = model.config
    assert isinstance(config, DPOConfig)
    reference = without_adapters(model)
    rewards = {}
    for reply in ("chosen", "rejected"):
        gain_B = log_likelihoods(model, batch, reply) - log_likelihoods(reference, batch, reply)
        rewards[reply] = config.beta * gain_B
    margin_B = rewards["chosen"] - rewards["rejected"]
    metrics = {"preferred": (margin_B > 0).mean(), "margin": margin_B.mean()}
    return -jax.nn.log_sigmoid(margin_B).mean(), metrics


def tiny() -> DPORecipe:
    """Adapters over a tiny Llama; with --init-from the sizes are those of the weights."""
    config: dict[str, Any] = {}
    for field in dataclasses.fields(llama.LlamaConfig):
        config[field.name] = getattr(llama.tiny().model, field.name)
    config["lora"] = LoRA(rank=8)
    return DPORecipe(
        model=DPOConfig(**config),
        sequence_length=128,
        batch_size=16,
        num_steps=100,
        learning_rate=5e-4,
        warmup_steps=10,
        weight_decay=0.0,
        eval_every=50,
        eval_sequences=64,
        pairs="pairs.jsonl",
        tokenizer="tokenizer.json",
    )


RECIPES = {"tiny": tiny}
