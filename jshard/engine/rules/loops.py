"""Loops and branches. The states of carried values are found by repeating an abstract run to a fixed point."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.rules import PARTIAL, Eqn, Partitioner, Shard, State, Value, known, opened, rule, traced


def fixed_point(p: Partitioner, body: Any, operands: list[Value], states: list[State], once: Callable) -> tuple:
    """The states of a loop's carry.

    A whole value becomes split or partial if it leaves the body that way; one that does not stay partial becomes whole
    again, or split. A loop inside a loop starts from the earlier result, so that its body is traced only once more.
    `once` traces the body for states of the carry, and returns the resulting states and values, like this function.
    """
    never_partial: set[int] = set()
    key = id(body), tuple((v.state, v.is_known) for v in operands), tuple(states)
    _, states = p.settled.get(key, (body, states))
    for _ in range(2 * len(states) + 3):
        mark = len(p.noted)
        out, made = once(states)
        new = list(states)
        for k, (before, after) in enumerate(zip(states, out, strict=True)):
            if before == PARTIAL and after != PARTIAL:
                never_partial.add(k)
                new[k] = after
            elif before is None and not (after == PARTIAL and k in never_partial):
                new[k] = after
        if new == states:
            p.settled[key] = body, states  # the body stays alive, as its id is the key
            return states, made
        states = new
        del p.noted[mark:]
    raise RuntimeError("The states of a loop do not settle.")


def _array(value: Value) -> Any:
    """The values that cross into the inner trace as arrays; known values do not."""
    return jnp.zeros(()) if value.is_known else value.x


def _inside(values: Sequence[Value], xs: Sequence[Any]) -> list[Value]:
    """Values that crossed into a trace whose arrays are `xs`."""
    memo: dict[int, tuple[Value, Value]] = {}
    return [known.enter(v, memo) if v.is_known else v.with_array(x) for v, x in zip(values, xs, strict=True)]


@contextlib.contextmanager
def _times(p: Partitioner, trips: int) -> Iterator[None]:
    """A context in which a collective is noted as many times as it runs."""
    before, p.trips = p.trips, p.trips * trips
    try:
        yield
    finally:
        p.trips = before


def rows(value: Value, x: Any) -> Value:
    """One trip's value of a scanned value."""
    row = value.with_array(x)
    row.state = value.dim - 1 if value.is_split else value.state
    row.counted = {column: dim - 1 for column, dim in value.counted.items() if dim}
    return row


def row_type(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a row, on the mesh of this trace, as for a program that was traced for cut rows."""
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def is_stored_along_trips(value: Value) -> bool:
    """Whether a stored parameter is split along the dim that a loop runs over, so that no trip has its row."""
    from_end = value.shard.placement.dim_from_end if value.is_stored else None
    return from_end is not None and value.ndim + from_end == 0


class Scan:
    """A `lax.scan` on a data shard. Scanned values are not split along the dim of the trips."""

    def __init__(self, p: Partitioner, eqn: Eqn, values: list[Value]) -> None:
        self.p, self.eqn = p, eqn
        n_consts, self.n_carry = _compat.scan_arguments(eqn)
        end = n_consts + self.n_carry
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        self.jaxpr, self.consts = opened(eqn.params["jaxpr"])
        self.shared = [p.cross(p.settle(v)) for v in values[:n_consts]]  # read by every trip
        self.carry = values[n_consts:end]  # at the start
        scanned = [p.land(p.settle(v), skip=(0,)) for v in values[end:]]
        self.scanned = [p.whole(v) if v.state == 0 or is_stored_along_trips(v) else v for v in scanned]
        self.mark = len(p.noted)
        self.row_states: list[State] = []  # of the results of one trip that are stacked
        self.through: list[int | None] = []  # for each: of which stored value in `scanned` it is a row
        self._settle([v.state for v in self.carry])
        landed = [p.land(v) if s is None else v for v, s in zip(self.carry, self.states, strict=True)]
        if any(v.is_split and s is None for v, s in zip(landed, self.states, strict=True)):
            # values that no trip splits, and that are as large as the batch, are carried as shards
            del p.noted[self.mark :]
            self._settle([v.state if s is None else s for v, s in zip(landed, self.states, strict=True)])

    def _settle(self, states: list[State]) -> None:
        """Finds the states of the carry, in every trip."""
        operands = [*self.shared, *self.carry, *self.scanned]
        self.states, (self.traced, self.start) = fixed_point(self.p, self.jaxpr, operands, states, self._once)

    def _once(self, states: list[State]) -> tuple[list[State], Any]:
        """Traces one trip for states of the carry."""
        start = [self.p.in_state(v, state).x for v, state in zip(self.carry, states, strict=True)]
        row = [row_type(v.x) for v in self.scanned]
        found: list[State] = []

        def step(*xs: list[Any]) -> tuple[list[Any], list[Any]]:
            with self.p.own_trace():
                return trip(*xs)

        def trip(shared_xs: list[Any], carry_xs: list[Any], row_xs: list[Any]) -> tuple[list[Any], list[Any]]:
            carry = [Value(x, state) for x, state in zip(carry_xs, states, strict=True)]
            scanned = [rows(v, x) for v, x in zip(self.scanned, row_xs, strict=True)]
            outs = self.trip(carry, scanned, shared_xs=shared_xs, trips=self.length)
            found[:] = [v.state for v in outs[: self.n_carry]]
            stacked = outs[self.n_carry :]
            self.row_states = [v.state for v in stacked]
            at = {id(v): i for i, v in enumerate(scanned) if v.is_stored}
            self.through = [at.get(id(v)) for v in stacked]
            with _times(self.p, self.length):
                kept = [self.p.in_state(v, state).x for v, state in zip(outs, states, strict=False)]
            return kept, [v.x for v, i in zip(stacked, self.through, strict=True) if i is None]

        program = jax.make_jaxpr(step)([_array(v) for v in self.shared], start, row)
        return list(found), (program, start)

    def trip(self, carry: list[Value], scanned: list[Value], shared_xs: Any = None, trips: int = 1) -> list[Value]:
        """One trip: the carry, then the stacked results.

        This trace stands for `trips` of them; `shared_xs` are the arrays that every trip reads, by default those
        outside.
        """
        arguments = self.body_arguments(carry, scanned, shared_xs)
        with self.counted(trips):
            return self.body_results(self.p.run_body(self.jaxpr, self.consts, arguments))

    def body_arguments(self, carry: list[Value], scanned: list[Value], shared_xs: Any = None) -> list[Value]:
        """Returns the arguments of the loop's body, in its order; `shared_xs` as in `trip`."""
        arrays = [v.x for v in self.shared] if shared_xs is None else shared_xs
        return [*_inside(self.shared, arrays), *carry, *scanned]

    def counted(self, trips: int) -> AbstractContextManager[None]:
        """A context in which a collective is recorded as many times as `trips` run it."""
        return _times(self.p, trips)

    def body_results(self, outs: list[Value]) -> list[Value]:
        """Returns the results of the loop's body as a trip passes them on: gradients of layers are reduced."""
        landed = [self.p.land(v) for v in outs]
        carry, stacked = landed[: self.n_carry], landed[self.n_carry :]
        stacks = self.eqn.outvars[self.n_carry :]
        return [*carry, *(self.p.store_row(row, stack) for row, stack in zip(stacked, stacks, strict=True))]

    def run(self) -> list[Value]:
        """The loop in its traced form."""
        function, shared = jex.jaxpr_as_fun(self.traced), [_array(v) for v in self.shared]

        def step(carry_xs: list[Any], row_xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = function(*shared, *carry_xs, *row_xs)
            return outs[: self.n_carry], outs[self.n_carry :]

        settings = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        last, stacked = lax.scan(step, self.start, [v.x for v in self.scanned], **settings)
        return self.results(last, stacked)

    def results(self, last: Sequence[Any], stacked: Sequence[Any]) -> list[Value]:
        """The loop's results, from the arrays of the carry and of the stacked results."""
        arrays = iter(stacked)
        found = [Value(x, state) for x, state in zip(last, self.states, strict=True)]
        for state, i in zip(self.row_states, self.through, strict=True):
            if i is None:
                found.append(Value(next(arrays), state + 1 if isinstance(state, int) else state))
            else:
                found.append(self.scanned[i])
        return found


@rule("scan", keeps_stored=True)
def scan(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """The body runs on a shard."""
    return p.run_scan(Scan(p, eqn, values))


@rule("while", keeps_stored=True)
def while_loop(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """The condition is whole: all shards take the same trips. A loop over rows continues while any row does."""
    params, n_test, n_body = eqn.params, eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    values = [p.settle(v) for v in values]
    for_test = [p.cross(v) for v in values[:n_test]]
    for_body = [p.cross(v) for v in values[n_test : n_test + n_body]]
    carry = [p.land(v) for v in values[n_test + n_body :]]
    in_states = lambda xs, states: [Value(x, s) for x, s in zip(xs, states, strict=True)]
    for_each_row = bool(params["cond_jaxpr"].out_avals[0].shape)

    def test(xs: list[Any], states: list[State]) -> Value:
        args = _inside(for_test, [v.x for v in for_test]) + in_states(xs, states)
        (going,) = p.run_body(*opened(params["cond_jaxpr"]), args)
        return going

    def once(states: list[State]) -> tuple[list[State], Any]:
        start = [p.in_state(v, state).x for v, state in zip(carry, states, strict=True)]
        found: list[State] = []

        def body(xs: list[Any]) -> list[Any]:
            with p.own_trace():
                return trip(xs)

        def trip(xs: list[Any]) -> list[Any]:
            args = _inside(for_body, [v.x for v in for_body]) + in_states(xs, states)
            outs = [p.land(p.settle(v)) for v in p.run_body(*opened(params["body_jaxpr"]), args)]
            found[:] = [v.state for v in outs]
            new = [p.in_state(v, s) for v, s in zip(outs, states, strict=True)]
            if not for_each_row:
                return [v.x for v in new]
            going = test(xs, states)
            if going.is_split:  # the carry is split with the rows
                found[:] = [going.state if s is None else s for s in states]
            return [_where(p, going, v, x) for v, x in zip(new, xs, strict=True)]

        return found, (jax.make_jaxpr(body)(start), start)

    operands, first = [*for_test, *for_body, *carry], [v.state for v in carry]
    states, (program, start) = fixed_point(p, params["body_jaxpr"], operands, first, once)
    body = jex.jaxpr_as_fun(program)

    def continues(xs: list[Any]) -> Any:
        with p.own_trace():
            return p.whole(test(xs, states)).x.any()

    last = lax.while_loop(continues, lambda xs: body(*xs), start)
    return in_states(last, states)


def _where(p: Partitioner, going: Value, value: Value, before: Any) -> Any:
    """The new value in the rows that continue, and the old value in the others, which have ended."""
    if value.is_split and value.dim < going.ndim:
        going = p.split(going, value.dim)
    else:
        going = p.whole(going) if value.is_split or not going.is_split else going
    if going.is_split and not value.is_split:
        return value.x  # it becomes split, and is traced again
    goes = going.x.reshape(going.shape + (1,) * (value.ndim - going.ndim))
    return jnp.where(goes, value.x, before)


@rule("cond", keeps_stored=True)
def cond(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """All shards take the same branch. The results of the branches have one state."""
    index, operands = p.whole(values[0]), [p.cross(v) for v in values[1:]]
    xs, branches = [_array(v) for v in operands], eqn.params["branches"]

    def run(branch: Any, *xs: Any) -> list[Value]:
        return [p.land(v) for v in p.run_body(*opened(branch), _inside(operands, xs))]

    mark = len(p.noted)
    programs = [traced(p, functools.partial(run, branch), *xs) for branch in branches]
    states = [_joined(states) for states in zip(*(states for _, states in programs), strict=True)]
    if all(own == states for _, own in programs):
        functions = [jex.jaxpr_as_fun(jaxpr) for jaxpr, _ in programs]
    else:  # traced again: a value known without data takes another state from its equation
        del p.noted[mark:]

        def run_in_states(branch: Any, *xs: Any) -> list[Any]:
            with p.own_trace():
                return [p.in_state(v, state).x for v, state in zip(run(branch, *xs), states, strict=True)]

        functions = [functools.partial(run_in_states, branch) for branch in branches]
    return [Value(x, state) for x, state in zip(lax.switch(index.x, functions, *xs), states, strict=True)]


def _joined(states: tuple[State, ...]) -> State:
    """One state for the results of the branches."""
    if any(isinstance(s, Shard) for s in states):
        return states[0] if len(set(states)) == 1 else None
    split = next((s for s in states if isinstance(s, int)), None)
    return PARTIAL if split is None and PARTIAL in states else split
