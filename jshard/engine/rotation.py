"""Prefetch in loops: what the next trips gather first is gathered in this one, and the carry holds it.

The schedule inside a trip is that of any program; the units of the trips after it stand at its end. The last trips
stand outside the loop, so that nothing is gathered in vain. What is stacked is written in place, row by row.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard.engine.ahead import Level, Planned, planned, tied
from jshard.engine.rules.loops import Scan, rows
from jshard.engine.values import Value

if TYPE_CHECKING:
    from jshard.engine.schedule import ShardedPartitioner

MIN_TRIPS = 3

Source = tuple[bool, int]
"""Where a unit's shards come from: whether they are rows, and which of what is scanned over, or of what is shared."""


@dataclasses.dataclass(eq=False)
class Handover:
    """What a trip is given of the trips before, and gives to those after it.

    Args:
        gathered: of its first units, and of later trips' if they are few, the parameters.
        later: the units of later trips that are gathered when it ends.
        passed_on: the parameters of those.
    """

    gathered: list[list[Any]]
    later: list[Planned]
    passed_on: list[list[Any]] = dataclasses.field(default_factory=list)


class Rotation:
    """A loop whose units are gathered in the trips before.

    Args:
        scan: the loop.
        plan: the units of one trip that gather.
        sources: of each, where its shards come from.
        count: how many units of later trips are gathered when a trip ends.
    """

    def __init__(self, scan: Scan, plan: list[Planned], sources: list[list[Source]], count: int) -> None:
        self.scan, self.count, self._plan, self._sources = scan, count, plan, sources
        self.last_trips = -(-count // len(plan))

    @classmethod
    def of(cls, scan: Scan) -> "Rotation | None":
        """A loop in this form; None for one without units to gather ahead, or with few trips."""
        probe = [rows(v, None) for v in scan.scanned]
        carried = [Value(None, state) for state in scan.states]
        plan = list(planned(scan.jaxpr, [*scan.shared, *carried, *probe]))
        at = {id(v): (False, i) for i, v in enumerate(scan.shared)} | {id(v): (True, i) for i, v in enumerate(probe)}
        sources = [[at.get(id(v)) for v in one.gathers] for one in plan]
        if scan.length < MIN_TRIPS or any(source is None for found in sources for source in found):
            return None
        count = min(gathered_ahead(plan, scan.length), len(plan) * (scan.length - 1))
        known = [[source for source in found if source is not None] for found in sources]
        return cls(scan, plan, known, count) if count else None

    def _at(self, trip: Any) -> Any:
        """The row of a trip in what is scanned over, and in what is stacked."""
        return self.scan.length - 1 - trip if self.scan.reverse else trip

    def _unit(self, position: int, trip: Any) -> Planned:
        """A unit, counted from the first of a trip."""
        later, i = divmod(position, len(self._plan))
        at = self._at(trip + later)
        find = lambda is_row, k: _row(self.scan.scanned[k], at) if is_row else self.scan.shared[k]
        return Planned([find(*source) for source in self._sources[i]], self._plan[i].eqn)

    def _trip(self, p: "ShardedPartitioner", trip: Any, state: tuple, left: int, trips: int = 1) -> tuple:
        """One trip: the carry, what is gathered for later ones, and what is stacked so far.

        Args:
            p: the partitioner.
            trip: its number.
            state: what the trip before returned.
            left: how many units it gathers for later trips.
            trips: how many trips this trace stands for.
        """
        scan, at, (carry, gathered, buffers) = self.scan, self._at(trip), state
        handover = Handover(gathered, [self._unit(len(self._plan) + i, trip) for i in range(left)])
        values = [Value(x, s) for x, s in zip(carry, scan.states, strict=True)]
        scanned = [_row(v, at) for v in scan.scanned]
        outs = p.run_trip(handover, lambda: scan.trip(values, scanned, trips=trips))
        kept = [p.in_state(v, s).x for v, s in zip(outs, scan.states, strict=False)]
        found = [
            p.in_state(v, s).x
            for v, s, i in zip(outs[scan.n_carry :], scan.row_states, scan.through, strict=True)
            if i is None
        ]
        written = [_written(b, x, at) for b, x in zip(buffers, found, strict=True)]
        return kept, handover.passed_on, written

    def run(self, p: "ShardedPartitioner") -> list[Value]:
        """The loop."""
        scan, looped = self.scan, self.scan.length - self.last_trips
        first = [self._unit(i, 0) for i in range(self.count)]
        shards, start = tied([[v.x for v in one.gathers] for one in first], scan.start)
        gathered = [p.gather_planned(one, xs) for one, xs in zip(first, shards, strict=True)]
        buffers = [_rows_of(a, scan.length) for a in scan.traced.out_avals[scan.n_carry :]]

        def step(state: tuple, trip: jax.Array) -> tuple[tuple, None]:
            return self._trip(p, trip, state, self.count, looped), None

        state, _ = lax.scan(step, (start, gathered, buffers), jnp.arange(looped))
        for trip in range(looped, scan.length):
            state = self._trip(p, trip, state, min(self.count, (scan.length - 1 - trip) * len(self._plan)))
        return scan.results(state[0], state[2])


def _rows_of(aval: Any, length: int) -> jax.Array:
    """Rows of a type, to be written; in host memory, if that is where the type lies."""
    shape = (length, *aval.shape)
    return _compat.host_rows(shape, aval.dtype) if _compat.on_host(aval) else jnp.zeros(shape, aval.dtype)


def gathered_ahead(plan: Sequence[Planned], trips: int) -> int:
    """How far into later trips units are gathered when a trip ends, once it is equally far for each."""
    level, found = Level([*plan] * (2 * trips)), -1
    for at in range(trips * len(plan)):
        level.gathered.pop(at, None)
        level.gathered |= {i: [] for i in level.ahead(at)}
        if (at + 1) % len(plan) == 0:
            before, found = found, max(level.gathered, default=at) - at
            if found == before:
                break
    return max(found, 0)


def _row(value: Value, at: Any) -> Value:
    """One trip's row of what is scanned over. It is never negative: leaving that open costs six equations a row."""
    x = value.x
    if isinstance(at, int):
        return rows(value, lax.index_in_dim(x, at, keepdims=False))
    starts = (at, *[0] * (x.ndim - 1))
    row = lax.dynamic_slice(x, starts, (1, *x.shape[1:]), allow_negative_indices=False)
    return rows(value, lax.squeeze(row, (0,)))


def _written(x: Any, row: Any, at: Any) -> Any:
    """An array with a row written."""
    return lax.dynamic_update_slice(x, row[None], (at, *[0] * row.ndim), allow_negative_indices=False)
