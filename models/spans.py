"""Text as bytes with spans removed: the data of the T5 paper (arXiv 1910.10683), for the model file `t5.py`.

A model reads the remaining text and writes the removed spans; both have the same sentinel in place of a span. This is
not a model file: if you copy `t5.py`, copy `spans.py` into the same folder, where `jshard train` looks for a model
file's imports.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jshard.data import Data, Source, load_text
from jshard.train import Recipe

PAD, END, FIRST_BYTE = 0, 1, 3  # token ids as in ByT5: byte b is b + 3; the last ones of the vocabulary are sentinels


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanRecipe(Recipe):
    """A recipe whose `sequence_length` counts the bytes of text in a sample, before spans are removed."""

    noise: float = 0.15  # the share that is removed
    mean_span: float = 3.0  # bytes in a span, on average


def num_spans(length: int, recipe: SpanRecipe) -> tuple[int, int]:
    """The number of removed tokens of a text, and of spans."""
    num_noise = min(max(round(length * recipe.noise), 1), length - 1)
    return num_noise, min(max(round(num_noise / recipe.mean_span), 1), num_noise, length - num_noise)


def lengths(recipe: SpanRecipe) -> tuple[int, int]:
    """Tokens of a sample's inputs and targets: the remaining or removed text, a sentinel per span, and an end."""
    num_noise, spans = num_spans(recipe.sequence_length, recipe)
    return recipe.sequence_length - num_noise + spans + 1, num_noise + spans + 1


def pieces(total: int, number: int, rng: np.random.Generator) -> np.ndarray:
    """Cuts `total` tokens at random into this many pieces of at least one; returns their ends."""
    return np.append(np.sort(rng.choice(total - 1, number - 1, replace=False)) + 1, total)


def corrupt(text: np.ndarray, recipe: SpanRecipe, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs: the text with a sentinel for each span. Targets: each sentinel, followed by its span."""
    num_noise, spans = num_spans(text.size, recipe)
    kept, noise = pieces(text.size - num_noise, spans, rng), pieces(num_noise, spans, rng)
    # Kept and removed stretches alternate: after the n-th kept one comes the n-th removed one.
    starts, ends = kept + np.append(0, noise[:-1]), kept + noise
    inputs, targets = [], []
    for span, (start, end) in enumerate(zip(starts, ends, strict=True)):
        sentinel = [recipe.model.vocab_size - 1 - span]
        inputs += [text[ends[span - 1] if span else 0 : start], sentinel]
        targets += [sentinel, text[start:end]]
    return np.concatenate([*inputs, [END]]), np.concatenate([*targets, [END]])


def padded(ids: np.ndarray, length: int) -> np.ndarray:
    return np.pad(ids, (0, length - ids.size), constant_values=PAD).astype(np.int32)


class Corrupted:
    """Windows of text with spans removed. A sample ends at the end of a line, so samples have different lengths.

    Sample `i` is a function of only `i`: it has the same spans in every pass.
    """

    def __init__(self, windows: Source, recipe: SpanRecipe):
        self._windows, self._recipe = windows, recipe

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        text = self._windows[index]["inputs"]
        line_ends = np.flatnonzero(text == ord("\n"))
        whole = text[: line_ends[-1] + 1] if line_ends.size and line_ends[-1] else text
        inputs, targets = corrupt(whole + FIRST_BYTE, self._recipe, np.random.default_rng(index))
        input_length, target_length = lengths(self._recipe)
        return {"inputs": padded(inputs, input_length), "targets": padded(targets, target_length)}


def corrupted_text(recipe: SpanRecipe) -> Data:
    """The sources of the standard library as bytes, for any size of the vocabulary."""
    spans = num_spans(recipe.sequence_length, recipe)[1]
    if recipe.model.vocab_size < FIRST_BYTE + 256 + spans:
        raise ValueError(f"vocab_size={recipe.model.vocab_size} has no room for 256 bytes and {spans} sentinels")
    text = load_text(sequence_length=recipe.sequence_length)
    noise = f"{recipe.noise:.0%} cut out in spans of {recipe.mean_span:g}"
    return Data(
        train=Corrupted(text.train, recipe),
        held_out=Corrupted(text.held_out, recipe),
        description=f"{text.description}; {noise}",
        fingerprint=f"{text.fingerprint}, {noise}, vocabulary of {recipe.model.vocab_size}",
        tokens_per_sample=sum(lengths(recipe)),
    )
