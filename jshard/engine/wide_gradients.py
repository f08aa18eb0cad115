"""Programs whose products write gradients in the dtype in which these are summed.

The gradient of a weight is a product of narrow floats, which is summed over the devices in a wider dtype. Written in
the narrow one it is cast by a kernel of its own, as a reduce-scatter takes an array in memory:

    product -> bfloat16 in memory -> cast -> float32 in memory -> reduce-scatter

A product adds up in float32 in any case, and can write that as fast: no cast, and one rounding less.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jshard.engine.rules import calls
from jshard.engine.rules.values import count_uses, type_of, variables_of

_PRODUCT = "dot_general"
_MOVES = frozenset(["transpose", "reshape", "squeeze"])
"""Primitives that may stand between a product and the gradient: they compute nothing, in any dtype."""
_CALLS = frozenset(["jit", "remat2"])
"""Calls inside of which the product may be."""


# Cached: equal units share one program, and what is traced of it is found by its identity.
@functools.lru_cache(maxsize=4096)
def with_wide_gradients(program: ClosedJaxpr, positions: frozenset[int], dtype: np.dtype) -> ClosedJaxpr:
    """Returns a program whose products write some of its results in a wider dtype.

    Args:
        program: the program.
        positions: of the results. One that is no product, or that is also read elsewhere, stays as it is.
        dtype: the wider dtype.

    Returns:
        A program with equal operands; the program itself if none of the results is such a product.
    """
    jaxpr = _with_wide_results(program.jaxpr, positions, dtype)
    return program if jaxpr is program.jaxpr else ClosedJaxpr(jaxpr, program.consts)


@dataclasses.dataclass(frozen=True)
class _WrittenResult:
    """A result of a program, and the equation that writes it.

    Attributes:
        eqn: a product or a call.
        index: which of its results it is.
        variables: from the result of the program back to that of the equation: equal but for the order of elements.
    """

    eqn: JaxprEqn
    index: int
    variables: tuple[Var, ...]


def _with_wide_results(jaxpr: Jaxpr, positions: Collection[int], dtype: np.dtype) -> Jaxpr:
    """Returns a program with some wider results, as `with_wide_gradients` says; itself if none can be."""
    results = list(_written_results(jaxpr, positions))
    programs = _programs_of_calls(results, dtype)
    widened: dict[Var, Var] = {}
    for result in results:
        if _is_written_wide(result, programs, dtype):
            for variable in result.variables:
                widened[variable] = Var(type_of(variable).update(dtype=dtype))
    if not widened:
        return jaxpr
    eqns = [_wide_equation(eqn, widened, programs, dtype) for eqn in jaxpr.eqns]
    outvars = [_renamed(atom, widened) for atom in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _programs_of_calls(results: Sequence[_WrittenResult], dtype: np.dtype) -> dict[int, Jaxpr]:
    """Returns the programs of the calls that write results, with these wider where they can be.

    By the identity of the call's equation, as equations cannot be compared.
    """
    call_of: dict[int, JaxprEqn] = {}
    positions: dict[int, set[int]] = defaultdict(set)
    for result in results:
        if result.eqn.primitive.name in _CALLS:
            call_of[id(result.eqn)] = result.eqn
            positions[id(result.eqn)].add(result.index)
    programs = {}
    for key, call in call_of.items():
        inner, _ = calls.program(call)
        programs[key] = _with_wide_results(inner, positions[key], dtype)
    return programs


def _is_written_wide(result: _WrittenResult, programs: Mapping[int, Jaxpr], dtype: np.dtype) -> bool:
    """Returns whether the equation of a result writes it in a wider dtype, given the programs of calls."""
    program = programs.get(id(result.eqn))
    if program is None:
        return _can_be_wide(result.eqn, dtype)
    return type_of(program.outvars[result.index]).dtype == dtype


def _written_results(jaxpr: Jaxpr, positions: Collection[int]) -> Iterator[_WrittenResult]:
    """Yields the products and calls that write results, perhaps moved; other results have none."""
    equation_of: dict[Var, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        equation_of.update(dict.fromkeys(eqn.outvars, eqn))
    num_uses = count_uses(jaxpr)
    for position in positions:
        variables = []
        atom = jaxpr.outvars[position]
        # One with another use stays narrow: who reads it there expects that.
        while isinstance(atom, Var) and atom in equation_of and num_uses[atom] == 1:
            eqn = equation_of[atom]
            variables.append(atom)
            if eqn.primitive.name == _PRODUCT or eqn.primitive.name in _CALLS:
                yield _WrittenResult(eqn, eqn.outvars.index(atom), tuple(variables))
                break
            if eqn.primitive.name not in _MOVES:
                break
            atom = eqn.invars[0]


def _wide_equation(
    eqn: JaxprEqn, widened: Mapping[Var, Var], programs: Mapping[int, Jaxpr], dtype: np.dtype
) -> JaxprEqn:
    """Returns an equation with the variables that are wider."""
    if not any(variable in widened for variable in eqn.outvars):
        return eqn
    outvars = [widened.get(variable, variable) for variable in eqn.outvars]
    if eqn.primitive.name == _PRODUCT:
        return eqn.replace(outvars=outvars, params={**eqn.params, "preferred_element_type": dtype})
    if id(eqn) in programs:
        return calls.with_program(eqn, programs[id(eqn)]).replace(outvars=outvars)
    return eqn.replace(invars=[widened[variable] for variable in variables_of(eqn.invars)], outvars=outvars)


def _renamed(atom: Var | Literal, widened: Mapping[Var, Var]) -> Var | Literal:
    if isinstance(atom, Literal):
        return atom
    return widened.get(atom, atom)


def _can_be_wide(product: JaxprEqn, dtype: np.dtype) -> bool:
    """Returns whether a product that writes a narrower float can write another dtype."""
    written = type_of(product.outvars[0]).dtype
    is_narrower = jnp.issubdtype(written, jnp.floating) and written.itemsize < dtype.itemsize
    has_algorithm = isinstance(product.params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset)
    return is_narrower and not has_algorithm  # an algorithm of the user says what is written
