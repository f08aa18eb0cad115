"""Samples in, batches out, in an order that depends on nothing but the seed.

A `Source` is anything with a length whose items are dicts of arrays: windows of text, or images, or what a
model file makes up. The sample that row `r` of step `s` reads is a pure function of (seed, number of
samples, `s * batch_size + r`); a run whose batches have changed their size counts the samples of the steps before.
Neither the mesh nor the number of processes enters, so a run may continue on other machines with the very samples it
would have seen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jshard._errors import FourPartError, RunError
from jshard.data.source import Data, DataError, Reader, Sample, Spec, first_spec
from jshard.data.worker_pool import WorkerPool, pickled

if TYPE_CHECKING:
    from jax.sharding import Mesh

Batches = Generator[Sample, None, None]

_PREFETCHED_BATCHES = 2


def local_rows(batch_size: int, mesh: Mesh) -> list[int]:
    """The rows of a global batch that lie on this process's devices, in order.

    Args:
        batch_size: samples in the global batch.
        mesh: the mesh of the model.

    Returns:
        Their indices, 0 to `batch_size - 1`; what `Loader(rows=...)` takes.

    Raises:
        DataError: the batch does not split evenly over the data axes of the mesh.
    """
    from jshard.plans.mesh import batch_sharding, data_degree  # here: the processes that read data do without jax

    degree = data_degree(mesh)
    if batch_size % degree:
        raise DataError(
            f"A batch of {batch_size} sequences does not split over {degree} data shards.",
            where=f"mesh {dict(mesh.shape)}",
            why=f"{batch_size} = {batch_size // degree} x {degree} + {batch_size % degree}.",
            do=f"use a batch size that is a multiple of {degree}, or a smaller mesh.",
        )
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in slices if index for row in range(*index[0].indices(batch_size))})


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
        return self._ids(self._order(), step * self.batch_size, range(self.batch_size))

    def train(self, num_steps: int, *, start_step: int = 0, start_sample: int | None = None) -> Batches:
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
        reader, order = self._reader("train", RunError), self._order()
        start_sample = start_step * self.batch_size if start_sample is None else start_sample
        ids = lambda step: self._ids(order, start_sample + (step - start_step) * self.batch_size, self.rows)
        if not self.workers:
            yield from _prefetched(lambda step: reader.batch(ids(step)), start_step, num_steps)
            return
        with WorkerPool(reader, num_workers=self.workers, ids=ids, steps=range(start_step, num_steps)) as pool:
            yield from _prefetched(pool.batch, start_step, num_steps)

    def held_out(self, num_sequences: int) -> Batches:
        """The same samples every time, spread evenly over the held-out ones.

        Args:
            num_sequences: how many; rounded down to whole batches, but at least one. Where there are fewer samples
                than a batch has, they repeat.

        Returns:
            An iterator of dicts of arrays: `rows` of each batch.
        """
        size = len(self.data.held_out)
        num_batches = max(1, min(num_sequences, size) // self.batch_size)
        picked = np.linspace(0, size - 1, num_batches * self.batch_size).astype(int)
        ids = picked.reshape(num_batches, self.batch_size)[:, list(self.rows)].tolist()
        reader = self._reader("held_out", RunError)
        yield from _prefetched(lambda number: reader.batch(ids[number]), 0, num_batches)

    def _reader(self, part: str, error: type[FourPartError]) -> Reader:
        return Reader(source=getattr(self.data, part), part=part, spec=self._spec, error=error)

    @functools.cached_property
    def _spec(self) -> Spec:
        return first_spec(self.data.train, DataError)

    def _order(self) -> Any:
        import grain  # here: a model file that makes `Data`, or a dry run, does without it

        return grain.MapDataset.range(len(self.data.train)).shuffle(self.seed).repeat()

    def _ids(self, order: Any, first: int, rows: Sequence[int]) -> list[int]:
        return [int(order[first + row]) for row in rows]


def _prefetched(batch: Callable[[int], Sample], start: int, stop: int) -> Batches:
    """`batch(start)` to `batch(stop - 1)`, made one after another in a thread, a few ahead."""
    if start >= stop:
        return
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCHED_BATCHES)
    numbers = grain.MapDataset.range(start, stop)
    batches = iter(numbers.map(lambda number: batch(int(number))).to_iter_dataset(options))
    try:
        yield from batches
    finally:
        batches.close()
