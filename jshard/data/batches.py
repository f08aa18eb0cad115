"""Batches of a Grain dataset, and their position, from which any mesh and batch size can continue.

Row `r` of the batch after `n` samples is sample `n + r` of the run. This does not depend on the mesh or the number of
processes, so a run may continue on other machines with exactly the samples it would have seen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, SupportsInt

from jax.sharding import Mesh

from jshard._text import counted
from jshard._types import Json, PyTree
from jshard.checkpoint.data_position.position import misfit
from jshard.checkpoint.data_position.sample_order import Description, describe, differences
from jshard.data.loader import DataError, GrainDataset
from jshard.errors import RunError, ShardingError
from jshard.plans.mesh import batch_sharding, data_degree

if TYPE_CHECKING:
    import grain

ENDLESS = sys.maxsize
"""The length of `dataset.repeat()`."""


def local_rows(batch_size: int, mesh: Mesh) -> list[int]:
    """Returns the rows of a global batch that are on this process's devices, in order.

    Args:
        batch_size: samples in the global batch.
        mesh: the mesh of the model.

    Returns:
        Their indices, 0 to `batch_size - 1`, for `Loader(rows=...)`.

    Raises:
        DataError: the batch does not split evenly over the data axes of the mesh.
    """
    degree = data_degree(mesh)
    if batch_size % degree:
        raise DataError(
            f"A batch of {counted(batch_size, 'sequence')} does not split over {counted(degree, 'data shard')}.",
            where=f"mesh {dict(mesh.shape)}",
            why=f"{batch_size} = {batch_size // degree} x {degree} + {batch_size % degree}.",
            do=f"use a batch size that is a multiple of {degree}, or a smaller mesh.",
        )
    rows: set[int] = set()  # devices may have the same ones
    for index in batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values():
        if index:
            rows.update(range(*index[0].indices(batch_size)))
    return sorted(rows)


def order_of(dataset: GrainDataset) -> list[str]:
    """Returns the steps of a dataset that determine the order of its samples, starting with its sources.

    Steps that only change the contents of samples are left out: they may differ between two runs.

    Examples:
        >>> order_of(grain.MapDataset.source(photos).shuffle(seed=3).map(crop).repeat())
        ['source of 1281167', 'shuffle of 1281167, seed 3', 'repeat without end']
    """
    parents = dataset.parents
    steps = [step for parent in parents for step in order_of(parent)]
    name = type(dataset).__name__.removesuffix("MapDataset")
    size = len(dataset)
    has_same_samples = len(parents) == 1 and len(parents[0]) == size and "Shuffle" not in name
    if name == "Slice":
        # It prints its bounds; an endless one has the length of `repeat()` as its end.
        steps.append(str(dataset).replace("SliceMapDataset", "slice").replace(str(ENDLESS), ""))
    elif not has_same_samples:
        step = f"{name.lower()} {'without end' if size >= ENDLESS else f'of {size}'}"
        # Grain has no public name for the seed of a shuffle; without the attribute the seed is not compared.
        seed = getattr(dataset, "_seed", None)
        if seed is not None:
            step += f", seed {seed}"
        steps.append(step)
    return steps


class GlobalBatches:
    """This process's rows of each global batch of a dataset, from any position on.

    Row `r` of the batch after `n` samples is sample `n + r` of the dataset, whatever the mesh and the number of
    processes. The state is `n` and what the order of samples depends on, which a restore compares: lengths, seeds, the
    weights of a mixture, three samples of each source. So a run may continue with other processes, other rows or
    another batch size, without repeating or skipping samples. In a finite dataset, samples that do not fill a batch
    are left out; `.repeat()` is endless.

    Args:
        dataset: a `grain.MapDataset` with its shuffles and repeats, or any sequence of samples. It must not be
            filtered: a filter leaves numbers without a sample.
        batch_size: samples in a global batch.
        rows: the rows of each global batch to read here, in order; given a mesh, those on this process's devices.
        start: number of the first sample.
        read_options: Grain's; how many threads read, and how many samples ahead.

    Raises:
        ShardingError: the rows are not rows of such a batch, or the data have fewer samples than one batch.

    Examples:
        >>> samples = grain.MapDataset.source(photos).shuffle(seed=0).map(crop).repeat()
        >>> batches = GlobalBatches(samples, batch_size=512, rows=mesh)
        >>> for batch in batches:
        ...     loss = step(js.shard_batch(batch, mesh))
    """

    # For `position_text`: the state is that of the run, not of a process.
    global_position: ClassVar[bool] = True

    def __init__(
        self,
        dataset: GrainDataset,
        *,
        batch_size: int,
        rows: Sequence[int] | Mesh,
        start: int = 0,
        read_options: grain.ReadOptions | None = None,
    ) -> None:
        self.dataset = _numbered(dataset)
        self.batch_size = batch_size
        self.rows = _checked_rows(batch_size, rows)
        check_least("start", start, 0, "it counts the samples to skip.")
        if len(self.dataset) < batch_size:
            raise ShardingError(
                "The data do not fill a batch.",
                where=f"batch_size={batch_size}",
                why=f"there are {len(self.dataset)} samples.",
                do=f"{type(self).__name__}(dataset.repeat(), ...), or a smaller batch.",
            )
        self.order = order_of(self.dataset)
        self.samples = start
        self._read_options = read_options
        self._reading: Any = None

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> PyTree:
        if self._reading is None:
            num_left = max(0, len(self.dataset) - self.samples)
            self._reading = self._reader(num_left // self.batch_size)
        try:
            read = next(self._reading)
        except Exception:
            self.close()  # the next call tries the same batch again
            raise
        # Only now: batches that are read ahead do not move the position.
        self.samples += self.batch_size
        return self._handed_out(read)

    def close(self) -> None:
        """Stops reading ahead; samples that were read but not returned are read again when needed."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def get_state(self) -> dict[str, Json]:
        """Returns the position of the run, small and the same on every process; every process calls it."""
        return {"kind": type(self).__name__, "order": self.order, "pipeline": self.sample_order, **self._position()}

    @functools.cached_property
    def sample_order(self) -> Description | None:
        """What the order of samples depends on; reads three samples of each source, twice."""
        return describe(self.dataset)

    def set_state(self, state: dict[str, Json]) -> None:
        """Continues from a position of `get_state`, whatever the rows, the processes and the batch size were.

        Raises:
            CheckpointError: it is a position in other data, or in the same data in another order.
        """
        self.check_state(state)
        self.close()
        self._move_to(state)

    def check_state(self, state: dict[str, Json]) -> None:
        """Raises what `set_state` would raise, without changing the position."""
        misfits = list(self._misfits(state))
        if misfits:
            raise misfit(misfits, f"{type(self).__name__}(..., start=4096)")

    def _misfits(self, state: dict[str, Json]) -> Iterator[str]:
        """Yields each difference, as text."""
        if state.get("kind") != type(self).__name__:
            yield f"kind   saved {state.get('kind', 'another')}  here {type(self).__name__}"
        elif state["order"] != self.order:
            yield f"order  saved {'; '.join(state['order'])}"
            yield f"       here  {'; '.join(self.order)}"
        elif state.get("pipeline") is not None:  # earlier versions stored only the order
            yield from differences(state["pipeline"], self.sample_order)

    def _reader(self, num_batches: int) -> Iterator[Any]:
        """Returns an iterator over so many batches from the position on; samples are read ahead, in parallel."""
        import grain

        # Not the attributes: the threads read ahead of them.
        first = self.samples
        batch_size = self.batch_size
        rows = self.rows

        def sample(number: SupportsInt) -> PyTree:
            step, row_number = divmod(int(number), len(rows))
            return self._sample(first + step * batch_size + rows[row_number])

        # Of this process: rows of the first batch, rows of the second one, and so on.
        numbers = grain.MapDataset.range(num_batches * len(rows))
        # Several threads read, and Grain returns the samples in the order of their numbers.
        return iter(numbers.map(sample).to_iter_dataset(self._read_options).batch(len(rows)))

    def _sample(self, number: int) -> PyTree:
        """Returns a sample by its number in the run."""
        try:
            sample = self.dataset[number]
        except Exception as cause:
            raise RunError(
                "A sample cannot be read.",
                where=f"sample {number} of the run",
                why=f"{type(cause).__name__}: {cause}",
                do="make that sample readable, or remove it from the source.",
            ) from cause
        if sample is None:
            raise RunError(
                "A sample is missing.",
                where=f"sample {number} of the run",
                why="the dataset has no sample of that number: .filter() leaves such gaps.",
                do="filter first: grain.MapDataset.source([x for x in data if good(x)]); or let each lane skip them:\n"
                "PackedBatches(dataset.repeat(), pack=lambda samples: samples, ...)",
            )
        return sample

    # What `PackedBatches` does in another way.

    def _handed_out(self, read: Any) -> PyTree:
        """Returns the batch in what a reader has read, once it is requested."""
        return read

    def _position(self) -> dict[str, Json]:
        """Returns the entries of the state that count."""
        return {"samples": self.samples}

    def _move_to(self, state: dict[str, Json]) -> None:
        self.samples = int(state["samples"])


def _numbered(dataset: GrainDataset) -> GrainDataset:
    """Returns the dataset as a `grain.MapDataset`: samples by number, in any order, any number of times."""
    import grain  # imported here: not needed without a data position

    if isinstance(dataset, grain.MapDataset):
        return dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ShardingError(
            "The samples of the data have no numbers.",
            where=f"a {type(dataset).__name__}",
            why="a position for any mesh counts samples, but this data can only be read from the start.",
            do="pass the grain.MapDataset before .to_iter_dataset(), or a list of samples.",
        )
    return grain.MapDataset.source(dataset)


def _checked_rows(batch_size: int, rows: Sequence[int] | Mesh) -> tuple[int, ...]:
    """Returns the rows, given a mesh those on this process's devices; raises unless they are rows of a batch."""
    numbers = local_rows(batch_size, rows) if isinstance(rows, Mesh) else [int(row) for row in rows]
    is_in_order = numbers == sorted(set(numbers))
    if not numbers or not is_in_order or numbers[0] < 0 or numbers[-1] >= batch_size:
        raise ShardingError(
            "These are not rows of a global batch.",
            where=f"rows={numbers}",
            why=f"rows are one or more of the numbers 0 to {batch_size - 1}, in order, without repeats.",
            do=f"rows=jshard.data.local_rows({batch_size}, mesh), or rows=mesh.",
        )
    return tuple(numbers)


def check_least(name: str, value: int, least: int, why: str) -> None:
    """Raises for an argument that is too small."""
    if value < least:
        raise ShardingError(
            f"Batches cannot be made with this {name}.", where=f"{name}={value}", why=why, do=f"{name}={least}."
        )
