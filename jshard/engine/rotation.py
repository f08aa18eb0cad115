"""Loops over units: what the next trips gather first is gathered in this one, what this one has to reduce in the next.

The carry holds both. The schedule inside a trip is that of any program; the units of the trips after it stand at its
end. The gradients of a trip's last unit are reduced in the trip after it, beside all of that trip's products: in their
own trip they would wait for the last one. The last trips stand outside the loop, and so does the first of backward:
nothing is gathered or reduced in vain. What is stacked is written in place, row by row.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jshard import _compat
from jshard.engine.ahead import Level, Planned, planned, tied
from jshard.engine.rules.loops import Scan, rows
from jshard.engine.units import BACKWARD
from jshard.engine.values import Eqn, Shard, Value

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
        late: its unit whose gradients leave it unreduced.
        left: those that the trip before has left, the dtype to reduce them in, and as what they are stored.
        reduced: what became of them.
        passed_on: the parameters of those.
    """

    gathered: list[list[Any]]
    later: list[Planned]
    late: Eqn | None
    left: list[tuple[Any, Any, Shard]]
    reduced: list[Value] = dataclasses.field(default_factory=list)
    passed_on: list[list[Any]] = dataclasses.field(default_factory=list)


class Rotation:
    """A loop whose units are gathered in the trips before, and whose last one is reduced in the trip after it.

    Args:
        scan: the loop.
        plan: the units of one trip that gather.
        sources: of each, where its shards come from.
        count: how many units of later trips are gathered when a trip ends.
        late: the last unit, if its gradients can be reduced late.
    """

    def __init__(
        self, scan: Scan, plan: list[Planned], sources: list[list[Source]], count: int, late: Eqn | None
    ) -> None:
        self.scan, self.count, self._plan, self._sources, self._late = scan, count, plan, sources, late
        self.last_trips = -(-count // len(plan))
        self._stacked = [k for k, i in enumerate(scan.through) if i is None]
        self._avals = scan.traced.out_avals[scan.n_carry :]

    @classmethod
    def of(cls, scan: Scan) -> "Rotation | None":
        """A loop in this form; None for one without anything to gather ahead or reduce late, or with few trips."""
        probe = [rows(v, None) for v in scan.scanned]
        carried = [Value(None, state) for state in scan.states]
        plan = list(planned(scan.jaxpr, [*scan.shared, *carried, *probe]))
        at = {id(v): (False, i) for i, v in enumerate(scan.shared)} | {id(v): (True, i) for i, v in enumerate(probe)}
        sources = [[at.get(id(v)) for v in one.gathers] for one in plan]
        if not plan or scan.length < MIN_TRIPS:
            return None
        known = [[source for source in found if source is not None] for found in sources]
        count = min(gathered_ahead(plan, scan.length), len(plan) * (scan.length - 1)) if known == sources else 0
        late = late_unit(scan)
        return cls(scan, plan, known, count, late) if count or late is not None else None

    def _at(self, trip: Any) -> Any:
        """The row of a trip in what is scanned over, and in what is stacked."""
        return self.scan.length - 1 - trip if self.scan.reverse else trip

    def _unit(self, position: int, trip: Any) -> Planned:
        """A unit, counted from the first of a trip."""
        later, i = divmod(position, len(self._plan))
        at = self._at(trip + later)
        find = lambda is_row, k: _row(self.scan.scanned[k], at) if is_row else self.scan.shared[k]
        return Planned([find(*source) for source in self._sources[i]], self._plan[i].eqn)

    def _trip(self, p: "ShardedPartitioner", trip: Any, state: tuple, num_later: int, trips: int = 1) -> tuple:
        """One trip: the carry, what is gathered for later ones, what is not reduced yet, and what is stacked so far.

        Args:
            p: the partitioner.
            trip: its number.
            state: what the trip before returned.
            num_later: how many units it gathers for later trips.
            trips: how many trips this trace stands for.
        """
        scan, at, (carry, gathered, left, buffers) = self.scan, self._at(trip), state
        later = [self._unit(len(self._plan) + i, trip) for i in range(num_later)]
        handover = Handover(gathered, later, self._late, self._to_reduce(left))
        values = [Value(x, s) for x, s in zip(carry, scan.states, strict=True)]
        scanned = [_row(v, at) for v in scan.scanned]
        outs = p.run_trip(handover, lambda: scan.trip(values, scanned, trips=trips))
        kept = [p.in_state(v, s).x for v, s in zip(outs, scan.states, strict=False)]
        buffers = self._stored(buffers, zip(left, handover.reduced, strict=True), trip - 1)
        left, found = {}, {}
        for i, k in enumerate(self._stacked):
            v, s = outs[scan.n_carry + k], scan.row_states[k]
            if self._late is not None and v.is_partial and isinstance(s, Shard):
                left[i] = v.x
            else:
                found[i] = p.in_state(v, s)
        return kept, handover.passed_on, left, self._stored(buffers, found.items(), trip)

    def _to_reduce(self, left: dict[int, Any]) -> list[tuple[Any, Any, Shard]]:
        """What a trip has left, with the dtype and the form in which it is stacked."""
        states = [cast(Shard, self.scan.row_states[self._stacked[i]]) for i in left]
        return [(x, self._avals[i].dtype, s) for (i, x), s in zip(left.items(), states, strict=True)]

    def _stored(self, buffers: list[Any], found: Iterable[tuple[int, Value]], trip: Any) -> list[Any]:
        """The buffers with some of one trip's rows."""
        at, buffers = self._at(trip), list(buffers)
        for i, v in found:
            buffers[i] = _written(buffers[i], v.x, at)
        return buffers

    def run(self, p: "ShardedPartitioner") -> list[Value]:
        """The loop."""
        scan, looped = self.scan, self.scan.length - self.last_trips
        first = [self._unit(i, 0) for i in range(self.count)]
        shards, start = tied([[v.x for v in one.gathers] for one in first], scan.start)
        gathered = [p.gather_planned(one, xs) for one, xs in zip(first, shards, strict=True)]
        buffers = [_rows_of(a, scan.length) for a in self._avals]
        state, begin = (start, gathered, {}, buffers), 0
        if self._late is not None and looped:  # the first trip finds nothing to reduce
            state, begin = self._trip(p, 0, state, self.count), 1

        def step(state: tuple, trip: jax.Array) -> tuple[tuple, None]:
            return self._trip(p, trip, state, self.count, looped - begin), None

        if looped > begin:
            state, _ = lax.scan(step, state, jnp.arange(begin, looped))
        for trip in range(looped, scan.length):
            state = self._trip(p, trip, state, min(self.count, (scan.length - 1 - trip) * len(self._plan)))
        carry, _, left, buffers = state
        reduced = zip(left, p.reduce_left(self._to_reduce(left), self._late), strict=True)
        return scan.results(carry, self._stored(buffers, reduced, scan.length - 1))


def late_unit(scan: Scan) -> Eqn | None:
    """The last unit of a loop, if it is one of backward whose gradients are stacked and read by nothing else."""
    units = [e for e in scan.jaxpr.eqns if e.primitive.name == "unit"]
    prefetch = units[-1].params["settings"].prefetch if units else None
    if prefetch is None or prefetch.units == 0 or units[-1].params["phase"] != BACKWARD:
        return None
    last, results = units[-1], scan.jaxpr.outvars
    used = {id(a) for e in scan.jaxpr.eqns for a in e.invars} | {id(a) for a in results[: scan.n_carry]}
    stacked = [id(a) for a in results[scan.n_carry :]]
    gradients = [v for v in last.outvars[: sum(last.params["wrt"])] if not isinstance(v, jex.DropVar)]
    is_late = gradients and all(id(v) not in used and stacked.count(id(v)) == 1 for v in gradients)
    return last if is_late else None


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
