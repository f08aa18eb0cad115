"""Loops over units: each trip does the first gathers of the next trips, and the last reductions of the trip before.

The carry holds both. The schedule inside a trip is that of any program; the units of the trips after it are at its
end. The gradients of a trip's last unit are reduced in the trip after it, beside all of that trip's products: in their
own trip they would wait for the last one. The last trips, and the first of backward, are outside the loop, so that
no gather or reduction is wasted. Stacked results are written in place, row by row.
"""

import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jshard import _compat
from jshard.engine import rules
from jshard.engine.ahead import MIN_TRIPS, Handover, LoopPlan, Planned, cut_rows, gathered_operands, row_start, tied
from jshard.engine.rules import Eqn, Shard, Value, loops
from jshard.engine.rules.loops import Scan
from jshard.engine.units import BACKWARD, FORWARD
from jshard.plans.units import OWN

if TYPE_CHECKING:
    from jshard.engine.schedule import ShardedPartitioner


class Rotation:
    """A loop whose units are gathered in the trips before, and whose last one may be reduced in the trip after it."""

    def __init__(self, scan: Scan, plan: LoopPlan, late: Eqn | None) -> None:
        self.scan, self.count, self._plan, self._late = scan, plan.count, plan, late
        self.last_trips = -(-plan.count // len(plan.units))
        self._stacked = [k for k, i in enumerate(scan.through) if i is None]
        self._avals = scan.traced.out_avals[scan.n_carry :]
        handed = {id(one.eqn) for one in plan.units[: plan.count]}
        read = _read_in(scan.jaxpr, scan.jaxpr.outvars[: scan.n_carry], handed)
        variables = scan.jaxpr.invars[len(scan.jaxpr.invars) - len(scan.scanned) :]
        self._unread = {
            k: loops.rows(v, loops.row_type(v.x))
            for k, (a, v) in enumerate(zip(variables, scan.scanned, strict=True))
            if v.is_stored and a not in read
        }

    @classmethod
    def of(cls, scan: Scan) -> "Rotation | None":
        """A loop in this form; None if there is nothing to gather ahead or reduce late, or for few trips."""
        carry = [Value(None, state) for state in scan.states]
        plan = LoopPlan.of(scan.jaxpr, scan.shared, carry, scan.scanned, scan.length)
        if not plan.units or scan.length < MIN_TRIPS:
            return None
        carried, stacked = scan.jaxpr.outvars[: scan.n_carry], scan.jaxpr.outvars[scan.n_carry :]
        late = _late_in(scan.jaxpr, _variables(stacked) - _variables(carried))
        return cls(scan, plan, late) if plan.count or late is not None else None

    def _at(self, trip: Any) -> Any:
        """The row of a trip in scanned and stacked values."""
        return self.scan.length - 1 - trip if self.scan.reverse else trip

    def _unit(self, position: int, trip: Any) -> Planned:
        """A unit, counted from the first of a trip."""
        cut = lambda ks, trip: cut_rows([self.scan.scanned[k] for k in ks], self._at(trip))
        return self._plan.unit(position, trip, cut)

    def _trip(self, p: "ShardedPartitioner", trip: Any, state: tuple, num_later: int, trips: int = 1) -> tuple:
        """One trip: the carry, the gathers for later trips, gradients not yet reduced, and stacked results so far.

        It takes the results of the trip before, and gathers `num_later` units for later trips; this trace stands for
        several trips.
        """
        scan, at, (carry, gathered, left, buffers) = self.scan, self._at(trip), state
        later = [self._unit(len(self._plan.units) + i, trip) for i in range(num_later)]
        beyond = {} if num_later == self.count else dict(enumerate(p.level.plan[p.level.at :], p.level.at))
        before = p.level.stacked if isinstance(trip, int) and not left else []
        values = [Value(x, s) for x, s in zip(carry, scan.states, strict=True)]
        read = iter(cut_rows([v for k, v in enumerate(scan.scanned) if k not in self._unread], at))
        scanned = [self._unread[k] if k in self._unread else next(read) for k in range(len(scan.scanned))]
        rows = [] if isinstance(trip, int) else scanned
        handover = p.handover = Handover(gathered, later, beyond, self._late, self._to_reduce(left), before, rows)
        outs = scan.trip(values, scanned, trips=trips)
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
        """The gradients that a trip has left, with the dtype and the form in which they are stacked."""
        states = [cast(Shard, self.scan.row_states[self._stacked[i]]) for i in left]
        return [(x, self._avals[i].dtype, s) for (i, x), s in zip(left.items(), states, strict=True)]

    def _stored(self, buffers: list[Any], found: Iterable[tuple[int, Value]], trip: Any) -> list[Any]:
        """The buffers with some of one trip's rows."""
        new, at, buffers = {i: v.x for i, v in found}, self._at(trip), list(buffers)
        if new:
            written = _written([buffers[i] for i in new], list(new.values()), jnp.int32(at))
            for i, x in zip(new, written, strict=True):
                buffers[i] = x
        return buffers

    def run(self, p: "ShardedPartitioner") -> list[Value]:
        """The loop."""
        scan, looped = self.scan, self.scan.length - self.last_trips
        gathered, start = self._first(p)
        # The compiler would merge those of one type; where it splits arrays, each has its own sharding.
        full = lax.full if _compat.automatic_axes() else functools.cache(lax.full)
        shapes = [(scan.length, *a.shape) for a in self._avals]
        buffers = [
            _compat.host_rows(shape, a.dtype) if _compat.on_host(a) else full(shape, 0, a.dtype)
            for shape, a in zip(shapes, self._avals, strict=True)
        ]
        state, begin = (start, gathered, {}, buffers), 0
        if self._late is not None and looped:  # the first trip finds nothing to reduce
            state, begin = self._trip(p, 0, state, self.count), 1

        def step(state: tuple, trip: jax.Array) -> tuple[tuple, None]:
            return self._trip(p, trip, state, self.count, looped - begin), None

        if looped > begin:
            state, _ = lax.scan(step, state, jnp.arange(begin, looped, dtype=jnp.int32))
        for trip in range(looped, scan.length):
            state = self._trip(p, trip, state, min(self.count, (scan.length - 1 - trip) * len(self._plan.units)))
        carry, _, left, buffers = state
        reduced = zip(left, p.reduce_left(self._to_reduce(left), self._late), strict=True)
        results = scan.results(carry, self._stored(buffers, reduced, scan.length - 1))
        if left:
            p.level.stacked = p.level.reduced = [results[scan.n_carry + self._stacked[i]] for i in left]
        return results

    def _first(self, p: "ShardedPartitioner") -> tuple[list[list[Any]], list[Any]]:
        """The gathers of the first units, before the loop where possible, and the carry at the start."""
        level, start = p.level, self.scan.start
        positions = [i for i in range(level.at, len(level.plan)) if level.plan[i].loop is self.scan.eqn][: self.count]
        level.at = max([level.at, *(i + 1 for i in positions)])  # those before are done with
        found = [level.gathered.pop(i, None) for i in positions] or [None] * self.count
        first = [level.plan[i] for i in positions] or [self._unit(i, 0) for i in range(self.count)]
        missing = [k for k, xs in enumerate(found) if xs is None]
        shards = [[v.x for v in first[k].gathers] for k in missing]
        is_begin = 0 in positions and first[0].eqn.params["phase"] == FORWARD  # nothing is before it
        if missing and not is_begin:
            shards, start = tied(shards, start)
        new = {k: p.gather_planned(first[k], xs) for k, xs in zip(missing, shards, strict=True)}
        return [new[k] if xs is None else xs for k, xs in enumerate(found)], start


def _late_in(jaxpr: Any, stacked: Collection[Any]) -> Eqn | None:
    """The last unit of a loop, if it is one of backward whose gradients are stacked and read by nothing else.

    The program is that of a trip, or of a user's checkpoint in it, of whose results these are stacked.
    """
    read = _variables(a for e in jaxpr.eqns for a in e.invars)
    free = {v for v in stacked if v not in read and sum(v is a for a in jaxpr.outvars) == 1}
    last = next((e for e in reversed(jaxpr.eqns) if _has_units(e)), None)
    if last is None:
        return None
    if last.primitive.name != "unit":
        inner, _ = rules.program(last)
        results = zip(inner.outvars, last.outvars, strict=True)
        return _late_in(inner, _variables(v for v, a in results if a in free))
    prefetch = last.params["settings"].prefetch
    if prefetch is None or prefetch.units == 0 or last.params["phase"] != BACKWARD:
        return None
    gradients = [v for v in last.outvars[: sum(last.params["wrt"])] if not isinstance(v, jex.DropVar)]
    return last if gradients and all(v in free for v in gradients) else None


def _read_in(jaxpr: Any, wanted: Iterable[Any], handed: Collection[int]) -> set[Any]:
    """The variables of a program whose values are read, if some results are wanted.

    For the others only the types are: operands that units (by id) receive gathered, or that their programs do not read.
    """
    found = _variables(wanted)
    for e in jaxpr.eqns:
        if e.primitive.name == "unit":
            gathered, owners = gathered_operands(e), e.params["owners"]
            free = {i for i, owner in enumerate(owners) if owner == OWN and i not in gathered}
            free |= {*gathered} if id(e) in handed else set()
            found |= _variables(a for i, a in enumerate(e.invars) if i not in free)
        elif e.primitive.name in rules.CALLS:
            inner, _ = rules.program(e)
            inside = _read_in(inner, inner.outvars, handed)
            given = zip(rules.operands(e, e.invars), inner.invars, strict=True)
            found |= _variables(a for a, v in given if v in inside)
        else:
            found |= _variables(e.invars)
    return found


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {a for a in atoms if not isinstance(a, jex.Literal)}


def _has_units(eqn: Eqn) -> bool:
    """Whether an equation is a unit, or a call of a program with some."""
    if eqn.primitive.name not in rules.CALLS:
        return eqn.primitive.name == "unit"
    return any(map(_has_units, rules.program(eqn)[0].eqns))


@jax.jit
def _written(buffers: list[Any], rows: list[Any], at: Any) -> list[Any]:
    """Arrays with one row of each written; a function, so that it is in the program once."""
    write = lambda x, row: lax.dynamic_update_slice_p.bind(x, lax.broadcast(row, (1,)), *row_start(x, at))
    return [write(x, row) for x, row in zip(buffers, rows, strict=True)]
