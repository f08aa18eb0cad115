"""Text generation: the prompt is read at once, then one token at a time, with cached keys and values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jshard._types import PyTree
from jshard.data import Data
from jshard.engine.context import global_view
from jshard.errors import ShardingError
from jshard.plans.mesh import CONTEXT, data_degree, degree
from jshard.recipes.model_file import ModelFile, next_token_loss
from jshard.recipes.recipe import Recipe
from jshard.recipes.step import inference_view

_PROMPT_TOKENS = 32

Cache = PyTree
"""What a model keeps of the tokens before: a pytree of arrays, and None before the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """How the next token is chosen.

    Attributes:
        temperature: divides the scores; 0 takes the likeliest token.
        top_k: draws from this many of the likeliest tokens; 0 for all.
        seed: the seed of the draw.
    """

    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.top_k < 0:
            raise ShardingError(
                "No token can be drawn with these settings.",
                where=f"--temperature {self.temperature} --top-k {self.top_k}",
                why="both must be 0 or more; temperature 0 takes the likeliest token, and top-k 0 sets no limit.",
                do="--temperature 0.8",
            )

    def token(self, scores_V: jax.Array, number: ArrayLike) -> jax.Array:
        """Returns the token at a position of the text."""
        # At temperature 0: the division below is not possible.
        if not self.temperature:
            return scores_V.argmax().astype(jnp.int32)
        # Otherwise all take part, and there is nothing to cut.
        if 0 < self.top_k < scores_V.size:
            highest_K, _ = jax.lax.top_k(scores_V, self.top_k)
            scores_V = jnp.where(scores_V < highest_K[-1], -jnp.inf, scores_V)
        # By the position: the same token is drawn whether it is the first of a window or continues one.
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        return jax.random.categorical(key, scores_V / self.temperature).astype(jnp.int32)


class Sampler:
    """Continues texts: one program reads the prompt, another adds one token. All processes call it.

    With a method `decode(tokens, past, at)` of the model, each token uses cached results of those before it (for
    attention, keys and values); any other model runs over the whole window for each token. A seed gives the same text
    on every mesh, up to rounding: every data shard generates the same one.

    Args:
        model: from tokens (batch, length) to scores (batch, length, vocabulary); annotated, its arrays on the mesh.
        mesh: the mesh of the model.
        window: length of the sequences that it reads. When a text fills it, the last half is read again.
        num_ids: ids that may be drawn, from 0 on.
        draw: how the next token is chosen.

    Examples:
        >>> sampler = Sampler(model, mesh, window=128, num_ids=256, draw=Draw(temperature=0.0))
        >>> sampler.continued(np.array([1, 2, 3]), 2)
        array([  1,   2,   3, 201,  17], dtype=int32)
    """

    def __init__(self, model: nnx.Module, mesh: Mesh, *, window: int, num_ids: int, draw: Draw) -> None:
        # The arrays are arguments of the programs: closed over, they would be constants in them.
        graphdef, state = nnx.split(inference_view(model))
        self._leaves, tree = jax.tree.flatten(state)
        self._window = window
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        num_rows = data_degree(mesh)  # one for each data shard, as a batch is split over them

        def scores_of(
            leaves: list[jax.Array], tokens_T: jax.Array, past: Cache, position: ArrayLike
        ) -> tuple[jax.Array, Cache]:
            model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
            tokens_BT = jnp.broadcast_to(tokens_T, (num_rows, tokens_T.size))
            view = contextlib.nullcontext()
            if degree(mesh, CONTEXT) > 1:  # the axis splits a sequence, and one token does not split
                view = global_view()
            with view:
                scores_BTV, past = _decode(model, tokens_BT, past, position)
            # All rows are equal. A model may have more rows than the tokenizer has ids.
            return scores_BTV[0, :, :num_ids].astype(jnp.float32), past

        def begin(
            leaves: list[jax.Array], tokens_T: jax.Array, length: ArrayLike, number: ArrayLike
        ) -> tuple[jax.Array, Cache]:
            scores_TV, past = scores_of(leaves, tokens_T, None, 0)
            last_V = jax.lax.dynamic_index_in_dim(scores_TV, length - 1, keepdims=False)
            return draw.token(last_V, number), past

        def go_on(
            leaves: list[jax.Array], past: Cache, token: jax.Array, position: ArrayLike, number: ArrayLike
        ) -> tuple[jax.Array, Cache]:
            scores_TV, past = scores_of(leaves, token[None], past, position)
            return draw.token(scores_TV[0], number), past

        self._begin = jax.jit(begin, out_shardings=(self._everywhere, None))
        self._go_on = go_on

    def continued(self, prompt: np.ndarray, num_tokens: int) -> np.ndarray:
        """Returns the prompt of at least one token, and so many more."""
        text = [int(token) for token in prompt]
        end = len(text) + num_tokens
        window = text[-self._window :]
        step = None
        while len(text) < end:
            # Always one length, so that one program reads every window.
            padded = np.zeros(self._window, np.int32)  # a decoder does not see later tokens
            padded[: len(window)] = window
            token, past = self._begin(self._leaves, padded, np.int32(len(window)), np.int32(len(text)))
            text.append(int(token))
            if step is None:  # the cache of every window has the same shardings
                step = self._step_for(past)
            # Until the window is full, or the text is complete.
            last_position = min(self._window, len(window) + end - len(text))
            for position in range(len(window), last_position):
                token, past = step(self._leaves, past, token, np.int32(position), np.int32(len(text)))
                text.append(int(token))
            # Half of it, so that as many tokens follow before the window is read again.
            window = text[-max(1, self._window // 2) :]
        return np.array(text, np.int32)

    def _step_for(self, past: Cache) -> Callable[..., tuple[jax.Array, Cache]]:
        """Compiles the step for one token, which reuses the memory of the cache in place.

        Its results have the shardings of its arguments: with others it would be compiled a second time.
        """
        shardings = jax.tree.map(lambda x: x.sharding, past)
        return jax.jit(self._go_on, donate_argnums=1, out_shardings=(self._everywhere, shardings))


def _decode(model: Any, tokens_BT: jax.Array, past: Cache, position: ArrayLike) -> tuple[jax.Array, Cache]:
    """Returns the scores of the tokens, and their cache: without `decode` the tokens themselves."""
    if hasattr(model, "decode"):
        return model.decode(tokens_BT, past, position)
    if past is None:
        return model(tokens_BT), tokens_BT
    # Later positions of the window have padding, which a decoder does not see.
    past = jax.lax.dynamic_update_slice_in_dim(past, tokens_BT, position, axis=1)
    return jax.lax.dynamic_slice_in_dim(model(past), position, 1, axis=1), past


def is_decoder(model_file: ModelFile, model: nnx.Module) -> bool:
    """Returns whether a model is known to score next tokens: it has `decode`, or its loss is that of the next token."""
    return hasattr(model, "decode") or model_file.loss_fn is next_token_loss


def sample_text(
    model_file: ModelFile, recipe: Recipe, model: nnx.Module, data: Data, mesh: Mesh, *, num_tokens: int
) -> str | None:
    """Returns the first tokens of the held-out text and how the model continues it. All processes call it.

    Args:
        model_file: of the model.
        recipe: its sequences are the window of the sample, and its seed is that of the draw.
        model: with the trained parameters.
        data: its tokenizer reads the tokens back, and its held-out text begins the sample.
        mesh: the mesh of the model.
        num_tokens: tokens to write after the prompt.

    Returns:
        Prompt and continuation as text; None where the data have no tokenizer or no inputs, or the model is not known
        to be a decoder.
    """
    if data.tokenizer is None or not is_decoder(model_file, model):
        return None
    first = data.held_out[0]
    if "inputs" not in first:
        return None  # samples of another form, such as pairs
    sampler = Sampler(
        model,
        mesh,
        window=recipe.sequence_length,
        num_ids=data.tokenizer.vocab_size,
        draw=Draw(seed=recipe.seed),
    )
    prompt = np.asarray(first["inputs"])[:_PROMPT_TOKENS]
    return data.tokenizer.decode(sampler.continued(prompt, num_tokens))
