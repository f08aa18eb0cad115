"""A model file whose run falls asleep: the micro GPT, with samples that take for ever once a file says so.

SLEEP names the file, which holds the number of the process and where: "1 data", "0 main".
"""

import os
import time
from pathlib import Path

from jshard.data import Data, load_text
from jshard.launch import stall
from jshard.train import load_model_file

_micro = load_model_file(Path(__file__).parents[1] / "micro_gpt.py")
build, annotate, loss_fn, RECIPES = _micro.build, _micro.annotate, _micro.loss_fn, _micro.recipes


def fall_asleep(where):
    """For ever, if the file says so."""
    if Path(os.environ["SLEEP"]).is_file() and Path(os.environ["SLEEP"]).read_text() == where:
        time.sleep(1e6)


class Sleepy:
    """Samples that may take for ever."""

    def __init__(self, source):
        self._source = source

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        fall_asleep(f"{os.environ.get('JAX_PROCESS_ID', '0')} data")
        return self._source[index]


def sleepy_step_done(step):
    """In the main thread, in place of what notes a step."""
    _step_done(step)
    fall_asleep(f"{os.environ.get('JAX_PROCESS_ID', '0')} main")


def data(recipe):
    from jshard.train import loop

    loop.step_done = sleepy_step_done
    text = load_text([Path(__file__)], sequence_length=recipe.sequence_length)
    return Data(
        train=Sleepy(text.train),
        held_out=text.held_out,
        description=text.description,
        fingerprint=text.fingerprint,
        tokens_per_sample=text.tokens_per_sample,
    )


_step_done = stall.step_done
