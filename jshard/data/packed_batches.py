"""Batches of sequences that are packed from documents, dealt from lanes; the position is that of every packer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jshard._processes import gather_texts
from jshard.checkpoint.position import from_text, to_text
from jshard.data.batches import ENDLESS, Batches
from jshard.errors import RunError, ShardingError

# Sequences that a lane has given, and the state of its iterator behind them.
Position = tuple[int, Any]


def sequences_of(lane: int, *, handed_out: int, lanes: int) -> int:
    """How many of the first `handed_out` sequences of the run came from a lane: number `q` is of lane `q % lanes`."""
    return max(0, (handed_out - lane + lanes - 1) // lanes)


class Lane:
    """One stream of sequences, read from the front; what other processes were given of it is read over.

    Args:
        number: which lane, for messages.
        sequences: its Grain dataset.
        position: where to begin, or None for the front.
    """

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
        """Where the lane is now."""
        return self._given, copy.deepcopy(self._iterator.get_state())

    def _failed(self, what: str, cause: Exception) -> RunError:
        ended = isinstance(cause, StopIteration)
        return RunError(
            what,
            where=f"lane {self._number}, sequence {self._given}",
            why="it ended; lanes have no end, or processes would end at different steps."
            if ended
            else f"{type(cause).__name__}: {cause}",
            do="let `pack` give sequences as long as there are documents, and repeat the dataset: .repeat()."
            if ended
            else "make the documents of that lane readable, and `pack` the one of the saved run.",
        )


Pack = Callable[[Any], Any]


class PackedBatches(Batches):
    """This process's rows of each global batch of packed sequences, on from any position.

    The documents are dealt to `lanes`: lane `v` reads documents `v`, `v + lanes` and so on, and a packer of its own
    makes sequences of them. Sequence `q` of the run is the next one of lane `q % lanes`, and row `r` of the batch after
    `n` sequences is sequence `n + r`. So the sequences of the run are fixed by the data and the number of lanes; the
    mesh, the processes and the batch size only deal them out. A restore brings each lane, with the half-used document
    in its packer, to the processes that now have its rows: what one process held is split among many, what many held
    comes together in one, and the sequences are the same to the last token.

    The number of lanes belongs to the run: a restore takes over the saved one. As long as the batch size divides it,
    no two rows of a batch share a lane. With another batch size they do, and processes that share a lane each read all
    of its documents: for a batch that will grow, begin with as many lanes as its largest size.

    Args:
        dataset: the documents; a `grain.MapDataset` without an end (`.repeat()`), filtered if you like.
        pack: the length of a sequence: documents are 1-d arrays of tokens, laid end to end and cut (a batch then has
            `tokens`, `tokens_segment_ids` and `tokens_positions`). Or a function from a `grain.IterDataset` of
            documents to one of sequences, which may use any of Grain's iterators that have a state.
        batch_size: sequences in a global batch.
        rows: the rows of each global batch to read here, in order; of a mesh, those that are on this process's devices.
        lanes: how many; by default `batch_size`, or what a restored position says.
        start: number of the first document.
        read_ahead: batches that are read ahead, by one thread.

    Raises:
        ShardingError: the rows are not rows of such a batch, the data have an end, or there is no lane.

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
        if len(self.dataset) < ENDLESS:
            raise ShardingError(
                "Packed batches need documents without an end.",
                where=f"a dataset of {len(self.dataset)} documents",
                why="lanes come to the end of their documents at different steps, and then processes would.",
                do="PackedBatches(dataset.repeat(), ...), and stop after a number of steps.",
            )
        if lanes is not None and lanes < 1:
            raise ShardingError(
                "There must be a lane to read.",
                where=f"lanes={lanes}",
                why="documents are dealt to lanes.",
                do="lanes=1.",
            )
        self.order = [*self.order, *([f"from document {start}"] if start else [])]
        self.lanes = lanes or batch_size
        self._pack = _cut_to(pack) if isinstance(pack, int) else pack
        self._asked_lanes, self._start, self._read_ahead = lanes, start, read_ahead
        self._looks: dict[str, str] | None = None  # of a sequence
        self._restored: dict[int, Position] = {}  # known to every process
        self._moved: dict[int, Position] = {}  # since then, here

    def _begin(self, numbers: Callable[[int], list[int]], num_batches: int) -> Callable[[int], Any]:
        known = {**self._restored, **self._moved}
        begun: dict[int, Lane] = {}

        def batch(step: int) -> tuple[Any, dict[int, Position]]:
            """The sequences of the rows, stacked, and where the lanes are that they came from."""
            places = [divmod(number, self.lanes) for number in numbers(step)]
            for _, lane in places:
                if lane not in begun:
                    begun[lane] = Lane(lane, self._sequences(lane), known.get(lane))
            sequences = [begun[lane].sequence(number) for number, lane in places]
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *sequences)
            return stacked, {lane: begun[lane].position() for _, lane in places}

        return batch

    def _sequences(self, lane: int) -> Any:
        import grain

        documents = self.dataset[self._start + lane :: self.lanes]
        here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # not threads for every lane
        return self._pack(documents.to_iter_dataset(here))

    def _handed_out(self, read: Any) -> Any:
        batch, positions = read
        self._moved.update(positions)
        self._looks = self._looks or _looks(batch, without_dims=1)
        return batch

    def _position(self) -> dict[str, Any]:
        """Each process knows where the lanes of its rows are: together they know all."""
        mine = {"at": (self.samples, self.lanes), "looks": self._looks, "moved": self._moved}
        parts = [from_text(text) for text in gather_texts(to_text(mine))]
        _check_in_step([part["at"] for part in parts])
        found = dict(self._restored)
        for part in parts:
            for lane, position in part["moved"].items():
                found[lane] = max(found.get(lane, (0, None)), position, key=lambda position: position[0])
        for lane in range(self.lanes):
            self._check_known(lane, found.get(lane, (0, None))[0])
        states = [found[lane][1] if lane in found else None for lane in range(self.lanes)]
        looks = next((part["looks"] for part in parts if part["looks"]), None)
        return {"sequences": self.samples, "lanes": self.lanes, "looks": looks, "states": states}

    def _move_to(self, state: dict[str, Any]) -> None:
        self.samples, self.lanes, self._looks = state["sequences"], state["lanes"], state["looks"]
        given = [sequences_of(lane, handed_out=self.samples, lanes=self.lanes) for lane in range(self.lanes)]
        self._restored = {lane: (n, state["states"][lane]) for lane, n in enumerate(given) if n}
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

    def _check_known(self, lane: int, known: int) -> None:
        given = sequences_of(lane, handed_out=self.samples, lanes=self.lanes)
        if known != given:
            raise RunError(
                "Rows of the global batch are read by no process.",
                where=f"lane {lane}: {given} sequences are handed out, the processes know of {known}",
                why=f"this process reads {len(self.rows)} rows of {self.batch_size}; all of them together read fewer.",
                do="rows=mesh on every process, with the mesh of the model.",
            )


def _cut_to(length: int) -> Pack:
    if length < 1:
        raise ShardingError(
            "A sequence must hold a token.",
            where=f"pack={length}",
            why="it is the length of a sequence.",
            do="pack=1024.",
        )

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


def _check_in_step(at: list[tuple[int, int]]) -> None:
    if len(set(at)) > 1:
        raise RunError(
            "The processes are not at the same place in the data.",
            where=[f"process {i}: {sequences} sequences, {lanes} lanes" for i, (sequences, lanes) in enumerate(at)],
            why="a position is that of the run: every process has taken the same number of batches.",
            do="save between two steps, on every process at the same step.",
        )
