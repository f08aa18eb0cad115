"""A user's own file of a Linen model, for tests: it trains in seconds, with dropout and BatchNorm if asked for."""

import dataclasses

import jshard as js
from jshard.train import Recipe
from tests.linen_models import Block, Decoder


@dataclasses.dataclass(frozen=True)
class Config:
    depth: int = 2
    rate: float = 0.0
    norm: bool = False
    remat: str = "none"


def build(config, rngs):
    return Decoder(config.depth, config.rate, config.norm)


def annotate(model, mesh):
    return js.fully_shard(model, mesh=mesh, units=Block)


def micro() -> Recipe:
    """Text in ASCII, as the vocabulary has 128 tokens."""
    return Recipe(
        model=Config(),
        sequence_length=4,
        batch_size=16,
        num_steps=6,
        learning_rate=1e-2,
        warmup_steps=1,
        eval_every=3,
        eval_sequences=16,
        checkpoint_every=3,
    )


RECIPES = {"micro": micro}
