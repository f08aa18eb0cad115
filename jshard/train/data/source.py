"""What a run learns from: samples by number, as dicts of arrays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jshard._errors import ShardingError

if TYPE_CHECKING:
    from jshard.train.data.tokenizer import Tokenizer

Sample = dict[str, np.ndarray]


class DataError(ShardingError):
    """The data cannot be used for this run."""


class Source(Protocol):
    """Samples by number: `len(source)` of them, `source[i]` a dict of arrays without a batch dim.

    All samples have the same keys, shapes and dtypes. A source is read from a thread, or from other processes
    (`Loader(workers=N)`), ahead of the step that needs it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What a run learns from.

    Attributes:
        train: the samples to train on.
        held_out: samples that training never sees, for the validation loss.
        description: one line, printed before the run: where the data is from, and how much it is.
        fingerprint: a text that differs where the data differ; a resumed run must find the one it began with.
        tokens_per_sample: tokens in a sample; without it speed is told in samples per second.
        tokenizer: of text: reads generated tokens back, and its vocabulary is held against the model's.
    """

    train: Source
    held_out: Source
    description: str
    fingerprint: str
    tokens_per_sample: int | None = None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        empty = [part for part in ("train", "held_out") if not len(getattr(self, part))]
        if empty:
            raise DataError(
                "There is nothing to read.",
                where=[f"Data.{part}, a {type(getattr(self, part)).__name__}" for part in empty],
                why="it has 0 samples.",
                do="give every part at least one sample; len(data.train) and len(data.held_out) count them.",
            )
