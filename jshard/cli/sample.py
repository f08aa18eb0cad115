"""`jshard sample RUN`: text that the model of a run writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
import tyro

from jshard.cli._arguments import Count, parse
from jshard.cli._stored import RunArgs, StoredRun
from jshard.cli._training import printable_text
from jshard.errors import ShardingError
from jshard.train.sampling import Draw, Sampler, is_decoder


@dataclasses.dataclass(frozen=True)
class SampleArgs(RunArgs):
    """Prints a text and how the model of a run goes on with it.

    The text of a seed is the same on every mesh, up to rounding. Exit codes: 0 done, 1 the checkpoint is damaged, 2
    the request was wrong.
    """

    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "\n"
    """What the text begins with."""
    tokens: Count = 256
    """Tokens to write after it."""
    temperature: float = 0.8
    """Divides the scores of the tokens before one is drawn; 0 takes the likeliest."""
    top_k: Count = 0
    """Draw from so many of the likeliest tokens; 0 for all."""
    seed: Count = 0
    """Of the draw."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard sample`."""
    args = parse(SampleArgs, argv, command="jshard sample")
    if (code := args.started("sample", argv)) is not None:
        return code
    draw = Draw(temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    stored = StoredRun.read(args.path, model=args.model)
    tokenizer = stored.tokenizer(args.tokenizer)
    (prompt,) = tokenizer.encode_batch([args.prompt.encode()])
    if not prompt.size:
        raise ShardingError(
            "The prompt is empty.",
            where="--prompt ''",
            why="the model scores the token after a text, which has at least one.",
            do='--prompt "Once"',
        )
    mesh = args.open_mesh()
    held, _ = stored.held(mesh)
    if not is_decoder(stored.model_file, held.model):
        raise ShardingError(
            "The model is not known to continue text.",
            where=str(stored.model_file.path),
            why="it has no method `decode`, and a loss of its own: its scores may be of other tokens than the next.",
            do="def decode(self, tokens, past, at): ...  # in the model; `jshard init gpt` copies an example",
        )
    window, num_ids = stored.recipe.sequence_length, tokenizer.vocab_size
    text = Sampler(held.model, mesh, window=window, num_ids=num_ids, draw=draw).continued(prompt, args.tokens)
    if jax.process_index() == 0:
        print(printable_text(tokenizer.decode(np.asarray(text))))
    return 0
