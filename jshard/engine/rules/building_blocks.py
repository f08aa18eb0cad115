"""What rules are built of: steps that several of them share."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jshard.engine.rules.registry import Partitioner
from jshard.engine.rules.values import State, Value, arrays_of, states_of, type_of


def same(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], state: State, **params: object) -> list[Value]:
    """Runs the same primitive on the shards' arrays.

    Args:
        p: the partitioner.
        eqn: the equation.
        operands: its operands.
        state: the state of all results.
        **params: parameters of the equation that are others on a shard, such as a shape.
    """
    return [Value(x, state) for x in p.bind(eqn, arrays_of(operands), **params)]


def traced(p: Partitioner, run: Callable[..., list[Value]], *xs: jax.Array) -> tuple[ClosedJaxpr, list[State]]:
    """Traces a function of arrays that returns values.

    Returns:
        A program that returns their arrays, and their states.
    """
    states: list[State] = []

    def run_on_arrays(*xs: jax.Array) -> list[jax.Array]:
        # What is gathered inside is a tracer of this function, and must not be found by a reader outside of it.
        with p.own_trace():
            values = run(*xs)
        # Replaced, not extended: JAX may trace the function again.
        states[:] = states_of(values)
        return arrays_of(values)

    return jax.make_jaxpr(run_on_arrays)(*xs), states


def split_dim(operands: Sequence[Value]) -> int:
    """Returns the dim that the largest split operand is split along: to move the others costs least."""
    split = [v for v in operands if v.is_split]
    return max(split, key=lambda v: v.bytes).dim


def shared_dim(left: Value, right: Value, left_dims: Sequence[int], right_dims: Sequence[int]) -> int | None:
    """Finds which of the dims that two operands have in common is split in one of them.

    Args:
        left: an operand.
        right: the other operand.
        left_dims: dims of the left operand.
        right_dims: for each of these, the dim of the right operand that is the same.

    Returns:
        A position in both lists of dims.
    """
    # The left operand first: if both are split along such dims, along different ones, the right operand moves.
    if left.is_split and left.dim in left_dims:
        return tuple(left_dims).index(left.dim)
    if right.is_split and right.dim in right_dims:
        return tuple(right_dims).index(right.dim)
    return None


def can_be_partial(value: Value) -> bool:
    """Returns whether the dtype of a value has sums. Bools and typed keys have none."""
    return jnp.issubdtype(value.x.dtype, jnp.number)


def find_free_dim(p: Partitioner, shape: Sequence[int], taken: Collection[int]) -> int | None:
    """Returns a dim of an array that can be split, other than those taken."""
    for dim, size in enumerate(shape):
        if dim not in taken and p.divides(size):
            return dim
    return None


def run_in_global_view(
    p: Partitioner, function: Callable[..., Sequence[jax.Array]], operands: list[Value]
) -> list[Value]:
    """Runs a function of arrays on shards: it is traced in global view, and its program is partitioned."""
    # In global view, a value is whole over the partitioner's axes.
    global_types = [jax.ShapeDtypeStruct(p.full_shape(v), v.x.dtype) for v in operands]
    program = jax.make_jaxpr(function)(*global_types)
    return p.run(program.jaxpr, program.consts, operands)


def split_all(p: Partitioner, operands: Sequence[Value], dim: int) -> list[Value]:
    """Returns operands split along a dim. Scalars, such as the start of a reduction, are whole."""
    return [p.split(v, dim) if v.ndim else p.whole(v) for v in operands]


def whole_all(p: Partitioner, values: Iterable[Value]) -> list[Value]:
    """Returns values, whole on every shard."""
    return [p.whole(v) for v in values]


def convert_all(p: Partitioner, values: Sequence[Value], states: Sequence[State]) -> list[Value]:
    """Returns values, each converted to its state."""
    return [p.in_state(v, state) for v, state in zip(values, states, strict=True)]


def materialize_all(p: Partitioner, values: Iterable[Value]) -> list[Value]:
    """Returns values as arrays that leave their trace: see `data_free.materialize`."""
    return [p.materialize(v) for v in values]


def for_inner_trace_all(p: Partitioner, values: Iterable[Value]) -> list[Value]:
    """Returns values for an inner trace: see `Partitioner.for_inner_trace`."""
    return [p.for_inner_trace(v) for v in values]


def behind_barrier(values: Sequence[Value], positions: Collection[int]) -> list[Value]:
    """Returns the values, those at the positions behind one barrier; the others pass by."""
    arrays = {i: values[i].x for i in positions}
    result = list(values)
    # Without its equation: a shard that is computed again from it would not be behind the barrier.
    for i, x in lax.optimization_barrier(arrays).items():
        result[i] = result[i].with_array(x)
    return result


def remaining_dims(ndim: int, removed: Collection[int]) -> list[int]:
    """Returns the dims of an array other than those removed, in order: a result has them as its dims 0, 1, ..."""
    return [d for d in range(ndim) if d not in removed]


def dim_after_removal(removed: Sequence[int], dim: int) -> int:
    """Returns which dim of a result a dim of the operand is, once others are removed."""
    return dim - sum(d < dim for d in removed)


def shard_shape(p: Partitioner, shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns the shape of a shard of an array that is split along a dim."""
    local = list(shape)
    local[dim] //= p.degree  # without a rest: a dim is split only if its size divides
    return tuple(local)


def run_on_free_dim(
    p: Partitioner,
    eqn: JaxprEqn,
    operands: list[Value],
    taken: Collection[int],
    run: Callable[[list[Value]], list[Value] | None] | None = None,
) -> list[Value] | None:
    """Runs an equation that acts along some dims, on operands that are split along another dim.

    If they are split along a dim that it acts along, they are split along another one for the time of the equation.
    This moves each shard twice and gathers nothing:

        operands split along 0  --all-to-all-->  along 1  --equation along 0-->  along 1  --all-to-all-->  along 0

    Args:
        p: the partitioner.
        eqn: the equation; its operands and results have one rank, but for scalars.
        operands: its operands.
        taken: the dims that it acts along.
        run: runs it on operands that are split along one dim; by default the same primitive runs.
    """
    dim = split_dim(operands)
    # Operands may be split along different dims. From here on, all are split along one.
    dim_to_run = dim
    if dim in taken:
        # By the sizes in global view: those of a shard are smaller along the dim that is split now.
        other_dim = find_free_dim(p, type_of(eqn.invars[0]).shape, taken)
        if other_dim is None:
            return None  # no other dim divides: the operands are gathered
        dim_to_run = other_dim
    operands = split_all(p, operands, dim_to_run)
    if run is None:
        run = functools.partial(same, p, eqn, state=dim_to_run)
    results = run(operands)
    if results is None or dim_to_run == dim:
        return results
    return [_split_back(p, result, dim_to_run, dim) for result in results]


def _split_back(p: Partitioner, result: Value, old: int, new: int) -> Value:
    """Splits a result like the operands were. Its size along that dim may be another, and not divide."""
    if result.state == old and p.divides(result.shape[new]):
        return p.split(result, new)
    return result
