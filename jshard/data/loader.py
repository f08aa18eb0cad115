"""What a run learns from, and its batches: samples by number, in an order that depends on nothing but the seed.

A `Source` is anything with a length whose items are dicts of arrays: windows of text, or images, or what a model file
makes up. A run whose batches have changed their size counts the samples of the steps before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jshard.data.worker_pool import WorkerPool, pickled
from jshard.errors import FourPartError, RunError, ShardingError

if TYPE_CHECKING:
    from jshard.data.text import Tokenizer

Sample = dict[str, np.ndarray]
Spec = dict[str, str]  # key -> shape and dtype in words

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
        if not 0 <= self.seed < 2**32:
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
        import grain  # here: a model file that makes `Data`, or a dry run, does without it

        return grain.MapDataset.range(len(self.data.train)).shuffle(self.seed).repeat()


def read_ahead(batch: Callable[[int], Any], num_batches: int, buffered: int = 2) -> Any:
    """An iterator over `batch(0)`, `batch(1)` and so on, made one after another by a thread, ahead of time."""
    import grain

    steps = grain.MapDataset.range(num_batches).map(lambda step: batch(int(step)))
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffered)))
