"""A model file that compiles at once and then trains for a while: an embedding, and samples that take their time."""

import dataclasses
import time
from pathlib import Path

import jax
from flax import nnx

import jshard as js
from jshard.data import load_text
from jshard.train import Recipe


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 8
    sample_s: float = 0.02


class Bigram(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.embed(tokens))


def build(config: Config, rngs: nnx.Rngs) -> Bigram:
    return Bigram(config, rngs)


def annotate(model: Bigram, mesh) -> None:
    js.fully_shard(model, mesh=mesh)


class Slow:
    def __init__(self, source, sample_s):
        self._source, self._sample_s = source, sample_s

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        time.sleep(self._sample_s)
        return self._source[index]


def data(recipe):
    text = load_text([Path(__file__)], sequence_length=recipe.sequence_length)
    return dataclasses.replace(text, train=Slow(text.train, recipe.model.sample_s))


RECIPES = {
    "slow": lambda: Recipe(
        model=Config(),
        sequence_length=16,
        batch_size=8,
        num_steps=60,
        learning_rate=1e-2,
        warmup_steps=2,
        eval_every=1000,
        eval_sequences=4,
        checkpoint_every=10,
    )
}
