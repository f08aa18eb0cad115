"""The final unit of backward: its gradients are reduced once those of the region's own parameters are.

What is used before all units, such as an embedding, has its gradient computed after them. Nothing would be left to
compute beside its reduction, which is the largest of many models. But nothing else needs the gradients of the unit
before it. They are computed beside it, and only their reduction is left at the end:

    compute  :  unit 1  :  unit 0: cotangents  :  embedding  :  unit 0: gradients  :
    links    :          :  reduce 1            :             :  reduce embedding   :  reduce 0

So no barrier ties these gradients to the cotangents of their unit, as it does those of other units. One ties them to
the reduced gradients of the region; before that the compiler computes them when it likes.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jshard.engine.rules import Value
from jshard.engine.schedule.program_schedule import HeldGradient
from jshard.engine.schedule.stacked_rows import laid_out_by_dims, written
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

    def written(self, row: jax.Array) -> jax.Array:
        """Returns the result with the row."""
        rows = [laid_out_by_dims(row)]
        (result,) = written([self.buffer], rows, jnp.int32(self.number), (self.is_sum,))
        return result


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

    def set_reduced(self, shard: jax.Array) -> None:
        """Gives the value its array."""
        self.value.x = shard if self.row is None else self.row.written(shard)


@dataclasses.dataclass(frozen=True)
class FinalGradients:
    """The gradients of the final unit.

    Attributes:
        unit: the unit.
        gradients: those that are reduced later.
    """

    unit: UnitEquation
    gradients: list[FinalGradient]

    def is_any_of(self, values: Collection[Value]) -> bool:
        """Returns whether one is among some values."""
        own = {gradient.value for gradient in self.gradients}
        return not own.isdisjoint(values)

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


def final_equation_of(jaxpr: Jaxpr) -> JaxprEqn | None:
    """Returns the last equation of a program that is a unit, or runs a program that has some."""
    for eqn in reversed(jaxpr.eqns):
        if _runs_units(eqn):
            return eqn
    return None


def _runs_units(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a unit, or has one in its programs."""
    if is_unit(eqn):
        return True
    return any(final_equation_of(inner) is not None for inner in jaxprs_in_params(eqn.params))
