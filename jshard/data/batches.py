"""Batches of samples that are read by number, and their position: any mesh and batch size can go on from it.

Row `r` of the batch after `n` samples is sample `n + r` of the run. Neither the mesh nor the number of processes
enters, so a run may continue on other machines with the very samples it would have seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from jax.sharding import Mesh

from jshard.checkpoint.errors import CheckpointError
from jshard.data.source import DataError
from jshard.errors import RunError, ShardingError
from jshard.plans.mesh import batch_sharding, data_degree

ENDLESS = sys.maxsize  # the length of `dataset.repeat()`


def numbered(dataset: Any) -> Any:
    """The dataset as a `grain.MapDataset`: samples by number, in any order, any number of times.

    Args:
        dataset: a `grain.MapDataset`, or anything with a length and items.

    Raises:
        ShardingError: its samples have no numbers, as those of an `IterDataset`.
    """
    import grain  # here: programs that save no data position do without it

    if isinstance(dataset, grain.MapDataset):
        return dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ShardingError(
            "The samples of the data have no numbers.",
            where=f"a {type(dataset).__name__}",
            why="a position that any mesh can go on from counts samples; this can only be read from the front.",
            do="give the grain.MapDataset before .to_iter_dataset(), or a list of samples.",
        )
    return grain.MapDataset.source(dataset)


def order_of(dataset: Any) -> list[str]:
    """The steps of a dataset that decide the order of its samples, from its sources on.

    Steps that only change what a sample looks like are left out: they may differ between two runs.

    Example:
        >>> order_of(grain.MapDataset.source(photos).shuffle(seed=3).map(crop).repeat())
        ['source of 1281167', 'shuffle of 1281167, seed 3', 'repeat without end']
    """
    return list(_steps(dataset))


def _steps(dataset: Any) -> Iterator[str]:
    parents = dataset.parents
    for parent in parents:
        yield from _steps(parent)
    name, size = type(dataset).__name__.removesuffix("MapDataset"), len(dataset)
    same_samples = len(parents) == 1 and len(parents[0]) == size and "Shuffle" not in name
    if name == "Slice":
        yield str(dataset).replace("SliceMapDataset", "slice").replace(str(ENDLESS), "")
    elif not same_samples:
        # Grain has no public name for the seed of a shuffle; without the attribute the seed is not compared.
        seed = getattr(dataset, "_seed", None)
        length = "without end" if size >= ENDLESS else f"of {size}"
        yield f"{name.lower()} {length}" + ("" if seed is None else f", seed {seed}")


def local_rows(batch_size: int, mesh: Mesh) -> list[int]:
    """The rows of a global batch that are on this process's devices, in order.

    Args:
        batch_size: samples in the global batch.
        mesh: the mesh of the model.

    Returns:
        Their indices, 0 to `batch_size - 1`; what `Loader(rows=...)` takes.

    Raises:
        DataError: the batch does not split evenly over the data axes of the mesh.
    """
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


class Batches:
    """An iterator over this process's rows of each global batch, with a position that is the same on every process.

    The position counts the samples that were handed out, not what was read ahead. A subclass says how batches are made
    (`_begin`), and what its position holds beside the count.
    """

    # For `position_text`: the state is that of the run, not of a process.
    global_position: ClassVar[bool] = True
    _read_ahead: int = 2  # batches, made one after another by one thread

    def __init__(self, dataset: Any, *, batch_size: int, rows: Sequence[int] | Mesh, start: int = 0) -> None:
        self.dataset = numbered(dataset)
        self.batch_size, self.rows = batch_size, _checked_rows(batch_size, rows)
        if start < 0:
            raise ShardingError(
                "The data cannot be read from there.",
                where=f"start={start}",
                why="it counts what is left out at the front.",
                do="start=0.",
            )
        self.order, self.samples = order_of(self.dataset), start
        self._reading: Any = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._reading is None:
            self._reading = self._reader()
        try:
            read = next(self._reading)
        except Exception:
            self.close()  # the next call tries the same batch again
            raise
        self.samples += self.batch_size
        return self._handed_out(read)

    def close(self) -> None:
        """Ends the reading ahead; what was read and not handed out is read again when it is asked for."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def get_state(self) -> dict[str, Any]:
        """The position of the run, small and the same on every process; every process calls it."""
        return {"kind": type(self).__name__, "order": self.order, **self._position()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a position of `get_state`, whatever the rows, the processes and the batch size were.

        Raises:
            CheckpointError: it is the position in other data, or in the same data in another order.
        """
        self.check_state(state)
        self.close()
        self._move_to(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises what `set_state` would raise, and moves nothing."""
        misfits = list(self._misfits(state))
        if misfits:
            raise CheckpointError(
                "The position in the data does not fit the data.",
                where=misfits,
                why="it counts samples: in another order some would repeat and some never come.",
                do="build the batches from the data, the seed and the settings of the saved run;\n"
                f"or leave the position out, and begin where you say: {type(self).__name__}(..., start=4096).",
            )

    def _misfits(self, state: dict[str, Any]) -> Iterator[str]:
        """Each thing that differs, in words."""
        if state.get("kind") != type(self).__name__:
            yield f"kind   saved {state.get('kind', 'another')}  here {type(self).__name__}"
        elif state["order"] != self.order:
            yield f"order  saved {'; '.join(state['order'])}"
            yield f"       here  {'; '.join(self.order)}"

    def _reader(self) -> Any:
        """An iterator over the batches from the position on, which reads ahead."""
        import grain

        first, size, rows = self.samples, self.batch_size, self.rows
        num_batches = max(0, len(self.dataset) - first) // size
        batch = self._begin(lambda step: [first + step * size + row for row in rows], num_batches)
        steps = grain.MapDataset.range(num_batches).map(lambda step: batch(int(step)))
        return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._read_ahead)))

    def _begin(self, numbers: Callable[[int], list[int]], num_batches: int) -> Callable[[int], Any]:
        """A function that makes the batch `step`, called in order; `numbers(step)` are those of its samples."""
        raise NotImplementedError

    def _handed_out(self, read: Any) -> Any:
        return read

    def _position(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def _move_to(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])


def _checked_rows(batch_size: int, rows: Sequence[int] | Mesh) -> tuple[int, ...]:
    found = tuple(map(int, local_rows(batch_size, rows) if isinstance(rows, Mesh) else rows))
    if not found or list(found) != sorted(set(found)) or found[0] < 0 or found[-1] >= batch_size:
        raise ShardingError(
            "These are not rows of a global batch.",
            where=f"rows={list(found)}",
            why=f"rows are some of the numbers 0 to {batch_size - 1}, in order, each once, and at least one.",
            do=f"rows=jshard.data.local_rows({batch_size}, mesh), or rows=mesh.",
        )
    return found


class GlobalBatches(Batches):
    """This process's rows of each global batch of a dataset, on from any position.

    Row `r` of the batch after `n` samples is sample `n + r` of the dataset: neither the mesh nor the number of
    processes enters. The state is `n`, and what the order of the samples hangs on (lengths and seeds), which a restore
    compares. So a run may go on with other processes, other rows or another batch size, and repeats no sample and
    skips none. Of a dataset with an end, samples that fill no batch are left out; `.repeat()` has no end.

    Grain's own `ElasticIterator` is a cousin: it deals samples to processes like cards, so the rows of a batch change
    places with the number of processes, and it compares nothing.

    Args:
        dataset: a `grain.MapDataset` with its shuffles and repeats, or any sequence of samples. Not filtered: a
            filter leaves numbers without a sample.
        batch_size: samples in a global batch.
        rows: the rows of each global batch to read here, in order; of a mesh, those that are on this process's devices.
        start: number of the first sample.
        read_options: Grain's; how many threads read, and how many samples ahead.

    Raises:
        ShardingError: the rows are not rows of such a batch, or the data have fewer samples than one.

    Example:
        >>> samples = grain.MapDataset.source(photos).shuffle(seed=0).map(crop).repeat()
        >>> batches = GlobalBatches(samples, batch_size=512, rows=mesh)
        >>> for batch in batches:
        ...     loss = step(js.shard_batch(batch, mesh))
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rows: Sequence[int] | Mesh,
        start: int = 0,
        read_options: Any = None,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, rows=rows, start=start)
        if len(self.dataset) < batch_size:
            raise ShardingError(
                "The data do not fill a batch.",
                where=f"batch_size={batch_size}",
                why=f"there are {len(self.dataset)} samples.",
                do="GlobalBatches(dataset.repeat(), ...), or a smaller batch.",
            )
        self._read_options = read_options

    def _reader(self) -> Any:
        """Samples are read in parallel, where the other batches are made one after another."""
        import grain

        first, size, rows = self.samples, self.batch_size, self.rows
        num_batches = max(0, len(self.dataset) - first) // size

        def sample(number: Any) -> Any:
            step, place = divmod(int(number), len(rows))
            return self._sample(first + step * size + rows[place])

        numbers = grain.MapDataset.range(num_batches * len(rows))
        return iter(numbers.map(sample).to_iter_dataset(self._read_options).batch(len(rows)))

    def _sample(self, number: int) -> Any:
        try:
            sample = self.dataset[number]
        except Exception as cause:
            raise RunError(
                "A sample cannot be read.",
                where=f"sample {number} of the run",
                why=f"{type(cause).__name__}: {cause}",
                do="make that sample readable, or leave it out of the source.",
            ) from cause
        if sample is None:
            raise RunError(
                "A sample is missing.",
                where=f"sample {number} of the run",
                why="the dataset has none with that number: .filter() leaves such gaps.",
                do="filter before: grain.MapDataset.source([x for x in data if good(x)]); or let each lane skip them:\n"
                "PackedBatches(dataset.repeat(), pack=lambda samples: samples, ...)",
            )
        return sample
