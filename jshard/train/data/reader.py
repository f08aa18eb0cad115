"""Samples of a source, read, held against the others and stacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jshard._errors import FourPartError
from jshard.train.data.source import Sample

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
