"""Batches of packed sequences, and their position, from which any mesh and batch size can continue.

    documents    0 1 2 3 4 5 ...
    lane 0       0 . 2 . 4 .        packs its documents into sequences 0, 2, 4 of the run
    lane 1       . 1 . 3 . 5        packs its documents into sequences 1, 3, 5

A lane is read by each process that has some of its sequences. Its position is the number of sequences taken from it,
and the state of its iterator after them, with the document that the packer has partly used.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jshard._processes import gather_texts
from jshard._types import Json, PyTree
from jshard.checkpoint.data_position.sample_order import Description, describe
from jshard.checkpoint.data_position.state_text import from_text, to_text
from jshard.data.batches import ENDLESS, GlobalBatches, check_least
from jshard.data.loader import GrainDataset, read_ahead
from jshard.errors import RunError, ShardingError

Pack = Callable[[GrainDataset], GrainDataset]
"""Makes a `grain.IterDataset` of sequences from one of documents."""

Position = tuple[int, Json]
"""Number of sequences taken from a lane, and the state of its iterator after them."""


class _ReadBatch(NamedTuple):
    """A batch that was read ahead."""

    batch: PyTree
    positions: dict[int, Position]  # of its lanes, after it


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

    Examples:
        >>> documents = grain.MapDataset.source(token_arrays).shuffle(seed=0).repeat()
        >>> batches = PackedBatches(documents, pack=1024, batch_size=512, rows=mesh)
        >>> first_fit = lambda documents: grain.experimental.FirstFitPackIterDataset(
        ...     documents, length_struct={"tokens": 1024}, num_packing_bins=8)
        >>> batches = PackedBatches(documents.map(as_dict), pack=first_fit, batch_size=512, rows=mesh)
    """

    def __init__(
        self,
        dataset: GrainDataset,
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
        if len(self.dataset) < ENDLESS:
            raise ShardingError(
                "Packed batches need endless documents.",
                where=f"a dataset of {len(self.dataset)} documents",
                why="lanes, and so processes, would reach the end of their documents at different steps.",
                do="PackedBatches(dataset.repeat(), ...), and stop after a number of steps.",
            )
        if lanes is not None:
            check_least("lanes", lanes, 1, "documents are distributed over lanes.")
        if start:
            self.order = [*self.order, f"from document {start}"]
        self.lanes = lanes or batch_size
        self._pack = _cut_to(pack) if isinstance(pack, int) else pack
        self._requested_lanes = lanes
        self._start = start
        self._read_ahead = read_ahead
        self._form: dict[str, str] | None = None  # shape and dtype of a sequence
        self._restored: dict[int, Position] = {}  # of lanes, known on every process
        self._moved: dict[int, Position] = {}  # changed since, on this process

    @functools.cached_property
    def sample_order(self) -> Description | None:
        """See `GlobalBatches.sample_order`; with the settings of `pack`, if it is of Grain's datasets."""
        packed = self._pack(self.dataset.to_iter_dataset())
        return describe(packed) or describe(self.dataset)

    # ---- reading

    def _reader(self, num_batches: int) -> Iterator[Any]:
        first = self.samples
        # What this process has read since counts more than what was restored.
        positions = {**self._restored, **self._moved}
        lanes: dict[int, _Lane] = {}  # those that this process reads

        def batch(step: int) -> _ReadBatch:
            """Returns the sequences of the rows, stacked, and the positions of their lanes."""
            sequences = []
            lanes_of_batch: dict[int, _Lane] = {}
            for row in self.rows:
                # Sequence `q` of the run is the next one of lane `q % lanes`.
                number, lane_number = divmod(first + step * self.batch_size + row, self.lanes)
                if lane_number not in lanes:
                    position = positions.get(lane_number)
                    lanes[lane_number] = _Lane(lane_number, self._sequences(lane_number), position)
                lane = lanes[lane_number]
                sequences.append(lane.sequence(number))
                lanes_of_batch[lane_number] = lane
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *sequences)
            # Once the last row is read: several rows may share a lane.
            positions_after = {lane_number: lane.position() for lane_number, lane in lanes_of_batch.items()}
            return _ReadBatch(stacked, positions_after)

        return read_ahead(batch, num_batches, self._read_ahead)

    def _sequences(self, lane: int) -> GrainDataset:
        """Returns the sequences of a lane, from its first document on."""
        import grain

        documents = self.dataset[self._start + lane :: self.lanes]
        in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # no threads per lane
        return self._pack(documents.to_iter_dataset(in_this_thread))

    def _handed_out(self, read: _ReadBatch) -> PyTree:
        # Only now: batches that are read ahead and never requested do not move the position.
        self._moved.update(read.positions)
        if not self._form:
            self._form = _form_of(read.batch, without_dims=1)
        return read.batch

    # ---- the position

    def _position(self) -> dict[str, Json]:
        """Merges the lane positions that each process knows for its rows."""
        known_here = {"place": (self.samples, self.lanes), "form": self._form, "moved": self._moved}
        processes = [from_text(text) for text in gather_texts(to_text(known_here))]
        _check_same_place([process["place"] for process in processes])
        positions = dict(self._restored)
        for process in processes:
            for lane, position in process["moved"].items():
                # Processes that share a lane may have read it to different points.
                if position[0] > _num_taken(positions, lane):
                    positions[lane] = position
        self._check_lanes(positions)
        # A process that has read nothing yet does not know the form.
        forms = [process["form"] for process in processes if process["form"]]
        states = []
        for lane in range(self.lanes):
            position = positions.get(lane)
            states.append(None if position is None else position[1])
        return {
            "sequences": self.samples,
            "lanes": self.lanes,
            # The name that stored positions have for the form.
            "looks": forms[0] if forms else None,
            "states": states,
        }

    def _check_lanes(self, positions: Mapping[int, Position]) -> None:
        """Raises for a lane of which some returned sequence was read by no process."""
        for lane in range(self.lanes):
            num_taken = _num_taken(positions, lane)
            num_returned = self._num_returned(lane)
            if num_taken != num_returned:
                raise RunError(
                    "No process reads some rows of the global batch.",
                    where=f"lane {lane}: {num_returned} sequences are returned, the processes know of {num_taken}",
                    why=f"this process reads {len(self.rows)} rows of {self.batch_size}; no process reads the others.",
                    do="rows=mesh on every process, with the mesh of the model.",
                )

    def _num_returned(self, lane: int) -> int:
        """Returns how many sequences of a lane are among the first `samples` of the run."""
        return max(0, -(-(self.samples - lane) // self.lanes))

    def _move_to(self, state: dict[str, Json]) -> None:
        self.samples = state["sequences"]
        self.lanes = state["lanes"]
        self._form = state["looks"]
        self._moved = {}
        self._restored = {}
        for lane in range(self.lanes):
            num_returned = self._num_returned(lane)
            if num_returned:
                # Of a lane from which nothing was taken, there is no state: it begins with its first document.
                self._restored[lane] = (num_returned, state["states"][lane])

    def _misfits(self, state: dict[str, Json]) -> Iterator[str]:
        misfits = list(super()._misfits(state))
        yield from misfits
        if misfits:
            return
        if self._requested_lanes not in (None, state["lanes"]):
            yield f"lanes  saved {state['lanes']}  here {self._requested_lanes}"
        saved_form = state["looks"]
        if saved_form:
            # The only way to know the form: it depends on `pack`, and on the documents.
            first_sequence = next(iter(self._sequences(0)))
            form = _form_of(first_sequence)
            for key in {**saved_form, **form}:
                saved = saved_form.get(key, "nothing")
                current = form.get(key, "nothing")
                if saved != current:
                    yield f"{key}  saved {saved}  here {current}"


def _num_taken(positions: Mapping[int, Position], lane: int) -> int:
    """Returns how many sequences were taken from a lane."""
    if lane not in positions:
        return 0
    return positions[lane][0]


def _check_same_place(places: Sequence[tuple[int, int]]) -> None:
    """Raises unless all processes have returned as many sequences, of as many lanes."""
    if len(set(places)) > 1:
        described = []
        for i, (num_sequences, num_lanes) in enumerate(places):
            described.append(f"process {i}: {num_sequences} sequences, {num_lanes} lanes")
        raise RunError(
            "The processes are not at the same place in the data.",
            where=described,
            why="a position is that of the run: every process must have taken the same number of batches.",
            do="save between steps, at the same step on every process.",
        )


class _Lane:
    """One stream of sequences, read from a position on; sequences of other processes are skipped."""

    def __init__(self, number: int, sequences: GrainDataset, position: Position | None) -> None:
        self._number = number
        self._iterator = iter(sequences)
        self._num_taken = 0
        if position is not None:
            self._num_taken, state = position
            try:
                # A copy: an iterator may change its state in place, and this one is still to be saved.
                self._iterator.set_state(copy.deepcopy(state))
            except Exception as cause:
                raise self._failed("The saved position of a lane does not fit `pack`.", cause) from cause

    def sequence(self, number: int) -> PyTree:
        """Returns a sequence by its number in the lane; numbers only grow."""
        sequence = None
        while self._num_taken <= number:
            try:
                sequence = next(self._iterator)
            except Exception as cause:
                raise self._failed("A sequence cannot be read.", cause) from cause
            self._num_taken += 1
        return sequence

    def position(self) -> Position:
        """Returns the position after the last sequence."""
        return self._num_taken, copy.deepcopy(self._iterator.get_state())

    def _failed(self, what: str, cause: Exception) -> RunError:
        why = f"{type(cause).__name__}: {cause}"
        do = "make the documents of that lane readable, and use the `pack` of the saved run."
        if isinstance(cause, StopIteration):
            why = "it ended; lanes must be endless, or processes would end at different steps."
            do = "let `pack` return sequences as long as there are documents, and repeat the dataset: .repeat()."
        return RunError(what, where=f"lane {self._number}, sequence {self._num_taken}", why=why, do=do)


def _cut_to(length: int) -> Pack:
    """Returns a packer that concatenates documents and cuts them."""
    check_least("pack", length, 1, "it is the length of a sequence.")

    def pack(documents: GrainDataset) -> GrainDataset:
        from grain.experimental import ConcatThenSplitIterDataset

        tokens = documents.map(lambda document: {"tokens": document})
        return ConcatThenSplitIterDataset(tokens, length_struct={"tokens": length})

    return pack


def _form_of(tree: PyTree, *, without_dims: int = 0) -> dict[str, str]:
    """Returns shape and dtype of each array by its path; the first dims of a batch are left out."""
    form = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        form[key] = f"{array.shape[without_dims:]} {array.dtype}"
    return form
