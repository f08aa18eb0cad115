"""A model file for runs in several processes: the micro GPT on text whose samples record when they are read."""

import os
from pathlib import Path

from jshard.data import Data, load_text
from jshard.train import load_model_file

_micro = load_model_file(Path(__file__).parents[1] / "micro_gpt.py")
build, annotate, loss_fn, RECIPES = _micro.build, _micro.annotate, _micro.loss_fn, _micro.recipes


class Spied:
    """Writes the number of every sample that this process reads into a file of its own."""

    def __init__(self, source):
        self._source = source
        self._log = Path(os.environ["SPY_FOLDER"], f"{os.environ.get('JAX_PROCESS_ID', '0')}.txt")

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        with self._log.open("a") as log:
            log.write(f"{index}\n")
        return self._source[index]


def data(recipe):
    text = load_text([Path(__file__)], sequence_length=recipe.sequence_length)
    return Data(
        train=Spied(text.train),
        held_out=text.held_out,
        description=text.description,
        fingerprint=text.fingerprint,
        tokens_per_sample=text.tokens_per_sample,
    )
