"""What a run learns from: samples by number, as dicts of arrays; read, compared with the others and stacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jshard.errors import FourPartError, ShardingError

if TYPE_CHECKING:
    from jshard.data.text import Tokenizer


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
        tokens_per_sample: tokens in a sample; without it speed is in samples per second.
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


# Samples of a source: read, compared with the first and stacked.

Spec = dict[str, str]  # key -> shape and dtype in words

_NOT_NUMBERS = "OUSMm"  # numpy's kinds of objects, texts and dates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes batches of a source.

    Attributes:
        source: the samples.
        part: its name in `Data`, for messages.
        spec: what every sample has to look like; see `first_spec`.
        error: the class of the errors: a wrong request before training, failed work later.
    """

    source: Any
    part: str
    spec: Spec
    error: type[FourPartError]

    def batch(self, sample_ids: Sequence[int]) -> Sample:
        """The samples, stacked by key.

        Raises:
            FourPartError: of the class `error`: a sample cannot be read, or is not like the others.
        """
        samples = [self._sample(sample_id) for sample_id in sample_ids]
        return {key: np.stack([sample[key] for sample in samples]) for key in self.spec}

    def _sample(self, sample_id: int) -> Sample:
        sample = _read(self.source, self.part, sample_id, self.error)
        found = _spec(sample)
        if found == self.spec:
            return sample
        keys = [key for key in {**self.spec, **found} if self.spec.get(key) != found.get(key)]
        nothing = "no such key"
        raise self.error(
            "The samples of the data differ.",
            where=f"data.{self.part}[{sample_id}]",
            why="\n".join(
                f"{key!r} is {found.get(key, nothing)}, in data.train[0] {self.spec.get(key, nothing)}." for key in keys
            ),
            do="pad, crop or convert in the source's __getitem__: a batch is a stack of samples that are alike.",
        )


def first_sample(source: Any, error: type[FourPartError]) -> Sample:
    """The first training sample, as arrays.

    Raises:
        FourPartError: of the class `error`: it cannot be read, or is no dict of arrays of numbers.
    """
    return _read(source, "train", 0, error)


def first_spec(source: Any, error: type[FourPartError]) -> Spec:
    """Keys, shapes and dtypes of the first training sample: every other has to have the same."""
    return _spec(first_sample(source, error))


def _spec(sample: Sample) -> Spec:
    return {key: f"{array.shape} {array.dtype}" for key, array in sample.items()}


def _read(source: Any, part: str, sample_id: int, error: type[FourPartError]) -> Sample:
    where = f"data.{part}[{sample_id}], of a {type(source).__name__}"
    try:
        sample = source[sample_id]
    except Exception as cause:
        raise error(
            "A sample cannot be read.",
            where=where,
            why=f"{type(cause).__name__}: {cause}",
            do="make that sample readable, or leave it out of the source; --debug shows where it failed.",
        ) from cause
    if isinstance(sample, dict) and sample and all(isinstance(key, str) for key in sample):
        arrays = {key: np.asarray(value) for key, value in sample.items()}
        wrong = [
            f"{key!r} is of dtype {array.dtype}" for key, array in arrays.items() if array.dtype.kind in _NOT_NUMBERS
        ]
    else:
        arrays, wrong = (
            {},
            [f"it is a {type(sample).__name__}" + (" without entries" if type(sample) is dict and not sample else "")],
        )
    if wrong:
        raise error(
            "A sample is not a dict of arrays of numbers.",
            where=where,
            why=", ".join(wrong) + ".",
            do='return a dict from __getitem__, for example {"image": image, "label": np.int32(3)}.',
        )
    return arrays
