"""A model file whose run can be put to sleep: a small GPT over bytes, for `benchmarks/faults.py` and the tests.

Once the file that the variable SLEEP names holds "1 data" or "1 main", process 1 sleeps for ever: where a sample is
read, or in the main thread after a step.
"""

import dataclasses
import os
import time
from pathlib import Path

from jshard.data import Data, load_text
from jshard.launch import step_done
from jshard.train import Recipe, load_model_file, loop

_gpt = load_model_file(Path(__file__).parents[1] / "models" / "gpt.py")
build, annotate, loss_fn = _gpt.build, _gpt.annotate, _gpt.loss_fn


def micro() -> Recipe:
    """One block of width 64."""
    _, tiny = _gpt.recipe("tiny")
    return dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, block_size=32, n_layer=1, n_head=2, d_model=64, d_ff=128),
        sequence_length=32,
        batch_size=16,
        num_steps=100_000,
        warmup_steps=2,
        eval_every=100_000,
        eval_sequences=32,
        checkpoint_every=20,
    )


RECIPES = {"micro": micro}


def data(recipe: Recipe) -> Data:
    """This file, as samples that may take for ever."""
    loop.step_done = _sleepy_step_done
    text = load_text([Path(__file__)], sequence_length=recipe.sequence_length)
    return dataclasses.replace(text, train=Sleepy(text.train))


class Sleepy:
    """Samples that may take for ever."""

    def __init__(self, source):
        self._source = source

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        fall_asleep("data")
        return self._source[index]


def fall_asleep(where: str) -> None:
    """Sleeps for ever, if the file says so."""
    asked = Path(os.environ.get("SLEEP", os.devnull))
    if asked.is_file() and asked.read_text() == f"{os.environ.get('JAX_PROCESS_ID', '0')} {where}":
        time.sleep(1e6)


def _sleepy_step_done(step: int) -> None:
    step_done(step)
    fall_asleep("main")
