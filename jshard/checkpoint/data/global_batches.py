"""Batches of samples that are read by number; the position is how many were handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from jshard._errors import RunError, ShardingError
from jshard.checkpoint.data.batches import Batches


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
        rows: the rows of each global batch to read here, in order; of a mesh, those that lie on this process's devices.
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
        self.samples, self._read_options = start, read_options

    def _reader(self) -> Any:
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

    def _handed_out(self, read: Any) -> Any:
        self.samples += self.batch_size
        return read

    def _position(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def _move_to(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])
