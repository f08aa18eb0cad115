"""Loops and branches on a data shard.

Their programs are traced once more, on the shard's arrays, and run in the same loop. A loop's carry has one state in
all iterations. It is found by tracing the body until the states that it returns are those that it takes:

    carry (gradient sum, x)         taken                    returned by the body
    first trace                     (whole, split)           (partial, split)
    second trace                    (partial, split)         (partial, split)        found: summed once, after the loop

A program that is traced on its own must not use an array of the trace around it but as an argument. So operands cross
as arrays, all but those known without data: these cross as equations, which are repeated inside.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.rules import data_free
from jshard.engine.rules.building_blocks import convert_all, for_inner_trace_all, materialize_all, traced
from jshard.engine.rules.calls import opened
from jshard.engine.rules.registry import OperandStates, Partitioner, rule
from jshard.engine.rules.values import PARTIAL, Shard, ShardArray, State, Value, arrays_of, in_states, states_of

# ---- the states of a carry


@dataclasses.dataclass(frozen=True)
class TracedIteration:
    """One iteration of a loop, traced for states of its carry.

    Attributes:
        states: the states that the carry has when the iteration begins.
        states_after: the states in which the body leaves it, before it is converted to `states` again.
        start: the arrays of the carry before the first iteration, in `states`.
        program: the iteration, as a program of arrays.
    """

    states: list[State]
    states_after: list[State]
    start: list[jax.Array]
    program: ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class CarryStates:
    """The states of the carry of a loop that has been traced.

    Attributes:
        states: the states.
        body: keeps the body alive, as its id is part of the key.
    """

    states: list[State]
    body: object


def find_carry_states(
    p: Partitioner,
    body: object,
    operands: Sequence[Value],
    states: list[State],
    trace: Callable[[list[State]], TracedIteration],
) -> TracedIteration:
    """Traces a loop's body until its carry has the same states before and after.

    A whole value becomes split or partial if it leaves the body that way; one that does not stay partial becomes whole
    again, or split. It never becomes partial a second time, so the search ends.

    Args:
        p: the partitioner. It remembers what was found: a loop in a loop starts from there when the outer body is
            traced again, so its own body is traced only once more.
        body: identifies the loop.
        operands: all operands of the loop.
        states: the states of its carry before the first iteration.
        trace: traces the body for states of the carry.
    """
    # Operands and the carry's first states decide what is found, so the same loop may have several entries. The entry
    # keeps the body alive: another one could have the id of a body that is gone.
    key = (id(body), tuple((v.state, v.is_data_free) for v in operands), tuple(states))
    if key in p.carry_states:
        states = p.carry_states[key].states
    # Positions of carries that were partial, and did not leave the body partial. Partial again, they would change for
    # ever.
    never_partial: set[int] = set()
    # A state may change more than once, and the states of others with it. If they never agree, some rule is wrong.
    for _ in range(2 * len(states) + 3):
        num_records = len(p.records)
        iteration = trace(states)
        new_states = list(states)
        for i, (before, after) in enumerate(zip(states, iteration.states_after, strict=True)):
            # A split value stays split whatever the body makes of it: it is split again at the end of an iteration.
            if before == PARTIAL and after != PARTIAL:
                never_partial.add(i)
                new_states[i] = after
            elif before is None and not (after == PARTIAL and i in never_partial):
                new_states[i] = after
        if new_states == states:
            p.carry_states[key] = CarryStates(states, body)
            return iteration
        states = new_states
        del p.records[num_records:]  # the body is traced again
    raise RuntimeError("The states of a loop do not settle.")


# ---- values that cross into another trace


def crossing_arrays(values: Sequence[Value]) -> list[jax.Array]:
    """Returns the arrays that cross. What is known without data has none, and a scalar in its place."""
    return [jnp.zeros(()) if v.is_data_free else v.x for v in values]


def _inside(values: Sequence[Value], xs: Sequence[jax.Array]) -> list[Value]:
    """Returns the values that crossed, in a trace whose arrays are `xs`."""
    copies: dict[Value, Value] = {}  # for all of them: what two values have in common is copied once
    inside = []
    for value, x in zip(values, xs, strict=True):
        if value.is_data_free:
            inside.append(data_free.copy_into_trace(value, copies))
        else:
            inside.append(value.with_array(x))
    return inside


@contextlib.contextmanager
def _recorded_times(p: Partitioner, trips: int) -> Iterator[None]:
    """A context in which a collective is recorded as many times as it runs."""
    outer_trips = p.trips
    p.trips = outer_trips * trips
    try:
        yield
    finally:
        p.trips = outer_trips


# ---- scan


def row_of(value: Value, x: ShardArray) -> Value:
    """Returns one iteration's value of a scanned value: it has one dim less, the first."""
    row = value.with_array(x)
    if value.is_split:
        row.state = value.dim - 1  # never below 0: scanned values are not split along the iterations
    # A column that counts dim 0 is one number in each iteration, and counts nothing there.
    row.index_dims = {column: dim - 1 for column, dim in value.index_dims.items() if dim != 0}
    return row


def row_type(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of one row, on this trace's mesh, so that it matches a body traced on sliced rows."""
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def is_stored_along_trips(value: Value) -> bool:
    """Returns whether a stored parameter is split along the dim that a loop runs over: no iteration has its row."""
    if not value.is_stored:
        return False
    dim_from_end = value.shard.placement.dim_from_end
    return dim_from_end is not None and value.ndim + dim_from_end == 0


class Scan:
    """A `lax.scan` on a data shard. Scanned values are not split along the dim of the iterations.

    Attributes:
        p: the partitioner.
        eqn: the equation.
        jaxpr: the loop's body.
        consts: its constants.
        length: the number of iterations.
        reverse: whether the last row comes first.
        n_carry: how many of the body's results are carried.
        shared: operands that every iteration reads.
        carry: the carry before the first iteration.
        scanned: operands of which each iteration reads a row.
        states: the states of the carry, in all iterations.
        start: the arrays of the carry before the first iteration, in these states.
        traced: one iteration, as a program of the arrays of `shared`, the carry, and the rows.
        row_states: the states of the rows of the stacked results.
        passed_through: for each stacked result, of which stored value in `scanned` it is a row, unread; None if it is
            none. Its stack is that value.
        num_records: how much was recorded before the loop.
    """

    def __init__(self, p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> None:
        self.p = p
        self.eqn = eqn
        self.jaxpr, self.consts = opened(eqn.params["jaxpr"])
        self.length: int = eqn.params["length"]
        self.reverse: bool = eqn.params["reverse"]
        n_consts, self.n_carry = _compat.scan_arguments(eqn)
        end_of_carry = n_consts + self.n_carry
        # The order is that of what is emitted: it is part of the program.
        # Sums are taken before the loop, or each iteration would take them.
        self.shared = [p.for_inner_trace(p.reduce_partial(v)) for v in operands[:n_consts]]
        self.carry = operands[n_consts:end_of_carry]
        scanned = [p.materialize(p.reduce_partial(v), skip=(0,)) for v in operands[end_of_carry:]]
        # Split along the iterations, one device has the row of an iteration. Gathered here, it is sent once.
        self.scanned = []
        for value in scanned:
            is_split_along_trips = value.state == 0 or is_stored_along_trips(value)
            self.scanned.append(p.whole(value) if is_split_along_trips else value)
        self.num_records = len(p.records)
        self.row_states: list[State] = []
        self.passed_through: list[int | None] = []
        self._trace_in(states_of(self.carry))

        self._split_carry_of_batch()

    def _split_carry_of_batch(self) -> None:
        """Traces again if the carry has values known without data that are as large as the batch: they become shards.

        No iteration splits them, or they would be in another state already.
        """
        states = list(self.states)
        has_new_shards = False
        for i, value in enumerate(self.carry):
            if states[i] is None:
                states[i] = self.p.materialize(value).state
                has_new_shards |= isinstance(states[i], int)
        if has_new_shards:
            del self.p.records[self.num_records :]
            self._trace_in(states)

    def _trace_in(self, states: list[State]) -> None:
        """Traces the loop, for a carry in these states before the first iteration."""
        operands = [*self.shared, *self.carry, *self.scanned]
        iteration = find_carry_states(self.p, self.jaxpr, operands, states, self._trace_iteration)
        self.states = iteration.states
        self.start = iteration.start
        self.traced = iteration.program

    def _trace_iteration(self, states: list[State]) -> TracedIteration:
        """Traces one iteration for states of the carry. `row_states` and `passed_through` are of the last trace."""
        start = self.carried(self.carry, states)
        row_types = [row_type(v.x) for v in self.scanned]
        states_after: list[State] = []

        def step(
            shared_xs: list[jax.Array], carry_xs: list[jax.Array], row_xs: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            with self.p.own_trace():
                carry = in_states(carry_xs, states)
                scanned = [row_of(v, x) for v, x in zip(self.scanned, row_xs, strict=True)]
                arguments = self.body_arguments(carry, scanned, shared_xs)
                with self.recorded_times(self.length):
                    results = self.body_results(self.p.run_body(self.jaxpr, self.consts, arguments))
                new_carry = results[: self.n_carry]
                stacked = results[self.n_carry :]
                # Replaced, not extended: JAX may trace the function again.
                states_after[:] = states_of(new_carry)
                self.row_states = states_of(stacked)
                # A stored row that the body returns unread: stacked, the rows are the operand again. `nnx.remat` and
                # the like return each parameter that they were given.
                positions = {v: i for i, v in enumerate(scanned) if v.is_stored}
                self.passed_through = [positions.get(v) for v in stacked]
                # Conversions at the end of an iteration run as often as the body.
                with self.recorded_times(self.length):
                    carried = self.carried(new_carry, states)
                return carried, [v.x for v in stacked if v not in positions]

        program = jax.make_jaxpr(step)(crossing_arrays(self.shared), start, row_types)
        return TracedIteration(states, list(states_after), start, program)

    def carried(self, carry: Sequence[Value], states: Sequence[State]) -> list[jax.Array]:
        """Returns the arrays of a carry in given states."""
        return arrays_of(convert_all(self.p, carry, states))

    def body_arguments(
        self, carry: list[Value], scanned: list[Value], shared_xs: Sequence[jax.Array] | None = None
    ) -> list[Value]:
        """Returns the arguments of the loop's body, in its order.

        Args:
            carry: the carry when an iteration begins.
            scanned: its rows.
            shared_xs: the arrays that every iteration reads; by default those outside of the loop.
        """
        if shared_xs is None:
            shared_xs = arrays_of(self.shared)
        return [*_inside(self.shared, shared_xs), *carry, *scanned]

    def recorded_times(self, trips: int) -> AbstractContextManager[None]:
        """Returns a context in which a collective is recorded as many times as `trips` iterations run it."""
        return _recorded_times(self.p, trips)

    def body_results(self, outs: list[Value]) -> list[Value]:
        """Returns the results of the loop's body as an iteration passes them on: gradients of layers are reduced."""
        results = materialize_all(self.p, outs)
        stacks = self.eqn.outvars[self.n_carry :]
        for i, stack in enumerate(stacks, self.n_carry):
            results[i] = self.p.store_row(results[i], stack)
        return results

    def run(self) -> list[Value]:
        """Runs the loop in its traced form."""
        iterate = jaxpr_as_fun(self.traced)
        # From outside of the loop, as constants of the new body: what is the same in all iterations is no carry.
        shared = crossing_arrays(self.shared)

        def step(carry_xs: list[jax.Array], row_xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = iterate(*shared, *carry_xs, *row_xs)
            return outs[: self.n_carry], outs[self.n_carry :]

        # The traced iteration is run, and not the body once more: that would partition it another time.
        rows = arrays_of(self.scanned)
        unroll = self.eqn.params["unroll"]
        last, stacked = lax.scan(step, self.start, rows, length=self.length, reverse=self.reverse, unroll=unroll)
        return self.results(last, stacked)

    def results(self, last: Sequence[jax.Array], stacked: Sequence[jax.Array]) -> list[Value]:
        """Returns the loop's results, from the arrays of the carry and of the results that it stacks itself."""
        results = in_states(last, self.states)
        # A result that is passed through has no stack: its rows are those of the scanned value, which stays stored.
        arrays = iter(stacked)
        for state, position in zip(self.row_states, self.passed_through, strict=True):
            if position is not None:
                results.append(self.scanned[position])
            elif isinstance(state, int):
                results.append(Value(next(arrays), state + 1))  # the rows are stacked along a new first dim
            else:
                results.append(Value(next(arrays), state))
        return results


@rule("scan", operands=OperandStates.ANY_OR_STORED)
def scan(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs the loop with its body on a shard."""
    return p.run_scan(Scan(p, eqn, operands))


# ---- while


@rule("while", operands=OperandStates.ANY_OR_STORED)
def while_loop(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs the loop with its body on a shard. The condition is whole: all shards run the same iterations."""
    return _While(p, eqn, operands).run()


class _While:
    """A `lax.while_loop` on a data shard.

    Under `jax.vmap` its condition has one element for each row. It then continues while any row does, and rows that
    have ended keep their values.

    Attributes:
        p: the partitioner.
        eqn: the equation.
        condition_operands: what the condition reads besides the carry.
        body_operands: what the body reads besides the carry.
        carry: the carry before the first iteration.
        has_rows: whether the condition has an element for each row.
    """

    def __init__(self, p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> None:
        self.p = p
        self.eqn = eqn
        start_of_body = eqn.params["cond_nconsts"]
        start_of_carry = start_of_body + eqn.params["body_nconsts"]
        # An open sum in the carry would be read by the condition in each iteration.
        operands = [p.reduce_partial(v) for v in operands]
        # The condition and the body are traced on their own, each with its own arguments.
        self.condition_operands = for_inner_trace_all(p, operands[:start_of_body])
        self.body_operands = for_inner_trace_all(p, operands[start_of_body:start_of_carry])
        self.carry = materialize_all(p, operands[start_of_carry:])
        self.has_rows = bool(eqn.params["cond_jaxpr"].out_avals[0].shape)

    def run(self) -> list[Value]:
        """Runs the loop in its traced form."""
        operands = [*self.condition_operands, *self.body_operands, *self.carry]
        states = states_of(self.carry)
        iteration = find_carry_states(self.p, self.eqn.params["body_jaxpr"], operands, states, self._trace_iteration)
        iterate = jaxpr_as_fun(iteration.program)

        def continues(xs: list[jax.Array]) -> jax.Array:
            with self.p.own_trace():
                condition = self._condition(in_states(xs, iteration.states))
                # Whole, so that all shards agree: one that ended earlier would be missed by the body's collectives.
                return self.p.whole(condition).x.any()

        # The traced body is run, and not partitioned once more, as in `Scan.run`.
        last = lax.while_loop(continues, lambda xs: iterate(*xs), iteration.start)
        return in_states(last, iteration.states)

    def _condition(self, carry: list[Value]) -> Value:
        """Returns whether the loop continues, or which rows do."""
        arguments = [*_inside(self.condition_operands, arrays_of(self.condition_operands)), *carry]
        (condition,) = self.p.run_body(*opened(self.eqn.params["cond_jaxpr"]), arguments)
        return condition

    def _trace_iteration(self, states: list[State]) -> TracedIteration:
        """Traces one iteration for states of the carry."""
        p = self.p
        start = arrays_of(convert_all(p, self.carry, states))
        states_after: list[State] = []

        def step(xs: list[jax.Array]) -> list[jax.Array]:
            with p.own_trace():
                body_operands = _inside(self.body_operands, arrays_of(self.body_operands))
                arguments = [*body_operands, *in_states(xs, states)]
                results = p.run_body(*opened(self.eqn.params["body_jaxpr"]), arguments)
                # Summed in each iteration: the condition reads the carry, and would read a part of the sum.
                results = [p.materialize(p.reduce_partial(v)) for v in results]
                states_after[:] = states_of(results)
                new_carry = convert_all(p, results, states)
                if not self.has_rows:
                    return arrays_of(new_carry)
                continues = self._condition(in_states(xs, states))
                if continues.is_split:  # the carry is split with the rows
                    states_after[:] = _split_whole_ones(states, continues.dim)
                return [_where_row_continues(p, continues, v, x) for v, x in zip(new_carry, xs, strict=True)]

        program = jax.make_jaxpr(step)(start)
        return TracedIteration(states, states_after, start, program)


def _split_whole_ones(states: Sequence[State], dim: int) -> list[State]:
    """Returns states in which what is whole is split instead."""
    return [dim if state is None else state for state in states]


def _where_row_continues(p: Partitioner, continues: Value, new: Value, old: jax.Array) -> jax.Array:
    """Returns the new value in the rows that continue, and the old value in those that have ended."""
    if new.is_split and new.dim < continues.ndim:
        continues = p.split(continues, new.dim)
    elif new.is_split:
        continues = p.whole(continues)
    elif continues.is_split:
        return new.x  # the carry becomes split with the rows, and is traced again
    one_for_each_row = continues.x.reshape(continues.shape + (1,) * (new.ndim - continues.ndim))
    return jnp.where(one_for_each_row, new.x, old)


# ---- cond


@rule("cond", operands=OperandStates.ANY_OR_STORED)
def cond(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs one branch, the same on all shards. The results of the branches have one state."""
    # With a split index each shard would run another branch, and collectives inside would wait for shards elsewhere.
    index = p.whole(operands[0])
    operands = for_inner_trace_all(p, operands[1:])
    arrays = crossing_arrays(operands)
    branches = eqn.params["branches"]

    def run_branch(branch: ClosedJaxpr, *xs: jax.Array) -> list[Value]:
        return materialize_all(p, p.run_body(*opened(branch), _inside(operands, xs)))

    # First in the states that come of themselves: their common state is known only then.
    num_records = len(p.records)
    programs: list[ClosedJaxpr] = []
    states_of_branches: list[list[State]] = []
    for branch in branches:
        program, states_of_branch = traced(p, functools.partial(run_branch, branch), *arrays)
        programs.append(program)
        states_of_branches.append(states_of_branch)
    states = [_common_state(states_of_result) for states_of_result in zip(*states_of_branches, strict=True)]

    def run_branch_in_states(branch: ClosedJaxpr, *xs: jax.Array) -> list[jax.Array]:
        with p.own_trace():
            return arrays_of(convert_all(p, run_branch(branch, *xs), states))

    functions: list[Callable[..., list[jax.Array]]]
    if all(states_of_branch == states for states_of_branch in states_of_branches):
        functions = [jaxpr_as_fun(program) for program in programs]
    else:
        # Traced again, as the arrays that were traced are in another state: of what is known without data, for one,
        # the other state is computed from its equation.
        del p.records[num_records:]
        functions = [functools.partial(run_branch_in_states, branch) for branch in branches]
    return in_states(lax.switch(index.x, functions, *arrays), states)


def _common_state(states: Sequence[State]) -> State:
    """Returns the one state for a result of all branches: split if any is, else partial if any is, else whole."""
    # All branches store it alike, or each gathers it: a whole or a partial array is no stored shard.
    if any(isinstance(state, Shard) for state in states):
        return states[0] if len(set(states)) == 1 else None
    # Split, a whole or a partial result of another branch is cut or scattered; whole, it would be gathered in this one.
    for state in states:
        if isinstance(state, int):
            return state
    return PARTIAL if PARTIAL in states else None
