"""Equality of programs.

Equal layers are equal programs, though Python ran for each of them: one derivative and one partitioning are enough.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from jshard import _compat
from jshard.engine import rules
from jshard.engine.program import Atom, Program, abstract
from jshard.engine.unit_call import UnitCall
from jshard.engine.values import are_identical


def shared(program: Program, alike: list[Program]) -> tuple[Program, list[np.generic]]:
    """Replaces a program by an equal one that was seen before.

    Args:
        program: the program of a call.
        alike: the programs seen so far. This one is added if it equals none of them.

    Returns:
        The program to call, and further operands for it: the numbers by which it differs from its equals.
    """
    # One after another: `alike` has the programs of one class, method and number of equations, of which there are few.
    jaxpr, numbers = _without_key_data(program.jaxpr)
    for candidate in alike:
        # What forward keeps depends on remat, which is no part of the equations.
        if candidate.remat == program.remat and are_equal(candidate.jaxpr, jaxpr):
            return candidate, numbers
    new = Program(jaxpr, program.num_params, remat=program.remat)
    alike.append(new)
    return new, numbers


def _without_key_data(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[np.generic]]:
    """Turns the numbers that a program folds into its random keys into further operands of it.

    Linen folds the path of a module into its keys. With these numbers inside, no two layers would be equal.
    """
    jaxpr = closed.jaxpr
    variables: list[jex.Var] = []
    numbers: list[np.generic] = []
    equations: list[jex.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_fold_in" and isinstance(eqn.invars[1], jex.Literal):
            key, literal = eqn.invars
            variable = jex.Var(literal.aval)
            variables.append(variable)
            dtype = abstract(literal).dtype
            numbers.append(dtype.type(literal.val))
            eqn = eqn.replace(invars=[key, variable])
        equations.append(eqn)
    if not numbers:
        return closed, []
    opened = jaxpr.replace(invars=[*jaxpr.invars, *variables], eqns=equations)
    return jex.ClosedJaxpr(opened, closed.consts), numbers


def are_equal(a: jex.Jaxpr | jex.ClosedJaxpr, b: jex.Jaxpr | jex.ClosedJaxpr) -> bool:
    """Returns whether two programs have the same equations, with the same names and settings, in the same order."""
    a_jaxpr, a_consts = rules.opened(a)
    b_jaxpr, b_consts = rules.opened(b)
    if len(a_jaxpr.eqns) != len(b_jaxpr.eqns):
        return False
    # Constants are compared by identity: comparing their values would wait for the device.
    if not are_identical(a_consts, b_consts):
        return False
    return a_jaxpr is b_jaxpr or _ProgramComparison().programs_equal(a_jaxpr, b_jaxpr)


class _ProgramComparison:
    """Compares two programs, equation by equation.

    Variables have no names: two of them are the same if they were bound at the same place of both programs.
    """

    def __init__(self) -> None:
        self._counterparts: dict[jex.Var, jex.Var] = {}

    def programs_equal(self, a: jex.Jaxpr, b: jex.Jaxpr) -> bool:
        if not self._bind([*a.constvars, *a.invars], [*b.constvars, *b.invars]):
            return False
        for a_eqn, b_eqn in zip(a.eqns, b.eqns, strict=True):
            if not self._equations_equal(a_eqn, b_eqn):
                return False
        return self._operands_equal(a.outvars, b.outvars)

    def _equations_equal(self, a: jex.JaxprEqn, b: jex.JaxprEqn) -> bool:
        # The cheap comparisons come first: most programs differ in these.
        if a.primitive is not b.primitive or not self._operands_equal(a.invars, b.invars):
            return False
        if a.params.keys() != b.params.keys() or _compat.equation_setting(a) != _compat.equation_setting(b):
            return False
        for name, value in a.params.items():
            if not parameters_equal(value, b.params[name]):
                return False
        return self._bind(a.outvars, b.outvars)

    def _bind(self, a: Sequence[jex.Var], b: Sequence[jex.Var]) -> bool:
        """Records that variables correspond to each other; returns whether their types are equal."""
        if len(a) != len(b):
            return False
        self._counterparts.update(zip(a, b, strict=True))
        return all(x.aval == y.aval for x, y in zip(a, b, strict=True))

    def _operands_equal(self, a: Sequence[Atom], b: Sequence[Atom]) -> bool:
        return len(a) == len(b) and all(map(self._is_same_operand, a, b))

    def _is_same_operand(self, x: Atom, y: Atom) -> bool:
        if isinstance(x, jex.Literal):
            return isinstance(y, jex.Literal) and literals_equal(x, y)
        return self._counterparts.get(x) is y


def literals_equal(x: jex.Literal, y: jex.Literal) -> bool:
    """Returns whether two literals are the same number of the same type."""
    # By their bits: NaN equals itself, and 0.0 differs from -0.0.
    return x.aval == y.aval and np.asarray(x.val).tobytes() == np.asarray(y.val).tobytes()


def parameters_equal(x: Any, y: Any) -> bool:
    """Returns whether two parameters of equations are equal; False where they cannot be compared."""
    # A wrong False costs a second trace, a wrong True wrong numbers. So what is of unknown equality differs.
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr)):
        return are_equal(x, y)
    if isinstance(x, UnitCall):
        return x.is_like(y)  # their programs are a parameter of their own, which is compared as well
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(parameters_equal, x, y))
    try:
        return bool(x == y) or _compat.is_same_rule(x, y)
    except (TypeError, ValueError):
        return False
