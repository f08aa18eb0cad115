"""What both kinds of batches share: rows of a global batch, a position, and a reader that is ahead of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from jax.sharding import Mesh

from jshard._errors import ShardingError
from jshard.checkpoint.data.order import numbered, order_of
from jshard.checkpoint.errors import CheckpointError


class Batches:
    """An iterator over this process's rows of each global batch, with a position that is the same on every process.

    The position counts what was handed out, not what was read ahead.
    """

    # Told to `position_text`: the state is that of the run, not of a process.
    global_position: ClassVar[bool] = True

    def __init__(self, dataset: Any, *, batch_size: int, rows: Sequence[int] | Mesh, start: int) -> None:
        self.dataset = numbered(dataset)
        self.batch_size, self.rows = batch_size, _checked_rows(batch_size, rows)
        if start < 0:
            raise ShardingError(
                "The data cannot be read from there.",
                where=f"start={start}",
                why="it counts what is left out at the front.",
                do="start=0.",
            )
        self.order = order_of(self.dataset)
        self._reading: Any = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._reading is None:
            self._reading = self._reader()
        try:
            return self._handed_out(next(self._reading))
        except Exception:
            self.close()  # the next call tries the same batch again
            raise

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
        raise NotImplementedError

    def _handed_out(self, read: Any) -> Any:
        raise NotImplementedError

    def _position(self) -> dict[str, Any]:
        raise NotImplementedError

    def _move_to(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def _checked_rows(batch_size: int, rows: Sequence[int] | Mesh) -> tuple[int, ...]:
    if isinstance(rows, Mesh):
        from jshard.train.data.loader import local_rows  # here: the trainer imports checkpoints

        rows = local_rows(batch_size, rows)
    found = tuple(map(int, rows))
    if not found or list(found) != sorted(set(found)) or found[0] < 0 or found[-1] >= batch_size:
        raise ShardingError(
            "These are not rows of a global batch.",
            where=f"rows={list(found)}",
            why=f"rows are some of the numbers 0 to {batch_size - 1}, in order, each once, and at least one.",
            do=f"rows=js.train.local_rows({batch_size}, mesh), or rows=mesh.",
        )
    return found
