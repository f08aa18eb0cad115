"""What a run learns from, and its batches: samples by number, in an order that depends on nothing but the seed.

A `Source` is anything with a length whose items are dicts of arrays: windows of text, or images, or what a model file
makes up. A run whose batches have changed their size counts the samples of the steps before.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jshard.data.worker_pool import WorkerPool, pickled
from jshard.errors import FourPartError, RunError, ShardingError

if TYPE_CHECKING:
    from jshard.data.text import Tokenizer

Sample = dict[str, np.ndarray]
Spec = dict[str, str]  # key -> shape and dtype in words

_SEEDS = 2**32  # those that Grain takes
_LONGEST_PERIOD = 100_000
_NOT_NUMBERS = "OUSMm"  # numpy's kinds of objects, texts and dates


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


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources whose samples come in given proportions: a `Source` itself, of all their samples.

    Of the first `n` samples of a run, for any `n`, a source with the part `w` of all weights has given `n * w`, but for
    less than one. Each source is shuffled by itself, and begins anew when it is through.

    Attributes:
        sources: their samples are alike.
        weights: one for each, above 0; `Fraction("0.1")` is a tenth, and `0.1` almost one. Without them the samples
            of all are shuffled as those of one source.

    Example:
        >>> train = Mixture([web, code], [Fraction("0.7"), Fraction("0.3")])
    """

    sources: Sequence[Source]
    weights: Sequence[Fraction | int] = ()

    def __post_init__(self) -> None:
        period = sum(self._whole)
        if self.weights and not (
            len(self.weights) == len(self.sources) and min(self._whole) > 0 and all(self._lengths)
        ):
            why = "each source has a weight above 0, and at least one sample."
        elif period > _LONGEST_PERIOD:
            why = f"the proportions repeat after {period} samples; after {_LONGEST_PERIOD} at the latest they have to."
        else:
            return
        raise DataError(
            "The sources cannot be mixed.",
            where=f"weights {', '.join(map(str, self.weights))} of sources of {self._lengths} samples",
            why=why,
            do="give each a weight of few digits, such as 0.7 and 0.3.",
        )

    def __len__(self) -> int:
        return sum(self._lengths)

    def __getitem__(self, index: int, /) -> Sample:
        source = bisect.bisect_right(self._ends, index)
        return self.sources[source][index - self._ends[source] + self._lengths[source]]

    def order(self, seed: int) -> Any:
        """Numbers of samples in the order of a run, without end."""
        if not self.weights:
            return _shuffled(0, len(self), seed)
        parts = zip(self._ends, self._lengths, strict=True)
        orders = [_shuffled(end - length, end, seed + i) for i, (end, length) in enumerate(parts)]
        return _Turns(self._whole, orders)

    @functools.cached_property
    def _lengths(self) -> list[int]:
        return [len(source) for source in self.sources]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self._lengths))

    @functools.cached_property
    def _whole(self) -> list[int]:
        """The weights as whole numbers without a common divisor."""
        exact = list(map(Fraction, self.weights))
        unit = Fraction(math.gcd(*(f.numerator for f in exact)) or 1, math.lcm(*(f.denominator for f in exact)))
        return [int(weight / unit) for weight in exact]


class _Turns:
    """The sample of any number in the run, of sources that take turns by whole weights, in a period of their sum."""

    def __init__(self, weights: Sequence[int], orders: Sequence[Any]):
        self._weights, self._orders = weights, orders
        self._sources, self._before = [], []
        given = [0] * len(weights)
        # Of those that would not be ahead of their part by one, the one that would first be behind by one (the earliest
        # deadline, which meets all). Grain's mix rounds 0.7 and 0.3 to 233 and 100.
        for n in range(period := sum(weights)):
            due = (i for i, weight in enumerate(weights) if given[i] * period < (n + 1) * weight)
            source = min(due, key=lambda i: -(-(given[i] + 1) * period // weights[i]))
            self._sources.append(source)
            self._before.append(given[source])
            given[source] += 1

    def __getitem__(self, number: int) -> int:
        period, place = divmod(number, len(self._sources))
        source = self._sources[place]
        return int(self._orders[source][period * self._weights[source] + self._before[place]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes batches of a source; with it a source travels to worker processes."""

    source: Any
    part: str  # its name in `Data`, for messages
    spec: Spec  # what every sample has to look like
    error: type[FourPartError]  # a wrong request before training, failed work later

    def batch(self, sample_ids: Sequence[int]) -> Sample:
        """The samples, stacked by key; a `FourPartError` if one cannot be read, or is not like the others."""
        samples = [self._sample(sample_id) for sample_id in sample_ids]
        return {key: np.stack([sample[key] for sample in samples]) for key in self.spec}

    def _sample(self, sample_id: int) -> Sample:
        sample = read_sample(self.source, self.part, sample_id, self.error)
        found = spec_of(sample)
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


def spec_of(sample: Sample) -> Spec:
    """Keys, shapes and dtypes of a sample."""
    return {key: f"{array.shape} {array.dtype}" for key, array in sample.items()}


def read_sample(source: Any, part: str, sample_id: int, error: type[FourPartError]) -> Sample:
    """A sample as arrays; an `error` if it cannot be read, or is no dict of arrays of numbers."""
    where = f"data.{part}[{sample_id}], of a {type(source).__name__}"
    try:
        sample = source[sample_id]
    except DataError as cause:
        raise error(cause.what, where=[where, *cause.where], why=cause.why, do=cause.do) from cause
    except Exception as cause:
        raise error(
            "A sample cannot be read.",
            where=where,
            why=f"{type(cause).__name__}: {cause}",
            do="make that sample readable, or leave it out of the source; --debug shows where it failed.",
        ) from cause
    arrays: Sample = {}
    if isinstance(sample, dict) and sample and all(isinstance(key, str) for key in sample):
        arrays = {key: np.asarray(value) for key, value in sample.items()}
        wrong = [f"{key!r} is of dtype {x.dtype}" for key, x in arrays.items() if x.dtype.kind in _NOT_NUMBERS]
    else:
        wrong = [f"it is a {type(sample).__name__}" + " without entries" * (type(sample) is dict and not sample)]
    if wrong:
        raise error(
            "A sample is not a dict of arrays of numbers.",
            where=where,
            why=", ".join(wrong) + ".",
            do='return a dict from __getitem__, for example {"image": image, "label": np.int32(3)}.',
        )
    return arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """This process's share of the batches of a run.

    A batch is a dict: the samples of the rows, stacked. Batches are made ahead of time. Close the iterators
    (`batches.close()`) when a run stops early; threads and worker processes end with them.

    Attributes:
        data: what to read.
        batch_size: samples in a global batch.
        seed: seed of the order, 0 to 2**32 - 1.
        rows: rows of each global batch to read; see `local_rows`.
        workers: processes that read `data.train`, for samples that are expensive to make; 0 reads in a thread. The
            batches are the same for any number.
    """

    data: Data
    batch_size: int
    seed: int
    rows: Sequence[int]
    workers: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _SEEDS:
            raise DataError(
                "The seed cannot order the samples.",
                where=f"seed={self.seed}",
                why="it is not between 0 and 4294967295.",
                do=f"seed={self.seed % 2**32}.",
            )
        if self.workers < 0:
            raise DataError(
                "There cannot be fewer than no worker processes.",
                where=f"workers={self.workers}",
                why="it counts processes; 0 reads in a thread of this one.",
                do="workers=0.",
            )
        # A few samples now: what cannot work should not wait for the model to be built.
        last = len(self.data.train) - 1
        self._reader("train", DataError).batch([0, last // 2, last])
        self._reader("held_out", DataError).batch([0])
        if self.workers:
            pickled(self._reader("train", RunError))

    def sample_ids(self, step: int) -> list[int]:
        """Indices into `data.train` of the whole global batch of a step, whatever rows are read here.

        Args:
            step: number of the step, from 0, in a run whose batches all have this size.
        """
        order = self._order()
        return [int(order[step * self.batch_size + row]) for row in range(self.batch_size)]

    def train(
        self, num_steps: int, *, start_step: int = 0, start_sample: int | None = None
    ) -> Generator[Sample, None, None]:
        """The batches of a run, shuffled anew in every pass over the data.

        Args:
            num_steps: steps of the whole run.
            start_step: steps that were done before, whose batches are left out.
            start_sample: samples that those batches held, of whatever size they were; by default of this one.

        Returns:
            An iterator of `num_steps - start_step` dicts of arrays: `rows` of each global batch.

        Raises:
            ShardingError: the data cannot be sent to worker processes.
            RunError: a sample cannot be read, or a worker process died; when the batch with it is asked for.
        """
        start = start_step * self.batch_size if start_sample is None else start_sample
        return self._batches("train", self._order(), start, max(0, num_steps - start_step), workers=self.workers)

    def held_out(self, num_sequences: int) -> Generator[Sample, None, None]:
        """The same samples every time, spread evenly over the held-out ones.

        Args:
            num_sequences: how many; rounded down to whole batches, but at least one. Where there are fewer samples
                than a batch has, they repeat.

        Returns:
            An iterator of dicts of arrays: `rows` of each batch.
        """
        size = len(self.data.held_out)
        num_batches = max(1, min(num_sequences, size) // self.batch_size)
        return self._batches("held_out", np.linspace(0, size - 1, num_batches * self.batch_size), 0, num_batches)

    def _batches(
        self, part: str, order: Any, start: int, num_batches: int, *, workers: int = 0
    ) -> Generator[Sample, None, None]:
        reader = self._reader(part, RunError)
        ids = lambda step: [int(order[start + step * self.batch_size + row]) for row in self.rows]
        with contextlib.ExitStack() as stack:
            batch = lambda step: reader.batch(ids(step))
            if workers and num_batches:
                pool = WorkerPool(reader, num_workers=workers, ids=ids, num_steps=num_batches)
                stack.callback(pool.close)
                batch = pool.batch
            yield from stack.enter_context(contextlib.closing(read_ahead(batch, num_batches)))

    def _reader(self, part: str, error: type[FourPartError]) -> Reader:
        return Reader(source=getattr(self.data, part), part=part, spec=self._spec, error=error)

    @functools.cached_property
    def _spec(self) -> Spec:
        return spec_of(read_sample(self.data.train, "train", 0, DataError))

    def _order(self) -> Any:
        train = self.data.train
        return train.order(self.seed) if isinstance(train, Mixture) else _shuffled(0, len(train), self.seed)


def _shuffled(start: int, stop: int, seed: int) -> Any:
    """These numbers without end, in a new order each time round."""
    import grain  # here: a model file that makes `Data`, or a dry run, does without it

    return grain.MapDataset.range(start, stop).shuffle(seed % _SEEDS).repeat()


def read_ahead(batch: Callable[[int], Any], num_batches: int, buffered: int = 2) -> Any:
    """An iterator over `batch(0)`, `batch(1)` and so on, made one after another by a thread, ahead of time."""
    import grain

    steps = grain.MapDataset.range(num_batches).map(lambda step: batch(int(step)))
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffered)))
