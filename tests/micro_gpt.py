"""A user's own model file, for tests: the GPT of models/gpt.py with a recipe that trains in seconds."""

import dataclasses
from pathlib import Path

from jshard.train import Recipe, load_model_file

MODELS = Path(__file__).parents[1] / "models"

_gpt = load_model_file(MODELS / "gpt.py")
build, annotate, loss_fn = _gpt.build, _gpt.annotate, _gpt.loss_fn


def micro() -> Recipe:
    """Two blocks of width 64 over bytes."""
    _, tiny = _gpt.recipe("tiny")
    return dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, block_size=32, n_layer=2, n_head=2, d_model=64, d_ff=128),
        sequence_length=32,
        batch_size=16,
        num_steps=4,
        warmup_steps=2,
        eval_every=3,
        eval_sequences=32,
    )


RECIPES = {"micro": micro}

USERS_FILE = f"""\
import sys
sys.path.append({str(MODELS.parent)!r})
from tests.micro_gpt import RECIPES, annotate, build, loss_fn
"""  # the same as a file of a user's, anywhere
