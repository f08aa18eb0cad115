"""The batches of a run: the samples of a `Source` in an order that depends on nothing but the seed.

A `Source` is anything with a length whose items are dicts of arrays: windows of text, or images, or what a model file
makes up. A run whose batches have changed their size counts the samples of the steps before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from jshard.data.batches import Batches
from jshard.data.source import Data, DataError, Reader, Sample, Spec, first_spec
from jshard.data.worker_pool import WorkerPool, pickled
from jshard.errors import FourPartError, RunError


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
        end = start + max(0, num_steps - start_step) * self.batch_size
        return self._batches("train", self._order()[:end], start, workers=self.workers)

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
        return self._batches("held_out", np.linspace(0, size - 1, num_batches * self.batch_size).astype(int))

    def _batches(self, part: str, ids: Any, start: int = 0, *, workers: int = 0) -> Generator[Sample, None, None]:
        if start >= len(ids):
            return
        batches = SampleBatches(
            ids,
            reader=self._reader(part, RunError),
            workers=workers,
            batch_size=self.batch_size,
            rows=self.rows,
            start=start,
        )
        with contextlib.closing(batches):
            yield from batches

    def _reader(self, part: str, error: type[FourPartError]) -> Reader:
        return Reader(source=getattr(self.data, part), part=part, spec=self._spec, error=error)

    @functools.cached_property
    def _spec(self) -> Spec:
        return first_spec(self.data.train, DataError)

    def _order(self) -> Any:
        import grain  # here: a model file that makes `Data`, or a dry run, does without it

        return grain.MapDataset.range(len(self.data.train)).shuffle(self.seed).repeat()


class SampleBatches(Batches):
    """Batches of the samples of a reader.

    Args:
        ids: which sample of the reader each sample of the run is.
        reader: reads them.
        workers: processes that do; 0 for a thread.
        **how: as of `Batches`.
    """

    def __init__(self, ids: Any, *, reader: Reader, workers: int, **how: Any) -> None:
        super().__init__(ids, **how)
        self._samples_of, self._num_workers = reader, workers
        self._pool: WorkerPool | None = None

    def close(self) -> None:
        """As of `Batches`; the worker processes end, too."""
        super().close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _begin(self, numbers: Callable[[int], list[int]], num_batches: int) -> Callable[[int], Any]:
        ids = lambda step: [int(self.dataset[number]) for number in numbers(step)]
        if not self._num_workers:
            return lambda step: self._samples_of.batch(ids(step))
        self._pool = WorkerPool(self._samples_of, num_workers=self._num_workers, ids=ids, steps=range(num_batches))
        return self._pool.batch
