"""Equations that call a program of their own: the program runs in their place."""

from collections.abc import Sequence
from typing import TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jshard.engine.rules.building_blocks import behind_barrier, materialize_all, traced
from jshard.engine.rules.registry import OperandStates, Partitioner, rule
from jshard.engine.rules.values import Value, arrays_of, in_states, with_arrays

Operand = TypeVar("Operand")

CALLS = frozenset(
    """
    remat2 jit closed_call custom_jvp_call custom_vjp_call custom_vmap_call composite custom_linear_solve linear_call
    remat_opt eval_jaxpr
    """.split()
)
"""Primitives whose equation means the program that it holds."""

_PROGRAM_PARAMS = ("jaxpr", "call_jaxpr", "call", "callee", "fwd_jaxpr")
"""The names under which primitives hold it; JAX has changed some."""


def program(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """Returns the program that a call holds, and its constants."""
    if eqn.primitive.name == "custom_linear_solve":
        return opened(eqn.params["jaxprs"].solve)
    for name in _PROGRAM_PARAMS:
        if eqn.params.get(name) is not None:
            return opened(eqn.params[name])
    raise KeyError(f"{eqn.primitive.name} has no program.")


def with_program(eqn: JaxprEqn, jaxpr: Jaxpr) -> JaxprEqn:
    """Returns a call of another program, with the operands and constants of its own; not of a linear solve."""
    for name in _PROGRAM_PARAMS:
        held = eqn.params.get(name)
        if held is not None:
            program = ClosedJaxpr(jaxpr, held.consts) if isinstance(held, ClosedJaxpr) else jaxpr
            return eqn.replace(params={**eqn.params, name: program})
    raise KeyError(f"{eqn.primitive.name} has no program.")


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """Returns a program, closed or not, and its constants."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def operands(eqn: JaxprEqn, all_operands: Sequence[Operand]) -> list[Operand]:
    """Returns those of a call's operands that its program takes.

    A linear solve holds four programs, of which only that of the solution runs. Its operands are:

        consts of matvec | of vecmat | of solve | of transpose_solve | right-hand side
                                       ^^^^^^^^                        ^^^^^^^^^^^^^^^ taken
    """
    if eqn.primitive.name != "custom_linear_solve":
        return list(all_operands)
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts = all_operands[start : start + lengths.solve]
    right_hand_side = all_operands[sum(lengths) :]
    return [*consts, *right_hand_side]


# Stored shards are passed on unread: the program inside may hold units, which gather them when they are due.
@rule(*CALLS, operands=OperandStates.ANY_OR_STORED)
def call(p: Partitioner, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Runs the program in place. Rules for derivatives have done their work: those were taken in global view."""
    if eqn.primitive.name == "remat2":
        values = _operands_behind_barrier(p, eqn, values)
    # What flows to gradients alone inside the call may stay partial inside, too.
    gradients = [i for i, variable in enumerate(eqn.outvars) if p.is_for_gradients(variable)]
    scope = eqn.params.get("name")
    # Some primitives have no name, or one that is no text.
    if not isinstance(scope, str):
        scope = eqn.primitive.name
    # Under the call's name, as JAX would lower it: profiles and audits of a model read these names.
    with jax.named_scope(scope):
        return p.run(*program(eqn), operands(eqn, values), gradients=gradients)


def _operands_behind_barrier(p: Partitioner, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Puts operands of a remat in a backward pass behind a barrier, or XLA would reuse forward's computation."""
    prevents = eqn.params["prevent_cse"]  # for all operands, or for each of them
    if isinstance(prevents, bool):
        prevents = (prevents,) * len(values)
    if not (eqn.params["differentiated"] and any(prevents)):
        return values
    # What is costly to compute twice, such as random bits, becomes an array, and is tied like one.
    values = [v if v.is_stored else p.for_inner_trace(v) for v in values]
    # Stored shards pass by: nothing computes with one before it is gathered, inside. So does what is known without
    # data, as it is cheap to compute twice.
    tied_positions = []
    for i, value in enumerate(values):
        passes_by = value.is_stored or value.is_data_free
        if prevents[i] and not passes_by:
            tied_positions.append(i)
    return behind_barrier(values, tied_positions)


@rule("compute_on", "xla_metadata_call", operands=OperandStates.ANY)
def annotated_call(p: Partitioner, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Makes the same annotation around the program on a shard."""
    # The annotated program is traced on its own: values cross into it and out of it as arrays.
    values = materialize_all(p, values)
    arrays = arrays_of(values)

    def run_on_shard(*xs: jax.Array) -> list[Value]:
        return materialize_all(p, p.run(*program(eqn), with_arrays(values, xs)))

    jaxpr, states = traced(p, run_on_shard, *arrays)
    return in_states(p.bind(eqn, arrays, jaxpr=jaxpr), states)
