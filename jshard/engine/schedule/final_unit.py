"""The final unit of backward: its gradients are reduced once those of the region's own parameters are.

What is used before all units, such as an embedding, has its gradient computed after them. Nothing would be left to
compute beside its reduction, which is the largest of many models. But nothing else needs the gradients of the unit
before it. They are computed beside it, and only their reduction is left at the end:

    compute  :  unit 1  :  unit 0: cotangents  :  embedding  :  unit 0: gradients  :
    links    :          :  reduce 1            :             :  reduce embedding   :  reduce 0

So no barrier ties these gradients to the cotangents of their unit, as it does those of other units. One ties them to
what the region has reduced itself; before that the compiler computes them when it likes. Until then their values have
no arrays. So a unit is final only if nothing reads its gradients: they leave the region as they are.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Var, jaxprs_in_params

from jshard.engine.rules import Shard, Value
from jshard.engine.rules.values import count_uses, used_once_as_result, variables_of
from jshard.engine.schedule.held_gradients import HeldGradient
from jshard.engine.schedule.program_schedule import FinalEquation
from jshard.engine.schedule.stacked_rows import laid_out_by_dims, written
from jshard.engine.schedule.stored_values import cuts_into_rows, gradient_variables
from jshard.engine.schedule.unit_equation import UnitEquation, is_unit


@dataclasses.dataclass(frozen=True)
class BufferRow:
    """A row of a loop's stacked result, which is yet to be written.

    Attributes:
        buffer: the result without this row.
        number: of the row.
        is_sum: whether the row is added to that of the buffer, a running sum.
    """

    buffer: jax.Array
    number: int
    is_sum: bool


@dataclasses.dataclass(frozen=True)
class FinalGradient:
    """A gradient of the final unit.

    Attributes:
        value: the stored shards that it is reduced to, or a stack of which they are a row. Until then, its array is a
            type.
        held: each device's part.
        row: where the shards are written; None if they are the value.
    """

    value: Value
    held: HeldGradient
    row: BufferRow | None


@dataclasses.dataclass(frozen=True)
class FinalGradients:
    """The gradients of the final unit.

    Attributes:
        unit: the unit.
        gradients: those that are reduced later.
    """

    unit: UnitEquation
    gradients: list[FinalGradient]

    def has_any_of(self, values: Collection[Value]) -> bool:
        """Returns whether some values are waiting for one of them."""
        own = {gradient.value for gradient in self.gradients}
        return not own.isdisjoint(values)

    def set_reduced(self, shards: Sequence[jax.Array]) -> None:
        """Gives the values their arrays, from the shards that the gradients were reduced to."""
        rows: list[BufferRow] = []
        stacks: list[Value] = []
        arrays: list[jax.Array] = []
        for gradient, shard in zip(self.gradients, shards, strict=True):
            if gradient.row is None:
                gradient.value.x = shard
                continue
            rows.append(gradient.row)
            stacks.append(gradient.value)
            arrays.append(laid_out_by_dims(shard))
        if not rows:
            return
        # All at once, and in the order of the loop: its iterations call the same function.
        buffers = [row.buffer for row in rows]
        are_sums = tuple(row.is_sum for row in rows)
        number = jnp.int32(rows[0].number)  # of the last iteration, in all buffers
        for stack, x in zip(stacks, written(buffers, arrays, number, are_sums), strict=True):
            stack.x = x

    def row_of(self, stacked: Value) -> BufferRow | None:
        """Returns the row of a stack that is yet to be reduced; None if no row is, or the value is no stack."""
        for gradient in self.gradients:
            if gradient.value is stacked:
                return gradient.row
        return None

    def unstacked(self, stacked: Value, rows: Sequence[Value]) -> "FinalGradients":
        """Returns the gradients once a stack is cut into these rows, of which one is yet to be reduced.

        That row's array is of the buffer without it: it becomes a type.
        """
        gradients = []
        for gradient in self.gradients:
            if gradient.value is stacked and gradient.row is not None:
                value = rows[gradient.row.number]
                value.x = jax.ShapeDtypeStruct(value.shape, value.x.dtype)
                gradient = FinalGradient(value, gradient.held, row=None)
            gradients.append(gradient)
        return FinalGradients(self.unit, gradients)


def find_final_equation(jaxpr: Jaxpr, gradients: Mapping[int, Shard]) -> FinalEquation | None:
    """Returns the equation of a region's final unit; None if the region gains nothing by one.

    Args:
        jaxpr: the program of the region.
        gradients: which of its results are gradients, and how these are stored.
    """
    places = [i for i, eqn in enumerate(jaxpr.eqns) if _runs_units(eqn)]
    if not places:
        return None
    eqn = jaxpr.eqns[places[-1]]
    following = jaxpr.eqns[places[-1] + 1 :]
    shards = gradient_variables(jaxpr, gradients)
    if not _has_scattered(following, shards):
        return None
    # After as much work as the unit's own, such as a tower that is no unit, it is better reduced beside that.
    if _num_products(following) >= _num_products_of_unit(eqn):
        return None
    leaving = used_once_as_result(jaxpr).intersection(shards)
    unread = leaving.intersection(eqn.outvars)
    unread.update(_cut_only(jaxpr, following, leaving).intersection(eqn.outvars))
    return FinalEquation(eqn, frozenset(unread))


def _cut_only(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], leaving: Collection[Var]) -> set[Var]:
    """Returns the stacks that one of some equations cuts into rows, all of which leave, and nothing else reads.

    Layers that are modules of their own have a gradient each.
    """
    num_uses = count_uses(jaxpr)
    stacks = set()
    for eqn in eqns:
        if not cuts_into_rows(eqn):
            continue
        rows = {row for row in eqn.outvars if not isinstance(row, DropVar)}
        for stack in variables_of(eqn.invars):
            if num_uses[stack] == 1 and rows.issubset(leaving):
                stacks.add(stack)
    return stacks


def _has_scattered(eqns: Sequence[JaxprEqn], shards: Mapping[Var, Shard]) -> bool:
    """Returns whether equations compute a gradient that is reduced to shards, given all gradients of the region."""
    for eqn in eqns:
        if cuts_into_rows(eqn):
            continue  # those of units, which have reduced them
        for variable in eqn.outvars:
            if variable in shards and shards[variable].placement.dim is not None:
                return True
    return False


def _runs_units(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a unit, or has one in its programs."""
    if is_unit(eqn):
        return True
    inner_eqns = itertools.chain.from_iterable(inner.eqns for inner in jaxprs_in_params(eqn.params))
    return any(map(_runs_units, inner_eqns))


def _num_products_of_unit(eqn: JaxprEqn) -> int:
    """Returns the number of products of a unit, or of the units of one iteration of a loop."""
    return sum(_num_products(inner.eqns) for inner in jaxprs_in_params(eqn.params))


def _num_products(eqns: Sequence[JaxprEqn]) -> int:
    """Returns the number of products in equations; those in a loop count once for each iteration."""
    total = 0
    for eqn in eqns:
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            total += 1
        num_rounds = eqn.params["length"] if name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            total += num_rounds * _num_products(inner.eqns)
    return total
