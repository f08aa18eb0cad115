"""Text that a trained model writes, for the eye."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jshard.data import Data, local_rows
from jshard.plans.mesh import data_degree, shard_batch
from jshard.recipes.model_file import ModelFile
from jshard.recipes.step import inference_view

_PROMPT_TOKENS = 32


def sample_text(model_file: ModelFile, model: Any, data: Data, mesh: Mesh, *, num_tokens: int, seed: int) -> str | None:
    """The first tokens of the held-out text and how the model goes on.

    Every data shard writes one continuation, as a batch of one cannot be split; the first is taken. All processes
    call it.

    Args:
        model_file: its `generate` does the work.
        model: with the trained parameters.
        data: its tokenizer reads the tokens back, and its held-out text begins the sample.
        mesh: the mesh of the model.
        num_tokens: tokens to write after the prompt.
        seed: of the draw.

    Returns:
        Prompt and continuation as text; None where the file has no `generate` or the data no tokenizer.
    """
    if model_file.generate is None or data.tokenizer is None:
        return None
    start = np.asarray(data.held_out[0]["inputs"])[:_PROMPT_TOKENS]
    rows = local_rows(data_degree(mesh), mesh)
    prompts = shard_batch(np.tile(start, (len(rows), 1)).astype(np.int32), mesh)
    text = model_file.generate(inference_view(model), prompts, num_tokens, key=jax.random.key(seed))
    text = text if jax.process_count() == 1 else multihost_utils.process_allgather(text, tiled=True)
    return data.tokenizer.decode(np.asarray(text)[0])
