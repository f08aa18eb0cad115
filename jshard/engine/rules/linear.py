"""Equations on partial operands: an equation that is linear in them is computed from the parts, and summed later."""

import math
from collections.abc import Collection, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jshard.engine.rules import calls
from jshard.engine.rules.building_blocks import same
from jshard.engine.rules.registry import Partitioner, record_of
from jshard.engine.rules.values import PARTIAL, Value, type_of, variables_of
from jshard.engine.selections import at_positions


def apply_linear(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Runs an equation on partial operands.

    Returns:
        Partial results; None if the operands must be summed before, as it is not linear in them.
    """
    # A split operand beside a partial one: the rule of the primitive splits them alike, which takes a reduce-scatter of
    # the partial one. As a partial value, the split one would be gathered.
    partial = [i for i, v in enumerate(operands) if v.is_partial]
    if any(v.is_split for v in operands) or not _is_linear_in(eqn, operands, partial):
        return None
    operands = _with_joint_operands_partial(p, eqn, operands)
    # A sum that grows is taken before, when it is small. Gradients are summed once, where they end.
    grows = _is_larger_than(eqn.outvars[0], at_positions(operands, partial))
    if grows and not p.is_for_gradients(eqn.outvars[0]):
        return None
    results = same(p, eqn, operands, PARTIAL)
    if eqn.primitive.name == "convert_element_type":
        results[0].remember_narrower(operands[0])
    return results


def _with_joint_operands_partial(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Returns operands; if the equation is linear in several of them together, as a sum is, these all as partial."""
    linear = record_of(eqn).linear
    assert linear is not None
    if not linear.is_joint:
        return operands
    operands = list(operands)
    for i in linear.positions(len(operands)):
        operands[i] = p.partial(operands[i])
    return operands


def _is_larger_than(result: Var, operands: Sequence[Value]) -> bool:
    """Returns whether a result has more elements than some operands together."""
    num_elements = sum(math.prod(operand.shape) for operand in operands)
    return math.prod(type_of(result).shape) > num_elements


def _is_linear_in(eqn: JaxprEqn, operands: Sequence[Value], partial: Sequence[int]) -> bool:
    """Returns whether an equation is linear in its partial operands, which are at these positions."""
    linear = record_of(eqn).linear
    if linear is None or not eqn.outvars:
        return False
    if not set(partial) <= set(linear.positions(len(operands))):
        return False
    if not linear.is_joint and len(partial) > 1:
        return False  # a product of sums is no sum of products
    if linear.condition is not None and not linear.condition(eqn):
        return False
    # A conversion of the parts must be the part of a conversion, for each operand. Examined for every primitive, as not
    # only `convert_element_type` changes the dtype: a product may have a wider one than its operands.
    result_dtype = type_of(eqn.outvars[0]).dtype
    return all(_keeps_sums(operands[i].x.dtype, result_dtype) for i in partial)


def _keeps_sums(old: np.dtype, new: np.dtype) -> bool:
    """Returns whether the sum of converted numbers is the converted sum: see `Linear`."""
    new_bytes = np.dtype(new).itemsize
    if jnp.issubdtype(old, jnp.inexact):
        is_quantisation = new_bytes == 1  # to a float of 8 bits
        return jnp.issubdtype(new, jnp.inexact) and not is_quantisation
    is_wider = new_bytes > np.dtype(old).itemsize
    return jnp.issubdtype(new, jnp.integer) and not is_wider  # wider ones keep what the sum of the old ones loses


def needed_elsewhere(jaxpr: Jaxpr, gradients: Collection[int]) -> set[Var]:
    """Finds the variables of a program that do not flow to its gradients alone, by linear equations alone.

    The others may stay partial even where they grow: they are summed once, as gradients.

    Args:
        jaxpr: the program.
        gradients: which of its results are gradients, by position.
    """
    # Backwards from the results: what is needed by an equation that needs it elsewhere is needed there, too.
    needed: set[Var] = set()
    for i, result in enumerate(jaxpr.outvars):
        if i not in gradients and not isinstance(result, Literal):
            needed.add(result)
    for eqn in reversed(jaxpr.eqns):
        needed |= _operands_needed(eqn, needed)
    return needed


def _operands_needed(eqn: JaxprEqn, needed: Collection[Var]) -> set[Var]:
    """Returns which operands of an equation are needed elsewhere, if some of its results are."""
    only_for_gradients = [i for i, v in enumerate(eqn.outvars) if v not in needed]
    atoms: list[Var | Literal] = list(eqn.invars)
    if eqn.primitive.name in calls.CALLS:
        # Each operand is examined by itself, by what becomes of it in the called program.
        inner, _ = calls.program(eqn)
        needed_inside = needed_elsewhere(inner, only_for_gradients)
        atoms = []
        for atom, variable in zip(calls.operands(eqn, eqn.invars), inner.invars, strict=True):
            if variable in needed_inside:
                atoms.append(atom)
    elif record_of(eqn).linear is not None and len(only_for_gradients) == len(eqn.outvars):
        # All results are parts of gradients, and linear in the operands: so are these. But what is larger is summed
        # over there, as a cotangent is in the gradient of a weight: it is no gradient yet.
        num_elements = sum(math.prod(type_of(variable).shape) for variable in eqn.outvars)
        atoms = [atom for atom in atoms if math.prod(type_of(atom).shape) > num_elements]
    return set(variables_of(atoms))
