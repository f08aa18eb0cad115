"""Prefetch in loops: the first unit of trip i + 1 is gathered in trip i, and the carry holds it.

The first and the last trip stand outside the loop, so that nothing is gathered in vain. What is stacked is written in
place, row by row. The schedule inside a trip is that of any program; its last entry is the next trip's unit.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jshard.engine.rules.loops import Scan, rows
from jshard.engine.values import Value

MIN_TRIPS = 3


@dataclasses.dataclass(eq=False)
class Handover:
    """What a trip is given of the trip before, and gives to the next.

    Args:
        gathered: the parameters of its first unit.
        next_shards: the shards of the next trip's first unit; none in the last trip.
        gathered_next: what was gathered of them.
    """

    gathered: list[Any]
    next_shards: list[Value]
    gathered_next: list[Any] | None = None


class Rotation:
    """A loop whose first unit is gathered a trip ahead.

    Args:
        scan: the loop.
        which: of what is scanned over, the parameters of that unit, in the order in which it gathers them.
        gather: gathers shards of that unit, as it would.
        run_trip: runs one trip with a handover.
    """

    def __init__(self, scan: Scan, which: Sequence[int], gather: Any, run_trip: Any) -> None:
        self.scan, self.which, self._gather, self._run_trip = scan, which, gather, run_trip

    def _rows(self, trip: Any) -> list[Value]:
        """The rows of one trip."""
        at = self.scan.length - 1 - trip if self.scan.reverse else trip
        return [rows(v, lax.dynamic_index_in_dim(v.x, at, 0, keepdims=False)) for v in self.scan.scanned]

    def _trip(self, trip: Any, carry: list[Any], gathered: list[Any], *, last: bool = False, trips: int = 1) -> tuple:
        """One trip: the carry, what it gathered for the next, and the rows to stack."""
        scan = self.scan
        soon = [] if last else self._rows(trip + 1)
        handover = Handover(gathered, [soon[i] for i in self.which] if soon else [])
        values = [Value(x, state) for x, state in zip(carry, scan.states, strict=True)]
        outs = self._run_trip(handover, lambda: scan.trip(values, self._rows(trip), trips=trips))
        kept = [scan.p.in_state(v, state).x for v, state in zip(outs, scan.states, strict=False)]
        stacked = outs[scan.n_carry :]
        found = [
            scan.p.in_state(v, state).x
            for v, state, i in zip(stacked, scan.row_states, scan.through, strict=True)
            if i is None
        ]
        return kept, handover.gathered_next, found

    def _written(self, buffers: list[Any], found: list[Any], trip: Any) -> list[Any]:
        at = self.scan.length - 1 - trip if self.scan.reverse else trip
        return [lax.dynamic_update_index_in_dim(b, x, at, 0) for b, x in zip(buffers, found, strict=True)]

    def run(self) -> list[Value]:
        """The loop."""
        scan, n = self.scan, self.scan.length
        first = self._rows(0)
        gathered, start = self._gather([first[i] for i in self.which], scan.start)
        carry, gathered, found = self._trip(0, start, gathered)
        buffers = self._written([jnp.zeros((n, *x.shape), x.dtype) for x in found], found, 0)

        def step(state: tuple, _: None) -> tuple[tuple, None]:
            trip, carry, gathered, buffers = state
            carry, gathered, found = self._trip(trip, carry, gathered, trips=n - 2)
            return (trip + 1, carry, gathered, self._written(buffers, found, trip)), None

        state = jnp.int32(1), carry, gathered, buffers
        (_, carry, gathered, buffers), _ = lax.scan(step, state, None, length=n - 2)
        carry, _, found = self._trip(n - 1, carry, gathered, last=True)
        return scan.results(carry, self._written(buffers, found, n - 1))
