"""Lanes: the streams of sequences that packed batches are dealt from, and which sequence comes from which."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jshard._errors import RunError

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


class LaneReader:
    """Reads the rows of batches, one batch after another.

    Args:
        lanes: how many there are.
        handed_out: sequences of the run before the first batch.
        batch_size: sequences in a global batch.
        rows: which of them are read here.
        begin: makes a lane, at its position.
    """

    def __init__(
        self, *, lanes: int, handed_out: int, batch_size: int, rows: Sequence[int], begin: Callable[[int], Lane]
    ) -> None:
        self._lanes, self._first, self._batch_size, self._rows = lanes, handed_out, batch_size, rows
        self._begin = begin
        self._begun: dict[int, Lane] = {}

    def batch(self, step: int) -> tuple[Any, dict[int, Position]]:
        """The sequences of the rows, stacked, and where the lanes are that they came from."""
        sequences, touched = [], set()
        for row in self._rows:
            number, lane = divmod(self._first + step * self._batch_size + row, self._lanes)
            if lane not in self._begun:
                self._begun[lane] = self._begin(lane)
            sequences.append(self._begun[lane].sequence(number))
            touched.add(lane)
        return (
            jax.tree.map(lambda *leaves: np.stack(leaves), *sequences),
            {lane: self._begun[lane].position() for lane in touched},
        )
