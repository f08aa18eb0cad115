"""Batches of a Grain dataset, and their position, from which any mesh and batch size can continue.

Row `r` of the batch after `n` samples is sample `n + r` of the run. This does not depend on the mesh or the number of
processes, so a run may continue on other machines with exactly the samples it would have seen.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from jshard._processes import gather_texts
from jshard._text import counted
from jshard.checkpoint.position import misfit
from jshard.checkpoint.sample_order import Description, describe, differences
from jshard.checkpoint.state_text import from_text, to_text
from jshard.data.loader import DataError, read_ahead
from jshard.errors import RunError, ShardingError
from jshard.plans.mesh import batch_sharding, data_degree

_ENDLESS = sys.maxsize  # the length of `dataset.repeat()`

# Number of sequences taken from a lane, and the state of its iterator after them.
Position = tuple[int, Any]
Pack = Callable[[Any], Any]


def local_rows(batch_size: int, mesh: Mesh) -> list[int]:
    """The rows of a global batch that are on this process's devices, in order.

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
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in slices if index for row in range(*index[0].indices(batch_size))})


def order_of(dataset: Any) -> list[str]:
    """The steps of a dataset that determine the order of its samples, starting with its sources.

    Steps that only change the contents of samples are left out: they may differ between two runs.

    Example:
        >>> order_of(grain.MapDataset.source(photos).shuffle(seed=3).map(crop).repeat())
        ['source of 1281167', 'shuffle of 1281167, seed 3', 'repeat without end']
    """
    parents = dataset.parents
    found = [step for parent in parents for step in order_of(parent)]
    name, size = type(dataset).__name__.removesuffix("MapDataset"), len(dataset)
    same_samples = len(parents) == 1 and len(parents[0]) == size and "Shuffle" not in name
    if name == "Slice":
        found.append(str(dataset).replace("SliceMapDataset", "slice").replace(str(_ENDLESS), ""))
    elif not same_samples:
        # Grain has no public name for the seed of a shuffle; without the attribute the seed is not compared.
        seed = getattr(dataset, "_seed", None)
        length = "without end" if size >= _ENDLESS else f"of {size}"
        found.append(f"{name.lower()} {length}" + ("" if seed is None else f", seed {seed}"))
    return found


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

    Example:
        >>> samples = grain.MapDataset.source(photos).shuffle(seed=0).map(crop).repeat()
        >>> batches = GlobalBatches(samples, batch_size=512, rows=mesh)
        >>> for batch in batches:
        ...     loss = step(js.shard_batch(batch, mesh))
    """

    # For `position_text`: the state is that of the run, not of a process.
    global_position: ClassVar[bool] = True

    def __init__(
        self, dataset: Any, *, batch_size: int, rows: Sequence[int] | Mesh, start: int = 0, read_options: Any = None
    ) -> None:
        self.dataset = _numbered(dataset)
        self.batch_size, self.rows = batch_size, _checked_rows(batch_size, rows)
        _check_least("start", start, 0, "it counts the samples to skip.")
        if len(self.dataset) < batch_size:
            raise ShardingError(
                "The data do not fill a batch.",
                where=f"batch_size={batch_size}",
                why=f"there are {len(self.dataset)} samples.",
                do=f"{type(self).__name__}(dataset.repeat(), ...), or a smaller batch.",
            )
        self.order, self.samples = order_of(self.dataset), start
        self._read_options = read_options
        self._reading: Any = None

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> Any:
        if self._reading is None:
            self._reading = self._reader(max(0, len(self.dataset) - self.samples) // self.batch_size)
        try:
            read = next(self._reading)
        except Exception:
            self.close()  # the next call tries the same batch again
            raise
        self.samples += self.batch_size
        return self._handed_out(read)

    def close(self) -> None:
        """Stops reading ahead; samples that were read but not returned are read again when needed."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def get_state(self) -> dict[str, Any]:
        """The position of the run, small and the same on every process; every process calls it."""
        return {"kind": type(self).__name__, "order": self.order, "pipeline": self.sample_order, **self._position()}

    @functools.cached_property
    def sample_order(self) -> Description | None:
        """What the order of samples depends on; reads three samples of each source, twice."""
        return describe(self.dataset)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a position of `get_state`, whatever the rows, the processes and the batch size were.

        Raises:
            CheckpointError: it is a position in other data, or in the same data in another order.
        """
        self.check_state(state)
        self.close()
        self._move_to(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises what `set_state` would raise, without changing the position."""
        misfits = list(self._misfits(state))
        if misfits:
            raise misfit(misfits, f"{type(self).__name__}(..., start=4096)")

    def _misfits(self, state: dict[str, Any]) -> Iterator[str]:
        """Each difference, as text."""
        if state.get("kind") != type(self).__name__:
            yield f"kind   saved {state.get('kind', 'another')}  here {type(self).__name__}"
        elif state["order"] != self.order:
            yield f"order  saved {'; '.join(state['order'])}"
            yield f"       here  {'; '.join(self.order)}"
        elif state.get("pipeline") is not None:  # earlier versions stored only the order
            yield from differences(state["pipeline"], self.sample_order)

    def _reader(self, num_batches: int) -> Any:
        """An iterator over this many batches from the position on; their samples are read ahead, in parallel."""
        import grain

        first, size, rows = self.samples, self.batch_size, self.rows

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

    def _handed_out(self, read: Any) -> Any:
        return read

    def _position(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def _move_to(self, state: dict[str, Any]) -> None:
        self.samples = int(state["samples"])


def _numbered(dataset: Any) -> Any:
    """The dataset as a `grain.MapDataset`: samples by number, in any order, any number of times."""
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
    found = tuple(map(int, local_rows(batch_size, rows) if isinstance(rows, Mesh) else rows))
    if not found or list(found) != sorted(set(found)) or found[0] < 0 or found[-1] >= batch_size:
        raise ShardingError(
            "These are not rows of a global batch.",
            where=f"rows={list(found)}",
            why=f"rows are one or more of the numbers 0 to {batch_size - 1}, in order, without repeats.",
            do=f"rows=jshard.data.local_rows({batch_size}, mesh), or rows=mesh.",
        )
    return found


def _check_least(name: str, value: int, least: int, why: str) -> None:
    if value < least:
        what = f"Batches cannot be made with this {name}."
        raise ShardingError(what, where=f"{name}={value}", why=why, do=f"{name}={least}.")


class PackedBatches(GlobalBatches):
    """This process's rows of each global batch of packed sequences, from any position on.

    The documents are distributed over `lanes`: lane `v` reads documents `v`, `v + lanes` and so on, and packs them
    into sequences with its own packer. Sequence `q` of the run is the next one of lane `q % lanes`, and row `r` of the
    batch after `n` sequences is sequence `n + r`. So the data and the number of lanes determine the sequences of the
    run; the mesh, the processes and the batch size only distribute them. A restore moves each lane, with the partly
    used document in its packer, to the processes that now have its rows: lanes of one process can be split among many
    and those of many merged into one, and the sequences are the same to the last token.

    The number of lanes belongs to the run: a restore uses the saved one. As long as the batch size divides it,
    no two rows of a batch share a lane. Otherwise they do, and processes that share a lane each read all of its
    documents: if the batch will grow, start with as many lanes as its largest size.

    Args:
        dataset: the documents; an endless `grain.MapDataset` (`.repeat()`), which may be filtered.
        pack: the length of a sequence: documents are 1-d arrays of tokens, concatenated and cut (a batch then has
            `tokens`, `tokens_segment_ids` and `tokens_positions`). Or a function from a `grain.IterDataset` of
            documents to one of sequences, which may use any of Grain's stateful iterators.
        batch_size: sequences in a global batch.
        rows: the rows of each global batch to read here, in order; given a mesh, those on this process's devices.
        lanes: number of lanes; by default `batch_size`, or that of a restored position.
        start: number of the first document.
        read_ahead: number of batches to read ahead, in one thread.

    Raises:
        ShardingError: the rows are not rows of such a batch, the data are finite, or there is no lane.

    Example:
        >>> documents = grain.MapDataset.source(token_arrays).shuffle(seed=0).repeat()
        >>> batches = PackedBatches(documents, pack=1024, batch_size=512, rows=mesh)
        >>> first_fit = lambda documents: grain.experimental.FirstFitPackIterDataset(
        ...     documents, length_struct={"tokens": 1024}, num_packing_bins=8)
        >>> batches = PackedBatches(documents.map(as_dict), pack=first_fit, batch_size=512, rows=mesh)
    """

    def __init__(
        self,
        dataset: Any,
        *,
        pack: int | Pack,
        batch_size: int,
        rows: Sequence[int] | Mesh,
        lanes: int | None = None,
        start: int = 0,
        read_ahead: int = 2,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, rows=rows, start=start)
        self.samples = 0  # sequences, which `start` does not count
        if len(self.dataset) < _ENDLESS:
            raise ShardingError(
                "Packed batches need endless documents.",
                where=f"a dataset of {len(self.dataset)} documents",
                why="lanes, and so processes, would reach the end of their documents at different steps.",
                do="PackedBatches(dataset.repeat(), ...), and stop after a number of steps.",
            )
        if lanes is not None:
            _check_least("lanes", lanes, 1, "documents are distributed over lanes.")
        self.order = [*self.order, *([f"from document {start}"] if start else [])]
        self.lanes = lanes or batch_size
        self._pack = _cut_to(pack) if isinstance(pack, int) else pack
        self._asked_lanes, self._start, self._read_ahead = lanes, start, read_ahead
        self._looks: dict[str, str] | None = None  # shape and dtype of a sequence
        self._restored: dict[int, Position] = {}  # known on every process
        self._moved: dict[int, Position] = {}  # changed since, on this process

    @functools.cached_property
    def sample_order(self) -> Description | None:
        """See `GlobalBatches.sample_order`; with the settings of `pack`, if it is of Grain's datasets."""
        packed = self._pack(self.dataset.to_iter_dataset())
        return describe(packed) or describe(self.dataset)

    def _reader(self, num_batches: int) -> Any:
        first, known = self.samples, {**self._restored, **self._moved}
        begun: dict[int, _Lane] = {}

        def batch(step: int) -> tuple[Any, dict[int, Position]]:
            """The sequences of the rows, stacked, and the positions of their lanes."""
            places = [divmod(first + step * self.batch_size + row, self.lanes) for row in self.rows]
            for _, lane in places:
                if lane not in begun:
                    begun[lane] = _Lane(lane, self._sequences(lane), known.get(lane))
            sequences = [begun[lane].sequence(number) for number, lane in places]
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *sequences)
            return stacked, {lane: begun[lane].position() for _, lane in places}

        return read_ahead(batch, num_batches, self._read_ahead)

    def _sequences(self, lane: int) -> Any:
        import grain

        documents = self.dataset[self._start + lane :: self.lanes]
        here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # no threads per lane
        return self._pack(documents.to_iter_dataset(here))

    def _handed_out(self, read: Any) -> Any:
        batch, positions = read
        self._moved.update(positions)
        self._looks = self._looks or _looks(batch, without_dims=1)
        return batch

    def _position(self) -> dict[str, Any]:
        """Merges the lane positions that each process knows for its rows."""
        mine = {"at": (self.samples, self.lanes), "looks": self._looks, "moved": self._moved}
        parts = [from_text(text) for text in gather_texts(to_text(mine))]
        if len({part["at"] for part in parts}) > 1:
            raise RunError(
                "The processes are not at the same place in the data.",
                where=[
                    f"process {i}: {part['at'][0]} sequences, {part['at'][1]} lanes" for i, part in enumerate(parts)
                ],
                why="a position is that of the run: every process must have taken the same number of batches.",
                do="save between steps, at the same step on every process.",
            )
        found = dict(self._restored)
        for part in parts:
            for lane, position in part["moved"].items():
                found[lane] = max(found.get(lane, (0, None)), position, key=lambda position: position[0])
        for lane, given in enumerate(self._given()):
            known = found.get(lane, (0, None))[0]
            if known != given:
                raise RunError(
                    "No process reads some rows of the global batch.",
                    where=f"lane {lane}: {given} sequences are returned, the processes know of {known}",
                    why=f"this process reads {len(self.rows)} rows of {self.batch_size}; no process reads the others.",
                    do="rows=mesh on every process, with the mesh of the model.",
                )
        states = [found[lane][1] if lane in found else None for lane in range(self.lanes)]
        looks = next((part["looks"] for part in parts if part["looks"]), None)
        return {"sequences": self.samples, "lanes": self.lanes, "looks": looks, "states": states}

    def _given(self) -> list[int]:
        """The number of returned sequences from each lane."""
        return [max(0, (self.samples - lane + self.lanes - 1) // self.lanes) for lane in range(self.lanes)]

    def _move_to(self, state: dict[str, Any]) -> None:
        self.samples, self.lanes, self._looks = state["sequences"], state["lanes"], state["looks"]
        self._restored = {lane: (n, state["states"][lane]) for lane, n in enumerate(self._given()) if n}
        self._moved = {}

    def _misfits(self, state: dict[str, Any]) -> Iterator[str]:
        misfits = list(super()._misfits(state))
        yield from misfits
        if misfits:
            return
        if self._asked_lanes not in (None, state["lanes"]):
            yield f"lanes  saved {state['lanes']}  here {self._asked_lanes}"
        if state["looks"]:
            here = _looks(next(iter(self._sequences(0))))
            for key in {**state["looks"], **here}:
                saved, now = state["looks"].get(key, "nothing"), here.get(key, "nothing")
                if saved != now:
                    yield f"{key}  saved {saved}  here {now}"


class _Lane:
    """One stream of sequences, read from a position on; sequences of other processes are skipped."""

    def __init__(self, number: int, sequences: Any, position: Position | None) -> None:
        self._number = number
        self._iterator = iter(sequences)
        self._given = 0
        if position is not None:
            self._given, state = position
            try:
                self._iterator.set_state(copy.deepcopy(state))
            except Exception as cause:
                raise self._failed("The saved position of a lane does not fit `pack`.", cause) from cause

    def sequence(self, number: int) -> Any:
        """A sequence by its number in the lane; numbers only grow."""
        sequence = None
        while self._given <= number:
            try:
                sequence = next(self._iterator)
            except Exception as cause:
                raise self._failed("A sequence cannot be read.", cause) from cause
            self._given += 1
        return sequence

    def position(self) -> Position:
        return self._given, copy.deepcopy(self._iterator.get_state())

    def _failed(self, what: str, cause: Exception) -> RunError:
        why, do = f"{type(cause).__name__}: {cause}", "make the documents of that lane readable, and use the `pack` of"
        do += " the saved run."
        if isinstance(cause, StopIteration):
            why = "it ended; lanes must be endless, or processes would end at different steps."
            do = "let `pack` return sequences as long as there are documents, and repeat the dataset: .repeat()."
        return RunError(what, where=f"lane {self._number}, sequence {self._given}", why=why, do=do)


def _cut_to(length: int) -> Pack:
    _check_least("pack", length, 1, "it is the length of a sequence.")

    def pack(documents: Any) -> Any:
        from grain.experimental import ConcatThenSplitIterDataset

        tokens = documents.map(lambda document: {"tokens": document})
        return ConcatThenSplitIterDataset(tokens, length_struct={"tokens": length})

    return pack


def _looks(tree: Any, *, without_dims: int = 0) -> dict[str, str]:
    """Shape and dtype by path."""
    leaves = [(path, np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    keystr = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {keystr(path): f"{leaf.shape[without_dims:]} {leaf.dtype}" for path, leaf in leaves}
